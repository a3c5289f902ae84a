"""Sending: how a message and the copies of it that its slot holds affect each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from django_rmq.core.model.limits import BATCH, NEVER
from django_rmq.core.model.replies import Delivery, Pushed, Sent
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import ServerRefused, WrongType
from tests.oracle.bounds import GATE
from tests.oracle.collecting import collect
from tests.oracle.debouncing import first_due, prolonged
from tests.oracle.keyspace import Hash, Memory, SortedSet
from tests.oracle.refusing import check_batch, check_fresh, check_not_moved
from tests.oracle.scores import is_retry
from tests.oracle.sequence import later_places, next_places
from tests.oracle.slot import SENDING, InFlight, Slot, on, opened
from tests.oracle.taking import next_receipt
from tests.oracle.waking import note_undrained, wake


@on(*SENDING)
def send_merge(slot: Slot, range_ms: int, count: int, *texts: bytes) -> list[Sent]:
    members, envelopes = texts[:count], texts[count:]
    if not (0 <= range_ms <= 1e14 and 1 <= len(members) <= BATCH):
        raise ServerRefused("ERR range_ms or n is out of bounds")
    check_not_moved(slot)
    if slot.topic.debounce_ms:
        again = partial(prolonged, slot, range_ms)
        return place(slot, members, [first_due(slot, range_ms)] * len(members), envelopes, "merged", again)
    dues = [slot.now_ms + range_ms] * len(members)
    accumulates = bool(slot.topic.accumulate)
    sent = None if accumulates else push(slot, members, dues, envelopes)
    return sent or place(slot, members, dues, envelopes, "merged")


def scatter(
    memory: Memory, topic: Topic, slots: Sequence[int], range_ms: int, *members: bytes
) -> list[list[Sent] | None]:
    if not (0 <= range_ms <= 1e14 and len(slots) <= 64):
        raise ServerRefused("ERR range_ms or the number of slots is out of bounds")
    with memory.lock:
        return [
            _send_alone(memory, topic, index, range_ms, member)
            for index, member in zip(slots, members, strict=True)
        ]


def _send_alone(memory: Memory, topic: Topic, index: int, range_ms: int, member: bytes) -> list[Sent] | None:
    """Send a message to a slot where nothing rests and no body is kept; return None where more has to be looked at."""
    with suppress(WrongType, ValueError), opened(memory, topic, index, SENDING) as slot:
        waiting = slot.store.get(member)
        is_met = waiting is None or not (is_retry(slot, waiting) or waiting % 1)
        if slot.moved_to is None and not (slot.retry or slot.body) and is_met:
            return place(slot, [member], [slot.now_ms + range_ms], (), "merged")
    return None


def _scores_members_envelopes(
    count: int, rest: Sequence[Any]
) -> tuple[Sequence[int], Sequence[bytes], Sequence[bytes]]:
    pairs = rest[: 2 * count]
    return pairs[::2], pairs[1::2], rest[2 * count :]


@on(*SENDING)
def send_replace(slot: Slot, count: int, *rest: Any) -> list[Sent]:
    scores, members, envelopes = _scores_members_envelopes(count, rest)
    check_batch(members, at_least=1)
    check_not_moved(slot)
    check_fresh(slot, scores)
    sent = push(slot, members, scores, envelopes)
    return sent or place(slot, members, scores, envelopes, "replaced")


WARM_US = 2_000_000
"""A message is pushed only to an owner whose last delivery of the slot began within this time, and has ended."""


def push(
    slot: Slot, members: Sequence[bytes], scores: Sequence[float], envelopes: Sequence[bytes]
) -> list[Sent] | None:
    """Deliver a single message that is due to the sleeping owner of an empty slot; return None if it has to wait in Store."""
    [member, *others], score, control = members, scores[0], slot.control
    inbox, owner = control.get(b"inbox", b""), control.get(b"owner", b"")
    is_single = not (others or envelopes or slot.topic.slot_backlog)
    is_due = slot.topic.is_priority or score <= slot.now_ms
    sleeps = control.get(b"sleeping_until") == b"%d" % NEVER
    last = int(control.get(b"deliveries", 0))
    is_warm = last - 1_000 < slot.now_us < last + WARM_US
    is_valid = bool(owner) and inbox.endswith(owner) and control.get(b"epoch") == control.get(b"inbox_epoch")
    is_open = not control.keys() & {b"paused", b"moving", b"inserting"}
    is_known = control.keys() >= {b"slots", b"max_retries"}
    keys, keyspace = slot.keys, slot.memory.keyspace
    is_empty = not keyspace.keys() & {keys.store, keys.prepare, keys.inflight, keys.retry, keys.body}
    if not (
        inbox
        and is_single
        and is_due
        and sleeps
        and is_warm
        and is_valid
        and is_open
        and is_known
        and is_empty
    ):
        return None
    receipt = next_receipt(slot)
    delivery = Delivery(member, float(score), slot.max_retries)
    pushed = Pushed(slot.topic.name, slot.index, receipt, delivery)
    if not slot.memory.channels.publish(inbox, pushed):
        del control[b"inbox"]
        return None
    keyspace[keys.prepare] = slot.prepare = SortedSet({member: slot.now_s * 1000.0 + slot.max_retries})
    keyspace[keys.inflight] = Hash({member: InFlight(receipt, float(score)).encode()})
    control[b"deliveries"] = b"%d" % receipt
    for counter in ("sent", "stored", "prepared"):
        slot.count(counter)
    return [Sent("stored", float(score))]


@on(*SENDING, "prepare", "claim")
def ensure(slot: Slot, count: int, *rest: Any) -> list[Sent]:
    scores, members, envelopes = _scores_members_envelopes(count, rest)
    check_batch(members, at_least=1)
    check_not_moved(slot)
    if slot.topic.type is TopicType.RANGE_MERGE:
        scores = [slot.now_ms + range_ms if range_ms >= 0 else range_ms for range_ms in scores]
    check_fresh(slot, scores)
    if slot.topic.debounce_ms:
        return place(
            slot, members, [first_due(slot, due - slot.now_ms) for due in scores], envelopes, "present"
        )
    return place(slot, members, scores, envelopes, "present")


@on(*SENDING, "prepare", "claim")
def send_fifo(slot: Slot, ensure: int, delay_ms: int, count: int, *texts: bytes) -> list[Sent]:
    members, envelopes = texts[:count], texts[count:]
    if not (0 <= delay_ms <= 1e14 and 1 <= len(members) <= BATCH):
        raise ServerRefused("ERR delay or n is out of bounds")
    check_not_moved(slot)
    is_next = float(slot.control.get(b"last_place", 0)) < slot.now_ms
    places = later_places(slot, delay_ms, len(members)) if delay_ms else next_places(slot, len(members))
    if is_next and not (delay_ms or ensure) and (sent := push(slot, members, places, envelopes)):
        return sent
    met = "present" if ensure or slot.topic.on_duplicate == "keep" else "replaced"
    return place(slot, members, places, envelopes, met, runs=bool(ensure))


def place(
    slot: Slot,
    members: Sequence[bytes],
    scores: Sequence[float],
    envelopes: Sequence[bytes],
    met: str,
    again: Callable[[float], float] | None = None,
    *,
    runs: bool = True,
) -> list[Sent]:
    """Put members into Store, one after the other. ``met``: what to do about a copy that waits fresh.

    merged: it keeps its score, or gets the one that ``again`` makes of it. replaced: it gets the new score.
    present: nothing is sent; the same applies if the member rests or, with ``runs``, is in flight. A copy that
    waits or rests as a retry is superseded otherwise; but on fifo topics it keeps its place, and only its body
    is replaced.
    """
    sent: list[Sent] = []
    room = math.inf
    if slot.topic.slot_backlog:
        room = slot.topic.slot_backlog - len(slot.store) - len(slot.retry)
    placed: dict[bytes, str] = {}
    earliest = math.inf
    for i, member in enumerate(members):
        word = meet(slot, member, placed.get(member), met, has_room=room >= 1, runs=runs)
        envelope, is_full = envelopes[i] if envelopes else None, False
        if envelope and slot.topic.accumulate and met == "merged" and word != "refused":
            envelope, is_full = collect(slot, None if word == "stored" else slot.body.get(member), envelope)
            word = "refused" if envelope is None else word
            earliest = min(earliest, hasten(slot, member) if is_full else math.inf)
        placed[member] = word
        slot.count(word)
        if word in ("refused", "present"):
            sent.append(Sent(word, math.nan if word == "refused" else slot.store.get(member, math.nan)))
            continue
        room -= word == "stored"
        give_up_retries(slot, member, word)
        score = again(slot.store[member]) if again and word == "merged" else scores[i]
        if word == "stored" or (not slot.topic.is_fifo and (again or word != "merged")):
            slot.store[member] = float(slot.now_ms if is_full else score)
            earliest = min(earliest, slot.store[member])
        if envelope is not None:
            slot.body[member] = envelope
        slot.count("sent")
        sent.append(Sent(word, slot.store.get(member, math.nan)))
    note_sent(slot, earliest)
    return sent


def note_sent(slot: Slot, earliest: float) -> None:
    """Record the slot's settings, and wake who sleeps past the earliest due time."""
    slot.control.setdefault(b"slots", b"%d" % slot.topic.slots)
    if slot.topic.is_priority:
        slot.control.setdefault(b"max_retries", b"%d" % slot.max_retries)
    note_undrained(slot)
    # A strict slot that answered busy stays so until something in it ends.
    held = slot.topic.is_strict and slot.control.get(b"sleeping_until") == b"%d" % GATE
    if earliest < math.inf and not held:
        wake(slot, 0 if slot.topic.is_priority else earliest)


def meet(slot: Slot, member: bytes, before: str | None, met: str, *, has_room: bool, runs: bool) -> str:
    """Return the status of a member. ``before``: its status earlier in the same send."""
    waiting = slot.store.get(member)
    if before == "refused":
        return "refused"
    if met == "present" and (slot.waits(member) or (runs and slot.runs(member))):
        return "present"
    if slot.topic.is_fifo and slot.waits(member):
        return met
    if waiting is not None and (before is not None or not is_retry(slot, waiting)):
        return met
    if slot.waits(member):
        return "superseded"
    return "stored" if has_room else "refused"


def hasten(slot: Slot, member: bytes) -> float:
    """Make a fresh copy that waits for a later time due now. Return this time, or infinity if there is none."""
    waiting = slot.store.get(member)
    if waiting is None or is_retry(slot, waiting) or waiting <= slot.now_ms:
        return math.inf
    slot.store[member] = float(slot.now_ms)
    return slot.now_ms


def give_up_retries(slot: Slot, member: bytes, word: str) -> None:
    """Count the copies that a send supersedes, and remove the one that rests. On fifo topics it keeps its place."""
    if slot.topic.is_fifo and member not in slot.store:
        return
    if word == "superseded":
        slot.count("stored")
        if member in slot.store:
            slot.count("dropped")
    if slot.retry.pop(member, None) is not None:
        slot.count("dropped")
