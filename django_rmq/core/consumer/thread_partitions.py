"""Lanes: which threads run the listeners of which topics, in a worker that serves a topic with FLOW.

Such a topic has as many lanes as its flow allows, but never all threads if there are other topics. Topics
without a flow use the threads that are not lanes. So a listener that becomes slow delays only its own topic.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from django_rmq.core.consumer.adaptive import AdaptiveConcurrency
from django_rmq.core.model.topic import Topic

LANE_SECONDS = 1.0
"""Seconds for which a thread remains a lane after its last batch."""


class ThreadPartitions:
    """The flows of one worker's topics, and the threads of their batches."""

    def __init__(self, topics: Iterable[Topic], threads: int) -> None:
        names = [topic.name for topic in topics]
        flowing = [topic.name for topic in topics if topic.flow == "auto"]
        most = threads if len(names) == 1 else threads - 1
        self.flows = {name: AdaptiveConcurrency(most) for name in flowing}
        # One thread is reserved for topics without a flow.
        first = 1 if len(flowing) < len(names) and threads > 1 else 0
        self._threads = range(threads)
        self._open = range(first, threads)
        """Threads that may be lanes."""
        self._held: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """Topic -> thread -> number of batches in hand."""
        self._batches: dict[int, tuple[str, int]] = {}
        self._left_at = [float("-inf")] * threads

    def __bool__(self) -> bool:
        return bool(self.flows)

    def room(self, topic: str, depth: int) -> int:
        """Return how many batches of ``topic`` may be taken now, with ``depth`` per lane."""
        flow = self.flows.get(topic)
        return 1 << 30 if flow is None else flow.limit * depth - self._held[topic].total()

    def is_lane(self, thread: int, now: float) -> bool:
        """Return whether a thread runs batches of a topic with a flow."""
        return now - self._left_at[thread] < LANE_SECONDS or any(held[thread] for held in self._held.values())

    def choose(self, topic: str, present: int, load: Sequence[float], now: float) -> int:
        """Return the thread for the next batch of ``topic``.

        ``present``: the thread of the previous one. ``load``: seconds of work in hand of each thread.
        """
        flow = self.flows.get(topic)
        if flow is not None:
            held = +self._held[topic]
            if len(held) >= flow.limit:
                return min(held, key=held.__getitem__)
            # From the highest index down, because topics without a flow fill the threads from the lowest.
            return min((t for t in self._open if t not in held), key=lambda t: (load[t], -t), default=present)
        free = [t for t in self._threads if not self.is_lane(t, now)] or [0]
        least = min(free, key=load.__getitem__)
        return present if present in free and load[present] <= load[least] + 0.05 else least

    def started(self, batch: int, topic: str, thread: int) -> None:
        """Record a batch (by a number of its own) that goes to ``thread``."""
        if topic in self.flows:
            self._held[topic][thread] += 1
            self._batches[batch] = (topic, thread)

    def reported(self, topic: str, seconds: float, messages: int, now: float) -> None:
        """Record that ``messages`` took ``seconds``."""
        flow = self.flows.get(topic)
        if flow is not None:
            flow.note(seconds, messages, len(+self._held[topic]), now)

    def ended(self, batch: int, now: float) -> None:
        """Record that a batch is no longer in hand."""
        topic, thread = self._batches.pop(batch, ("", 0))
        if topic:
            self._held[topic][thread] -= 1
            self._left_at[thread] = now


__all__ = ["ThreadPartitions"]
