"""Sleeping and waking: a consumer that finds nothing sleeps until its due time or a wake-up."""

from __future__ import annotations

import math

from django_rmq.core.model.limits import NEVER
from tests.oracle.bounds import GATE
from tests.oracle.numbers import bounded, ceil, floor
from tests.oracle.scores import is_due
from tests.oracle.slot import Slot


def next_due(slot: Slot, *, at_once: bool, awaits_ends: bool = False) -> int | None:
    """Return the earliest time (ms) at which asking again can help. None: there is none.

    ``awaits_ends``: leave out the time-outs of deliveries, which end before.
    """
    dues: list[float] = [slot.now_ms] if at_once else []
    if not slot.topic.is_priority:
        whole = math.floor if slot.topic.is_fifo else math.ceil
        dues += sorted(whole(min(s, NEVER)) for s in slot.store.values() if not is_due(slot, s))[:1]
    if slot.retry:
        dues.append(floor(min(slot.retry.values())))
    if slot.prepare and not awaits_ends:
        dues.append((floor(min(slot.prepare.values()) / 1000) + slot.timeout + 1) * 1000)
    dues += [ceil(ends) for ends in slot.claimants.values()]
    return bounded(min(dues), 0, NEVER) if dues else None


def sleep_until(slot: Slot, due: int) -> None:
    """Record until when only a wake-up reaches the caller."""
    slot.control[b"sleeping_until"] = b"%d" % due


def wake(slot: Slot, due: float | None) -> None:
    """Wake a caller that sleeps past ``due``, once: the next one to fall asleep writes ``sleeping_until`` again."""
    sleeping_until = slot.control.get(b"sleeping_until")
    if sleeping_until is not None and due is not None and due < int(sleeping_until):
        del slot.control[b"sleeping_until"]
        slot.publish()


def wake_at_gate(slot: Slot, due: float | None, *, ended: bool) -> None:
    """Wake for ``due``, or at once if a delivery has ended and a caller waits at a gate that is now open."""
    waits = slot.control.get(b"sleeping_until") == b"%d" % GATE
    wake(slot, 0 if ended and waits and len(slot.prepare) < slot.room else due)


def earlier(due: int | None, other: int | None) -> int | None:
    """Return the earlier of two times. None: there is none."""
    return other if due is None else due if other is None else min(due, other)


def earliest(dues: list[float | None]) -> float | None:
    """Return the earliest of the given times."""
    return min((due for due in dues if due is not None), default=None)


def note_undrained(slot: Slot) -> None:
    """Record since when Store of a priority topic has not been empty, because priorities contain no time."""
    if not slot.topic.is_priority:
        return
    if slot.store:
        slot.control.setdefault(b"undrained_since", b"%d" % slot.now_ms)
    else:
        slot.control.pop(b"undrained_since", None)
