"""How durable the writes of a connection are: the commands that wait for it, and their answers."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from django_rmq.core.model.send_results import Confirmed, Durability


def durability_commands(wanted: Durability, connection: Any) -> list[tuple[Any, ...]]:
    """Return the commands that wait, at the end of a connection's writes, until these are as durable as wanted."""
    # Each has to end well within the socket time-out.
    ms = int((connection.socket_timeout or 1.0) * 400)
    commands: list[tuple[Any, ...]] = []
    if wanted.replicas:
        commands.append(("WAIT", wanted.replicas, ms))
    if wanted.fsync:
        commands.append(("WAITAOF", 1, 0, ms))
    return commands


def read_confirmed(wanted: Durability, connection: Any) -> Confirmed:
    """Read the answers of ``durability_commands``. What the server cannot or may not report is unknown."""
    replicas: int | None = None
    fsynced: bool | None = None
    if wanted.replicas:
        try:
            replicas = int(connection.read_response())
        except ResponseError:
            pass
    if wanted.fsync:
        try:
            fsynced = connection.read_response()[0] >= 1
        except ResponseError:
            fsynced = _syncs_always(connection)
    return Confirmed(replicas, fsynced)


def _syncs_always(connection: Any) -> bool:
    """Return whether a server without WAITAOF (before 7.2) answers only after its writes are on disk."""
    found = []
    for name in ("appendonly", "appendfsync"):
        connection.send_command("CONFIG", "GET", name)
        try:
            found.append(connection.read_response()[1])
        except (ResponseError, IndexError):
            found.append(b"")
    return found == [b"yes", b"always"]
