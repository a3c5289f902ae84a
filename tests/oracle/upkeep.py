"""The upkeep of a slot: deliveries that time out, and messages whose back-off is over."""

from __future__ import annotations

import math
from typing import NamedTuple

from django_rmq.core.model.limits import BATCH, MAX_RETRIES_LIMIT
from tests.oracle.failing import end_failed, release_one
from tests.oracle.holding import UPKEEP, end_unleased_claim
from tests.oracle.numbers import bounded
from tests.oracle.scores import fraction, retry_score
from tests.oracle.slot import CLAIMING, ENDING, Slot, on
from tests.oracle.waking import earliest, note_undrained, wake, wake_at_gate


class Upkeep(NamedTuple):
    """The upkeep done before a prepare or a claim."""

    timed_out: int
    due: float | None
    """When a message that it returned can be taken again."""
    is_behind: bool
    """Whether there may be more to do."""


def keep_up(slot: Slot, limit: int) -> Upkeep:
    """Do upkeep for as many messages as are requested, and for 400 at most."""
    # Callers that do not know the topic's settings read them here.
    slot.control[b"slots"] = b"%d" % slot.topic.slots
    slot.control[b"timeout"] = b"%d" % slot.timeout
    slot.control[b"max_retries"] = b"%d" % slot.max_retries
    share = min(limit, UPKEEP)
    timed_out, due = time_out_due(slot, share)
    promoted = promote_due(slot, share)
    return Upkeep(timed_out, slot.now_ms if promoted else due, timed_out >= share or promoted >= share)


def time_out_due(slot: Slot, limit: int) -> tuple[int, float | None]:
    """End up to ``limit`` deliveries that timed out; return how many, and when one can be taken again."""
    ahead = (slot.now_s + slot.timeout + 1) * 1000
    for member, score in [row for row in slot.prepare.rows() if row[1] >= ahead][:limit]:
        # The clock was set back since, so the time-out starts again.
        slot.prepare[member] = float(slot.now_s * 1000 + bounded(score % 1000, 0, slot.max_retries))
    late = [row for row in slot.prepare.rows() if row[1] < (slot.now_s - slot.timeout) * 1000][:limit]
    dues: list[float | None] = []
    to_blame = first_in_flight(slot) if slot.topic.is_strict else math.inf
    for index, (member, score) in enumerate(late):
        flight = slot.flight(member)
        if slot.topic.is_strict and not flight.mark and flight.score > to_blame:
            dues.append(release_one(slot, member))
            continue
        left = bounded(score % 1000, 0, slot.max_retries)
        dues.append(end_failed(slot, member, left, "timed_out", b"", None, 2 * index + 1))
    lost, due = end_unleased_claim(slot, limit - len(late))
    return len(late) + lost, earliest([*dues, due])


def first_in_flight(slot: Slot) -> float:
    """Return the first place in flight of a strict slot: its messages run in order, so no other can have timed out."""
    return min((slot.flight(member).score for member in slot.inflight), default=math.inf)


def promote_due(slot: Slot, limit: int) -> int:
    """Return up to ``limit`` rested messages to Store, unless a newer send waits; return how many."""
    rested = [row for row in slot.retry.rows() if row[1] < slot.now_ms + 1][:limit]
    for member, score in rested:
        del slot.retry[member]
        if member in slot.store:
            slot.count("dropped")
        else:
            q = bounded(fraction(score), 1, MAX_RETRIES_LIMIT)
            failure = slot.failure_of(member)
            slot.store[member] = retry_score(slot, q, float(failure.score) if failure else 0.0)
    return len(rested)


@on(*ENDING, *CLAIMING)
def time_out(slot: Slot, limit: int) -> int:
    timed_out, due = time_out_due(slot, min(limit, BATCH))
    if timed_out:
        note_undrained(slot)
    wake_at_gate(slot, due, ended=timed_out > 0)
    return timed_out


@on("store", "retry", "failures", "stats", "control")
def promote(slot: Slot, limit: int) -> int:
    promoted = promote_due(slot, min(limit, BATCH))
    if promoted:
        note_undrained(slot)
        wake(slot, slot.now_ms)
    return promoted
