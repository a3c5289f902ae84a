"""The slot's own MAX_RATE: a bucket of a tenth of a second, and of one delivery at least."""

from __future__ import annotations

from tests.oracle.slot import Slot


def emptied_at(slot: Slot) -> int:
    """Return when (µs) the bucket was last empty, as if it had filled from then on without an end."""
    depth = max(slot.topic.slot_each_us, 100_000)
    empty = int(slot.control.get(b"spent_us", 0))
    if empty > slot.now_us + depth:  # the clock was set back in the meantime
        empty = 0
    return max(empty, slot.now_us - depth)


def pace(slot: Slot) -> tuple[int, int]:
    """Return how many messages may be delivered now, and the ms at which there is one more."""
    empty, each = emptied_at(slot), slot.topic.slot_each_us
    return (slot.now_us - empty) // each, -((empty + each) // -1000)


def spend(slot: Slot, messages: int) -> int | None:
    """Spend deliveries. Return the ms at which there is another; None: there is one now."""
    slot.control[b"spent_us"] = b"%d" % (emptied_at(slot) + messages * slot.topic.slot_each_us)
    left, at = pace(slot)
    return at if left < 1 else None


__all__ = ["pace", "spend"]
