"""Wake-ups: what the numbers on a topic's wake-up channel say.

A slot's index: something in it can be taken earlier. A negative number is one of the two below.
"""

from __future__ import annotations

from django_rmq.core.model.keys import MAX_SLOTS


def paused(slot: int) -> int:
    """Return the number that says: the slot was paused."""
    return -1 - slot


def look_again(slot: int) -> int:
    """Return the number that says: ask again about what is in hand of the slot, because some of it is cancelled."""
    return -1 - MAX_SLOTS - slot


def read(told: int) -> tuple[str, int]:
    """Return what a number says (``wake``, ``paused`` or ``look_again``), and the slot."""
    if told >= 0:
        return "wake", told
    slot = -1 - told
    return ("paused", slot) if slot < MAX_SLOTS else ("look_again", slot - MAX_SLOTS)


__all__ = ["look_again", "paused", "read"]
