"""Sweeping: ends what has timed out in topics that this worker does not serve, and perhaps no worker does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from django_rmq.core.commands import ack, inspect
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.script_call import Call
from django_rmq.core.consumer.due_poll import HEADS
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError

SWEEP_SECONDS = 10.0
"""Seconds between two checks for what has timed out in topics that this worker does not serve."""

TURN_SECONDS = 0.25
"""For how long one turn may sweep: what a dead Spark query held comes back in many steps."""

STEPS = 8
"""The number of slots that one round trip sweeps: Redis serves nobody else between its calls."""


class TimeoutReaper:
    """Sweeps ``topics``."""

    def __init__(self, broker: Broker, topics: Iterable[Topic], complain: LogThrottle) -> None:
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
        looks = [inspect.heads(topic, slots, upkeep=True) for topic, slots in asked]
        late: deque[Call[int]] = deque()
        for (topic, slots), heads in zip(asked, run_all(self._broker, looks), strict=True):
            if isinstance(heads, RmqError):
                self._complain("sweep", "Cannot look for timed-out deliveries: %s", heads)
                continue
            over = (slot for slot, due in zip(slots, heads, strict=True) if due is not None and due <= server)
            late += [ack.expire(topic, slot) for slot in over]
        until = time.monotonic() + TURN_SECONDS
        while late and time.monotonic() < until:
            steps = [late.popleft() for _ in range(min(STEPS, len(late)))]
            for call, answer in zip(steps, run_all(self._broker, steps), strict=True):
                if isinstance(answer, RmqError):
                    self._complain("sweep", "Cannot end timed-out deliveries: %s", answer)
                elif answer:
                    # There may be more than one script ends.
                    late.append(call)
        self._due = time.monotonic() + (0.0 if late else SWEEP_SECONDS)


__all__ = ["TimeoutReaper"]
