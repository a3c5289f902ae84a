"""Debounced messages: each send starts the wait again, until a deadline that the fraction of the score gives.

The deadline is a multiple of a unit. The fraction, in 1/1024, is its number of units modulo 1,024.
"""

from __future__ import annotations

import math

from tests.oracle.slot import Slot

LARGEST = 8_796_093_022_207
"""The largest score with ten bits behind the point."""


def first_due(slot: Slot, range_ms: int) -> float:
    """Return the score of a first send."""
    return debounced(slot, range_ms, last_units(slot))


def prolonged(slot: Slot, range_ms: int, score: float) -> float:
    """Return the score of a message that waits with ``score`` and is sent again."""
    scored = max(0.0, min(LARGEST, score))
    due = math.floor(scored)
    first = -(due // -unit(slot))
    units = first + (math.floor((scored - due) * 1024) - first) % 1024
    return debounced(slot, range_ms, min(units, last_units(slot)))


def debounced(slot: Slot, range_ms: int, units: int) -> float:
    """Return the score of a message whose deadline is ``units``."""
    return min(slot.now_ms + range_ms, units * unit(slot)) + units % 1024 / 1024


def last_units(slot: Slot) -> int:
    """Return the latest deadline of a message that is sent now."""
    return (slot.now_ms + slot.topic.debounce_ms) // unit(slot)


def unit(slot: Slot) -> int:
    """Return the ms of a unit: a thousandth of the longest wait."""
    return max(1, -(slot.topic.debounce_ms // -1000))


__all__ = ["first_due", "prolonged"]
