"""Schedules as people see them: when they run, and pause, resume, run now and edit."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django_rmq.core.calls import schedules as calls
from django_rmq.core.schedules import stepping
from django_rmq.core.words.envelopes import new_origin
from django_rmq.core.words.messages import message_id
from django_rmq.core.words.schedules import EDITABLE, Record, Schedule
from django_rmq.core.words.topics import TopicType
from django_rmq.exceptions import (
    ConfigurationError,
    InvalidRequest,
    OperationRefused,
    RmqError,
    TopicFull,
    UnknownSchedule,
)
from django_rmq.operations.actors import Permission
from django_rmq.operations.desk import Desk
from django_rmq.project import connections
from django_rmq.project.scheduling import conditions
from django_rmq.project.settings.schedules import SCHEDULE_KEYS
from django_rmq.project.settings.values import Wanted


@dataclass(frozen=True, slots=True)
class ScheduleFigures:
    """A schedule and its runs. Times in ms since the epoch, by Redis' clock."""

    name: str
    topic: str
    schedule: Schedule
    """With what people have changed."""
    declared: Schedule
    """As the settings of the present version of the project say."""
    override: Mapping[str, Any]
    """What people have changed. Empty: nothing."""
    is_paused: bool
    is_removed: bool
    """Whether it is being removed, because no worker declares it; it is gone when its waiting tick is taken back."""
    next_ms: int | None
    """When it runs next. None: it is paused, or never due again."""
    last_ms: int | None
    """When it was due last. None: not yet."""
    late_ms: int
    """How much later than its time the latest tick came into the queue, or is overdue."""
    problem: str = ""
    """Why its next run is unknown. Empty: it is known."""

    @property
    def timing(self) -> str:
        """When it runs, as people read it."""
        return self.schedule.timing


def schedules(desk: Desk, names: Collection[str] | None = None) -> list[ScheduleFigures]:
    """Return the schedules that workers have declared, of these topics or of all, by their names."""
    desk.actor.require(Permission.VIEW)
    found = desk.broker.run(calls.read_schedules())
    now_ms = desk.broker.now_ms() if found else 0
    return [_figures(one, now_ms) for one in found if names is None or one.schedule.topic in names]


def schedule(desk: Desk, name: str) -> ScheduleFigures:
    """Return one schedule. Raises ``UnknownSchedule``."""
    desk.actor.require(Permission.VIEW)
    return _figures(_record(desk, name), desk.broker.now_ms())


def pause_schedule(desk: Desk, name: str, names: Collection[str] | None = None) -> str:
    """Take back the tick that waits, and plan none until ``resume_schedule``. Answers paused or unchanged.

    ``names``: a schedule of another topic counts as unknown.
    """
    desk.actor.require(Permission.PAUSE)
    return _change(desk, _record(desk, name, names), "paused", "1", "paused", from_now=False)


def resume_schedule(desk: Desk, name: str, names: Collection[str] | None = None) -> str:
    """Continue a paused schedule from now on; what it missed is not sent. Answers resumed or unchanged."""
    desk.actor.require(Permission.PAUSE)
    return _change(desk, _record(desk, name, names), "paused", "", "resumed", from_now=True)


def edit_schedule(desk: Desk, name: str, changes: Mapping[str, Any]) -> str:
    """Change when a schedule runs: ``cron``, ``every``, ``timezone`` and ``catch_up``, as in the settings.

    The changes take precedence over the settings until ``reset_schedule``, also after a deployment. Answers
    changed or unchanged. Raises ``InvalidRequest``.
    """
    desk.actor.require(Permission.EDIT)
    record = _record(desk, name)
    given = {field: _parsed(field, value) for field, value in changes.items()}
    if given.get("cron") is not None and given.get("every") is not None:
        raise InvalidRequest("give either cron or every")
    override = dict(record.override)
    for field, other in (("cron", "every"), ("every", "cron")):
        if given.get(field) is not None:
            override.pop(other, None)
    override.update(given)
    # What equals the settings is no change of them.
    changed = record.declared.changed(override)
    override = {
        field: getattr(changed, field)
        for field in EDITABLE
        if getattr(changed, field) != getattr(record.declared, field) and getattr(changed, field) is not None
    }
    for problem in conditions.of_timing(changed):
        raise InvalidRequest(problem.message)
    text = json.dumps(override, sort_keys=True) if override else ""
    return _change(
        desk, record, "override", text, "changed", from_now=changed.timing != record.schedule.timing
    )


def reset_schedule(desk: Desk, name: str) -> str:
    """Let a schedule run as the settings say. Answers changed or unchanged."""
    desk.actor.require(Permission.EDIT)
    record = _record(desk, name)
    return _change(
        desk, record, "override", "", "changed", from_now=record.declared.timing != record.schedule.timing
    )


def delete_schedule(desk: Desk, name: str) -> str:
    """Delete a schedule of a topic that the settings do not have, with its waiting tick. Answers deleted.

    Raises ``OperationRefused`` for another one, which goes when it is no longer declared.
    """
    desk.actor.require(Permission.DELETE)
    record = _record(desk, name)
    if record.schedule.topic in desk.config.topics:
        raise OperationRefused(
            f"remove schedule {name[:100]} from the settings: it goes when no worker declares it"
        )
    desk.broker.run(calls.change_schedule(name, "removed", "1"))
    stepping.Stepper(desk.broker, {}).settle(name)
    desk.record("delete", record.schedule.topic, {"deleted": 1}, f"schedule {name}")
    return "deleted"


def run_schedule(desk: Desk, name: str, names: Collection[str] | None = None) -> str:
    """Send the message of a schedule now, beside its ticks; return the id of the message.

    Raises ``TopicFull``.
    """
    desk.actor.require(Permission.SEND)
    record, now_ms = _record(desk, name, names), desk.broker.now_ms()
    declared = record.schedule
    topic = desk.agreed(declared.topic)
    instant = datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds")
    out = stepping.message(
        topic,
        f"{name}!{instant}".encode(),
        declared.body,
        {"schedule": name, "run": instant},
        0 if topic.type is TopicType.RANGE_MERGE else now_ms,
        new_origin(),
    )
    producer = connections.get_producer(desk.purpose)
    (result,) = producer.send([producer.restore(out)])
    desk.record("run", topic.name, {result.status: 1}, f"schedule {name}")
    if not result.ok:
        raise TopicFull(
            f"slot {result.slot} of topic {topic.name} is full: MAX_BACKLOG = {topic.max_backlog}"
        )
    return message_id(result.slot, result.member)


def _record(desk: Desk, name: str, names: Collection[str] | None = None) -> Record:
    for found in desk.broker.run(calls.read_schedules()):
        if found.name == name and (names is None or found.schedule.topic in names):
            return found
    raise UnknownSchedule(
        f"no schedule {name[:100]!r} is known: workers declare the schedules of the settings when they start"
    )


def _figures(record: Record, now_ms: int) -> ScheduleFigures:
    try:
        following, late_ms, problem = (
            stepping.next_run(record, now_ms),
            stepping.lateness_ms(record, now_ms),
            "",
        )
    except ConfigurationError as error:
        following, late_ms, problem = None, record.late_ms, str(error)
    return ScheduleFigures(
        record.name,
        record.schedule.topic,
        record.schedule,
        record.declared,
        record.override,
        record.is_paused,
        record.is_removed,
        following,
        record.last_run(now_ms),
        late_ms,
        problem,
    )


def _change(desk: Desk, record: Record, field: str, value: str, word: str, *, from_now: bool) -> str:
    name = record.name
    if record.is_removed:
        raise OperationRefused(f"schedule {name} is being removed, because no worker declares it")
    answer = desk.broker.run(calls.change_schedule(name, field, value, from_now=from_now))
    outcome = word if answer == "changed" else "unchanged"
    act = {"paused": "pause", "resumed": "resume", "changed": "edit"}[word]
    desk.record(act, record.schedule.topic, {outcome: 1}, f"schedule {name}")
    # Workers take the same steps within seconds.
    with suppress(RmqError):
        stepping.Stepper(desk.broker, desk.config.topics).settle()
    return outcome


def _parsed(field: str, value: Any) -> Any:
    if field not in EDITABLE:
        raise InvalidRequest(f"{field[:40]} of a schedule cannot be changed here, only {', '.join(EDITABLE)}")
    if value is None:
        return None
    try:
        return SCHEDULE_KEYS[field.upper()][1](value)
    except Wanted as wanted:
        raise InvalidRequest(f"{field} must be {wanted}") from None


__all__ = [
    "ScheduleFigures",
    "delete_schedule",
    "edit_schedule",
    "pause_schedule",
    "reset_schedule",
    "resume_schedule",
    "run_schedule",
    "schedule",
    "schedules",
]
