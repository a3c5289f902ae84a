"""Attempts: one delivery of a task's message, from the start of the function to the record of its end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from traceback import format_exception
from typing import Any

from django.utils import timezone

from django_rmq import connections
from django_rmq.conf import get_config
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.core.commands import task_results
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.script_call import Call
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.core.log.worker_name import this_worker
from django_rmq.core.model.message import Message
from django_rmq.exceptions import Cancelled, Reject, Retry, RmqError, ServerTrouble
from django_rmq.tasks.frameworks import Framework, framework
from django_rmq.tasks.jobs import Job
from django_rmq.tasks.result_lookup import LEAST_KEPT_MS, known
from django_rmq.tasks.result_records import (
    FAILED,
    READY,
    RUNNING,
    SUCCESSFUL,
    Error,
    TaskRecord,
    result_of,
    update,
)
from django_rmq.tasks.write_batching import WriteBatching

logger = safe_logger("django_rmq.tasks")
_complain = LogThrottle(logger)
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
    """One attempt at a task. ``is_over``: it needs none, because it has succeeded before."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self._broker: Broker = connections.get_broker("worker")
        self.ended = False
        """Whether the end of the attempt is known. A record of its start is then too late."""
        self.key = message.key or ""
        # A key that somebody else chose may be content.
        message.labels = {"result": self.key} if _OWN_ID.fullmatch(self.key) else {}
        self.job = Job.of(message.body)
        self.record = self._earlier()
        self.is_over = self.record.status == SUCCESSFUL
        self.backend: TaskBackend
        self.framework: Framework
        self.task: Any = None
        self.result: Any = None
        self.sender: Any = None
        """The sender of the framework's signals."""

    def _earlier(self) -> TaskRecord:
        """Return the record of earlier attempts. It is empty for a first attempt, and for what was replayed."""
        begun = self.message.max_retries - self.message.retries_left
        if begun <= 0:
            return TaskRecord()
        kept = known(self._broker, self.key)
        record = TaskRecord() if kept is None else kept.record
        record.workers += [LOST] * (begun - len(record.workers))
        return record

    def begin(self) -> list[Any]:
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
        # The path of an unknown task is whatever its sender wrote.
        self.message.labels = {"task": self.job.path, **self.message.labels}
        self.sender = type(self.task.get_backend())
        self.result = result_of(self.framework, self.task, self.key, self.job, record)
        context = (
            [self.framework.base.TaskContext(task_result=self.result)] if self.task.takes_context else []
        )
        return [*context, *self.result.args]

    def start(self) -> Call[str]:
        """Return what notes in Redis that the attempt runs."""
        return self._kept(2 * self.message.receipt, self.record.written())

    def succeed(self, returned: Any) -> Callable[[], None]:
        """Note that the function has returned; return what keeps the result.

        Raises ``TypeError`` or ``ValueError`` for a value that JSON cannot hold.
        """
        # As the framework itself does it.
        value = self.framework.base.normalize_json(returned)
        record = self.record
        status, now = record.status, timezone.now()
        record.status, record.value, record.finished_at = SUCCESSFUL, value, now
        try:
            call = self._kept(2 * self.message.receipt + 1, record.written())
        except ValueError:
            record.status, record.value, record.finished_at = status, None, None
            raise
        self._end()
        return lambda: self._keep(call)

    def fail(self, error: BaseException) -> Callable[[], None]:
        """Note that the attempt has failed with ``error``; return what keeps this."""
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
                _complain("kept", "The error of a task is not in its result: %s", trouble)

        return keep

    @property
    def has_ended(self) -> bool:
        """Whether there will be no further attempt of a task that is known."""
        return self.result is not None and self.record.is_finished

    def _end(self) -> None:
        self.ended = True
        if self.result is not None:
            update(self.framework, self.result, self.record)

    def _kept(self, stamp: int, record: bytes) -> Call[str]:
        backend = get_config().tasks.get(self.job.backend)
        keep_ms = round(backend.options.result_retention * 1000) if backend else LEAST_KEPT_MS
        if not self.record.is_finished:
            keep_ms = max(keep_ms, LEAST_KEPT_MS)
        return task_results.keep_result(self.key, stamp, keep_ms, self.message.raw, record)

    def _keep(self, call: Call[str]) -> None:
        """Write to Redis, and wait for it for a while if it is unavailable."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                together.run(call)
                return
            except ServerTrouble:
                # A repeated write changes nothing.
                if time.monotonic() > until:
                    raise
            time.sleep(PAUSE)


def _described(error: BaseException, stopped: str = "") -> Error:
    """Return what is kept of ``error``. ``stopped``: why the function had to stop, which is then the reason."""
    kind = _REASONS.get(stopped, type(error))
    try:
        text = "".join(format_exception(error))
    except Exception as wrong:  # noqa: BLE001 - an error may have any text
        text = f"The error cannot be shown: {type(wrong).__name__}"
    return Error(f"{kind.__module__}.{kind.__qualname__}", text)


__all__ = ["Attempt", "together"]
