"""The status of a task: from its message until it has ended, and then from the record that its last attempt kept.

``find`` combines both, and finds the message while a topic of its backend is re-slotted, too. ``records`` makes the result that
programs get. What an attempt keeps is decided by ``execution``.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.conf import settings

from django_rmq import connections, exceptions
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.core.commands import inspect, reslot, stored_results
from django_rmq.core.commands.broker_interface import Broker, walk
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.envelope import decode_envelope
from django_rmq.core.model.replies import CopyReply, Death, DescribeReply, error_class
from django_rmq.core.model.topic import Topic, slot_counts
from django_rmq.core.producer.placement import slot_of
from django_rmq.tasks.jobs import Job
from django_rmq.tasks.records import FAILED, LEAST_KEPT_MS, READY, RUNNING, Error, TaskRecord

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
