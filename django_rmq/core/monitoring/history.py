"""History: the depths and rates of a topic by the minute, sampled by the workers and stored in Redis.

Once a minute one worker reads the depths and the ledger of a topic's slots and stores their sums as one record of some 150 bytes
in a hash. Every worker counts how late messages were delivered, for the next record, and together with the duration of listeners
also in counts that are never reset, for histograms of other systems. Rates are differences of the ledger's counters, so nothing
is counted twice or lost, whichever worker samples. A minute without a record that can be read is a gap.

Size: some 250 bytes per topic and minute in Redis, 0.7 MB per topic for 48 hours. Cost: a script of 1 to 2 ms
per 256 slots and minute. With more than 65,536 slots, every second (fourth, …) is read and the sums are
scaled. Above 4,096 slots the reading is spread over the minute.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial, reduce
from itertools import accumulate, dropwhile, islice
from operator import add, sub
from typing import NamedTuple, TypeVar
from zlib import crc32

from django_rmq.core.commands import history
from django_rmq.core.commands.broker_interface import Broker, run_all, walk
from django_rmq.core.commands.script_call import Call
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.bounds import BATCH, LARGEST
from django_rmq.core.model.replies import LATENESS_BUCKETS, Delivery, Sample, Times
from django_rmq.core.model.scores import LAST_RETRY
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble

logger = safe_logger("django_rmq.history")

EDGES_MS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 60_000, 120_000, 300_000, 600_000,
    1_800_000, 3_600_000, 10_800_000, 43_200_000, 86_400_000,
)  # fmt: skip
"""The classes of lateness: up to 1 ms, up to 2 ms, …, up to a day, more."""

_LIMITS_MS = [edge + 1e-6 for edge in EDGES_MS]
"""The first values that belong to the next class: a difference of clocks rounds, so an edge belongs to its own class."""

FLUSH_SECONDS = 5.0
"""Seconds for which lateness is counted before it is sent to Redis."""


@dataclass(slots=True)
class _Counted:
    """The counts of one topic since the last flush."""

    late: list[int] = field(default_factory=lambda: [0] * LATENESS_BUCKETS)
    late_ms: float = 0.0
    took: list[int] = field(default_factory=lambda: [0] * LATENESS_BUCKETS)
    took_ms: float = 0.0


class TimesCount:
    """Counts how late messages are delivered and how long listeners take, and sends the counts to Redis every few seconds.

    If a process is killed, a few seconds of its counts are lost.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._counted: defaultdict[Topic, _Counted] = defaultdict(_Counted)
        self._lock = threading.Lock()
        self._log_throttled = LogThrottle(logger)

    def note(self, topic: Topic, deliveries: Sequence[Delivery], now_ms: float) -> None:
        """Count messages that were just delivered. Priorities and retries have no due time, so they are not counted."""
        if topic.is_priority:
            return
        late = [now_ms - delivery.score for delivery in deliveries if delivery.score > LAST_RETRY]
        with self._lock:
            counted = self._counted[topic]
            _add(counted.late, late)
            counted.late_ms += sum(one for one in late if one > 0)

    def note_calls(self, topic: Topic, seconds: Sequence[float]) -> None:
        """Count the durations of calls of the listener."""
        took = [one * 1000 for one in seconds]
        with self._lock:
            counted = self._counted[topic]
            _add(counted.took, took)
            counted.took_ms += sum(took)

    def flushing(self) -> Generator[float, None, None]:
        """Return a duty that sends the counts to Redis every few seconds, and at its end."""
        try:
            while True:
                yield FLUSH_SECONDS
                self._flush()
        finally:
            # The worker ends; other workers do not know these counts.
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            # Threads that deliver messages wait for this lock, so no round trip happens while it is held.
            taken, self._counted = self._counted, defaultdict(_Counted)
        for topic, counted in taken.items():
            try:
                if any(counted.late):
                    self._broker.run(history.count_lateness(topic, counted.late))
                late_ms, took_us = round(counted.late_ms), round(counted.took_ms * 1000)
                self._broker.run(history.count_times(topic, counted.late, late_ms, counted.took, took_us))
            except RmqError as error:
                self._log_throttled(
                    "times", "Lateness and duration of messages could not be recorded: %s", error
                )


def _add(counts: list[int], values_ms: list[float]) -> None:
    """Add the number of values in each class. Sorts the values."""
    if len(values_ms) < len(_LIMITS_MS):
        # Most queues carry single messages; one search for each is less work than one for each class.
        for value in values_ms:
            counts[bisect_right(_LIMITS_MS, value)] += 1
        return
    values_ms.sort()
    before = 0
    for bucket, limit in enumerate(_LIMITS_MS):
        upto = bisect_left(values_ms, limit, before)
        counts[bucket] += upto - before
        before = upto
    counts[-1] += len(values_ms) - before


SLOTS_AT_ONCE = 256
"""The number of slots that one script reads."""


class Depth(NamedTuple):
    """How many messages a topic held at one instant, by state."""

    store: int
    due: int
    """How many messages could be taken; see ``Counts``."""
    prepare: int
    claimed: int
    """How many messages Spark consumers held."""
    retry: int
    dead: int
    oldest_due_ms: int | None
    """Since when (ms) the most overdue message is due (topics of time)."""
    undrained_since_ms: int | None = None
    """The earliest time (ms) since which a slot has had something to take (priority topics)."""


class MinuteRecord(NamedTuple):
    """The record of one minute: ``ms slots asked store due prepare claimed retry dead oldest sent … overran
    undrained|bucket:n …``.
    """

    sampled_ms: int
    slots: int
    asked: int
    """The number of slots to be read; larger than ``slots`` if sums are scaled, or a slot could not be read."""
    depth: Depth
    counters: tuple[int, ...]
    """The values of ``HistoryTotals``."""
    late: tuple[int, ...] = ()

    @property
    def is_scaled(self) -> bool:
        """Whether not all slots were read."""
        return self.slots < self.asked

    @property
    def totals(self) -> HistoryTotals:
        return HistoryTotals(*self.counters)

    @classmethod
    def of(cls, sample: Sample, topic: Topic, now_ms: int) -> MinuteRecord:
        scale = topic.slots / sample.slots if sample.slots else 0
        claimed, counters = counted(sample.counters)
        depths = (sample.store, sample.due, sample.prepare, claimed, sample.retry, sample.dead)
        store, due, prepare, claimed, retry, dead = (round(value * scale) for value in depths)
        oldest, undrained = sample.oldest_due_ms, sample.undrained_since_ms
        depth = Depth(store, due, prepare, claimed, retry, dead, oldest, undrained)
        return cls(
            now_ms, sample.slots, topic.slots, depth, tuple(round(value * scale) for value in counters)
        )

    def encode(self) -> str:
        *depths, undrained = self.depth
        numbers = (self.sampled_ms, self.slots, self.asked, *depths, *self.counters, undrained)
        return " ".join(str(number or 0) for number in numbers)

    @classmethod
    def parse(cls, raw: bytes | None) -> MinuteRecord | None:
        """Return the record of a stored text, or None for any other text, which is a gap."""
        if raw is None:
            return None
        try:
            head, _, tail = raw.decode("ascii").partition("|")
            numbers = [*map(int, head.split(" "))]
            ms, slots, asked, store, due, prepare, claimed, retry, dead, oldest, *counters = numbers
            late = [0] * LATENESS_BUCKETS if tail else []
            for pair in tail.split():
                bucket, _, count = pair.partition(":")
                late[int(bucket)] = int(count)
                numbers.append(int(count))
            # Beyond the largest number, division would lose digits.
            if min(numbers) < 0 or max(numbers) > LARGEST:
                return None
        except (ValueError, IndexError):
            return None
        undrained = counters.pop() if counters else 0
        if len(counters) != _TOTALS:
            return None
        depth = Depth(store, due, prepare, claimed, retry, dead, oldest or None, undrained or None)
        return cls(ms, slots, asked, depth, tuple(counters), tuple(late))


def counted(sums: Mapping[str, int]) -> tuple[int, tuple[int, ...]]:
    """Return the number held by Spark consumers, and the counters of a record, from sums of the ledger's."""
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
        sums["cancelled"],
        sums["overran"],
    )


SPREAD_SLOTS = 4_096
"""With more slots than this, the reading is spread over ``SPREAD_SECONDS``."""

SPREAD_SECONDS = 45.0
MOST_SLOTS = 65_536
"""With more slots than this, only every second, fourth, … slot is read."""


Steps = Callable[[], Generator[float, None, None]]
"""A duty of a worker: does a small step and yields the seconds until the next one."""


def sampling(
    broker: Broker,
    topics: Iterable[Topic],
    minutes: int,
    is_ours: Callable[[Topic], bool],
    with_slots: Callable[[Topic], Topic] = lambda topic: topic,
) -> list[Steps]:
    """Return a duty for each topic that samples it once a minute, unless another worker does; no duties if ``minutes`` is 0.

    ``is_ours`` returns whether this worker should try; Redis ensures that only one samples. ``with_slots`` returns a topic
    with its present slots and those before a re-slotting, which are empty and have counters.
    """
    return [partial(_sampling, broker, topic, minutes, is_ours, with_slots) for topic in topics if minutes]


def _sampling(
    broker: Broker,
    topic: Topic,
    keep: int,
    is_ours: Callable[[Topic], bool],
    with_slots: Callable[[Topic], Topic],
) -> Generator[float, None, None]:
    """The duty that samples one topic."""
    # Each topic has an instant of its own, so that Redis does not get the reads of all topics at once.
    offset_ms = crc32(topic.name.encode()) % 5_000
    while True:
        topic = with_slots(topic)
        minute, passed = divmod(broker.now_ms(), 60_000)
        if passed < offset_ms:
            yield (offset_ms - passed) / 1000
            continue
        # A reading that is spread over most of a minute and begins late would end in the next minute.
        if passed > 12_000 and topic.slots > SPREAD_SLOTS:
            yield (60_000 - passed) / 1000
            continue
        # Several workers may try: while slots move two may own slot 0, and topics without owners are sampled by any worker.
        if is_ours(topic) and broker.run(history.take_minute(topic, minute)):
            yield from _sample(broker, topic, minute, keep)
        yield (60_000 + offset_ms - broker.now_ms() % 60_000) / 1000


def _sample(broker: Broker, topic: Topic, minute: int, keep: int) -> Generator[float, None, None]:
    slots = range(0, topic.slots, -(-topic.slots // MOST_SLOTS))
    parts = [slots[at : at + SLOTS_AT_ONCE] for at in range(0, len(slots), SLOTS_AT_ONCE)]
    pause = SPREAD_SECONDS / len(parts) if topic.slots > SPREAD_SLOTS else 0.02
    samples: list[Sample] = []
    for part in parts:
        if samples:
            yield pause
        samples.append(broker.run(history.sample(topic, part)))
    record = MinuteRecord.of(reduce(Sample.plus, samples), topic, broker.now_ms())
    broker.run(history.store_minute(topic, minute, record.encode(), keep))


LONGEST_GAP_MINUTES = 5
"""The longest gap in minutes over which a rate is computed; over a longer one it says nothing about any minute."""


class Rates(NamedTuple):
    """Rates of events, per minute."""

    sent: float
    merged: float
    """The part of ``sent`` that met a waiting copy (merged or replaced)."""
    handed_out: float
    committed: float
    failed: float
    """Failed, timed out or rejected deliveries."""
    died: float

    @property
    def merge_ratio(self) -> float | None:
        """The fraction of sent messages that met a waiting copy, or None if nothing was sent."""
        return self.merged / self.sent if self.sent else None


@dataclass(frozen=True, slots=True)
class Lateness:
    """The number of delivered messages by their lateness, in the classes of ``EDGES_MS``.

    It counts messages of topics with due times that had not failed, and were taken by a worker.
    """

    counts: tuple[int, ...]

    @property
    def messages(self) -> int:
        return sum(self.counts)

    def percentile(self, part: float) -> float:
        """Return the lateness in ms that this fraction (0 … 1) of the messages did not exceed, interpolated in its class."""
        rank = part * self.messages
        for bucket, reached in enumerate(accumulate(self.counts)):
            if reached >= rank and self.counts[bucket]:
                low = EDGES_MS[bucket - 1] if bucket else 0
                high = EDGES_MS[bucket] if bucket < len(EDGES_MS) else EDGES_MS[-1]
                return low + (high - low) * (1 - (reached - rank) / self.counts[bucket])
        return 0.0


class Minute(NamedTuple):
    """One minute of a topic, or several combined. A field that was not sampled is None."""

    at_ms: int
    """When it begins, in ms since the epoch."""
    sampled_ms: int | None = None
    depth: Depth | None = None
    """The depths at ``sampled_ms``."""
    rates: Rates | None = None
    """The rates from the previous record to this one."""
    lateness: Lateness | None = None
    """The lateness from the previous record to this one. None also if nothing was delivered."""
    is_scaled: bool = False
    """Whether not all slots were read."""


def read_minutes(broker: Broker, topic: Topic, hours: float = 48, *, step: int = 1) -> list[Minute]:
    """Return the last ``hours`` of ``topic``, oldest first, ``step`` minutes per item; gaps are included, and empty.

    The present minute is the last one. If several minutes are combined, depths are the last sampled, rates
    the average, lateness the sum.
    """
    now = broker.now_ms() // 60_000
    count = max(1, round(hours * 60 / step)) * step
    # Steps begin at the same times, whenever they are requested.
    first = (now // step + 1) * step - count
    # The rates of the first minutes are differences from a record before them.
    begin = first - LONGEST_GAP_MINUTES
    calls = (
        history.minutes(topic, start, min(start + BATCH - 1, now)) for start in range(begin, now + 1, BATCH)
    )
    records = [record for some in walk(broker, calls) for record in some]
    return _read(records, first, count, now, step)


def read_last(broker: Broker, topics: Mapping[Topic, int]) -> dict[Topic, list[Minute] | RmqError]:
    """Return the last minutes of each topic (up to an hour), in two round trips; or the error that prevents reading them."""
    return dict(_each_last(broker, topics))


def _each_last(
    broker: Broker, topics: Mapping[Topic, int]
) -> Iterator[tuple[Topic, list[Minute] | RmqError]]:
    now = broker.now_ms() // 60_000
    calls = [
        history.minutes(topic, now + 1 - count - LONGEST_GAP_MINUTES, now) for topic, count in topics.items()
    ]
    for (topic, count), records in zip(topics.items(), _answers(broker, calls), strict=True):
        if isinstance(records, RmqError):
            yield topic, records
        else:
            yield topic, _read(records, now + 1 - count, count, now, 1)


HOUR_MINUTES = 60

HELD_MINUTES = 5
"""Minutes for which a sample is taken for those that are missing after it, where topics are added up."""


class SummedMinute(NamedTuple):
    """One minute of several topics together. None: none of them was sampled."""

    at_ms: int
    depths: Sequence[float] | None
    """Due and dead messages."""
    rates: Sequence[float] | None
    """Sent, committed and failed, per minute."""


def summed(hours: Iterable[Sequence[Minute]]) -> list[SummedMinute]:
    """Return the sums of the same minutes of several topics, from the first sample on.

    Topics are sampled one after the other. So the present minute is left out, and depths hold until the next sample.
    """
    sums: list[SummedMinute] = []
    # The minutes of a topic are freed before those of the next one are read: an hour of a thousand topics is 100 MB.
    for minutes in hours:
        whole = minutes[:-1]
        sums = sums or [SummedMinute(minute.at_ms, None, None) for minute in whole]
        sums = [
            SummedMinute(
                before.at_ms,
                _plus(before.depths, depths),
                _plus(before.rates, (rates.sent, rates.committed, rates.failed) if rates else None),
            )
            for before, depths, rates in zip(
                sums, _held_depths(whole), (minute.rates for minute in whole), strict=True
            )
        ]
    return list(dropwhile(lambda one: one.depths is None, sums))


class SummedHour:
    """The last hour of several topics together. Of very many topics an hour is much, so each minute is read once."""

    def __init__(self, topics: Iterable[Topic]) -> None:
        self._topics = tuple(topics)
        self._minutes: list[SummedMinute] = []

    def read(self, broker: Broker) -> list[SummedMinute]:
        """Return ``summed`` of the last hour. A topic that cannot be read is left out."""
        now = broker.now_ms() // 60_000
        newest = self._minutes[-1].at_ms // 60_000 if self._minutes else now
        if newest >= now:
            # Nothing was read before, or the clock was set back.
            self._minutes, newest = [], now - HOUR_MINUTES
        if newest < now - 1:
            self._minutes += self._minutes_between(broker, newest, now)
            del self._minutes[: 1 - HOUR_MINUTES]
        return list(dropwhile(lambda one: one.depths is None, self._minutes))

    def _minutes_between(self, broker: Broker, before: int, now: int) -> list[SummedMinute]:
        # The depths of a minute without a sample are those of the minutes before it.
        count = min(HOUR_MINUTES, now - before) + HELD_MINUTES
        hours = _each_last(broker, dict.fromkeys(self._topics, count))
        sums = summed(minutes for _, minutes in hours if not isinstance(minutes, RmqError))
        sum_of = {one.at_ms // 60_000: one for one in sums}
        return [
            sum_of.get(minute, SummedMinute(minute * 60_000, None, None)) for minute in range(before + 1, now)
        ]


def _held_depths(minutes: Sequence[Minute]) -> list[Sequence[float] | None]:
    """Return what was due and dead, the last sample in place of one that is missing, for some minutes at most."""
    depths_held, last, missing = list[Sequence[float] | None](), None, 0
    for minute in minutes:
        if minute.depth:
            last, missing = (minute.depth.due, minute.depth.dead), 0
        else:
            missing += 1
        depths_held.append(last if missing <= HELD_MINUTES else None)
    return depths_held


def _plus(sums: Sequence[float] | None, values: Sequence[float] | None) -> Sequence[float] | None:
    if sums is None or values is None:
        return values if sums is None else sums
    return [*map(add, sums, values)]


T = TypeVar("T")


def _answers(broker: Broker, calls: Iterable[Call[T]]) -> list[T | RmqError]:
    """Run calls; return their answers, with errors of single topics in their places. Raises ``ServerTrouble``."""
    answers = run_all(broker, calls)
    for one in answers:
        if isinstance(one, ServerTrouble):
            raise one
    return answers


def _read(records: Sequence[bytes | None], first: int, count: int, now: int, step: int) -> list[Minute]:
    before: MinuteRecord | None = None
    minutes: list[Minute] = []
    for minute, raw in enumerate(records, first - LONGEST_GAP_MINUTES):
        record = MinuteRecord.parse(raw)
        if minute >= first:
            minutes.append(_minute(minute, record, before))
        before = record or before
    minutes += [Minute(minute * 60_000) for minute in range(now + 1, first + count)]
    if step == 1:
        return minutes
    return [_together(minutes[at : at + step]) for at in range(0, count, step)]


@dataclass(frozen=True, slots=True)
class HistoryTotals:
    """The counters of a topic since its first message."""

    sent: int
    merged: int
    """The part of ``sent`` that met a waiting copy (merged or replaced)."""
    handed_out: int
    committed: int
    failed: int
    """Failed, timed out or rejected deliveries."""
    died: int
    expired: int
    """The part of ``failed`` that timed out."""
    rejected: int
    """The part of ``failed`` that was rejected."""
    released: int
    """Deliveries that a worker gave back before their listener had begun."""
    stale: int
    """Ends of deliveries that came too late, because the delivery had already ended."""
    fenced: int
    """Prepares by a worker after another one had acquired the slot."""
    replayed: int
    cancelled: int
    """Deliveries that a person cancelled, and that did not succeed."""
    overran: int
    """The part of ``failed`` whose listener exceeded HARD_TIMEOUT."""


_TOTALS = len(fields(HistoryTotals))


def totals(broker: Broker, topics: Sequence[Topic]) -> list[HistoryTotals | RmqError]:
    """Return the current counters of each topic over all its slots, or the error.

    It takes 1 to 2 ms per 256 slots in Redis.
    """
    calls = [
        history.sample(topic, range(start, min(start + SLOTS_AT_ONCE, topic.slots)))
        for topic in topics
        for start in range(0, topic.slots, SLOTS_AT_ONCE)
    ]
    answers = iter(_answers(broker, calls))
    all_totals: list[HistoryTotals | RmqError] = []
    for topic in topics:
        samples: list[Sample] = []
        error: RmqError | None = None
        for part in islice(answers, -(-topic.slots // SLOTS_AT_ONCE)):
            if isinstance(part, RmqError):
                error = error or part
            else:
                samples.append(part)
        all_totals.append(error or HistoryTotals(*counted(reduce(Sample.plus, samples).counters)[1]))
    return all_totals


def times(broker: Broker, topics: Sequence[Topic]) -> list[Times | RmqError]:
    """Return all durations ever counted of each topic, or the error that prevents reading them."""
    return _answers(broker, [history.times(topic) for topic in topics])


def latest(broker: Broker, topics: Sequence[Topic]) -> list[MinuteRecord | RmqError | None]:
    """Return the latest record of each topic within the last ``LONGEST_GAP_MINUTES``, or None if there is none."""
    if not topics:
        return []
    now = broker.now_ms() // 60_000
    calls = [history.minutes(topic, now - LONGEST_GAP_MINUTES, now) for topic in topics]
    return [
        records
        if isinstance(records, RmqError)
        else next(filter(None, map(MinuteRecord.parse, reversed(records))), None)
        for records in _answers(broker, calls)
    ]


def _together(minutes: list[Minute]) -> Minute:
    sampled = [minute for minute in minutes if minute.depth]
    rates = [minute.rates for minute in minutes if minute.rates]
    late = [minute.lateness.counts for minute in minutes if minute.lateness]
    return Minute(
        minutes[0].at_ms,
        sampled[-1].sampled_ms if sampled else None,
        sampled[-1].depth if sampled else None,
        Rates(*(sum(column) / len(rates) for column in zip(*rates, strict=True))) if rates else None,
        Lateness(tuple(map(sum, zip(*late, strict=True)))) if late else None,
        any(minute.is_scaled for minute in sampled),
    )


def _minute(minute: int, record: MinuteRecord | None, before: MinuteRecord | None) -> Minute:
    if record is None:
        return Minute(minute * 60_000)
    return Minute(
        minute * 60_000,
        record.sampled_ms,
        record.depth,
        _rates(record, before),
        Lateness(record.late) if any(record.late) else None,
        record.is_scaled,
    )


def _rates(record: MinuteRecord, before: MinuteRecord | None) -> Rates | None:
    # After a re-slotting, or if a slot could not be read, the two records have the sums of different slots.
    if before is None or before.asked != record.asked or before.slots != record.slots:
        return None
    minutes = (record.sampled_ms - before.sampled_ms) / 60_000
    raised = [*map(sub, record.counters[: len(Rates._fields)], before.counters)]
    # If a counter is lower than before, keys were deleted, or the server lost its data or failed over.
    if not 0 < minutes <= LONGEST_GAP_MINUTES + 1 or min(raised) < 0:
        return None
    return Rates(*[number / minutes for number in raised])
