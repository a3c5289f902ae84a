"""One slot during a transition: its keys, the current time, the counters to raise, and what all transitions share.

A transition is a function of a ``Slot`` and the arguments of its call, in the order of the script's header. ``on`` names
the keys that it opens, like that header.

A score carries the remaining retries: a message that waits as a retry of q has q deliveries left. An envelope may bring
limits of its own. A consumer that finds nothing sleeps until its due time or a wake-up.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from django_rmq.core.model.bounds import BATCH, MAX_PRIORITY, MAX_RETRIES_LIMIT, NEVER
from django_rmq.core.model.keys import slot_keys, wake_channel
from django_rmq.core.model.replies import FailureRecord
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import ServerRefused, SlotMoved
from tests.oracle.keyspace import Hash, Memory, SortedSet, bounded, ceil, floor, score_text

MOST_OUTCOMES = 10_000
"""How many outcomes a slot keeps."""

OUTCOMES = ("outcomes", "outcome_times", "delivery_outcomes")
SENDING = ("store", "retry", "body", "stats", "control")
ENDING = (
    "store", "prepare", "retry", "dead", "inflight", "deaths", "failures", "body", "stats", "control",
    "prepare_body", *OUTCOMES,
)  # fmt: skip
CLAIMING = ("claimants", "claim", "claims", "claim_body", "claim_failed")
_IN_FLIGHT = re.compile(rb"(\d+) ([^ :]+):?(\d*) ?(\S*) ?(\S*)")
_P = ParamSpec("_P")
_T = TypeVar("_T")


class InFlight(NamedTuple):
    """The record in ``inflight_{K}`` of a delivery: its receipt, its original score, its own time-out, and a person's mark."""

    receipt: int
    score: float
    mark: str = ""
    outlived: str = ""
    """``outlived``, if a newer copy of it was buried."""
    timeout: int | None = None
    """In seconds. None: that of the topic."""

    @classmethod
    def parse(cls, raw: bytes | None) -> InFlight:
        match = _IN_FLIGHT.match(raw or b"")
        if match is None:
            return cls(0, 0.0)
        timeout = int(match[3]) if match[3] else None
        return cls(int(match[1]), float(match[2]), match[4].decode(), match[5].decode(), timeout)

    def encode(self) -> bytes:
        timeout = "" if self.timeout is None else f":{self.timeout}"
        return (
            f"{self.receipt} {score_text(self.score)}{timeout} {self.mark} {self.outlived}".rstrip().encode()
        )


class Slot:
    """The keys of one slot that the transition names, and small functions that read them."""

    store: SortedSet
    prepare: SortedSet
    retry: SortedSet
    dead: SortedSet
    claimants: SortedSet
    claim: SortedSet
    claims: Hash
    claim_body: Hash
    claim_failed: Hash
    inflight: Hash
    deaths: Hash
    failures: Hash
    body: Hash
    stats: Hash
    control: Hash
    leaving: Hash
    arrived: Hash
    prepare_body: Hash
    outcomes: Hash
    outcome_times: SortedSet
    delivery_outcomes: SortedSet
    inserting: SortedSet

    def __init__(self, memory: Memory, topic: Topic, index: int) -> None:
        self.topic = topic
        self.index = index
        self.keys = slot_keys(memory.prefix, topic.name, index)
        micros = memory.micros()
        self.now_s, self.micros = divmod(micros, 1_000_000)
        self.now_ms = micros // 1000
        self.now_us = micros
        self.counts: Counter[str] = Counter()
        self.noted: dict[bytes, bytes] = {}
        """Digest of a member -> what is to be kept about it at the end of the transition."""
        self.memory = memory
        # A transition that does not name it touches no claimed message.
        self.claim = SortedSet()
        self.claimants = SortedSet()

    @property
    def max_retries(self) -> int:
        """The slot's own setting if it has one, otherwise the caller's."""
        return int(self.control.get(b"max_retries", self.topic.max_retries))

    @property
    def timeout(self) -> int:
        """The time-out in seconds: the slot's own setting if it has one, otherwise the caller's."""
        return int(self.control.get(b"timeout", self.topic.timeout))

    @property
    def moved_to(self) -> int | None:
        """The slot count that the slot was given, if the caller has another."""
        slots = self.control.get(b"slots")
        return None if slots is None or int(slots) == self.topic.slots else int(slots)

    @property
    def room(self) -> int:
        """The gate is open while Prepare holds fewer messages than this."""
        return 1 if self.topic.serial else self.topic.max_prepared

    def members(self, state: str) -> SortedSet:
        found = getattr(self, state)
        assert isinstance(found, SortedSet)
        return found

    def records(self, kind: str) -> Hash:
        found = getattr(self, kind)
        assert isinstance(found, Hash)
        return found

    def runs(self, member: bytes) -> bool:
        return member in self.prepare or member in self.claim

    def waits(self, member: bytes) -> bool:
        """Return whether a copy of the member waits in Store, or rests as a retry."""
        return member in self.store or member in self.retry

    def flight(self, member: bytes) -> InFlight:
        return InFlight.parse(self.inflight.get(member))

    def holds(self, receipt: int, member: bytes) -> bool:
        return self.is_receipt(receipt, member) and member in self.prepare

    def is_receipt(self, receipt: int, member: bytes) -> bool:
        return self.inflight.get(member, b"").startswith(b"%d " % receipt)

    def failure_of(self, member: bytes) -> FailureRecord | None:
        raw = self.failures.get(member)
        return None if raw is None else FailureRecord.parse(raw)

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter of the slot's ledger, at the end of the transition."""
        self.counts[name] += by

    def write_outcomes(self) -> None:
        """Keep what was noted, and forget what is too old, or too much; see ``outcomes``."""
        at = max([float(self.now_ms), *self.delivery_outcomes.values()])
        self.outcomes.update(self.noted)
        self.outcome_times.update(dict.fromkeys(self.noted, at))
        rows = self.outcome_times.rows()
        over = max(0, len(rows) - MOST_OUTCOMES)
        before = self.now_ms - (self.topic.outcome_retention_ms or 0)
        gone = [found for found, ms in rows if ms <= before] or [found for found, _ in rows[:over]]
        for found in gone[:2_000]:
            del self.outcomes[found], self.outcome_times[found]

    def configure(self) -> None:
        """Store the definition of the caller's topic."""
        self.control[b"slots"] = b"%d" % self.topic.slots
        self.control[b"timeout"] = b"%d" % self.topic.timeout
        self.control[b"max_retries"] = b"%d" % self.topic.max_retries

    def publish(self, told: int | None = None) -> None:
        """Publish on the topic's wake-up channel. ``told``: the value to publish instead of the slot."""
        channel = wake_channel(self.memory.prefix, self.topic.name)
        self.memory.channels.publish(channel, (self.topic.name, self.index if told is None else told))

    @property
    def floor_priority(self) -> int:
        """Return the priority score up to which a score is read as a retry."""
        return max(16, self.max_retries)

    def is_retry(self, score: float) -> bool:
        """Return whether the message waits as a retry. On fifo topics a score is a place, also after failures."""
        if self.topic.is_fifo:
            return False
        if not self.topic.is_priority:
            return score <= 999
        return score <= self.floor_priority or (math.isfinite(score) and score % 1 != 0)

    def is_fresh(self, score: float) -> bool:
        """Return whether a send may use this score."""
        if self.is_retry(score) or not math.isfinite(score) or score % 1 != 0:
            return False
        if self.topic.is_fifo:
            return 0 <= score <= LARGEST_WITH_RETRIES
        return score <= (MAX_PRIORITY if self.topic.is_priority else 1e14)

    def keeps_first(self, score: float) -> bool:
        """Return whether of two copies of a message the earlier one keeps its time, or its place."""
        kind = self.topic.type
        return kind is TopicType.FIFO or (kind is TopicType.RANGE_MERGE and not self.is_retry(score))

    def is_due(self, score: float) -> bool:
        """Return whether the time of a score has come. A place in a fifo line is due from its millisecond on."""
        return score < self.now_ms + 1 if self.topic.is_fifo else score <= self.now_ms

    def budget(self, score: float, member: bytes, most: int) -> int:
        """Return the retries left, at most ``most``, for a delivery of ``member`` that is taken with this score."""
        if self.topic.is_fifo:
            failure = self.failure_of(member)
            return bounded(most - (failure.times if failure else 0), 0, most)
        if not self.is_retry(score):
            return most
        q = floor(score)
        if self.topic.is_priority and score > self.floor_priority:
            q = fraction(score)
        return bounded(q - 1, 0, most)

    def retry_score(self, q: float, first: float) -> float:
        """Return the Store score of a retry of ``q``. ``first``: the score before the first failure."""
        if self.topic.is_fifo:
            return first
        q = bounded(q, 1, MAX_RETRIES_LIMIT)
        topic = self.topic
        if topic.is_priority and topic.retry_priority == "original" and first > self.floor_priority:
            return math.floor(min(first, LARGEST_WITH_RETRIES)) + q / 1024
        return float(q)

    def first_score(self, score: float, failure: FailureRecord | None) -> float:
        """Return the score of a message before its first failure, if known."""
        if not self.is_retry(score):
            return score
        if self.topic.is_priority and score > self.floor_priority:
            return floor(score)
        return float(failure.score) if failure else score

    def own_retries(self, envelope: bytes | None) -> int:
        """Return how often a message may be tried again: at most as often as its topic allows."""
        match = _LIMITS.match(envelope or b"")
        return min(int(match[1]), self.max_retries) if match and match[1] else self.max_retries

    def stamp(self, timeout: int | None, left: float) -> float:
        """Return the score in Prepare of a delivery. One with a shorter time-out than its topic's looks older than it is."""
        return float((self.now_s - shortened_by(timeout, self.timeout)) * 1000 + left)

    def check_fresh(self, scores: Sequence[float]) -> None:
        """Refuse a score that would be read as a retry, and a value that is not a score."""
        for score in scores:
            if not self.is_fresh(score):
                raise ServerRefused(f"ERR score {score} is out of bounds")

    def check_not_moved(self) -> None:
        """Refuse a caller with another slot count."""
        if self.moved_to is not None:
            raise SlotMoved(f"the topic now has {self.moved_to} slots")

    def next_due(self, *, at_once: bool, awaits_ends: bool = False) -> int | None:
        """Return the earliest time (ms) at which asking again can help. None: there is none.

        ``awaits_ends``: leave out the time-outs of deliveries, which end before.
        """
        dues: list[float] = [self.now_ms] if at_once else []
        if not self.topic.is_priority:
            whole = math.floor if self.topic.is_fifo else math.ceil
            dues += sorted(whole(min(s, NEVER)) for s in self.store.values() if not self.is_due(s))[:1]
        if self.retry:
            dues.append(floor(min(self.retry.values())))
        if self.prepare and not awaits_ends:
            dues.append((floor(min(self.prepare.values()) / 1000) + self.timeout + 1) * 1000)
        dues += [ceil(ends) for ends in self.claimants.values()]
        return bounded(min(dues), 0, NEVER) if dues else None

    def sleep_until(self, due: int) -> None:
        """Record until when only a wake-up reaches the caller."""
        self.control[b"sleeping_until"] = b"%d" % due

    def wake(self, due: float | None) -> None:
        """Wake a caller that sleeps past ``due``, once: the next one to fall asleep writes ``sleeping_until`` again."""
        sleeping_until = self.control.get(b"sleeping_until")
        if sleeping_until is not None and due is not None and due < int(sleeping_until):
            del self.control[b"sleeping_until"]
            self.publish()

    def wake_at_gate(self, due: float | None, *, ended: bool) -> None:
        """Wake for ``due``, or at once if a delivery has ended and a caller waits at a gate that is now open."""
        waits = self.control.get(b"sleeping_until") == b"%d" % GATE
        self.wake(0 if ended and waits and len(self.prepare) < self.room else due)

    def note_undrained(self) -> None:
        """Record since when Store of a priority topic has not been empty, because priorities contain no time."""
        if not self.topic.is_priority:
            return
        if self.store:
            self.control.setdefault(b"undrained_since", b"%d" % self.now_ms)
        else:
            self.control.pop(b"undrained_since", None)


SETS = {name for name, kind in Slot.__annotations__.items() if kind == "SortedSet"}


def grouped(arguments: Sequence[Any], size: int) -> list[tuple[Any, ...]]:
    """Return the last arguments of a script in tuples of this size."""
    return list(zip(*[iter(arguments)] * size, strict=True))


_Rule = Callable[Concatenate[Slot, _P], _T]
Transition = Callable[Concatenate[Memory, Topic, int, _P], _T]


@contextmanager
def opened(memory: Memory, topic: Topic, index: int, names: Sequence[str]) -> Iterator[Slot]:
    """Open the named keys of a slot. A transition is atomic: half of one is never visible."""
    with memory.lock:
        slot = Slot(memory, topic, index)
        for name in names:
            key = getattr(slot.keys, name)
            setattr(slot, name, memory.get(key, SortedSet) if name in SETS else memory.get(key, Hash))
        yield slot
        if slot.noted:
            slot.write_outcomes()
        for counter, by in slot.counts.items():
            if by:
                field = counter.encode()
                slot.stats[field] = b"%d" % (int(slot.stats.get(field, 0)) + by)
        for name in names:
            memory.keep(getattr(slot.keys, name), getattr(slot, name))


def on(*names: str) -> Callable[[_Rule[_P, _T]], Transition[_P, _T]]:
    """Turn a rule of one slot into a transition of the memory, for which it opens the named keys."""

    def transition(rule: _Rule[_P, _T]) -> Transition[_P, _T]:
        @wraps(rule)
        def run(memory: Memory, topic: Topic, slot: int, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            with opened(memory, topic, slot, names) as s:
                return rule(s, *args, **kwargs)

        return run

    return transition


GATE = 1 << 53
"""``sleeping_until`` of a caller that was answered busy, and waits for the gate to open."""

LARGEST_WITH_RETRIES = (1 << 43) - 1
"""The largest score with room for ten bits of retries below it in a double. From 2^43 on they would be rounded."""


def fraction(score: float) -> float:
    """Return the retries in the fraction of a score, before they are limited."""
    return floor(score % 1 * 1024 + 0.5)


_LIMITS = re.compile(rb'\d+ \{"!":"(\d*) (\d*)"')


def own_timeout(envelope: bytes | None) -> int | None:
    """Return the time-out of a message in seconds. None: that of its topic."""
    match = _LIMITS.match(envelope or b"")
    return int(match[2]) if match and match[2] else None


def shortened_by(timeout: int | None, topics: int) -> int:
    return 0 if timeout is None else max(0, topics - timeout)


LONGEST_LEASE_MS = 86_400_000
"""The maximum lease of a claim's consumer in ms: a day."""


def check_batch(items: Sequence[object], at_least: int = 0) -> None:
    """Refuse more messages than a script takes."""
    if not at_least <= len(items) <= BATCH:
        raise ServerRefused("ERR n is out of bounds" if at_least else "ERR too many members")


def check_lease(lease_ms: int, number: int = 1) -> None:
    """Refuse a lease or a claim number that no RMQ consumer uses."""
    if not (1 <= lease_ms <= LONGEST_LEASE_MS and 1 <= number < GATE):
        raise ServerRefused("ERR number or lease is out of bounds")


def earlier(due: int | None, other: int | None) -> int | None:
    return other if due is None else due if other is None else min(due, other)


def earliest(dues: list[float | None]) -> float | None:
    return min((due for due in dues if due is not None), default=None)
