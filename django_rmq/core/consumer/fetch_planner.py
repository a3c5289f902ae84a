"""The fetch planner decides which slots a worker fetches next; here are also the round trips and their answers.

One round trip acknowledges the deliveries that have ended, and prepares slots that are due. When a slot is due is decided by
``slots``, and how many messages a fetch asks for by ``capacity``. What a send has pushed is received here, too.
Passing the messages to executors is the part of ``executor_pool``. Whose batch runs next is decided by ``thread_executor`` (for
coroutines, ``async_executor``).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from math import inf
from operator import add
from typing import NamedTuple

from django_rmq.core.clock import uptime
from django_rmq.core.commands import fetch
from django_rmq.core.commands.broker_interface import Broker, BrokerPipeline
from django_rmq.core.commands.script_call import Answer
from django_rmq.core.consumer.acks import AckCall, AckQueue, SentAcks
from django_rmq.core.consumer.batch import InFlight
from django_rmq.core.consumer.capacity import WORK_SECONDS, Capacity
from django_rmq.core.consumer.executor_pool import BatchRouter, ExecutorPool
from django_rmq.core.consumer.mailbox import ShutdownState
from django_rmq.core.consumer.slot_acquisition import SlotAcquirer
from django_rmq.core.consumer.slots import (
    ConsumedSlot,
    FetchState,
    SlotSchedule,
    SlotState,
)
from django_rmq.core.log import LogThrottle
from django_rmq.core.model.limits import NEVER
from django_rmq.core.model.replies import Delivery, Prepared, Pushed
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble, SlotMoved

MESSAGES_IN_FLIGHT = 20_000
"""The maximum number of messages in flight in one process."""

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

    def add(self, slot: ConsumedSlot, limit: int, size: int, expected: int, answer: Answer[Prepared]) -> None:
        """Add a slot that is asked for up to ``limit`` messages of ``size`` bytes, of which about ``expected`` may come."""
        self.slots[slot] = answer
        self.messages += limit
        self.bytes += size
        self.expected += min(limit, expected)
        self.of_topic[slot.topic.name] += limit

    def burden(self, threads: Sequence[int], seconds: float) -> None:
        """Add to the work of threads that share it.

        It is unknown how many messages a slot will return. Half the limit keeps many slots from flooding one
        thread.
        """
        for thread in threads:
            self.load[thread] += seconds / len(threads)
            self.work[thread] += seconds / len(threads)

    def slots_of(self, topic: str, under_way: FetchPlan | None) -> int:
        """Return how many slots of a topic need room, with those of the trip that is under way."""
        return self.slots_of_topic[topic] + (0 if under_way is None else under_way.slots_of_topic[topic])

    @property
    def is_enough(self) -> bool:
        """Whether to wait for the answer before asking for more."""
        return len(self.slots) >= TURN or self.expected >= TURN_MESSAGES


class FetchPlanner:
    """Asks Redis for as many messages as the worker ``owner`` has capacity for.

    ``queue`` decides what a worker fetches next. It parks a slot if the limits or the flow of its topic leave no room. It passes
    a slot over, which stays in ``waiting``, if its thread has enough to do. It ends if the worker or its memory has no room.
    """

    def __init__(
        self,
        owner: str,
        pool: ExecutorPool,
        in_flight: InFlight,
        capacity: Capacity,
        schedule: SlotSchedule,
        acks: AckQueue,
        complain: LogThrottle,
    ) -> None:
        self._owner = owner
        self._pool = pool
        self._in_flight = in_flight
        self._capacity = capacity
        self._schedule = schedule
        self._acks = acks
        self._complain = complain
        self._has_priorities = any(topic.is_priority for topic in capacity.table.topics.values())
        self._is_for_executors_only = not (self._has_priorities or capacity.async_capacity)

    def nothing(self, under_way: FetchPlan | None = None) -> FetchPlan:
        """Return a plan without slots; ``under_way`` is the plan of the trip that is under way."""
        load = self._in_flight.load
        return FetchPlan(load if under_way is None else list(map(add, load, under_way.work)))

    def queue(
        self, pipeline: BrokerPipeline, under_way: FetchPlan | None, left_out: Container[ConsumedSlot] = ()
    ) -> FetchPlan:
        """Queue prepares of waiting slots, except for those in ``left_out``; return what they may return."""
        if self._schedule.waiting:
            self._in_flight.estimate(self._pool.current_batches(), self._pool.blocked_seconds())
        plan, capacity = self.nothing(under_way), self._capacity
        parked: list[ConsumedSlot] = []
        left = MESSAGES_IN_FLIGHT - self._in_flight.messages - (under_way.messages if under_way else 0)
        for slot in (each for each in self._schedule.waiting if each not in left_out):
            topic = slot.topic
            overlaps = topic.name in capacity.async_capacity
            is_bounded = capacity.async_capacity.needs_room(slot) if overlaps else topic.flow
            if is_bounded and capacity.batches_left(topic.name) <= plan.slots_of(topic.name, under_way):
                parked.append(slot)
                continue
            thread = capacity.thread_for(slot, plan.load)
            # The thread's call has run for so long that nobody knows when it ends. The messages would wait behind it.
            if self._in_flight.is_taken(thread):  # rule: takes_for_threads_that_are_taken
                continue
            # A thread runs its priority slot with the highest head first, so each of these needs a batch ready.
            if plan.load[thread] > 2 * WORK_SECONDS and not (topic.is_priority or topic.flow):
                if self._is_for_executors_only and self._are_busy(plan):
                    break
                continue
            if plan.messages >= left:
                break
            limit = self._limit(topic, left, plan, under_way)
            if limit <= 0:
                parked.append(slot)
                continue
            size = capacity.bytes.grant(topic, limit)
            if not size:
                break
            inbox = capacity.inbox_for(topic)
            # rule: prepares_without_its_epoch
            call = fetch.prepare(topic, slot.number, self._owner, slot.epoch, limit, size, slot.cursor, inbox)
            plan.add(slot, limit, size, capacity.expected(slot), pipeline.add(call))
            plan.slots_of_topic[topic.name] += bool(is_bounded)
            slot.cursor, slot.sole_receipt = None, 0
            if not overlaps:
                threads = range(capacity.threads) if capacity.is_shared(topic) else (thread,)
                plan.burden(threads, limit / 2 * capacity.call_times[topic.name].seconds_per_message)
            if plan.is_enough:
                break
        for slot in plan.slots:
            del self._schedule.waiting[slot]
        for slot in parked:
            self._schedule.park(slot)
        return plan

    def _are_busy(self, plan: FetchPlan) -> bool:
        """Return whether all executor threads have enough to do."""
        return min(plan.load[: self._capacity.threads], default=0.0) > 2 * WORK_SECONDS

    def _limit(self, topic: Topic, left: int, plan: FetchPlan, under_way: FetchPlan | None) -> int:
        """Return how many messages the next prepare of a topic may return, or 0 if the topic's limits leave no room."""
        capacity, taken = self._capacity, plan.of_topic[topic.name]
        limit = min(capacity.limit(topic), left - plan.messages)
        if topic.name in capacity.async_capacity and not topic.serial:
            expected = 0 if under_way is None else under_way.of_topic[topic.name]
            limit = min(
                limit, capacity.batches_left(topic.name) * capacity.batch_size(topic) - taken - expected
            )
        if capacity.limits:
            free = capacity.limits.room(topic.name) - taken
            share = -(-free // capacity.runners(topic))
            limit = min(limit, max(share, min(free, capacity.batch_size(topic))))
        return limit

    @property
    def is_due(self) -> bool:
        """Whether slots are waiting, or limits may let some be fetched once Redis has the ends of other messages."""
        return bool(self._schedule.waiting) or self._capacity.is_limited

    @property
    def has_more(self) -> bool:
        """Whether slots are waiting to which no limits or flows apply."""
        return bool(self._schedule.waiting) and not (self._capacity.limits or self._capacity.flow_threads)

    def ask_limits(self) -> bool:
        """Request permits and deliveries for slots that wait for them; return whether any of them got some."""
        if not self._capacity.is_limited:
            return False
        parked = self._schedule.parked
        self._capacity.limits.ask(
            time.monotonic(),
            lambda name: len(parked[name]),
            lambda name, error: self._complain(
                f"{name}/limits", f"Cannot apply the limits of topic {name}: %s", error
            ),
            unsettled=self._acks.unsettled,
        )
        has_tokens = False
        for name, waiting in parked.items():
            for slot in list(islice(waiting, self._capacity.slots(name))) if waiting else ():
                del waiting[slot]
                self._schedule.ready(slot)
                has_tokens = True
        return has_tokens


class RoundTrip(NamedTuple):
    """A round trip that is under way."""

    pipeline: BrokerPipeline
    sent_acks: SentAcks
    """The acknowledgements that it sends. They are sent again if its answer is lost."""
    parts: list[AckCall]
    """The calls that send them."""
    plan: FetchPlan
    at: float
    """``uptime`` when it was sent."""


ANSWER_SECONDS = 0.05
"""Maximum seconds until the answer to commits is read on which nothing depends: to wait for it would wake this thread."""


class RoundTrips:
    """Makes the round trips of one worker."""

    def __init__(
        self,
        broker: Broker,
        acks: AckQueue,
        planner: FetchPlanner,
        replies: FetchReplies,
        capacity: Capacity,
    ) -> None:
        self.under_way: RoundTrip | None = None
        """The trip that Redis works on while the answer to the previous one is read, and the next one packed."""
        self._broker = broker
        self._acks = acks
        self._planner = planner
        self._replies = replies
        self._capacity, self._granted = capacity, capacity.bytes
        self.answer_due = inf
        """The monotonic time at which the answer to the trip under way is read, if nothing comes before."""

    @property
    def is_awaited(self) -> bool:
        """Whether a trip is under way whose answer matters now."""
        return self.under_way is not None and self.answer_due == inf

    def _may_rest(self, sent: RoundTrip) -> bool:
        """Return whether nothing depends on the answer to a trip: it commits messages, and their senders push the next ones."""
        return (
            not sent.plan.slots
            and not self._planner.has_more
            and all(
                slot.sleeping_until is not None and self._capacity.takes_pushes(slot.topic)
                for slot, _ in sent.sent_acks
            )
        )

    def make(self) -> bool:
        """Make a round trip if there is anything to send or to ask; return whether there was."""
        sent = self.send()
        # The next trip reads an answer that rests, so that what was pushed begins before. A slot may wait for the answer.
        if sent is None and not self._planner.is_due and time.monotonic() < self.answer_due < inf:
            return self._planner.ask_limits()
        round_trip, self.under_way = self.under_way, sent
        if round_trip is None and sent is None:
            return self._planner.ask_limits()
        if round_trip is not None:
            self.receive(round_trip)
        if sent is not None and self._may_rest(sent):
            self.answer_due = time.monotonic() + ANSWER_SECONDS
        elif round_trip is None and not self._planner.has_more:
            # No further slot waits, so no other trip could be packed while this one is under way.
            self.receive_rest()
        # The limits are asked after the answer, because a message counts as in flight until Redis has received its end.
        self._planner.ask_limits()
        return True

    def send(self, *, takes: bool = True) -> RoundTrip | None:
        """Send acknowledgements and, if it ``takes``, prepares. Return the trip, or None if there is nothing to send."""
        if takes and not self._planner.is_due and self._acks.due > time.monotonic():
            return None
        pipeline = self._broker.pipeline()
        sent_acks, parts = self._acks.send(pipeline)
        under_way, unconfirmed = (
            (self.under_way.plan, self.under_way.sent_acks) if self.under_way else (None, ())
        )
        # This trip may overtake the one under way, and a strict slot would answer that it is busy.
        held = {slot for slot, _ in unconfirmed if slot.topic.is_strict}  # rule: asks_beside_a_commit
        plan = self._planner.queue(pipeline, under_way, held) if takes else self._planner.nothing()
        if not len(pipeline):
            return None
        round_trip = RoundTrip(pipeline, sent_acks, parts, plan, uptime())
        for slot in plan.slots:
            slot.change_fetch(FetchState.UNDER_WAY)
        try:
            pipeline.send()
        except ServerTrouble:
            # The connection broke while it was written to. Redis may have executed the calls, so their answers count as lost.
            self.lost(round_trip)
            raise
        return round_trip

    def receive(self, round_trip: RoundTrip) -> None:
        """Wait for the answer to a trip, and process it. Raises an error that concerns more than one slot."""
        self.answer_due = inf
        try:
            round_trip.pipeline.receive()
        except ServerTrouble:
            # The connection broke before the answer, and Redis may have executed all of the calls or none.
            self.lost(round_trip)
            raise
        self._granted.answered(round_trip.plan.bytes)
        trouble = self._acks.confirm(round_trip.sent_acks, round_trip.parts)
        for slot, answer in round_trip.plan.slots.items():
            trouble = self._replies.prepared(slot, answer.result(), round_trip.at) or trouble
        self._replies.put_to_sleep(slot for slot, _ in round_trip.sent_acks)
        if trouble is not None:
            raise trouble

    def receive_rest(self) -> None:
        """Wait for the trip that is under way."""
        round_trip, self.under_way = self.under_way, None
        if round_trip is not None:
            self.receive(round_trip)

    def lost(self, round_trip: RoundTrip) -> None:
        """Queue the acknowledgements of a trip again whose answer was lost, and have Redis asked which messages it delivered."""
        self._granted.answered(round_trip.plan.bytes)
        for slot in round_trip.plan.slots:
            self._replies.lost(slot)
        self._acks.lost(round_trip.sent_acks)


STALE_SECONDS = 1.0
"""A message that was pushed before that is given back instead of begun: it counts as due then, and comes again."""


class FetchReplies:
    """Continues with slots whose prepare was answered, or to which a message was pushed.

    ``handed_out`` is called for every prepare that returned messages, with the server's time in ms.
    ``on_moved`` is called if a slot was given another slot count; without it the worker ends.
    """

    def __init__(
        self,
        capacity: Capacity,
        in_flight: InFlight,
        schedule: SlotSchedule,
        acks: AckQueue,
        router: BatchRouter,
        acquirer: SlotAcquirer,
        shutdown: ShutdownState,
        handed_out: Callable[[Topic, Sequence[Delivery], float], None],
        on_moved: Callable[[str], None] | None,
    ) -> None:
        self._capacity = capacity
        self._in_flight = in_flight
        self._table = capacity.table
        self._schedule = schedule
        self._acks = acks
        self._router = router
        self._acquirer = acquirer
        self._shutdown = shutdown
        self._handed_out = handed_out
        self._on_moved = on_moved
        self._empty: list[ConsumedSlot] = []
        """Slots whose prepare has found nothing, of the round trip that is processed."""

    def lost(self, slot: ConsumedSlot) -> None:
        """Record that the answer for a slot was lost."""
        slot.change_fetch(FetchState.IDLE)
        slot.again = False
        self._acquirer.mark_uncertain(slot)
        self._table.forget(slot)

    def prepared(self, slot: ConsumedSlot, reply: Prepared | RmqError, at: float) -> ServerTrouble | None:
        """Process the answer of a prepare; return an error that concerns more than this slot."""
        recalled = slot.fetch is FetchState.RECALLED
        slot.change_fetch(FetchState.IDLE)
        trouble = None
        if isinstance(reply, RmqError):
            trouble = self._acquirer.failed(slot, reply)
        else:
            self._schedule.open(slot)
            has_more = reply.next_due is not None and reply.next_due <= self._schedule.clock.ms()
            self._capacity.answered(slot, len(reply.deliveries), has_more=has_more)
            if reply.status != "ok":
                self._nothing(slot, reply)
            elif recalled:
                members = [delivery.member for delivery in reply.deliveries]
                self._acks.release(slot, reply.receipt, members)
                self._schedule.ready(slot)
            elif slot.topic.is_fifo and reply.is_beside and self._is_missing_pushes(slot):
                # What was pushed before has to begin before. Redis is asked for it once.
                self._acks.release(slot, reply.receipt, [each.member for each in reply.deliveries])
                slot.has_asked = True
                self._acquirer.mark_uncertain(slot)  # rule: overtakes_what_was_pushed
            else:
                self._take(slot, reply, at)
        # The slot was woken while the prepare was under way. The message may have arrived after the script ran.
        if slot.again:
            slot.again = False
            self._schedule.ready(slot)
        self._table.forget(slot)
        return trouble

    def pushed(self, item: Pushed) -> None:
        """Begin with a message that its send has delivered to this worker, or give it back if it may not begin here."""
        name, number, receipt, delivery = item
        if name not in self._table.topics:
            return  # any program may publish to the inbox
        known = self._table.get(name, number)
        if known is not None and known.is_uncertain:
            return  # Redis is asked what this worker holds there
        if not self._in_flight.is_new(name, number, receipt):
            # During a change of the subscription a message comes by both, or has been found as that of a lost push.
            return  # rule: begins_twice_with_what_came_twice
        self._in_flight.note(name, number, receipt)
        slot = known or ConsumedSlot(self._table.topics[name], number, 0, SlotState.DISOWNED)
        # A push may have waited in the socket while this process did not run.
        pushed_at = self._schedule.clock.uptime_at(receipt / 1000)
        at = min(uptime(), pushed_at)  # rule: counts_the_time_out_from_the_reading
        may_begin = slot.state is SlotState.ACQUIRED and not slot.blocked_by and not self._shutdown.begun
        # rule: begins_with_what_it_may_not_take
        if not (may_begin and self._capacity.takes_pushes(slot.topic)) or uptime() - at > STALE_SECONDS:
            self._acks.release(slot, receipt, [delivery.member])
            return
        ends = (receipt // 1_000_000 + slot.topic.timeout + 1) * 1000
        self._take(
            slot,
            Prepared("ok", ends, receipt, [delivery], is_plain=True, is_alone=True, sleeping_until=NEVER),
            at,
        )

    def _take(self, slot: ConsumedSlot, reply: Prepared, at: float) -> None:
        """Pass delivered messages to executors."""
        topic, receipt, deliveries = slot.topic, reply.receipt, reply.deliveries
        # rule: takes_the_time_out_of_the_topic
        start = partial(self._router.start, is_suspect=reply.is_suspect, timeout=reply.timeout)
        self._handed_out(topic, deliveries, self._schedule.clock.ms())
        total = self._capacity.bytes.weigh(topic, deliveries)
        slot.sleeping_until = reply.sleeping_until
        slot.has_asked = False
        if topic.serial:
            # Bodies and failures belong to single messages, so their commit has to name these.
            # rule: commits_as_a_whole_what_is_not_alone
            if reply.is_alone and reply.is_plain:
                slot.sole_receipt = receipt
            start(slot, receipt, deliveries, at, total)
            self._schedule.look_at(slot, reply.next_due)
            return
        size = self._capacity.batch_size(topic)
        # In the event loop each call is a batch, so that all of them overlap.
        parts = (
            len(deliveries)
            if topic.name in self._capacity.async_capacity
            else self._capacity.threads
            if self._capacity.is_shared(topic)
            else 1
        )
        share = -(-len(deliveries) // (size * parts)) * size
        for first in range(0, len(deliveries), share):
            part = deliveries[first : first + share]
            start(slot, receipt, part, at, total * len(part) // len(deliveries))
        if slot.sleeping_until is None or self._schedule.asks_always:
            # Senders wake this worker only after a prepare that leaves nothing, and other threads are free.
            self._schedule.ready(slot)
        else:
            self._schedule.look_at(slot, reply.next_due)

    def _is_missing_pushes(self, slot: ConsumedSlot) -> bool:
        """Return whether what is in flight in a slot, as Redis says, is unknown to this worker."""
        is_quiet = slot.state is SlotState.ACQUIRED and not (slot.batches or slot.has_asked)
        return is_quiet and slot not in self._acks.unconfirmed()

    def _nothing(self, slot: ConsumedSlot, reply: Prepared) -> None:
        """Continue with a slot whose prepare returned no messages."""
        if reply.status == "more":
            slot.cursor = reply.cursor
            self._schedule.ready(slot)
        elif reply.status in ("busy", "paused"):
            self._schedule.pause(slot, reply.next_due, is_paused=reply.status == "paused")
        elif reply.status == "fenced":
            self._acquirer.fenced(slot)
            # Another worker has acquired the slot. It can take these messages at once instead of waiting for their time-out.
            self._router.give_back_slot(slot)  # rule: keeps_what_it_was_fenced_from
        elif reply.status == "moved":
            self._moved(slot, reply.slots)
        else:
            self._schedule.look_at(slot, reply.next_due)
            self._empty.append(slot)

    def put_to_sleep(self, settled: Iterable[ConsumedSlot]) -> None:
        """Let slots fall asleep in which nothing is left: as little as possible is kept in memory for each."""
        asleep = (slot for slot in settled if slot.sleeping_until is not None)
        at_rest = {slot for slot in chain(self._empty, asleep) if slot.is_at_rest}
        self._empty.clear()
        for slot in at_rest - self._acks.unconfirmed() if at_rest else ():
            self._table.put_to_sleep(slot)

    def _moved(self, slot: ConsumedSlot, slots: int | None) -> None:
        if self._on_moved is not None and slots:
            # Its messages may be moving. It answers busy until they have moved.
            slot.topic = replace(slot.topic, slots=slots)
            self._on_moved(slot.topic.name)
            self._schedule.ready(slot)
            return
        # Without a callback nobody would load the new definition, so the worker settles its messages and ends.
        self._shutdown.moved = SlotMoved(
            f"topic {slot.topic.name} no longer has {slot.topic.slots} slots; restart the worker to "
            "load the current definition"
        )
        self._shutdown.begun = True
