"""Counts of the lateness of messages and of the duration of listeners, in classes, which every worker sends to Redis.

The sampler includes the lateness in the next record; reading the counts is the subject of ``queries``.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from django_rmq.core.commands import activity
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.core.model.replies import LATENESS_BUCKETS, Delivery
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
