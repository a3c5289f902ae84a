"""Finding: what became of a task, from its message while it has one, and from what was kept of its attempts."""

from __future__ import annotations

import builtins
import json
import re
from datetime import UTC, datetime
from typing import NamedTuple

from django.conf import settings

from django_rmq import connections, exceptions
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.core.commands import task_results
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.envelope import decode_envelope
from django_rmq.core.model.failure_records import Death, error_class
from django_rmq.core.model.replies import DescribeReply
from django_rmq.tasks.job_lookup import look
from django_rmq.tasks.jobs import Job
from django_rmq.tasks.result_records import (
    FAILED,
    READY,
    RUNNING,
    Error,
    TaskRecord,
)

_ID = re.compile(r"[A-Za-z0-9]{1,64}", re.ASCII)

RELEASED = 1
"""The stamp of what is kept of a task that no attempt has begun. Those of attempts are twice a receipt, or more."""

LEAST_KEPT_MS = 604_800_000
"""How long what is kept of a task that is not finished stays at least: a week."""

_GONE = Error("django_rmq.exceptions.MessageGone", "The task was cancelled, or removed from its queue.")

_CLASSES = {
    "timed_out": "builtins.TimeoutError",
    "overran": "builtins.TimeoutError",
    "rejected": "django_rmq.exceptions.Reject",
    "buried": "django_rmq.exceptions.Reject",
}
"""Why a message died -> the class of the error, where no listener has raised one."""


class FoundTask(NamedTuple):
    """What became of a task."""

    job: Job
    record: TaskRecord


def find(backend: TaskBackend, key: str) -> FoundTask | None:
    """Return what became of the task with this id. None: there is no such task, or its result has expired."""
    if not _ID.fullmatch(key):
        return None
    broker = connections.get_broker()
    found = known(broker, key)
    if found is not None and found.record.is_finished:
        return found
    looked = look(broker, backend, key.encode())
    if looked is None or _is_over(looked):
        # Attempts may have ended between the two requests. What became of each was kept before its message went on.
        found = known(broker, key)
        if found is not None and found.record.is_finished:
            return found
    if looked is not None:
        return _of_message(looked, found)
    if found is not None:
        found.record.status = FAILED
        # When it was removed is not known. It was alive when its last attempt began.
        found.record.finished_at = found.record.last_attempted_at
        found.record.add(_GONE)
    return found


def known(broker: Broker, key: str) -> FoundTask | None:
    """Return what was kept of a task's attempts. None: none has begun that anybody knows of."""
    kept = broker.run(task_results.result(key))
    if kept is None or kept.stamp <= RELEASED:
        return None
    return FoundTask(Job.of(json.loads(kept.job)), TaskRecord.read(kept.record, kept.stamp))


def is_released(broker: Broker, key: str) -> bool:
    """Return whether a task that waited for its time is known to have been sent to its queue."""
    return broker.run(task_results.result(key)) is not None


def note_release(key: str) -> Call[str]:
    """Return what notes that a task that waited for its time was sent to its queue."""
    return task_results.keep_result(key, RELEASED, LEAST_KEPT_MS, b"", b"")


def _of_message(looked: DescribeReply, kept: FoundTask | None) -> FoundTask | None:
    death = Death.parse(looked.death) if looked.death is not None else None
    if kept is None:
        raw = looked.delivered_envelope or looked.envelope or looked.claimed_envelope
        raw = raw or (death.envelope if death else None)
        if raw is None:
            return None
        kept = FoundTask(Job.of(json.loads(decode_envelope(raw).body)), TaskRecord())
    record = kept.record
    if _is_over(looked):
        record.status = FAILED
        record.finished_at = None if looked.dead is None else _moment(looked.dead)
        if death is not None:
            record.add(_error(death))
    else:
        record.status = RUNNING if _runs(looked, record) else READY
    return kept


def _is_over(looked: DescribeReply) -> bool:
    """Return whether the message is dead, and was not sent again."""
    return looked.dead is not None and looked.store is looked.prepare is looked.retry is None


def _runs(looked: DescribeReply, record: TaskRecord) -> bool:
    """Return whether the delivery that is in flight has begun: what was handed out may still wait in its worker."""
    if looked.prepare is None or looked.in_flight is None:
        return False
    receipt = looked.in_flight.split(b" ", 1)[0]
    return receipt.isdigit() and record.stamp == 2 * int(receipt)


def _error(death: Death) -> Error:
    text = death.error.decode("utf-8", "replace")
    told = f"The task ended as {death.reason}."
    return Error(_CLASSES.get(death.reason) or _path(error_class(text)), f"{told}\n{text}" if text else told)


def _path(name: str) -> str:
    """Return the path of a class by which an error text begins. It names the module only if that is another one.

    The path is only shown: ``records`` finds the class, without an import.
    """
    if "." in name:
        return name
    for home in (builtins, exceptions):
        found = getattr(home, name, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return f"{home.__name__}.{name}"
    return "builtins.Exception"


def _moment(ms: float) -> datetime:
    """Return a time of Redis as Django's settings want times."""
    found = datetime.fromtimestamp(ms / 1000, UTC)
    return found if settings.USE_TZ else found.astimezone().replace(tzinfo=None)


__all__ = ["LEAST_KEPT_MS", "FoundTask", "find", "is_released", "known", "note_release"]
