"""The status of a task: from its message until it has ended, and then from the record that its last attempt kept.

``find`` combines both. ``records`` searches for the message, and makes the result that programs get. What an attempt keeps is
decided by ``execution``.
"""

from __future__ import annotations

import builtins
import json
import re
from datetime import UTC, datetime
from typing import NamedTuple

from django.conf import settings

from django_rmq import connections, exceptions
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.core.commands import stored_results
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.envelope import decode_envelope
from django_rmq.core.model.replies import Death, DescribeReply, error_class
from django_rmq.tasks.jobs import Job
from django_rmq.tasks.records import FAILED, READY, RUNNING, Error, TaskRecord, describe_task

_ID = re.compile(r"[A-Za-z0-9]{1,64}", re.ASCII)

RELEASED = 1
"""The stamp of the record of a task that no attempt has begun. The stamps of attempts are twice a receipt, or more."""

LEAST_KEPT_MS = 604_800_000
"""How long the record of a task that is not finished is kept at least, in ms: a week."""

_GONE = Error("django_rmq.exceptions.MessageGone", "The task was cancelled, or removed from its queue.")

_CLASSES = {
    "timed_out": "builtins.TimeoutError",
    "overran": "builtins.TimeoutError",
    "rejected": "django_rmq.exceptions.Reject",
    "buried": "django_rmq.exceptions.Reject",
}
"""Why a message died -> the class of the error, where no listener has raised one."""


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
    death = Death.parse(looked.death) if looked.death is not None else None
    if task is None:
        raw = looked.delivered_envelope or looked.envelope or looked.claimed_envelope
        raw = raw or (death.envelope if death else None)
        if raw is None:
            return None
        task = FoundTask(Job.of(json.loads(decode_envelope(raw).body)), TaskRecord())
    record = task.record
    if _is_over(looked):
        record.status = FAILED
        record.finished_at = None if looked.dead is None else _moment(looked.dead)
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

    The path is only shown: ``records`` finds the class, without an import.
    """
    if "." in name:
        return name
    for home in (builtins, exceptions):
        attribute = getattr(home, name, None)
        if isinstance(attribute, type) and issubclass(attribute, BaseException):
            return f"{home.__name__}.{name}"
    return "builtins.Exception"


def _moment(ms: float) -> datetime:
    """Return a time of Redis as Django's settings want times."""
    moment = datetime.fromtimestamp(ms / 1000, UTC)
    return moment if settings.USE_TZ else moment.astimezone().replace(tzinfo=None)
