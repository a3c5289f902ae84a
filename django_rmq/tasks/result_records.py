"""The record of a task, as Redis keeps it, and the result that programs get, which is made of it.

A record is written by ``tasks.execution`` and read by ``tasks.backend``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from django_rmq.core.model.replies import cut_error
from django_rmq.tasks.frameworks import Framework
from django_rmq.tasks.frameworks import framework as framework_of
from django_rmq.tasks.jobs import Job
from django_rmq.tasks.task_modules import imported

READY, RUNNING, FAILED, SUCCESSFUL = "READY", "RUNNING", "FAILED", "SUCCESSFUL"

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
    value: Any = None
    stamp: int = 0
    """The number of the attempt that wrote the record: twice its receipt, and one more at its end."""

    @property
    def is_finished(self) -> bool:
        return self.status in (FAILED, SUCCESSFUL)

    def add(self, error: Error) -> None:
        """Add the error of an attempt."""
        cut = cut_error(error.traceback, MOST_TRACEBACK).decode("utf-8", "replace")
        self.errors = [*self.errors, error._replace(traceback=cut)][-MOST_ERRORS:]

    def written(self) -> bytes:
        """Return the form that Redis keeps. Raises ``ValueError`` for a value that JSON cannot hold."""
        found = {
            "status": self.status,
            "started_at": _text(self.started_at),
            "finished_at": _text(self.finished_at),
            "last_attempted_at": _text(self.last_attempted_at),
            "errors": self.errors,
            "workers": self.workers,
            "value": self.value,
        }
        return _encode(found).encode()

    @classmethod
    def read(cls, raw: bytes, stamp: int) -> TaskRecord:
        """Return the record from the form that Redis keeps. Raises ``ValueError`` if ``raw`` is not a record."""
        try:
            found = json.loads(raw)
            return cls(
                found["status"],
                _moment(found["started_at"]),
                _moment(found["finished_at"]),
                _moment(found["last_attempted_at"]),
                [Error(*each) for each in found["errors"]],
                found["workers"],
                found["value"],
                stamp,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the record of a task: {error!r}") from None


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _errors(framework: Framework, record: TaskRecord) -> list[object]:
    return [_task_error(framework.package, each.path, each.traceback) for each in record.errors]


def _task_error(package: str, path: str, traceback: str) -> Any:
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
    found = imported(error.exception_class_path)
    return found if isinstance(found, type) and issubclass(found, BaseException) else Exception


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
    found = base.TaskResult(
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
    object.__setattr__(found, "_return_value", record.value)
    return found


__all__ = ["FAILED", "READY", "RUNNING", "SUCCESSFUL", "Error", "TaskRecord", "result_of", "update"]
