"""The executor threads: each runs batches one after the other and reports the outcomes of their messages.

A thread decides before each call whether its messages may still begin. The call itself is the part of ``invoke``, and a
thread that hangs is replaced by ``executor_pool``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from django_rmq.core.consumer import failures, invoke
from django_rmq.core.consumer.batch import Batch, BatchReport, BatchResults
from django_rmq.core.consumer.heartbeat import stack_of_thread
from django_rmq.core.consumer.invoke import call_group, call_one, groups, holds, noted, states_after
from django_rmq.core.consumer.progress import BEGUN, DONE, ThreadProgress
from django_rmq.core.consumer.slot_schedule import uptime
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.model.message import Message
from django_rmq.core.model.topic import Topic

logger = safe_logger("django_rmq.consumer")

FLUSH_SECONDS = 0.1
"""Seconds that results of a running batch may wait before they are reported."""

PATIENCE_SECONDS = 0.2
"""Seconds for which a thread keeps the rest of a batch when something better may turn up: a higher priority,
or another thread that is free."""


class Hooks(NamedTuple):
    """Hooks around listeners; the Django layer closes database connections here."""

    before: Callable[[], None] = lambda: None
    """Called before a thread begins a batch."""
    after: Callable[[], None] = lambda: None
    """Called after a batch, and after each failure in it."""
    end: Callable[[], None] = lambda: None
    """Called when a thread ends."""
    around: Callable[[Topic, Callable[[Any], Any]], Callable[[Any], object]] = lambda topic, function: (
        function
    )
    """Called once per batch; returns the function that is called in the listener's place with its argument,
    and calls it."""
    overlapping: Callable[[Topic, Callable[[Any], Awaitable[Any]]], Callable[[Any], Awaitable[Any]]] = (
        lambda topic, function: function
    )
    """The same for a listener that is a coroutine function. The function that it returns is awaited in the event loop."""
    loop_end: Callable[[], None] = lambda: None
    """Called when the event loop has ended."""


NO_HOOKS = Hooks()


class ExecutorThread(threading.Thread):
    """Runs batches one after the other: topics in turn, and the highest head first among priorities."""

    def __init__(
        self, index: int, mailbox: SimpleQueue[Any], hooks: Hooks, marks: ThreadProgress | None = None
    ) -> None:
        super().__init__(name=f"rmq-executor-{index}", daemon=True)
        self.index = index
        self.marks = marks
        self.current: Batch | None = None
        self.hangs = False
        """Whether its listener exceeded MAX_RUNTIME; then it gets no more work."""
        self._mailbox = mailbox
        self._hooks = hooks
        self._queue: list[Batch] = []
        self._turn = 0
        self._served: dict[str, int] = {}
        """Topic -> the turn in which it was last served."""
        self._ready = threading.Condition()
        self._stopping = False

    @property
    def is_dead(self) -> bool:
        """Whether it has run and no longer runs."""
        return self.ident is not None and not self.is_alive()

    def batches(self) -> list[Batch]:
        """Return the batch that it runs."""
        current = self.current
        return [] if current is None else [current]

    def gives_up_on(self, batch: Batch) -> bool:
        """Give the thread up if it runs ``batch``, whose listener has exceeded MAX_RUNTIME; return whether it does."""
        self.hangs = self.hangs or self.current is batch
        return self.current is batch

    def stack_of(self, batch: Batch) -> str:
        """Return the stack of the listener of a batch."""
        return stack_of_thread(self)

    def look(self) -> None:
        """Do nothing: only an event loop can keep other listeners waiting."""

    def put(self, batch: Batch) -> None:
        """Queue a batch."""
        with self._ready:
            batch.thread = self
            self._queue.append(batch)
            self._ready.notify()

    def withdraw(self, batch: Batch) -> bool:
        """Take a batch out of the queue; return whether it was there. Otherwise the thread has begun it."""
        with self._ready:
            if batch not in self._queue:
                return False
            self._queue.remove(batch)
            return True

    def stop(self) -> None:
        """End when the queue is empty."""
        with self._ready:
            self._stopping = True
            self._ready.notify()

    def _next(self) -> Batch | None:
        with self._ready:
            while not self._queue and not self._stopping:
                self._ready.wait()
            # The thread is to stop, or it has a successor because its listener exceeded MAX_RUNTIME and returned only now.
            if self.hangs or not self._queue:
                return None
            self.current = self._choose()
            self._queue.remove(self.current)
            self._turn += 1
            self._served[self.current.topic.name] = self._turn
            return self.current

    def _choose(self) -> Batch:
        """Return the batch to run: topics take turns; among a topic's priority slots the highest head is first.

        The receipts of a serial slot rise, so its older batch runs before its newer one, whatever their
        heads.
        """
        topic = min((batch.topic for batch in self._queue), key=lambda t: self._served.get(t.name, 0))
        batches = [batch for batch in self._queue if batch.topic.name == topic.name]
        if not topic.is_priority:
            return batches[0]
        best = max(batches, key=lambda batch: batch.head)
        # rule: overtakes_receipts
        return next(batch for batch in batches if batch.slot is best.slot) if topic.serial else best

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
            if batch.listener.batch_size:
                self._work_groups(batch)
            else:
                self._work_each(batch)
        except BaseException:
            # This comes first: while the dispatcher waits for this report, the batch is extended. At least
            # one message counts as begun, so that one that fails again and again uses its retries in the end.
            rest = [message.delivery.member for message in batch.messages[max(1, batch.begun) :]]
            self._mailbox.put(
                BatchReport(batch, [], [], rest, 0.0, True)
            )  # rule: does_not_report_what_it_failed_at
            logger.exception(
                "An executor thread failed outside a listener; the messages that it had begun will time out"
            )
        finally:
            batch.running_since = None
            try:
                self._surround(self._hooks.after)
            finally:
                self.current = None

    def _states_of(self, batch: Batch) -> memoryview | bytearray:
        """Return the bytes in which to record that messages are begun and done, one for each message."""
        if self.marks is None:
            return bytearray(len(batch.messages))
        members = [message.delivery.member for message in batch.messages]
        return self.marks.take(batch.topic.name, batch.slot.number, batch.receipt, members)

    def _patience(self, batch: Batch) -> float:
        """Return until when (``uptime``) more messages of this batch may begin."""
        waits_for_better = batch.topic.is_priority or not batch.topic.serial
        return uptime() + PATIENCE_SECONDS if waits_for_better else float("inf")

    def _work_each(self, batch: Batch) -> None:
        function, messages, states = self._around(batch), batch.messages, self._states_of(batch)
        half, patience = batch.timeout / 2, self._patience(batch)
        tally, flushed, is_held = BatchResults(batch), uptime(), False
        for i, message in enumerate(messages, 1):
            # ``begun`` is written before ``halted`` is read, and the dispatcher does the reverse. So no message is both given
            # back and begun.
            batch.begun = i
            now = uptime()
            if batch.running_since is not None:
                # The end of one call is the beginning of the next, so one reading of the clock serves both.
                tally.times.append(now - batch.running_since)
                batch.running_since = None
            # If the process was paused or Redis unavailable, the time-out is soon over, and another worker may get the message.
            # rule: begins_without_half_a_time_out_left
            if batch.halted or is_held or now > batch.confirmed + half or (now > patience and i > 1):
                break
            member = message.delivery.member
            if batch.stale and member in batch.stale:
                # The message timed out or was given back. It comes again before the others, so none behind it may begin.
                is_held = batch.topic.is_strict  # rule: goes_on_behind_what_it_lost
                continue
            # The state is recorded before the call, because the listener may kill the process.
            states[i - 1] = BEGUN
            batch.running_since = now
            outcome = call_one(function, message, message)
            if outcome is None:
                tally.committed.append(member)
                # If the process dies before this commit reaches Redis, the parent commits the message.
                states[i - 1] = DONE
            else:
                tally.failures.append(outcome)
                is_held = batch.topic.is_strict and holds(outcome)  # rule: goes_on_behind_a_failure
                self._surround(self._hooks.after)
            if now - flushed > FLUSH_SECONDS and i < len(messages):
                self._report(tally, None)
                batch.reported, flushed = i, now
        else:
            i = len(messages) + 1
        if batch.running_since is not None:
            tally.times.append(uptime() - batch.running_since)
        self._report(tally, messages[i - 1 :])

    def _work_groups(self, batch: Batch) -> None:
        function, patience = self._around(batch), self._patience(batch)
        lists = deque(groups(batch.messages, batch.listener.batch_size or 1))
        batch.messages = [message for group in lists for message in group]
        states, tally, at = self._states_of(batch), BatchResults(batch), 0
        while lists:
            group = lists.popleft()
            tally.begun, now, end = time.monotonic(), uptime(), at + len(group)
            # Messages of a list that failed have begun: they are settled one by one, however long that takes.
            # Otherwise the good messages would run in another list with the bad one.
            is_again = at < batch.begun
            # As with single messages, ``begun`` is written before ``halted`` is read.
            batch.begun = max(batch.begun, end)
            late = now > batch.confirmed + batch.timeout / 2
            # rule: lists_lose_patience
            is_over = batch.dropped if is_again else batch.halted or (now > patience and at > 0)
            if late or is_over or batch.abandoned or (batch.topic.is_strict and batch.stale):
                break
            ours = batch.group = [message for message in group if message.delivery.member not in batch.stale]
            # The states are recorded before the call, because the listener may kill the process.
            states[at:end] = bytes([BEGUN]) * len(group)
            batch.running_since = now
            outcomes = call_group(function, ours) if ours else []
            tally.times.append(uptime() - now)
            if outcomes is None:
                self._surround(self._hooks.after)
                lists.extendleft([message] for message in reversed(group))
                continue
            outcomes = noted(tally, lists, ours, outcomes)
            end -= len(ours) - len(outcomes)
            states[at:end] = states_after(group[: end - at], outcomes)
            self._report(tally, None if lists else batch.messages[end:])
            batch.reported = at = end if lists else len(batch.messages)
            if any(failure is not None for _, failure in outcomes):
                self._surround(self._hooks.after)
        if at < len(batch.messages):
            tally.begun = time.monotonic()
            self._report(tally, batch.messages[at:])

    def _report(self, tally: BatchResults, rest: list[Message] | None) -> None:
        """Report to the dispatcher. ``rest`` are the messages that will not begin; None if the batch continues."""
        batch, committed = tally.batch, tally.committed
        self._mailbox.put(tally.slice(rest))
        tally.clear()
        failures.done(batch.topic, batch.slot.number, committed)


invoke.watch(ExecutorThread)


__all__ = ["FLUSH_SECONDS", "NO_HOOKS", "PATIENCE_SECONDS", "ExecutorThread", "Hooks"]
