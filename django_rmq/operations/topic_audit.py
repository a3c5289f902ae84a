"""The audit of a topic: its ledgers compared with what Redis holds, its strays, and what is overdue in it.

A stray is a loose record, which belongs to no message, or a misplaced message, which waits in a wrong slot. The audit reads
every slot, so it is for the command ``rmqaudit``, and not for pages. ``audit_trail`` records what people did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from django_rmq.core.commands import claims, inspect, operate, send
from django_rmq.core.commands.broker_interface import Broker, run_all, walk
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.bounds import MAX_PRIORITY
from django_rmq.core.model.envelope import stored_basis
from django_rmq.core.model.ledger import Ledger
from django_rmq.core.model.replies import RECORDS, Entry
from django_rmq.core.model.scores import LAST_RETRY
from django_rmq.core.model.topic import Topic, TopicType, former_slot_counts, slot_counts
from django_rmq.core.producer.placement import slot_of
from django_rmq.core.topic_registration import as_registered
from django_rmq.exceptions import ConfigurationError, RmqError, ServerTrouble
from django_rmq.operations.bulk import STEP_BYTES

Answered = TypeVar("Answered")

SLOTS_AT_ONCE = 200
GRACE_SECONDS = 5
"""Seconds after its time-out by which a delivery is normally swept."""


@dataclass(slots=True)
class Overdue:
    """The overdue messages and deliveries of a topic."""

    oldest_due_seconds: float | None = None
    """How long the oldest waiting message has been due; None if none is due, or the topic orders by priority."""
    oldest_due_slot: int | None = None
    undrained_seconds: float | None = None
    """Priority topics: the longest time for which a slot has not been empty."""
    undrained_slot: int | None = None
    overdue_deliveries: int = 0
    """Deliveries that were neither extended nor timed out, because no worker serves their slots."""
    consumers: int = 0
    """The largest number of Spark consumers that a slot remembers."""


@dataclass(slots=True)
class Strays:
    """The strays found, and how many of them were repaired."""

    loose: Counter[str] = field(default_factory=Counter)
    """Kind of record → how many belong to no message."""
    misplaced: int = 0
    """The number of waiting messages in a wrong slot; an equal message may run elsewhere at the same time."""
    mended: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def found(self) -> int:
        """The number of all strays found."""
        return self.loose.total() + self.misplaced


def overdue(broker: Broker, topic: Topic) -> Overdue:
    """Return the overdue messages and deliveries of ``topic``."""
    overdue_sums, now_ms = Overdue(), broker.now_ms()
    late = now_ms - (topic.timeout + GRACE_SECONDS) * 1000
    slots = range(topic.slots)
    overdue_sums.overdue_deliveries = sum(
        walk(broker, (inspect.count_between(topic, slot, "prepare", max_score=late) for slot in slots))
    )
    remembered = walk(broker, (claims.count_consumers(topic, slot) for slot in slots))
    overdue_sums.consumers = max(remembered, default=0)
    for slot, counts in enumerate(
        walk(broker, (inspect.count(topic, slot) for slot in slots), SLOTS_AT_ONCE)
    ):
        if counts.oldest_due_ms is not None:
            seconds = max(0, now_ms - counts.oldest_due_ms) / 1000
            if overdue_sums.oldest_due_seconds is None or seconds > overdue_sums.oldest_due_seconds:
                overdue_sums.oldest_due_seconds, overdue_sums.oldest_due_slot = seconds, slot
        if counts.undrained_since_ms is not None:
            seconds = max(0, now_ms - counts.undrained_since_ms) / 1000
            if overdue_sums.undrained_seconds is None or seconds > overdue_sums.undrained_seconds:
                overdue_sums.undrained_seconds, overdue_sums.undrained_slot = seconds, slot
    return overdue_sums


def find_strays(broker: Broker, topic: Topic, *, repair: bool) -> Iterator[Strays]:
    """Find the strays among all records and all waiting messages of ``topic``; repair what is possible if requested.

    Yields the same ``Strays`` after each step. A repair deletes loose records, and sends a misplaced message
    to its own slot before it deletes it from the wrong one: after a crash in between it exists twice, and is
    never lost.
    """
    strays = Strays()
    # If messages have slot bases of their own, the right slot of a message is not known by its member.
    placed = not broker.has_slot_bases(topic)
    for first in range(0, topic.slots, SLOTS_AT_ONCE):
        slots = list(range(first, min(first + SLOTS_AT_ONCE, topic.slots)))
        for kind in RECORDS:
            yield from _loose(broker, topic, slots, kind, repair, strays)
        if placed and topic.slots > 1:
            yield from _misplaced(broker, topic, slots, repair, strays)
    yield strays


def _answers(
    broker: Broker, slots: Sequence[int], calls: Sequence[Call[Answered]], strays: Strays
) -> Iterator[tuple[int, Answered]]:
    """Yield the answer of each slot, and record the slots that have none. Raises ``ServerTrouble``."""
    for slot, answer in zip(slots, run_all(broker, calls), strict=True):
        if isinstance(answer, ServerTrouble):
            raise answer
        if isinstance(answer, RmqError):
            strays.problems.append(f"slot {slot}: {answer}")
        else:
            yield slot, answer


def _loose(
    broker: Broker, topic: Topic, slots: list[int], kind: str, repair: bool, strays: Strays
) -> Iterator[Strays]:
    cursors = dict.fromkeys(slots, "0")
    seen: set[tuple[int, bytes]] = set()
    while cursors:
        calls = [operate.find_orphans(topic, slot, kind, cursor, repair) for slot, cursor in cursors.items()]
        asked, cursors = list(cursors), {}
        for slot, answer in _answers(broker, asked, calls, strays):
            # A hash that is being rehashed may return some fields twice.
            fresh = {(slot, member) for member in answer.members} - seen
            seen |= fresh
            strays.loose[kind] += len(fresh)
            strays.mended += len(fresh) if repair else 0
            if answer.cursor != "0":
                cursors[slot] = answer.cursor
        yield strays


def _misplaced(
    broker: Broker, topic: Topic, slots: list[int], repair: bool, strays: Strays
) -> Iterator[Strays]:
    after: dict[int, tuple[str, bytes] | None] = dict.fromkeys(slots)
    while after:
        limit, most = max(10, 2_000 // len(after)), STEP_BYTES // len(after)
        calls = [
            inspect.list_messages(topic, slot, "store", after=cursor, limit=limit, max_bytes=most)
            for slot, cursor in after.items()
        ]
        asked, after = list(after), {}
        for slot, page in _answers(broker, asked, calls, strays):
            for entry in page.entries:
                own = _own_slot(topic, entry)
                if own is not None and own != slot:
                    strays.misplaced += 1
                    if repair and _move(broker, topic, slot, own, entry):
                        strays.mended += 1
            if page.cursor is not None:
                after[slot] = page.cursor
        yield strays


def _own_slot(topic: Topic, entry: Entry) -> int | None:
    """Return the slot to which a waiting message belongs, or None if it is unknown."""
    basis = stored_basis(topic, entry.member, entry.envelope)
    return None if basis is None else slot_of(basis, topic.slots)


def _move(broker: Broker, topic: Topic, slot: int, own: int, entry: Entry) -> bool:
    """Send a message to its own slot and delete it from the wrong one; return whether that was possible."""
    member, score = entry.member, entry.score
    if topic.is_fifo:
        return False  # Its place is one among the messages of this slot.
    if topic.debounce_ms:
        score = float(int(score))  # Its fraction belongs to its former wait.
    # Such a score is that of a retry, whose number of retries a send would lose.
    if (
        score != int(score)
        or not (topic.min_priority if topic.is_priority else LAST_RETRY + 1) <= score <= MAX_PRIORITY
    ):
        return False
    envelopes = [] if entry.envelope is None else [entry.envelope]
    (there,) = broker.run(inspect.describe_messages(topic, own, [member]))
    # An equal message in the own slot makes the send unnecessary, unless the topic collects the bodies of both.
    if topic.accumulate or (there.store is None and there.retry is None):
        if topic.type is TopicType.RANGE_MERGE:
            in_ms = max(0, int(score) - broker.now_ms())
            (sent,) = broker.run(send.send_merge(topic, own, in_ms, [member], envelopes))
        else:
            (sent,) = broker.run(send.send_replace(topic, own, [int(score)], [member], envelopes))
        if sent.status == "refused":
            return False
    # The message is deleted after it was sent: a crash in between leaves it twice, and never loses it.
    broker.run(operate.remove(topic, slot, [member], "live"))
    return True


DRIFTS = ("live", "dead", "delivery", "claim")
DEPTHS = ("store", "prepare", "retry", "dead", "claimed")


@dataclass(frozen=True, slots=True)
class Audit:
    """The sums of the ledgers of all slots of a topic."""

    topic: Topic
    """The topic with its registered slots."""
    counters: Mapping[str, int]
    depths: Mapping[str, int]
    drifting: list[dict[str, int]]
    """Slots that do not balance: the slot, and the difference in each of ``DRIFTS``."""
    adopted: int
    """The number of messages that were recorded as foreign."""

    @property
    def moving(self) -> int:
        """The number of messages that have left one slot and not reached another."""
        return sum(
            self.counters.get(f"{kind}_out", 0) - self.counters.get(f"{kind}_in", 0)
            for kind in ("moved", "moved_dead")
        )


def audit(broker: Broker, topic: Topic, registered: dict[str, object], *, adopt: bool) -> Audit:
    """Read the ledgers of a topic. ``adopt``: record messages beyond the account as foreign."""
    topic = as_registered(topic, registered)
    # Slots from before a re-slotting are empty, and their counters describe what happened then.
    counted = replace(topic, slots=max((topic.slots, *former_slot_counts(registered))))
    counters: Counter[str] = Counter()
    depths = dict.fromkeys(DEPTHS, 0)
    drifting, adopted = [], 0
    slots = range(counted.slots)
    for slot, ledger in enumerate(walk(broker, (inspect.audit_ledger(counted, slot) for slot in slots))):
        # Below 0 messages are lost, which must stay visible.
        if adopt and ledger.live_drift > 0:
            booked = _adopt(broker, topic, slot, ledger)
            adopted += booked
            ledger = broker.run(inspect.audit_ledger(topic, slot)) if booked else ledger
        for name, value in ledger:
            counters[name] += value
        for name in DEPTHS:
            depths[name] += getattr(ledger, name)
        if not ledger.balanced:
            drifting.append({"slot": slot, **{name: getattr(ledger, f"{name}_drift") for name in DRIFTS}})
    return Audit(topic, dict(sorted(counters.items())), depths, drifting, adopted)


def check_is_settled(topic: Topic, registered: dict[str, object]) -> None:
    """Raise ``ConfigurationError`` if a topic is being re-slotted, because its messages are between slots."""
    if registered and len(slot_counts(registered)) > 1:
        raise ConfigurationError(
            f'topic "{topic.name}" is being re-slotted: look for strays after that has finished'
        )


def _adopt(broker: Broker, topic: Topic, slot: int, ledger: Ledger) -> int:
    """Record the drift in ``ledger`` as foreign, unless another adoption came first; return how much was recorded."""
    drift = ledger.live_drift
    return drift if broker.run(operate.adopt(topic, slot, drift, ledger["foreign"])) == "ok" else 0
