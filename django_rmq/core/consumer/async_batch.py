"""Steps: the messages of one batch of an async listener, one call after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine as Running
from contextvars import Context
from queue import SimpleQueue
from typing import Any

from django_rmq.core.consumer import outcome_log
from django_rmq.core.consumer.async_invoke import Coroutine, await_group, await_one
from django_rmq.core.consumer.batch import Batch, BatchResults, Outcome
from django_rmq.core.consumer.batch_outcomes import noted, states_after
from django_rmq.core.consumer.failures import failure_of
from django_rmq.core.consumer.invoke import groups
from django_rmq.core.consumer.loop_lag import LoopLag
from django_rmq.core.consumer.progress import BEGUN
from django_rmq.core.consumer.progress_cells import ProgressCells
from django_rmq.core.consumer.server_clock import uptime
from django_rmq.core.consumer.thread_executor import FLUSH_SECONDS, PATIENCE_SECONDS, Hooks
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.model.message import Message

logger = safe_logger("django_rmq.consumer")

REPORTS = 2_000
"""The number of reports per second and topic above which batches report less often."""


class AsyncBatch:
    """Runs one batch in the event loop, and reports it to ``inbox``."""

    def __init__(
        self, batch: Batch, hooks: Hooks, cells: ProgressCells, inbox: SimpleQueue[Any], pulse: LoopLag
    ) -> None:
        self.task: asyncio.Task[Any] | None = None
        """The call that runs."""
        self._stopped_by: set[str] = set()
        """Why it was cancelled. Each reason counts once, so that nothing disturbs what it does at its end."""
        self._pulse, self._blocked_before = pulse, 0.0
        self._loop = asyncio.get_running_loop()
        self._batch = batch
        self._inbox = inbox
        self._call = _around(batch, hooks)
        size = batch.listener.batch_size
        self._lists = deque(groups(batch.messages, size) if size else [[each] for each in batch.messages])
        batch.messages = [message for group in self._lists for message in group]
        members = [message.delivery.member for message in batch.messages]
        self._taken = cells.take(batch.topic.name, batch.place.slot, batch.receipt, members)
        self._tally, self._flushed = BatchResults(batch), uptime()
        # Many batches that report often would keep Redis from handing out messages.
        self._flush_seconds = max(FLUSH_SECONDS, batch.topic.concurrency / REPORTS)
        waits_for_better = batch.topic.is_priority or not batch.topic.serial
        self._patience = self._flushed + PATIENCE_SECONDS if waits_for_better else float("inf")

    def end(self) -> None:
        """Let others have what the batch needed."""
        self._taken.end()

    def blocked(self) -> float:
        """Return for how many seconds of the call that runs others have blocked the loop."""
        return self._pulse.blocked_for(self.task) - self._blocked_before

    def stop(self, why: str) -> None:
        """Cancel the call that runs, if all of its messages have to stop. Safe in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop, why)

    def _stop(self, why: str) -> None:
        # rule: cancels_a_list_for_one_message
        stops = self.task is not None and all(message.stopped for message in self._batch.group)
        # rule: disturbs_a_coroutine_that_cleans_up
        if self.task is not None and stops and why not in self._stopped_by:
            self._stopped_by.add(why)
            self.task.cancel()

    async def run(self) -> None:
        """Call the listener for the messages that may begin."""
        batch, at = self._batch, 0
        while self._lists:
            group = self._lists.popleft()
            end = at + len(group)
            now = uptime()
            if not self._may_begin(at, end, now):
                break
            ours = group
            if batch.stale:
                ours = [message for message in group if message.delivery.member not in batch.stale]
            outcomes = await self._one_call(at, len(group), ours, now) if ours else []
            if outcomes is None:
                for message in group:
                    # Each has the time of a call of its own.
                    # rule: ends_a_list_that_ran_too_long_as_a_whole
                    message.stopped = "" if message.stopped == "overran" else message.stopped
                self._lists.extendleft([message] for message in reversed(group))
                continue
            outcomes = noted(self._tally, self._lists, ours, outcomes)
            end -= len(ours) - len(outcomes)
            self._taken.note(at, states_after(group[: end - at], outcomes))
            at = end
            if self._lists and now - self._flushed > self._flush_seconds:
                # Slow work is committed as it goes.
                self._report(None)
                batch.reported, self._flushed = at, now
        self._report(batch.messages[at:])

    def _may_begin(self, at: int, end: int, now: float) -> bool:
        """Record that messages begin, unless the batch was taken back or its time-out is near; return whether they may."""
        batch = self._batch
        # Messages of a list that failed have begun: they are settled one by one, however long that takes.
        is_again = at < batch.begun
        batch.begun = max(batch.begun, end)
        if now > batch.confirmed + batch.timeout / 2 or batch.abandoned:  # rule: begins_late_in_the_loop
            return False
        if batch.topic.is_strict and batch.stale:
            return False
        # rule: begins_after_the_stop
        return not (batch.dropped if is_again else batch.halted or (now > self._patience and at > 0))

    async def _one_call(self, at: int, size: int, ours: list[Message], now: float) -> list[Outcome] | None:
        """Call the listener in a task, so that what it leaves in context variables is its own."""
        batch = self._batch
        batch.group, batch.overran_at = ours, None
        self._stopped_by.clear()
        self._blocked_before = self._pulse.blocked
        batch.running_since = now
        self._taken.note(at, bytes([BEGUN]) * size)
        call: Running[Any, Any, list[Outcome] | None] = (
            await_group(self._call, ours) if batch.listener.batch_size else _each(self._call, ours[0])
        )
        task: asyncio.Task[list[Outcome] | None] = asyncio.get_running_loop().create_task(
            call, context=Context()
        )
        self.task = task
        self._pulse.calls.add(task)
        try:
            return await task
        except asyncio.CancelledError as error:
            # The call was cancelled before its first step; if the batch itself is, the loop is closing.
            if self._batch_is_cancelled():
                raise
            return [(message, failure_of(message, error)) for message in ours]
        finally:
            self._pulse.calls.discard(task)
            self._tally.times.append(uptime() - now)

    @staticmethod
    def _batch_is_cancelled() -> bool:
        current = asyncio.current_task()
        return current is None or current.cancelling() > 0

    def _report(self, rest: list[Message] | None) -> None:
        """Report to the dispatcher. ``rest`` are the messages that will not begin; None: the batch goes on."""
        tally = self._tally
        committed = tally.committed
        self._inbox.put(tally.slice(rest))
        tally.clear()
        outcome_log.done(self._batch.topic, self._batch.place.slot, committed)


async def _each(function: Coroutine, message: Message) -> list[Outcome]:
    return [(message, await await_one(function, message, message))]


def _around(batch: Batch, hooks: Hooks) -> Coroutine:
    function = batch.listener.coroutine
    if function is None:
        raise TypeError(f"the listener of topic {batch.topic.name} must be a coroutine function")
    try:
        return hooks.overlapping(batch.topic, function)
    except Exception:
        logger.exception("A hook around the listeners failed")
        return function


__all__ = ["AsyncBatch"]
