"""Threads for blocking calls that this package makes from an event loop, and threads that the system may refuse.

The default executor of a loop belongs to the project. If the project's own calls took all of its threads, no delivery could be
extended there, and no task could end.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache, partial
from typing import TypeVar

from django_rmq.core.log import LogThrottle, safe_logger

T = TypeVar("T")

_complain = LogThrottle(safe_logger("django_rmq"))


def start_daemon(target: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a daemon thread. Return None, and log it, if the system has no thread left: the caller tries again later."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        _complain(name, f"The thread {name} cannot be started: %s; trying again", error)
        return None
    return thread


THREADS = 4
"""The number of calls of one process at the same time. Each is a round trip to Redis."""


async def call_in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call a function that blocks, without blocking the event loop. It sees the context variables of the caller."""
    call = partial(copy_context().run, function, *arguments)
    # rule: leaves_its_own_calls_to_the_threads_of_the_project
    executor = _executor(os.getpid())
    return await asyncio.get_running_loop().run_in_executor(executor, call)


@cache
def _executor(pid: int) -> ThreadPoolExecutor:
    """Return the threads of a process. A fork copies none, so a child process gets its own."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="rmq-calls")
