"""Room: how much of each topic is taken, by its listener's recent speed, its lanes, its limits and the bytes in hand."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.consumer.async_capacity import FIRST_PACE, AsyncCapacity
from django_rmq.core.consumer.batch import Batch, ListenerLike
from django_rmq.core.consumer.in_flight import InFlight
from django_rmq.core.consumer.memory_budget import MemoryBudget
from django_rmq.core.consumer.rate_limits import RateLimits
from django_rmq.core.consumer.slots import SlotState, SlotTable
from django_rmq.core.consumer.thread_partitions import ThreadPartitions
from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.topic import Topic

WORK_SECONDS = 0.05
"""Seconds of work that one prepare should hand out, by the recent speed of a topic's listener."""

QUICK_SECONDS = 0.005
"""Seconds per message above which a priority slot has only one batch in hand, without a second one behind it."""

LEAST_EXPECTED = 16
"""How many messages a slot is expected to hand out after it had none."""


class Throughput:
    """The time that a topic's listener takes per message, smoothed; ``seconds`` is the first guess."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds = seconds

    def note(self, seconds: float, messages: int) -> None:
        sample = seconds / messages
        weight = 0.5 if sample > self.seconds else 0.2
        self.seconds += (sample - self.seconds) * weight


class Capacity:
    """The room of one worker. ``owner`` is the name under which it requests its share of the limits."""

    def __init__(
        self,
        broker: Broker,
        owner: str,
        places: SlotTable,
        listeners: Mapping[str, ListenerLike],
        threads: int,
        overlap: AsyncCapacity,
        hand: InFlight,
    ) -> None:
        topics = places.topics.values()
        self.listeners = listeners
        self.threads = threads
        self.bytes = MemoryBudget(topics)
        self.overlap = overlap
        self._hand = hand
        self.lanes = ThreadPartitions([topic for topic in topics if topic.name not in self.overlap], threads)
        self.limits = RateLimits(broker, owner, topics, self._capacity)
        self.paces: defaultdict[str, Throughput] = defaultdict(Throughput)
        self.paces.update((name, Throughput(FIRST_PACE)) for name in overlap.concurrency)
        self.places = places
        self._slow: set[SlotState] = set()
        """Slots in which a call has run for so long that nothing should wait behind it."""
        self._expected: defaultdict[str, float] = defaultdict(lambda: float(LEAST_EXPECTED))
        """Topic -> what its slots were expected to hand out next, smoothed."""

    @property
    def is_limited(self) -> bool:
        """Whether due slots may have to wait for limits or lanes."""
        return bool(self.limits or self.lanes or self.overlap)

    def runners(self, topic: Topic) -> int:
        """Return how many batches of a topic may run at the same time."""
        return self.overlap.most(topic.name) if topic.name in self.overlap else self.threads

    def depth(self, place: SlotState) -> int:
        """Return how many batches of a slot may be in hand: one runs, the next is ready."""
        if place.topic.is_strict or (place.topic.serial and place in self._slow):
            return 1
        if not place.topic.serial:
            return 2 * self.runners(place.topic)
        if place.topic.name in self.overlap and len(self.places) > self.overlap.most(place.topic.name):
            return 1  # there are other slots
        can_move = self.lanes and not place.topic.flow and place.topic.name not in self.overlap
        if can_move and self.lanes.is_lane(place.thread, time.monotonic()):
            return 1  # so that the next batch goes to another thread
        # If permits are few, none is left unused behind a batch that runs.
        has_one = place.topic.is_priority or place.topic.max_in_flight or place.topic.flow
        return 1 if has_one and self.paces[place.topic.name].seconds > QUICK_SECONDS else 2

    def thread_for(self, place: SlotState, load: list[float]) -> int:
        """Return the thread for the next batch of a slot. ``load``: seconds of work in hand of each thread."""
        topic = place.topic
        if topic.name in self.overlap:
            return self.threads  # behind the executor threads
        if self.lanes and not (topic.serial and place.batches):
            thread = self.lanes.choose(topic.name, place.thread, load, time.monotonic())
            if topic.serial and thread != place.thread:
                self.places.move(place, thread)
            return thread
        if not topic.serial:
            return min(range(self.threads), key=load.__getitem__)
        if not place.batches:
            # A call that does not end must not keep the other slots of its thread waiting.
            is_taken = self._hand.is_taken(place.home)  # rule: keeps_slots_with_a_thread_that_is_taken
            place.thread = min(range(self.threads), key=load.__getitem__) if is_taken else place.home
        return place.thread

    def limit(self, topic: Topic) -> int:
        """Return how many messages of a topic one prepare asks for."""
        size = self.batch_size(topic)
        overlaps = topic.name in self.overlap
        if overlaps and not topic.serial:
            return max(1, min(self.overlap.most(topic.name) * size, topic.prefetch, BATCH))
        seconds = self.overlap.seconds(topic.name) if overlaps else WORK_SECONDS
        wanted = seconds / max(self.paces[topic.name].seconds, 1e-7)
        if overlaps:
            wanted = min(wanted, self.overlap.share(topic.name))
        limit = max(size, min(int(wanted), max(topic.prefetch, size)))
        return max(1, min(limit - limit % size if limit > size else limit, BATCH))

    def batch_size(self, topic: Topic) -> int:
        """Return how many messages a topic's listener takes per call."""
        return self.listeners[topic.name].batch_size or 1

    def of_lanes(self, topic: str) -> int:
        """Return how many batches of a topic its lanes can take."""
        if topic in self.overlap:
            return self.overlap.room(topic, self.paces[topic].seconds)
        return self.lanes.room(topic, 2 if self.paces[topic].seconds <= QUICK_SECONDS else 1)

    def slots(self, topic: str) -> int:
        """Return how many slots of a topic that wait for limits or lanes may be asked."""
        return max(0, min(self.limits.room(topic), self.of_lanes(topic)))

    def _capacity(self, topic: Topic) -> int:
        """Return how many messages of a topic all threads together can have in hand."""
        flow = self.lanes.flows.get(topic.name)
        return (flow.limit if flow else self.runners(topic)) * self.limit(topic)

    # --- what is asked

    def expected(self, place: SlotState) -> int:
        """Return how many messages the next prepare of a slot may hand out: one not asked yet is as full as the others."""
        return int(self._expected[place.topic.name]) if place.expected is None else place.expected

    def answered(self, place: SlotState, messages: int, *, has_more: bool) -> None:
        """Record how many messages a prepare has handed out, and whether it left others that are due."""
        place.expected = BATCH if messages and has_more else 2 * messages + LEAST_EXPECTED
        self._expected[place.topic.name] += (place.expected - self._expected[place.topic.name]) * 0.1

    # --- what takes room

    def note_slow(self, slow: Sequence[Batch]) -> None:
        """Record the batches in hand whose present call has run for so long that nobody knows when it ends."""
        self._slow = {batch.place for batch in slow}
        self.overlap.slow = Counter(batch.topic.name for batch in slow)

    def reported(self, topic: str, seconds: float, messages: int, now: float) -> None:
        """Record that the listener of a topic took ``seconds`` for ``messages``."""
        self.lanes.reported(topic, seconds, messages, now)
        self.overlap.reported(topic, seconds, messages)
        self.paces[topic].note(seconds, messages)

    def started(self, batch: Batch) -> None:
        """Record a batch that is in hand from now on."""
        self.bytes.held += batch.size
        self.overlap.started(batch.place)
        self.limits.started(batch.place.topic.name, len(batch.messages))

    def ended(self, batch: Batch) -> None:
        """Record a batch that is no longer in hand."""
        now = time.monotonic()
        self.bytes.held -= batch.size
        self.overlap.ended(batch.place)
        self.limits.ended(batch.place.topic.name, len(batch.messages), now)
        self.lanes.ended(id(batch), now)


__all__ = ["WORK_SECONDS", "Capacity"]
