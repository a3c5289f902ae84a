"""The limits that a message brings along in its envelope: how often it may be retried, and its time-out."""

from __future__ import annotations

import re

from tests.oracle.slot import Slot

_LIMITS = re.compile(rb'\d+ \{"!":"(\d*) (\d*)"')


def own_retries(slot: Slot, envelope: bytes | None) -> int:
    """Return how often a message may be tried again: at most as often as its topic allows."""
    match = _LIMITS.match(envelope or b"")
    return min(int(match[1]), slot.max_retries) if match and match[1] else slot.max_retries


def own_timeout(envelope: bytes | None) -> int | None:
    """Return the time-out of a message in seconds. None: that of its topic."""
    match = _LIMITS.match(envelope or b"")
    return int(match[2]) if match and match[2] else None


def stamp(slot: Slot, timeout: int | None, left: float) -> float:
    """Return the score in Prepare of a delivery. One with a shorter time-out than its topic's looks older than it is."""
    return float((slot.now_s - shortened_by(timeout, slot.timeout)) * 1000 + left)


def shortened_by(timeout: int | None, topics: int) -> int:
    """Return by how many seconds a time-out is shorter than that of its topic."""
    return 0 if timeout is None else max(0, topics - timeout)


__all__ = ["own_retries", "own_timeout", "shortened_by", "stamp"]
