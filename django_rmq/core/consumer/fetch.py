"""What a worker fetches next: one round trip settles what has ended and prepares due slots, and its answers are processed.

Slots of which nothing is known are polled; what has timed out in topics of nobody is ended.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import add
from typing import NamedTuple

from django_rmq.core.commands import ack, fetch, inspect
from django_rmq.core.commands.broker_interface import Broker, BrokerPipeline, run_all
from django_rmq.core.commands.script_call import Answer, Call
from django_rmq.core.consumer.acks import AckCall, AckQueue, Settlements, SlotErrors, concerns_all
from django_rmq.core.consumer.acquisition import SlotAcquirer
from django_rmq.core.consumer.batch import InFlight
from django_rmq.core.consumer.capacity import WORK_SECONDS, Capacity, MemoryBudget
from django_rmq.core.consumer.executor_pool import BatchRouter, ExecutorPool
from django_rmq.core.consumer.mailbox import ShutdownState
from django_rmq.core.consumer.slots import SlotSchedule, SlotState, SlotTable, uptime
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.core.model.replies import Delivery, Prepared
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble, SlotMoved

POLL_SECONDS = 1.0
"""Seconds between two slow polls: the delay after a foreign ZADD or a lost wake-up."""

HEADS = 1024
"""The number of slots asked for by one slow-poll script."""

POLLED = 4 * HEADS
"""The maximum number of slots asked by one slow poll. A worker with more of them asks for all within several
polls."""

Sleeping = tuple[int, SlotState | None]
"""A slot, and its object if it has one."""


class DuePoll:
    """The slow poll of one worker."""

    def __init__(
        self,
        broker: Broker,
        places: SlotTable,
        schedule: SlotSchedule,
        troubles: SlotErrors,
        acquiring: SlotAcquirer,
        poll_seconds: float,
    ) -> None:
        self.due = 0.0
        """Monotonic time of the next poll."""
        self._broker = broker
        self._places = places
        self._schedule = schedule
        self._troubles = troubles
        self._acquiring = acquiring
        self._poll_seconds = poll_seconds
        self._round: Iterator[tuple[str, int, SlotState | None]] | None = None
        """The slots that the slow poll has not yet asked in this round."""
        self._hurries = False
        """Whether wake-ups may have been lost; then the slow poll goes through all slots without a pause."""

    def hurry(self) -> None:
        """Ask all slots soon, because wake-ups may have been lost."""
        self.due, self._hurries, self._round = 0.0, True, None

    def poll(self) -> None:
        """Ask for the next due times of sleeping slots. Raises trouble that concerns the whole server."""
        before = time.monotonic()
        server = self._broker.now_ms()
        self._schedule.clock.note(before, server, time.monotonic())
        blocked = list(self._places.blocked)
        pipeline = self._broker.pipeline()
        asked = self._parts(server)
        answers = [
            pipeline.add(inspect.heads(self._places.topics[name], [slot for slot, _ in part]))
            for name, part in asked
        ]
        # Nothing is prepared in these until a listener returns, so nothing else would time out their
        # messages.
        expired = [pipeline.add(ack.expire(place.topic, place.slot)) for place in blocked]
        pipeline.execute()
        untaken: list[SlotState] = []
        trouble: ServerTrouble | None = None
        for (name, part), answer in zip(asked, answers, strict=True):
            heads = answer.result()
            if isinstance(heads, RmqError):
                self._troubles.complain("heads", "The slow poll failed: %s", heads)
                trouble = heads if isinstance(heads, ServerTrouble) and concerns_all(heads) else trouble
                continue
            untaken += self._wake(name, part, heads, server)
        for place, ended in zip(blocked, expired, strict=True):
            error = ended.result()
            if isinstance(error, RmqError):
                trouble = self._troubles.of(place, error) or trouble
        if untaken:
            for place in self._acquiring.fences.left_alone(untaken):
                self._acquiring.acquire_fenced(place)
        if trouble is not None:
            raise trouble
        self._hurries &= self._round is not None
        self.due = 0.0 if self._hurries else time.monotonic() + self._poll_seconds

    def _parts(self, server: float) -> list[tuple[str, list[Sleeping]]]:
        """Return the slots to ask, in groups of the size of one script."""
        by_topic: defaultdict[str, list[Sleeping]] = defaultdict(list)
        for name, slot, place in self._next(server):
            by_topic[name].append((slot, place))
        return [
            (name, found[start : start + HEADS])
            for name, found in by_topic.items()
            for start in range(0, len(found), HEADS)
        ]

    def _wake(
        self, name: str, part: list[Sleeping], heads: Sequence[float | None], server: float
    ) -> list[SlotState]:
        """Make those slots ready in which something is due earlier than known; return the fenced ones that are due."""
        untaken: list[SlotState] = []
        for (slot, known), due in zip(part, heads, strict=True):
            place = known
            if place is None:
                place = self._places.get(name, slot) if due is not None else None
            if place is None:
                continue
            if place.fenced_at:
                if due is not None and due <= server:
                    untaken.append(place)
                else:
                    place.untaken_since = None
            elif due is not None and due < place.due:
                # Even if that is later than now: prepare stores in Redis again until when this worker sleeps.
                self._schedule.ready(place)
        return untaken

    def _next(self, server: float) -> list[tuple[str, int, SlotState | None]]:
        """Return the next sleeping slots; all of them come in turn."""
        if self._round is None or len(self._places) <= POLLED:
            self._round = self._places.round()
        sleeping = (
            (topic, slot, place)
            for topic, slot, place in self._round
            if place is None
            or (place.blocked_by is None and (place.fenced_at or (place.acquired and place.due > server)))
        )
        found = list(islice(sleeping, POLLED))
        if len(found) < POLLED or len(self._places) <= POLLED:
            self._round = None
        return found


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


class RoundTrip(NamedTuple):
    """A round trip that is under way."""

    pipeline: BrokerPipeline
    told: Settlements
    """The settlements that it sends; they are sent again if its answer is lost."""
    parts: list[AckCall]
    """The calls that send them."""
    asked: FetchPlan
    at: float
    """``uptime`` when it was sent."""


class RoundTrips:
    """Makes the round trips of one worker."""

    def __init__(
        self,
        broker: Broker,
        settling: AckQueue,
        asking: FetchPlanner,
        answering: FetchReplies,
        granted: MemoryBudget,
    ) -> None:
        self.under_way: RoundTrip | None = None
        """The trip that Redis works on while the answer to the previous one is read, and the next one packed."""
        self._broker = broker
        self._settling = settling
        self._asking = asking
        self._answering = answering
        self._granted = granted

    def make(self) -> bool:
        """Make a round trip if there is anything to send or to ask; return whether there was."""
        sent = self.send()
        trip, self.under_way = self.under_way, sent
        if trip is None:
            if sent is None:
                return self._asking.ask_limits()
            if self._asking.has_more:
                return True
            trip, self.under_way = sent, None
        self.receive(trip)
        # Not earlier: a message that has ended is in flight for all others until Redis has received that.
        self._asking.ask_limits()
        return True

    def send(self, *, takes: bool = True) -> RoundTrip | None:
        """Send what is to be settled and, if it ``takes``, what is asked. None: nothing."""
        pipeline = self._broker.pipeline()
        told, parts = self._settling.queue(pipeline)
        coming, told_before = (self.under_way.asked, self.under_way.told) if self.under_way else (None, ())
        # This trip may overtake the one under way, and a strict slot would answer that it is busy.
        held = {place for place, _ in told_before if place.topic.is_strict}  # rule: asks_beside_a_commit
        asked = self._asking.queue(pipeline, coming, held) if takes else self._asking.nothing()
        if not len(pipeline):
            return None
        trip = RoundTrip(pipeline, told, parts, asked, uptime())
        for place in asked.places:
            place.asked = True
        try:
            pipeline.send()
        except ServerTrouble:
            self.lost(trip)
            raise
        return trip

    def receive(self, trip: RoundTrip) -> None:
        """Wait for the answer to a trip, and process it. Raises trouble that concerns more than one slot."""
        try:
            trip.pipeline.receive()
        except ServerTrouble:
            self.lost(trip)
            raise
        self._granted.answered(trip.asked.bytes)
        trouble = self._settling.settled(trip.told, trip.parts)
        for place, answer in trip.asked.places.items():
            trouble = self._answering.prepared(place, answer.result(), trip.at) or trouble
        if trouble is not None:
            raise trouble

    def receive_rest(self) -> None:
        """Wait for the trip that is under way."""
        trip, self.under_way = self.under_way, None
        if trip is not None:
            self.receive(trip)

    def lost(self, trip: RoundTrip) -> None:
        """Send again what was sent, and ask what was handed out, because the answer to a trip was lost."""
        self._granted.answered(trip.asked.bytes)
        for place in trip.asked.places:
            self._answering.lost(place)
        self._settling.lost(trip.told)


class FetchReplies:
    """Continues with slots whose prepare was answered.

    ``handed_out`` is called for every prepare that returned messages, with the server's time in ms.
    ``on_moved`` is called if a slot was given another slot count; without it the worker ends.
    """

    def __init__(
        self,
        room: Capacity,
        schedule: SlotSchedule,
        settling: AckQueue,
        feeding: BatchRouter,
        acquiring: SlotAcquirer,
        ending: ShutdownState,
        handed_out: Callable[[Topic, Sequence[Delivery], float], None],
        on_moved: Callable[[str], None] | None,
    ) -> None:
        self._room = room
        self._places = room.places
        self._schedule = schedule
        self._settling = settling
        self._feeding = feeding
        self._acquiring = acquiring
        self._ending = ending
        self._handed_out = handed_out
        self._on_moved = on_moved

    def lost(self, place: SlotState) -> None:
        """Record that the answer for a slot was lost."""
        place.asked = place.again = place.recalled = False
        self._acquiring.doubt(place)
        self._places.forget(place)

    def prepared(self, place: SlotState, reply: Prepared | RmqError, at: float) -> ServerTrouble | None:
        """Process the answer of a prepare; return trouble that concerns more than this slot."""
        recalled = place.recalled or not place.owned
        place.asked = place.recalled = False
        trouble = None
        if isinstance(reply, RmqError):
            trouble = self._acquiring.failed(place, reply)
        else:
            place.shut_until, place.away = 0.0, False
            has_more = reply.next_due is not None and reply.next_due <= self._schedule.clock.ms()
            self._room.answered(place, len(reply.deliveries), has_more=has_more)
            if reply.status != "ok":
                self._nothing(place, reply)
            elif recalled:
                members = [delivery.member for delivery in reply.deliveries]
                self._settling.release(place, reply.receipt, members)
                self._schedule.ready(place)
            else:
                self._take(place, reply, at)
        if place.again:
            place.again = False
            self._schedule.ready(place)
        self._places.forget(place)
        return trouble

    def _take(self, place: SlotState, reply: Prepared, at: float) -> None:
        """Process messages that were handed out."""
        topic, receipt, deliveries = place.topic, reply.receipt, reply.deliveries
        # rule: takes_the_time_out_of_the_topic
        start = partial(
            self._feeding.start, is_suspect=reply.is_suspect, is_plain=reply.is_plain, timeout=reply.timeout
        )
        self._handed_out(topic, deliveries, self._schedule.clock.ms())
        total = self._room.bytes.weigh(topic, deliveries)
        if topic.serial:
            start(place, receipt, deliveries, at, total)
            self._schedule.look_at(place, reply.next_due)
            return
        size = self._room.batch_size(topic)
        # In the event loop each call is a batch, so that all of them overlap.
        parts = (
            len(deliveries) if topic.name in self._room.overlap else 1 if topic.flow else self._room.threads
        )
        share = -(-len(deliveries) // (size * parts)) * size
        for first in range(0, len(deliveries), share):
            part = deliveries[first : first + share]
            start(place, receipt, part, at, total * len(part) // len(deliveries))
        # Senders wake this worker only after a prepare that finds nothing, and other threads are free.
        self._schedule.ready(place)

    def _nothing(self, place: SlotState, reply: Prepared) -> None:
        """Continue with a slot that handed out nothing."""
        if reply.status == "more":
            place.cursor = reply.cursor
            self._schedule.ready(place)
        elif reply.status in ("busy", "paused"):
            self._schedule.pause(place, reply.next_due, is_paused=reply.status == "paused")
        elif reply.status == "fenced":
            self._acquiring.fenced(place)
            self._feeding.give_back_slot(place)  # rule: keeps_what_it_was_fenced_from
        elif reply.status == "moved":
            self._moved(place, reply.slots)
        else:
            self._schedule.look_at(place, reply.next_due)
            # Keep as little as possible in memory for an empty slot.
            if place.is_at_rest and not self._settling.concerns(place):
                self._places.lull(place)

    def _moved(self, place: SlotState, slots: int | None) -> None:
        if self._on_moved is not None and slots:
            # Its messages may be moving. It answers busy until they have moved.
            place.topic = replace(place.topic, slots=slots)
            self._on_moved(place.topic.name)
            self._schedule.ready(place)
            return
        self._ending.moved = SlotMoved(
            f"topic {place.topic.name} no longer has {place.topic.slots} slots; restart the worker to "
            "load the current definition"
        )
        self._ending.begun = True


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
