"""The event loop of a worker process: all async listeners run in it, in one thread.

Up to CONCURRENCY calls of a topic's listener overlap, over all slots that this process owns. In a serial slot one
call runs at a time. Each call is a task with a context of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from typing import Any

from django_rmq.core.consumer import fork_guard
from django_rmq.core.consumer.async_batch import AsyncBatch
from django_rmq.core.consumer.batch import Batch, BatchReport
from django_rmq.core.consumer.fair_queue import FairQueue
from django_rmq.core.consumer.loop_lag import LoopLag
from django_rmq.core.consumer.progress import ThreadProgress
from django_rmq.core.consumer.progress_cells import ProgressCells
from django_rmq.core.consumer.stack_traces import stack_of_task, stack_of_thread
from django_rmq.core.consumer.thread_executor import Hooks
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle

logger = safe_logger("django_rmq.consumer")

BLOCKED_SECONDS = 1.0
"""Seconds without a sign of life after which the log says what blocks the loop."""

HUNG_SECONDS = 10.0
"""Seconds without a sign of life after which the loop is replaced, if a listener has exceeded MAX_RUNTIME as well."""


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, of uvloop if that is installed."""
    try:
        uvloop: Any = import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    found: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return found


class AsyncExecutor(threading.Thread):
    """The thread of the event loop. It has the interface of an executor thread.

    ``concurrency``: topic -> the number of calls that may run at the same time.
    """

    def __init__(
        self,
        index: int,
        inbox: SimpleQueue[Any],
        hooks: Hooks,
        marks: ThreadProgress | None,
        concurrency: Mapping[str, int],
    ) -> None:
        super().__init__(name="rmq-event-loop", daemon=True)
        self.index = index
        self.marks = marks
        self.hangs = False
        """Whether something blocks it for too long; then it gets no more work."""
        self._cells = ProgressCells(marks)
        self._inbox = inbox
        self._hooks = hooks
        self._lock = threading.Lock()
        self._turns = FairQueue(concurrency)
        self._running: dict[Batch, AsyncBatch] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_woken = False
        self._stopping = False
        self._is_over = False
        """Whether it has ended, and only cancels what still runs."""
        self._pulse = LoopLag()
        self._silent_since = self._pulse.ticked
        self._complain = LogThrottle(logger)

    # --- for other threads

    @property
    def is_dead(self) -> bool:
        """Whether it has run and no longer runs."""
        return self.ident is not None and not self.is_alive()

    def batches(self) -> list[Batch]:
        """Return the batches that run."""
        return list(self._running)

    def put(self, batch: Batch) -> None:
        """Queue a batch."""
        with self._lock:
            batch.thread = self
            self._turns.add(batch)
        self._wake()

    def withdraw(self, batch: Batch) -> bool:
        """Take a batch out of the queue. False: it runs already."""
        with self._lock:
            return self._turns.remove(batch)

    def stop(self) -> None:
        """End when nothing is queued and nothing runs."""
        self._stopping = True
        self._wake()

    def overran(self, batch: Batch) -> bool:
        """Return whether the thread has to be replaced, because a listener has exceeded MAX_RUNTIME.

        A coroutine that waits keeps only its own slot from working.
        """
        self.hangs = self.hangs or self._pulse.silent() > HUNG_SECONDS
        return self.hangs

    def blocked_seconds(self) -> float:
        """Return for how long something has blocked the loop. 0: nothing does, or it does not run yet."""
        silent = self._pulse.silent()
        return silent if silent >= BLOCKED_SECONDS and self._loop is not None else 0.0

    def stack_of(self, batch: Batch) -> str:
        """Return where the listener of a batch is."""
        steps = self._running.get(batch)
        return stack_of_task(steps.task) if steps is not None and steps.task is not None else ""

    def look(self) -> None:
        """Log what blocks the loop, if it has given no sign of life since the last look."""
        silent, ticked = self._pulse.silent(), self._pulse.ticked
        is_again, self._silent_since = self._silent_since == ticked, ticked
        if self._loop is None or silent < BLOCKED_SECONDS or not (is_again and self.is_alive()):
            return
        if self._complain.admit("blocked") is not None:
            logger.warning(
                "The event loop has been blocked for %.1f s: all async listeners of this process wait. A listener "
                "does something without await. The stack of the loop:\n%s",
                silent,
                stack_of_thread(self),
                extra={"rmq_event": "loop_blocked"},
            )

    def _wake(self) -> None:
        with self._lock:
            if self._loop is None or self._is_woken or self._loop.is_closed():
                return
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._begin)

    # --- in the loop

    def run(self) -> None:
        loop = new_loop()
        asyncio.set_event_loop(loop)
        try:
            with self._lock:
                self._loop = loop
            self._pulse.start(loop)
            loop.call_soon(self._begin)
            loop.run_forever()
        except BaseException:
            # Such as SystemExit of a task that a listener has started.
            logger.exception("The event loop of async listeners has ended")
        finally:
            try:
                self._close(loop)
            finally:
                self._surround_end()

    @property
    def _is_idle(self) -> bool:
        return not (self._turns or self._running)

    def _begin(self) -> None:
        """Begin as many batches as may run, and end the loop if it is told to and nothing is left."""
        with self._lock:
            self._is_woken = False
            begun = [] if self.hangs or self._is_over else self._turns.take()
        for batch in begun:
            self._start(batch)
        if self._stopping and self._is_idle:
            asyncio.get_running_loop().stop()

    def _start(self, batch: Batch) -> None:
        try:
            steps = AsyncBatch(batch, self._hooks, self._cells, self._inbox, self._pulse)
        except Exception as error:  # noqa: BLE001 - reported, so that the batch ends
            self._failed(batch, error)
            with self._lock:
                self._turns.ended(batch)
            return
        self._running[batch] = batch.steps = steps
        asyncio.get_running_loop().create_task(steps.run()).add_done_callback(partial(self._ended, batch))

    def _ended(self, batch: Batch, task: asyncio.Task[None]) -> None:
        self._running.pop(batch).end()
        with self._lock:
            self._turns.ended(batch)
        batch.running_since = None
        error = None if task.cancelled() else task.exception()
        if error is not None or task.cancelled():
            self._failed(batch, error)
        self._begin()

    def _failed(self, batch: Batch, error: BaseException | None) -> None:
        """Report a batch that failed outside its listener. At least one message counts as begun."""
        rest = [message.delivery.member for message in batch.messages[max(1, batch.begun) :]]
        self._inbox.put(BatchReport(batch, [], [], rest, 0.0, True))
        logger.error(
            "A batch of topic %s failed outside a listener; the messages that it had begun will time out",
            batch.topic.name,
            exc_info=error,
        )

    # --- its end

    def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel what listeners have left running, and close the loop."""
        self._is_over = True
        for batch in self._running:
            batch.halted = batch.dropped = True
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        with self._lock:
            asyncio.set_event_loop(None)
            loop.close()

    def _surround_end(self) -> None:
        try:
            self._hooks.loop_end()
        except Exception:
            logger.exception("A hook around the listeners failed")


fork_guard.watch(AsyncExecutor)


__all__ = ["BLOCKED_SECONDS", "AsyncExecutor", "new_loop"]
