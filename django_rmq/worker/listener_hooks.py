"""Hooks around listeners that do what Django does around requests: connections, transactions, language, queries.

Synchronous code in async listeners has a thread for each call, and that thread's database connections. So does
Django for each request under ASGI: ``sync_to_async`` runs what is thread-sensitive, and so the ORM, in one thread per
call, so that calls that overlap share no connection. A call that needs no such thread starts none. Unlike a request's, a
thread serves later calls as well, one at a time, so that CONN_MAX_AGE keeps connections open. A synchronous listener that
runs an event loop of its own has such a thread for the synchronous code of that loop, beside its own.

A worker calls ``hooks`` and passes the result to ``core.consumer``. Around each call stand, from the outside: the end of open
transactions (``open_transactions``), and signals, events and spans (``observability.announcements``). ``once`` is part of
the listener itself (``worker.once``).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.core.cache import caches
from django.db import connections as databases
from django.db import reset_queries

from django_rmq import open_transactions
from django_rmq.conf import is_debug
from django_rmq.core import forked_copies
from django_rmq.core.consumer import Hooks
from django_rmq.core.consumer.batch_run import Coroutine
from django_rmq.core.model.delivered_message import ListenerArgument, ListenerFunction
from django_rmq.core.model.topic import Topic
from django_rmq.observability import announcements
from django_rmq.worker import listener_registry

T = TypeVar("T")

_started = SyncToAsync.context_to_thread_executor.data  # type: ignore[attr-defined]
"""Not empty where asgiref has started such a thread. To look at it takes a tenth of the time that the search for one takes."""


class SyncThreads:
    """The threads of one worker. Its event loop uses them, beside a loop that hung and that it has replaced."""

    def __init__(self) -> None:
        self._idle: list[ThreadSensitiveContext] = []
        """The threads that no call uses; some were never started."""

    def around(self, topic: Topic, function: Coroutine) -> Coroutine:
        """Return the function that the event loop awaits in place of ``function``, an async listener of ``topic``."""
        watched, name = announcements.around_async(topic, function), listener_registry.name_of(topic.name)

        async def call(argument: ListenerArgument) -> object:
            # The last one first, so that few threads and connections stay in use.
            try:
                thread = self._idle.pop()
            except IndexError:
                thread = ThreadSensitiveContext()
            SyncToAsync.thread_sensitive_context.set(thread)  # rule: shares_connections
            try:
                await _run_in(thread, _begin_call)
                returned = await watched(argument)
            except BaseException:
                open_transactions.log_open(name, await self._end_call(thread))
                raise
            if left := await self._end_call(thread):
                raise open_transactions.error_of(name, left)
            return returned

        return call

    async def _end_call(self, thread: ThreadSensitiveContext) -> list[str]:
        """Let another call have a thread; return the databases on which a transaction was left open there."""
        try:
            left = await _run_in(thread, _end_call)
        except asyncio.CancelledError:
            # The call was cancelled while its code runs in the thread. The next call would wait for that code.
            _end(thread)
            raise
        self._idle.append(thread)
        return left or []

    def close(self) -> None:
        """Close the connections of the threads, and end these."""
        # Another loop may take threads at the same time, but none that is about to end.
        with suppress(IndexError):
            while True:
                _end(self._idle.pop())


def _executor_of(thread: ThreadSensitiveContext) -> Executor | None:
    """Return the executor that runs the code of a thread; None if there was no code to run."""
    return SyncToAsync.context_to_thread_executor.get(thread)


def _end(thread: ThreadSensitiveContext) -> None:
    """Close the connections of a thread once its code has returned, and end it."""
    executor = _executor_of(thread)
    if executor is not None:
        executor.submit(databases.close_all)
        executor.shutdown(wait=False)


def hooks() -> Hooks:
    """Return the hooks that Django needs around listeners of both kinds."""
    threads = SyncThreads()
    return Hooks(
        before=_begin_batch,
        after=open_transactions.close_old,
        end=_end_thread,
        around=_around,
        overlapping=threads.around,
        loop_end=threads.close,
    )


class _ExecutorThread(threading.local):
    """What is known of the executor thread that asks."""

    def __init__(self) -> None:
        self.has_caches = False
        self.of_loops = ThreadSensitiveContext()
        """The thread for the synchronous code of event loops that listeners run here."""


_thread = _ExecutorThread()


def _begin_batch() -> None:
    open_transactions.close_old()
    if not _thread.has_caches:
        # Caches belong to the context. Those of the thread are made here, or each call would make its own, and connect it.
        with suppress(Exception):
            caches.all()
            _thread.has_caches = True


def _end_thread() -> None:
    databases.close_all()
    _end(_thread.of_loops)


def _around(topic: Topic, function: ListenerFunction) -> ListenerFunction:
    """Return the function that a thread calls in place of ``function``, a listener of ``topic``."""
    name = listener_registry.name_of(topic.name)
    isolated = open_transactions.isolated(name, announcements.around(topic, function))
    has_queries, of_loops = is_debug(), _thread.of_loops
    # ``asyncio.run`` hands the context on to its loop. Without this, asgiref would run the ORM of all such loops in one thread
    # of the process, whose connections nobody closes.
    SyncToAsync.thread_sensitive_context.set(of_loops)  # rule: loops_of_listeners_share_a_thread

    def call(argument: ListenerArgument) -> object:
        if has_queries:
            reset_queries()
        if _started and (executor := _executor_of(of_loops)) is not None:
            executor.submit(_begin_call)
        try:
            returned = isolated(argument)
        except BaseException:
            open_transactions.log_open(name, _end_call_of_loops(of_loops))
            raise
        if _started and (left := _end_call_of_loops(of_loops)):
            raise open_transactions.error_of(name, left)
        return returned

    return call


def _end_call_of_loops(thread: ThreadSensitiveContext) -> list[str]:
    executor = _executor_of(thread)
    # A process that the listener has forked has no such thread to wait for.
    return (
        [] if executor is None or forked_copies.forking is not None else executor.submit(_end_call).result()
    )


# A connection may have become too old while its thread was idle, so it is looked at before a call as well as after
# it.
def _begin_call() -> None:
    open_transactions.close_old()
    if is_debug():
        reset_queries()


def _end_call() -> list[str]:
    left = open_transactions.roll_back_open()
    open_transactions.close_old()
    return left


async def _run_in(thread: ThreadSensitiveContext, function: Callable[[], T]) -> T | None:
    """Call a function in the thread that has the connections of a call. Return None if the call has no thread."""
    executor = _executor_of(thread)
    return None if executor is None else await asyncio.get_running_loop().run_in_executor(executor, function)
