"""Execution of tasks: the listeners of their topics, the records of their attempts, and the signals and log lines about them.

The number of attempts must survive the death of a worker, and a program may ask for the state of a long task. So a
running task is recorded in Redis, unless it ends within milliseconds; its end is recorded in any case, before its message is
acknowledged. ``tasks.record_writer`` writes the records.

The framework's signals (``task_started``, ``task_finished``) are sent here, as its own backends do. The receivers that it has for
them write to the log: a filter on its loggers, ``_agree``, gives their lines the same fields as those of the worker.

``release`` is the listener of tasks that wait for their time: it sends them to their queue. ``tasks.backend``
enqueues tasks, and ``tasks.task_status`` reads the records.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from traceback import format_exception
from typing import Any, TypeVar

from django.utils import timezone

from django_rmq import connections
from django_rmq.conf import Config, get_config
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.core import forked_copies
from django_rmq.core.commands import stored_results
from django_rmq.core.commands.script_call import Call
from django_rmq.core.consumer.batch import PendingEnd
from django_rmq.core.consumer.failures import place_of
from django_rmq.core.log import LogThrottle, counted, safe_logger, this_worker
from django_rmq.core.model.delivered_message import ListenerFunction, Message
from django_rmq.core.threads import call_in_thread
from django_rmq.exceptions import Cancelled, Reject, Retry, RmqError, TopicFull
from django_rmq.sending import ensure_message
from django_rmq.tasks import NATIVE, PACKAGE, Framework, framework, task_status
from django_rmq.tasks.jobs import Job
from django_rmq.tasks.priority import message_priority
from django_rmq.tasks.record_writer import RecordWriter, Write
from django_rmq.tasks.task_status import (
    FAILED,
    READY,
    RUNNING,
    SUCCESSFUL,
    Error,
    TaskRecord,
    kept_ms,
    known,
    result_of,
    update,
)

logger = safe_logger("django_rmq.tasks")

_log_throttled = LogThrottle(logger)
writer = RecordWriter(lambda: connections.get_broker("worker"))

_OWN_ID = re.compile("[0-9a-f]{32}")
"""The ids that ``new_origin`` draws."""

LOST = "lost"
"""Stands for the worker of an attempt that ended before its start was noted: the worker died."""

_REASONS: dict[str, type[BaseException]] = {"cancelled": Cancelled, "overran": TimeoutError}
"""Why a function was stopped -> the class of the error, whatever the function has raised.

``task_status`` has the classes for messages that have died, of which ``overran`` is one here and there.
"""


class Attempt:
    """One attempt at a task. ``is_over``: the attempt is not needed, because an earlier one has succeeded."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.ended = False
        """Whether the end of the attempt is known. A record of its start is then too late."""
        self.key = message.key or ""
        # A key that ``new_origin`` has not drawn is the choice of a sender, and may be private. Log lines do not show it.
        message.labels = {"result": self.key} if _OWN_ID.fullmatch(self.key) else {}
        self.job = Job.of(message.body)
        self.record = self._earlier()
        # A worker may have died after it recorded the success, and before it committed the message. The task is not
        # run again.
        self.is_over = self.record.status == SUCCESSFUL
        self.backend: TaskBackend
        self.framework: Framework
        self.signals: Any
        """The module with the framework's signals."""
        self.task: Any = None
        self.result: Any = None
        self.sender: object = None
        """The sender of the framework's signals."""

    def _earlier(self) -> TaskRecord:
        """Return the record of earlier attempts. It is empty for a first attempt, and after a replay."""
        begun = self.message.max_retries - self.message.retries_left
        # A replayed message has all its retries again, and the record of its earlier life does not count.
        if begun <= 0:
            return TaskRecord()
        stored = known(connections.get_broker("worker"), self.key)
        record = TaskRecord() if stored is None else stored.record
        # A worker that died within ``record_writer.TURN_SECONDS`` has left no record of the start of its attempt.
        record.workers += [LOST] * (begun - len(record.workers))
        return record

    def begin(self) -> list[object]:
        """Note the start of the attempt; return the arguments of the function.

        Raises the errors of ``Job.task`` for a task that cannot be run.
        """
        record, now = self.record, timezone.now()
        record.status, record.finished_at, record.value = RUNNING, None, None
        record.started_at = record.started_at or now
        record.last_attempted_at = now
        record.workers = [*record.workers, this_worker()]
        self.backend = get_config().tasks[self.job.backend]
        self.framework = framework(self.backend.package)
        self.signals = self.framework.signals
        self.task = self.job.task(self.framework)
        # Only the path of a known task is a label: any other one is text that a sender wrote.
        self.message.labels = {"task": self.job.path, **self.message.labels}
        self.sender = _sender_of(self.framework, self.job.backend, self.backend)
        self.result = result_of(self.framework, self.task, self.key, self.job, record)
        context = (
            [self.framework.base.TaskContext(task_result=self.result)] if self.task.takes_context else []
        )
        return [*context, *self.result.args]

    def start(self) -> Call[str]:
        """Return what notes in Redis that the attempt runs."""
        # The stamp of the end is one more, and Redis refuses a lower stamp: a start that arrives late does not hide
        # the end.
        return self._kept(2 * self.message.receipt, self.record.written())

    def succeed(self, returned: object) -> Call[str]:
        """Record that the function has returned; return the call that writes the record.

        Raises ``TypeError`` or ``ValueError`` for a value that JSON cannot hold.
        """
        # The frameworks' own backends convert a value in the same way.
        value = self.framework.base.normalize_json(returned)
        record = self.record
        status, now = record.status, timezone.now()
        record.status, record.value, record.finished_at = SUCCESSFUL, value, now
        try:
            call = self._kept(2 * self.message.receipt + 1, record.written())
        except ValueError:
            # JSON has no NaN and no infinity. The attempt then fails, so its record must not say that it succeeded.
            record.status, record.value, record.finished_at = status, None, None
            raise
        self._end()
        return call

    def fail(self, error: BaseException) -> Call[str]:
        """Record that the attempt has failed with ``error``; return the call that writes the record."""
        record, message = self.record, self.message
        is_last = message.cancelled or isinstance(error, Reject) or message.retries_left <= 0
        record.status = FAILED if is_last else READY
        record.finished_at = timezone.now() if is_last else None
        if is_last or not isinstance(error, Retry):
            record.add(_described(error, message.stopped))
        call = self._kept(2 * self.message.receipt + 1, record.written())
        self._end()
        return call

    @property
    def has_ended(self) -> bool:
        """Whether the task is known and has no further attempt."""
        return self.result is not None and self.record.is_finished

    def _end(self) -> None:
        self.ended = True
        if self.result is not None:
            update(self.framework, self.result, self.record)

    def _kept(self, stamp: int, record: bytes) -> Call[str]:
        keep_ms = kept_ms(self.job.backend, self.record)
        return stored_results.store_result(self.key, stamp, keep_ms, self.message.raw, record)


_senders: dict[str, tuple[TaskBackend, type]] = {}
"""The class of each backend, with the settings of which it is the backend."""


def _sender_of(framework: Framework, alias: str, backend: TaskBackend) -> type:
    """Return the class of a backend, which sends the signals of its tasks.

    A backend belongs to its context, and each call of a listener has a context of its own, so each would make a backend.
    """
    known = _senders.get(alias)
    if known is None or known[0] is not backend:
        known = _senders[alias] = (backend, type(framework.backends[alias]))
    return known[1]


def _described(error: BaseException, stopped: str = "") -> Error:
    """Return the record of ``error``. ``stopped``: why the function was stopped, which then counts as the reason."""
    kind = _REASONS.get(stopped, type(error))
    try:
        text = "".join(format_exception(error))
    except Exception as wrong:  # noqa: BLE001 - an error may have any text
        text = f"The error cannot be shown: {type(wrong).__name__}"
    return Error(f"{kind.__module__}.{kind.__qualname__}", text)


T = TypeVar("T")

_repeated = LogThrottle(logger)


def run(message: Message) -> PendingEnd | None:
    """Run a task whose function is not a coroutine function."""
    attempt = Attempt(message)
    if attempt.is_over:
        return None
    failed: BaseException | None = None
    try:
        arguments = attempt.begin()
        writer.begin(attempt)
        _announce(attempt, "task_started")
        try:
            returned = attempt.task.call(*arguments, **attempt.result.kwargs)
        finally:
            _end_copy()
        call = attempt.succeed(returned)
    except BaseException as error:  # noqa: BLE001 - whatever a task raises
        failed, call = error, attempt.fail(error)
    if failed is None and _may_wait(attempt):
        return _WaitingEnd(attempt, writer.add(call))
    try:
        _keep(call, failed)
        if attempt.has_ended:
            _announce(attempt, "task_finished", failed)
        # Outside of the ``except``: the framework's own receiver would log the error, with its text.
        if failed is not None:
            raise failed
    finally:
        # The traceback of the error refers to this frame, and the frame to the error. Without this, the arguments of the
        # task would stay in memory until a garbage collection.
        failed = None
    return None


def _end_copy() -> None:
    """End this process if the task has forked it: the end of the task is that of the function in the original process."""
    if forked_copies.forking is not None:
        forked_copies.end_copy()  # rule: copies_end_the_task


def _may_wait(attempt: Attempt) -> bool:
    """Return whether the record of a success may be written after the next task of the thread has begun."""
    # If the next task kills the process, the message times out. Its last attempt would then have failed, though it has
    # succeeded.
    has_retries = attempt.message.retries_left > 0  # rule: last_attempts_wait_for_their_records
    # A receiver of the project expects the signal at the end of the task, and may read the result.
    return has_retries and not _is_heard(attempt, "task_finished")  # rule: receivers_wait_for_other_tasks


class _WaitingEnd(PendingEnd):
    """The end of a task that has succeeded."""

    def __init__(self, attempt: Attempt, write: Write) -> None:
        self._attempt, self._write = attempt, write

    def wait(self) -> None:
        writer.wait(self._write)
        _announce(self._attempt, "task_finished")


def _keep(call: Call[str], failed: BaseException | None) -> None:
    """Write the record of an end."""
    try:
        writer.write(call)
    except RmqError as trouble:
        _log_unwritten(trouble, failed)


async def _akeep(call: Call[str], failed: BaseException | None) -> None:
    """Do what ``_keep`` does, from a coroutine."""
    try:
        await writer.awrite(call)
    except RmqError as trouble:
        _log_unwritten(trouble, failed)


def _log_unwritten(trouble: RmqError, failed: BaseException | None) -> None:
    """Log that the record of a failure was not written. Raises ``trouble`` for that of a success."""
    if failed is None:
        raise trouble
    # The message is rolled back in any case; only the error is missing from the result.
    _log_throttled("kept", "The error of a task is not in its result: %s", trouble)


async def arun(message: Message) -> None:
    """Run a task whose function is a coroutine function, beside others in the event loop."""
    # Only the record of earlier attempts is read from Redis.
    is_first = message.retries_left >= message.max_retries
    attempt = Attempt(message) if is_first else await _whole(call_in_thread(Attempt, message))
    if attempt.is_over:
        return
    failed: BaseException | None = None
    try:
        arguments = attempt.begin()
        # The task may have been stopped while a thread read its record. ``_whole`` has then used up the
        # CancelledError.
        if message.stopped:
            raise asyncio.CancelledError
        writer.begin(attempt)
        await _aannounce(attempt, "task_started")
        try:
            returned = await attempt.task.acall(*arguments, **attempt.result.kwargs)
        finally:
            _end_copy()
        call = attempt.succeed(returned)
    except BaseException as error:  # noqa: BLE001 - whatever a task raises, and CancelledError
        failed, call = error, attempt.fail(error)
    try:
        await _whole(_akeep(call, failed))
        if attempt.has_ended:
            await _aannounce(attempt, "task_finished", failed)
        if failed is not None:
            raise failed
    finally:
        # As in ``run``: the error and this frame refer to each other.
        failed = None


async def _whole(work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``. However often the task is stopped meanwhile, this returns only after ``work`` has."""
    working = asyncio.ensure_future(work)
    while not working.done():
        # A thread cannot be cancelled, and the message must not be acknowledged before its record is complete. Unlike an
        # ``await`` of ``working``, this does not pass a cancellation on to it.
        with suppress(asyncio.CancelledError):
            await asyncio.wait([working])
    return working.result()


def _is_heard(attempt: Attempt, name: str) -> bool:
    """Return whether a signal has a receiver beside that of the framework, which writes a line to the log."""
    # Without a receiver of this name, each one counts as one of the project.
    # Django keeps each receiver with its ``id``, as the first part of its key.
    own = id(getattr(attempt.signals, f"log_{name}", None))
    return any(receiver[0][0] != own for receiver in getattr(attempt.signals, name).receivers)


def _announce(attempt: Attempt, name: str, failed: BaseException | None = None) -> None:
    """Send a signal about ``attempt``."""
    with _announcing(attempt, failed):
        getattr(attempt.signals, name).send_robust(sender=attempt.sender, task_result=attempt.result)


async def _aannounce(attempt: Attempt, name: str, failed: BaseException | None = None) -> None:
    """Do what ``_announce`` does, from a coroutine."""
    if not _is_heard(attempt, name):
        # Django would start a thread for the receiver of the framework.
        _announce(attempt, name, failed)
        return
    with _announcing(attempt, failed):
        await getattr(attempt.signals, name).asend_robust(sender=attempt.sender, task_result=attempt.result)


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
        # ``send_robust`` catches only an Exception. Neither of these may end the worker.
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


def release(message: Message) -> None:
    """Send a task whose time has come to its queue."""
    job, key = Job.of(message.body), message.key or ""
    backend = get_config().tasks[job.backend]
    # A worker may have died after it sent the task to its queue, and before it committed this message. The task may have
    # run or been cancelled since then, so it is not sent again.
    is_again = message.retries_left < message.max_retries
    if is_again and task_status.is_released(connections.get_broker("worker"), key):
        return
    topic = backend.topic_of(job.queue, in_loop=job.in_loop)
    try:
        # If a worker died after this send, the queue may have the task already. It then keeps its place there.
        ensure_message(topic.name, message.body, key=key, priority=message_priority(job), on_commit=False)
    except TopicFull as error:
        # The queue is full. The message rests, and the task is sent later.
        raise Retry(str(error)) from None
    # The release is recorded after the send. A worker that dies between the two sends the task again, and loses none.
    writer.write(task_status.record_release(key))


def listeners(config: Config) -> dict[str, ListenerFunction]:
    """Return the listener of each topic that tasks need."""
    functions: dict[str, ListenerFunction] = {}
    for backend in config.tasks.values():
        for queue in [backend.shared] if backend.shared else backend.queues.values():
            functions[queue.threads.name], functions[queue.loop.name] = run, arun
        functions[backend.later.name] = release
    return functions
