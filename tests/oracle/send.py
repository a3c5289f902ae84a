"""Sending: how a message and the copies of it that its slot holds affect each other.

Also the places in the line of a fifo topic, the waits of debounced messages, many messages at once, and ticks of schedules.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from django_rmq.core.commands.insert import SENTINEL
from django_rmq.core.model.bounds import BATCH, NEVER
from django_rmq.core.model.replies import Delivery, Pushed, Sent
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import ServerRefused, WrongType
from tests.oracle.accumulate import collect
from tests.oracle.fetch import next_receipt
from tests.oracle.keyspace import Hash, Memory, SortedSet, score_text
from tests.oracle.slot import GATE, SENDING, InFlight, Slot, check_batch, on, opened

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


LARGEST = 8_796_093_022_207
"""The largest score with ten bits behind the point."""


def first_due(slot: Slot, range_ms: int) -> float:
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


@on(*SENDING)
def send_merge(slot: Slot, range_ms: int, count: int, *texts: bytes) -> list[Sent]:
    members, envelopes = texts[:count], texts[count:]
    if not (0 <= range_ms <= 1e14 and 1 <= len(members) <= BATCH):
        raise ServerRefused("ERR range_ms or n is out of bounds")
    slot.check_not_moved()
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
    """Send a message that does not rest in its slot; return None where more has to be looked at."""
    with suppress(WrongType, ValueError), opened(memory, topic, index, SENDING) as slot:
        waiting = slot.store.get(member)
        is_met = waiting is None or not (slot.is_retry(waiting) or waiting % 1)
        if slot.moved_to is None and member not in slot.retry and is_met:
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
    slot.check_not_moved()
    slot.check_fresh(scores)
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
    for counter in ("stored", "prepared"):
        slot.count(counter)
    return [Sent("stored", float(score))]


@on(*SENDING, "prepare", "claim")
def ensure(slot: Slot, count: int, *rest: Any) -> list[Sent]:
    scores, members, envelopes = _scores_members_envelopes(count, rest)
    check_batch(members, at_least=1)
    slot.check_not_moved()
    if slot.topic.type is TopicType.RANGE_MERGE:
        scores = [slot.now_ms + range_ms if range_ms >= 0 else range_ms for range_ms in scores]
    slot.check_fresh(scores)
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
    slot.check_not_moved()
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
        sent.append(Sent(word, slot.store.get(member, math.nan)))
    note_sent(slot, earliest)
    return sent


def note_sent(slot: Slot, earliest: float) -> None:
    """Record the slot's settings, and wake who sleeps past the earliest due time."""
    slot.control.setdefault(b"slots", b"%d" % slot.topic.slots)
    if slot.topic.is_priority:
        slot.control.setdefault(b"max_retries", b"%d" % slot.max_retries)
    slot.note_undrained()
    # A strict slot that answered busy stays so until something in it ends.
    held = slot.topic.is_strict and slot.control.get(b"sleeping_until") == b"%d" % GATE
    if earliest < math.inf and not held:
        slot.wake(0 if slot.topic.is_priority else earliest)


def meet(slot: Slot, member: bytes, before: str | None, met: str, *, has_room: bool, runs: bool) -> str:
    """Return the status of a member. ``before``: its status earlier in the same send."""
    waiting = slot.store.get(member)
    if before == "refused":
        return "refused"
    if met == "present" and (slot.waits(member) or (runs and slot.runs(member))):
        return "present"
    if slot.topic.is_fifo and slot.waits(member):
        return met
    if waiting is not None and (before is not None or not slot.is_retry(waiting)):
        return met
    if slot.waits(member):
        return "superseded"
    return "stored" if has_room else "refused"


def hasten(slot: Slot, member: bytes) -> float:
    """Make a fresh copy that waits for a later time due now. Return this time, or infinity if there is none."""
    waiting = slot.store.get(member)
    if waiting is None or slot.is_retry(waiting) or waiting <= slot.now_ms:
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


LATE_MS = 1_000
"""By how much the clock that a sender has read may differ from that of the server."""


def insert(memory: Memory, topic: Topic, slot: int, *rest: Any) -> Counter[str] | None:
    """Insert the messages of a ZADD; None: they have to be looked at one by one, and nothing was sent."""
    pairs = rest[len(SENTINEL) + (rest[0] == "NX") :]
    try:
        return _insert(memory, topic, slot, pairs[::2], pairs[1::2])
    except WrongType:
        return None


@on("store", "retry", "failures", "stats", "control")
def _insert(slot: Slot, scores: Sequence[int], members: Sequence[bytes]) -> Counter[str] | None:
    if not is_plain(slot, scores):
        return None
    merges = slot.topic.type is TopicType.RANGE_MERGE
    counts: Counter[str] = Counter()
    for member, score in zip(members, scores, strict=True):
        is_new = member not in slot.store
        counts["stored" if is_new else "merged" if merges else "replaced"] += 1
        if is_new or not merges:
            slot.store[member] = float(score)
    for word, by in counts.items():
        slot.count(word, by)
    note_sent(slot, min(scores) if counts["stored"] or not merges else math.inf)
    return +counts


def is_plain(slot: Slot, scores: Sequence[int]) -> bool:
    """Return whether the messages only have to be counted: each is new, or meets a fresh copy that waits."""
    topic = slot.topic
    if slot.moved_to is not None or not 1 <= len(scores) <= BATCH:
        return False
    if not all(slot.is_fresh(score) for score in (min(scores), max(scores))):
        return False
    lowest = 999
    if topic.is_priority:
        lowest = slot.floor_priority
        if slot.failures:
            return False
    elif topic.type is TopicType.RANGE_MERGE:
        late = slot.now_ms + (topic.time_range_ms or 0) - min(scores)
        if topic.debounce_ms or min(scores) < max(scores) or abs(late) > LATE_MS:
            return False
    elif topic.type is not TopicType.FIXED_TIME:
        return False
    if slot.retry or any(score <= lowest for score in slot.store.values()):
        return False
    if topic.slot_backlog and len(slot.store) + len(scores) > topic.slot_backlog:
        return False
    return b"" not in slot.store


_TICK = re.compile(rb"(\d+) (-?\d+)(.*)")


def _latest(slot: Slot, field: str) -> tuple[int, int, bool]:
    """Return generation and instant of the latest tick of a schedule in this slot, and whether it was found taken.

    An instant below 0: it was taken back.
    """
    match = _TICK.fullmatch(slot.control.get(field.encode(), b""))
    return (int(match[1]), int(match[2]), bool(match[3])) if match else (0, 0, False)


@on(*SENDING)
def put_tick(slot: Slot, field: str, generation: int, instant: int, member: bytes, envelope: bytes) -> str:
    if not slot.topic.takes_instants or not 999 < instant <= 1e14:
        raise ServerRefused("ERR instant is out of bounds")
    latest, last, taken = _latest(slot, field)
    if latest > generation:
        return "stale"
    if latest == generation and last >= instant and not taken:
        return "known"
    slot.check_not_moved()
    (sent,) = place(slot, [member], [instant], [envelope], "replaced")
    if sent.status == "refused":
        return "full"
    slot.control[field.encode()] = b"%d %d" % (generation, instant)
    return "stored"


@on("store", "prepare", "claim", "failures", "body", "stats", "control")
def retract(slot: Slot, field: str, generation: int, instant: int, member: bytes) -> str:
    latest, last, _ = _latest(slot, field)
    outcome = last if abs(last) == instant else 0
    if latest < generation:
        if slot.store.get(member, 0) > 999:
            del slot.store[member]
            slot.count("removed")
            slot.body.pop(member, None)
            if not slot.runs(member):
                slot.failures.pop(member, None)
            outcome = -instant
        taken = b" taken" if outcome > 0 else b""
        slot.control[field.encode()] = b"%d %d%b" % (generation, outcome, taken)
    if outcome == 0:
        return "unwritten"
    return "removed" if outcome < 0 else "written"
