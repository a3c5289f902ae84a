"""A task as its message carries it (``Job``), and the search for that message in the topics of its backend.

The search finds the message also while one of these topics is re-slotted. The records of attempts are in
``result_records``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from django_rmq import connections
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.core.commands import inspect, reshard
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.inspect import walk
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.keys import slot_of
from django_rmq.core.model.replies import CopyReply, DescribeReply
from django_rmq.core.model.topic import Topic, slot_counts
from django_rmq.exceptions import UnknownTask
from django_rmq.tasks import task_modules
from django_rmq.tasks.frameworks import Framework

_LOWEST = 1_024
"""Larger than any score that a priority topic interprets as a retry."""

_LEVEL = 1 << 35
"""The number of places that a priority has."""

_STEP_MS = 20
_SINCE_MS = 1_767_225_600_000
"""2026-01-01. The places of a priority last until 2047; later tasks share the last place."""


def place(priority: int, since: datetime) -> int:
    """Return the priority in the topic for that of a task: higher ones first, then longer waits, in steps of 20 ms."""
    steps = (round(since.timestamp() * 1000) - _SINCE_MS) // _STEP_MS
    return _LOWEST + (priority + 101) * _LEVEL - 1 - min(max(steps, 0), _LEVEL - 1)


class Job(NamedTuple):
    """One call of a task, as its message carries it."""

    path: str
    """``module.name`` of the task."""
    args: list[Any]
    kwargs: dict[str, Any]
    backend: str
    """The alias of the backend."""
    queue: str
    priority: int
    enqueued_at: datetime
    run_after: datetime | None
    in_loop: bool
    """Whether the function is a coroutine function."""

    @property
    def body(self) -> dict[str, Any]:
        """The message's body."""
        found = {
            "task": self.path,
            "args": self.args,
            "kwargs": self.kwargs,
            "backend": self.backend,
            "queue": self.queue,
            "priority": self.priority,
            "enqueued_at": self.enqueued_at.isoformat(),
        }
        if self.run_after is not None:
            found["run_after"] = self.run_after.isoformat()
        if self.in_loop:
            found["async"] = True
        return found

    @property
    def place(self) -> int:
        """Its priority in the topic of its queue."""
        return place(self.priority, self.run_after or self.enqueued_at)

    @classmethod
    def of(cls, body: Any) -> Job:
        """Return the job in a message's body. Raises ``ValueError`` for any other body."""
        try:
            after = body.get("run_after")
            if not isinstance(body["task"], str):
                raise TypeError(f"the task is {type(body['task']).__name__}, and not a path")
            return cls(
                body["task"],
                body["args"],
                body["kwargs"],
                body["backend"],
                body["queue"],
                body["priority"],
                datetime.fromisoformat(body["enqueued_at"]),
                None if after is None else datetime.fromisoformat(after),
                body.get("async", False),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"the body is not that of a task: {error!r}") from None

    def task(self, framework: Framework) -> Any:
        """Return the task, with the options of this call.

        Raises ``UnknownTask`` if no imported module has such an object, ``TypeError`` if it is something else, and the
        framework's ``InvalidTask`` if the backend does not take it any more.
        """
        found = task_modules.imported(self.path)
        if found is None:
            # Web processes import the tasks of all apps only if a result needs them.
            task_modules.import_tasks()
            found = task_modules.imported(self.path)
        if found is None:
            raise UnknownTask(
                f"no module that is imported here has the task {self.path[:200]!r}. Tasks are found in the tasks modules "
                'of the installed apps. Name any other module in OPTIONS["MODULES"] of the backend, or import it in '
                "AppConfig.ready"
            )
        if not isinstance(found, framework.base.Task):
            raise TypeError(f"{self.path} is a {type(found).__name__}, and not a task")
        given = (self.priority, self.queue, self.backend, self.run_after)
        if given == (found.priority, found.queue_name, found.backend, found.run_after):
            return found
        return found.using(
            priority=self.priority, queue_name=self.queue, backend=self.backend, run_after=self.run_after
        )


def look(broker: Broker, backend: TaskBackend, member: bytes) -> DescribeReply | None:
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
            inspect.look(topic, slot_of(member, slots), [member])
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
        if len(counts[topic.name]) > 1 and (found := _on_its_way(broker, topic, counts[topic.name], member)):
            return found
    return _first(broker, backend, member, counts)


def _on_its_way(broker: Broker, topic: Topic, counts: tuple[int, ...], member: bytes) -> DescribeReply | None:
    """Search the slots in the order in which a mover takes the message through them: old slot, on its way, new slot."""
    source, target = (slot_of(member, slots) for slots in counts)
    found = _found(broker, [inspect.look(topic, source, [member])])
    # A ticket means that a batch has left the old slot, and that the new slots may not have it yet.
    if found is None and (slot := broker.run(reshard.survey(topic, source))).ticket:
        # Without members to move, ``move_out`` only repeats the batch that has left the slot.
        left = broker.run(reshard.move_out(topic, source, slot.reslot, source))
        found = next((_leaving(row) for row in left.rows if row.member == member), None)
    return found or _found(broker, [inspect.look(topic, target, [member])])


def _found(broker: Broker, calls: list[Call[list[DescribeReply]]]) -> DescribeReply | None:
    """Return the description of the last slot that knows the message."""
    found: DescribeReply | None = None
    for answer in walk(broker, calls):
        for looked in answer:
            if any(score is not None for score in looked[:5]):
                found = looked
    return found


def _leaving(row: CopyReply) -> DescribeReply:
    """Return the description that a slot would give if the message were still there."""
    scores: dict[str, Any] = dict.fromkeys(("store", "prepare", "retry", "dead"))
    scores[row.state] = float(row.score)
    rest = row.rest or None
    return (
        DescribeReply(**scores, death=rest) if row.state == "dead" else DescribeReply(**scores, envelope=rest)
    )
