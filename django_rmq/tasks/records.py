"""The ``TaskRecord`` that Redis keeps of a task's attempts, and the ``TaskResult`` that programs get, which is made of it.

How long Redis keeps a record is decided here. ``tasks.execution`` assigns the status of an attempt that has begun or ended, and
writes the record. ``task_status`` assigns that of a task that waits or runs, or that has died, from its message.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from django_rmq.conf import get_config
from django_rmq.core.model.replies import cut_error
from django_rmq.tasks.frameworks import Framework
from django_rmq.tasks.frameworks import framework as framework_of
from django_rmq.tasks.jobs import Job
from django_rmq.tasks.task_modules import imported

READY, RUNNING, FAILED, SUCCESSFUL = "READY", "RUNNING", "FAILED", "SUCCESSFUL"

LEAST_KEPT_MS = 604_800_000
"""How long the record of a task that is not finished is kept at least, in ms: a week."""

MOST_ERRORS = 20
"""The number of errors of a task that are kept: the last ones."""

MOST_TRACEBACK = 16_384
"""The number of bytes of a traceback that are kept."""


# Texts of errors need not be valid Unicode, so every character beyond ASCII is escaped.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Error(NamedTuple):
    """Why an attempt failed."""

    path: str
    """``module.name`` of the exception's class."""
    traceback: str


@dataclass(slots=True)
class TaskRecord:
    """The state of a task, its attempts and its value."""

    status: str = READY
    started_at: datetime | None = None
    finished_at: datetime | None = None
    last_attempted_at: datetime | None = None
    errors: list[Error] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    """The worker of each attempt."""
    value: object = None
    stamp: int = 0
    """The number of the attempt that wrote the record: twice its receipt, and one more at its end."""

    @property
    def is_finished(self) -> bool:
        return self.status in (FAILED, SUCCESSFUL)

    def add(self, error: Error) -> None:
        cut = cut_error(error.traceback, MOST_TRACEBACK).decode("utf-8", "replace")
        self.errors = [*self.errors, error._replace(traceback=cut)][-MOST_ERRORS:]

    def written(self) -> bytes:
        """Return the form that Redis keeps. Raises ``ValueError`` for a value that JSON cannot hold."""
        fields = {
            "status": self.status,
            "started_at": _text(self.started_at),
            "finished_at": _text(self.finished_at),
            "last_attempted_at": _text(self.last_attempted_at),
            "errors": self.errors,
            "workers": self.workers,
            "value": self.value,
        }
        return _encode(fields).encode()

    @classmethod
    def read(cls, raw: bytes, stamp: int) -> TaskRecord:
        """Return the record from the form that Redis keeps. Raises ``ValueError`` if ``raw`` is not a record."""
        try:
            fields = json.loads(raw)
            return cls(
                fields["status"],
                _moment(fields["started_at"]),
                _moment(fields["finished_at"]),
                _moment(fields["last_attempted_at"]),
                [Error(*each) for each in fields["errors"]],
                fields["workers"],
                fields["value"],
                stamp,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the record of a task: {error!r}") from None


def kept_ms(backend: str, record: TaskRecord) -> int:
    """Return how long Redis keeps a record of a task of this backend, in ms."""
    # The settings may no longer have the backend of an old message. Its failure is recorded all the same.
    settings = get_config().tasks.get(backend)
    retention = LEAST_KEPT_MS if settings is None else round(settings.options.result_retention * 1000)
    # A task that is tried again needs its record until then, however short RESULT_RETENTION is.
    return retention if record.is_finished else max(retention, LEAST_KEPT_MS)


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _errors(framework: Framework, record: TaskRecord) -> list[object]:
    return [_task_error(framework.package, each.path, each.traceback) for each in record.errors]


def _task_error(package: str, path: str, traceback: str) -> object:
    return _error_type(package)(exception_class_path=path, traceback=traceback)


@cache
def _error_type(package: str) -> Any:
    """Return a ``TaskError`` of a framework that imports nothing: the framework's own imports the path."""
    given = {
        "__slots__": (),
        "__doc__": "Why an attempt failed.",
        "__module__": __name__,
        "__reduce__": lambda error: (_task_error, (package, error.exception_class_path, error.traceback)),
        "exception_class": property(_class_of),
    }
    return type("TaskError", (framework_of(package).base.TaskError,), given)


def _class_of(error: Any) -> type[BaseException]:
    """Return the class of an error. If this process has not imported it, ``Exception`` stands for it."""
    error_class = imported(error.exception_class_path)
    return (
        error_class if isinstance(error_class, type) and issubclass(error_class, BaseException) else Exception
    )


def update(framework: Framework, result: object, record: TaskRecord) -> None:
    """Bring a result that programs have up to date, as ``TaskResult.refresh`` does."""
    base = framework.base
    for name, value in (
        ("status", base.TaskResultStatus[record.status]),
        ("finished_at", record.finished_at),
        ("errors", _errors(framework, record)),
        ("_return_value", record.value),
    ):
        # The class is a frozen dataclass.
        object.__setattr__(result, name, value)


def result_of(framework: Framework, task: object, key: str, job: Job, record: TaskRecord) -> Any:
    """Return what programs get: a ``TaskResult`` of the framework."""
    base = framework.base
    result = base.TaskResult(
        task=task,
        id=key,
        status=base.TaskResultStatus[record.status],
        enqueued_at=job.enqueued_at,
        started_at=record.started_at,
        finished_at=record.finished_at,
        last_attempted_at=record.last_attempted_at,
        args=job.args,
        kwargs=job.kwargs,
        backend=job.backend,
        errors=_errors(framework, record),
        worker_ids=list(record.workers),
    )
    # Not an argument of the class, which is frozen.
    object.__setattr__(result, "_return_value", record.value)
    return result
