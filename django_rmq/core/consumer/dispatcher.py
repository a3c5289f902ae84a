"""The dispatcher: one thread that moves messages between Redis and the executor threads.

It keeps a heap of owned slots by the time something in them is due. Each turn of its loop is one round
trip: what listeners finished is committed or rolled back, and slots that are due are prepared, in one
pipeline. When nothing is due it sleeps until the next due time, a wake-up, a report of a thread, or the
slow poll; that is one ``heads`` per 1,024 slots and second, and at most four.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice
from operator import add, sub
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from uuid import uuid4

from django_rmq.core.consumer.crew import Crew
from django_rmq.core.consumer.executor import (
    NO_HOOKS,
    Batch,
    Exited,
    Hooks,
    ListenerLike,
    Slice,
    Watcher,
    uptime,
)
from django_rmq.core.consumer.fences import LOOK_SECONDS, Fences
from django_rmq.core.consumer.heartbeat import Heartbeat
from django_rmq.core.consumer.lanes import Lanes
from django_rmq.core.consumer.limits import Limits
from django_rmq.core.consumer.listening import Listening
from django_rmq.core.consumer.lookout import Lookout, Watched
from django_rmq.core.consumer.notes import Notes
from django_rmq.core.consumer.places import Place, Places
from django_rmq.core.consumer.sizes import BytesInHand
from django_rmq.core.consumer.suspects import Suspects
from django_rmq.core.logs.complaints import Complaints
from django_rmq.core.logs.safe import safe_logger
from django_rmq.core.redis.broker import Broker
from django_rmq.core.words.messages import BATCH, Delivery, Failure, Held, Message, Prepared, Topic
from django_rmq.exceptions import (
    LostRace,
    NodeUnavailable,
    RmqError,
    ServerRefused,
    ServerTrouble,
    SlotMoved,
    Unreadable,
)

logger = safe_logger("django_rmq.consumer")

POLL_SECONDS = 1.0
"""The slow poll: the lateness of a foreign ZADD and of a lost wake-up."""

WORK_SECONDS = 0.05
"""How much work one prepare shall hand out, by what a topic's listener took of late."""

QUICK_SECONDS = 0.005
"""A priority slot whose messages take longer has one batch in hand, not a second one behind it."""

REFRESH_SECONDS = 1.0
"""What waits longer for its thread is given back and taken anew, where that may find something better."""

REFRESHED = 128
"""Batches refreshed at once at most."""

REST_SECONDS = 5.0
"""How long a slot is left alone whose keys Redis refuses to touch."""

NODE_REST_SECONDS = 0.25
"""How long a slot is left alone whose node of a Redis Cluster does not answer; the others go on."""

RENEWAL_SECONDS = 5.0
"""Between two new subscriptions while nodes do not answer."""

UNCERTAIN_SECONDS = 5.0
"""How long a stopping worker waits for Redis only to give back what a lost reply may have handed out."""

IN_HAND = 20_000
"""Messages in hand of one process at most."""

HEADS = 1024
"""Slots asked for by one slow-poll script."""

SWEEP_SECONDS = 10.0
"""Between two looks for what has timed out in topics that this worker does not serve."""

ENDING_MS = 100
"""What keeps a slot busy until so short a time ago is asked for again at once: clocks are read in milliseconds."""

SETTLING_SECONDS = 0.05
"""Between two questions of a burst worker whether its slots are its own for good."""

POLLED = 4 * HEADS
"""Slots asked by one slow poll: a worker with more of them asks for all within several polls."""

ACQUIRED = 2048
"""Slots acquired between two looks at everything else at most."""

TURN = 512
"""Slots prepared in one round trip at most."""

TURN_MESSAGES = 1_500
"""Messages that one round trip is expected to bring: while it lasts, the threads work on what the last one brought."""


class Pace:
    """What a topic's listener takes per message, smoothed."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.002

    def note(self, seconds: float, messages: int) -> None:
        sample = seconds / messages
        weight = 0.5 if sample > self.seconds else 0.2
        self.seconds += (sample - self.seconds) * weight


class ServerClock:
    """Redis' clock as seen from here: each look bounds the difference, and looks that agree narrow it."""

    def __init__(self) -> None:
        self._low = self._high = 0.0

    def note(self, before: float, server_ms: int, after: float) -> None:
        """Note what TIME answered (cut to ms) between two instants of ``time.monotonic``."""
        low, high = server_ms - after * 1000, server_ms + 1 - before * 1000
        self._low, self._high = max(self._low, low), min(self._high, high)
        if self._low > self._high:
            # The first look, or one of the clocks was set or has drifted since.
            self._low, self._high = low, high

    def ms(self) -> float:
        return time.monotonic() * 1000 + (self._low + self._high) / 2


class _Own(NamedTuple):
    slots: Mapping[str, array[int]]


class _Disown(NamedTuple):
    slots: list[tuple[str, int]]


class _Wake(NamedTuple):
    topic: str
    slot: int


class _Resubscribed(NamedTuple):
    pass


class _Overrun(NamedTuple):
    batch: Batch


class _Stop(NamedTuple):
    pass


class _Settlement:
    """What is still to be told to Redis of one delivery of one slot."""

    __slots__ = ("committed", "failures", "messages", "released", "repeated")

    def __init__(self) -> None:
        self.committed: list[bytes] = []
        self.failures: list[Failure] = []
        self.released: list[bytes] = []
        self.repeated = False
        """It has been told before, and the answer was lost."""
        self.messages: dict[bytes, Message] = {}
        """Those of ``committed`` and ``failures``, where somebody watches."""


_Settling = tuple[Place, int, str, list[Any], bool]


class _Trip(NamedTuple):
    """A round trip that is under way."""

    pipeline: Any
    told: dict[tuple[Place, int], _Settlement]
    """What it tells; told again if its answer is lost."""
    settling: list[_Settling]
    asked: list[Place]
    at: float
    """``uptime`` when it was sent."""
    room: int
    """Messages that it brings at most."""
    granted: int
    """Bytes that it brings at most."""
    load: list[float]
    """Seconds of work that it is reckoned to bring for each thread."""


class Dispatcher:
    """One worker: owned slots, T executor threads, a heartbeat, and the loop that feeds them.

    ``listeners`` maps topic names to listeners. ``own`` and ``disown`` say which slots are ours; they
    may be called before ``run`` or from another thread. ``run`` returns when ``stop`` was called and
    all is settled, or, with ``burst``, when nothing can be taken any more. Where a slot was given another slot
    count, ``on_moved`` hears of it with the topic's name (often, and from the loop: it must be quick) and the slot is
    worked on. Without it, ``run`` raises ``SlotMoved`` after it has settled what was in hand.

    ``settled`` says whether all slots that shall be ours have been told: before that no burst ends.
    ``confirmed`` is for ``Fences``: it says as of when the slots that were told are known to be ours.
    ``swept`` are topics that it does not serve, and perhaps nobody does: it only ends what times out there.
    ``leaving`` is called once, when nothing more will be taken: others may have our slots. ``notes`` is
    where threads note what they run, for whoever comes after a sudden death. ``handed_out`` is told of every
    prepare that brought something, with the server's time in ms, ``took`` of calls of a listener, with how many seconds
    each took. ``watcher`` is told what became of messages.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Iterable[Topic],
        listeners: Mapping[str, ListenerLike],
        *,
        threads: int = 4,
        hooks: Hooks = NO_HOOKS,
        burst: bool = False,
        shutdown_timeout: float = 30.0,
        poll_seconds: float = POLL_SECONDS,
        max_messages: int | None = None,
        max_idle_time: float | None = None,
        beat: Callable[[], None] = lambda: None,
        settled: Callable[[], bool] = lambda: True,
        confirmed: Callable[[], float] = lambda: float("-inf"),
        leaving: Callable[[], None] = lambda: None,
        on_moved: Callable[[str], None] | None = None,
        swept: Iterable[Topic] = (),
        notes: Notes | None = None,
        handed_out: Callable[[Topic, Sequence[Delivery], float], None] = lambda topic, deliveries, now_ms: (
            None
        ),
        took: Callable[[Topic, Sequence[float]], None] = lambda topic, seconds: None,
        watcher: Watcher | None = None,
    ) -> None:
        self.owner = uuid4().hex
        self.broker = broker
        self.topics = {topic.name: topic for topic in topics}
        self.listeners = dict(listeners)
        self.processed = 0
        """Deliveries committed or rolled back so far."""
        self.forced = False
        """The shutdown time-out ended a listener's chance to finish, or something could not be settled."""
        self.exit_asked = False
        """A listener raised SystemExit or KeyboardInterrupt."""
        self._hooks = hooks
        self._burst = burst
        self._shutdown_timeout = shutdown_timeout
        self._poll_seconds = poll_seconds
        self._max_messages = max_messages
        self._max_idle_time = max_idle_time
        self._last_work = time.monotonic()
        self._beat = beat
        self._settled_ownership = settled
        self._leaving = leaving
        self._on_moved = on_moved
        self._swept = list(swept)
        self._next_sweep = 0.0
        self._notes = notes
        self._handed_out = handed_out
        self._took = took
        self._watcher = watcher
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._listening = Watched(self._new_listening)
        self._heartbeat = Watched(self._new_heartbeat)
        self._places = Places(self.topics, max(1, threads))
        self._unacquired: dict[Place, None] = {}
        """To be acquired again, or asked what a lost reply handed out."""
        self._heap: list[tuple[float, int, Place]] = []
        self._entries = count(1)
        self._waiting: dict[Place, None] = {}
        """Due, and to be prepared as soon as their thread has room."""
        self._lanes = Lanes(self.topics.values(), max(1, threads))
        self._limits = Limits(broker, self.owner, self.topics.values(), self._capacity)
        self._parked: defaultdict[str, dict[Place, None]] = defaultdict(dict)
        """Topic -> its slots that are due and wait until its limits leave room."""
        self._crew = Crew(max(1, threads), self._inbox, hooks, notes)
        self._threads = self._crew.threads
        self._load = [0.0] * len(self._threads)
        """Seconds of work in hand of each thread, as reckoned."""
        self._batches: dict[int, Batch] = {}
        self._in_hand = 0
        self._bytes = BytesInHand(self.topics.values())
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)
        self._settlements: defaultdict[tuple[Place, int], _Settlement] = defaultdict(_Settlement)
        self._trip: _Trip | None = None
        """What Redis works on while the answer to the trip before it is read, and the next one packed."""
        self._clock = ServerClock()
        self._stopping = False
        self._moved: SlotMoved | None = None
        self._next_poll = 0.0
        self._round: Iterator[tuple[str, int, Place | None]] | None = None
        """The slots that the slow poll has not asked yet since it began anew."""
        self._hurries = False
        """Wake-ups may have been lost: the slow poll goes through all slots without a pause."""
        self._blocked: set[Place] = set()
        self._suspects = Suspects()
        self._fences = Fences(broker, self.owner, confirmed)
        self._next_look = 0.0
        self._has_priorities = any(topic.is_priority for topic in self.topics.values())
        self._refreshes = any(topic.is_priority or not topic.serial for topic in self.topics.values())
        self._next_refresh = 0.0
        self._complain = Complaints(logger)
        self._next_renewal = 0.0
        self.lookout = Lookout()
        """Looks after our threads, and those that are added to it."""
        for i in range(len(self._threads)):
            self.lookout.add(f"executor {i}", partial(self._crew.is_manned, i), partial(self._relieve, i))
        self.lookout.add("heartbeat", self._heartbeat.is_alive, self._heartbeat.replace)
        self.lookout.add("wake-up", self._listening.is_alive, self._listening.replace)

    # --- ownership

    def own(self, slots: Iterable[tuple[str, int]]) -> None:
        """Add slots to those that are ours."""
        by_topic: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        for topic, slot in slots:
            by_topic[topic].append(slot)
        self._inbox.put(_Own(by_topic))

    def disown(self, slots: Iterable[tuple[str, int]]) -> None:
        """Take no more from these slots; what has not begun is given back."""
        self._inbox.put(_Disown(list(slots)))

    def stop(self) -> None:
        """Take nothing more, let listeners finish, give the rest back. Safe in signal handlers."""
        self._inbox.put(_Stop())

    def _own(self, topic: str, slots: array[int]) -> None:
        for place in self._places.tell(topic, slots):
            if not place.owned:
                place.owned, place.acquired = True, False
                place.due = place.not_before = place.shut_until = 0.0
                place.away = False
                self._unacquired[place] = None

    def _disown(self, place: Place) -> None:
        place.owned = place.acquired = False
        self._fences.remove(place)
        place.entry = 0
        self._waiting.pop(place, None)
        self._parked[place.topic.name].pop(place, None)
        if not place.uncertain:
            self._unacquired.pop(place, None)
        self._give_back_slot(place)
        self._forget(place)

    def _forget(self, place: Place) -> None:
        """Drop a slot that is no longer ours once nothing of it is in hand: its thread is its own till then."""
        if not (place.owned or place.batches or place.uncertain or place.asked):
            self._places.drop(place)

    # --- the loop

    def run(self) -> None:
        """Work until stopped."""
        for thread in self._threads:
            thread.start()
        self._heartbeat.thread.start()
        self._listening.thread.start()
        trouble: Exception | None = None
        try:
            self._listening.thread.subscribed.wait(5.0)
            try:
                self._work()
            except Exception as error:
                logger.exception("The dispatcher failed: it gives back what it can")
                trouble = error
            self._shut_down()
        finally:
            helpers = (self._heartbeat.thread, self._listening.thread)
            for helper in helpers:
                helper.stop()
            for batch in self._batches.values():
                batch.halted = batch.dropped = True
            for thread in self._threads:
                thread.stop()
            idle = [thread for thread in self._threads if not thread.current]
            for ending in (*helpers, *idle):
                ending.join(2.0)
        if trouble is not None:
            raise trouble
        if self._moved is not None:
            raise self._moved

    def _work(self) -> None:
        trouble = 0
        self._read_inbox(0.0)
        while not self._stopping and (self._max_messages is None or self.processed < self._max_messages):
            self._look()
            self._beat()
            try:
                busy = self._turn()
                if trouble:
                    logger.info("Redis answers again")
                trouble = 0
            except ServerTrouble as error:
                trouble += 1
                self._complain("redis", "Redis is away (%s); trying again", error)
                # What broke our connection may have broken the subscription unnoticed.
                self._listening.thread.renew()
                self._pause(min(1.0, 0.02 * 2 ** min(trouble, 6)))
                continue
            if busy:
                self._read_inbox(0.0)
                continue
            if self._is_idle() and ((self._burst and self._burst_is_over()) or self._idle_too_long()):
                return
            self._read_inbox(self._sleep_seconds())

    def _is_idle(self) -> bool:
        """Whether nothing is in hand, but for what Redis refuses to settle."""
        return not self._in_hand and all(
            place.shut_until and not place.away for place, _ in self._settlements
        )

    def _idle_too_long(self) -> bool:
        if self._max_idle_time is None or any(self._parked.values()):
            return False
        return time.monotonic() - self._last_work >= self._max_idle_time

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._stopping:
            self._read_inbox(left)

    def _turn(self) -> bool:
        """Do one round trip if there is anything to do; return whether there was."""
        self._collect_due()
        if self._fences:
            self._return_to_fenced()
        acquires = self._acquire()
        now = time.monotonic()
        if now >= self._next_poll:
            self._poll()
        if self._swept and now >= self._next_sweep:
            self._sweep()
        if self._refreshes and now >= self._next_refresh:
            self._next_refresh = now + REFRESH_SECONDS
            self._refresh()
        sent = self._send()
        trip, self._trip = self._trip, sent
        if trip is None:
            if sent is None:
                return self._ask_limits() or acquires
            if self._waiting and not (self._limits or self._lanes):
                return True
            trip, self._trip = sent, None
        self._receive(trip)
        # Not before: what has ended is in flight for all others until Redis has heard of it.
        self._ask_limits()
        return True

    def _send(self, *, takes: bool = True) -> _Trip | None:
        """Send what is to be told and, if it ``takes``, asked; None: nothing."""
        pipeline = self.broker.pipeline()
        told, settling = self._queue_settlements(pipeline)
        asked, room, granted, load = self._queue_prepares(pipeline) if takes else ([], 0, 0, [])
        if not len(pipeline):
            return None
        trip = _Trip(pipeline, told, settling, asked, uptime(), room, granted, load)
        for place in asked:
            place.asked = True
        try:
            pipeline.send()
        except ServerTrouble:
            self._lost(trip)
            raise
        return trip

    def _receive(self, trip: _Trip) -> None:
        try:
            replies = trip.pipeline.receive()
        except ServerTrouble:
            self._lost(trip)
            raise
        self._bytes.answered(trip.granted)
        trouble = self._settled(trip, replies)
        for place, reply in zip(trip.asked, replies[len(trip.settling) :], strict=True):
            trouble = self._prepared(place, reply, trip.at) or trouble
        if trouble is not None:
            raise trouble

    def _receive_rest(self) -> None:
        """Wait for the trip that is under way."""
        trip, self._trip = self._trip, None
        if trip is not None:
            self._receive(trip)

    def _lost(self, trip: _Trip) -> None:
        """Tell again what was told, and ask what was handed out: the answer to a trip was lost."""
        self._bytes.answered(trip.granted)
        for place in trip.asked:
            place.asked = place.again = place.recalled = False
            self._doubt(place)
            self._forget(place)
        for key, settlement in trip.told.items():
            kept = self._settlements[key]
            kept.committed += settlement.committed
            kept.failures += settlement.failures
            kept.released += settlement.released
            kept.messages |= settlement.messages
            kept.repeated = True

    def _sleep_seconds(self) -> float:
        now = time.monotonic()
        wake = min(self._next_poll, self.lookout.due)
        if self._max_idle_time is not None and not self._in_hand:
            wake = min(wake, self._last_work + self._max_idle_time)
        while self._heap and self._heap[0][1] != self._heap[0][2].entry:
            heapq.heappop(self._heap)
        wake = min(wake, self._limits.due())
        if self._heap:
            wake = min(wake, now + (self._heap[0][0] - self._clock.ms()) / 1000)
        if self._refreshes and self._in_hand:
            wake = min(wake, self._next_refresh)
        if self._burst and not self._in_hand:
            wake = min(wake, now + SETTLING_SECONDS)
        if self._unacquired:
            wake = min(wake, now + NODE_REST_SECONDS)
        if self._fences:
            wake = min(wake, self._next_look)
        return max(0.0, wake - now)

    def _burst_is_over(self) -> bool:
        if not self._settled_ownership():
            return False
        # What was told until then may not have been read yet.
        self._read_inbox(0.0)
        return self._is_idle() and self._drained()

    def _drained(self) -> bool:
        now = self._clock.ms()
        return not self._places.is_told_more and all(
            place.due > now or place.blocked_by or place.fenced_at or not place.owned
            for place in self._places.awake.values()
        )

    # --- what others tell us

    def _read_inbox(self, timeout: float) -> None:
        try:
            item = self._inbox.get(timeout=timeout) if timeout > 0 else self._inbox.get_nowait()
            while True:
                self._note(item)
                item = self._inbox.get_nowait()
        except Empty:
            pass

    def _note(self, item: Any) -> None:
        if isinstance(item, Slice):
            self._finished(item)
        elif isinstance(item, _Wake):
            if item.slot < 0:
                # It was paused: nothing more of what is in hand begins.
                self._give_back_slot_at(item.topic, -1 - item.slot)
            elif (place := self._places.get(item.topic, item.slot)) is not None:
                place.not_before = 0.0
                self._ready(place)
        elif isinstance(item, _Own):
            # Who is about to leave takes over nothing: it would only fence the one who does.
            for topic, slots in () if self._stopping else item.slots.items():
                self._own(topic, slots)
        elif isinstance(item, _Disown):
            for topic, slot in item.slots:
                if (place := self._places.lose(topic, slot)) is not None:
                    self._disown(place)
        elif isinstance(item, _Resubscribed):
            # Wake-ups were missed until now: whoever rests until one is asked at once.
            self._next_poll, self._hurries, self._round = 0.0, True, None
            for place in self._places.awake.values():
                place.not_before = 0.0
            if self._on_moved is not None:
                for name in self.topics:
                    self._on_moved(name)
        elif isinstance(item, _Overrun):
            self._overran(item.batch)
        elif isinstance(item, Exited):
            logger.error("A listener of topic %s asked the process to exit", item.batch.topic.name)
            self.exit_asked = self._stopping = True
        elif isinstance(item, _Stop):
            if not self._stopping:
                logger.info("Stopping: running listeners may end, what has not begun is given back")
            self._stopping = True

    def _finished(self, report: Slice) -> None:
        batch = report.batch
        place: Place = batch.place
        released = report.released
        if released and (batch.cut or batch.stale):
            released = [m for m in released if m not in batch.cut and m not in batch.stale]
        if report.committed or report.failures or released:
            settlement = self._settlements[place, batch.receipt]
            settlement.committed += report.committed
            settlement.failures += report.failures
            settlement.released += released
            if self._watcher is not None and self._watcher.wants():
                settlement.messages.update((each.delivery.member, each) for each in batch.messages)
        done = len(report.committed) + len(report.failures)
        if report.times:
            self._took(place.topic, report.times)
        if done:
            self._last_work = time.monotonic()
            self._lanes.reported(place.topic.name, report.seconds, done, self._last_work)
            self._paces[place.topic.name].note(report.seconds, done)
        if report.last and self._batches.pop(id(batch), None) is not None:
            place.batches -= 1
            self._in_hand -= len(batch.messages)
            self._bytes.held -= batch.size
            self._limits.ended(place.topic.name, len(batch.messages), time.monotonic())
            self._lanes.ended(id(batch), time.monotonic())
            if batch.thread is not None:
                self._load[batch.thread.index] -= batch.cost
            if place.blocked_by is batch:
                place.blocked_by = None
                self._blocked.discard(place)
            self._cleared(batch)
            if released and place.topic.is_priority:
                # It took longer than reckoned: what is queued behind it was taken too early as well.
                self._give_back_slot(place, drops=False)
            # In the same round trip that settles it: a prepare that finds nothing says so to the senders.
            self._ready(place)
            self._forget(place)

    # --- when a slot is asked

    def _ready(self, place: Place) -> None:
        """Prepare ``place`` as soon as may be.

        Left out is what will be ready again by itself: when it is acquired, when a batch ends.
        """
        place.due = 0.0
        place.entry = 0
        if place.asked:
            place.again = True
            return
        if not (place.owned and place.acquired) or place.blocked_by or place.batches >= self._depth(place):
            return
        rest = max(place.not_before, place.shut_until)
        if rest and rest > (now := time.monotonic()):
            self._waiting.pop(place, None)
            self._schedule(place, self._clock.ms() + (rest - now) * 1000)
        else:
            self._waiting[place] = None

    def _schedule(self, place: Place, due: float | None) -> None:
        """Look at ``place`` when the server's clock shows ``due`` (None: nothing waits)."""
        if due is None or not place.owned:
            place.due, place.entry = float("inf"), 0
            return
        place.due, place.entry = due, next(self._entries)
        heapq.heappush(self._heap, (due, place.entry, place))
        if len(self._heap) > 2 * len(self._places.awake) + 64:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].entry]
            heapq.heapify(self._heap)

    def _collect_due(self) -> None:
        """Make those places ready whose time has come."""
        now = self._clock.ms()
        while self._heap and self._heap[0][0] <= now:
            _, entry, place = heapq.heappop(self._heap)
            if entry == place.entry:
                self._ready(place)

    # --- asking

    def _depth(self, place: Place) -> int:
        """How many batches of a slot may be in hand: one runs, the next is ready."""
        if not place.topic.serial:
            return 2 * len(self._threads)
        if self._lanes and not place.topic.flow and self._lanes.is_lane(place.thread, time.monotonic()):
            return 1  # so that it gets to another thread
        # Where permits are few, none lies idle behind one that runs.
        has_one = place.topic.is_priority or place.topic.max_in_flight or place.topic.flow
        return 1 if has_one and self._paces[place.topic.name].seconds > QUICK_SECONDS else 2

    def _thread_for(self, place: Place, load: list[float]) -> int:
        if self._lanes and not (place.topic.serial and place.batches):
            thread = self._lanes.choose(place.topic.name, place.thread, load, time.monotonic())
            if place.topic.serial and thread != place.thread:
                self._places.slots_of_thread[place.thread] -= 1
                self._places.slots_of_thread[thread] += 1
                place.thread = thread
            return thread
        return place.thread if place.topic.serial else min(range(len(load)), key=load.__getitem__)

    def _limit(self, topic: Topic) -> int:
        size = self.listeners[topic.name].batch_size or 1
        wanted = WORK_SECONDS / max(self._paces[topic.name].seconds, 1e-7)
        limit = max(size, min(int(wanted), max(topic.prefetch, size)))
        return max(1, min(limit - limit % size if limit > size else limit, BATCH))

    def _capacity(self, topic: Topic) -> int:
        """How many messages of a topic all threads together can have in hand."""
        flow = self._lanes.flows.get(topic.name)
        return (flow.limit if flow else len(self._threads)) * self._limit(topic)

    def _lane_room(self, topic: str) -> int:
        """How many batches of a topic its lanes can take."""
        return self._lanes.room(topic, 2 if self._paces[topic].seconds <= QUICK_SECONDS else 1)

    def _ask_limits(self) -> bool:
        """Ask for room where slots wait for it; return whether some of them have got any."""
        if not (self._limits or self._lanes):
            return False

        def complain(name: str, error: RmqError) -> None:
            self._complain(f"{name}/limits", f"Cannot ask for the limits of topic {name}: %s", error)

        self._limits.ask(
            time.monotonic(), lambda name: len(self._parked[name]), complain, unsettled=self._unsettled
        )
        found = False
        for name, parked in self._parked.items():
            room = min(self._limits.room(name), self._lane_room(name)) if parked else 0
            for place in list(islice(parked, max(0, room))):
                del parked[place]
                self._ready(place)
                found = True
        return found

    def _unsettled(self, topic: str) -> int:
        """How many messages of a topic have ended without Redis having heard of it."""
        return sum(
            len(settlement.committed) + len(settlement.failures) + len(settlement.released)
            for (place, _), settlement in self._settlements.items()
            if place.topic.name == topic
        )

    def _queue_prepares(self, pipeline: Any) -> tuple[list[Place], int, int, list[float]]:
        """Ask slots; return which, how many messages and bytes they may bring, and the work of each thread in that."""
        asked: list[Place] = []
        parked: list[Place] = []
        promised: defaultdict[str, int] = defaultdict(int)
        taking: defaultdict[str, int] = defaultdict(int)
        coming = self._trip
        held = self._load if coming is None else list(map(add, self._load, coming.load))
        load = held.copy()
        room, expected = IN_HAND - self._in_hand - (0 if coming is None else coming.room), 0
        before, granted = room, 0
        for place in self._waiting:
            topic = place.topic
            if topic.flow and self._lane_room(topic.name) <= taking[topic.name]:
                parked.append(place)
                continue
            thread = self._thread_for(place, load)
            # A thread takes the highest head among its priority slots, so each of these has a batch ready.
            if load[thread] > 2 * WORK_SECONDS and not (topic.is_priority or topic.flow):
                if not self._has_priorities and min(load) > 2 * WORK_SECONDS:
                    break
                continue
            if room <= 0:
                break
            limit = min(self._limit(topic), room)
            if self._limits:
                allowed = self._limits.room(topic.name) - promised[topic.name]
                if allowed <= 0:
                    parked.append(place)
                    continue
                limit = min(limit, -(-allowed // len(self._threads)))
            size = self._bytes.grant(topic, limit)
            if not size:
                break
            granted += size
            promised[topic.name] += limit
            pipeline.prepare(topic, place.slot, self.owner, place.epoch, limit, size, after=place.cursor)
            place.cursor = None
            asked.append(place)
            taking[topic.name] += 1
            # What a slot will hand out is not known; half the limit keeps many slots from flooding one thread.
            load[thread] += limit / 2 * self._paces[topic.name].seconds
            room -= limit
            expected += min(limit, 2 * place.yielded + 16)
            if len(asked) >= TURN or expected >= TURN_MESSAGES:
                break
        for place in asked:
            del self._waiting[place]
        for place in parked:
            del self._waiting[place]
            self._parked[place.topic.name][place] = None
        return asked, before - room, granted, list(map(sub, load, held))

    def _prepared(self, place: Place, reply: Prepared | RmqError, at: float) -> ServerTrouble | None:
        """Go on with what prepare answered; return trouble that concerns more than this slot."""
        recalled = place.recalled or not place.owned
        place.asked = place.recalled = False
        trouble = self._answered(place, reply, at, recalled=recalled)
        if place.again:
            place.again = False
            self._ready(place)
        self._forget(place)
        return trouble

    def _answered(
        self, place: Place, reply: Prepared | RmqError, at: float, *, recalled: bool
    ) -> ServerTrouble | None:
        if isinstance(reply, RmqError):
            trouble = self._trouble_of(place, reply)
            if trouble is not None or isinstance(reply, (NodeUnavailable, Unreadable)):
                self._doubt(place)
            return trouble
        place.shut_until, place.away = 0.0, False
        place.yielded = len(reply.deliveries)
        if reply.status == "ok" and recalled:
            members = [delivery.member for delivery in reply.deliveries]
            self._settlements[place, reply.receipt].released += members
            self._ready(place)
        elif reply.status == "ok":
            self._handed_out(place.topic, reply.deliveries, self._clock.ms())
            messages = [
                Message(place.topic, place.slot, reply.receipt, delivery, self._extend)
                for delivery in reply.deliveries
            ]
            total = self._bytes.weigh(place.topic, reply.deliveries)
            if place.topic.serial:
                self._start(place, reply.receipt, messages, at, total, is_suspect=reply.is_suspect)
                self._schedule(place, reply.next_due)
            else:
                size = self.listeners[place.topic.name].batch_size or 1
                parts = 1 if place.topic.flow else len(self._threads)
                share = -(-len(messages) // (size * parts)) * size
                for start in range(0, len(messages), share):
                    part = messages[start : start + share]
                    weight = total * len(part) // len(messages)
                    self._start(place, reply.receipt, part, at, weight, is_suspect=reply.is_suspect)
                # Only a prepare that finds nothing makes senders wake us, and other threads are free.
                self._ready(place)
        elif reply.status == "more":
            place.cursor = reply.cursor
            self._ready(place)
        elif reply.status in ("busy", "paused"):
            # A wake-up tells when it is over, or a time-out; should they be lost, the slow poll asks again.
            if reply.status == "paused":
                place.not_before = time.monotonic() + 10 * self._poll_seconds
            elif reply.next_due is None or reply.next_due <= (now := self._clock.ms()):
                # What ends just now has ended by our clock and not yet by the server's.
                is_ending = reply.next_due is not None and reply.next_due > now - ENDING_MS
                place.not_before = time.monotonic() + (0.01 if is_ending else self._poll_seconds)
            self._schedule(place, reply.next_due)
        elif reply.status == "fenced":
            self._fenced(place)
        elif reply.status == "moved" and self._on_moved is not None and reply.slots:
            # Its messages may be moving: until they have moved it answers busy.
            place.topic = replace(place.topic, slots=reply.slots)
            self._on_moved(place.topic.name)
            self._ready(place)
        elif reply.status == "moved":
            self._moved = SlotMoved(
                f"topic {place.topic.name} has another slot count than {place.topic.slots} by now; "
                "start again with its present definition"
            )
            self._stopping = True
        else:
            self._schedule(place, reply.next_due)
            self._lull(place)
        return None

    def _lull(self, place: Place) -> None:
        """Keep no more of a slot that holds nothing than has to be."""
        under_way = self._trip.told if self._trip is not None else ()
        if place.is_at_rest and not any(place is other for other, _ in chain(self._settlements, under_way)):
            self._places.lull(place)

    def _start(
        self,
        place: Place,
        receipt: int,
        messages: list[Message],
        at: float,
        size: int,
        *,
        is_suspect: bool = False,
    ) -> None:
        if place.blocked_by:
            # It was shut while the answer was on its way: nothing runs beside a listener that does not return.
            members = [message.delivery.member for message in messages]
            self._settlements[place, receipt].released += members
            return
        batch = Batch(place, self.listeners[place.topic.name], receipt, messages, at)
        batch.size = size
        thread = self._thread_for(place, self._load)
        self._batches[id(batch)] = batch
        self._in_hand += len(messages)
        self._bytes.held += size
        self._limits.started(place.topic.name, len(messages))
        self._last_work = time.monotonic()
        place.batches += 1
        if not is_suspect or self._suspects.add(batch):
            self._put(batch, thread)

    def _put(self, batch: Batch, thread: int) -> None:
        topic = batch.topic.name
        batch.cost = len(batch.messages) * self._paces[topic].seconds
        self._load[thread] += batch.cost
        self._lanes.started(id(batch), topic, thread)
        self._threads[thread].put(batch)

    def _cleared(self, batch: Batch) -> None:
        """Let those suspects run that waited for this one."""
        for follower in self._suspects.remove(batch):
            if not self._stopping:
                self._put(follower, self._thread_for(follower.place, self._load))

    def _extend(self, message: Message) -> bool:
        member = message.delivery.member
        return self.broker.extend(message.topic, message.slot, message.receipt, [member]) == ["ok"]

    # --- slots that are not to be taken from

    def _trouble_of(self, place: Place, error: RmqError) -> ServerTrouble | None:
        """Return an error that concerns the whole server; for any other, leave the slot alone for a while."""
        if isinstance(error, NodeUnavailable) and not self._stopping:
            self._leave_node_alone(place, error)
            return None
        if isinstance(error, ServerTrouble) and not isinstance(error, ServerRefused):
            return error
        self._complain(
            f"{place.topic.name}/{type(error).__name__}",
            f"Cannot work on topic {place.topic.name} slot {place.slot}: %s",
            error,
        )
        place.shut_until = time.monotonic() + REST_SECONDS
        self._waiting.pop(place, None)
        self._schedule(place, self._clock.ms() + REST_SECONDS * 1000)
        return None

    def _leave_node_alone(self, place: Place, error: NodeUnavailable) -> None:
        """Ask a slot later whose node does not answer: what the other nodes hold goes on."""
        self._complain("node", "Some slots rest (%s); trying again", error)
        now = time.monotonic()
        place.shut_until, place.away = now + NODE_REST_SECONDS, True
        self._waiting.pop(place, None)
        self._schedule(place, self._clock.ms() + NODE_REST_SECONDS * 1000)
        if now >= self._next_renewal:
            # It may be the node that we listen to.
            self._next_renewal = now + RENEWAL_SECONDS
            self._listening.thread.renew()

    def _doubt(self, place: Place) -> None:
        """Ask what Redis handed out before anything more is taken: a reply was lost."""
        if place.topic.serial:
            place.uncertain, place.acquired = True, False
            self._unacquired[place] = None
            place.due, place.entry = 0.0, 0
        else:
            self._ready(place)

    def _fenced(self, place: Place) -> None:
        """Another owner has acquired the slot: give back what has not begun, and stay away from it."""
        self._complain(
            f"{place.topic.name}/fenced",
            f"Topic {place.topic.name} slot {place.slot}: %s",
            LostRace("another worker has acquired it"),
        )
        if place.owned:
            self._fences.add(place)
        place.acquired, place.epoch = False, None
        place.due, place.entry = float("inf"), 0
        self._give_back_slot(place)

    def _give_back_slot(self, place: Place, *, drops: bool = True) -> None:
        place.recalled = place.asked
        if not place.batches:
            return
        for batch in list(self._batches.values()):
            if batch.place is place:
                self._give_back(batch, drops=drops)

    def _give_back_slot_at(self, topic: str, slot: int) -> None:
        place = self._places.awake.get((topic, slot))
        if place is not None:
            self._give_back_slot(place)

    def _give_back(self, batch: Batch, *, drops: bool = True) -> None:
        """Begin nothing more of a batch, and release what has not begun, whatever its thread is doing.

        Unless that ``drops`` it, its thread settles one by one what ran in a list that failed.
        """
        batch.halted, batch.dropped = True, batch.dropped or drops
        waits = batch.thread is None and batch in self._suspects
        if waits or (batch.thread is not None and batch.thread.withdraw(batch)):
            members = [message.delivery.member for message in batch.messages]
            self._finished(Slice(batch, [], [], members, 0.0, True))
            return
        rest = [message.delivery.member for message in batch.messages[batch.begun :]]
        released = [member for member in rest if member not in batch.cut and member not in batch.stale]
        if released:
            batch.cut |= frozenset(released)
            self._settlements[batch.place, batch.receipt].released += released

    def _refresh(self) -> None:
        """Take anew what has long waited for its thread.

        A higher priority may have come to its slot; without ``SERIAL`` another thread may be free.
        """
        oldest = uptime() - REFRESH_SECONDS
        late = (
            batch
            for batch in self._batches.values()
            if batch.queued < oldest
            and not batch.halted
            and (batch.topic.is_priority if not batch.begun else not batch.topic.serial)
        )
        for batch in list(islice(late, REFRESHED)):
            self._give_back(batch, drops=False)

    # --- telling

    def _queue_settlements(
        self, pipeline: Any
    ) -> tuple[dict[tuple[Place, int], _Settlement], list[_Settling]]:
        told: dict[tuple[Place, int], _Settlement] = {}
        kept: defaultdict[tuple[Place, int], _Settlement] = defaultdict(_Settlement)
        settling: list[_Settling] = []
        now = 0.0
        for (place, receipt), settlement in self._settlements.items():
            if place.shut_until:
                now = now or time.monotonic()
                if place.shut_until > now and not self._stopping:
                    kept[place, receipt] = settlement
                    continue
            told[place, receipt] = settlement
            for verb in ("committed", "failures", "released"):
                items = getattr(settlement, verb)
                for start in range(0, len(items), BATCH):
                    part = items[start : start + BATCH]
                    if verb == "committed":
                        pipeline.commit(place.topic, place.slot, receipt, part)
                    elif verb == "failures":
                        pipeline.rollback(place.topic, place.slot, receipt, part)
                    else:
                        pipeline.release(place.topic, place.slot, receipt, part)
                    settling.append((place, receipt, verb, part, settlement.repeated))
        self._settlements = kept
        return told, settling

    def _settled(self, trip: _Trip, replies: list[Any]) -> ServerTrouble | None:
        """Note what Redis confirmed; the rest is told again, for telling twice is harmless.

        Returns trouble that concerns more than one slot.
        """
        trouble: ServerTrouble | None = None
        for (place, receipt, verb, part, repeated), words in zip(trip.settling, replies, strict=False):
            messages = trip.told[place, receipt].messages
            if isinstance(words, RmqError):
                kept = self._settlements[place, receipt]
                getattr(kept, verb).extend(part)
                kept.repeated = True
                kept.messages |= messages
                trouble = self._trouble_of(place, words) or trouble
                continue
            place.shut_until, place.away = 0.0, False
            if verb != "released":
                self.processed += len(part)
                self._tell(messages, verb, part, words)
            stale = words.count("stale")
            if stale:
                logger.log(
                    logging.INFO if repeated else logging.WARNING,
                    "%d %s of topic %s slot %s came too late: the delivery had ended already",
                    stale,
                    verb,
                    place.topic.name,
                    place.slot,
                    extra={"rmq_event": "stale", "rmq_topic": place.topic.name, "rmq_slot": place.slot},
                )
        return trouble

    def _tell(self, messages: dict[bytes, Message], verb: str, part: list[Any], words: list[str]) -> None:
        """Tell who watches of those ``messages`` whose end Redis has confirmed."""
        if self._watcher is None or not messages:
            return
        ours = [item for item, word in zip(part, words, strict=False) if word == "ok"]
        if verb == "committed":
            self._watcher.ended([messages[member] for member in ours if member in messages], [])
        else:
            failed = [(messages[each.member], each) for each in ours if each.member in messages]
            self._watcher.ended([], failed)

    # --- acquiring, and recovery of lost replies

    def _acquire(self) -> bool:
        """Acquire what is newly ours, and go on with what a prepare handed out whose reply was lost.

        Return whether there is more of it: it is done in parts, so that work goes on meanwhile.
        """
        more = self._acquire_again() if self._unacquired else False
        if self._places.is_told_more:
            self._acquire_told()
        return more or self._places.is_told_more

    def _acquire_told(self) -> None:
        """Acquire slots for the first time; most of many are empty, and asleep at once."""
        taken = self._places.take(ACQUIRED)
        pipeline = self.broker.pipeline()
        asked: list[tuple[str, list[int]]] = []
        for name, slots in taken:
            for start in range(0, len(slots) if self.topics[name].serial else 0, TURN):
                asked.append((name, slots[start : start + TURN]))
                pipeline.acquire_all(self.topics[name], asked[-1][1])
        try:
            answers = pipeline.execute()
        except ServerTrouble:
            self._places.put_back(taken)
            raise
        for name, slots in taken:
            for slot in () if self.topics[name].serial else slots:
                self._acquired(self._places.add(name, slot))
        trouble: ServerTrouble | None = None
        for (name, slots), answer in zip(asked, answers, strict=True):
            found = [answer] * len(slots) if isinstance(answer, RmqError) else answer
            for slot, one in zip(slots, found, strict=True):
                if not isinstance(one, RmqError) and one.is_asleep:
                    self._places.sleep(name, slot, one.epoch)
                    continue
                place = self._places.add(name, slot)
                self._unacquired[place] = None
                if isinstance(one, RmqError):
                    trouble = self._trouble_of(place, one) or trouble
                elif one.epoch is not None:
                    place.epoch = one.epoch
                    self._acquired(place)
        if trouble is not None:
            raise trouble

    def _acquire_again(self) -> bool:
        # What is on its way is known to be ours before anybody asks what Redis holds for us.
        self._receive_rest()
        local = time.monotonic()
        rested = list(
            islice((place for place in self._unacquired if place.shut_until <= local), ACQUIRED + 1)
        )
        for start in range(0, min(len(rested), ACQUIRED), TURN):
            self._acquire_some(rested[start : start + TURN])
        return len(rested) > ACQUIRED

    def _acquire_some(self, places: list[Place]) -> None:
        pipeline = self.broker.pipeline()
        for place in places:
            if place.owned and place.topic.serial:
                pipeline.acquire(place.topic, place.slot)
            if place.uncertain:
                pipeline.held(place.topic, place.slot, self.owner, 0, BATCH)
        at = uptime()
        replies = iter(pipeline.execute())
        trouble: ServerTrouble | None = None
        lost: list[tuple[Place, int, list[Held]]] = []
        for place in places:
            epoch = next(replies) if place.owned and place.topic.serial else None
            held = next(replies) if place.uncertain else []
            error = epoch if isinstance(epoch, RmqError) else held if isinstance(held, RmqError) else None
            if error is None:
                try:
                    found = self._unknown(place, self._all_held(place, held or []))
                except RmqError as failed:
                    error = failed
            if error is not None:
                trouble = self._trouble_of(place, error) or trouble
                continue
            place.epoch = epoch
            if found:
                lost += [(place, receipt, things) for receipt, things in found.items()]
            else:
                self._acquired(place)
        if lost:
            trouble = self._adopt(lost, at) or trouble
        if trouble is not None:
            raise trouble

    def _acquired(self, place: Place) -> None:
        self._unacquired.pop(place, None)
        place.uncertain = False
        place.acquired = place.owned
        self._ready(place)
        self._forget(place)

    def _all_held(self, place: Place, held: list[Held]) -> list[Held]:
        page = held
        while len(page) == BATCH:
            page = self.broker.held(place.topic, place.slot, self.owner, len(held), BATCH) or []
            held = [*held, *page]
        return held

    def _unknown(self, place: Place, held: list[Held]) -> dict[int, list[Held]]:
        """Return, by receipt, what Redis handed out to us without our hearing of it."""
        if not held:
            return {}
        known = {batch.receipt for batch in self._batches.values() if batch.place.key == place.key}
        known |= {receipt for other, receipt in self._settlements if other.key == place.key}
        lost: defaultdict[int, list[Held]] = defaultdict(list)
        for thing in held:
            if thing.receipt and thing.receipt not in known:
                lost[thing.receipt].append(thing)
        return lost

    def _adopt(self, lost: list[tuple[Place, int, list[Held]]], at: float) -> ServerTrouble | None:
        """Go on with deliveries of a prepare whose reply was lost; give them back where nothing may begin."""
        # Their time-out began at an instant we do not know: extend before anything starts.
        pipeline = self.broker.pipeline()
        for place, receipt, things in lost:
            pipeline.extend(place.topic, place.slot, receipt, [thing.delivery.member for thing in things])
        trouble: ServerTrouble | None = None
        refused: set[Place] = set()
        for (place, receipt, things), words in zip(lost, pipeline.execute(), strict=True):
            if isinstance(words, RmqError):
                refused.add(place)
                trouble = self._trouble_of(place, words) or trouble
                continue
            ours = [thing for thing, word in zip(things, words, strict=True) if word == "ok"]
            begin = [thing.delivery for thing in ours if place.owned and not thing.marked]
            back = [thing.delivery.member for thing in ours if not place.owned or thing.marked]
            if place.topic.is_priority:
                begin.sort(key=lambda delivery: -delivery.score)
            logger.info("The hand-out of %d messages was lost; going on with them", len(ours))
            if begin:
                messages = [Message(place.topic, place.slot, receipt, each, self._extend) for each in begin]
                # What it was before nobody tells; who has failed alone may have timed out.
                is_suspect = len(begin) == 1 and begin[0].retries_left < place.topic.max_retries
                size = self._bytes.weigh(place.topic, begin)
                self._start(place, receipt, messages, at, size, is_suspect=is_suspect)
            if back:
                self._settlements[place, receipt].released += back
        for place in {place for place, _, _ in lost} - refused:
            self._acquired(place)
        return trouble

    # --- the slow poll

    def _poll(self) -> None:
        """Ask for the next due times of what sleeps: foreign sends and lost wake-ups show here."""
        before = time.monotonic()
        server = self.broker.now_ms()
        self._clock.note(before, server, time.monotonic())
        by_topic: defaultdict[str, list[tuple[int, Place | None]]] = defaultdict(list)
        for name, slot, place in self._next_polled(server):
            by_topic[name].append((slot, place))
        blocked = list(self._blocked)
        pipeline = self.broker.pipeline()
        asked: list[tuple[str, list[tuple[int, Place | None]]]] = []
        for name, found in by_topic.items():
            for start in range(0, len(found), HEADS):
                part = found[start : start + HEADS]
                asked.append((name, part))
                pipeline.heads(self.topics[name], [slot for slot, _ in part])
        for place in blocked:
            # Nothing is prepared here until its listener returns, so nothing else would time it out.
            pipeline.expire(place.topic, place.slot)
        replies = pipeline.execute()
        untaken: list[Place] = []
        trouble: ServerTrouble | None = None
        for (name, part), heads in zip(asked, replies, strict=False):
            if isinstance(heads, RmqError):
                self._complain("heads", "The slow poll failed: %s", heads)
                if isinstance(heads, ServerTrouble) and not isinstance(
                    heads, (ServerRefused, NodeUnavailable)
                ):
                    trouble = heads
                continue
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
                    # Even if that is later than now: prepare tells the senders anew until when we sleep.
                    self._ready(place)
        for place, expired in zip(blocked, replies[len(asked) :], strict=True):
            if isinstance(expired, RmqError):
                trouble = self._trouble_of(place, expired) or trouble
        if untaken:
            for place in self._fences.left_alone(untaken):
                self._acquire_fenced(place)
        if trouble is not None:
            raise trouble
        self._hurries &= self._round is not None
        self._next_poll = 0.0 if self._hurries else time.monotonic() + self._poll_seconds

    def _next_polled(self, server: float) -> list[tuple[str, int, Place | None]]:
        """Return the next slots that sleep; all of them come in turn."""
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

    def _sweep(self) -> None:
        """End deliveries and claims that have timed out where this worker takes nothing."""
        server = self.broker.now_ms()
        pipeline = self.broker.pipeline()
        asked = [
            (topic, range(first, min(first + HEADS, topic.slots)))
            for topic in self._swept
            for first in range(0, topic.slots, HEADS)
        ]
        for topic, slots in asked:
            pipeline.heads(topic, slots, upkeep=True)
        for (topic, slots), heads in zip(asked, pipeline.execute(), strict=True):
            if isinstance(heads, RmqError):
                self._complain("sweep", "Cannot look for what has timed out: %s", heads)
                continue
            for slot, due in zip(slots, heads, strict=True):
                if due is not None and due <= server:
                    pipeline.expire(topic, slot)
        ended = pipeline.execute()
        for answer in ended:
            if isinstance(answer, RmqError):
                self._complain("sweep", "Cannot end what has timed out: %s", answer)
        # There may be more of it than one script ends.
        rest = 0.0 if any(isinstance(answer, int) and answer for answer in ended) else SWEEP_SECONDS
        self._next_sweep = time.monotonic() + rest

    # --- slots that another worker has acquired

    def _return_to_fenced(self) -> None:
        """Acquire again what another worker has acquired and the coordinator, asked since, still says is ours."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        confirmed = self._fences.confirmed()
        # What was told until then may not have been read yet.
        self._read_inbox(0.0)
        for place in self._fences.ours_at(confirmed):
            self._acquire_fenced(place)

    def _acquire_fenced(self, place: Place) -> None:
        self._fences.remove(place)
        place.due = 0.0
        self._unacquired[place] = None

    # --- threads that do not go on

    def _new_heartbeat(self) -> Heartbeat:
        return Heartbeat(
            self.broker,
            self.topics.values(),
            lambda: self._batches.copy().values(),
            lambda batch: self._inbox.put(_Overrun(batch)),
        )

    def _new_listening(self) -> Listening:
        return Listening(
            self.broker,
            list(self.topics.values()),
            lambda topic, slot: self._inbox.put(_Wake(topic, slot)),
            lambda: self._inbox.put(_Resubscribed()),
        )

    def _look(self) -> None:
        """Replace threads that have died, about once a second."""
        if time.monotonic() >= self.lookout.due:
            self._clear_dead()
            self.lookout.look()

    def _clear_dead(self) -> None:
        """Forget batches whose thread is dead: what has not begun is given back, the rest times out."""
        dead = [batch for batch in self._batches.values() if batch.thread and batch.thread.is_dead]
        dead += self._crew.returned()
        if dead:
            # Whatever they reported before they died is there by now.
            self._read_inbox(0.0)
        for batch in dead:
            if id(batch) in self._batches:
                self._give_back(batch)
                self._finished(Slice(batch, [], [], [], 0.0, True))

    def _overran(self, batch: Batch) -> None:
        """Give the other slots of a hung thread to another one; its own slot stays shut in this process."""
        self._give_back(batch)
        self._cleared(batch)
        thread, place = batch.thread, batch.place
        if thread is None or thread.current is not batch:
            return
        thread.hangs = True
        batch.thread = None
        if place.topic.serial:
            place.blocked_by = batch
            self._blocked.add(place)
            self._waiting.pop(place, None)
            self._give_back_slot(place)
        self.lookout.due = 0.0

    def _relieve(self, index: int) -> None:
        """Give back what a dead or hung thread has, and start another one. Raises what ``Crew.succeed`` does."""
        thread = self._threads[index]
        self._clear_dead()
        for batch in [batch for batch in self._batches.values() if batch.thread is thread]:
            self._give_back(batch)
            batch.thread = None
        self._load[index] = 0.0
        self._crew.succeed(index)

    # --- the end

    def _shut_down(self) -> None:
        """Let running listeners end, give back what has not begun, settle everything."""
        self._stopping = True
        begun = time.monotonic()
        self._leaving()
        for place in self._places.lose_all():
            self._disown(place)
        while True:
            self._beat()
            shut = False
            self._clear_dead()
            try:
                self._receive_rest()
                self._acquire()
                trip = self._send(takes=False)
                if trip is not None:
                    self._receive(trip)
                    shut = bool(self._settlements)
            except ServerTrouble as error:
                self._complain("redis", "Redis is away (%s) while shutting down; trying again", error)
                self._read_inbox(0.1)
            spent = time.monotonic() - begun
            if not self._batches:
                if not self._settlements and (not self._unacquired or spent > UNCERTAIN_SECONDS):
                    with contextlib.suppress(RmqError):
                        self._limits.leave()
                    return
                if shut:
                    break
            if spent >= self._shutdown_timeout:
                break
            self._read_inbox(min(0.1, self._shutdown_timeout - spent))
        self.forced = bool(self._batches or self._settlements)
        if self.forced:
            logger.error(
                "Shutdown: %d batches still run and %d are not settled; they end as timed out",
                len(self._batches),
                len(self._settlements),
            )
