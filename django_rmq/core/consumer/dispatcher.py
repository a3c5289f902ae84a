"""The loop: one thread that moves messages between Redis and the threads that run listeners.

Each turn is one round trip: one pipeline commits or rolls back what listeners finished, and prepares slots
that are due. When nothing is due the loop sleeps until the next due time, a wake-up, a report of a thread, or
the slow poll. The slow poll is one ``heads`` per 1,024 slots and second, and at most four.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from uuid import uuid4

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.consumer.acks import AckQueue
from django_rmq.core.consumer.acquisition import SlotAcquirer
from django_rmq.core.consumer.async_capacity import AsyncCapacity
from django_rmq.core.consumer.background_threads import BackgroundThreads
from django_rmq.core.consumer.batch import ListenerLike
from django_rmq.core.consumer.batch_router import BatchRouter
from django_rmq.core.consumer.capacity import Capacity
from django_rmq.core.consumer.due_poll import DuePoll
from django_rmq.core.consumer.executor_pool import ExecutorPool
from django_rmq.core.consumer.fenced_slots import FencedSlots
from django_rmq.core.consumer.fetch import FetchPlanner
from django_rmq.core.consumer.fetch_replies import FetchReplies
from django_rmq.core.consumer.hard_timeouts import HardTimeouts
from django_rmq.core.consumer.idle_check import IdleCheck
from django_rmq.core.consumer.in_flight import InFlight
from django_rmq.core.consumer.lost_reply_recovery import LostReplyRecovery
from django_rmq.core.consumer.mailbox import (
    Disown,
    Mailbox,
    Own,
    Stop,
)
from django_rmq.core.consumer.mailbox_handlers import MailboxHandlers
from django_rmq.core.consumer.options import (
    ALONE,
    PLAIN,
    UNWATCHED,
    AssignmentCallbacks,
    WorkerCallbacks,
    WorkerOptions,
)
from django_rmq.core.consumer.progress import SharedProgress
from django_rmq.core.consumer.round_trips import RoundTrips
from django_rmq.core.consumer.shutdown import ShutdownState
from django_rmq.core.consumer.slot_errors import SlotErrors
from django_rmq.core.consumer.slot_schedule import SlotSchedule
from django_rmq.core.consumer.slots import SlotTable
from django_rmq.core.consumer.thread_executor import NO_HOOKS, Hooks
from django_rmq.core.consumer.thread_replacement import ThreadReplacer
from django_rmq.core.consumer.timeout_reaper import TimeoutReaper
from django_rmq.core.consumer.watchdog import Watchdog
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble

logger = safe_logger("django_rmq.consumer")

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


__all__ = ["Dispatcher"]
