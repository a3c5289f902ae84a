"""The round trips of a worker, and what their answers mean for slots and messages.

One round trip acknowledges the deliveries that have ended, and prepares slots that are due. Which slots these are is
decided by ``fetch_planner``, and how many messages each may return by ``capacity``. What a send has pushed is received here, too.
Passing the messages to executors is the part of ``executor_pool``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import inf
from typing import NamedTuple

from django_rmq.core.clock import uptime
from django_rmq.core.commands.broker_interface import Broker, BrokerPipeline
from django_rmq.core.consumer.acks import AckCall, AckQueue, SentAcks
from django_rmq.core.consumer.batch import InFlight
from django_rmq.core.consumer.capacity import Capacity
from django_rmq.core.consumer.executor_pool import BatchRouter
from django_rmq.core.consumer.fetch_planner import FetchPlan, FetchPlanner
from django_rmq.core.consumer.mailbox import ShutdownState
from django_rmq.core.consumer.slot_acquisition import SlotAcquirer
from django_rmq.core.consumer.slots import ConsumedSlot, FetchState, SlotSchedule, SlotState
from django_rmq.core.model.bounds import NEVER
from django_rmq.core.model.replies import Delivery, Prepared, Pushed
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble, SlotMoved


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


@dataclass(eq=False)
class RoundTrips:
    """Makes the round trips of one worker."""

    broker: Broker
    acks: AckQueue
    planner: FetchPlanner
    replies: FetchReplies
    capacity: Capacity
    under_way: RoundTrip | None = None
    """The trip that Redis works on while the answer to the previous one is read, and the next one packed."""
    answer_due: float = inf
    """The monotonic time at which the answer to the trip under way is read, if nothing comes before."""

    @property
    def is_awaited(self) -> bool:
        """Whether a trip is under way whose answer matters now."""
        return self.under_way is not None and self.answer_due == inf

    def _may_rest(self, sent: RoundTrip) -> bool:
        """Return whether nothing depends on the answer to a trip: it commits messages, and their senders push the next ones."""
        return (
            not sent.plan.slots
            and not self.planner.has_more
            and all(
                slot.sleeping_until is not None and self.capacity.takes_pushes(slot.topic)
                for slot, _ in sent.sent_acks
            )
        )

    def make(self) -> bool:
        """Make a round trip if there is anything to send or to ask; return whether there was."""
        sent = self.send()
        # The next trip reads an answer that rests, so that what was pushed begins before. A slot may wait for the answer.
        if sent is None and not self.planner.is_due and time.monotonic() < self.answer_due < inf:
            return self.planner.ask_limits()
        round_trip, self.under_way = self.under_way, sent
        if round_trip is None and sent is None:
            return self.planner.ask_limits()
        if round_trip is not None:
            self.receive(round_trip)
        # While a fetch is under way, nobody knows how many permits it will use.
        is_alone = (
            round_trip is None or self.planner.capacity.is_limited
        )  # rule: asks_limits_while_it_fetches
        if sent is not None and self._may_rest(sent):
            self.answer_due = time.monotonic() + ANSWER_SECONDS
        elif is_alone and not self.planner.has_more:
            # No further slot waits, so no other trip could be packed while this one is under way.
            self.receive_rest()
        # The answer says which messages of the limited topics are in flight, unless it rests; then it is about others alone.
        self.planner.ask_limits()
        return True

    def send(self, *, takes: bool = True) -> RoundTrip | None:
        """Send acknowledgements and, if it ``takes``, prepares. Return the trip, or None if there is nothing to send."""
        if takes and not self.planner.is_due and self.acks.due > time.monotonic():
            return None
        pipeline = self.broker.pipeline()
        sent_acks, parts = self.acks.send(pipeline)
        plan = self.planner.nothing
        under_way, unconfirmed = (
            (self.under_way.plan, self.under_way.sent_acks) if self.under_way else (plan, ())
        )
        # This trip may overtake the one under way, and a strict slot would answer that it is busy.
        held = {slot for slot, _ in unconfirmed if slot.topic.is_strict}  # rule: asks_beside_a_commit
        if takes and self.planner.schedule.waiting:
            plan = self.planner.queue(pipeline, under_way, held)
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
        self.capacity.bytes.answered(round_trip.plan.bytes)
        trouble = self.acks.confirm(round_trip.sent_acks, round_trip.parts)
        for slot, answer in round_trip.plan.slots.items():
            trouble = self.replies.prepared(slot, answer.result(), round_trip.at) or trouble
        self.replies.put_to_sleep(slot for slot, _ in round_trip.sent_acks)
        if trouble is not None:
            raise trouble

    def receive_rest(self) -> None:
        """Wait for the trip that is under way."""
        round_trip, self.under_way = self.under_way, None
        if round_trip is not None:
            self.receive(round_trip)

    def lost(self, round_trip: RoundTrip) -> None:
        """Queue the acknowledgements of a trip again whose answer was lost, and have Redis asked which messages it delivered."""
        self.capacity.bytes.answered(round_trip.plan.bytes)
        for slot in round_trip.plan.slots:
            self.replies.lost(slot)
        self.acks.lost(round_trip.sent_acks)


STALE_SECONDS = 1.0
"""A message that was pushed before that is given back instead of begun: it counts as due then, and comes again."""


@dataclass(eq=False)
class FetchReplies:
    """Continues with slots whose prepare was answered, or to which a message was pushed.

    ``handed_out`` is called for every prepare that returned messages, with the server's time in ms.
    ``on_moved`` is called if a slot was given another slot count; without it the worker ends.
    """

    capacity: Capacity
    in_flight: InFlight
    schedule: SlotSchedule
    acks: AckQueue
    router: BatchRouter
    acquirer: SlotAcquirer
    shutdown: ShutdownState
    handed_out: Callable[[Topic, Sequence[Delivery], float], None]
    on_moved: Callable[[str], None] | None
    _empty: list[ConsumedSlot] = field(default_factory=list)
    """Slots whose prepare has found nothing, of the round trip that is processed."""

    def lost(self, slot: ConsumedSlot) -> None:
        """Record that the answer for a slot was lost."""
        slot.change_fetch(FetchState.IDLE)
        slot.again = False
        self.acquirer.mark_uncertain(slot)
        self.capacity.table.forget(slot)

    def prepared(self, slot: ConsumedSlot, reply: Prepared | RmqError, at: float) -> ServerTrouble | None:
        """Process the answer of a prepare; return an error that concerns more than this slot."""
        recalled = slot.fetch is FetchState.RECALLED
        slot.change_fetch(FetchState.IDLE)
        trouble = None
        if isinstance(reply, RmqError):
            trouble = self.acquirer.failed(slot, reply)
        else:
            self.schedule.use_again(slot)
            has_more = reply.next_due is not None and reply.next_due <= self.schedule.clock.ms()
            self.capacity.answered(slot, len(reply.deliveries), has_more=has_more)
            if reply.status != "ok":
                self._nothing(slot, reply)
            elif recalled:
                members = [delivery.member for delivery in reply.deliveries]
                self.acks.release(slot, reply.receipt, members)
                self.schedule.make_ready(slot)
            elif reply.is_beside and self._is_missing_pushes(slot):
                # What was pushed before has to begin before, or would wait for its time-out. Redis is asked for it once.
                self.acks.release(slot, reply.receipt, [each.member for each in reply.deliveries])
                slot.has_asked = True
                self.acquirer.mark_uncertain(slot)  # rule: overtakes_what_was_pushed
            else:
                self._take(slot, reply, at)
        # The slot was woken while the prepare was under way. The message may have arrived after the script ran.
        if slot.again:
            slot.again = False
            self.schedule.make_ready(slot)
        self.capacity.table.forget(slot)
        return trouble

    def pushed(self, item: Pushed) -> None:
        """Begin with a message that its send has delivered to this worker, or give it back if it may not begin here."""
        name, number, receipt, delivery = item
        if name not in self.capacity.table.topics:
            return  # any program may publish to the inbox
        known = self.capacity.table.get(name, number)
        if known is not None and known.is_uncertain:
            return  # Redis is asked what this worker holds there
        if not self.in_flight.is_new(name, number, receipt):
            # During a change of the subscription a message comes by both, or has been found as that of a lost push.
            return  # rule: begins_twice_with_what_came_twice
        self.in_flight.note(name, number, receipt)
        slot = known or ConsumedSlot(self.capacity.table.topics[name], number, 0, SlotState.DISOWNED)
        # A push may have waited in the socket while this process did not run.
        pushed_at = self.schedule.clock.uptime_at(receipt / 1000)
        at = min(uptime(), pushed_at)  # rule: counts_the_time_out_from_the_reading
        may_begin = slot.state is SlotState.ACQUIRED and not slot.blocked_by and not self.shutdown.begun
        # rule: begins_with_what_it_may_not_take
        if not (may_begin and self.capacity.takes_pushes(slot.topic)) or uptime() - at > STALE_SECONDS:
            self.acks.release(slot, receipt, [delivery.member])
            return
        ends = (receipt // 1_000_000 + slot.topic.timeout + 1) * 1000  # as fetch.lua computes it
        self._take(
            slot,
            Prepared("ok", ends, receipt, [delivery], is_plain=True, is_alone=True, sleeping_until=NEVER),
            at,
        )

    def _take(self, slot: ConsumedSlot, reply: Prepared, at: float) -> None:
        """Pass delivered messages to executors."""
        topic, receipt, deliveries = slot.topic, reply.receipt, reply.deliveries
        # rule: takes_the_time_out_of_the_topic
        start = partial(self.router.start, is_suspect=reply.is_suspect, timeout=reply.timeout)
        self.handed_out(topic, deliveries, self.schedule.clock.ms())
        total = self.capacity.bytes.weigh(topic, deliveries)
        slot.sleeping_until = reply.sleeping_until
        slot.has_asked = False
        if topic.serial:
            # Bodies and failures belong to single messages, so their commit has to name these.
            # rule: commits_as_a_whole_what_is_not_alone
            if reply.is_alone and reply.is_plain:
                slot.sole_receipt = receipt
            start(slot, receipt, deliveries, at, total)
            self.schedule.set_due(slot, reply.next_due)
            return
        size = self.capacity.batch_size(topic)
        # In the event loop each call is a batch, so that all of them overlap.
        parts = (
            len(deliveries)
            if topic.name in self.capacity.async_capacity
            else self.capacity.threads
            if self.capacity.is_shared(topic)
            else 1
        )
        share = -(-len(deliveries) // (size * parts)) * size
        for first in range(0, len(deliveries), share):
            part = deliveries[first : first + share]
            start(slot, receipt, part, at, total * len(part) // len(deliveries))
        if slot.sleeping_until is None or self.schedule.asks_always:
            # Senders wake this worker only after a prepare that leaves nothing, and other threads are free.
            self.schedule.make_ready(slot)
        else:
            self.schedule.set_due(slot, reply.next_due)

    def _is_missing_pushes(self, slot: ConsumedSlot) -> bool:
        """Return whether what is in flight in a slot, as Redis says, is unknown to this worker."""
        is_quiet = slot.state is SlotState.ACQUIRED and not (slot.batches or slot.has_asked)
        is_pushed = slot.topic.name in self.capacity.pushed_topics
        return is_quiet and is_pushed and slot not in self.acks.unconfirmed()

    def _nothing(self, slot: ConsumedSlot, reply: Prepared) -> None:
        """Continue with a slot whose prepare returned no messages."""
        if reply.status == "more":
            slot.cursor = reply.cursor
            self.schedule.make_ready(slot)
        elif reply.status in ("busy", "paused"):
            self.schedule.pause(slot, reply.next_due, is_paused=reply.status == "paused")
        elif reply.status == "fenced":
            self.acquirer.fenced(slot)
            # Another worker has acquired the slot. It can take these messages at once instead of waiting for their time-out.
            self.router.give_back_slot(slot)  # rule: keeps_what_it_was_fenced_from
        elif reply.status == "moved":
            self._moved(slot, reply.slots)
        else:
            self.schedule.set_due(slot, reply.next_due)
            self._empty.append(slot)

    def put_to_sleep(self, settled: Iterable[ConsumedSlot]) -> None:
        """Let slots fall asleep in which nothing is left: as little as possible is kept in memory for each."""
        asleep = (slot for slot in settled if slot.sleeping_until is not None)
        # A slot that is queued keeps its record. With that of its next wake-up it would have two, and overlap with itself.
        at_rest = {
            slot
            for slot in chain(self._empty, asleep)
            if slot.is_at_rest and not self.schedule.is_queued(slot)  # rule: lets_queued_slots_sleep
        }
        self._empty.clear()
        for slot in at_rest - self.acks.unconfirmed() if at_rest else ():
            self.capacity.table.put_to_sleep(slot)

    def _moved(self, slot: ConsumedSlot, slots: int | None) -> None:
        if self.on_moved is not None and slots:
            # Its messages may be moving. It answers busy until they have moved.
            slot.topic = replace(slot.topic, slots=slots)
            self.on_moved(slot.topic.name)
            self.schedule.make_ready(slot)
            return
        # Without a callback nobody would load the new definition, so the worker settles its messages and ends.
        self.shutdown.moved = SlotMoved(
            f"topic {slot.topic.name} no longer has {slot.topic.slots} slots; restart the worker to "
            "load the current definition"
        )
        self.shutdown.begun = True
