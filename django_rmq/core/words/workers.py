"""What workers say of themselves, and what each may take."""

from __future__ import annotations

from typing import NamedTuple


class Allowance(NamedTuple):
    """What one worker may do of what its topic's limits leave."""

    tokens: int
    """Deliveries that may begin; what is not used is given back. As many as asked for where no rate is limited."""
    wait_us: int
    """Fewer than asked for: until there is another."""
    permits: int
    """While as many messages are in use, nothing more may be taken."""
    others_wait: bool
    """Another worker could use more than it has."""


class Beat(NamedTuple):
    """What a worker hears when it renews its session."""

    status: str
    """ok, expired, duplicate or full."""
    members: str = ""
    """The version of the membership."""
    number: str = ""
    """The number of the assignment; empty: there is none."""
    first_end_ms: int = 0
    """ms until the first session ends, if nobody renews it."""
    basis: str = ""
    """Only with ``plan``: the version of the membership that it was made for."""
    plan: bytes | None = None
    """None: the one that the worker knows."""
    workers: dict[str, bytes] | None = None
    """Worker -> record. None: those that the worker knows."""
    rival: bytes = b""
    """duplicate: the record of the worker that has this id."""


class Session(NamedTuple):
    """One worker as Redis knows it."""

    worker: str
    ends_ms: float
    record: bytes


class Roster(NamedTuple):
    """Everything about workers and assignment, read in one instant."""

    now_ms: int
    members: str
    number: str
    basis: str
    plan: bytes
    sessions: list[Session]
