"""Overlap: how much of the topics with async listeners a worker takes. It takes no more than its event loop can run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from django_rmq.core.consumer.adaptive import AdaptiveConcurrency
from django_rmq.core.consumer.batch import ListenerLike
from django_rmq.core.consumer.slots import SlotState
from django_rmq.core.model.topic import Topic

WORK_SECONDS = 0.05
"""Seconds of work that one prepare should hand out, unless there would be too many prepares."""

AHEAD_SECONDS = 0.05
"""Seconds for which the event loop has work in hand beside what it runs, so that it need not wait for Redis."""

FIRST_PACE = 0.05
"""Seconds that a call is thought to take before one was measured."""

MESSAGES = 16_000
"""The number of messages of a topic that its running batches may have, which one prepare may hand out a share of."""

PREPARES = 1_000
"""The number of prepares per second and topic above which each of them should hand out more work."""


class AsyncCapacity:
    """The topics of one worker with async listeners, and the batches of each that are in hand."""

    def __init__(self, topics: Iterable[Topic], listeners: Mapping[str, ListenerLike]) -> None:
        found = [topic for topic in topics if listeners[topic.name].coroutine is not None]
        self.concurrency = {topic.name: topic.concurrency for topic in found}
        self.flows = {
            topic.name: AdaptiveConcurrency(topic.concurrency) for topic in found if topic.flow == "auto"
        }
        self._held: Counter[str] = Counter()
        """Topic -> the batches in hand that can run beside each other: of a serial slot only one counts."""
        self.slow: Counter[str] = Counter()
        """Topic -> the calls of which nobody knows when they end, so that nothing is taken ahead for them."""

    def __bool__(self) -> bool:
        return bool(self.concurrency)

    def __contains__(self, topic: object) -> bool:
        return topic in self.concurrency

    def most(self, topic: str) -> int:
        """Return how many calls of a topic's listener may run at the same time."""
        flow = self.flows.get(topic)
        return self.concurrency[topic] if flow is None else flow.limit

    def room(self, topic: str, pace: float) -> int:
        """Return how many more batches of a topic may be taken. ``pace``: seconds per message."""
        most = self.most(topic)
        if topic not in self.flows:
            # What a flow measures is how many calls run, so nothing waits beside them.
            ending = max(0, most - self.slow[topic])
            most += int(ending * AHEAD_SECONDS / max(pace, self.seconds(topic)))
        return most - self._held[topic]  # rule: takes_more_than_it_can_run

    def seconds(self, topic: str) -> float:
        """Return how many seconds of work one prepare should hand out."""
        return max(WORK_SECONDS, self.most(topic) / PREPARES)

    def share(self, topic: str) -> int:
        """Return how many messages a batch may have, so that there is room for all that can run."""
        return max(1, MESSAGES // self.most(topic))

    def needs_room(self, place: SlotState) -> bool:
        """Return whether another batch of a slot could run beside those in hand."""
        return not (place.topic.serial and place.batches)

    def started(self, place: SlotState) -> None:
        """Record a batch that is in hand from now on."""
        if place.topic.name in self.concurrency and (not place.topic.serial or place.batches == 1):
            self._held[place.topic.name] += 1

    def ended(self, place: SlotState) -> None:
        """Record a batch that is no longer in hand."""
        if place.topic.name in self.concurrency and self.needs_room(place):
            self._held[place.topic.name] -= 1

    def reported(self, topic: str, seconds: float, messages: int) -> None:
        """Record that ``messages`` took ``seconds``."""
        flow = self.flows.get(topic)
        if flow is not None:
            flow.note(seconds, messages, self._held[topic], time.monotonic())


__all__ = ["FIRST_PACE", "AsyncCapacity"]
