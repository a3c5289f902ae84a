"""Synchronous code in async listeners: each call has a thread for it, and that thread's database connections.

This is what Django does for each request under ASGI: ``sync_to_async`` runs what is thread-sensitive, and so the ORM, in
one thread per call, so that calls that overlap share no connection. A call that needs no such thread starts none. Unlike
a request's, a thread serves later calls as well, one at a time, so that CONN_MAX_AGE keeps connections open.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.db import close_old_connections
from django.db import connections as databases

from django_rmq.core.consumer import Hooks
from django_rmq.core.consumer.awaiting import Coroutine
from django_rmq.core.words.topics import Topic
from django_rmq.project.watching import announcing


class SyncThreads:
    """The threads of one worker. Used in its event loop only."""

    def __init__(self) -> None:
        self._idle: list[ThreadSensitiveContext] = []
        """Each stands for a thread that no call uses, or that was never started."""

    def around(self, topic: Topic, function: Coroutine) -> Coroutine:
        """Return what the event loop awaits in place of ``function``, an async listener of ``topic``."""
        watched = announcing.around_async(topic, function)

        async def call(argument: Any) -> Any:
            # The last one first, so that few threads and connections stay in use.
            thread = self._idle.pop() if self._idle else ThreadSensitiveContext()
            SyncToAsync.thread_sensitive_context.set(thread)
            try:
                await _close_old_connections(thread)
                return await watched(argument)
            finally:
                try:
                    await _close_old_connections(thread)
                except asyncio.CancelledError:
                    _end(thread)  # its code still runs, and the next call would wait for that
                    raise
                self._idle.append(thread)

        return call

    def close(self) -> None:
        """Close the connections of the threads, and end these."""
        for thread in self._idle:
            _end(thread)
        self._idle.clear()


def _executor_of(thread: ThreadSensitiveContext) -> Executor | None:
    """Return what runs the code of a thread. None: there was none to run."""
    return SyncToAsync.context_to_thread_executor.get(thread)


def _end(thread: ThreadSensitiveContext) -> None:
    """Close the connections of a thread once its code has returned, and end it."""
    executor = _executor_of(thread)
    if executor is not None:
        executor.submit(databases.close_all)
        executor.shutdown(wait=False)


def hooks() -> Hooks:
    """Return what Django needs around listeners of both kinds."""
    threads = SyncThreads()
    return Hooks(
        before=close_old_connections,
        after=close_old_connections,
        end=databases.close_all,
        around=announcing.around,
        overlapping=threads.around,
        loop_end=threads.close,
    )


async def _close_old_connections(thread: ThreadSensitiveContext) -> None:
    """Do what Django does before and after each request, in the thread that has the connections."""
    executor = _executor_of(thread)
    if executor is not None:
        await asyncio.get_running_loop().run_in_executor(executor, close_old_connections)


__all__ = ["SyncThreads", "hooks"]
