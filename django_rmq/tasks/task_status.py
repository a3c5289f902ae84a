"""The status of a task: from its message until it has ended, and then from the ``TaskRecord`` of its last attempt.

``find`` combines both, and finds the message while a topic of its backend is re-slotted, too. ``result_of`` makes the
``TaskResult`` that programs get. How long Redis keeps a record is decided here; what an attempt records, by ``execution``.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any, NamedTuple

from django.conf import settings

from django_rmq import connections, exceptions
from django_rmq.conf import get_config
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.core.commands import inspect, reslot, stored_results
from django_rmq.core.commands.broker_interface import Broker, walk
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.envelope import decode_envelope
from django_rmq.core.model.replies import (
    CopyReply,
    Death,
    DescribeReply,
    cut_error,
    error_class,
    read_record,
)
from django_rmq.core.model.topic import Topic, slot_counts
from django_rmq.core.producer.placement import slot_of
from django_rmq.tasks import Framework
from django_rmq.tasks import framework as framework_of
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
        # The class is made at run time, so pickle cannot find it by its name.
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
    """Set on the result of an attempt what its end changes.

    ``result_of`` has set the other attributes of ``TaskResult.refresh`` at the start of the attempt.
    """
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


_ID = re.compile(r"[A-Za-z0-9]{1,64}", re.ASCII)

RELEASED = 1
"""The stamp of the record of a task that no attempt has begun. The stamps of attempts are twice a receipt, or more."""

_GONE = Error("django_rmq.exceptions.MessageGone", "The task was cancelled, or removed from its queue.")

_CLASSES = {
    "timed_out": "builtins.TimeoutError",
    "overran": "builtins.TimeoutError",
    "rejected": "django_rmq.exceptions.Reject",
    "buried": "django_rmq.exceptions.Reject",
}
"""Why a message died -> the class of the error, where no listener has raised one. ``execution`` has that of ``overran``, too."""


class FoundTask(NamedTuple):
    """A task and its record."""

    job: Job
    record: TaskRecord


def find(backend: TaskBackend, key: str) -> FoundTask | None:
    """Return the task with this id and its record, or None if there is no such task, or its result has expired."""
    if not _ID.fullmatch(key):
        return None
    broker = connections.get_broker()
    task = known(broker, key)
    if task is not None and task.record.is_finished:
        return task
    reply = describe_task(broker, backend, key.encode())
    if reply is None or _is_over(reply):
        # An attempt may have ended between the two requests. A worker keeps its record before it acknowledges the message,
        # so the second read finds it.
        task = known(broker, key)
        if task is not None and task.record.is_finished:
            return task
    if reply is not None:
        return _of_message(reply, task)
    if task is not None:
        # No topic has the message, and no attempt has recorded its end: the message was cancelled or removed.
        task.record.status = FAILED
        # The time of the removal is not known. The message still existed when its last attempt began.
        task.record.finished_at = task.record.last_attempted_at
        task.record.add(_GONE)
    return task


def known(broker: Broker, key: str) -> FoundTask | None:
    """Return the record of a task's attempts, or None if none is known to have begun."""
    stored = broker.run(stored_results.result(key))
    if stored is None or stored.stamp <= RELEASED:
        return None
    return FoundTask(Job.of(json.loads(stored.job)), TaskRecord.read(stored.record, stored.stamp))


def is_released(broker: Broker, key: str) -> bool:
    """Return whether a task that waited for its time is known to have been sent to its queue."""
    return broker.run(stored_results.result(key)) is not None


def record_release(key: str) -> Call[str]:
    """Return the call that records that a task was sent from the topic where it waited to its queue."""
    return stored_results.store_result(key, RELEASED, LEAST_KEPT_MS, b"", b"")


def _of_message(looked: DescribeReply, task: FoundTask | None) -> FoundTask | None:
    death = read_record(Death.parse, looked.death)
    if task is None:
        raw = looked.delivered_envelope or looked.envelope or looked.claimed_envelope
        raw = raw or (death.envelope if death else None)
        if raw is None:
            return None
        task = FoundTask(Job.of(json.loads(decode_envelope(raw).body)), TaskRecord())
    record = task.record
    if _is_over(looked):
        record.status = FAILED
        record.finished_at = None if looked.dead is None else _instant(looked.dead)
        if death is not None:
            record.add(_error(death))
    else:
        record.status = RUNNING if _runs(looked, record) else READY
    return task


def _is_over(looked: DescribeReply) -> bool:
    """Return whether the message is dead, and was not replayed."""
    return looked.dead is not None and not any(
        state is not None for state in (looked.store, looked.prepare, looked.retry)
    )


def _runs(looked: DescribeReply, record: TaskRecord) -> bool:
    """Return whether the delivery in flight has begun: a delivered message may still wait in its worker."""
    if looked.prepare is None or looked.in_flight is None:
        return False
    receipt = looked.in_flight.split(b" ", 1)[0]
    # The record of a start has twice the receipt of its delivery as its stamp.
    return receipt.isdigit() and record.stamp == 2 * int(receipt)


def _error(death: Death) -> Error:
    text = death.error.decode("utf-8", "replace")
    sentence = f"The task ended as {death.reason}."
    return Error(
        _CLASSES.get(death.reason) or _path(error_class(text)), f"{sentence}\n{text}" if text else sentence
    )


def _path(name: str) -> str:
    """Return the path of the class by which an error text begins; the text names no module for builtins and RMQ's own.

    The path is only shown: ``_class_of`` finds the class, without an import.
    """
    if "." in name:
        return name
    for home in (builtins, exceptions):
        attribute = getattr(home, name, None)
        if isinstance(attribute, type) and issubclass(attribute, BaseException):
            return f"{home.__name__}.{name}"
    return "builtins.Exception"


def _instant(ms: float) -> datetime:
    """Return a time of Redis as Django's settings want times."""
    moment = datetime.fromtimestamp(ms / 1000, UTC)
    return moment if settings.USE_TZ else moment.astimezone().replace(tzinfo=None)


def describe_task(broker: Broker, backend: TaskBackend, member: bytes) -> DescribeReply | None:
    """Return the description of the task's message by its topic, or None if no topic has it. Raises ``RmqError``."""
    counts = {topic.name: connections.slots_now(topic) for topic in backend.topics}
    # A re-slotting that this process has not seen may have moved the message, so the second search asks for the
    # counts.
    return _search_known_slots(broker, backend, member, counts) or _search_registered_slots(
        broker, backend, member
    )


def _search_known_slots(
    broker: Broker, backend: TaskBackend, member: bytes, counts: Mapping[str, tuple[int, ...]]
) -> DescribeReply | None:
    """Look once, where these slot counts place it."""
    # The topics are read in the order in which a task passes them. While a task is sent from the topic where it waits for
    # its time to its queue, both have its message, and the later topic counts.
    return _last_description(
        broker,
        [
            inspect.describe_messages(topic, slot_of(member, slots), [member])
            for topic in [backend.later, *backend.running]
            for slots in counts[topic.name]
        ],
    )


def _search_registered_slots(broker: Broker, backend: TaskBackend, member: bytes) -> DescribeReply | None:
    """Search the slots that Redis names now: a topic may have been re-slotted since this process asked last."""
    definitions = broker.definitions()
    counts = {
        topic.name: slot_counts(definitions.get(topic.name) or topic.definition()) for topic in backend.topics
    }
    for topic in backend.topics:
        if len(counts[topic.name]) > 1 and (
            message := _search_re_slotting(broker, topic, counts[topic.name], member)
        ):
            return message
    return _search_known_slots(broker, backend, member, counts)


def _search_re_slotting(
    broker: Broker, topic: Topic, counts: tuple[int, ...], member: bytes
) -> DescribeReply | None:
    """Search the slots in the order in which a mover takes the message through them: old slot, on its way, new slot."""
    source, target = (slot_of(member, slots) for slots in counts)
    message = _last_description(broker, [inspect.describe_messages(topic, source, [member])])
    # A ticket means that a batch has left the old slot, and that the new slots may not have it yet.
    if message is None and (slot := broker.run(reslot.reslot_progress(topic, source))).ticket:
        # Without members to move, ``move_out`` only repeats the batch that has left the slot.
        left = broker.run(reslot.move_out(topic, source, slot.reslot, source))
        message = next((_leaving(row) for row in left.rows if row.member == member), None)
    return message or _last_description(broker, [inspect.describe_messages(topic, target, [member])])


def _last_description(broker: Broker, calls: list[Call[list[DescribeReply]]]) -> DescribeReply | None:
    """Return the description of the last slot that knows the message."""
    message: DescribeReply | None = None
    for answer in walk(broker, calls):
        for reply in answer:
            if reply.is_held:
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
