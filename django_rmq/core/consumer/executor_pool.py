"""The executors of a worker: batches are passed to them, their reports are processed, and unbegun messages given back.

An executor (``batch.Executor``) is a thread, or the event loop (``async_executor``). A thread that died or hangs gets a
successor. Which batch an executor runs next is decided by ``run_order``, and how it runs it by ``batch_run``.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from django_rmq.core.clock import uptime
from django_rmq.core.consumer.acks import AckQueue
from django_rmq.core.consumer.async_executor import AsyncExecutor
from django_rmq.core.consumer.batch import Batch, BatchReport, Executor, InFlight, ReportQueue
from django_rmq.core.consumer.batch_run import (
    FLUSH_SECONDS,
    BatchRun,
    Hooks,
    call_group,
    call_one,
    report_failed_run,
)
from django_rmq.core.consumer.capacity import Capacity
from django_rmq.core.consumer.mailbox import Mailbox, MaxRuntimeExceeded, ShutdownState
from django_rmq.core.consumer.run_order import Suspects, TurnQueue
from django_rmq.core.consumer.shared_notes import SPARE, SharedNotes, ThreadNotes
from django_rmq.core.consumer.slots import ConsumedSlot, FetchState, SlotSchedule, SlotTable
from django_rmq.core.consumer.watchdog import ThreadWatch, stack_of_thread
from django_rmq.core.log import safe_logger
from django_rmq.core.model.delivered_message import DeliveryControl, Message
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic

logger = safe_logger("django_rmq.consumer")


class ExecutorThread(Executor):
    """Runs batches one after the other."""

    def __init__(
        self, index: int, mailbox: ReportQueue, hooks: Hooks, marks: ThreadNotes | None = None
    ) -> None:
        super().__init__(f"rmq-executor-{index}", index, marks)
        self.current: Batch | None = None
        self._mailbox = mailbox
        self._hooks = hooks
        self._queue = TurnQueue()
        self._changing = threading.Lock()
        """Held while the queue changes."""
        self._calls: SimpleQueue[None] = SimpleQueue()
        """One entry for each batch that was put, and one for the stop."""
        self._stopping = False

    def batches(self) -> list[Batch]:
        current = self.current
        return [] if current is None else [current]

    def gives_up_on(self, batch: Batch) -> bool:
        self.hangs = self.hangs or self.current is batch
        return self.current is batch

    def stack_of(self, batch: Batch) -> str:
        return stack_of_thread(self)

    def look(self) -> None:
        """Do nothing: only an event loop can keep other listeners waiting."""

    def put(self, batch: Batch) -> None:
        with self._changing:
            batch.thread = self
            self._queue.add(batch)
        self._calls.put(None)

    def withdraw(self, batch: Batch) -> bool:
        with self._changing:
            return self._queue.remove(batch)

    def stop(self) -> None:
        self._stopping = True
        self._calls.put(None)

    def _next(self) -> Batch | None:
        while True:
            self._calls.get()
            with self._changing:
                # It has a successor, because its listener exceeded MAX_RUNTIME and returned only now.
                if self.hangs:
                    return None
                self.current = self._queue.take()
            # Without a batch or the stop, the batch of this call was withdrawn.
            if self.current is not None or self._stopping:
                return self.current

    def run(self) -> None:
        try:
            while (batch := self._next()) is not None:
                self._run_batch(batch)
        finally:
            self._surround(self._hooks.end)

    def _surround(self, hook: Callable[[], None]) -> None:
        """Run a hook. If it fails, the listeners run all the same, and fail by themselves if they depend on it."""
        try:
            hook()
        except Exception:
            logger.exception("A hook around the listeners failed")

    def _around(self, batch: Batch) -> Callable[[Any], object]:
        try:
            return self._hooks.around(batch.topic, batch.listener.function)
        except Exception:
            logger.exception("A hook around the listeners failed")
            return batch.listener.function

    def _run_batch(self, batch: Batch) -> None:
        try:
            self._surround(self._hooks.before)
            self._call_listener(batch)
        except BaseException:
            # This comes first: while the dispatcher waits for this report, the batch is extended.
            report_failed_run(batch, self._mailbox)  # rule: does_not_report_what_it_failed_at
            logger.exception(
                "An executor thread failed outside a listener; the messages that it had begun will time out"
            )
        finally:
            batch.call_began_at = None
            try:
                self._surround(self._hooks.after)
            finally:
                self.current = None

    def _call_listener(self, batch: Batch) -> None:
        """Call the listener for the messages that may begin."""
        function, is_of_lists = self._around(batch), batch.listener.batch_size is not None
        # The outcomes of a list are reported at once, because the next list may take long.
        flush_seconds = 0.0 if is_of_lists else FLUSH_SECONDS
        after_failure = partial(self._surround, self._hooks.after)
        run = BatchRun(batch, self.marks, self._mailbox, flush_seconds, after_failure)
        if is_of_lists:
            lists, outcomes = run.list_calls(), None
            while group := lists.send(outcomes):
                outcomes = call_group(function, group)
            return
        singles, failure = run.single_calls(), None
        while (message := singles.send(failure)) is not None:
            failure = call_one(function, message, message)


class ExecutorPool:
    """``count`` executor threads, and behind them the event loop if any topic has a ``concurrency``.

    Each records the progress of its messages in its own part of ``notes``.
    """

    def __init__(
        self,
        count: int,
        mailbox: ReportQueue,
        hooks: Hooks,
        notes: SharedNotes | None,
        concurrency: Mapping[str, int] | None = None,
    ) -> None:
        self._count = count
        self._mailbox = mailbox
        self._hooks = hooks
        self._notes = notes
        self._concurrency = concurrency or {}
        members = range(count + bool(concurrency))
        self.threads = [self._new(i, None if notes is None else notes.thread(i)) for i in members]
        self._unused = iter(range(len(members), count + SPARE))
        self._free: list[ThreadNotes] = []
        """The marks of threads that hung and have ended."""
        self._hanging: list[Executor] = []

    def _new(self, index: int, marks: ThreadNotes | None) -> Executor:
        if index < self._count:
            return ExecutorThread(index, self._mailbox, self._hooks, marks)
        return AsyncExecutor(index, self._mailbox, self._hooks, marks, self._concurrency)

    def start(self) -> None:
        """Start all threads."""
        for thread in self.threads:
            thread.start()

    def stop(self) -> list[Executor]:
        """Make all threads end when their queues are empty; return the threads that run nothing."""
        for thread in self.threads:
            thread.stop()
        return [thread for thread in self.threads if not thread.batches()]

    def current_batches(self) -> list[Batch]:
        """Return the batch of the call that each executor thread runs."""
        members = (thread for thread in self.threads if isinstance(thread, ExecutorThread))
        return [batch for thread in members if (batch := thread.current) is not None]

    def blocked_seconds(self) -> float:
        """Return for how long something has blocked the event loop, or 0."""
        last = self.threads[-1]
        return last.blocked_seconds() if isinstance(last, AsyncExecutor) else 0.0

    def has_live_thread(self, index: int) -> bool:
        """Return whether a live thread has this index."""
        thread = self.threads[index]
        thread.look()
        return not (thread.hangs or thread.is_dead)

    def replace_thread(self, index: int) -> None:
        """Start another thread in place of one that is dead or hangs.

        Raises ``RuntimeError`` or ``MemoryError`` if no thread can be started, or too many hang already.
        """
        before = self.threads[index]
        lives = not before.is_dead
        # A thread that hangs may still write into its own marks, so its successor needs others.
        marks = self._spare_marks() if lives else before.marks  # rule: successors_share_marks
        fresh = self._new(index, marks)
        try:
            fresh.start()
        except BaseException:
            if lives and marks is not None:
                # No thread could be started. The thread watch tries again, and uses the same marks.
                self._free.append(marks)
            raise
        self.threads[index] = fresh
        # If the listener returns after all, its thread ends: the successor has its place.
        before.stop()
        if lives:
            self._hanging.append(before)

    def _spare_marks(self) -> ThreadNotes | None:
        if self._notes is None:
            return None
        if self._free:
            return self._free.pop()
        index = next(self._unused, None)
        if index is None:
            running = len(self._hanging)
            raise RuntimeError(f"{running} listeners that exceeded MAX_RUNTIME are still running")
        return self._notes.thread(index)

    def free_marks(self) -> None:
        """Free the marks of the threads that hung and have since ended."""
        for hung in [hung for hung in self._hanging if hung.is_dead]:
            self._hanging.remove(hung)
            if hung.marks is not None:
                # A thread that has ended writes no more, so a later successor may use its marks.
                self._free.append(hung.marks)


@dataclass(eq=False)
class ThreadReplacer:
    """Replaces threads of ``pool`` that ``thread_watch`` finds dead or hung, and gives back what they have not begun."""

    pool: ExecutorPool
    in_flight: InFlight
    router: BatchRouter
    table: SlotTable
    schedule: SlotSchedule
    thread_watch: ThreadWatch
    mailbox: Mailbox

    def __post_init__(self) -> None:
        for i, thread in enumerate(self.pool.threads):
            name = thread.name.removeprefix("rmq-").replace("-", " ")
            is_alive, replace = partial(self.pool.has_live_thread, i), partial(self._replace_thread, i)
            self.thread_watch.add(name, is_alive, replace)

    def clear_dead(self) -> None:
        """Forget batches whose thread is dead: messages that have not begun are given back, the others time out."""
        dead = [batch for batch in self.in_flight.batches.values() if batch.thread and batch.thread.is_dead]
        self.pool.free_marks()
        if dead:
            # A dead thread reports nothing more, so all of its reports are in the mailbox; the outcomes in them count.
            self.mailbox.process_items()
        for batch in dead:
            if batch in self.in_flight:
                self.router.give_back(batch)  # rule: keeps_what_a_dead_thread_had
                # rule: keeps_what_a_dead_thread_had
                self.router.finished(BatchReport(batch, [], [], [], 0.0, True))

    def replace_hung_thread(self, item: MaxRuntimeExceeded) -> None:
        """Give the other slots of a hung thread to another one. Its own slot stays blocked in this process."""
        batch = item.batch
        self.router.give_back(batch)
        self.router.cleared(batch)
        thread = batch.thread
        # The listener may have returned, or its thread been replaced, since the heartbeat put this item into the mailbox.
        if thread is None or batch not in thread.batches():
            return
        # A coroutine that waits keeps only its own slot from working.
        if not thread.gives_up_on(batch):
            self._block(batch)
            return
        # While the event loop is blocked, none of its calls makes progress.
        for running in thread.batches():  # rule: leaves_slots_of_a_blocked_loop_open
            self._block(running)
        # The thread watch looks in the next turn instead of within a second, so that the thread's other slots do not wait.
        self.thread_watch.due = 0.0

    def _block(self, batch: Batch) -> None:
        """Take nothing from the slot of a batch until it ends."""
        slot = batch.slot
        # A thread knows a batch for a moment longer than the dispatcher. If it has ended, nothing would unblock its slot.
        if slot.topic.serial and batch in self.in_flight:  # rule: blocks_for_what_has_ended
            self.table.block(slot, batch)
            self.schedule.waiting.pop(slot, None)
            self.router.give_back_slot(slot)

    def _replace_thread(self, index: int) -> None:
        """Give back the batches of a dead or hung thread, and replace it. Raises what ``replace_thread`` does."""
        thread = self.pool.threads[index]
        self.clear_dead()
        for batch in [batch for batch in self.in_flight.batches.values() if batch.thread is thread]:
            self.router.give_back(batch)
            batch.cost = 0.0
        # From now on this is the load of the successor, and what has not ended is no part of it.
        self.in_flight.load[index] = 0.0
        self.pool.replace_thread(index)


REFRESH_SECONDS = 1.0
"""Seconds for which delivered messages wait for their executor. After that they are given back, so that they count as due
and other workers can take them; this worker takes them again when a thread is free."""

REFRESHED = 128
"""The maximum number of batches given back at once that will be taken again soon."""

SUSPECT_REST_SECONDS = 5.0
"""Seconds until a suspect is taken again that would have had to wait for another one."""


@dataclass(eq=False)
class BatchRouter:
    """Passes batches to the executors of ``pool``, and processes their reports.

    ``took`` is called with the seconds that each call of a listener took.
    """

    delivery_control: DeliveryControl
    pool: ExecutorPool
    in_flight: InFlight
    capacity: Capacity
    schedule: SlotSchedule
    acks: AckQueue
    shutdown: ShutdownState
    took: Callable[[Topic, Sequence[float]], None]
    suspects: Suspects = field(default_factory=Suspects)
    _next_refresh: float = 0.0

    # --- to the threads

    def start(
        self,
        slot: ConsumedSlot,
        receipt: int,
        deliveries: Sequence[Delivery],
        at: float,
        size: int,
        *,
        is_suspect: bool = False,
        timeout: int | None = None,
    ) -> None:
        """Pass ``size`` bytes of messages to a thread, unless they have to wait for another suspect.

        Redis delivered them in answer to a call that was sent ``at``. ``timeout``: their own, if it is shorter than the topic's.
        """
        if slot.blocked_by:  # rule: starts_in_a_blocked_slot
            # The slot was blocked while the answer was under way: nothing runs beside a listener that does not return.
            self.acks.release(slot, receipt, [delivery.member for delivery in deliveries])
            return
        messages = [
            Message(slot.topic, slot.number, receipt, each, self.delivery_control) for each in deliveries
        ]
        batch = Batch(slot, self.capacity.listeners[slot.topic.name], receipt, messages, at)
        batch.size = size
        if timeout is not None:
            batch.timeout = timeout
        thread = self.capacity.thread_for(slot, self.in_flight.load)
        self.in_flight.add(batch)
        self.capacity.started(batch)
        if not is_suspect or self.suspects.add(batch):
            self._put(batch, thread)

    def _put(self, batch: Batch, thread: int) -> None:
        topic = batch.topic.name
        if topic not in self.capacity.async_capacity:
            batch.cost = len(batch.messages) * self.capacity.seconds_per_message[topic]
            self.in_flight.load[thread] += batch.cost
            if self.capacity.flow_threads is not None:
                self.capacity.flow_threads.started(id(batch), topic, thread)
        self.pool.threads[thread].put(batch)

    def cleared(self, batch: Batch) -> None:
        """Run the suspects that waited for this one."""
        for follower in self.suspects.remove(batch):
            # A stopping worker begins nothing more: it gives back the suspects that wait.
            if not self.shutdown.begun:
                self._put(follower, self.capacity.thread_for(follower.slot, self.in_flight.load))

    # --- from the threads

    def finished(self, report: BatchReport) -> None:
        """Process an executor's report: queue its acknowledgements, and make the slot ready if the batch has ended."""
        batch = report.batch
        slot = batch.slot
        released = report.released
        # The report may be late: the dispatcher has given these members back itself, or this worker no longer holds them.
        if released and (batch.cut or batch.stale):
            released = [m for m in released if m not in batch.cut and m not in batch.stale]
        self.acks.note(report, released)
        if report.times:
            self.took(slot.topic, report.times)
        done = len(report.committed) + len(report.failures)
        if done:
            self.in_flight.last_work = now = time.monotonic()
            self.capacity.reported(slot.topic.name, report.seconds, done, now)
        if report.last and self.in_flight.remove(batch):
            self._ended(batch, slot)
            if released and slot.topic.is_priority:
                # The batch took longer than estimated, so the batches behind it were taken too early as
                # well.
                self.give_back_slot(slot, drops=False)
            self.schedule.batch_ended(slot)
            self.capacity.table.forget(slot)

    def deferral(self) -> float:
        """Return for how many seconds the report of the batch in flight may wait; 0 if it must be processed at once.

        It may wait if it is the only one, and new, and nothing but its commit depends on its report. Redis wakes this worker for
        whatever its slot gets next, and no other slot waits.
        """
        if len(self.in_flight.batches) != 1 or self.schedule.waiting or self.schedule.asks_always:
            return 0.0
        (batch,) = self.in_flight.batches.values()
        # A call that takes longer is reported at once, so that the dispatcher need not look again and again.
        delay = self.capacity.commit_delay(batch.topic.name)
        is_new = uptime() - batch.queued < delay
        is_quiet = batch.topic.serial and batch.slot.sleeping_until is not None
        may_wait = is_new and is_quiet and not self.capacity.is_limited and not self.shutdown.begun
        return delay if may_wait else 0.0

    def _ended(self, batch: Batch, slot: ConsumedSlot) -> None:
        self.capacity.ended(batch)
        # The listener that exceeded MAX_RUNTIME has returned, or its thread has ended.
        if slot.blocked_by is batch:
            self.capacity.table.unblock(slot)
        self.cleared(batch)

    # --- messages that are given back

    def give_back_slot(self, slot: ConsumedSlot, *, drops: bool = True) -> None:
        """Give back all messages of a slot that have not begun, and those that a prepare under way returns."""
        if slot.fetch is FetchState.UNDER_WAY:
            slot.change_fetch(FetchState.RECALLED)
        for batch in self.in_flight.of(slot):
            self.give_back(batch, drops=drops)

    def give_back(self, batch: Batch, *, drops: bool = True) -> None:
        """Begin no more messages of a batch, and release those that have not begun, whatever its thread is doing.

        Unless the batch is dropped (``drops``), its thread settles one by one the messages of a list that
        failed.
        """
        if batch not in self.in_flight:  # rule: gives_back_what_has_ended
            return  # it has ended, and all of it was given back
        batch.halted, batch.dropped = True, batch.dropped or drops
        # A suspect without a thread waits for another one. One whose thread was given up runs.
        if batch.thread is None or batch.thread.withdraw(batch):  # rule: gives_back_suspects_that_run
            self.finished(BatchReport(batch, [], [], members_of(batch.messages), 0.0, True))
            return
        # ``halted`` was set before ``begun`` is read, and the thread does the reverse, so it begins none of these messages.
        rest = members_of(batch.messages[batch.begun :])
        released = [member for member in rest if member not in batch.cut and member not in batch.stale]
        if released:
            batch.cut |= frozenset(released)
            self.acks.release(batch.slot, batch.receipt, released)

    @property
    def due(self) -> float:
        """The monotonic time of the next ``refresh``."""
        return self._next_refresh if self.in_flight.messages else float("inf")

    def refresh(self, now: float) -> None:
        """Give back messages that have waited long for their thread, if it is time to.

        Meanwhile a higher priority may have arrived in the slot, or another thread or worker may be free.
        """
        if now < self._next_refresh:
            return
        self._next_refresh = now + REFRESH_SECONDS
        self.in_flight.estimate(self.pool.current_batches(), self.pool.blocked_seconds())
        self.capacity.note_slow(self.in_flight.slow())
        before = uptime() - REFRESH_SECONDS
        late = [
            batch
            for batch in self.in_flight.batches.values()
            if batch.queued < before and not batch.halted and batch.begun < len(batch.messages)
        ]
        again = 0
        for batch in late:
            if batch.thread is None:
                # Otherwise the suspect would be taken again at once, and wait again.
                self.schedule.rest_until(batch.slot, now + SUSPECT_REST_SECONDS)
            elif not self._keeps_waiting(batch):
                again += 1
            if again <= REFRESHED:
                self.give_back(batch, drops=False)  # rule: stops_lists_that_it_refreshes

    def full_topics(self, seconds: float) -> frozenset[str]:
        """Return the topics whose listeners have had no free thread or place in the event loop for ``seconds``."""
        capacity, in_flight = self.capacity, self.in_flight
        full = set[str]()
        if min(in_flight.ran[: capacity.threads]) >= seconds:
            full = {name for name in self.capacity.table.topics if name not in capacity.async_capacity}
        if capacity.async_capacity:
            is_blocked = in_flight.ran[capacity.threads] >= seconds
            running = Counter(batch.topic.name for batch in in_flight.slow(seconds))
            full |= {
                name
                for name in capacity.async_capacity.concurrency
                if is_blocked or running[name] >= capacity.async_capacity.most(name)
            }
        return frozenset(full)

    def _keeps_waiting(self, batch: Batch) -> bool:
        """Return whether a batch waits for a call that does not end soon, so that its messages are not taken again at once."""
        thread = batch.thread
        is_stuck = thread is not None and (thread.hangs or self.in_flight.is_taken(thread.index))
        return is_stuck or batch.topic.name in self.capacity.async_capacity


def members_of(messages: Sequence[Message]) -> list[bytes]:
    """Return the members of messages."""
    return [message.delivery.member for message in messages]
