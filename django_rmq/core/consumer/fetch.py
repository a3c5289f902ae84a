"""Asking: chooses the due slots to prepare in the next round trip, and the limit of each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container
from itertools import islice
from operator import add

from django_rmq.core.commands import fetch
from django_rmq.core.commands.broker_interface import BrokerPipeline
from django_rmq.core.commands.script_call import Answer
from django_rmq.core.consumer.acks import AckQueue
from django_rmq.core.consumer.capacity import WORK_SECONDS, Capacity
from django_rmq.core.consumer.executor_pool import ExecutorPool
from django_rmq.core.consumer.in_flight import InFlight
from django_rmq.core.consumer.slot_schedule import SlotSchedule
from django_rmq.core.consumer.slots import SlotState
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.core.model.replies import Prepared
from django_rmq.core.model.topic import Topic

IN_HAND = 20_000
"""The maximum number of messages that one process has in hand."""

TURN = 512
"""The maximum number of slots prepared in one round trip."""

TURN_MESSAGES = 1_500
"""The number of messages that one round trip is expected to return. Meanwhile the threads process those of
the last one."""


class FetchPlan:
    """The most that the prepares of one round trip may return."""

    __slots__ = ("bytes", "expected", "load", "messages", "of_topic", "places", "slots_of_topic", "work")

    def __init__(self, held: list[float]) -> None:
        self.places: dict[SlotState, Answer[Prepared]] = {}
        self.messages = 0
        self.bytes = 0
        """The bytes granted to them."""
        self.expected = 0
        """The number of messages expected."""
        self.work = [0.0] * len(held)
        """The estimated seconds of work for each thread."""
        self.load = held.copy()
        """The same, including what each thread already has (``held``)."""
        self.of_topic: Counter[str] = Counter()
        """Topic -> number of messages."""
        self.slots_of_topic: Counter[str] = Counter()
        """Topic -> number of slots that lanes or the event loop need room for."""

    def add(self, place: SlotState, limit: int, size: int, expected: int, answer: Answer[Prepared]) -> None:
        """Add a slot that is asked for up to ``limit`` messages of ``size`` bytes, of which about ``expected`` may come."""
        self.places[place] = answer
        self.messages += limit
        self.bytes += size
        self.expected += min(limit, expected)
        self.of_topic[place.topic.name] += limit

    def burden(self, thread: int, seconds: float) -> None:
        """Add to the work of a thread.

        It is unknown how many messages a slot will hand out. Half the limit keeps many slots from flooding one
        thread.
        """
        self.load[thread] += seconds
        self.work[thread] += seconds

    def slots_of(self, topic: str, coming: FetchPlan | None) -> int:
        """Return how many slots of a topic need room, with those of the trip that is under way."""
        return self.slots_of_topic[topic] + (0 if coming is None else coming.slots_of_topic[topic])

    @property
    def is_enough(self) -> bool:
        """Whether to wait for the answer before asking for more."""
        return len(self.places) >= TURN or self.expected >= TURN_MESSAGES


class FetchPlanner:
    """Asks for as many messages as there is room for, as ``owner``."""

    def __init__(
        self,
        owner: str,
        crew: ExecutorPool,
        hand: InFlight,
        room: Capacity,
        schedule: SlotSchedule,
        settling: AckQueue,
        complain: LogThrottle,
    ) -> None:
        self._owner = owner
        self._crew = crew
        self._hand = hand
        self._room = room
        self._schedule = schedule
        self._settling = settling
        self._complain = complain
        self._has_priorities = any(topic.is_priority for topic in room.places.topics.values())
        self._is_for_executors_only = not (self._has_priorities or room.overlap)

    def nothing(self, coming: FetchPlan | None = None) -> FetchPlan:
        """Return the state before the first slot is asked; ``coming`` is what a trip under way will return."""
        load = self._hand.load
        return FetchPlan(load if coming is None else list(map(add, load, coming.work)))

    def queue(
        self, pipeline: BrokerPipeline, coming: FetchPlan | None, left_out: Container[SlotState] = ()
    ) -> FetchPlan:
        """Queue prepares of waiting slots, except for those in ``left_out``; return what they may return."""
        if self._schedule.waiting:
            self._hand.estimate(self._crew.running(), self._crew.blocked_seconds())
        asked, room = self.nothing(coming), self._room
        parked: list[SlotState] = []
        left = IN_HAND - self._hand.messages - (0 if coming is None else coming.messages)
        for place in (each for each in self._schedule.waiting if each not in left_out):
            topic = place.topic
            overlaps = topic.name in room.overlap
            is_bounded = room.overlap.needs_room(place) if overlaps else topic.flow
            if is_bounded and room.of_lanes(topic.name) <= asked.slots_of(topic.name, coming):
                parked.append(place)
                continue
            thread = room.thread_for(place, asked.load)
            if self._hand.is_taken(thread):  # rule: takes_for_threads_that_are_taken
                continue
            # A thread runs its priority slot with the highest head first, so each of these needs a batch
            # ready.
            if asked.load[thread] > 2 * WORK_SECONDS and not (topic.is_priority or topic.flow):
                if self._is_for_executors_only and self._are_busy(asked):
                    break
                continue
            if asked.messages >= left:
                break
            limit = self._limit(topic, left, asked, coming)
            if limit <= 0:
                parked.append(place)
                continue
            size = room.bytes.grant(topic, limit)
            if not size:
                break
            # rule: prepares_without_its_epoch
            call = fetch.prepare(topic, place.slot, self._owner, place.epoch, limit, size, place.cursor)
            asked.add(place, limit, size, room.expected(place), pipeline.add(call))
            asked.slots_of_topic[topic.name] += bool(is_bounded)
            place.cursor = None
            if not overlaps:
                asked.burden(thread, limit / 2 * room.paces[topic.name].seconds)
            if asked.is_enough:
                break
        for place in asked.places:
            del self._schedule.waiting[place]
        for place in parked:
            self._schedule.park(place)
        return asked

    def _are_busy(self, asked: FetchPlan) -> bool:
        """Return whether all executor threads have enough to do."""
        return min(asked.load[: self._room.threads], default=0.0) > 2 * WORK_SECONDS

    def _limit(self, topic: Topic, left: int, asked: FetchPlan, coming: FetchPlan | None) -> int:
        """Return how many messages the next prepare of a topic may return. 0: the topic's limits leave no room."""
        room, taken = self._room, asked.of_topic[topic.name]
        limit = min(room.limit(topic), left - asked.messages)
        if topic.name in room.overlap and not topic.serial:
            under_way = 0 if coming is None else coming.of_topic[topic.name]
            limit = min(limit, room.of_lanes(topic.name) * room.batch_size(topic) - taken - under_way)
        if room.limits:
            free = room.limits.room(topic.name) - taken
            share = -(-free // room.runners(topic))
            limit = min(limit, max(share, min(free, room.batch_size(topic))))
        return limit

    @property
    def has_more(self) -> bool:
        """Whether slots are waiting to which no limits or lanes apply."""
        return bool(self._schedule.waiting) and not (self._room.limits or self._room.lanes)

    def ask_limits(self) -> bool:
        """Request room for slots that wait for it; return whether any of them got some."""
        if not self._room.is_limited:
            return False
        parked = self._schedule.parked
        self._room.limits.ask(
            time.monotonic(),
            lambda name: len(parked[name]),
            lambda name, error: self._complain(
                f"{name}/limits", f"Cannot apply the limits of topic {name}: %s", error
            ),
            unsettled=self._settling.unsettled,
        )
        found = False
        for name, places in parked.items():
            for place in list(islice(places, self._room.slots(name))) if places else ():
                del places[place]
                self._schedule.ready(place)
                found = True
        return found


__all__ = ["FetchPlan", "FetchPlanner"]
