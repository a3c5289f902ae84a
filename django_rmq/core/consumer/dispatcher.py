"""The dispatcher: one thread that moves messages between Redis and the executors that call listeners.

Each turn is one round trip: one pipeline acknowledges the deliveries that listeners have ended, and prepares slots
that are due. When nothing is due the dispatcher sleeps until the next due time, a wake-up, a report of a thread, or
the slow poll. This module puts the parts of a worker together and runs the loop; the parts decide what each turn does:
``slots`` when a slot is due, ``fetch_planner`` what is fetched, ``fetch_round_trips`` what an answer means, ``executor_pool``
where a batch runs, ``acks`` how it is settled, ``mailbox`` what ends the sleep, ``due_poll`` what no wake-up announces, and
``shutdown`` how the worker ends. Here are also the options of a worker, and the callbacks by which the layers above follow and
direct it.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import uuid4

from django_rmq.core.commands.ack import BrokerDeliveryControl
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.consumer.acks import AckQueue, SlotErrors, Watcher
from django_rmq.core.consumer.batch import Batch, BatchReport, InFlight, ListenerLike
from django_rmq.core.consumer.batch_run import NO_HOOKS, Hooks
from django_rmq.core.consumer.capacity import AsyncCapacity, Capacity
from django_rmq.core.consumer.due_poll import POLL_SECONDS, DuePoll
from django_rmq.core.consumer.executor_pool import BatchRouter, ExecutorPool, ThreadReplacer
from django_rmq.core.consumer.fetch_planner import FetchPlanner
from django_rmq.core.consumer.fetch_round_trips import FetchReplies, RoundTrips
from django_rmq.core.consumer.heartbeat import BackgroundThreads
from django_rmq.core.consumer.mailbox import (
    Disown,
    HardTimeoutExceeded,
    LimitsChange,
    Mailbox,
    MaxRuntimeExceeded,
    Own,
    Resubscribed,
    ShutdownState,
    Stop,
    SubscriptionLost,
    Wake,
)
from django_rmq.core.consumer.shared_notes import SharedNotes
from django_rmq.core.consumer.shutdown import IdleCheck, Shutdown
from django_rmq.core.consumer.slot_acquisition import FencedSlots, LostReplyRecovery, SlotAcquirer
from django_rmq.core.consumer.slots import ConsumedSlot, SlotSchedule, SlotTable
from django_rmq.core.consumer.watchdog import ThreadWatch
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.bounds import SHUTDOWN_SECONDS
from django_rmq.core.model.keys import read_wakeup
from django_rmq.core.model.replies import Delivery, Pushed
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker. Times are in seconds; None means never."""

    threads: int
    burst: bool = False
    """Whether it ends when no message can be taken."""
    shutdown_timeout: float = SHUTDOWN_SECONDS
    poll_seconds: float = POLL_SECONDS
    max_messages: int | None = None
    max_idle_time: float | None = None


class AssignmentCallbacks(NamedTuple):
    """The callbacks between a worker and the coordinator, which decides which slots are the worker's."""

    settled: Callable[[], bool] = lambda: True
    """Whether all slots assigned to this worker have been announced; no burst ends before that."""
    confirmed: Callable[[], float] = lambda: float("-inf")
    """For ``FencedSlots``: as of when the announced slots are known to be this worker's."""
    leaving: Callable[[], None] = lambda: None
    """Called once, when nothing more will be taken: other workers may have the slots."""
    on_moved: Callable[[str], None] | None = None
    """Called for a topic with a slot that was given another slot count (often, and from the loop, so it must
    be quick); the slot is still worked on. Without it the worker settles what is in flight and raises
    ``SlotMoved``."""


class WorkerCallbacks(NamedTuple):
    """Callbacks that report what a worker does, called in its own thread."""

    beat: Callable[[], None] = lambda: None
    """Called on each turn of the loop."""
    handed_out: Callable[[Topic, Sequence[Delivery], float], None] = lambda topic, deliveries, now_ms: None
    """Called for each prepare that returned messages, with the server's time in ms."""
    took: Callable[[Topic, Sequence[float]], None] = lambda topic, seconds: None
    """Called for calls of a listener, with the seconds that each took."""
    watcher: Watcher | None = None
    """Receives the outcomes of messages."""


ALONE = AssignmentCallbacks()
"""No coordinator: the slots that were announced belong to this worker."""
UNWATCHED = WorkerCallbacks()

logger = safe_logger("django_rmq.consumer")

LATE_SECONDS = 0.1
"""Seconds by which a check of the threads may be late, so that an idle worker wakes once for it and for the slow poll."""


class Dispatcher:
    """One worker: owned slots, executor threads, an event loop for async listeners, a heartbeat, and the loop that fetches
    messages for them.

    ``listeners`` maps topic names to listeners. ``own`` and ``disown`` set which slots this worker owns; they
    may be called before ``run`` or from another thread. ``run`` returns when ``stop`` was called and
    everything is settled, or, in a burst, when no message can be taken. Threads record in ``notes``
    which messages they run, so that the parent can settle these if the process dies. ``thread_watch`` watches
    these threads, and those that are added to it.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Iterable[Topic],
        listeners: Mapping[str, ListenerLike],
        options: WorkerOptions,
        *,
        hooks: Hooks = NO_HOOKS,
        notes: SharedNotes | None = None,
        ownership: AssignmentCallbacks = ALONE,
        callbacks: WorkerCallbacks = UNWATCHED,
    ) -> None:
        self.owner = owner = uuid4().hex
        self.topics = {topic.name: topic for topic in topics}
        self._options, self._ownership, self._callbacks = options, ownership, callbacks
        self.thread_watch, self._complain = ThreadWatch(), LogThrottle(logger)
        self._shutdown, self._mailbox = shutdown, mailbox = ShutdownState(), Mailbox()
        self._has_subscribed = False
        count, async_capacity = max(1, options.threads), AsyncCapacity(self.topics.values(), listeners)
        self._in_flight = in_flight = InFlight(count + bool(async_capacity))
        self._table = table = SlotTable(self.topics, count, async_capacity)
        # A burst ends when nothing can be taken, so it sleeps in no slot.
        inbox = b"" if options.burst else broker.inbox(owner)
        self._background = BackgroundThreads(
            broker, [*self.topics.values()], in_flight, mailbox, self.thread_watch, inbox
        )
        self._pool = pool = ExecutorPool(count, mailbox, hooks, notes, async_capacity.concurrency)
        self._capacity = capacity = Capacity(
            broker, owner, table, listeners, count, async_capacity, in_flight, inbox
        )
        self._schedule = schedule = SlotSchedule(
            table, capacity.depth, options.poll_seconds, asks_always=options.burst
        )
        slot_errors = SlotErrors(schedule, shutdown, self._complain, self._background.renew)
        self._acks = acks = AckQueue(slot_errors, shutdown, callbacks.watcher, capacity.commit_delay)
        self._router = router = BatchRouter(
            BrokerDeliveryControl(broker), pool, in_flight, capacity, schedule, acks, shutdown, callbacks.took
        )
        self._replacer = replacer = ThreadReplacer(
            pool, in_flight, router, table, schedule, self.thread_watch, mailbox
        )
        recovery = LostReplyRecovery(broker, owner, in_flight, capacity, acks, router, slot_errors)
        fenced_slots = FencedSlots(broker, owner, ownership.confirmed)
        self._acquirer = acquirer = SlotAcquirer(
            broker, owner, table, schedule, slot_errors, recovery, fenced_slots
        )
        self._due_poll = DuePoll(
            broker, table, schedule, slot_errors, acquirer, capacity, options.poll_seconds
        )
        self._planner = FetchPlanner(owner, pool, in_flight, capacity, schedule, acks, self._complain)
        replies = FetchReplies(
            capacity,
            in_flight,
            schedule,
            acks,
            router,
            acquirer,
            shutdown,
            handed_out=callbacks.handed_out,
            on_moved=ownership.on_moved,
        )
        self._round_trips = RoundTrips(broker, acks, self._planner, replies, capacity)
        self._idle_check = IdleCheck(
            in_flight,
            acks,
            table,
            schedule,
            mailbox,
            ownership.settled,
            is_burst=options.burst,
            max_idle_time=options.max_idle_time,
        )
        self._ending = Shutdown(
            shutdown,
            mailbox,
            in_flight,
            acks,
            self._round_trips,
            acquirer,
            self._keep_alive,
            options.shutdown_timeout,
            notes,
        )
        mailbox.on(BatchReport, router.finished)
        mailbox.on(Pushed, replies.pushed)
        mailbox.on(LimitsChange, capacity.change_limits)
        mailbox.on(MaxRuntimeExceeded, replacer.replace_hung_thread)
        mailbox.on(HardTimeoutExceeded, self._ending.begin_after_hard_timeout)
        mailbox.on(Wake, self._wake)
        mailbox.on(Own, self._own_slots)
        mailbox.on(Disown, self._disown_slots)
        mailbox.on(Resubscribed, self._resubscribe)
        mailbox.on(SubscriptionLost, self._lose_subscription)
        mailbox.on(Stop, self._begin_stop)

    @property
    def processed(self) -> int:
        """The number of deliveries so far whose commit or rollback Redis has answered, even if they had ended before."""
        return self._acks.processed

    @property
    def forced(self) -> bool:
        """Whether the shutdown time-out cut a listener short, or something could not be settled."""
        return self._shutdown.forced

    @property
    def exceeded_hard_timeout(self) -> bool:
        """Whether a listener exceeded HARD_TIMEOUT, and only the end of the process can end it."""
        return bool(self._shutdown.past_hard_timeout)

    def batches(self) -> list[Batch]:
        """Return the batches that this worker has at this moment. Other threads may ask."""
        return list(self._in_flight.batches.values())

    def full_topics(self, seconds: float) -> frozenset[str]:
        """Return the topics whose listeners have had no free thread or place in the event loop for this many seconds."""
        return self._router.full_topics(seconds)

    def own(self, slots: Iterable[tuple[str, int]]) -> None:
        """Add slots to those that this worker owns."""
        by_topic: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        for topic, number in slots:
            by_topic[topic].append(number)
        self._mailbox.put(Own(by_topic))

    def disown(self, slots: Iterable[tuple[str, int]]) -> None:
        """Take no more from these slots; messages that have not begun are given back."""
        self._mailbox.put(Disown(list(slots)))

    def change_limits(self, topics: Iterable[Topic]) -> None:
        """Apply the MAX_RATE and MAX_IN_FLIGHT of these topics from now on."""
        self._mailbox.put(LimitsChange(list(topics)))

    def stop(self) -> None:
        """Take no more messages, let listeners finish, and give the other messages back. Safe in signal handlers."""
        self._mailbox.put(Stop())

    # --- the loop

    def run(self) -> None:
        """Work until stopped."""
        self._pool.start()
        self._background.start()
        trouble: Exception | None = None
        try:
            self._background.wait_subscribed(5.0)
            try:
                self._work()
            except Exception as error:
                # The worker stops as on request, so that other workers need not wait for the time-outs of its messages.
                logger.exception("The dispatcher failed; the worker gives back its messages and ends")
                trouble = error
            self._shut_down()
        finally:
            self._end_threads()
        if trouble is not None:
            raise trouble
        if self._shutdown.moved is not None:
            raise self._shutdown.moved

    def _work(self) -> None:
        trouble, most = 0, self._options.max_messages
        self._mailbox.process_items()
        while not self._shutdown.begun and (most is None or self.processed < most):
            self._look()
            self._callbacks.beat()
            try:
                busy = self._turn()
                if trouble:
                    logger.info("Redis is available again")
                trouble = 0
            except ServerTrouble as error:
                trouble += 1
                self._complain("redis", "Redis is unavailable (%s); trying again", error)
                # The same failure may have broken the subscription, whose connection then shows no error.
                self._background.renew()
                self._pause(min(1.0, 0.02 * 2 ** min(trouble, 6)))
                continue
            if busy and self._has_more():
                self._mailbox.process_items()
                continue
            if self._idle_check.is_over():
                return
            self._sleep()

    def _has_more(self) -> bool:
        """Return whether another turn has something to do that has no time of its own."""
        return bool(
            self._planner.is_due
            or self._round_trips.is_awaited
            or self._acquirer.unacquired
            or self._acquirer.fenced_slots
            or self._table.has_unacquired
        )

    def _sleep(self) -> None:
        """Wait until something is due or comes."""
        if not (deferral := self._router.deferral()):
            self._mailbox.read(self._sleep_seconds())
            # A turn now would keep the thread of a message that was pushed from beginning: it needs the interpreter's lock.
            if not (deferral := self._router.deferral()):
                return
        # The next message usually comes before the commit of this one is due. Then one waking serves both.
        self._mailbox.read(min(self._sleep_seconds(), deferral), defers_reports=True)
        # The commits have waited for a fetch by now.
        self._acks.hurry()

    def _turn(self) -> bool:
        """Do one round trip if there is anything to do; return whether there was."""
        self._schedule.collect_due()
        self._acquirer.return_to_fenced(self._mailbox.process_items)
        acquires = self._acquire()
        now = time.monotonic()
        if now >= self._due_poll.due:
            self._due_poll.poll()
        self._router.refresh(now)
        return self._round_trips.make() or acquires

    def _acquire(self) -> bool:
        """Acquire owned slots that are not acquired; return whether there are more."""
        more = False
        if self._acquirer.unacquired:
            # The trip under way may return deliveries. Recorded too late, they would look like those of a lost reply.
            self._round_trips.receive_rest()
            more = self._acquirer.acquire_again()
        if self._table.has_unacquired:
            self._acquirer.acquire_assigned()
        return more or self._table.has_unacquired

    def _sleep_seconds(self) -> float:
        now = time.monotonic()
        wake = min(
            self._due_poll.due,
            self._acks.due,
            self._round_trips.answer_due,
            self.thread_watch.due + LATE_SECONDS,
            self._schedule.due(now),
            self._capacity.limits.due(),
            self._router.due,
            self._acquirer.due(now),
            self._idle_check.due(now),
        )
        return max(0.0, wake - now)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._shutdown.begun:
            self._mailbox.read(left)

    def _look(self) -> None:
        """Replace threads that have died or hang, and a subscription whose connection is dead, about once a second."""
        if time.monotonic() >= self.thread_watch.due:
            self._replacer.clear_dead()
            self.thread_watch.look()
            self._mailbox.check_wakeups()

    # --- what the mailbox brings

    def _wake(self, item: Wake) -> None:
        what, number = read_wakeup(item.number)
        if what == "look_again":
            self._background.look_again(item.topic, number)
        elif what == "paused":
            # Messages that this worker holds and has not begun are given back.
            paused = self._table.awake.get((item.topic, number))
            if paused is not None:
                self._router.give_back_slot(paused)
        elif (slot := self._table.get(item.topic, number)) is not None:
            self._schedule.wake(slot)

    def _own_slots(self, item: Own) -> None:
        # A worker that is about to leave takes over nothing, because it would fence the worker that does.
        for topic, slots in () if self._shutdown.begun else item.slots.items():
            self._acquirer.own(topic, slots)

    def _disown_slots(self, item: Disown) -> None:
        for topic, number in item.slots:
            if (slot := self._table.lose(topic, number)) is not None:
                self._disown(slot)

    def _disown(self, slot: ConsumedSlot) -> None:
        """Take no more from a slot, and give back its messages that have not begun."""
        self._acquirer.disown(slot)
        self._router.give_back_slot(slot)
        self._table.forget(slot)

    def _resubscribe(self, item: Resubscribed) -> None:
        if item.wakeups is not None:
            self._mailbox.listen(item.wakeups)
        # Wake-ups were missed until now, so every slot that rests until one is asked at once.
        self._due_poll.hurry(lost_pushes=self._has_subscribed)
        self._has_subscribed = self._capacity.is_subscribed = True
        self._schedule.end_rests()
        if (on_moved := self._ownership.on_moved) is not None:
            for name in self._table.topics:
                on_moved(name)

    def _lose_subscription(self, item: SubscriptionLost) -> None:
        self._capacity.is_subscribed = False
        self._background.renew()

    def _begin_stop(self, item: Stop) -> None:
        if not self._shutdown.begun:
            logger.info("Stopping: running listeners may finish, messages that have not begun are given back")
        self._shutdown.begun = True

    # --- the end

    def _keep_alive(self) -> None:
        self._callbacks.beat()
        self._replacer.clear_dead()

    def _shut_down(self) -> None:
        """Let running listeners end, give back messages that have not begun, and settle everything."""
        self._shutdown.begun = True
        begun = time.monotonic()
        self._mailbox.stop_pushes()
        self._ownership.leaving()
        for slot in self._table.lose_all():
            self._disown(slot)
        if self._ending.settle(begun):
            # If Redis does not answer, the permits end with their lease.
            with contextlib.suppress(RmqError):
                self._capacity.limits.leave()

    def _end_threads(self) -> None:
        self._mailbox.stop_listening()
        # A listener that exceeded HARD_TIMEOUT runs until the process ends. Until then its message must not go to another
        # worker.
        # rule: leaves_to_others_what_still_runs
        background = self._background.stop(keeps_beating=self.exceeded_hard_timeout)
        for batch in self._in_flight.batches.values():
            # The shutdown time-out is over. A listener that returns from now on must not begin another message.
            batch.halted = batch.dropped = True
        # A thread may hang in a call to a server; it is a daemon and ends with the process.
        for thread in (*background, *self._pool.stop()):
            thread.join(2.0)
