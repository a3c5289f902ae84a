"""Execution of tasks: the listeners of their topics, and the records of their attempts.

The number of attempts must survive the death of a worker, and a program may ask for the state of a long task. So a
running task is recorded in Redis, unless it ends within milliseconds; its end is recorded in any case. Threads that
write records at the same time share a round trip.

``release`` is the listener of tasks that wait for their time: it sends them to their queue. The backend, which enqueues
tasks and reads the records, is in ``tasks.backend``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from traceback import format_exception
from typing import Any, TypeVar

from django.utils import timezone

from django_rmq import connections
from django_rmq.conf import Config, get_config
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.core.commands import stored_results
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.script_call import Call
from django_rmq.core.consumer.failures import place_of
from django_rmq.core.log import LogThrottle, counted, safe_logger, this_worker
from django_rmq.core.model.delivered_message import ListenerFunction, Message
from django_rmq.exceptions import (
    Cancelled,
    Reject,
    Retry,
    RmqError,
    ServerTrouble,
    ServerUnavailable,
    TopicFull,
)
from django_rmq.sending import ensure_message
from django_rmq.tasks import backend as result_lookup
from django_rmq.tasks.backend import LEAST_KEPT_MS, known
from django_rmq.tasks.frameworks import NATIVE, PACKAGE, Framework, framework
from django_rmq.tasks.jobs import Job
from django_rmq.tasks.records import FAILED, READY, RUNNING, SUCCESSFUL, Error, TaskRecord, result_of, update


class _Waiting:
    """A call whose thread sleeps until it has its answer, or until it is its turn to run the next round trip."""

    def __init__(self, call: Call[object]) -> None:
        self.call = call
        self.answer: object = None
        self.leads = False
        self.woken = threading.Lock()
        self.woken.acquire()


class WriteBatching:
    """Runs the calls that come during a round trip together in the next one. Safe to share between threads."""

    def __init__(self, broker: Callable[[], Broker]) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._is_busy = False

    def run(self, call: Call[object]) -> object:
        """Return the answer of ``call``, or raise its error."""
        own = _Waiting(call)
        with self._lock:
            # A thread that finds no round trip under way leads the next one. The others sleep until a leader wakes
            # them.
            own.leads = not self._is_busy
            self._is_busy = True
            self._waiting.append(own)
        if not own.leads:
            own.woken.acquire()
        # The leader of the last round trip has either answered this call, or has made this thread the next leader.
        if own.leads:
            self._lead()
        if isinstance(own.answer, BaseException):
            raise own.answer
        return own.answer

    def _lead(self) -> None:
        """Run the waiting calls in one round trip; then wake their threads, and the thread that leads the next one."""
        with self._lock:
            together, self._waiting = self._waiting, []
        # An interrupt may leave this method before Redis has answered. The other threads then get this error, and do
        # not hang.
        answers: list[object] = [ServerUnavailable("the thread that asked Redis was interrupted")] * len(
            together
        )
        try:
            broker = self._broker()
            # A pipeline costs more than a single call.
            answers = (
                run_all(broker, [each.call for each in together])
                if len(together) > 1
                else [broker.run(together[0].call)]
            )
        except Exception as error:  # noqa: BLE001 - each of them raises it
            answers = [error] * len(together)
        finally:
            with self._lock:
                self._is_busy = bool(self._waiting)
                following = self._waiting[0] if self._waiting else None
            if following is not None:
                following.leads = True
                following.woken.release()
            for each, answer in zip(together, answers, strict=True):
                each.answer = answer
                # The leader is this thread, and does not sleep.
                if not each.leads:
                    each.woken.release()


logger = safe_logger("django_rmq.tasks")

SECONDS = 0.02
"""How long a task runs before its start is noted."""


class StartRecords:
    """The attempts of this process that have begun. ``broker`` is called in the thread that notes them."""

    def __init__(self, broker: Callable[[], Broker]) -> None:
        self._broker = broker
        self._begun: deque[tuple[float, Attempt]] = deque()
        self._wanted = threading.Event()
        self._starting = threading.Lock()
        self._pid = 0
        self._log_throttled = LogThrottle(logger)

    def begin(self, attempt: Attempt) -> None:
        """Note the start of ``attempt``, soon."""
        self._begun.append((time.monotonic(), attempt))
        if not self._wanted.is_set():
            self._wanted.set()
        # A fork copies no threads, so each process starts one at its first task.
        if self._pid != os.getpid():
            self._start()

    def _start(self) -> None:
        with self._starting:
            # Two executor threads may begin the first tasks of a process at the same time.
            if self._pid != os.getpid():
                self._pid = os.getpid()
                threading.Thread(target=self._run, name="rmq-task-starts", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            # The event is cleared before the queue is read: an attempt that begins meanwhile sets it again.
            self._wanted.clear()
            while self._begun:
                time.sleep(max(0.0, self._begun[0][0] + SECONDS - time.monotonic()))
                try:
                    self.note()
                except Exception as error:  # noqa: BLE001 - the thread has to go on
                    self._log_throttled("noted", "Cannot note which tasks run: %s", error)

    def note(self) -> None:
        """Note the starts that are due, in one round trip."""
        until, due = time.monotonic() - SECONDS, []
        while self._begun and self._begun[0][0] <= until:
            _, attempt = self._begun.popleft()
            # A task that ended within ``SECONDS`` needs no record of its start, because its end has one.
            if not attempt.ended:
                due.append(attempt.start())
        for answer in run_all(self._broker(), due) if due else ():
            if isinstance(answer, RmqError):
                raise answer


_log_throttled = LogThrottle(logger)
together = WriteBatching(lambda: connections.get_broker("worker"))

PATIENCE = 10.0
"""Seconds for which the end of a task waits for Redis to have its result."""

PAUSE = 0.2

_OWN_ID = re.compile("[0-9a-f]{32}")
"""The ids that ``new_origin`` draws."""

LOST = "lost"
"""Stands for the worker of an attempt that ended before its start was noted: the worker died."""

_REASONS: dict[str, type[BaseException]] = {"cancelled": Cancelled, "overran": TimeoutError}
"""Why a function was stopped -> the class of the error, whatever the function has raised."""


class Attempt:
    """One attempt at a task. ``is_over``: the attempt is not needed, because an earlier one has succeeded."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self._broker: Broker = connections.get_broker("worker")
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
        stored = known(self._broker, self.key)
        record = TaskRecord() if stored is None else stored.record
        # A worker that died within ``SECONDS`` has left no record of the start of its attempt.
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
        return self._kept(2 * self.message.receipt, self.record.written())

    def succeed(self, returned: object) -> Callable[[], None]:
        """Record that the function has returned; return the function that writes the record.

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
        return lambda: self._keep(call)

    def fail(self, error: BaseException) -> Callable[[], None]:
        """Record that the attempt has failed with ``error``; return the function that writes the record."""
        record, message = self.record, self.message
        is_last = message.cancelled or isinstance(error, Reject) or message.retries_left <= 0
        record.status = FAILED if is_last else READY
        record.finished_at = timezone.now() if is_last else None
        if is_last or not isinstance(error, Retry):
            record.add(_described(error, message.stopped))
        call = self._kept(2 * self.message.receipt + 1, record.written())
        self._end()

        def keep() -> None:
            try:
                self._keep(call)
            except RmqError as trouble:
                # The message is rolled back in any case; only the error is missing from the result.
                _log_throttled("kept", "The error of a task is not in its result: %s", trouble)

        return keep

    @property
    def has_ended(self) -> bool:
        """Whether the task is known and has no further attempt."""
        return self.result is not None and self.record.is_finished

    def _end(self) -> None:
        self.ended = True
        if self.result is not None:
            update(self.framework, self.result, self.record)

    def _kept(self, stamp: int, record: bytes) -> Call[str]:
        # The settings may no longer have the backend of an old message. Its failure is recorded all the same.
        backend = get_config().tasks.get(self.job.backend)
        keep_ms = round(backend.options.result_retention * 1000) if backend else LEAST_KEPT_MS
        # A task that is tried again needs its record until then, however short RESULT_RETENTION is.
        if not self.record.is_finished:
            keep_ms = max(keep_ms, LEAST_KEPT_MS)
        return stored_results.store_result(self.key, stamp, keep_ms, self.message.raw, record)

    def _keep(self, call: Call[str]) -> None:
        """Write to Redis, and repeat it for ``PATIENCE`` seconds while Redis is unavailable."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                together.run(call)
                return
            except ServerTrouble:
                # Redis may have run the write whose answer was lost. A second write of the same record changes nothing.
                if time.monotonic() > until:
                    raise
            time.sleep(PAUSE)


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
        # The traceback of the error refers to this frame, and the frame to the error. Without this, the arguments of the
        # task would stay in memory until a garbage collection.
        failed = None


async def arun(message: Message) -> None:
    """Run a task whose function is a coroutine function, beside others in the event loop."""
    attempt = await _whole(lambda: Attempt(message))
    if attempt.is_over:
        return
    failed: BaseException | None = None
    try:
        arguments = attempt.begin()
        # The task may have been stopped while a thread read its record. ``_whole`` has then used up the
        # CancelledError.
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
        # As in ``run``: the error and this frame refer to each other.
        failed = None


async def _whole(work: Callable[[], T]) -> T:
    """Do ``work`` in a thread. If the task is stopped meanwhile, this returns only after ``work`` has."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        # A thread cannot be cancelled, and the message must not be acknowledged before its record is complete.
        return await working


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
    if is_again and result_lookup.is_released(connections.get_broker("worker"), key):
        return
    queue = backend.queue(job.queue)
    topic = queue.loop if job.in_loop else queue.threads
    try:
        ensure_message(topic.name, message.body, key=key, priority=job.place, on_commit=False)
    except TopicFull as error:
        # The queue is full. The message rests, and the task is sent later.
        raise Retry(str(error)) from None
    # The release is recorded after the send. A worker that dies between the two sends the task again, and loses none.
    together.run(result_lookup.record_release(key))


def listeners(config: Config) -> dict[str, ListenerFunction]:
    """Return the listener of each topic that tasks need."""
    functions: dict[str, ListenerFunction] = {}
    for backend in config.tasks.values():
        for queue in [backend.shared] if backend.shared else backend.queues.values():
            functions[queue.threads.name], functions[queue.loop.name] = run, arun
        functions[backend.later.name] = release
    return functions
