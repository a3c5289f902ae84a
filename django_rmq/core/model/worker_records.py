"""Records of workers, and the share of the limits that each may use."""

from __future__ import annotations

from typing import NamedTuple


class Allowance(NamedTuple):
    """The share of its topic's limits that one worker may use."""

    tokens: int
    """The number of deliveries that may begin; unused ones are given back. Equals the request if no rate is
    limited."""
    wait_us: int
    """If there are fewer than requested: the time in microseconds until the next one."""
    permits: int
    """The number of messages in use at which the worker must not take more."""
    others_wait: bool
    """Whether another worker could use more than it has."""


class Beat(NamedTuple):
    """The answer to a worker that renews its session."""

    status: str
    """ok, expired, duplicate or full."""
    members: str = ""
    """The version of the membership."""
    number: str = ""
    """The number of the assignment. Empty: there is none."""
    first_end_ms: int = 0
    """The time in ms until the first session ends if it is not renewed."""
    basis: str = ""
    """The version of the membership for which the plan was made; only with ``plan``."""
    plan: bytes | None = None
    """The plan. None: the worker has the current one."""
    workers: dict[str, bytes] | None = None
    """Worker -> record. None: the worker has the current ones."""
    rival: bytes = b""
    """For duplicate: the record of the worker that has this id."""


class WorkerSession(NamedTuple):
    """One worker as Redis knows it."""

    worker: str
    ends_ms: float
    record: bytes


class Roster(NamedTuple):
    """All workers and the assignment, read atomically."""

    now_ms: int
    members: str
    number: str
    basis: str
    plan: bytes
    sessions: list[WorkerSession]
