"""The lookout: checks about once a second whether a thread of the worker has died or hangs, and has it replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from django_rmq.core.log.safe_logger import safe_logger

logger = safe_logger("django_rmq.consumer")

LOOK_SECONDS = 1.0
"""Seconds between two checks."""

GIVE_UP_SECONDS = 10.0
"""Seconds for which a worker goes on that has lost a thread and cannot start another one."""


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
        """Start another one. Raises ``RuntimeError`` or ``MemoryError`` if no thread can be started."""
        fresh = self._make()
        fresh.start()
        self.thread = fresh


class _Post(NamedTuple):
    name: str
    is_manned: Callable[[], bool]
    replace: Callable[[], None]


class Watchdog:
    """Watches the threads of one worker. It must be called from a thread that it does not watch."""

    def __init__(self) -> None:
        self.due = 0.0
        """Monotonic time of the next check."""
        self._posts: list[_Post] = []
        self._lost_since: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every thread was alive, or could be replaced, at the last check."""
        return self._lost_since is None

    def add(self, name: str, is_manned: Callable[[], bool], replace: Callable[[], None]) -> None:
        """Watch a thread. ``replace`` starts another one if it is dead, and may raise anything."""
        self._posts.append(_Post(name, is_manned, replace))

    def look(self) -> None:
        """Replace what has died. Raises ``ThreadLost`` if that has been impossible for ``GIVE_UP_SECONDS``."""
        now = time.monotonic()
        self.due = now + LOOK_SECONDS
        failed: Exception | None = None
        for post in self._posts:
            if post.is_manned():  # rule: dead_threads_stay_dead
                continue
            try:
                post.replace()
                logger.error(
                    "The %s thread has stopped working and was replaced",
                    post.name,
                    extra={"rmq_event": "thread_replaced", "rmq_thread": post.name},
                )
            except Exception as error:
                failed = error
                logger.exception(
                    "The %s thread has stopped working and cannot be replaced; trying again",
                    post.name,
                    extra={"rmq_event": "thread_lost", "rmq_thread": post.name},
                )
        if failed is None:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        elif now - self._lost_since >= GIVE_UP_SECONDS:
            raise ThreadLost(
                f"a thread could not be replaced for {GIVE_UP_SECONDS:g} s: {failed}"
            ) from failed


__all__ = ["GIVE_UP_SECONDS", "LOOK_SECONDS", "ThreadLost", "Watchdog", "Watched"]
