"""The operations of people and programs on messages: replay, bury, remove, reschedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django_rmq.core.model.keys import look_again
from django_rmq.core.model.limits import BATCH, MAX_PRIORITY, MAX_RETRIES_LIMIT
from django_rmq.core.model.replies import Death
from tests.oracle.collecting import collects, join
from tests.oracle.failing import Copy, die, forget, supersede_resting
from tests.oracle.numbers import bounded, floor
from tests.oracle.outcomes import note_end
from tests.oracle.refusing import check_batch, check_fresh, check_not_moved
from tests.oracle.scores import LARGEST_WITH_RETRIES, floor_priority, fraction, is_retry
from tests.oracle.sequence import later_place, next_places
from tests.oracle.slot import ENDING, Slot, grouped, on
from tests.oracle.waking import earliest, note_undrained, wake


@on(*ENDING, "claim")
def replay(slot: Slot, *rest: bytes) -> list[str]:
    pairs = grouped(rest, 2)
    check_batch(pairs)
    check_not_moved(slot)
    words: list[str] = []
    dues: list[float | None] = []
    for member, envelope in pairs:
        if slot.dead.pop(member, None) is None:
            words.append("not_found")
            continue
        raw = slot.deaths.pop(member, None)
        death = None if raw is None else Death.parse(raw)
        if is_outlived(slot, member, envelope, death):
            words.append("merged")
            slot.count("replay_merged")
            if not envelope and death:
                join(slot, member, death.envelope)
        else:
            words.append("replayed")
            slot.count("revived")
            again = score_again(slot, death)
            slot.store[member] = float(again)
            dues.append(0 if slot.topic.is_priority else again)
            if not envelope and death:
                envelope = death.envelope or b""
        if envelope:
            slot.body[member] = envelope
    note_undrained(slot)
    wake(slot, earliest(dues))
    return words


def is_outlived(slot: Slot, member: bytes, envelope: bytes, death: Death | None) -> bool:
    """Return whether a newer copy replaces a dead one that is replayed.

    A message in flight has a newer body than the dead copy, and keeps it unless a person has marked its end.
    """
    if slot.waits(member):
        return True
    is_older = not envelope and death is not None and death.envelope is not None
    is_older = is_older and not collects(death and death.envelope)
    return is_older and slot.runs(member) and not slot.flight(member).mark


def score_again(slot: Slot, death: Death | None) -> float:
    """Return now, or the priority that the message had, or the place behind all others in the line."""
    if slot.topic.is_fifo:
        return next_places(slot, 1)[0]
    if not slot.topic.is_priority:
        return slot.now_ms
    again = bounded(floor(float(death.score)) if death else 0, 0, MAX_PRIORITY)
    return floor_priority(slot) + 1 if is_retry(slot, again) else again


def mark(slot: Slot, member: bytes, end: str, word: str) -> str:
    """Mark a delivery for its end, which only its holder or the time-out brings; return the state in which it was found."""
    waits = word in ("waiting", "resting")
    if member in slot.prepare:
        record = slot.flight(member)
        if end == "removed" and record.mark == "cancelled":
            end = "cancelled"
        outlived = "outlived" if waits and end == "buried" else record.outlived
        slot.inflight[member] = record._replace(mark=end, outlived=outlived).encode()
        slot.control[b"marked"] = b"%d" % record.receipt
    elif member not in slot.claim:
        # A message that Spark has claimed cannot be marked, and goes on.
        return word
    return "running_and_waiting" if waits else "running"


@on(*ENDING, "claim")
def bury(slot: Slot, why: bytes, *members: bytes) -> list[str]:
    check_batch(members)
    words: list[str] = []
    for member in members:
        word = "dead" if member in slot.dead else "not_found"
        if slot.waits(member):
            word = "waiting" if member in slot.store else "resting"
            # A message that Spark holds cannot be marked. If the newer copy has its own body, it stays:
            # otherwise it would be dead before the older one ends.
            if not (member in slot.claim and member in slot.body):
                bury_waiting(slot, member, why)
        words.append(mark(slot, member, "buried", word))
    note_undrained(slot)
    return words


def bury_waiting(slot: Slot, member: bytes, why: bytes) -> None:
    """Move a waiting or resting message to Dead."""
    score = slot.store.pop(member, None)
    if score is None:
        del slot.retry[member]
        failure = slot.failure_of(member)
        score = float(failure.score) if failure else 0.0
    else:
        supersede_resting(slot, member)
    die(slot, Copy.of(slot, member, score, slot.body.get(member)), "buried", why, 0)


@on(*ENDING, "claim")
def remove(slot: Slot, which: str, *members: bytes) -> list[str]:
    check_batch(members)
    if which == "cancel":
        return _cancel(slot, members)
    words: list[str] = []
    for member in members:
        word = "not_found"
        if which != "dead":
            word = mark(slot, member, "removed", remove_waiting(slot, member))
        if word == "not_found" and which != "live" and slot.dead.pop(member, None) is not None:
            slot.deaths.pop(member, None)
            slot.count("removed_dead")
            word = "dead"
        words.append(word)
    note_undrained(slot)
    return words


def remove_waiting(slot: Slot, member: bytes) -> str:
    """Delete the copy that waits or rests; return the state in which it was found."""
    waited = slot.store.pop(member, None) is not None
    rested = slot.retry.pop(member, None) is not None
    if not (waited or rested):
        return "not_found"
    slot.count("removed", waited + rested)
    if not slot.runs(member):
        note_end(slot, member, "removed", slot.failure_of(member), None)
    forget(slot, member)
    return "waiting" if waited else "resting"


def _cancel(slot: Slot, members: Sequence[bytes]) -> list[str]:
    words: list[str] = []
    for member in members:
        word = remove_waiting(slot, member)
        if member not in slot.claim:
            word = mark(slot, member, "cancelled", word)
        elif word == "not_found":
            word = "claimed"
        words.append(word)
    note_undrained(slot)
    if any(word.startswith("running") for word in words):
        slot.publish(look_again(slot.index))
    return words


@on("dead", "deaths", "stats")
def discard(slot: Slot, *rest: Any) -> list[str]:
    pairs = grouped(rest, 2)
    check_batch(pairs)
    words: list[str] = []
    for score, member in pairs:
        died = slot.dead.get(member)
        if died is None:
            words.append("not_found")
        elif died != float(score):
            words.append("changed")
        else:
            del slot.dead[member]
            slot.deaths.pop(member, None)
            slot.count("removed_dead")
            words.append("dead")
    return words


@on("store", "retry", "prepare", "stats", "control", "claim")
def reschedule(slot: Slot, *rest: Any) -> list[str]:
    pairs = grouped(rest, 2)
    check_batch(pairs)
    check_fresh(slot, [score for score, _ in pairs])
    words: list[str] = []
    dues: list[float | None] = []
    for score, member in pairs:
        waiting, due = slot.store.get(member), float(score)
        if waiting is not None and not is_retry(slot, waiting):
            slot.store[member] = due = later_place(slot, score) if slot.topic.is_fifo else due
            words.append("waiting")
        elif slot.waits(member) and slot.topic.is_priority:
            words.append("refused")
            continue
        elif slot.waits(member):
            rest_until(slot, member, score)
            words.append("resting")
        else:
            words.append("running" if slot.runs(member) else "not_found")
            continue
        slot.count("rescheduled")
        dues.append(0 if slot.topic.is_priority else due)
    wake(slot, earliest(dues))
    return words


def rest_until(slot: Slot, member: bytes, score: int) -> None:
    """Let a message that waits as a retry rest until then, so that its score still carries its retries."""
    waiting, resting = slot.store.pop(member, None), slot.retry.get(member)
    if waiting is not None and resting is not None:
        slot.count("dropped")
    q = floor(waiting) if waiting is not None else fraction(resting or 0.0)
    rest = min(score, LARGEST_WITH_RETRIES)
    slot.retry[member] = rest + bounded(q, 1, MAX_RETRIES_LIMIT) / 1024


@on(
    "store",
    "retry",
    "dead",
    "prepare",
    "deaths",
    "failures",
    "body",
    "stats",
    "claim",
    "control",
    "outcomes",
    "outcome_times",
)
def purge(slot: Slot, state: str, lowest: str, highest: str, limit: int) -> int:
    emptied = slot.members(state)
    found = [member for member, score in emptied.rows() if float(lowest) <= score <= float(highest)]
    gone = found[: min(limit, BATCH)]
    for member in gone:
        del emptied[member]
        if state == "dead":
            slot.deaths.pop(member, None)
        else:
            if not (slot.waits(member) or slot.runs(member)):
                note_end(slot, member, "removed", slot.failure_of(member), None)
            forget(slot, member)
    slot.count("purged_dead" if state == "dead" else "purged", len(gone))
    if gone:
        note_undrained(slot)
    return len(gone)
