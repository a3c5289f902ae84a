"""Calls about the workers that are there: their sessions, and the assignment of slots to them."""

from __future__ import annotations

from collections.abc import Callable

from django_rmq.core.commands.script_call import Call, OfWorkers, Reply, text, word
from django_rmq.core.model.replies import Beat, Roster, WorkerSession


def _beat(known_members: str, known_number: str) -> Callable[[list[Reply]], Beat]:
    def parse(reply: list[Reply]) -> Beat:
        status = reply[0].decode()
        if status != "ok":
            return Beat(status, rival=reply[1] if len(reply) > 1 else b"")
        members, number = text(reply[1]), text(reply[2])
        workers = {text(worker): record or b"" for worker, record in zip(reply[6], reply[7], strict=True)}
        return Beat(
            status,
            members,
            number,
            int(reply[3]),
            text(reply[4]),
            reply[5] if number != known_number else None,
            workers if members != known_members else None,
        )

    return parse


def _assigned(reply: list[bytes]) -> str | None:
    return reply[1].decode() if reply[0] == b"ok" else None


def _roster(known: Roster) -> Callable[[list[Reply]], Roster]:
    known_records = {one.worker: one.record for one in known.sessions}

    def parse(reply: list[Reply]) -> Roster:
        now, members, number, basis, plan, rows, records = reply
        workers = [text(worker) for worker in rows[::2]]
        if members and text(members) == known.members:
            records = [known_records.get(worker) for worker in workers]
        if number and text(number) == known.number:
            plan = known.plan
        sessions = [
            WorkerSession(worker, float(ends), record or b"")
            for worker, ends, record in zip(workers, rows[1::2], records, strict=True)
        ]
        return Roster(int(now), text(members), text(number), text(basis), plan, sessions)

    return parse


def beat(
    worker: str,
    token: str,
    session_ms: int,
    *,
    record: str = "",
    known_members: str = "",
    known_number: str = "",
) -> Call[Beat]:
    """Renew the session of ``worker``, or join with a ``record`` that begins with ``token``."""
    return Call(
        "workers/beat",
        OfWorkers(),
        (worker, token, record, session_ms, known_members, known_number),
        _beat(known_members, known_number),
    )


def leave(worker: str, token: str) -> Call[str]:
    """End the session of ``worker``. Answers left or absent."""
    return Call("workers/leave", OfWorkers(), (worker, token), word)


def assign(members: str, number: str, plan: str) -> Call[str | None]:
    """Write ``plan`` if ``members`` and ``number`` are still current; return its number, otherwise None."""
    return Call("workers/assign", OfWorkers(), (members, number, plan), _assigned)


_NO_ROSTER = Roster(0, "", "", "", b"", [])


def roster(known: Roster = _NO_ROSTER) -> Call[Roster]:
    """Return all workers and the assignment, without joining.

    Of the records and the plan, which are long and change rarely, Redis sends only what is newer than in ``known``.
    """
    return Call("workers/roster", OfWorkers(), (known.members, known.number), _roster(known))
