"""The record of one minute of a topic: its fields, its stored form, also that of earlier versions, and how it is made.

One worker samples a topic once a minute and stores the record. It includes the counts of the lateness of messages and of the
duration of listeners, in classes, which every worker sends to Redis. Reading the counts is the subject of ``queries``. A record
that cannot be read is a gap in the history, and never an error.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from django_rmq.core.commands import activity
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.replies import LATENESS_BUCKETS, Delivery, Sample
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError

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
        self._complain = LogThrottle(logger)

    def note(self, topic: Topic, deliveries: Sequence[Delivery], now_ms: float) -> None:
        """Count messages that were just delivered. Priorities and retries have no due time, so they are not counted."""
        if topic.is_priority:
            return
        late = [now_ms - delivery.score for delivery in deliveries if delivery.score > 999]
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
            taken, self._counted = self._counted, defaultdict(_Counted)
        for topic, counted in taken.items():
            try:
                if any(counted.late):
                    self._broker.run(activity.note_late(topic, counted.late))
                late_ms, took_us = round(counted.late_ms), round(counted.took_ms * 1000)
                self._broker.run(activity.note_times(topic, counted.late, late_ms, counted.took, took_us))
            except RmqError as error:
                self._complain("times", "Lateness and duration of messages could not be recorded: %s", error)


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

LARGEST = 1 << 53
"""The largest number in a record; beyond it, division would lose digits."""


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


COUNTED = ("sent", "merged", "handed_out", "committed", "failed", "died")
ALSO_COUNTED = ("expired", "rejected", "released", "stale", "fenced", "replayed", "cancelled", "overran")

_LATELY = 2
"""The number of the last entries of ``ALSO_COUNTED`` that records of earlier versions lack."""


class MinuteRecord(NamedTuple):
    """The record of one minute: ``ms slots asked store due prepare claimed retry dead oldest sent … overran
    undrained|bucket:n …``.

    Records of earlier versions end with ``died`` or ``replayed``, or have ``undrained`` behind ``replayed``.
    """

    sampled_ms: int
    slots: int
    asked: int
    """The number of slots to be read; larger than ``slots`` if sums are scaled, or a slot could not be read."""
    depth: Depth
    counters: tuple[int, ...]
    """The counters in ``COUNTED``, and those in ``ALSO_COUNTED`` if they were recorded."""
    late: tuple[int, ...] = ()

    @classmethod
    def of(cls, sample: Sample, topic: Topic, now_ms: int) -> MinuteRecord:
        scale = topic.slots / sample.slots if sample.slots else 0
        claimed, counters = counted(sample.counters)
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
    def parse(cls, raw: bytes | None) -> MinuteRecord | None:
        """Return the record of a stored text, or None for any other text, which is a gap."""
        try:
            head, _, tail = (raw or b"").partition(b"|")
            numbers = list(map(int, head.split(b" ")))
            ms, slots, asked, store, due, prepare, claimed, retry, dead, oldest, *counters = numbers
            late = [0] * LATENESS_BUCKETS if tail else []
            for pair in tail.split():
                bucket, _, count = pair.partition(b":")
                late[int(bucket)] = int(count)
            numbers += late
            if min(numbers) < 0 or max(numbers) > LARGEST:
                return None
        except (ValueError, IndexError):
            return None
        # During an update, workers of an earlier version write shorter records beside these.
        whole = len(COUNTED) + len(ALSO_COUNTED)
        undrained = counters.pop() if len(counters) in (whole + 1, whole - _LATELY + 1) else 0
        if len(counters) not in (len(COUNTED), whole - _LATELY, whole):
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
    present: Callable[[Topic], Topic] = lambda topic: topic,
) -> list[Steps]:
    """Return a duty for each topic that samples it once a minute, unless another worker does; no duties if ``minutes`` is 0.

    ``is_ours`` returns whether this worker should try; Redis ensures that only one samples. ``present``
    returns a topic with its current slots.
    """
    return [_Sampling(broker, topic, minutes, is_ours, present) for topic in topics] if minutes else []


class _Sampling:
    """The duty that samples one topic."""

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
        # Each topic has an instant of its own, so that Redis does not get the reads of all topics at once.
        self._offset_ms = crc32(topic.name.encode()) % 5_000

    def __call__(self) -> Generator[float, None, None]:
        while True:
            self._topic = self._present(self._topic)
            minute, passed = divmod(self._broker.now_ms(), 60_000)
            if passed < self._offset_ms:
                yield (self._offset_ms - passed) / 1000
            # A reading that is spread over most of a minute and begins late would end in the next minute.
            elif passed > 12_000 and self._topic.slots > SPREAD_SLOTS:
                yield (60_000 - passed) / 1000
            # Several workers may try: while slots move two may own slot 0, and topics without owners are sampled by any worker.
            elif self._is_ours(self._topic) and self._broker.run(activity.claim_minute(self._topic, minute)):
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
            found = self._broker.run(activity.sample(self._topic, part))
            whole = found if whole is None else whole.plus(found)
        assert whole is not None
        record = MinuteRecord.of(whole, self._topic, self._broker.now_ms())
        self._broker.run(activity.keep_minute(self._topic, minute, record.encode(), self._keep))
