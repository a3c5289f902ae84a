"""The executor threads: each runs batches one after the other, of its topics in turn, and reports the outcomes of their messages.

``batch_run`` decides before each call whether its messages may still begin. The call itself is the part of ``invoke``, and a
thread that hangs is replaced by ``executor_pool``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from django_rmq.core import forked_copies
from django_rmq.core.consumer.batch import Batch, ReportQueue
from django_rmq.core.consumer.batch_run import FLUSH_SECONDS, BatchRun, report_failed_run
from django_rmq.core.consumer.invoke import Hooks, call_group, call_one
from django_rmq.core.consumer.shared_notes import ThreadNotes
from django_rmq.core.consumer.watchdog import stack_of_thread
from django_rmq.core.log import safe_logger

logger = safe_logger("django_rmq.consumer")


class ExecutorThread(threading.Thread):
    """Runs batches one after the other: topics in turn, and the highest head first among priorities."""

    def __init__(
        self, index: int, mailbox: ReportQueue, hooks: Hooks, marks: ThreadNotes | None = None
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
        self._changing = threading.Lock()
        """Held while the queue changes."""
        self._calls: SimpleQueue[None] = SimpleQueue()
        """One entry for each batch that was put, and one for the stop."""
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
        with self._changing:
            batch.thread = self
            self._queue.append(batch)
        self._calls.put(None)

    def withdraw(self, batch: Batch) -> bool:
        """Take a batch out of the queue; return whether it was there. Otherwise the thread has begun it."""
        with self._changing:
            if batch not in self._queue:
                return False
            self._queue.remove(batch)
            return True

    def stop(self) -> None:
        """End when the queue is empty."""
        self._stopping = True
        self._calls.put(None)

    def _next(self) -> Batch | None:
        while True:
            self._calls.get()
            with self._changing:
                # It has a successor, because its listener exceeded MAX_RUNTIME and returned only now.
                if self.hangs:
                    return None
                if self._queue:
                    self.current = self._choose()
                    self._queue.remove(self.current)
                    self._turn += 1
                    self._served[self.current.topic.name] = self._turn
                    return self.current
            # Without the stop, the batch of this call was withdrawn.
            if self._stopping:
                return None

    def _choose(self) -> Batch:
        """Return the batch to run: topics take turns; among a topic's priority slots the highest head is first.

        The receipts of a serial slot rise, so its older batch runs before its newer one, whatever their
        heads.
        """
        if len(self._queue) == 1:
            return self._queue[0]
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

    def _states_of(self, batch: Batch) -> memoryview | bytearray:
        """Return the bytes in which to record that messages are begun and done, one for each message."""
        if self.marks is None:
            return bytearray(len(batch.messages))
        members = [message.delivery.member for message in batch.messages]
        return self.marks.take(batch.topic.name, batch.slot.number, batch.receipt, members)

    def _call_listener(self, batch: Batch) -> None:
        """Call the listener for the messages that may begin."""
        function, is_of_lists = self._around(batch), batch.listener.batch_size is not None
        # The outcomes of a list are reported at once, because the next list may take long.
        flush_seconds = 0.0 if is_of_lists else FLUSH_SECONDS
        after_failure = partial(self._surround, self._hooks.after)
        run = BatchRun(batch, self._states_of, self._mailbox, flush_seconds, after_failure)
        if is_of_lists:
            lists, outcomes = run.list_calls(), None
            while group := lists.send(outcomes):
                outcomes = call_group(function, group)
            return
        singles, failure = run.single_calls(), None
        while (message := singles.send(failure)) is not None:
            failure = call_one(function, message, message)


forked_copies.watch(ExecutorThread)
