"""The event loop of a worker, in a thread of its own, and the batches of async listeners that run in it at the same time.

Coroutines wait without a thread, so one loop runs as many calls of a topic as its CONCURRENCY. The loop has the interface
of an executor thread, so that the dispatcher commits, gives back and replaces in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from collections.abc import Coroutine as PendingCall
from contextvars import Context
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from django_rmq.core.clock import uptime
from django_rmq.core.consumer.batch import Batch, Executor, Outcome, ReportQueue
from django_rmq.core.consumer.batch_run import (
    FLUSH_SECONDS,
    BatchRun,
    Coroutine,
    Hooks,
    await_group,
    await_one,
    report_failed_run,
)
from django_rmq.core.consumer.failures import failure_of
from django_rmq.core.consumer.run_order import FairQueue
from django_rmq.core.consumer.shared_notes import BatchCells, ProgressCells, ThreadNotes
from django_rmq.core.consumer.watchdog import stack_of_task, stack_of_thread
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.delivered_message import Message

T = TypeVar("T")

TICK_SECONDS = 0.25
"""Seconds between two signs of life of the loop."""


class LoopLag:
    """Measures for how long an event loop is blocked. Other threads may call ``silent`` and ``blocked_for``."""

    def __init__(self) -> None:
        self.ticked = uptime()
        """When the loop gave its last sign of life."""
        self.calls: set[asyncio.Task[Any]] = set()
        """The tasks of the calls that run."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.blocked = 0.0
        """Seconds so far in which the loop was blocked, up to the last sign of life."""
        self._blocks: tuple[float, asyncio.Task[Any] | None] = (0.0, None)
        """The last sign of life before a block, and the task that was first seen to block the loop since."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to beat in ``loop``."""
        self._loop = loop
        loop.call_soon(self._tick, loop)

    def silent(self) -> float:
        """Return the seconds since the last sign of life."""
        return uptime() - self.ticked

    def blocked_for(self, task: asyncio.Task[Any] | None) -> float:
        """Return the seconds so far in which the loop was blocked for a call.

        A block that lasts counts only if another call is its cause. It is unknown to which call a task belongs that a listener
        has started, so its blocks do not count before they end.
        """
        blocked, late, ticked = self.blocked, self.silent() - TICK_SECONDS, self.ticked
        if late <= 0 or self._loop is None:
            return blocked
        if self._blocks[0] != ticked:
            # The loop has been silent since this sign of life. The task that runs at the first look counts as the cause.
            self._blocks = (ticked, asyncio.current_task(self._loop))
        cause = self._blocks[1]
        return blocked + late if cause in self.calls and cause is not task else blocked

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self.blocked += max(0.0, self.silent() - TICK_SECONDS)
        self.ticked = uptime()
        loop.call_later(TICK_SECONDS, self._tick, loop)


logger = safe_logger("django_rmq.consumer")

REPORTS = 2_000
"""The number of reports per second and topic above which batches report less often."""


class AsyncBatch:
    """Runs one batch in the event loop, and reports it to ``mailbox``."""

    def __init__(
        self, batch: Batch, hooks: Hooks, cells: ProgressCells | None, mailbox: ReportQueue, lag: LoopLag
    ) -> None:
        self.task: asyncio.Task[Any] | None = None
        """The call that runs."""
        self._stopped_by: set[str] = set()
        """The reasons for which it was cancelled. Each counts once, so that a coroutine that cleans up is not cancelled again."""
        self._lag, self._blocked_before = lag, 0.0
        self._loop = asyncio.get_running_loop()
        self._batch = batch
        self._function = _around(batch, hooks)
        # Many batches that report often would keep Redis busy with acknowledgements.
        flush_seconds = max(FLUSH_SECONDS, batch.topic.concurrency / REPORTS)
        self._run = BatchRun(batch, cells, mailbox, flush_seconds)

    def end(self) -> None:
        """Free the cells of the batch."""
        if isinstance(self._run.states, BatchCells):
            self._run.states.end()

    def blocked(self) -> float:
        """Return for how many seconds of the call that runs others have blocked the loop."""
        return self._lag.blocked_for(self.task) - self._blocked_before

    def stop(self, why: str) -> None:
        """Cancel the call that runs, if all of its messages have to stop. Safe in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop, why)

    def _stop(self, why: str) -> None:
        # rule: cancels_a_list_for_one_message
        stops = self.task is not None and all(message.stopped for message in self._batch.messages_of_call())
        # rule: disturbs_a_coroutine_that_cleans_up
        if self.task is not None and stops and why not in self._stopped_by:
            self._stopped_by.add(why)
            self.task.cancel()

    async def run(self) -> None:
        """Call the listener for the messages that may begin."""
        function = self._function
        if self._batch.listener.batch_size is not None:
            lists, outcomes = self._run.list_calls(), None
            while group := lists.send(outcomes):
                outcomes = await self._await_call(await_group(function, group), partial(_all_failed, group))
            return
        singles, failure = self._run.single_calls(), None
        while (message := singles.send(failure)) is not None:
            failure = await self._await_call(
                await_one(function, message, message), partial(failure_of, message)
            )

    async def _await_call(self, call: PendingCall[Any, Any, T], cancelled: Callable[[BaseException], T]) -> T:
        """Await a call in a task, so that its changes of context variables do not reach other calls.

        ``cancelled`` returns its result if it was cancelled before its first step.
        """
        self._stopped_by.clear()
        self._blocked_before = self._lag.blocked
        self.task = task = asyncio.get_running_loop().create_task(call, context=Context())
        self._lag.calls.add(task)
        try:
            return await task
        except asyncio.CancelledError as error:
            # If the batch itself is cancelled, the loop is closing.
            if self._batch_is_cancelled():
                raise
            return cancelled(error)
        finally:
            self._lag.calls.discard(task)

    @staticmethod
    def _batch_is_cancelled() -> bool:
        current = asyncio.current_task()
        return current is None or current.cancelling() > 0


def _all_failed(group: list[Message], error: BaseException) -> list[Outcome]:
    return [(message, failure_of(message, error)) for message in group]


def _around(batch: Batch, hooks: Hooks) -> Coroutine:
    function = batch.listener.coroutine
    if function is None:
        raise TypeError(f"the listener of topic {batch.topic.name} must be a coroutine function")
    try:
        return hooks.overlapping(batch.topic, function)
    except Exception:
        logger.exception("A hook around the listeners failed")
        return function


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
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class AsyncExecutor(Executor):
    """The thread of the event loop.

    ``concurrency``: topic -> the number of calls that may run at the same time.
    """

    def __init__(
        self,
        index: int,
        mailbox: ReportQueue,
        hooks: Hooks,
        marks: ThreadNotes | None,
        concurrency: Mapping[str, int],
    ) -> None:
        super().__init__("rmq-event-loop", index, marks)
        self._cells = None if marks is None else ProgressCells(marks)
        self._mailbox = mailbox
        self._hooks = hooks
        self._lock = threading.Lock()
        self._turns = FairQueue(concurrency)
        self._active: dict[Batch, AsyncBatch] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_woken = False
        self._stopping = False
        self._is_over = False
        """Whether the loop has ended, and only cancels the tasks that still run."""
        self._lag = LoopLag()
        self._silent_since = self._lag.ticked
        self._complain = LogThrottle(logger)

    # --- for other threads

    def batches(self) -> list[Batch]:
        return list(self._active)

    def put(self, batch: Batch) -> None:
        with self._lock:
            batch.thread = self
            self._turns.add(batch)
        self._wake()

    def withdraw(self, batch: Batch) -> bool:
        with self._lock:
            return self._turns.remove(batch)

    def stop(self) -> None:
        self._stopping = True
        self._wake()

    def gives_up_on(self, batch: Batch) -> bool:
        # A coroutine that waits keeps only its own slot from working.
        self.hangs = self.hangs or self._lag.silent() > HUNG_SECONDS
        return self.hangs

    def blocked_seconds(self) -> float:
        """Return for how long something has blocked the loop, or 0, also if it does not run yet."""
        silent = self._lag.silent()
        return silent if silent >= BLOCKED_SECONDS and self._loop is not None else 0.0

    def stack_of(self, batch: Batch) -> str:
        steps, loop = self._active.get(batch), self._loop
        if steps is None or steps.task is None:
            return ""
        # Of a coroutine that blocks the loop, only its thread has what it has called without await.
        if loop is not None and asyncio.current_task(loop) is steps.task:
            return stack_of_thread(self)
        return stack_of_task(steps.task)

    def look(self) -> None:
        """Log the stack that blocks the loop, if the loop has given no sign of life since the last look."""
        silent, ticked = self._lag.silent(), self._lag.ticked
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
            # A loop that does not run yet will begin with the queue, one that was woken looks into it soon, and one that has
            # ended begins nothing.
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
            self._lag.start(loop)
            loop.call_soon(self._begin)
            loop.run_forever()
        except BaseException:
            # Such as SystemExit of a task that a listener has started.
            logger.exception("The event loop of async listeners has ended")
        finally:
            try:
                self._close(loop)
            finally:
                try:
                    self._hooks.loop_end()
                except Exception:
                    logger.exception("A hook around the listeners failed")

    def _begin(self) -> None:
        """Begin as many batches as may run, and end the loop if it is to stop and nothing is left."""
        with self._lock:
            self._is_woken = False
            # A loop that hung has a successor. If its block ends after all, it begins nothing more.
            begun = [] if self.hangs or self._is_over else self._turns.take()
        for batch in begun:
            self._start(batch)
        if self._stopping and not (self._turns or self._active):
            asyncio.get_running_loop().stop()

    def _start(self, batch: Batch) -> None:
        try:
            steps = AsyncBatch(batch, self._hooks, self._cells, self._mailbox, self._lag)
        except Exception as error:  # noqa: BLE001 - reported, so that the batch ends
            self._failed(batch, error)
            with self._lock:
                self._turns.ended(batch)
            # What waited for its turn may begin.
            self._wake()
            return
        self._active[batch] = batch.async_run = steps
        asyncio.get_running_loop().create_task(steps.run()).add_done_callback(partial(self._ended, batch))

    def _ended(self, batch: Batch, task: asyncio.Task[None]) -> None:
        self._active.pop(batch).end()
        with self._lock:
            self._turns.ended(batch)
        batch.call_began_at = None
        error = None if task.cancelled() else task.exception()
        if error is not None or task.cancelled():
            self._failed(batch, error)
        self._begin()

    def _failed(self, batch: Batch, error: BaseException | None) -> None:
        """Report and log a batch that failed outside its listener."""
        report_failed_run(batch, self._mailbox)
        logger.error(
            "A batch of topic %s failed outside a listener; the messages that it had begun will time out",
            batch.topic.name,
            exc_info=error,
        )

    # --- its end

    def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the tasks that still run, and close the loop."""
        self._is_over = True
        # A batch whose call is cancelled below must not begin its next message.
        for batch in self._active:
            batch.halted = batch.dropped = True
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            # A task may suppress its cancellation, so the loop does not wait for long.
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        with self._lock:
            # Another thread may be about to wake the loop, which fails in a closed one, so both hold the lock.
            asyncio.set_event_loop(None)
            loop.close()
