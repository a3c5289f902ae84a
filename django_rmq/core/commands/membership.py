"""Calls about the workers that are there: their sessions, and the assignment of slots to them."""

from __future__ import annotations

from collections.abc import Callable

from django_rmq.core.commands.script_call import Call, OfWorkers, Reply, text, word
from django_rmq.core.model.replies import Beat, Roster, WorkerSession


def _beat(known_members_version: str, known_plan_version: str) -> Callable[[list[Reply]], Beat]:
    def parse(reply: list[Reply]) -> Beat:
        # As ``beat`` in workers.lua returns it: status, versions of the members and of the plan, ms until the first session
        # ends, basis of the plan, plan, ids of the workers, their records. Any other status is alone, or before a rival's record.
        status = reply[0].decode()
        if status != "ok":
            return Beat(status, rival=reply[1] if len(reply) > 1 else b"")
        members_version, plan_version = text(reply[1]), text(reply[2])
        workers = {text(worker): record or b"" for worker, record in zip(reply[6], reply[7], strict=True)}
        return Beat(
            status,
            members_version,
            plan_version,
            int(reply[3]),
            text(reply[4]),
            reply[5] if plan_version != known_plan_version else None,
            workers if members_version != known_members_version else None,
        )

    return parse


def _assigned(reply: list[bytes]) -> str | None:
    return reply[1].decode() if reply[0] == b"ok" else None


def _roster(known: Roster) -> Callable[[list[Reply]], Roster]:
    known_records = {one.worker: one.record for one in known.sessions}

    def parse(reply: list[Reply]) -> Roster:
        now, members_version, plan_version, basis, plan, rows, records = reply
        workers = [text(worker) for worker in rows[::2]]
        if members_version and text(members_version) == known.members_version:
            records = [known_records.get(worker) for worker in workers]
        if plan_version and text(plan_version) == known.plan_version:
            plan = known.plan
        sessions = [
            WorkerSession(worker, float(ends), record or b"")
            for worker, ends, record in zip(workers, rows[1::2], records, strict=True)
        ]
        return Roster(int(now), text(members_version), text(plan_version), text(basis), plan, sessions)

    return parse


def beat(
    worker: str,
    token: str,
    session_ms: int,
    *,
    record: str = "",
    known_members_version: str = "",
    known_plan_version: str = "",
) -> Call[Beat]:
    """Renew the session of ``worker``, or join with a ``record`` that begins with ``token``."""
    return Call(
        "workers/beat",
        OfWorkers(),
        (worker, token, record, session_ms, known_members_version, known_plan_version),
        _beat(known_members_version, known_plan_version),
    )


def leave(worker: str, token: str) -> Call[str]:
    """End the session of ``worker``. Answers left or absent."""
    return Call("workers/leave", OfWorkers(), (worker, token), word)


def assign(members_version: str, plan_version: str, plan: str) -> Call[str | None]:
    """Write ``plan`` if both versions are still current; return its own version, otherwise None."""
    return Call("workers/assign", OfWorkers(), (members_version, plan_version, plan), _assigned)


_NO_ROSTER = Roster(0, "", "", "", b"", [])


def roster(known: Roster = _NO_ROSTER) -> Call[Roster]:
    """Return all workers and the assignment, without joining.

    Of the records and the plan, which are long and change rarely, Redis sends only what is newer than in ``known``.
    """
    return Call("workers/roster", OfWorkers(), (known.members_version, known.plan_version), _roster(known))
