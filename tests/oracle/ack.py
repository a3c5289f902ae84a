"""The second phase: how deliveries end, in success or not, and what became of messages, on topics with OUTCOME_RETENTION.

``core.commands.ack`` documents arguments and answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from django_rmq.core.model.replies import FailureRecord, digest, error_class
from tests.oracle.accumulate import collects, dead_body, join, joined_death, joined_if
from tests.oracle.keyspace import bounded, score_text
from tests.oracle.slot import (
    ENDING,
    MOST_OUTCOMES,
    OUTCOMES,
    InFlight,
    Slot,
    check_batch,
    earliest,
    grouped,
    on,
)


def note_outcome(
    slot: Slot, member: bytes, state: str, reason: str, attempts: int, error: bytes, flight: InFlight | None
) -> None:
    """Note how a message ended. ``flight``: the delivery in which it did; None: it ended without one."""
    if slot.topic.outcome_retention_ms:
        slot.noted[digest(member)] = _record(slot, state, reason, attempts, error, flight)


def _record(
    slot: Slot, state: str, reason: str, attempts: int, error: bytes, flight: InFlight | None
) -> bytes:
    delivered_ms = flight.receipt // 1000 if flight else 0
    worker = slot.control.get(b"owner", b"") if flight and flight.receipt else b""
    head = f"{state} {reason} {attempts} {delivered_ms} {slot.now_ms} {error_class(error.decode(errors='replace'))}\n"
    return head.encode() + worker


def note_delivery(slot: Slot, receipt: int, digests: bytes) -> None:
    """Note once how all messages of a delivery ended. ``digests``: 12 bytes for each of them."""
    retention_ms = slot.topic.outcome_retention_ms
    if not retention_ms:
        return
    texts, size = slot.delivery_outcomes, len(digests) // 12
    noted = size + max([_number(text) for text in texts], default=0)
    later = [at + 1 for at in (*texts.values(), *slot.outcome_times.values())]
    record = _record(slot, "done", "-", 1, b"", InFlight(receipt, 0.0))
    texts[b"%d %d\n" % (noted, size) + digests + record] = max([float(slot.now_ms), *later])
    for text, at in texts.rows()[:3]:
        if at <= slot.now_ms - retention_ms or noted - _number(text) >= MOST_OUTCOMES:
            del texts[text]


def _number(text: bytes) -> int:
    return int(text.split(b" ")[0])


def find_outcome(slot: Slot, found: bytes) -> bytes | None:
    """Return the last note of the message with the digest ``found``, unless it is too old."""
    retention_ms = slot.topic.outcome_retention_ms
    if not retention_ms:
        return None
    oldest, outcome = float(slot.now_ms - retention_ms), None
    if slot.outcome_times.get(found, -math.inf) > oldest:
        oldest, outcome = slot.outcome_times[found], slot.outcomes[found]
    for text, at in slot.delivery_outcomes.rows():
        head, _, rest = text.partition(b"\n")
        end = 12 * int(head.split()[1])
        parts = [rest[start : start + 12] for start in range(0, end, 12)]
        if at > oldest and bytes.fromhex(found.decode()) in parts:
            outcome = rest[end:]
    return outcome


def note_end(
    slot: Slot,
    member: bytes,
    state: str,
    failure: FailureRecord | None,
    flight: InFlight | None,
    error: bytes = b"",
) -> None:
    """Note the end of a message that did not die: its attempts are its failures, and the delivery in which it ended."""
    attempts = (failure.times if failure else 0) + (flight is not None)
    note_outcome(slot, member, state, "-", attempts, error, flight)


_EXPIRES = re.compile(rb"(\d+) ")


class Copy(NamedTuple):
    """A copy of a message that was taken out of its place, and what is known about it."""

    member: bytes
    origin: float
    """The score before its first failure."""
    failure: FailureRecord | None
    """The last failure before this end."""
    kept: bytes | None
    """The body stored in its place."""
    is_outdated: bool = False
    """Whether a newer copy waits with a body of its own."""
    flight: InFlight | None = None
    """The delivery that ended, if there was one."""

    @classmethod
    def of(cls, slot: Slot, member: bytes, score: float, kept: bytes | None) -> Copy:
        failure = slot.failure_of(member)
        return cls(member, slot.first_score(score, failure), failure, kept)


def backoff_ms(slot: Slot, failures: int, index: int) -> int:
    """Return the topic's exponential back-off, jittered by up to half. ``index`` spreads a batch."""
    base, cap = slot.topic.backoff.base_ms, slot.topic.backoff.cap_ms
    delay = min(cap, base * 2.0 ** min(failures, 40))
    if cap > base:
        delay *= 1 - (slot.micros + index * 7919) % 1000 / 2000
    return math.floor(delay)


def note_failure(slot: Slot, copy: Copy, kind: str, error: bytes) -> None:
    """Record how often the member has failed, and its last failure."""
    known = copy.failure
    times, first_ms = (known.times + 1, known.first_ms) if known else (1, slot.now_ms)
    head = f"{kind} {times} {first_ms} {slot.now_ms} {score_text(copy.origin)}\n"
    slot.failures[copy.member] = head.encode() + error


def land(slot: Slot, member: bytes) -> tuple[bytes | None, bool]:
    """Move the body of a delivery to where the message goes, unless a newer body is there.

    Return it, and whether a newer one is there.
    """
    delivered, is_outdated = slot.prepare_body.pop(member, None), member in slot.body
    if delivered is not None:
        slot.body.setdefault(member, delivered)
    return delivered, is_outdated


def forget(slot: Slot, member: bytes) -> None:
    """Delete body and diagnosis of a member, unless it is still live. A member in flight or claimed has its own body."""
    if not slot.waits(member):
        slot.body.pop(member, None)
        if not slot.runs(member):
            slot.failures.pop(member, None)


def forget_ended(slot: Slot, member: bytes) -> None:
    """Forget a member whose delivery, or life, has ended.

    On fifo topics a copy that waits is a message of its own, which has not failed.
    """
    if slot.topic.is_fifo and slot.waits(member):
        slot.failures.pop(member, None)
    forget(slot, member)


def supersede_resting(slot: Slot, member: bytes) -> None:
    """Drop the resting retry of a member that a foreign ZADD has sent again."""
    if slot.retry.pop(member, None) is not None:
        slot.count("dropped")


def give_back(slot: Slot, member: bytes, score: float) -> float | None:
    """Return messages to Store without using a retry; return when they can be taken again, or None.

    A newer copy stays; on range_merge topics with the earlier time, as if both had been sent, and on fifo
    topics with the earlier place.
    """
    waiting = slot.store.get(member)
    if slot.waits(member):
        slot.count("dropped")
        if not slot.keeps_first(score) or waiting is None or score >= waiting:
            return None
    slot.store[member] = score
    return 0 if slot.topic.is_priority else score


def release_one(slot: Slot, member: bytes) -> float | None:
    """Give back a delivery that has not begun; see ``give_back``."""
    score = slot.flight(member).score
    del slot.prepare[member], slot.inflight[member]
    kept, is_outdated = land(slot, member)
    if is_outdated:
        join(slot, member, kept)
    slot.count("released")
    return give_back(slot, member, score)


def die(slot: Slot, copy: Copy, reason: str, error: bytes, failed: int) -> None:
    """Put a copy into Dead with its record. ``failed``: 1 if this end is one more failure."""
    member, known, kept = copy.member, copy.failure, copy.kept
    if member in slot.dead:
        slot.count("dead_merged")
        kept = joined_if(dead_body(slot.deaths.get(member)), kept)
    slot.dead[member] = float(slot.now_ms)
    times, first_ms = (known.times, known.first_ms) if known else (0, slot.now_ms)
    head = (
        f"{reason} {times + failed} {first_ms} {slot.now_ms} {score_text(copy.origin)}"
        f" {len(error)} {int(kept is not None)}\n"
    )
    slot.deaths[member] = head.encode() + error + (kept or b"")
    note_outcome(slot, member, "dead", reason, times + failed, error, copy.flight)
    forget_ended(slot, member)
    slot.count("lapsed" if reason == "lapsed" else "died")


def go_on(
    slot: Slot, copy: Copy, left: int, what: str, error: bytes, delay_ms: int | None, index: int
) -> float | None:
    """Drop a failed message for a newer copy, move it to Dead, or make it a retry.

    Returns when the member can be taken again (ms), or None. ``delay_ms`` None: the topic's back-off.
    """
    absorbs = copy.is_outdated and collects(copy.kept) and collects(slot.body.get(copy.member))
    if absorbs and left > 0:
        # With the retries of its newer copy a collecting message would never die.
        join(slot, copy.member, copy.kept)
        slot.count("dropped")
        slot.store.pop(copy.member, None)
        slot.retry.pop(copy.member, None)
    elif slot.waits(copy.member) and not absorbs:
        slot.count("dropped")
        if slot.topic.is_fifo:
            forget_ended(slot, copy.member)
        else:
            note_failure(slot, copy, what, error)
        return None
    if left <= 0:
        die(slot, copy, what, error, 1)
        return None
    if delay_ms is None:
        delay_ms = backoff_ms(slot, slot.own_retries(copy.kept) - left, index)
    note_failure(slot, copy, what, error)
    if delay_ms > 0:
        slot.retry[copy.member] = slot.now_ms + delay_ms + left / 1024
        return slot.now_ms + delay_ms
    slot.store[copy.member] = slot.retry_score(left, copy.origin)
    return slot.now_ms


def end_failed(
    slot: Slot, member: bytes, left: int, what: str, error: bytes, delay_ms: int | None, index: int
) -> float | None:
    """End a failed delivery: as a person has marked it, dead, dropped for a newer send, or tried again; see ``go_on``."""
    record = InFlight.parse(slot.inflight.pop(member, None))
    slot.prepare.pop(member, None)
    kept, is_outdated = land(slot, member)
    copy = Copy.of(slot, member, record.score, kept)._replace(is_outdated=is_outdated, flight=record)
    if record.mark in ("removed", "buried"):
        slot.count("ended_marked")
    if record.mark == "removed":
        slot.count("removed")
        note_end(slot, member, "removed", copy.failure, record)
        forget_ended(slot, member)
    elif record.mark == "buried" and record.outlived and member in slot.dead:
        # The newer copy that was buried with it is the one that stays.
        slot.count("dropped")
        slot.deaths[member] = joined_death(slot.deaths.get(member, b""), kept)
        forget_ended(slot, member)
    elif record.mark == "buried":
        die(slot, copy, "buried", error, 1)
    elif "cancelled" in (record.mark, what):
        slot.count("cancelled")
        note_end(slot, member, "cancelled", copy.failure, record)
        forget_ended(slot, member)
    elif what == "rejected":
        slot.count("rejected")
        die(slot, copy, "rejected", error, 1)
    else:
        slot.count("expired" if what == "timed_out" else "failed")
        slot.count("overran", int(what == "overran"))
        return go_on(slot, copy, left, what, error, delay_ms, index)
    return None


def end_marked(slot: Slot, member: bytes, index: int) -> bool:
    """End a delivery as a person has marked it, whatever its holder reports; return whether it was marked."""
    if not slot.flight(member).mark:
        return False
    end_failed(slot, member, 0, "failed", b"", None, index)
    return True


def has_expired(slot: Slot, envelope: bytes | None) -> bool:
    match = _EXPIRES.match(envelope or b"")
    return match is not None and 0 < int(match[1]) < slot.now_ms


def end_expired(slot: Slot, member: bytes, score: float) -> None:
    """Move an expired message to Dead."""
    del slot.store[member]
    supersede_resting(slot, member)
    die(slot, Copy.of(slot, member, score, slot.body.get(member)), "lapsed", b"", 0)


LONGEST_DELAY_MS = 1 << 42
"""139 years: now plus this stays below ``LARGEST_WITH_RETRIES``."""


def _words(slot: Slot, held: Sequence[bool], told: Sequence[bool] = ()) -> list[str]:
    """Count and name what is stale. ``told``: which deliveries are cancelled, if their holder is to know."""
    slot.count("stale", held.count(False))
    words = ["ok" if holds else "stale" for holds in held]
    return (
        ["cancelled" if tells else word for word, tells in zip(words, told, strict=True)] if told else words
    )


@on(*ENDING)
def commit(slot: Slot, receipt: int, *members: bytes) -> list[str]:
    check_batch(members)
    words = _words(slot, [slot.is_receipt(receipt, member) for member in members])
    ending = dict.fromkeys(member for member, word in zip(members, words, strict=True) if word == "ok")
    for i, member in enumerate(ending):
        # What succeeds although it was cancelled has succeeded.
        if slot.flight(member).mark == "cancelled" or not end_marked(slot, member, i):
            flight, failure = slot.flight(member), slot.failure_of(member)
            note_end(slot, member, "done", failure, flight, failure.error if failure else b"")
            del slot.inflight[member]
            slot.count("committed", int(slot.prepare.pop(member, None) is not None))
            land(slot, member)
            forget_ended(slot, member)
    slot.wake_at_gate(None, ended=bool(ending))
    return words


@on("store", "prepare", "inflight", "failures", "stats", "control", "prepare_body", *OUTCOMES)
def commit_delivery(slot: Slot, receipt: int, size: int, digests: bytes = b"") -> list[str]:
    is_last = slot.control.get(b"deliveries") == b"%d" % receipt
    is_marked = slot.control.get(b"marked") == b"%d" % receipt
    if not is_last or is_marked or len(slot.prepare) != size:
        return []
    if digests and len(digests) == 12 * size:
        note_delivery(slot, receipt, digests)
    else:
        for member in slot.prepare:
            note_end(slot, member, "done", None, InFlight(receipt, 0.0))
    slot.prepare.clear()
    slot.inflight.clear()
    slot.count("committed", size)
    slot.wake_at_gate(None, ended=True)
    return ["ok"] * size


@on(*ENDING)
def rollback(slot: Slot, receipt: int, *rest: Any) -> list[str]:
    failures = grouped(rest, 4)
    check_batch(failures)
    held: list[bool] = []
    told: list[bool] = []
    dues: list[float | None] = []
    for i, (member, kind, delay_ms, error) in enumerate(failures):
        held.append(slot.holds(receipt, member))
        told.append(held[-1] and slot.flight(member).mark == "cancelled")
        if held[-1]:
            left = bounded(slot.prepare[member] % 1000, 0, slot.max_retries)
            rest_ms = None if delay_ms == "" else bounded(delay_ms, 0, LONGEST_DELAY_MS)
            dues.append(end_failed(slot, member, left, kind, error, rest_ms, i))
    if any(held):
        slot.note_undrained()
    slot.wake_at_gate(earliest(dues), ended=any(held))
    return _words(slot, held, told)


@on(*ENDING)
def release(slot: Slot, receipt: int, *members: bytes) -> list[str]:
    check_batch(members)
    held: list[bool] = []
    dues: list[float | None] = []
    for i, member in enumerate(members):
        held.append(slot.holds(receipt, member))
        if held[-1] and not end_marked(slot, member, i):
            dues.append(release_one(slot, member))
    if any(held):
        slot.note_undrained()
    slot.wake_at_gate(earliest(dues), ended=any(held))
    return _words(slot, held)


@on("prepare", "inflight", "failures", "stats", "control", *OUTCOMES)
def progress(slot: Slot, receipt: int, member: bytes, thousandths: int, said: bytes) -> str:
    (word,) = _words(slot, [slot.holds(receipt, member)])
    if word == "ok":
        slot.noted[digest(member)] = f"running {receipt} {thousandths} {slot.now_ms}\n".encode() + said
    return word


@on("prepare", "inflight", "stats", "control")
def extend(slot: Slot, receipt: int, *members: bytes) -> list[str]:
    check_batch(members)
    held = [slot.holds(receipt, member) for member in members]
    for member, holds in zip(members, held, strict=True):
        if holds:
            slot.prepare[member] = slot.stamp(slot.flight(member).timeout, int(slot.prepare[member] % 1000))
    told = [
        holds and slot.flight(member).mark == "cancelled" for member, holds in zip(members, held, strict=True)
    ]
    return _words(slot, held, told)
