"""Schedules for people: when they run, and the actions pause, resume, run now, edit and delete.

Each change is a script on the record of the schedule in Redis. The steps that follow from it are those of
``core.schedules.stepper``, which workers take as well.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from django.utils.translation import gettext as _

from django_rmq import connections
from django_rmq.conf.parsers import InvalidSetting
from django_rmq.conf.schedule_settings import SCHEDULE_KEYS
from django_rmq.core.commands.broker_interface import run_all
from django_rmq.core.commands.inspect import status
from django_rmq.core.commands.schedules import change_schedule, read_schedules
from django_rmq.core.model.body_codec import encode_body
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.envelope import new_origin
from django_rmq.core.model.schedule import EDITABLE, Schedule, ScheduleRecord, instant_text, tick_member
from django_rmq.core.model.status import status_of
from django_rmq.core.model.topic import TopicType
from django_rmq.core.producer.placement import basis_of, slot_of
from django_rmq.core.schedules import stepper
from django_rmq.core.schedules.tick_times import last_tick
from django_rmq.exceptions import (
    CallerError,
    ConfigurationError,
    InvalidRequest,
    OperationRefused,
    RmqError,
    TopicFull,
    UnknownSchedule,
    Unreadable,
)
from django_rmq.message_ids import sealed_id
from django_rmq.operations.audit_trail import record_outcomes
from django_rmq.operations.authorization import OperationContext, Permission
from django_rmq.operations.sends import charge
from django_rmq.schedules import declared_schedules, timing_problems

RUNS = 5
"""The number of latest runs of a schedule whose states are read, until one has ended."""

LONGEST_MS = 366 * 86_400_000
"""How long before a run the run before it is searched, in ms."""

SET_BACK_MS = 60_000
"""By how much the clock of Redis must have been set back behind the last run of a schedule to be a problem, in ms."""

_UNENDED = {"waiting", "running", "running_and_waiting", "resting"}


@dataclass(frozen=True, slots=True)
class ScheduleStats:
    """A schedule and its runs. Times in ms since the epoch, by Redis' clock."""

    name: str
    topic: str
    schedule: Schedule
    """The schedule with the changes that people have made."""
    declared: Schedule
    """The schedule in the settings of the present version of the project."""
    override: Mapping[str, object]
    """The changes that people have made; empty if there are none."""
    is_paused: bool
    is_removed: bool
    """Whether it is being removed, because no worker declares it; it is gone when its waiting tick is taken back."""
    next_ms: int | None
    """When it runs next, or None if it is paused, or never due again."""
    last_ms: int | None
    """When it was due last, or None if it has not been due."""
    late_ms: int
    """How much later than its time the latest tick came into the queue, or is overdue."""
    problem: str = ""
    """Why its next run is unknown, or comes too late; empty if it is as it should be."""
    outcome: str = ""
    """The state of the latest of the last ``RUNS`` runs that has ended: dead, done, removed or cancelled. It is resting if
    none has ended and at least one has failed, and empty if no run has ended, or its outcome is not kept."""
    outcome_ms: int | None = None
    """When this run was due, or None if ``outcome`` is empty."""
    is_missing: bool = False
    """Whether it is declared, and Redis does not know it. Workers that run declare it within seconds."""

    @property
    def timing(self) -> str:
        """When it runs, as people read it."""
        return self.schedule.timing


def schedules(context: OperationContext, names: Collection[str] | None = None) -> list[ScheduleStats]:
    """Return the schedules that workers have declared, of these topics or of all, by their names.

    Those that the project declares, and Redis does not know, are among them.
    """
    context.actor.require(Permission.VIEW)
    names = context.known(names)
    declared_topics = context.config.topics if names is None else names
    records = context.broker.run(read_schedules())
    known = {one.name for one in records}
    chosen = [one for one in records if names is None or one.schedule.topic in names]
    missing = [
        _missing(one, records.unreadable.get(one.name, ""))
        for one in _declared().values()
        if one.name not in known and one.topic in declared_topics
    ]
    return sorted(_all_figures(context, chosen) + missing, key=lambda one: one.name)


def schedule(context: OperationContext, name: str) -> ScheduleStats:
    """Return one schedule. Raises ``UnknownSchedule``."""
    (figures,) = _all_figures(context, [_record(context, name, Permission.VIEW)])
    return figures


def pause_schedule(context: OperationContext, name: str, names: Collection[str] | None = None) -> str:
    """Take back the tick that waits, and plan none until ``resume_schedule``. Answers paused or unchanged.

    ``names``: a schedule of another topic counts as unknown.
    """
    record = _record(context, name, Permission.PAUSE, names)
    return _change(context, record, "paused", "1", "paused", from_now=False)


def resume_schedule(context: OperationContext, name: str, names: Collection[str] | None = None) -> str:
    """Continue a paused schedule from now on; what it missed is not sent. Answers resumed or unchanged."""
    record = _record(context, name, Permission.PAUSE, names)
    return _change(context, record, "paused", "", "resumed", from_now=True)


def edit_schedule(context: OperationContext, name: str, changes: Mapping[str, object]) -> str:
    """Change when a schedule runs: ``cron``, ``every``, ``timezone`` and ``catch_up``, as in the settings.

    The changes take precedence over the settings until ``reset_schedule``, also after a deployment. Answers
    changed or unchanged. Raises ``InvalidRequest``.
    """
    record = _record(context, name, Permission.EDIT)
    given = {field: _parsed(field, value) for field, value in changes.items()}
    if given.get("cron") is not None and given.get("every") is not None:
        raise InvalidRequest(_("give either cron or every"))
    override = dict(record.override)
    for field, other in (("cron", "every"), ("every", "cron")):
        if given.get(field) is not None:
            # A schedule has either cron or every, so the new one takes the place of the other.
            override.pop(other, None)
    override.update(given)
    # A value that equals that of the settings is not a change.
    changed = record.declared.changed(override)
    override = {
        field: getattr(changed, field)
        for field in EDITABLE
        if getattr(changed, field) != getattr(record.declared, field) and getattr(changed, field) is not None
    }
    for problem in timing_problems(changed):
        raise InvalidRequest(problem.message)
    text = json.dumps(override, sort_keys=True) if override else ""
    return _set_override(context, record, text, changed)


def reset_schedule(context: OperationContext, name: str) -> str:
    """Let a schedule run as the settings say. Answers changed or unchanged."""
    record = _record(context, name, Permission.EDIT)
    return _set_override(context, record, "", record.declared)


def _set_override(context: OperationContext, record: ScheduleRecord, text: str, changed: Schedule) -> str:
    """Set the changes of people, so that the schedule runs as ``changed`` says."""
    before, after = _described(record.schedule), _described(changed)
    return _change(
        context,
        record,
        "override",
        text,
        "changed",
        from_now=changed.timing != record.schedule.timing,
        note=before if before == after else f"from {before} to {after}",
    )


def delete_schedule(context: OperationContext, name: str) -> str:
    """Delete a schedule of a topic that the settings do not have, with its waiting tick. Answers deleted.

    Raises ``OperationRefused`` for another one, which goes when it is no longer declared.
    """
    record = _record(context, name, Permission.DELETE)
    if record.schedule.topic in context.config.topics:
        raise OperationRefused(
            _("remove schedule %(name)s from the settings: it goes when no worker declares it")
            % {"name": name[:100]}
        )
    context.broker.run(change_schedule(name, "removed", "1"))
    # The settings lack the topic, so the stepper gets the name of the schedule.
    stepper.Stepper(context.broker, {}).settle(name)
    note = f"schedule {name}: {_described(record.schedule)}"
    record_outcomes(context, "delete", record.schedule.topic, {"deleted": 1}, note)
    return "deleted"


def run_schedule(
    context: OperationContext, name: str, names: Collection[str] | None = None, *, is_charged: bool = False
) -> str:
    """Send the message of a schedule now, beside its ticks; return the id of the message.

    ``is_charged``: the actor is charged with one message and the size of its body. Raises ``TopicFull``, and the
    errors of ``spend_sends``.
    """
    record, now_ms = _record(context, name, Permission.SEND, names), context.broker.now_ms()
    declared = record.schedule
    topic = context.agreed(declared.topic, Permission.SEND)
    instant = datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds")
    out = stepper.message(
        topic,
        # The keys of ticks have an @ here, so this message merges with none of them.
        f"{name}!{instant}".encode(),
        declared.body,
        {"schedule": name, "run": instant},
        # The score of a range_merge topic is a time to wait, and that of the others an instant.
        0 if topic.type is TopicType.RANGE_MERGE else now_ms,
        new_origin(),
    )
    if is_charged:
        charge(context, 1, len(encode_body(topic, declared.body)))
    producer = connections.get_producer(context.purpose)
    (result,) = producer.send([producer.restore(out)])
    sent = sealed_id(topic.name, result.slot, result.member)
    record_outcomes(context, "run", topic.name, {result.status: 1}, f"schedule {name}: {sent}")
    if not result.ok:
        raise TopicFull(
            f"slot {result.slot} of topic {topic.name} is full: MAX_BACKLOG = {topic.max_backlog}"
        )
    return message_id(result.slot, result.member)


def _record(
    context: OperationContext, name: str, needed: Permission, names: Collection[str] | None = None
) -> ScheduleRecord:
    context.actor.require(needed)
    names = context.known(names, needed)
    records = context.broker.run(read_schedules())
    for record in records:
        if record.name == name and (names is None or record.schedule.topic in names):
            return record
    if names is None and name in records.unreadable:
        raise Unreadable(f"schedule {name}: {records.unreadable[name]}")
    raise UnknownSchedule(
        f"no schedule {name[:100]!r} is known: workers declare the schedules of the settings when they start"
    )


def _declared() -> Mapping[str, Schedule]:
    try:
        return declared_schedules()
    except ConfigurationError:
        return {}  # A system check reports two schedules of one name.


def _missing(declared: Schedule, unreadable: str) -> ScheduleStats:
    """Return a schedule that Redis does not know, or whose record there cannot be read."""
    return ScheduleStats(
        declared.name,
        declared.topic,
        declared,
        declared,
        {},
        is_paused=False,
        is_removed=False,
        next_ms=None,
        last_ms=None,
        late_ms=0,
        problem=f"does not run: {unreadable}" if unreadable else "",
        is_missing=not unreadable,
    )


def _all_figures(context: OperationContext, records: Sequence[ScheduleRecord]) -> list[ScheduleStats]:
    if not records:
        return []
    now_ms = context.broker.now_ms()
    outcomes = _outcomes(context, records, now_ms)
    return [_figures(one, now_ms, *outcomes.get(one.name, ("", None))) for one in records]


def _outcomes(
    context: OperationContext, records: Iterable[ScheduleRecord], now_ms: int
) -> dict[str, tuple[str, int | None]]:
    """Return for each schedule the state of its latest run that has ended, and when that run was due.

    It asks for one run of all schedules at a time, and for earlier ones while a run has not ended.
    """
    outcomes: dict[str, tuple[str, int | None]] = {}
    runs = [
        (record, last)
        for record in records
        if record.schedule.topic in context.config.topics and (last := record.last_run(now_ms)) is not None
    ]
    for _round in range(RUNS):
        earlier = []
        for (record, run), state in zip(runs, _states(context, runs), strict=True):
            if state in _UNENDED:
                if state == "resting":
                    outcomes.setdefault(record.name, (state, run))
                # Without cronsim, or with an unknown time zone, earlier runs cannot be computed.
                with suppress(ConfigurationError):
                    if (before := last_tick(record.schedule, run - LONGEST_MS, run - 1)) is not None:
                        earlier.append((record, before))
            elif state != "unknown" or record.name not in outcomes:
                outcomes[record.name] = ("", None) if state == "unknown" else (state, run)
        if not (runs := earlier):
            break
    return outcomes


def _states(context: OperationContext, runs: Iterable[tuple[ScheduleRecord, int]]) -> list[str]:
    """Return the state of the message of each run, in one round trip. A state that cannot be read is unknown."""
    asked = []
    for record, run in runs:
        topic, member = context.permitted(record.schedule.topic), tick_member(record.name, run)
        try:
            basis = basis_of(topic, record.schedule.body, None)
        except CallerError:
            # The topic no longer takes the body, so the slot follows from the member.
            basis = None
        slot = slot_of(member if basis is None else basis, topic.slots)
        asked.append((topic, slot, member))
    answers = run_all(context.broker, [status(*one) for one in asked])
    return [
        "unknown" if isinstance(answer, RmqError) else status_of(topic, slot, member, answer).state
        for (topic, slot, member), answer in zip(asked, answers, strict=True)
    ]


def _figures(record: ScheduleRecord, now_ms: int, outcome: str, outcome_ms: int | None) -> ScheduleStats:
    problem = ""
    try:
        following, late_ms = stepper.next_run(record, now_ms), stepper.lateness_ms(record, now_ms)
    except ConfigurationError as error:
        # Without cronsim, or with an unknown time zone, the next run cannot be computed.
        following, late_ms, problem = None, record.late_ms, str(error)
    last_ms = record.last_run(now_ms)
    # A slot refuses ticks that are not later than its latest one, so nothing can make the schedule run before.
    if not problem and last_ms is not None and last_ms > now_ms + SET_BACK_MS:
        problem = f"ran last at {instant_text(last_ms)}, and does not run again before that time: the clock of Redis was set back"
    return ScheduleStats(
        record.name,
        record.schedule.topic,
        record.schedule,
        record.declared,
        record.override,
        record.is_paused,
        record.is_removed,
        following,
        last_ms,
        late_ms,
        problem,
        outcome,
        outcome_ms,
    )


def _described(schedule: Schedule) -> str:
    """Return when a schedule runs, for the audit trail."""
    return f"{schedule.timing}, catch-up {schedule.catch_up}"


def _change(
    context: OperationContext,
    record: ScheduleRecord,
    field: str,
    value: str,
    word: str,
    *,
    from_now: bool,
    note: str = "",
) -> str:
    name = record.name
    if record.is_removed:
        raise OperationRefused(
            _("schedule %(name)s is being removed, because no worker declares it") % {"name": name}
        )
    answer = context.broker.run(change_schedule(name, field, value, from_now=from_now))
    outcome = word if answer == "changed" else "unchanged"
    act = {"paused": "pause", "resumed": "resume", "changed": "edit"}[word]
    record_outcomes(
        context, act, record.schedule.topic, {outcome: 1}, f"schedule {name}{note and f': {note}'}"
    )
    # If this fails, workers take the same steps within seconds.
    with suppress(RmqError):
        stepper.Stepper(context.broker, context.config.topics).settle()
    return outcome


def _parsed(field: str, value: object) -> object:
    if field not in EDITABLE:
        raise InvalidRequest(
            _("%(field)s of a schedule cannot be changed here, only %(fields)s")
            % {"field": field[:40], "fields": ", ".join(EDITABLE)}
        )
    if value is None:
        return None
    try:
        return SCHEDULE_KEYS[field.upper()][1](value)
    except InvalidSetting as wanted:
        raise InvalidRequest(f"{field} must be {wanted}") from None
