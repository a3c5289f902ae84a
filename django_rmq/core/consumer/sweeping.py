"""Sweeping: ends what has timed out in topics that this worker does not serve, and perhaps no worker does."""

from __future__ import annotations

import time
from collections.abc import Iterable

from django_rmq.core.calls import ending, looking
from django_rmq.core.calls.broker import Broker, run_all
from django_rmq.core.calls.call import Call
from django_rmq.core.consumer.polling import HEADS
from django_rmq.core.logs.complaints import Complaints
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import RmqError

SWEEP_SECONDS = 10.0
"""Seconds between two checks for what has timed out in topics that this worker does not serve."""


class Sweeping:
    """Sweeps ``topics``."""

    def __init__(self, broker: Broker, topics: Iterable[Topic], complain: Complaints) -> None:
        self._broker = broker
        self._topics = list(topics)
        self._complain = complain
        self._due = 0.0

    def sweep(self, now: float) -> None:
        """End deliveries and claims that have timed out in slots from which this worker does not take, if it is time to."""
        if not self._topics or now < self._due:
            return
        server = self._broker.now_ms()
        asked = [
            (topic, range(first, min(first + HEADS, topic.slots)))
            for topic in self._topics
            for first in range(0, topic.slots, HEADS)
        ]
        looks = [looking.heads(topic, slots, upkeep=True) for topic, slots in asked]
        ends: list[Call[int]] = []
        for (topic, slots), heads in zip(asked, run_all(self._broker, looks), strict=True):
            if isinstance(heads, RmqError):
                self._complain("sweep", "Cannot look for timed-out deliveries: %s", heads)
                continue
            late = (slot for slot, due in zip(slots, heads, strict=True) if due is not None and due <= server)
            ends += [ending.expire(topic, slot) for slot in late]
        ended = run_all(self._broker, ends)
        for answer in ended:
            if isinstance(answer, RmqError):
                self._complain("sweep", "Cannot end timed-out deliveries: %s", answer)
        # There may be more of them than one script ends.
        rest = 0.0 if any(isinstance(answer, int) and answer for answer in ended) else SWEEP_SECONDS
        self._due = time.monotonic() + rest


__all__ = ["Sweeping"]
