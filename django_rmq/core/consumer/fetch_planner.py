"""The fetch planner decides which slots a worker fetches next.

When a slot is due is decided by ``slots``, and how many messages a fetch asks for by ``capacity``. ``fetch_round_trips`` sends
the plan, and processes the answers. Redis decides in ``lua/slot/_choice.lua`` which messages of a slot come next, and
``run_order`` which of the fetched batches runs next.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import add

from django_rmq.core.commands import fetch
from django_rmq.core.commands.broker_interface import BrokerPipeline
from django_rmq.core.commands.script_call import Answer
from django_rmq.core.consumer.acks import AckQueue
from django_rmq.core.consumer.batch import InFlight
from django_rmq.core.consumer.capacity import WORK_SECONDS, Capacity
from django_rmq.core.consumer.executor_pool import ExecutorPool
from django_rmq.core.consumer.slots import ConsumedSlot, SlotSchedule
from django_rmq.core.log import LogThrottle
from django_rmq.core.model.replies import Prepared

TURN = 512
"""The maximum number of slots prepared in one round trip."""

TURN_MESSAGES = 1_500
"""The number of messages that one round trip is expected to return. Meanwhile the threads process the
messages of the last one."""


class FetchPlan:
    """The most that the prepares of one round trip may return."""

    __slots__ = ("bytes", "expected", "load", "messages", "of_topic", "slots", "slots_of_topic", "work")

    def __init__(self, held: list[float]) -> None:
        self.slots: dict[ConsumedSlot, Answer[Prepared]] = {}
        self.messages = 0
        self.bytes = 0
        """The bytes granted to them."""
        self.expected = 0
        """The number of messages expected."""
        self.work = [0.0] * len(held)
        """The estimated seconds of work for each thread."""
        self.load = held.copy()
        """The same, including the work that each thread already has (``held``)."""
        self.of_topic: defaultdict[str, int] = defaultdict(int)
        """Topic -> number of messages."""
        self.slots_of_topic: defaultdict[str, int] = defaultdict(int)
        """Topic -> number of slots that flows or the event loop need room for."""

    def add(
        self,
        slot: ConsumedSlot,
        limit: int,
        size: int,
        expected: int,
        answer: Answer[Prepared],
        needs_room: bool,
    ) -> None:
        """Add a slot that is asked for up to ``limit`` messages of ``size`` bytes, of which about ``expected`` may come."""
        self.slots[slot] = answer
        self.messages += limit
        self.bytes += size
        self.expected += min(limit, expected)
        self.of_topic[slot.topic.name] += limit
        self.slots_of_topic[slot.topic.name] += needs_room

    def burden(self, threads: Sequence[int], seconds: float) -> None:
        """Add to the work of threads that share it.

        It is unknown how many messages a slot will return. Half the limit keeps many slots from flooding one
        thread.
        """
        for thread in threads:
            self.load[thread] += seconds / len(threads)
            self.work[thread] += seconds / len(threads)

    def slots_of(self, topic: str, under_way: FetchPlan) -> int:
        """Return how many slots of a topic need room, with those of the trip that is under way."""
        return self.slots_of_topic[topic] + under_way.slots_of_topic[topic]

    @property
    def is_enough(self) -> bool:
        """Whether to wait for the answer before asking for more."""
        return len(self.slots) >= TURN or self.expected >= TURN_MESSAGES


@dataclass(eq=False)
class FetchPlanner:
    """Asks Redis for as many messages as the worker ``owner`` has capacity for.

    ``queue`` decides what a worker fetches next. It parks a slot if the limits or the flow of its topic leave no room. It passes
    a slot over, which stays in ``waiting``, if its thread has enough to do. It ends if the worker or its memory has no room. The
    plan of the trip that is under way, or ``nothing``, counts with what the worker has.
    """

    owner: str
    pool: ExecutorPool
    in_flight: InFlight
    capacity: Capacity
    schedule: SlotSchedule
    acks: AckQueue
    complain: LogThrottle

    def __post_init__(self) -> None:
        has_priorities = any(topic.is_priority for topic in self.capacity.table.topics.values())
        self._is_for_executors_only = not (has_priorities or self.capacity.async_capacity)
        self.nothing = FetchPlan([0.0] * len(self.in_flight.load))
        """A plan without slots."""

    def queue(
        self, pipeline: BrokerPipeline, under_way: FetchPlan, left_out: Container[ConsumedSlot] = ()
    ) -> FetchPlan:
        """Queue prepares of waiting slots, except for those in ``left_out``; return what they may return."""
        self.in_flight.estimate(self.pool.current_batches(), self.pool.blocked_seconds())
        capacity = self.capacity
        plan = FetchPlan(list(map(add, self.in_flight.load, under_way.work)))
        parked: list[ConsumedSlot] = []
        left = capacity.messages_left - under_way.messages
        for slot in (each for each in self.schedule.waiting if each not in left_out):
            topic = slot.topic
            overlaps = topic.name in capacity.async_capacity
            is_bounded = capacity.async_capacity.needs_room(slot) if overlaps else topic.flow
            if is_bounded and capacity.batches_left(topic.name) <= plan.slots_of(topic.name, under_way):
                parked.append(slot)
                continue
            thread = capacity.thread_for(slot, plan.load)
            # The thread's call has run for so long that nobody knows when it ends. The messages would wait behind it.
            if self.in_flight.is_taken(thread):  # rule: takes_for_threads_that_are_taken
                continue
            # A thread runs its priority slot with the highest head first, so each of these needs a batch ready.
            if plan.load[thread] > 2 * WORK_SECONDS and not (topic.is_priority or topic.flow):
                if self._is_for_executors_only and min(plan.load[: capacity.threads]) > 2 * WORK_SECONDS:
                    break
                continue
            if plan.messages >= left:
                break
            asked_for = plan.of_topic[topic.name], under_way.of_topic[topic.name]
            limit = capacity.limit(topic, left - plan.messages, *asked_for)
            if limit <= 0:
                parked.append(slot)
                continue
            size = capacity.bytes.grant(topic, limit)
            if not size:
                break
            inbox = capacity.inbox if capacity.takes_pushes(topic) else b""
            # rule: prepares_without_its_epoch
            call = fetch.prepare(topic, slot.number, self.owner, slot.epoch, limit, size, slot.cursor, inbox)
            plan.add(slot, limit, size, capacity.expected(slot), pipeline.add(call), bool(is_bounded))
            slot.cursor, slot.sole_receipt = None, 0
            if not overlaps:
                threads = range(capacity.threads) if capacity.is_shared(topic) else (thread,)
                plan.burden(threads, limit / 2 * capacity.seconds_per_message[topic.name])
            if plan.is_enough:
                break
        for slot in plan.slots:
            del self.schedule.waiting[slot]
        for slot in parked:
            self.schedule.park(slot)
        return plan

    @property
    def is_due(self) -> bool:
        """Whether slots are waiting, or limits may let some be fetched once Redis has the ends of other messages."""
        return bool(self.schedule.waiting) or self.capacity.is_limited

    @property
    def has_more(self) -> bool:
        """Whether slots are waiting to which no limits or flows apply."""
        return bool(self.schedule.waiting) and not (self.capacity.limits or self.capacity.flow_threads)

    def ask_limits(self) -> bool:
        """Request permits and deliveries for slots that wait for them; return whether any of them got some."""
        if not self.capacity.is_limited:
            return False
        parked = self.schedule.parked
        self.capacity.limits.ask(
            time.monotonic(),
            lambda name: len(parked[name]),
            lambda name, error: self.complain(
                f"{name}/limits", f"Cannot apply the limits of topic {name}: %s", error
            ),
            unsettled=self.acks.unsettled,
        )
        has_tokens = False
        for name, waiting in parked.items():
            for slot in list(islice(waiting, self.capacity.slots(name))) if waiting else ():
                del waiting[slot]
                self.schedule.make_ready(slot)
                has_tokens = True
        return has_tokens
