"""Places: where the message of a task is, also while the topics of its queue are being re-slotted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django_rmq import connections
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.core.commands import inspect, reshard
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.keys import slot_of
from django_rmq.core.model.replies import CopyReply, DescribeReply
from django_rmq.core.model.topic import Topic, slot_counts
from django_rmq.exceptions import RmqError


def look(broker: Broker, backend: TaskBackend, member: bytes) -> DescribeReply | None:
    """Return what is known of the task's message, in whichever topic it is. None: it is nowhere. Raises ``RmqError``."""
    counts = {topic.name: connections.slots_now(topic) for topic in backend.topics}
    return _first(broker, backend, member, counts) or _again(broker, backend, member)


def _first(
    broker: Broker, backend: TaskBackend, member: bytes, counts: Mapping[str, tuple[int, ...]]
) -> DescribeReply | None:
    """Look once, where these slot counts place it."""
    # In the order of its way. A task that is about to leave the topic of those that wait is in both; the last one is
    # where it waits.
    return _found(
        broker,
        [
            inspect.look(topic, slot_of(member, slots), [member])
            for topic in [backend.later, *backend.running]
            for slots in counts[topic.name]
        ],
    )


def _again(broker: Broker, backend: TaskBackend, member: bytes) -> DescribeReply | None:
    """Look where Redis says now. Since this process asked last, a topic may have been re-slotted."""
    definitions = broker.definitions()
    counts = {
        topic.name: slot_counts(definitions.get(topic.name) or topic.definition()) for topic in backend.topics
    }
    for topic in backend.topics:
        if len(counts[topic.name]) > 1 and (found := _on_its_way(broker, topic, counts[topic.name], member)):
            return found
    return _first(broker, backend, member, counts)


def _on_its_way(broker: Broker, topic: Topic, counts: tuple[int, ...], member: bytes) -> DescribeReply | None:
    """Look in the order of its way: in the old slot, in what has left it, in the new slot."""
    source, target = (slot_of(member, slots) for slots in counts)
    found = _found(broker, [inspect.look(topic, source, [member])])
    if found is None and (slot := broker.run(reshard.survey(topic, source))).ticket:
        # With no members to move it only repeats what has left.
        left = broker.run(reshard.move_out(topic, source, slot.reslot, source))
        found = next((_leaving(row) for row in left.rows if row.member == member), None)
    return found or _found(broker, [inspect.look(topic, target, [member])])


def _found(broker: Broker, calls: list[Call[list[DescribeReply]]]) -> DescribeReply | None:
    """Return what the last of the slots knows that knows anything."""
    found: DescribeReply | None = None
    for answer in run_all(broker, calls):
        if isinstance(answer, RmqError):
            raise answer
        for looked in answer:
            if any(score is not None for score in looked[:5]):
                found = looked
    return found


def _leaving(row: CopyReply) -> DescribeReply:
    """Return what a slot would know of the message if it were still there."""
    scores: dict[str, Any] = dict.fromkeys(("store", "prepare", "retry", "dead"))
    scores[row.state] = float(row.score)
    rest = row.rest or None
    return (
        DescribeReply(**scores, death=rest) if row.state == "dead" else DescribeReply(**scores, envelope=rest)
    )


__all__ = ["look"]
