"""The upkeep of a slot: deliveries that time out, claims whose lease has ended, and messages whose back-off is over."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from django_rmq.core.model.bounds import BATCH, MAX_RETRIES_LIMIT
from tests.oracle.accumulate import join
from tests.oracle.ack import Copy, die, end_failed, give_back, go_on, release_one
from tests.oracle.keyspace import bounded
from tests.oracle.slot import CLAIMING, ENDING, Slot, earliest, fraction, on

CLAIM_STEP_BYTES = 4_194_304
"""The maximum number of bytes that one script of a claim moves, by estimate. Renaming a whole Store moves none."""

CLAIM_LARGE, CLAIM_LARGE_STEP_BYTES = 16_384, 1_048_576
"""If the longest message has more bytes than the first, a script of a claim moves at most the second, by estimate."""


def fit(rows: Sequence[tuple[bytes, float]], bodies: Mapping[bytes, bytes], n: int, max_bytes: int) -> int:
    """Return how many of the ``n`` first messages one step moves."""
    longest = _longest(rows, bodies, n)
    return max(1, min(n, min(max_bytes, _step_bytes(longest)) // longest))


def _step_bytes(longest: int) -> int:
    return CLAIM_LARGE_STEP_BYTES if longest > CLAIM_LARGE else CLAIM_STEP_BYTES


def _longest(rows: Sequence[tuple[bytes, float]], bodies: Mapping[bytes, bytes], n: int) -> int:
    """Return the size of the longest of a hundred of the first ``n`` messages, evenly spaced; of fewer if they are large."""
    longest, read = 1, 0
    for member, _ in rows[: n : max(1, math.ceil(n / 100))]:
        if read >= 262_144:
            break
        size = len(member) + len(bodies.get(member, b""))
        longest, read = max(longest, size), read + size
    return longest


TOMBSTONE_MS = 30 * 86_400_000
"""How long a slot remembers how a consumer's newest claim ended, in ms."""

CONSUMERS = 1_000
"""The maximum number of Spark consumers that one slot remembers."""

UPKEEP = 400
"""The maximum number of deliveries that one prepare times out, and of rested messages that it returns; also
of messages of a lost claim."""

_CLAIM = re.compile(rb"(\d+) ([a-z]+) (\d+)")
_NOTE = re.compile(rb"([a-z_]+)\n(.*)", re.DOTALL)


def newest_claim(slot: Slot, consumer: str) -> tuple[int, str]:
    match = _CLAIM.fullmatch(slot.claims.get(consumer.encode(), b""))
    return (int(match[1]), match[2].decode()) if match else (0, "none")


def note_claim(slot: Slot, consumer: str, number: int, state: str) -> None:
    """Record the state of a claim, which is the consumer's newest."""
    slot.claims[consumer.encode()] = f"{number} {state} {slot.now_ms}".encode()


def close_claim(slot: Slot, consumer: str) -> int:
    """End the claim if it no longer holds anything; return how many messages are left."""
    if not slot.claim:
        slot.claimants.pop(consumer.encode(), None)
    return len(slot.claim)


def claim_shuts(slot: Slot) -> bool:
    """Return whether a claim keeps the slot to itself: on topics without an order not one that comes back."""
    if slot.topic.is_fifo:
        return bool(slot.claimants)
    return any(newest_claim(slot, name.decode())[1] not in ("lost", "returned") for name in slot.claimants)


def unclaim(slot: Slot, member: bytes) -> tuple[bytes | None, bool]:
    """Take a message out of the claim; return its body, and whether a newer one waits."""
    del slot.claim[member]
    kept, is_outdated = slot.claim_body.pop(member, None), member in slot.body
    if kept is not None and not is_outdated:
        slot.body[member] = kept
    slot.count("claim_returned")
    return kept, is_outdated


def fail_one(slot: Slot, member: bytes, score: float, index: int) -> float | None:
    """Let a claimed message fail as its query has noted, or as after a time-out; return when it can be taken again."""
    kept, is_outdated = unclaim(slot, member)
    copy = Copy.of(slot, member, score, kept)._replace(is_outdated=is_outdated)
    note = _NOTE.fullmatch(slot.claim_failed.pop(member, b""))
    what, error = (note[1].decode(), note[2]) if note else ("timed_out", b"")
    if what == "rejected":
        die(slot, copy, what, error, 1)
        return None
    left = slot.budget(score, member, slot.own_retries(kept))
    return go_on(slot, copy, left, what, error, None, 2 * index + 1)


def _first_claimed(slot: Slot, limit: int) -> list[tuple[bytes, float]]:
    """Return the first messages of the claim: at most ``limit``, and no more bytes than a step moves."""
    rows = slot.claim.rows()
    return rows[: fit(rows, slot.claim_body, limit, CLAIM_STEP_BYTES)]


def return_claimed(slot: Slot, limit: int, *, spent: bool) -> float | None:
    """Return up to ``limit`` messages of a claim to the slot; return when one can be taken again.

    ``spent``: as after a time-out, and at most 400. Otherwise as if never claimed. What the query has failed
    fails in both cases.
    """
    dues: list[float | None] = []
    most = min(limit, UPKEEP) if spent or slot.claim_failed else limit
    for index, (member, score) in enumerate(_first_claimed(slot, most)):
        if spent or member in slot.claim_failed:
            dues.append(fail_one(slot, member, score, index))
        else:
            kept, is_outdated = unclaim(slot, member)
            if is_outdated:
                join(slot, member, kept)
            dues.append(give_back(slot, member, score))
    return earliest(dues)


def forget_claimed(slot: Slot, limit: int) -> float | None:
    """Forget up to ``limit`` acknowledged messages, or all if nothing needs tidying up.

    What the query has failed is not forgotten. Returns when one of that can be taken again.
    """
    rows = slot.claim.rows()
    if slot.failures or slot.claim_failed:
        rows = _first_claimed(slot, min(limit, UPKEEP) if slot.claim_failed else limit)
    failed = {member for member, _ in rows if member in slot.claim_failed}
    dues = [
        fail_one(slot, member, score, index) for index, (member, score) in enumerate(rows) if member in failed
    ]
    gone = [member for member, _ in rows if member not in failed]
    for member in gone:
        del slot.claim[member]
        slot.claim_body.pop(member, None)
        if slot.topic.is_fifo or not slot.waits(member):
            slot.failures.pop(member, None)
    slot.count("acked", len(gone))
    return earliest(dues)


def end_unleased_claim(slot: Slot, limit: int) -> tuple[int, float | None]:
    """Process a claim whose lease has ended: it is lost, unless it was acknowledged before."""
    over = [name for name, ends in slot.claimants.rows()[:1] if ends <= slot.now_ms]
    if limit < 1 or not over:
        return 0, None
    consumer = over[0].decode()
    number, state = newest_claim(slot, consumer)
    held = len(slot.claim)
    if state == "acked":
        due = forget_claimed(slot, limit)
    else:
        # Nobody has read what was not sealed.
        state = {"open": "returned", "sealed": "lost"}.get(state, state)
        note_claim(slot, consumer, number, state)
        due = return_claimed(slot, limit, spent=state != "returned")
    return held - close_claim(slot, consumer), due


def make_room_for(slot: Slot, consumer: str) -> None:
    """If ``consumer`` is new, forget what ended thirty days ago, and if too many are left, what ended first."""
    if consumer.encode() in slot.claims:
        return
    ended = []
    for other, record in list(slot.claims.items()):
        match = _CLAIM.fullmatch(record)
        since = int(match[3]) if match else 0
        if other in slot.claimants:
            continue
        if since < slot.now_ms - TOMBSTONE_MS:
            del slot.claims[other]
        else:
            ended.append((since, other))
    if len(slot.claims) >= CONSUMERS and ended:
        del slot.claims[min(ended)[1]]


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
        slot.prepare[member] = slot.stamp(
            slot.flight(member).timeout, bounded(score % 1000, 0, slot.max_retries)
        )
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
            slot.store[member] = slot.retry_score(q, float(failure.score) if failure else 0.0)
    return len(rested)


@on(*ENDING, *CLAIMING)
def time_out(slot: Slot, limit: int) -> int:
    timed_out, due = time_out_due(slot, min(limit, BATCH))
    if timed_out:
        slot.note_undrained()
    slot.wake_at_gate(due, ended=timed_out > 0)
    return timed_out


@on("store", "retry", "failures", "stats", "control")
def promote(slot: Slot, limit: int) -> int:
    promoted = promote_due(slot, min(limit, BATCH))
    if promoted:
        slot.note_undrained()
        slot.wake(slot.now_ms)
    return promoted
