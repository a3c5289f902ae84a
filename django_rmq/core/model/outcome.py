"""What became of messages, as topics with OUTCOME_RETENTION note it."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

MOST = 10_000
"""The number of outcomes that one slot keeps."""

MAX_TEXT = 200
"""The number of bytes of a text about progress that are kept."""


def digest(member: bytes) -> bytes:
    """Return what stands for a member whose outcome is noted: a body may be long, and need not be kept."""
    return shortened(hashlib.sha1(member, usedforsecurity=False).digest())


def shortened(sha1: bytes) -> bytes:
    """Return the same for a member of which the SHA-1 is known."""
    return sha1.hex()[:24].encode()


class Progress(NamedTuple):
    """How far a delivery had got, as its listener reported."""

    receipt: int
    fraction: float
    """From 0 to 1."""
    reported_ms: int
    text: str


class Outcome(NamedTuple):
    """How a message ended."""

    state: str
    """done, dead, removed or cancelled."""
    reason: str
    """dead: failed, timed_out, overran, undecodable, rejected, buried or lapsed. Otherwise empty."""
    attempts: int
    """Its deliveries that failed or succeeded since it last ended."""
    delivered_ms: int | None
    """When the delivery began in which it ended. None: it ended without one, or that is not known."""
    ended_ms: int
    error_class: str
    """The class of its last error, if that has one."""
    worker: str
    """Who took from the slot last when it ended. Empty: it ended without a delivery."""


def parse(raw: bytes) -> Progress | Outcome:
    """Return the meaning of a record. Raises ``ValueError`` if it has none."""
    head, _, rest = raw.partition(b"\n")
    state, *parts = head.decode().split(" ")
    said = rest.decode(errors="replace")
    if state == "running":
        receipt, thousandths, reported_ms = map(int, parts)
        return Progress(receipt, thousandths / 1000, reported_ms, said)
    reason, attempts, delivered_ms, ended_ms, error_class = parts
    return Outcome(
        state,
        "" if reason == "-" else reason,
        int(attempts),
        int(delivered_ms) or None,
        int(ended_ms),
        error_class,
        said,
    )
