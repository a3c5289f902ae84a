"""The watch over the threads of a worker: those that have died are replaced, or the worker ends. Also: stacks as text."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from django_rmq.core.log import safe_logger

logger = safe_logger("django_rmq.consumer")

LOOK_SECONDS = 1.0
"""Seconds between two checks."""

GIVE_UP_SECONDS = 10.0
"""Seconds for which a worker continues that has lost a thread and cannot start another one."""


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


class _Watch(NamedTuple):
    name: str
    is_alive: Callable[[], bool]
    replace: Callable[[], None]


class ThreadWatch:
    """Watches the threads of one worker. It must be called from a thread that it does not watch."""

    def __init__(self) -> None:
        self.due = 0.0
        """Monotonic time of the next check."""
        self._watches: list[_Watch] = []
        self._lost_since: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every thread was alive, or could be replaced, at the last check."""
        return self._lost_since is None

    def add(self, name: str, is_alive: Callable[[], bool], replace: Callable[[], None]) -> None:
        """Watch a thread. ``replace`` starts another one if it is dead, and may raise anything."""
        self._watches.append(_Watch(name, is_alive, replace))

    def look(self) -> None:
        """Replace threads that have died. Raises ``ThreadLost`` if that has been impossible for ``GIVE_UP_SECONDS``."""
        now = time.monotonic()
        self.due = now + LOOK_SECONDS
        failed: Exception | None = None
        for watch in self._watches:
            if watch.is_alive():  # rule: dead_threads_stay_dead
                continue
            try:
                watch.replace()
                logger.error(
                    "The %s thread has stopped working and was replaced",
                    watch.name,
                    extra={"rmq_event": "thread_replaced", "rmq_thread": watch.name},
                )
            except Exception as error:
                # The process may have reached its limit of threads or memory for a moment, so the next check tries again.
                failed = error
                logger.exception(
                    "The %s thread has stopped working and cannot be replaced; trying again",
                    watch.name,
                    extra={"rmq_event": "thread_lost", "rmq_thread": watch.name},
                )
        if failed is None:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        elif now - self._lost_since >= GIVE_UP_SECONDS:
            raise ThreadLost(
                f"a thread could not be replaced for {GIVE_UP_SECONDS:g} s: {failed}"
            ) from failed


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
