"""One slot during a transition: its keys, the current time, and the counters to raise.

A transition is a function of a ``Slot`` and the arguments of its call, in the order of the script's header. ``on`` names
the keys that it opens, like that header.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from django_rmq.core.model.keys import slot_keys, wake_channel
from django_rmq.core.model.replies import MOST, FailureRecord
from django_rmq.core.model.topic import Topic
from tests.oracle.keyspace import Hash, Memory, SortedSet
from tests.oracle.numbers import score_text

SETS = frozenset(
    {
        "store", "prepare", "retry", "dead", "claimants", "claim", "outcome_times", "delivery_outcomes",
        "inserting",
    }
)  # fmt: skip
SENDING = ("store", "retry", "body", "stats", "control")
ENDING = (
    "store", "prepare", "retry", "dead", "inflight", "deaths", "failures", "body", "stats", "control",
    "prepare_body", "outcomes", "outcome_times", "delivery_outcomes",
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
        """Return one of the sorted sets by its name."""
        found = getattr(self, state)
        assert isinstance(found, SortedSet)
        return found

    def records(self, kind: str) -> Hash:
        """Return one of the hashes by its name."""
        found = getattr(self, kind)
        assert isinstance(found, Hash)
        return found

    def runs(self, member: bytes) -> bool:
        """Return whether the member is in flight, or claimed by Spark."""
        return member in self.prepare or member in self.claim

    def waits(self, member: bytes) -> bool:
        """Return whether a copy of the member waits in Store, or rests as a retry."""
        return member in self.store or member in self.retry

    def flight(self, member: bytes) -> InFlight:
        """Return the record of a delivery."""
        return InFlight.parse(self.inflight.get(member))

    def holds(self, receipt: int, member: bytes) -> bool:
        """Return whether the delivery of ``member`` still has this receipt."""
        return self.is_receipt(receipt, member) and member in self.prepare

    def is_receipt(self, receipt: int, member: bytes) -> bool:
        """Return whether ``receipt`` is the recorded one of ``member``."""
        return self.inflight.get(member, b"").startswith(b"%d " % receipt)

    def failure_of(self, member: bytes) -> FailureRecord | None:
        """Return the last failure of a member."""
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
        over = max(0, len(rows) - MOST)
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
