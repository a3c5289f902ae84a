"""History: what a topic held and did, minute by minute, sampled by the workers and kept in Redis.

Once a minute one worker reads the depths and the ledger of a topic's slots and keeps their sums as one record of some 150
bytes in a hash; how late messages were handed out is counted by every worker and goes into the next record (and, with how
long listeners took, into counts that are never reset, for histograms of other systems). Rates are
differences of the ledger's counters, so nothing is counted twice or lost, whoever samples. A minute in which nobody
sampled is a gap.

Size: some 250 bytes per topic and minute in Redis, 0.7 MB per topic for 48 hours. Cost: a script of 1 to 2 ms per 256 slots
and minute. Of more than 65,536 slots every second (fourth, …) is read and the sums are scaled; above 4,096 the reading is
spread over the minute.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, islice
from typing import TypeVar
from zlib import crc32

from django_rmq.core.calls import history
from django_rmq.core.calls.broker import Broker, run_all
from django_rmq.core.calls.call import Call
from django_rmq.core.calls.walk import walk
from django_rmq.core.logs.complaints import Complaints
from django_rmq.core.logs.safe import safe_logger
from django_rmq.core.words.answers import Delivery
from django_rmq.core.words.bounds import BATCH
from django_rmq.core.words.samples import LATENESS_BUCKETS, Sample, Times
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import RmqError, ServerTrouble

logger = safe_logger("django_rmq.history")

EDGES_MS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 60_000, 120_000, 300_000, 600_000,
    1_800_000, 3_600_000, 10_800_000, 43_200_000, 86_400_000,
)  # fmt: skip
"""The classes of lateness: up to 1 ms, up to 2 ms, …, up to a day, more."""

SLOTS_AT_ONCE = 256
"""Slots that one script reads."""

SPREAD_SLOTS = 4_096
"""Of more slots the reading is spread over ``SPREAD_SECONDS``."""

SPREAD_SECONDS = 45.0
MOST_SLOTS = 65_536
"""Of more slots only every second, fourth, … is read."""

LARGEST = 1 << 53
"""Numbers of a record: beyond it they could not be told apart when they are divided."""

LONGEST_GAP_MINUTES = 5
"""A rate over a longer gap says nothing of any minute in it."""

FLUSH_SECONDS = 5.0
"""How long lateness is counted before it goes to Redis."""


# --- what is read -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Depth:
    """How many messages a topic held at one instant, by state."""

    store: int
    due: int
    """Of ``store``: could be taken."""
    prepare: int
    claimed: int
    """Held by Spark consumers."""
    retry: int
    dead: int
    oldest_due_ms: int | None
    """Time topics: since when (ms) the most overdue message is due."""
    undrained_since_ms: int | None = None
    """Priority topics: since when (ms) the slot has not been empty that was so for the longest."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened per minute."""

    sent: float
    merged: float
    """Of ``sent``: met a waiting copy (merged or replaced)."""
    handed_out: float
    committed: float
    failed: float
    """Failed, timed out or rejected deliveries."""
    died: float

    @property
    def merge_ratio(self) -> float | None:
        """The part of what was sent that met a waiting copy; None: nothing was sent."""
        return self.merged / self.sent if self.sent else None


@dataclass(frozen=True, slots=True)
class Lateness:
    """How long after their due time messages were handed out: how many, by class of ``EDGES_MS``.

    Counted are fresh messages of topics with due times, when a worker of this package takes them.
    """

    counts: tuple[int, ...]

    @property
    def messages(self) -> int:
        return sum(self.counts)

    def percentile(self, part: float) -> float:
        """Return the lateness in ms that this part (0 … 1) of the messages did not exceed, interpolated in its class."""
        wanted = part * self.messages
        for bucket, reached in enumerate(accumulate(self.counts)):
            if reached >= wanted and self.counts[bucket]:
                low = EDGES_MS[bucket - 1] if bucket else 0
                high = EDGES_MS[bucket] if bucket < len(EDGES_MS) else EDGES_MS[-1]
                return low + (high - low) * (1 - (reached - wanted) / self.counts[bucket])
        return 0.0


@dataclass(frozen=True, slots=True)
class Minute:
    """One minute of a topic, or several in one. What nobody sampled is None."""

    at_ms: int
    """When it begins."""
    sampled_ms: int | None = None
    depth: Depth | None = None
    """At ``sampled_ms``."""
    rates: Rates | None = None
    """From the record before to this one."""
    lateness: Lateness | None = None
    """The same; None also where nothing was handed out late or in time."""
    is_scaled: bool = False
    """Not all slots were read."""


def read(broker: Broker, topic: Topic, hours: float = 48, *, step: int = 1) -> list[Minute]:
    """Return the last ``hours`` of ``topic``, oldest first, each ``step`` minutes in one; gaps are there, and empty.

    The present minute is the last one. Of several minutes in one, depths are the last sampled, rates the average,
    lateness the sum.
    """
    now = broker.now_ms() // 60_000
    count = max(1, round(hours * 60 / step)) * step
    # Steps begin at the same instants whenever one asks.
    first = (now // step + 1) * step - count
    begin = first - LONGEST_GAP_MINUTES
    calls = (
        history.minutes(topic, start, min(start + BATCH - 1, now)) for start in range(begin, now + 1, BATCH)
    )
    records = [record for some in walk(broker, calls) for record in some]
    return _read(records, first, count, now, step)


def read_last(broker: Broker, topics: Mapping[Topic, int]) -> dict[Topic, list[Minute] | RmqError]:
    """Return the last so many minutes of each topic, up to an hour, in two round trips; or why they cannot be read."""
    now = broker.now_ms() // 60_000
    calls = [
        history.minutes(topic, now + 1 - count - LONGEST_GAP_MINUTES, now) for topic, count in topics.items()
    ]
    return {
        topic: records if isinstance(records, RmqError) else _read(records, now + 1 - count, count, now, 1)
        for (topic, count), records in zip(topics.items(), _answers(broker, calls), strict=True)
    }


T = TypeVar("T")


def _answers(broker: Broker, calls: Iterable[Call[T]]) -> list[T | RmqError]:
    """Run calls; return their answers, and errors of single topics in their places. Raises ``ServerTrouble``."""
    found = run_all(broker, calls)
    for one in found:
        if isinstance(one, ServerTrouble):
            raise one
    return found


def _read(records: Sequence[bytes | None], first: int, count: int, now: int, step: int) -> list[Minute]:
    before: _Record | None = None
    found: list[Minute] = []
    for minute, raw in enumerate(records, first - LONGEST_GAP_MINUTES):
        record = _Record.parse(raw)
        if minute >= first:
            found.append(_minute(minute, record, before))
        before = record or before
    found += [Minute(minute * 60_000) for minute in range(now + 1, first + count)]
    if step == 1:
        return found
    return [_together(found[at : at + step]) for at in range(0, count, step)]


@dataclass(frozen=True, slots=True)
class Totals:
    """What a topic has counted since its first message."""

    sent: int
    merged: int
    """Of ``sent``: met a waiting copy (merged or replaced)."""
    handed_out: int
    committed: int
    failed: int
    """Failed, timed out or rejected deliveries."""
    died: int
    expired: int | None = None
    """Of ``failed``: timed out. This and what follows is None in records of earlier versions."""
    rejected: int | None = None
    """Of ``failed``: rejected."""
    released: int | None = None
    """Given back by a worker that had not begun them."""
    stale: int | None = None
    """Came too late: told of deliveries that had ended."""
    fenced: int | None = None
    """Prepares by a worker that another one had succeeded in the slot."""
    replayed: int | None = None


@dataclass(frozen=True, slots=True)
class Latest:
    """The youngest record of a topic."""

    sampled_ms: int
    depth: Depth
    totals: Totals
    is_scaled: bool
    """Not all slots were read."""


def totals(broker: Broker, topics: Sequence[Topic]) -> list[Totals | RmqError]:
    """Read what all slots of each topic have counted until now, in a script of 1 to 2 ms per 256 of them; or why not."""
    calls = [
        history.sample(topic, range(start, min(start + SLOTS_AT_ONCE, topic.slots)))
        for topic in topics
        for start in range(0, topic.slots, SLOTS_AT_ONCE)
    ]
    answers = iter(_answers(broker, calls))
    found: list[Totals | RmqError] = []
    for topic in topics:
        samples: list[Sample] = []
        error: RmqError | None = None
        for part in islice(answers, -(-topic.slots // SLOTS_AT_ONCE)):
            if isinstance(part, RmqError):
                error = error or part
            else:
                samples.append(part)
        found.append(error or Totals(*_counted(reduce(Sample.plus, samples).counters)[1]))
    return found


def times(broker: Broker, topics: Sequence[Topic]) -> list[Times | RmqError]:
    """Return all durations that were ever counted of each topic; or why they cannot be read."""
    return _answers(broker, [history.times(topic) for topic in topics])


def latest(broker: Broker, topics: Sequence[Topic]) -> list[Latest | RmqError | None]:
    """Return the youngest record of each topic, of the last ``LONGEST_GAP_MINUTES``; None: there is none."""
    if not topics:
        return []
    now = broker.now_ms() // 60_000
    calls = [history.minutes(topic, now - LONGEST_GAP_MINUTES, now) for topic in topics]
    return [
        records if isinstance(records, RmqError) else _youngest(records)
        for records in _answers(broker, calls)
    ]


def _youngest(records: Sequence[bytes | None]) -> Latest | None:
    for raw in reversed(records):
        record = _Record.parse(raw)
        if record is not None:
            return Latest(
                record.sampled_ms, record.depth, Totals(*record.counters), record.slots < record.asked
            )
    return None


def _together(minutes: list[Minute]) -> Minute:
    sampled = [minute for minute in minutes if minute.depth]
    rates = [minute.rates for minute in minutes if minute.rates]
    late = [minute.lateness.counts for minute in minutes if minute.lateness]
    return Minute(
        minutes[0].at_ms,
        sampled[-1].sampled_ms if sampled else None,
        sampled[-1].depth if sampled else None,
        Rates(*(sum(getattr(one, name) for one in rates) / len(rates) for name in Rates.__slots__))
        if rates
        else None,
        Lateness(tuple(map(sum, zip(*late, strict=True)))) if late else None,
        any(minute.is_scaled for minute in sampled),
    )


_COUNTED = ("sent", "merged", "handed_out", "committed", "failed", "died")
_ALSO_COUNTED = ("expired", "rejected", "released", "stale", "fenced", "replayed")


@dataclass(frozen=True, slots=True)
class _Record:
    """What is kept of one minute:
    ``ms slots asked store due prepare claimed retry dead oldest sent … replayed undrained|bucket:n …``.

    Records of earlier versions end with ``died`` or ``replayed``.
    """

    sampled_ms: int
    slots: int
    asked: int
    """Of how many slots: more than ``slots`` where sums are scaled, or a slot could not be read."""
    depth: Depth
    counters: tuple[int, ...]
    """Those of ``_COUNTED``, and of ``_ALSO_COUNTED`` where they were written down."""
    late: tuple[int, ...] = ()

    @classmethod
    def of(cls, sample: Sample, topic: Topic, now_ms: int) -> _Record:
        scale = topic.slots / sample.slots if sample.slots else 0
        claimed, counters = _counted(sample.counters)
        depths = (sample.store, sample.due, sample.prepare, sample.retry, sample.dead)
        store, due, prepare, retry, dead = (round(value * scale) for value in depths)
        return cls(
            now_ms,
            sample.slots,
            topic.slots,
            Depth(
                *(store, due, prepare, round(claimed * scale), retry, dead),
                sample.oldest_due_ms,
                sample.undrained_since_ms,
            ),
            tuple(round(value * scale) for value in counters),
        )

    def encode(self) -> str:
        depth = self.depth
        numbers = (
            *(self.sampled_ms, self.slots, self.asked, depth.store, depth.due, depth.prepare, depth.claimed),
            *(
                depth.retry,
                depth.dead,
                depth.oldest_due_ms or 0,
                *self.counters,
                depth.undrained_since_ms or 0,
            ),
        )
        return " ".join(map(str, numbers))

    @classmethod
    def parse(cls, raw: bytes | None) -> _Record | None:
        """Read a record; what is none of ours is a gap."""
        try:
            head, _, tail = (raw or b"").decode().partition("|")
            numbers = list(map(int, head.split(" ")))
            ms, slots, asked, store, due, prepare, claimed, retry, dead, oldest, *counters = numbers
            late = [0] * LATENESS_BUCKETS
            for pair in tail.split():
                bucket, _, count = pair.partition(":")
                late[int(bucket)] = int(count)
            if not 0 <= min(*numbers, *late) <= max(*numbers, *late) <= LARGEST:
                return None
        except (ValueError, IndexError):
            return None
        whole = len(_COUNTED) + len(_ALSO_COUNTED)
        undrained = counters.pop() if len(counters) == whole + 1 else 0
        if len(counters) not in (len(_COUNTED), whole):
            return None
        depth = Depth(store, due, prepare, claimed, retry, dead, oldest or None, undrained or None)
        return cls(ms, slots, asked, depth, tuple(counters), tuple(late))


def _counted(sums: Mapping[str, int]) -> tuple[int, tuple[int, ...]]:
    """Return what Spark consumers hold, and the counters of a record, from sums of the ledger's."""
    return max(0, sums["claimed"] - sums["acked"] - sums["claim_returned"]), (
        sums["sent"],
        sums["merged"] + sums["replaced"],
        sums["prepared"] + sums["claimed"],
        sums["committed"] + sums["acked"],
        sums["failed"] + sums["expired"] + sums["rejected"],
        sums["died"] + sums["lapsed"],
        sums["expired"],
        sums["rejected"],
        sums["released"],
        sums["stale"],
        sums["fenced"],
        sums["revived"] + sums["replay_merged"],
    )


def _minute(minute: int, record: _Record | None, before: _Record | None) -> Minute:
    if record is None:
        return Minute(minute * 60_000)
    return Minute(
        minute * 60_000,
        record.sampled_ms,
        record.depth,
        _rates(record, before),
        Lateness(record.late) if any(record.late) else None,
        record.slots < record.asked,
    )


def _rates(record: _Record, before: _Record | None) -> Rates | None:
    if before is None or before.asked != record.asked or before.slots != record.slots:
        return None
    minutes = (record.sampled_ms - before.sampled_ms) / 60_000
    raised = [record.counters[at] - before.counters[at] for at in range(len(_COUNTED))]
    # Less than before: keys were deleted, or the server lost its data.
    if not 0 < minutes <= LONGEST_GAP_MINUTES + 1 or min(raised) < 0:
        return None
    return Rates(*(number / minutes for number in raised))


# --- how it is written ------------------------------------------------------------------------------

Steps = Callable[[], Generator[float, None, None]]
"""A duty of a worker: does a small step and says after how many seconds it wants the next."""


def sampling(
    broker: Broker,
    topics: Iterable[Topic],
    hours: int,
    is_ours: Callable[[Topic], bool],
    present: Callable[[Topic], Topic] = lambda topic: topic,
) -> list[Steps]:
    """Return a duty for each topic: once a minute, sample it, if nobody else does. None with ``hours`` 0.

    ``is_ours`` says who should rather not even try; that only one does is for Redis to see to. ``present`` returns a
    topic with the slots that it has by now.
    """
    return [_Sampling(broker, topic, hours * 60, is_ours, present) for topic in topics] if hours else []


class _Sampling:
    """Samples one topic."""

    def __init__(
        self,
        broker: Broker,
        topic: Topic,
        keep: int,
        is_ours: Callable[[Topic], bool],
        present: Callable[[Topic], Topic],
    ) -> None:
        self._broker = broker
        self._topic = topic
        self._keep = keep
        self._is_ours = is_ours
        self._present = present
        # Topics are not sampled all at the same instant.
        self._offset_ms = crc32(topic.name.encode()) % 5_000

    def __call__(self) -> Generator[float, None, None]:
        while True:
            self._topic = self._present(self._topic)
            minute, passed = divmod(self._broker.now_ms(), 60_000)
            if passed < self._offset_ms:
                yield (self._offset_ms - passed) / 1000
            elif passed > 12_000 and self._topic.slots > SPREAD_SLOTS:
                yield (60_000 - passed) / 1000
            elif self._is_ours(self._topic) and self._broker.run(history.claim_minute(self._topic, minute)):
                yield from self._sample(minute)
                yield self._until_next()
            else:
                yield self._until_next()

    def _until_next(self) -> float:
        return (60_000 + self._offset_ms - self._broker.now_ms() % 60_000) / 1000

    def _sample(self, minute: int) -> Generator[float, None, None]:
        stride = -(-self._topic.slots // MOST_SLOTS)
        slots = range(0, self._topic.slots, stride)
        parts = [slots[at : at + SLOTS_AT_ONCE] for at in range(0, len(slots), SLOTS_AT_ONCE)]
        pause = SPREAD_SECONDS / len(parts) if self._topic.slots > SPREAD_SLOTS else 0.02
        whole: Sample | None = None
        for number, part in enumerate(parts):
            if number:
                yield pause
            found = self._broker.run(history.sample(self._topic, part))
            whole = found if whole is None else whole.plus(found)
        assert whole is not None
        record = _Record.of(whole, self._topic, self._broker.now_ms())
        self._broker.run(history.keep_minute(self._topic, minute, record.encode(), self._keep))


@dataclass(slots=True)
class _Counted:
    """What was counted of one topic since the last flush."""

    late: list[int] = field(default_factory=lambda: [0] * LATENESS_BUCKETS)
    late_ms: float = 0.0
    took: list[int] = field(default_factory=lambda: [0] * LATENESS_BUCKETS)
    took_ms: float = 0.0


class TimesCount:
    """Counts how late messages are handed out and how long listeners take, and gives the counts to Redis every few seconds.

    A process that is killed takes a few seconds of them along.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._counted: defaultdict[Topic, _Counted] = defaultdict(_Counted)
        self._lock = threading.Lock()
        self._complain = Complaints(logger)

    def note(self, topic: Topic, deliveries: Sequence[Delivery], now_ms: float) -> None:
        """Note messages that were just handed out. Priorities and retries tell no due time."""
        if topic.is_priority:
            return
        late = sorted(now_ms - delivery.score for delivery in deliveries if delivery.score > 999)
        with self._lock:
            counted = self._counted[topic]
            _add(counted.late, late)
            counted.late_ms += sum(one for one in late if one > 0)

    def note_calls(self, topic: Topic, seconds: Sequence[float]) -> None:
        """Note how long calls of the listener took."""
        took = sorted(one * 1000 for one in seconds)
        with self._lock:
            counted = self._counted[topic]
            _add(counted.took, took)
            counted.took_ms += sum(took)

    def flushing(self) -> Generator[float, None, None]:
        """A duty: give what was counted to Redis, also in the end."""
        try:
            while True:
                yield FLUSH_SECONDS
                self._flush()
        finally:
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            taken, self._counted = self._counted, defaultdict(_Counted)
        for topic, counted in taken.items():
            try:
                if any(counted.late):
                    self._broker.run(history.note_late(topic, counted.late))
                late_ms, took_us = round(counted.late_ms), round(counted.took_ms * 1000)
                self._broker.run(history.note_times(topic, counted.late, late_ms, counted.took, took_us))
            except RmqError as error:
                self._complain("times", "Lateness and duration of messages could not be recorded: %s", error)


def _add(counts: list[int], found: Sequence[float]) -> None:
    """Add how many of ``found`` (in order) are in each class."""
    for bucket, number in enumerate(_by_class(found)):
        if number:
            counts[bucket] += number


def _by_class(late: Sequence[float]) -> Iterator[int]:
    """Return how many of ``late`` (in order) are in each class."""
    before = 0
    for edge in EDGES_MS:
        upto = bisect_left(late, edge + 1e-6, before)
        yield upto - before
        before = upto
    yield len(late) - before


__all__ = [
    "EDGES_MS",
    "Depth",
    "Lateness",
    "Latest",
    "Minute",
    "Rates",
    "TimesCount",
    "Totals",
    "latest",
    "read",
    "read_last",
    "sampling",
    "times",
    "totals",
]
