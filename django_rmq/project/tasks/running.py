"""Running: the listeners of the topics that tasks need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from django_rmq.core.calls import results
from django_rmq.core.words.messages import Message
from django_rmq.exceptions import Retry, TopicFull
from django_rmq.project import connections
from django_rmq.project.sending import ensure_message
from django_rmq.project.settings import Config, get_config
from django_rmq.project.tasks.attempts import Attempt
from django_rmq.project.tasks.jobs import Job
from django_rmq.project.tasks.starts import Starts

T = TypeVar("T")

_starts = Starts(lambda: connections.get_broker("coordinator"))


def run(message: Message) -> None:
    """Run a task whose function is not a coroutine function."""
    attempt = Attempt(message)
    if attempt.is_over:
        return
    try:
        arguments = attempt.begin()
        signals = attempt.framework.signals
        _starts.begin(attempt)
        signals.task_started.send_robust(sender=attempt.sender, task_result=attempt.result)
        keep = attempt.succeed(attempt.task.call(*arguments, **attempt.result.kwargs))
    except BaseException as error:
        attempt.fail(error)()
        if attempt.is_finished and attempt.result is not None:
            attempt.framework.signals.task_finished.send_robust(
                sender=attempt.sender, task_result=attempt.result
            )
        raise
    keep()
    signals.task_finished.send_robust(sender=attempt.sender, task_result=attempt.result)


async def arun(message: Message) -> None:
    """Run a task whose function is a coroutine function, beside others in the event loop."""
    attempt = await _whole(lambda: Attempt(message))
    if attempt.is_over:
        return
    try:
        arguments = attempt.begin()
        if message.stopped:
            raise asyncio.CancelledError
        signals = attempt.framework.signals
        _starts.begin(attempt)
        await signals.task_started.asend_robust(sender=attempt.sender, task_result=attempt.result)
        keep = attempt.succeed(await attempt.task.acall(*arguments, **attempt.result.kwargs))
    except BaseException as error:
        await _whole(attempt.fail(error))
        if attempt.is_finished and attempt.result is not None:
            await attempt.framework.signals.task_finished.asend_robust(
                sender=attempt.sender, task_result=attempt.result
            )
        raise
    await _whole(keep)
    await signals.task_finished.asend_robust(sender=attempt.sender, task_result=attempt.result)


async def _whole(work: Callable[[], T]) -> T:
    """Do ``work`` in a thread. If the task is stopped meanwhile, it does not end before the work has."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        return await working


def release(message: Message) -> None:
    """Send a task whose time has come to its queue."""
    job = Job.of(message.body)
    backend, key = get_config().tasks[job.backend], message.key or ""
    # It may have been sent, and have run, before a worker that died could commit this message.
    is_again = message.retries_left < message.max_retries
    if is_again and connections.get_broker("worker").run(results.result(key)) is not None:
        return
    queue = backend.queue(job.queue)
    topic = queue.loop if job.in_loop else queue.threads
    try:
        ensure_message(topic.name, message.body, key=key, priority=job.place, on_commit=False)
    except TopicFull as error:
        raise Retry(str(error)) from None


def listeners(config: Config) -> dict[str, Callable[[Any], Any]]:
    """Return the listener of each topic that tasks need."""
    found: dict[str, Callable[[Any], Any]] = {}
    for backend in config.tasks.values():
        for queue in [backend.shared] if backend.shared else backend.queues.values():
            found[queue.threads.name], found[queue.loop.name] = run, arun
        found[backend.later.name] = release
    return found


__all__ = ["arun", "listeners", "release", "run"]
