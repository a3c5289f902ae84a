"""The dispatcher: one thread that moves messages between Redis and the threads that run listeners.

Each turn is one round trip: one pipeline commits or rolls back what listeners finished, and prepares slots
that are due. When nothing is due the dispatcher sleeps until the next due time, a wake-up, a report of a thread, or
the slow poll. The slow poll is one ``heads`` per 1,024 slots and second, and at most four.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from uuid import uuid4

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.consumer.acks import AckQueue, SlotErrors
from django_rmq.core.consumer.acquisition import LostReplyRecovery, SlotAcquirer
from django_rmq.core.consumer.batch import BatchReport, InFlight, ListenerLike
from django_rmq.core.consumer.capacity import AsyncCapacity, Capacity
from django_rmq.core.consumer.executor_pool import BatchRouter, ExecutorPool, ThreadReplacer
from django_rmq.core.consumer.fetch import DuePoll, FetchPlanner, FetchReplies, RoundTrips, TimeoutReaper
from django_rmq.core.consumer.heartbeat import BackgroundThreads, Watchdog
from django_rmq.core.consumer.mailbox import (
    Disown,
    HardTimeouts,
    Mailbox,
    Own,
    Resubscribed,
    ShutdownState,
    Stop,
    Wake,
)
from django_rmq.core.consumer.options import (
    ALONE,
    PLAIN,
    UNWATCHED,
    AssignmentCallbacks,
    WorkerCallbacks,
    WorkerOptions,
)
from django_rmq.core.consumer.progress import SharedProgress
from django_rmq.core.consumer.slots import FencedSlots, SlotSchedule, SlotState, SlotTable
from django_rmq.core.consumer.thread_executor import NO_HOOKS, Hooks
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble

SETTLING_SECONDS = 0.05
"""Seconds between two checks of a burst worker whether its set of slots is final."""


class IdleCheck:
    """Knows when a worker is done. ``owns_all`` returns whether all slots assigned to this worker have been
    put into ``inbox``."""

    def __init__(
        self,
        terms: WorkerOptions,
        hand: InFlight,
        settling: AckQueue,
        places: SlotTable,
        schedule: SlotSchedule,
        owns_all: Callable[[], bool],
        inbox: Mailbox,
    ) -> None:
        self._terms = terms
        self._hand = hand
        self._settling = settling
        self._places = places
        self._schedule = schedule
        self._owns_all = owns_all
        self._inbox = inbox

    def is_over(self) -> bool:
        """Return whether the worker has nothing more to do."""
        return self._is_idle() and ((self._terms.burst and self._burst_is_over()) or self._idle_too_long())

    def due(self, now: float) -> float:
        """Return the monotonic time at which to ask ``is_over`` again."""
        if self._hand.messages:
            return float("inf")
        due = now + SETTLING_SECONDS if self._terms.burst else float("inf")
        idle = self._terms.max_idle_time
        return due if idle is None else min(due, self._hand.last_work + idle)

    def _is_idle(self) -> bool:
        """Whether nothing is in hand, except what Redis refuses to settle."""
        return not self._hand.messages and all(
            place.shut_until and not place.away for place, _ in self._settling.pending
        )

    def _idle_too_long(self) -> bool:
        idle = self._terms.max_idle_time
        if idle is None or any(self._schedule.parked.values()):
            return False
        return time.monotonic() - self._hand.last_work >= idle

    def _burst_is_over(self) -> bool:
        if not self._owns_all():
            return False
        # Items that were put into the inbox until then may not have been read yet.
        self._inbox.hear()
        return self._is_idle() and self._drained()

    def _drained(self) -> bool:
        now = self._schedule.clock.ms()
        return not self._places.is_told_more and all(
            place.due > now or place.blocked_by or place.fenced_at or not place.owned
            for place in self._places.awake.values()
        )


logger = safe_logger("django_rmq.consumer")


class MailboxHandlers:
    """Passes items of ``inbox`` to the parts that handle them. ``on_moved`` is called for topics that may have moved."""

    def __init__(
        self,
        inbox: Mailbox,
        places: SlotTable,
        schedule: SlotSchedule,
        feeding: BatchRouter,
        acquiring: SlotAcquirer,
        polling: DuePoll,
        ending: ShutdownState,
        on_moved: Callable[[str], None] | None,
    ) -> None:
        self._places = places
        self._schedule = schedule
        self._feeding = feeding
        self._acquiring = acquiring
        self._polling = polling
        self._ending = ending
        self._on_moved = on_moved
        inbox.on(BatchReport, feeding.finished)
        inbox.on(Wake, self._woken)
        inbox.on(Own, self._gained)
        inbox.on(Disown, self._lost)
        inbox.on(Resubscribed, self._resubscribed)
        inbox.on(Stop, self._stop)

    def disown(self, place: SlotState) -> None:
        """Take no more from a slot, and give back what has not begun."""
        self._acquiring.disown(place)
        self._feeding.give_back_slot(place)
        self._places.forget(place)

    def _woken(self, item: Wake) -> None:
        if item.slot < 0:
            # The slot was paused: nothing more of what is in hand begins.
            paused = self._places.awake.get((item.topic, -1 - item.slot))
            if paused is not None:
                self._feeding.give_back_slot(paused)
        elif (place := self._places.get(item.topic, item.slot)) is not None:
            place.not_before = 0.0
            self._schedule.ready(place)

    def _gained(self, item: Own) -> None:
        # A worker that is about to leave takes over nothing, because it would fence the worker that does.
        for topic, slots in () if self._ending.begun else item.slots.items():
            self._acquiring.own(topic, slots)

    def _lost(self, item: Disown) -> None:
        for topic, slot in item.slots:
            if (place := self._places.lose(topic, slot)) is not None:
                self.disown(place)

    def _resubscribed(self, item: Resubscribed) -> None:
        # Wake-ups were missed until now, so every slot that rests until one is asked at once.
        self._polling.hurry()
        for place in self._places.awake.values():
            place.not_before = 0.0
        if self._on_moved is not None:
            for name in self._places.topics:
                self._on_moved(name)

    def _stop(self, item: Stop) -> None:
        if not self._ending.begun:
            logger.info("Stopping: running listeners may finish, messages that have not begun are given back")
        self._ending.begun = True


UNCERTAIN_SECONDS = 5.0
"""Seconds for which a stopping worker waits for Redis only to give back what a lost reply may have handed out."""


class Dispatcher:
    """One worker: owned slots, executor threads, an event loop for async listeners, a heartbeat, and the loop that feeds
    them.

    ``listeners`` maps topic names to listeners. ``own`` and ``disown`` set which slots this worker owns; they
    may be called before ``run`` or from another thread. ``run`` returns when ``stop`` was called and
    everything is settled, or, in a burst, when nothing can be taken any more. Threads record in ``notes``
    what they run, for the process that settles it after a sudden death. ``lookout`` watches these threads,
    and those that are added to it.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Iterable[Topic],
        listeners: Mapping[str, ListenerLike],
        terms: WorkerOptions = PLAIN,
        *,
        hooks: Hooks = NO_HOOKS,
        notes: SharedProgress | None = None,
        ownership: AssignmentCallbacks = ALONE,
        watching: WorkerCallbacks = UNWATCHED,
    ) -> None:
        self.owner = owner = uuid4().hex
        self.topics = {topic.name: topic for topic in topics}
        self._terms, self._ownership, self._watching = terms, ownership, watching
        self.lookout, self._complain = Watchdog(), LogThrottle(logger)
        self._ending, self._inbox = ending, inbox = ShutdownState(), Mailbox()
        self._unending = HardTimeouts(inbox, ending, notes)
        count, overlap = max(1, terms.threads), AsyncCapacity(self.topics.values(), listeners)
        self._hand = hand = InFlight(count + bool(overlap))
        self._places = places = SlotTable(self.topics, count, overlap)
        self._companions = BackgroundThreads(broker, self.topics.values(), hand, inbox, self.lookout)
        self._crew = crew = ExecutorPool(count, inbox.queue, hooks, notes, overlap.concurrency)
        self._room = room = Capacity(broker, owner, places, listeners, count, overlap, hand)
        self._schedule = schedule = SlotSchedule(places, room.depth, terms.poll_seconds)
        troubles = SlotErrors(schedule, ending, self._complain, self._companions.renew)
        self._settling = settling = AckQueue(troubles, ending, watching.watcher)
        self._feeding = feeding = BatchRouter(
            broker, crew, hand, room, schedule, settling, ending, watching.took
        )
        self._relief = ThreadReplacer(crew, hand, feeding, places, schedule, self.lookout, inbox)
        recovery = LostReplyRecovery(broker, owner, hand, room, settling, feeding, troubles)
        fences = FencedSlots(broker, owner, ownership.confirmed)
        self._acquiring = acquiring = SlotAcquirer(
            broker, owner, places, schedule, troubles, recovery, fences
        )
        self._polling = polling = DuePoll(broker, places, schedule, troubles, acquiring, terms.poll_seconds)
        self._sweeping = TimeoutReaper(broker, terms.swept, self._complain)
        asking = FetchPlanner(owner, crew, hand, room, schedule, settling, self._complain)
        handed_out, moved = watching.handed_out, ownership.on_moved
        answering = FetchReplies(room, schedule, settling, feeding, acquiring, ending, handed_out, moved)
        self._trips = RoundTrips(broker, settling, asking, answering, room.bytes)
        self._rest = IdleCheck(terms, hand, settling, places, schedule, ownership.settled, inbox)
        self._news = MailboxHandlers(inbox, places, schedule, feeding, acquiring, polling, ending, moved)

    @property
    def processed(self) -> int:
        """The number of deliveries committed or rolled back so far."""
        return self._settling.processed

    @property
    def forced(self) -> bool:
        """Whether the shutdown time-out cut a listener short, or something could not be settled."""
        return self._ending.forced

    @property
    def overran(self) -> bool:
        """Whether a listener exceeded HARD_TIMEOUT, and only the end of the process can end it."""
        return bool(self._ending.overran)

    def full_topics(self, seconds: float) -> frozenset[str]:
        """Return the topics for which all threads, or all that may overlap of their calls, have been taken for so long."""
        return self._feeding.full_topics(seconds)

    def own(self, slots: Iterable[tuple[str, int]]) -> None:
        """Add slots to those that this worker owns."""
        by_topic: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        for topic, slot in slots:
            by_topic[topic].append(slot)
        self._inbox.queue.put(Own(by_topic))

    def disown(self, slots: Iterable[tuple[str, int]]) -> None:
        """Take no more from these slots; messages that have not begun are given back."""
        self._inbox.queue.put(Disown(list(slots)))

    def stop(self) -> None:
        """Take nothing more, let listeners finish, give the rest back. Safe in signal handlers."""
        self._inbox.queue.put(Stop())

    # --- the loop

    def run(self) -> None:
        """Work until stopped."""
        self._crew.start()
        self._companions.start()
        trouble: Exception | None = None
        try:
            self._companions.wait_subscribed(5.0)
            try:
                self._work()
            except Exception as error:
                logger.exception("The dispatcher failed; the worker gives back its messages and ends")
                trouble = error
            self._shut_down()
        finally:
            self._end_threads()
        if trouble is not None:
            raise trouble
        if self._ending.moved is not None:
            raise self._ending.moved

    def _work(self) -> None:
        trouble, most = 0, self._terms.max_messages
        self._inbox.hear()
        while not self._ending.begun and (most is None or self.processed < most):
            self._look()
            self._watching.beat()
            try:
                busy = self._turn()
                if trouble:
                    logger.info("Redis is available again")
                trouble = 0
            except ServerTrouble as error:
                trouble += 1
                self._complain("redis", "Redis is unavailable (%s); trying again", error)
                # What broke this connection may also have broken the subscription without an error.
                self._companions.renew()
                self._pause(min(1.0, 0.02 * 2 ** min(trouble, 6)))
                continue
            if busy:
                self._inbox.hear()
                continue
            if self._rest.is_over():
                return
            self._inbox.read(self._sleep_seconds())

    def _turn(self) -> bool:
        """Do one round trip if there is anything to do; return whether there was."""
        self._schedule.collect_due()
        self._acquiring.return_to_fenced(self._inbox.hear)
        acquires = self._acquire()
        now = time.monotonic()
        if now >= self._polling.due:
            self._polling.poll()
        self._sweeping.sweep(now)
        self._feeding.refresh(now)
        return self._trips.make() or acquires

    def _acquire(self) -> bool:
        """Acquire owned slots that are not acquired; return whether there are more."""
        more = False
        if self._acquiring.unacquired:
            # What is on its way is recorded before Redis is asked what this worker holds.
            self._trips.receive_rest()
            more = self._acquiring.acquire_again()
        if self._places.is_told_more:
            self._acquiring.acquire_told()
        return more or self._places.is_told_more

    def _sleep_seconds(self) -> float:
        now = time.monotonic()
        wake = min(
            self._polling.due,
            self.lookout.due,
            self._schedule.due(now),
            self._room.limits.due(),
            self._feeding.due,
            self._acquiring.due(now),
            self._rest.due(now),
        )
        return max(0.0, wake - now)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._ending.begun:
            self._inbox.read(left)

    def _look(self) -> None:
        """Replace threads that have died, about once a second."""
        if time.monotonic() >= self.lookout.due:
            self._relief.clear_dead()
            self.lookout.look()

    # --- the end

    def _shut_down(self) -> None:
        """Let running listeners end, give back what has not begun, settle everything."""
        self._ending.begun = True
        begun = time.monotonic()
        self._ownership.leaving()
        for place in self._places.lose_all():
            self._news.disown(place)
        while True:
            self._watching.beat()
            self._relief.clear_dead()
            is_refused = self._settle_rest()
            spent = time.monotonic() - begun
            if self._ending.is_over(self._hand.batches.values()):
                is_done = not self._acquiring.unacquired or spent > UNCERTAIN_SECONDS
                if is_done and not self._settling.pending:
                    with contextlib.suppress(RmqError):
                        self._room.limits.leave()
                    return
                if is_refused:
                    break
            if spent >= self._terms.shutdown_timeout:
                break
            self._inbox.read(min(0.1, self._terms.shutdown_timeout - spent))
        batches, unsettled = len(self._hand.batches), len(self._settling.pending)
        if batches or unsettled:
            self._ending.forced = True
            logger.error(
                "Shutdown: %d batches are still running and %d are not settled; their messages will time out",
                batches,
                unsettled,
            )

    def _settle_rest(self) -> bool:
        """Settle what is left; return whether Redis has refused some of it."""
        try:
            self._trips.receive_rest()
            self._acquire()
            trip = self._trips.send(takes=False)
            if trip is None:
                return False
            self._trips.receive(trip)
            return bool(self._settling.pending)
        except ServerTrouble as error:
            self._complain("redis", "Redis is unavailable (%s) during shutdown; trying again", error)
            self._inbox.read(0.1)
            return False

    def _end_threads(self) -> None:
        # rule: leaves_to_others_what_still_runs
        companions = self._companions.stop(keeps_beating=self.overran)
        for batch in self._hand.batches.values():
            batch.halted = batch.dropped = True
        for thread in (*companions, *self._crew.stop()):
            thread.join(2.0)
