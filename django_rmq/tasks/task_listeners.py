"""Running: the listeners of the topics that tasks need."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from django_rmq import connections
from django_rmq.conf import Config, get_config
from django_rmq.core.consumer.outcome_log import place_of
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle, counted
from django_rmq.core.model.message import Message
from django_rmq.exceptions import Retry, TopicFull
from django_rmq.sending import ensure_message
from django_rmq.tasks import result_lookup
from django_rmq.tasks.attempts import Attempt, together
from django_rmq.tasks.frameworks import NATIVE, PACKAGE
from django_rmq.tasks.jobs import Job
from django_rmq.tasks.start_records import StartRecords

T = TypeVar("T")

logger = safe_logger("django_rmq.tasks")
_repeated = LogThrottle(logger)
_starts = StartRecords(lambda: connections.get_broker("coordinator"))


def run(message: Message) -> None:
    """Run a task whose function is not a coroutine function."""
    attempt = Attempt(message)
    if attempt.is_over:
        return
    failed: BaseException | None = None
    try:
        arguments = attempt.begin()
        signals = attempt.framework.signals
        _starts.begin(attempt)
        with _announcing(attempt):
            signals.task_started.send_robust(sender=attempt.sender, task_result=attempt.result)
        keep = attempt.succeed(attempt.task.call(*arguments, **attempt.result.kwargs))
    except BaseException as error:  # noqa: BLE001 - whatever a task raises
        failed, keep = error, attempt.fail(error)
    try:
        keep()
        # Outside of the ``except``: the framework's own receiver would log the error, with its text.
        if attempt.has_ended:
            signals = attempt.framework.signals
            with _announcing(attempt, failed):
                signals.task_finished.send_robust(sender=attempt.sender, task_result=attempt.result)
        if failed is not None:
            raise failed
    finally:
        # The error refers to this frame.
        failed = None


async def arun(message: Message) -> None:
    """Run a task whose function is a coroutine function, beside others in the event loop."""
    attempt = await _whole(lambda: Attempt(message))
    if attempt.is_over:
        return
    failed: BaseException | None = None
    try:
        arguments = attempt.begin()
        if message.stopped:
            raise asyncio.CancelledError
        signals = attempt.framework.signals
        _starts.begin(attempt)
        with _announcing(attempt):
            await signals.task_started.asend_robust(sender=attempt.sender, task_result=attempt.result)
        keep = attempt.succeed(await attempt.task.acall(*arguments, **attempt.result.kwargs))
    except BaseException as error:  # noqa: BLE001 - whatever a task raises, and CancelledError
        failed, keep = error, attempt.fail(error)
    try:
        await _whole(keep)
        if attempt.has_ended:
            signals = attempt.framework.signals
            with _announcing(attempt, failed):
                await signals.task_finished.asend_robust(sender=attempt.sender, task_result=attempt.result)
        if failed is not None:
            raise failed
    finally:
        failed = None


async def _whole(work: Callable[[], T]) -> T:
    """Do ``work`` in a thread. If the task is stopped meanwhile, it does not end before the work has."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        return await working


# --- what the frameworks log


_announced: ContextVar[tuple[Attempt, BaseException | None] | None] = ContextVar(
    "rmq_announced", default=None
)
"""The attempt whose signal is being sent, and its error."""


@contextmanager
def _announcing(attempt: Attempt, error: BaseException | None = None) -> Iterator[None]:
    """Send a signal about ``attempt``. A receiver cannot end the worker either."""
    token = _announced.set((attempt, error))
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        logger.exception(
            "A receiver of a signal of tasks asked the process to exit", extra={"rmq_event": "trouble"}
        )
    finally:
        _announced.reset(token)


def _agree(record: logging.LogRecord) -> bool:
    """Make a line by which a framework's own receiver logs a task agree with those of the worker.

    It gets the fields of the message and of the task. That a task has failed is logged as seldom as that a message is
    dead, and without the error: the worker logs it, with as much of it as the topic allows.
    """
    announced = _announced.get()
    if announced is None:
        return True
    attempt, error = announced
    message = attempt.message
    if record.levelno >= logging.ERROR:
        record.exc_info = record.exc_text = None
        left_out = _repeated.admit((message.topic.name, place_of(error)))
        if left_out is None:
            return False
        record.msg = f"{record.msg}{counted(left_out)}"
    record.__dict__.update(
        rmq_event="task",
        rmq_topic=message.topic.name,
        rmq_slot=message.slot,
        rmq_message=message.name,
        **{f"rmq_{name}": value for name, value in message.labels.items()},
    )
    return True


for _package in (NATIVE, PACKAGE):
    logging.getLogger(_package).addFilter(_agree)


# --- tasks that wait for their time


def release(message: Message) -> None:
    """Send a task whose time has come to its queue."""
    job, key = Job.of(message.body), message.key or ""
    backend = get_config().tasks[job.backend]
    # It may have been sent, and have run or been cancelled, before a worker that died could commit this message.
    is_again = message.retries_left < message.max_retries
    if is_again and result_lookup.is_released(connections.get_broker("worker"), key):
        return
    queue = backend.queue(job.queue)
    topic = queue.loop if job.in_loop else queue.threads
    try:
        ensure_message(topic.name, message.body, key=key, priority=job.place, on_commit=False)
    except TopicFull as error:
        raise Retry(str(error)) from None
    together.run(result_lookup.note_release(key))


def listeners(config: Config) -> dict[str, Callable[[Any], Any]]:
    """Return the listener of each topic that tasks need."""
    found: dict[str, Callable[[Any], Any]] = {}
    for backend in config.tasks.values():
        for queue in [backend.shared] if backend.shared else backend.queues.values():
            found[queue.threads.name], found[queue.loop.name] = run, arun
        found[backend.later.name] = release
    return found


__all__ = ["arun", "listeners", "release", "run"]
