"""The ``TaskRecord`` that Redis keeps of a task's attempts, and the ``TaskResult`` that programs get, which is made of it.

``tasks.execution`` assigns the status of an attempt that has begun or ended, and writes the record. ``task_status``
assigns that of a task that waits or runs, or that has died, from its message. Here is also the search for that message, which
finds it while a topic of its backend is re-slotted, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from django_rmq import connections
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.core.commands import inspect, reslot
from django_rmq.core.commands.broker_interface import Broker, walk
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.replies import CopyReply, DescribeReply, cut_error
from django_rmq.core.model.topic import Topic, slot_counts
from django_rmq.core.producer.placement import slot_of
from django_rmq.tasks.frameworks import Framework
from django_rmq.tasks.frameworks import framework as framework_of
from django_rmq.tasks.jobs import Job
from django_rmq.tasks.task_modules import imported


def describe_task(broker: Broker, backend: TaskBackend, member: bytes) -> DescribeReply | None:
    """Return the description of the task's message by its topic, or None if no topic has it. Raises ``RmqError``."""
    counts = {topic.name: connections.slots_now(topic) for topic in backend.topics}
    # A re-slotting that this process has not seen may have moved the message, so the second search asks for the
    # counts.
    return _first(broker, backend, member, counts) or _again(broker, backend, member)


def _first(
    broker: Broker, backend: TaskBackend, member: bytes, counts: Mapping[str, tuple[int, ...]]
) -> DescribeReply | None:
    """Look once, where these slot counts place it."""
    # The topics are read in the order in which a task passes them. While a task is sent from the topic where it waits for
    # its time to its queue, both have its message, and the later topic counts.
    return _found(
        broker,
        [
            inspect.describe_messages(topic, slot_of(member, slots), [member])
            for topic in [backend.later, *backend.running]
            for slots in counts[topic.name]
        ],
    )


def _again(broker: Broker, backend: TaskBackend, member: bytes) -> DescribeReply | None:
    """Search the slots that Redis names now: a topic may have been re-slotted since this process asked last."""
    definitions = broker.definitions()
    counts = {
        topic.name: slot_counts(definitions.get(topic.name) or topic.definition()) for topic in backend.topics
    }
    for topic in backend.topics:
        if len(counts[topic.name]) > 1 and (
            message := _on_its_way(broker, topic, counts[topic.name], member)
        ):
            return message
    return _first(broker, backend, member, counts)


def _on_its_way(broker: Broker, topic: Topic, counts: tuple[int, ...], member: bytes) -> DescribeReply | None:
    """Search the slots in the order in which a mover takes the message through them: old slot, on its way, new slot."""
    source, target = (slot_of(member, slots) for slots in counts)
    message = _found(broker, [inspect.describe_messages(topic, source, [member])])
    # A ticket means that a batch has left the old slot, and that the new slots may not have it yet.
    if message is None and (slot := broker.run(reslot.reslot_progress(topic, source))).ticket:
        # Without members to move, ``move_out`` only repeats the batch that has left the slot.
        left = broker.run(reslot.move_out(topic, source, slot.reslot, source))
        message = next((_leaving(row) for row in left.rows if row.member == member), None)
    return message or _found(broker, [inspect.describe_messages(topic, target, [member])])


def _found(broker: Broker, calls: list[Call[list[DescribeReply]]]) -> DescribeReply | None:
    """Return the description of the last slot that knows the message."""
    message: DescribeReply | None = None
    for answer in walk(broker, calls):
        for reply in answer:
            if any(score is not None for score in reply[:5]):
                message = reply
    return message


def _leaving(row: CopyReply) -> DescribeReply:
    """Return the description that a slot would give if the message were still there."""
    scores: dict[str, Any] = dict.fromkeys(("store", "prepare", "retry", "dead"))
    scores[row.state] = float(row.score)
    rest = row.rest or None
    return (
        DescribeReply(**scores, death=rest) if row.state == "dead" else DescribeReply(**scores, envelope=rest)
    )


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
