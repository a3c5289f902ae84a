"""The dispatcher: one thread that moves messages between Redis and the executor threads.

It keeps a heap of owned slots by the time something in them is due. Each turn of its loop is one round
trip: what listeners finished is committed or rolled back, and slots that are due are prepared, in one
pipeline. When nothing is due it sleeps until the next due time, a wake-up, a report of a thread, or the
slow poll; idle cost does not grow with the number of slots beyond one ``heads`` per 1,024.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from uuid import uuid4

from django_rmq.broker import BATCH, Broker
from django_rmq.consumer.executor import (
    Batch,
    ExecutorThread,
    Exited,
    Hooks,
    ListenerLike,
    Slice,
    uptime,
)
from django_rmq.consumer.heartbeat import Heartbeat
from django_rmq.exceptions import RmqError, ServerRefused, ServerTrouble, SlotMoved, WrongType
from django_rmq.messages import Delivery, Failure, Message, Prepared, Topic

logger = logging.getLogger("django_rmq.consumer")

POLL_SECONDS = 1.0
"""The slow poll: the lateness of a foreign ZADD and of a lost wake-up."""

WORK_SECONDS = 0.05
"""How much work one prepare shall hand out, by what a topic's listener took of late."""

IN_HAND = 20_000
"""Messages in hand of one process at most."""

HEADS = 1024
"""Slots asked for by one slow-poll script."""

TURN = 512
"""Slots prepared in one round trip at most."""


class Place:
    """One owned slot as the dispatcher sees it."""

    __slots__ = (
        "batches",
        "blocked",
        "due",
        "entry",
        "epoch",
        "not_before",
        "owned",
        "slot",
        "topic",
        "uncertain",
    )

    def __init__(self, topic: Topic, slot: int) -> None:
        self.topic = topic
        self.slot = slot
        self.epoch: int | None = None
        self.due = 0.0
        """Server time in ms at which to prepare; infinity: nothing is known to wait."""
        self.not_before = 0.0
        """Local monotonic time before which a busy, paused or failing slot is left alone."""
        self.batches = 0
        self.owned = True
        self.blocked = False
        """A listener of this slot exceeded MAX_RUNTIME and has not returned."""
        self.uncertain = True
        """A prepare of this owner may have run without our hearing of it."""
        self.entry = 0


class Pace:
    """What a topic's listener takes per message, smoothed."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.002

    def note(self, seconds: float, messages: int) -> None:
        if messages:
            sample = seconds / messages
            weight = 0.5 if sample > self.seconds else 0.2
            self.seconds += (sample - self.seconds) * weight


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

    __slots__ = ("committed", "failures", "released")

    def __init__(self) -> None:
        self.committed: list[bytes] = []
        self.failures: list[Failure] = []
        self.released: list[bytes] = []


class Dispatcher:
    """One worker: owned slots, T executor threads, a heartbeat, and the loop that feeds them.

    ``listeners`` maps topic names to listeners. ``own`` and ``disown`` say which slots are ours; they
    may be called before ``run`` or from another thread. ``run`` returns when ``stop`` was called and
    all is settled, or, with ``burst``, when nothing can be taken any more.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Iterable[Topic],
        listeners: Mapping[str, ListenerLike],
        *,
        threads: int = 4,
        hooks: Hooks = Hooks(),
        burst: bool = False,
        shutdown_timeout: float = 30.0,
        poll_seconds: float = POLL_SECONDS,
        max_messages: int | None = None,
        max_idle_time: float | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.owner = uuid4().hex
        self.broker = broker
        self.topics = {topic.name: topic for topic in topics}
        self.listeners = dict(listeners)
        self.processed = 0
        """Deliveries settled so far."""
        self.forced = False
        """The shutdown time-out ended a listener's chance to finish."""
        self.exit_asked = False
        """A listener raised SystemExit."""
        self._hooks = hooks
        self._burst = burst
        self._shutdown_timeout = shutdown_timeout
        self._poll_seconds = poll_seconds
        self._max_messages = max_messages
        self._max_idle_time = max_idle_time
        self._last_work = time.monotonic()
        self._beat = beat
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._places: dict[tuple[str, int], Place] = {}
        self._heap: list[tuple[float, int, Place]] = []
        self._entries = count(1)
        self._waiting: dict[Place, None] = {}
        self._threads = [ExecutorThread(i, self._inbox, hooks) for i in range(max(1, threads))]
        self._load = [0.0] * len(self._threads)
        self._batches: dict[int, Batch] = {}
        self._in_hand = 0
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)
        self._settlements: defaultdict[tuple[Place, int], _Settlement] = defaultdict(_Settlement)
        self._cursors: dict[Place, tuple[str, bytes]] = {}
        self._offset_ms = 0.0
        self._stopping = False
        self._next_poll = 0.0
        self._quarrels: dict[str, float] = {}
        self._lock = threading.Lock()

    # --- ownership

    def own(self, slots: Iterable[tuple[str, int]]) -> None:
        """Add slots to those that are ours."""
        with self._lock:
            for name, slot in slots:
                place = self._places.get((name, slot))
                if place is None or not place.owned:
                    self._places[name, slot] = Place(self.topics[name], slot)
        self._inbox.put(_Resubscribed())

    def disown(self, slots: Iterable[tuple[str, int]]) -> None:
        """Take no more from these slots; what has not begun is given back."""
        with self._lock:
            for key in slots:
                place = self._places.pop(key, None)
                if place is not None:
                    place.owned = False
        self._inbox.put(_Resubscribed())

    def stop(self) -> None:
        """Take nothing more, let listeners finish, give the rest back. Safe in signal handlers."""
        self._inbox.put(_Stop())

    # --- the loop

    def run(self) -> None:
        """Work until stopped."""
        for thread in self._threads:
            thread.start()
        heartbeat = Heartbeat(
            self.broker, lambda: self._batches.copy().values(), self._overran, self._thread_of
        )
        heartbeat.start()
        listening = _Listening(self.broker, list(self.topics.values()), self._inbox)
        listening.start()
        try:
            listening.subscribed.wait(5.0)
            self._work()
            self._shut_down()
        finally:
            heartbeat.stop()
            listening.stop()
            for thread in self._threads:
                thread.stop()

    def _work(self) -> None:
        trouble = 0
        while not self._stopping and (self._max_messages is None or self.processed < self._max_messages):
            self._beat()
            try:
                busy = self._turn()
                trouble = 0
            except ServerTrouble as error:
                trouble += 1
                self._complain("redis", "Redis is away (%s); trying again", error)
                self._pause(min(1.0, 0.02 * 2 ** min(trouble, 6)))
                continue
            if busy:
                self._read_inbox(0.0)
                continue
            if self._in_hand or self._settlements:
                self._last_work = time.monotonic()
            elif self._burst and self._drained() or self._idle_too_long():
                return
            self._read_inbox(self._sleep_seconds())

    def _idle_too_long(self) -> bool:
        return self._max_idle_time is not None and time.monotonic() - self._last_work >= self._max_idle_time

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._stopping:
            self._read_inbox(left)

    def _turn(self) -> bool:
        """Do one round trip if there is anything to do; return whether there was."""
        self._recover()
        if time.monotonic() >= self._next_poll:
            self._poll()
        pipeline = self.broker.pipeline()
        settling = self._queue_settlements(pipeline)
        asked = self._queue_prepares(pipeline)
        if not len(pipeline):
            return False
        at = uptime()
        try:
            replies = pipeline.execute()
        except ServerTrouble:
            for place, _ in asked:
                place.uncertain = True
                self._schedule(place, 0.0)
            raise
        self._settled(settling, replies)
        for (place, limit), reply in zip(asked, replies[len(replies) - len(asked) :], strict=True):
            self._prepared(place, limit, reply, at)
        return True

    def _sleep_seconds(self) -> float:
        now = time.monotonic()
        wake = self._next_poll
        if self._max_idle_time is not None:
            wake = min(wake, self._last_work + self._max_idle_time)
        if self._heap:
            wake = min(wake, now + (self._heap[0][0] - self._server_ms()) / 1000)
        return max(0.0, wake - now)

    def _server_ms(self) -> float:
        return time.monotonic() * 1000 + self._offset_ms

    def _drained(self) -> bool:
        now = self._server_ms()
        return all(place.due > now or place.blocked for place in self._places.values())

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
            place = self._places.get((item.topic, item.slot))
            if place is not None:
                place.not_before = 0.0
                self._schedule(place, 0.0)
        elif isinstance(item, _Resubscribed):
            self._next_poll = 0.0
            with self._lock:
                places = list(self._places.values())
            for place in places:
                if place.uncertain:
                    self._schedule(place, 0.0)
        elif isinstance(item, _Overrun):
            self._replace_thread(item.batch)
        elif isinstance(item, Exited):
            self.exit_asked = self._stopping = True
        elif isinstance(item, _Stop):
            self._stopping = True

    def _finished(self, report: Slice) -> None:
        batch = report.batch
        place: Place = batch.place
        settlement = self._settlements[place, batch.receipt]
        settlement.committed += report.committed
        settlement.failures += report.failures
        settlement.released += report.released
        done = len(report.committed) + len(report.failures)
        self._paces[place.topic.name].note(report.seconds, done)
        if report.last and self._batches.pop(id(batch), None) is not None:
            place.batches -= 1
            self._in_hand -= len(batch.messages)
            place.blocked = place.blocked and not batch.abandoned
            if batch.thread is not None:
                self._load[batch.thread] -= batch.cost
            # In the same round trip that settles it: a prepare that finds nothing says so to the senders.
            self._waiting.pop(place, None)
            self._schedule(place, 0.0)

    # --- the heap

    def _schedule(self, place: Place, due: float | None) -> None:
        """Look at ``place`` when the server's clock shows ``due`` (None: nothing waits)."""
        place.due = float("inf") if due is None else due
        if due is None or not place.owned:
            place.entry = 0
            return
        place.entry = next(self._entries)
        heapq.heappush(self._heap, (due, place.entry, place))

    def _due_places(self) -> Iterator[Place]:
        """Yield places whose time has come, each once."""
        now, local = self._server_ms(), time.monotonic()
        later: list[Place] = []
        while self._heap and self._heap[0][0] <= now:
            _, entry, place = heapq.heappop(self._heap)
            if entry != place.entry or not place.owned:
                continue
            place.entry = 0
            if place.not_before > local:
                place.due = now + (place.not_before - local) * 1000
                later.append(place)
                continue
            yield place
        for place in later:
            self._schedule(place, place.due)

    # --- asking

    def _depth(self, place: Place) -> int:
        """How many batches of a slot may be in hand: one runs, the next is ready."""
        return 2 if place.topic.serial else 2 * len(self._threads)

    def _thread_for(self, place: Place) -> int:
        if place.topic.serial:
            return place.slot % len(self._threads)
        return min(range(len(self._threads)), key=self._load.__getitem__)

    def _has_room(self, place: Place, load: list[float]) -> bool:
        """Whether more of a slot's messages may be taken in hand now.

        A thread takes the highest head among its priority slots, so each of these has a batch ready.
        """
        if self._in_hand >= IN_HAND or place.batches >= self._depth(place):
            return False
        return place.topic.is_priority or load[self._thread_for(place)] <= 2 * WORK_SECONDS

    def _limit(self, place: Place) -> int:
        topic = place.topic
        size = self.listeners[topic.name].batch_size or 1
        wanted = WORK_SECONDS / max(self._paces[topic.name].seconds, 1e-7)
        limit = max(size, min(int(wanted), max(topic.prefetch, size)))
        return max(1, min(limit - limit % size if limit > size else limit, BATCH))

    def _queue_prepares(self, pipeline: Any) -> list[tuple[Place, int]]:
        asked: list[tuple[Place, int]] = []
        for place in [place for place in self._waiting if self._has_room(place, self._load)]:
            del self._waiting[place]
            self._schedule(place, 0.0)
        expected = self._load.copy()
        room = IN_HAND - self._in_hand
        for place in self._due_places():
            if place.blocked:
                continue
            if room <= 0 or not self._has_room(place, expected):
                self._waiting[place] = None
                continue
            thread = self._thread_for(place)
            limit = self._limit(place)
            pipeline.prepare(
                place.topic,
                place.slot,
                self.owner,
                place.epoch,
                limit,
                after=self._cursors.pop(place, None),
            )
            asked.append((place, limit))
            # What a slot will hand out is not known; half the limit keeps many slots from flooding one thread.
            expected[thread] += limit / 2 * self._paces[place.topic.name].seconds
            room -= limit
            if len(asked) >= TURN:
                break
        return asked

    def _prepared(self, place: Place, limit: int, reply: Prepared | RmqError, at: float) -> None:
        if isinstance(reply, ServerTrouble) and not isinstance(reply, ServerRefused):
            place.uncertain = True
            self._schedule(place, 0.0)
            raise reply
        if isinstance(reply, RmqError):
            self._trip(place, reply)
            return
        if reply.status == "ok":
            self._hand_out(place, reply, at)
            self._schedule(place, reply.next_due)
        elif reply.status == "more":
            assert reply.cursor is not None
            self._cursors[place] = reply.cursor
            self._schedule(place, 0.0)
        elif reply.status in ("busy", "paused"):
            # A wake-up tells when it is over; should that be lost, the slow poll asks again.
            place.not_before = time.monotonic() + self._poll_seconds
            self._schedule(place, reply.next_due)
        elif reply.status == "fenced":
            self._fenced(place)
        elif reply.status == "moved":
            raise SlotMoved(
                f"topic {place.topic.name} has another slot count than {place.topic.slots} by now; "
                "start again with its present definition"
            )
        else:
            self._schedule(place, reply.next_due)

    def _hand_out(self, place: Place, prepared: Prepared, at: float) -> None:
        topic = place.topic
        messages = [
            Message(topic, place.slot, prepared.receipt, delivery, self._extend)
            for delivery in prepared.deliveries
        ]
        self._start(place, prepared.receipt, messages, at)

    def _start(self, place: Place, receipt: int, messages: list[Message], at: float) -> None:
        batch = Batch(place, self.listeners[place.topic.name], receipt, messages, at)
        thread = self._thread_for(place)
        self._batches[id(batch)] = batch
        self._in_hand += len(messages)
        place.batches += 1
        batch.cost = len(messages) * self._paces[place.topic.name].seconds
        self._load[thread] += batch.cost
        self._threads[thread].put(batch)

    def _extend(self, message: Message) -> bool:
        member = message.delivery.member
        return self.broker.extend(message.topic, message.slot, message.receipt, [member]) == ["ok"]

    def _trip(self, place: Place, error: RmqError) -> None:
        """Leave a slot alone for a while: a foreign key type or a refusal concerns it alone."""
        self._complain(
            f"{place.topic.name}/{type(error).__name__}",
            f"Cannot take from topic {place.topic.name} slot {place.slot}: %s",
            error,
        )
        place.not_before = time.monotonic() + 5.0
        self._schedule(place, 0.0)

    def _fenced(self, place: Place) -> None:
        """Another owner has acquired the slot: give back what has not begun, and ask again later."""
        logger.warning("Slot %s of topic %s has a new owner", place.slot, place.topic.name)
        for batch in self._batches.copy().values():
            if batch.place is place:
                batch.abandoned = True
        place.epoch = None
        place.uncertain = True
        place.not_before = time.monotonic() + 5.0
        self._schedule(place, 0.0)

    # --- telling

    def _queue_settlements(self, pipeline: Any) -> list[tuple[Place, int, str, list[Any]]]:
        settling: list[tuple[Place, int, str, list[Any]]] = []
        for (place, receipt), settlement in self._settlements.items():
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
                    settling.append((place, receipt, verb, part))
        return settling

    def _settled(self, settling: list[tuple[Place, int, str, list[Any]]], replies: list[Any]) -> None:
        """Forget what Redis confirmed; what met trouble is told again, for telling twice is harmless."""
        trouble: ServerTrouble | None = None
        keep: defaultdict[tuple[Place, int], _Settlement] = defaultdict(_Settlement)
        for (place, receipt, verb, part), words in zip(settling, replies, strict=False):
            if isinstance(words, ServerTrouble) and not isinstance(words, ServerRefused):
                getattr(keep[place, receipt], verb).extend(part)
                trouble = words
                continue
            if isinstance(words, RmqError):
                self._complain(
                    f"settle/{place.topic.name}",
                    f"Cannot settle {len(part)} messages of topic {place.topic.name} slot {place.slot}, "
                    "they are left to time out: %s",
                    words,
                )
                continue
            self.processed += len(part)
            stale = words.count("stale")
            if stale:
                logger.warning(
                    "%d %s of topic %s slot %s came too late: the delivery had ended already",
                    stale,
                    verb,
                    place.topic.name,
                    place.slot,
                    extra={"rmq_event": "stale", "rmq_topic": place.topic.name, "rmq_slot": place.slot},
                )
        self._settlements = keep
        if trouble is not None:
            raise trouble

    # --- recovery and the slow poll

    def _recover(self) -> None:
        """Acquire what is newly ours, or ours without our knowing what a lost prepare handed out."""
        uncertain = [place for place in self._places.values() if place.uncertain]
        if not uncertain:
            return
        local = time.monotonic()
        for start in range(0, len(uncertain), TURN):
            part = [place for place in uncertain[start : start + TURN] if place.not_before <= local]
            pipeline = self.broker.pipeline()
            for place in part:
                if place.topic.serial:
                    pipeline.acquire(place.topic, place.slot)
                    pipeline.held(place.topic, place.slot, self.owner)
            at = uptime()
            replies = iter(pipeline.execute())
            for place in part:
                if not place.topic.serial:
                    place.uncertain = False
                    self._schedule(place, 0.0)
                    continue
                epoch, held = next(replies), next(replies)
                for reply in (epoch, held):
                    if isinstance(reply, ServerTrouble) and not isinstance(reply, ServerRefused):
                        raise reply
                if isinstance(epoch, RmqError) or isinstance(held, RmqError):
                    self._trip(place, epoch if isinstance(epoch, RmqError) else held)
                    continue
                place.epoch = epoch
                place.uncertain = False
                self._adopt(place, held or [], at)
                self._schedule(place, 0.0)

    def _adopt(self, place: Place, held: list[Any], at: float) -> None:
        """Go on with deliveries of a prepare whose reply was lost."""
        known = {batch.receipt for batch in self._batches.values() if batch.place is place}
        known |= {receipt for other, receipt in self._settlements if other is place}
        lost: defaultdict[int, list[Delivery]] = defaultdict(list)
        for thing in held:
            if thing.receipt and thing.receipt not in known:
                lost[thing.receipt].append(thing.delivery)
        if not lost:
            return
        # Their time-out began at an instant we do not know: extend before anything starts.
        pipeline = self.broker.pipeline()
        for receipt, deliveries in lost.items():
            pipeline.extend(place.topic, place.slot, receipt, [delivery.member for delivery in deliveries])
        for (receipt, deliveries), words in zip(lost.items(), pipeline.execute(), strict=True):
            if isinstance(words, RmqError):
                place.uncertain = True
                raise words
            ours = [delivery for delivery, word in zip(deliveries, words, strict=True) if word == "ok"]
            messages = [Message(place.topic, place.slot, receipt, d, self._extend) for d in ours]
            if messages:
                logger.info("Going on with %d messages whose hand-out was lost", len(messages))
                self._start(place, receipt, messages, at)

    def _poll(self) -> None:
        """Ask for the next due times of all slots: foreign sends and lost wake-ups show here."""
        self._next_poll = time.monotonic() + self._poll_seconds
        before = time.monotonic()
        server = self.broker.now_ms()
        self._offset_ms = server - (before + time.monotonic()) / 2 * 1000
        by_topic: defaultdict[str, list[Place]] = defaultdict(list)
        for place in self._places.values():
            if place.blocked:
                self.broker.expire(place.topic, place.slot)
            elif not place.uncertain and place.entry == 0 and place not in self._waiting:
                by_topic[place.topic.name].append(place)
            elif place.entry and place.due > server:
                by_topic[place.topic.name].append(place)
        pipeline = self.broker.pipeline()
        asked: list[list[Place]] = []
        for name, places in by_topic.items():
            for start in range(0, len(places), HEADS):
                part = places[start : start + HEADS]
                pipeline.heads(self.topics[name], [place.slot for place in part])
                asked.append(part)
        for part, heads in zip(asked, pipeline.execute(), strict=True):
            if isinstance(heads, RmqError):
                if isinstance(heads, ServerTrouble):
                    raise heads
                self._complain("heads", "The slow poll failed: %s", heads)
                continue
            for place, due in zip(part, heads, strict=True):
                if due is not None and due < place.due:
                    self._schedule(place, float(due))

    # --- listeners that do not return

    def _overran(self, batch: Batch) -> None:
        self._inbox.put(_Overrun(batch))

    def _thread_of(self, batch: Batch) -> threading.Thread | None:
        for thread in threading.enumerate():
            if isinstance(thread, ExecutorThread) and thread.current is batch:
                return thread
        return None

    def _replace_thread(self, batch: Batch) -> None:
        """Give the other slots of a hung thread to a new one; its own slot stays shut in this process."""
        index = batch.thread
        if index is None or self._threads[index].current is not batch:
            return
        hung = self._threads[index]
        batch.place.blocked = True
        batch.thread = None
        fresh = ExecutorThread(index, self._inbox, self._hooks)
        self._threads[index] = fresh
        self._load[index] = 0.0
        fresh.start()
        for other in hung.take_queue():
            if other.place is batch.place:
                other.abandoned = True
            fresh.put(other)

    # --- the end

    def _shut_down(self) -> None:
        """Let running listeners end, give back what has not begun, settle everything."""
        for thread in self._threads:
            thread.drain()
        end = time.monotonic() + self._shutdown_timeout
        while time.monotonic() < end:
            self._beat()
            try:
                pipeline = self.broker.pipeline()
                settling = self._queue_settlements(pipeline)
                if settling:
                    self._settled(settling, pipeline.execute())
                elif not self._batches:
                    return
            except ServerTrouble as error:
                self._complain("redis", "Redis is away (%s) while shutting down; trying again", error)
                self._read_inbox(0.1)
            self._read_inbox(min(0.1, max(0.0, end - time.monotonic())))
        if self._batches or self._settlements:
            self.forced = True
            logger.error(
                "Shutdown time-out: %d batches are still in hand and are left to time out", len(self._batches)
            )

    def _complain(self, about: str, text: str, error: Exception) -> None:
        """Log one line per kind of trouble and ten seconds."""
        now = time.monotonic()
        if now - self._quarrels.get(about, float("-inf")) >= 10.0:
            self._quarrels[about] = now
            level = logging.ERROR if isinstance(error, (WrongType, ServerRefused)) else logging.WARNING
            logger.log(level, text, error, extra={"rmq_event": "trouble"})


class _Listening(threading.Thread):
    """Waits for wake-ups and puts them into the dispatcher's inbox."""

    def __init__(self, broker: Broker, topics: list[Topic], inbox: SimpleQueue[Any]) -> None:
        super().__init__(name="rmq-wakeups", daemon=True)
        self.subscribed = threading.Event()
        self._broker = broker
        self._topics = topics
        self._inbox = inbox
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.is_set():
            wakeups = None
            try:
                wakeups = self._broker.wakeups(self._topics)
                self.subscribed.set()
                self._inbox.put(_Resubscribed())
                while not self._stopped.is_set():
                    for topic, slot in wakeups.get(timeout=0.5):
                        self._inbox.put(_Wake(topic, slot))
            except RmqError:
                self._stopped.wait(0.2)
            except Exception:
                logger.exception("The wake-up subscription failed; the slow poll goes on")
                self._stopped.wait(1.0)
            finally:
                if wakeups is not None:
                    wakeups.close()
