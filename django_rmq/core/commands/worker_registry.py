"""Calls about workers and their assignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django_rmq.core.commands.codecs import text, word
from django_rmq.core.commands.script_call import Call
from django_rmq.core.commands.script_keys import OfWorkers
from django_rmq.core.model.worker_records import Beat, Roster, WorkerSession


def _beat(known_members: str, known_number: str) -> Callable[[list[Any]], Beat]:
    def parse(reply: list[Any]) -> Beat:
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


def _roster(reply: list[Any]) -> Roster:
    now, members, number, basis, plan, rows, records = reply
    sessions = [
        WorkerSession(text(worker), float(ends), record or b"")
        for worker, ends, record in zip(rows[::2], rows[1::2], records, strict=True)
    ]
    return Roster(int(now), text(members), text(number), text(basis), plan, sessions)


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


def roster() -> Call[Roster]:
    """Return all workers and the assignment, without joining."""
    return Call("workers/roster", OfWorkers(), (), _roster)
