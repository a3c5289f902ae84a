"""Places in the line of a fifo topic: milliseconds, and a sequence in steps of 1/1024; no two in a slot are equal."""

from __future__ import annotations

import math

from tests.oracle.numbers import score_text
from tests.oracle.slot import Slot

STEP = 1 / 1024
PROBES = 10_000
"""How many milliseconds a delayed send looks through for a free place, at most."""


def last_place(slot: Slot) -> float:
    """Return the last place given out; 0 if a clock that was set back would delay an empty slot."""
    last = float(slot.control.get(b"last_place", 0))
    holds = slot.store or slot.retry or slot.prepare or slot.claim
    return 0.0 if last >= slot.now_ms and not holds else last


def next_places(slot: Slot, count: int) -> list[float]:
    """Return places behind all others that are due at once: in the lower half of a millisecond."""
    last, places = last_place(slot), []
    for _ in range(count):
        last = max(slot.now_ms, last + STEP)
        if last % 1 >= 0.5:
            last = math.floor(last) + 1
        places.append(float(last))
    slot.control[b"last_place"] = score_text(last).encode()
    return places


def later_places(slot: Slot, delay_ms: int, count: int) -> list[float]:
    """Return places that are due after a delay."""
    places: list[float] = []
    for _ in range(count):
        places.append(later_place(slot, slot.now_ms + delay_ms, places[-1] if places else 0.0))
    return places


def later_place(slot: Slot, due: float, behind: float = 0.0) -> float:
    """Return a place in the upper half of a millisecond, behind what is there.

    ``behind``: the last place that the same call gave out.
    """
    first = math.floor(max(due, last_place(slot)))
    for at in range(first, first + PROBES + 1):
        there = [score for score in slot.store.values() if at + 0.5 <= score < at + 1]
        top = max([0.0, behind, *there])
        if top < at + 0.5:
            return at + 0.5
        if top + STEP < at + 1:
            return top + STEP
    return float(first + PROBES + 1)
