"""Workers and their assignment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from django_rmq.core.model.keys import worker_keys, workers_channel
from django_rmq.core.model.replies import Beat, Roster, WorkerSession
from tests.oracle.keyspace import Hash, Memory, SortedSet


class Workers(NamedTuple):
    """The state of workers and assignment at one instant."""

    memory: Memory
    micros: int
    sessions: SortedSet
    """Worker -> ms when its session ends."""
    records: Hash
    """Worker -> its token and its record."""
    assignment: Hash

    @property
    def now_ms(self) -> int:
        return self.micros // 1000

    def is_ours(self, worker: bytes, token: str) -> bool:
        """Return whether the record of ``worker`` begins with this token."""
        return self.records.get(worker, b"").startswith(token.encode()) and worker in self.records

    def text(self, field: bytes) -> str:
        return self.assignment.get(field, b"").decode()

    def change(self, field: bytes) -> str:
        """Give ``field`` a version that it never had, not even before everything was wiped, and publish it."""
        try:
            version = max(self.micros, int(self.assignment.get(field, b"0")) + 1)
        except ValueError:
            version = self.micros
        version = version if version < 1 << 53 else self.micros
        self.assignment[field] = b"%d" % version
        self.memory.channels.publish(workers_channel(self.memory.prefix), ("", version))
        return str(version)


@contextmanager
def _opened(memory: Memory) -> Iterator[Workers]:
    with memory.lock:
        keys = worker_keys(memory.prefix)
        found = Workers(
            memory,
            memory.micros(),
            memory.get(keys.sessions, SortedSet),
            memory.get(keys.workers, Hash),
            memory.get(keys.assignment, Hash),
        )
        yield found
        memory.keep(keys.sessions, found.sessions)
        memory.keep(keys.workers, found.records)
        memory.keep(keys.assignment, found.assignment)


def beat(
    memory: Memory,
    worker: str,
    token: str,
    record: str,
    session_ms: int,
    known_members_version: str,
    known_plan_version: str,
) -> Beat:
    with _opened(memory) as found:
        name, now_ms = worker.encode(), found.now_ms
        known, ends = found.records.get(name), found.sessions.get(name)
        ours = found.is_ours(name, token)
        if known is not None and not ours and ends is not None and ends > now_ms:
            return Beat("duplicate", rival=known)
        if not record and not (ours and ends is not None):
            return Beat("expired")
        changed = _end_sessions(found, name, session_ms) or ends is None or not ours
        if ends is None and len(found.sessions) >= 2000:
            return Beat("full")
        found.sessions[name] = now_ms + session_ms
        if record and known != record.encode():
            found.records[name] = record.encode()
            changed = True
        if changed or b"members" not in found.assignment:
            found.change(b"members")
        members, number = found.text(b"members"), found.text(b"number")
        others = {other.decode(): found.records.get(other, b"") for other, _ in found.sessions.rows()[:2000]}
        return Beat(
            "ok",
            members,
            number,
            int(max(0, min(*found.sessions.values(), now_ms + session_ms) - now_ms)),
            found.text(b"basis") if number != known_plan_version else "",
            found.assignment.get(b"plan", b"") if number != known_plan_version else None,
            others if members != known_members_version else None,
        )


def _end_sessions(found: Workers, name: bytes, session_ms: int) -> bool:
    """End the sessions that are over, except for that of ``name``; return whether there were any.

    A session that would end in more than an hour starts again, because the clock was set back.
    """
    rows, now_ms = found.sessions.rows(), found.now_ms
    over = [other for other, end in rows if end <= now_ms][:100]
    ended = [other for other in over if other != name]
    for other in ended:
        del found.sessions[other]
        found.records.pop(other, None)
    for other in [other for other, end in rows if end >= now_ms + 3_600_000][:100]:
        found.sessions[other] = now_ms + session_ms
    return bool(ended)


def leave(memory: Memory, worker: str, token: str) -> str:
    with _opened(memory) as found:
        if not found.is_ours(worker.encode(), token):
            return "absent"
        found.sessions.pop(worker.encode(), None)
        del found.records[worker.encode()]
        found.change(b"members")
        return "left"


def assign(memory: Memory, members: str, number: str, plan: str) -> str | None:
    with _opened(memory) as found:
        if (found.text(b"members"), found.text(b"number")) != (members, number):
            return None
        found.assignment[b"basis"], found.assignment[b"plan"] = members.encode(), plan.encode()
        return found.change(b"number")


def roster(memory: Memory, _known_members_version: str, _known_plan_version: str) -> Roster:
    with _opened(memory) as found:
        rows = [
            WorkerSession(worker.decode(), ends, found.records.get(worker, b""))
            for worker, ends in found.sessions.rows()[:2000]
        ]
        members, number, basis = (found.text(name) for name in (b"members", b"number", b"basis"))
        return Roster(found.now_ms, members, number, basis, found.assignment.get(b"plan", b""), rows)
