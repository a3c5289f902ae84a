"""The watchdog inside a worker: finds threads that have died, and calls of listeners that hang.

A thread that has died is replaced, or the worker ends. After MAX_RUNTIME the batch of a call is abandoned and left to its
time-out, and after HARD_TIMEOUT the call is ended. A worker whose dispatcher hangs is ended by its parent (``worker_processes``).
Here are also stacks as text.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from django_rmq.core.clock import uptime
from django_rmq.core.consumer.batch import Batch
from django_rmq.core.log import safe_logger

logger = safe_logger("django_rmq.consumer")

LOOK_SECONDS = 1.0
"""Seconds between two checks."""

GIVE_UP_SECONDS = 10.0
"""Seconds for which a worker continues that has lost a thread and cannot start another one."""

GRACE_SECONDS = 5.0
"""Seconds that an async listener has to end, once it was cancelled because of HARD_TIMEOUT."""


class ThreadLost(RuntimeError):
    """A thread that the worker needs cannot be replaced. Another process may be able to start it."""


T = TypeVar("T", bound=threading.Thread)


class Watched(Generic[T]):
    """A thread, and how to start another one of its kind."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.thread = make()

    def is_alive(self) -> bool:
        """Return whether it is running."""
        return self.thread.is_alive()

    def replace(self) -> None:
        """Start another thread of this kind. Raises ``RuntimeError`` or ``MemoryError`` if no thread can be started."""
        fresh = self._make()
        # If no thread can be started, the dead one stays in its place and is found again.
        fresh.start()
        self.thread = fresh


class ThreadWatch:
    """Watches the threads of one worker. It must be called from a thread that it does not watch."""

    def __init__(self) -> None:
        self.due = 0.0
        """Monotonic time of the next check."""
        self._watches: list[tuple[str, Callable[[], bool], Callable[[], None]]] = []
        self._lost_since: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every thread was alive, or could be replaced, at the last check."""
        return self._lost_since is None

    def add(self, name: str, is_alive: Callable[[], bool], replace: Callable[[], None]) -> None:
        """Watch a thread. ``replace`` starts another one if it is dead, and may raise anything."""
        self._watches.append((name, is_alive, replace))

    def look(self) -> None:
        """Replace threads that have died. Raises ``ThreadLost`` if that has been impossible for ``GIVE_UP_SECONDS``."""
        now = time.monotonic()
        self.due = now + LOOK_SECONDS
        failed: Exception | None = None
        for name, is_alive, replace in self._watches:
            if is_alive():  # rule: dead_threads_stay_dead
                continue
            try:
                replace()
                logger.error(
                    "The %s thread has stopped working and was replaced",
                    name,
                    extra={"rmq_event": "thread_replaced", "rmq_thread": name},
                )
            except Exception as error:
                # The process may have reached its limit of threads or memory for a moment, so the next check tries again.
                failed = error
                logger.exception(
                    "The %s thread has stopped working and cannot be replaced; trying again",
                    name,
                    extra={"rmq_event": "thread_lost", "rmq_thread": name},
                )
        if failed is None:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        elif now - self._lost_since >= GIVE_UP_SECONDS:
            raise ThreadLost(
                f"a thread could not be replaced for {GIVE_UP_SECONDS:g} s: {failed}"
            ) from failed


class CallWatch:
    """Watches the calls of listeners. The heartbeat's thread asks it, which no listener can stop.

    ``overrun`` is called once for a batch whose listener has run longer than MAX_RUNTIME, ``unending`` for a call that only the
    end of the process can end, with its batch and the ``uptime`` at which it began.
    """

    def __init__(
        self,
        overrun: Callable[[Batch], None],
        unending: Callable[[Batch, float], None] = lambda batch, began: None,
    ) -> None:
        self._overrun = overrun
        self._unending = unending

    def look(self, batch: Batch, now: float) -> None:
        """End the call that ``batch`` runs after HARD_TIMEOUT; abandon the batch after MAX_RUNTIME. ``now``: ``uptime``."""
        since, topic = batch.call_began_at, batch.topic
        if since and topic.hard_timeout is not None and (seconds := batch.ran(now)) > topic.hard_timeout:
            self._end(batch, since, seconds)
        # A listener that never returns would keep its message in flight without end.
        # rule: never_gives_up
        if since is not None and now - since > topic.max_runtime and not batch.abandoned:
            self._abandon(batch, now - since)

    def _end(self, batch: Batch, began: float, seconds: float) -> None:
        """End a call that has exceeded HARD_TIMEOUT: a coroutine by cancelling it, another one with its process."""
        if batch.overran is None or batch.overran[0] != began:
            batch.overran = began, uptime()
            stack = _stack_of(batch)
            # The call ends before the log line: a handler of the project may wait for a lock that the listener holds.
            if batch.async_run is None:
                self._unending(batch, began)  # rule: logs_before_it_ends_a_call
            else:
                # It may have returned while its stack was read.
                for message in batch.messages_of(began):  # rule: cancels_the_next_call
                    message.stopped = message.stopped or "overran"
                batch.async_run.stop("overran")
            logger.error(
                "A listener of topic %s has run for %.0f s, longer than HARD_TIMEOUT; %s. Its stack:\n%s",
                batch.topic.name,
                seconds,
                "its process is replaced" if batch.async_run is None else "it is cancelled",
                stack,
                extra={
                    "rmq_event": "hard_timeout",
                    "rmq_topic": batch.topic.name,
                    "rmq_slot": batch.slot.number,
                },
            )
        # A coroutine may suppress its cancellation. Like a thread, it then ends only with the process.
        # rule: waits_for_coroutines_that_do_not_end
        elif batch.async_run is not None and uptime() - batch.overran[1] > GRACE_SECONDS:
            batch.overran = began, float("inf")
            self._unending(batch, began)
            logger.error(
                "A listener of topic %s does not end though it was cancelled; its process is replaced",
                batch.topic.name,
                extra={"rmq_event": "hard_timeout", "rmq_topic": batch.topic.name},
            )

    def _abandon(self, batch: Batch, seconds: float) -> None:
        batch.abandoned = batch.halted = True
        # This comes before anything that may fail: the slot has to be blocked, and its thread replaced.
        self._overrun(batch)
        logger.error(
            "A listener of topic %s has run for %.0f s, longer than MAX_RUNTIME; its message will time "
            "out. Its stack:\n%s",
            batch.topic.name,
            seconds,
            _stack_of(batch),
            extra={"rmq_event": "overrun", "rmq_topic": batch.topic.name, "rmq_slot": batch.slot.number},
        )


def _stack_of(batch: Batch) -> str:
    return batch.thread.stack_of(batch) if batch.thread else ""


def stack_of_thread(thread: threading.Thread) -> str:
    """Return the stack of a thread."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(its thread has ended)"


def stack_of_task(task: asyncio.Task[Any]) -> str:
    """Return the stack of a task: its coroutine, and those that it awaits."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None)
        if frame is not None:
            lines += traceback.format_stack(frame, limit=1)
        awaited = getattr(awaited, "cr_await", None)
    return "".join(lines)
