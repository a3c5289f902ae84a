"""Topics as a whole: their definitions, a new slot count, limits that are changed at run time, and all rules of one topic.

What the settings may say of a topic is decided by ``conf.topic_settings``. The end of a topic that is no longer declared is the
part of ``undeclared_topics``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

from django.conf import settings
from django.utils.translation import gettext as _

from django_rmq.conf.topic_settings import SETTINGS_OF_TYPES, TOPIC_KEYS
from django_rmq.core import reslotting, topic_registration
from django_rmq.core.commands import limits
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.changed_limits import LIMITS, ChangedLimits, check_limit, limited
from django_rmq.core.model.keys import Definitions
from django_rmq.core.model.topic import Topic, former_slot_counts, slot_counts
from django_rmq.core.reslotting import Reslotting
from django_rmq.core.topic_registration import Difference
from django_rmq.durations import duration_text
from django_rmq.exceptions import (
    ConfigurationError,
    InvalidRequest,
    RmqError,
    ServerTrouble,
    TopicMismatch,
    WrongType,
)
from django_rmq.operations.audit_trail import record_outcomes
from django_rmq.operations.authorization import OperationContext, Permission
from django_rmq.operations.schedules import ScheduleStats, schedules
from django_rmq.operations.stats import serving
from django_rmq.worker.listener_registry import Listener, listeners


@dataclass(frozen=True, slots=True)
class Defined:
    """One topic of the settings, and its registered definition."""

    topic: Topic
    state: str
    """unreadable, new, differs or same; registered or applied, if that has just been done."""
    registered: Mapping[str, object] | None
    """The registered definition, or None if there is none."""
    differences: list[Difference] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)
    """The reasons why it was not applied."""


def compare(topic: Topic, registered: Definitions) -> Defined:
    """Return how ``topic`` differs from its registered definition."""
    if topic.name in registered.unreadable:
        return Defined(topic, "unreadable", None, obstacles=[registered.problem(topic.name)])
    known = registered.get(topic.name)
    if known is None:
        return Defined(topic, "new", None)
    different = topic_registration.differences(topic, known)
    return Defined(topic, "differs" if different else "same", known, different)


def apply(broker: Broker, defined: Defined, *, force: bool) -> Defined:
    """Register new topics, and change what may be changed. ``force``: even if live workers keep the old values."""
    topic = defined.topic
    if defined.state == "new":
        broker.define(topic)
        return Defined(topic, "registered", defined.registered)
    if defined.state == "differs":
        running = [] if force else serving(broker, topic.name)
        obstacles = topic_registration.obstacles(broker, topic, defined.differences, running)
        obstacles = obstacles or topic_registration.apply(broker, topic)
        if obstacles:
            return Defined(topic, defined.state, defined.registered, defined.differences, obstacles)
        return Defined(topic, "applied", defined.registered, defined.differences)
    return defined


# Faces import nothing of the core.
DrainProgress: TypeAlias = reslotting.DrainProgress
SETS_AT_ONCE = reslotting.AT_ONCE
begin_slot_count = reslotting.begin

RESLOT_PATIENCE = 60.0
"""Seconds without an answer of Redis after which a move gives up; it can be started again."""


@dataclass(frozen=True, slots=True)
class SlotCountPlan:
    """A change of a topic's slot count, before it is begun."""

    topic: Topic
    before: int
    slots: int
    """The new number of slots."""
    is_begun: bool
    """Whether it was begun already."""
    obstacle: str
    """Why the change is not permitted; empty if it is."""


def plan_slot_count(broker: Broker, topic: Topic, slots: int | None) -> SlotCountPlan:
    """Return the plan for giving ``topic`` that many slots.

    Without a number, a change that was begun is finished, or the number of the settings is used.

    Raises ``ConfigurationError`` for an invalid number or if none is known, and ``TopicMismatch`` if settings
    and Redis disagree about more than slots, because the slot of a message depends on that.
    """
    known = broker.definitions().of(topic.name) or {}
    _check_the_rest(topic, known)
    begun = reslotting.under_way(broker, topic)
    # Settings with the present count, or with a former one, do not ask for a change.
    declared = None if topic.slots in (*former_slot_counts(known), known.get("slots")) else topic.slots
    slot_count = slots or (begun.topic.slots if begun else declared)
    if slot_count is None:
        raise ConfigurationError(
            f'topic "{topic.name}" is not being re-slotted: give the new number of slots'
        )
    before = slot_counts(known)[0] if known else topic.slots
    return SlotCountPlan(
        topic, before, slot_count, begun is not None, reslotting.obstacle(broker, topic, slot_count)
    )


def _check_the_rest(topic: Topic, known: dict[str, object]) -> None:
    different = (
        [each for each in topic_registration.differences(topic, known) if each.setting != "SLOTS"]
        if known
        else []
    )
    if different:
        named = ", ".join(
            f"{each.setting} is {each.declared!r} here and {each.registered!r} in Redis" for each in different
        )
        raise TopicMismatch(
            f'topic "{topic.name}": {named}. Correct the settings, or apply them: `manage.py rmqtopics --apply`'
        )


def move_to_slots(
    broker: Broker,
    change: Reslotting,
    *,
    at_once: int,
    report: Callable[[DrainProgress], None],
    report_trouble: Callable[[ServerTrouble], None],
) -> DrainProgress:
    """Move all messages by ``core.reslotting``, even while Redis fails, because each step can be repeated.

    ``report_trouble`` gets each error after which it tries again.
    """
    answered = time.monotonic()

    def note(step: str, progress: DrainProgress) -> None:
        nonlocal answered
        answered = time.monotonic()
        report(progress)

    while True:
        try:
            progress = reslotting.move(broker, change, at_once=at_once, report=note)
            reslotting.finish(broker, change)
            return progress
        except ServerTrouble as error:
            # The time counts from the last step that was done, so a move survives any number of short outages.
            if time.monotonic() - answered > RESLOT_PATIENCE:
                raise
            report_trouble(error)
            time.sleep(1.0)


class TopicLimits(NamedTuple):
    """The limits of a topic that can be changed at run time."""

    declared: Topic
    """The topic with the limits of its settings."""
    topic: Topic
    """The topic with the limits in effect."""
    changed: ChangedLimits | None
    """What a person has changed, or None if the settings are in effect."""

    @property
    def different(self) -> list[str]:
        """The limits that differ from the settings."""
        return [name for name in LIMITS if getattr(self.topic, name) != getattr(self.declared, name)]


def topic_limits(context: OperationContext, name: str) -> TopicLimits:
    """Return the limits of a topic in effect."""
    topic = context.permitted(name, Permission.VIEW)
    changed = changed_limits(context.broker).get(name)
    return TopicLimits(topic, limited(topic, changed), changed)


def changed_limits(broker: Broker) -> dict[str, ChangedLimits]:
    """Return the limits that were changed at run time, by topic. Raises ``ServerTrouble``."""
    try:
        return broker.run(limits.read_changed_limits())
    except ServerTrouble:
        raise
    except RmqError:
        # Another program has put a value of another type in their place, and workers apply the settings.
        return {}


def change_limits(context: OperationContext, name: str, values: Mapping[str, object]) -> TopicLimits:
    """Let limits take precedence over the settings; those that are not in ``values`` are those of the settings.

    Workers apply them within five seconds, without a restart. ``values``: max_rate and max_in_flight; None is no limit.
    Raises ``InvalidRequest``.
    """
    topic = context.permitted(name, Permission.PAUSE)
    if not values or not set(values) <= set(LIMITS):
        raise InvalidRequest(_("give one or more of %(limits)s") % {"limits": ", ".join(LIMITS)})
    try:
        checked = {limit: check_limit(limit, value) for limit, value in values.items()}
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    before = limited(topic, changed_limits(context.broker).get(name))
    changed = ChangedLimits(checked, context.actor.name, context.broker.now_ms())
    context.broker.run(limits.write_changed_limits(name, changed))
    changed_now = TopicLimits(topic, limited(topic, changed), changed)
    record_outcomes(context, "change limits", name, {"changed": 1}, _change(before, changed_now.topic))
    return changed_now


def reset_limits(context: OperationContext, name: str) -> TopicLimits:
    """Return a topic to the limits of its settings. Workers apply them within five seconds."""
    topic = context.permitted(name, Permission.PAUSE)
    before = limited(topic, changed_limits(context.broker).get(name))
    if context.broker.run(limits.delete_changed_limits(name)):
        record_outcomes(context, "reset limits", name, {"changed": 1}, _change(before, topic))
    return TopicLimits(topic, topic, None)


def _change(before: Topic, after: Topic) -> str:
    """Return the text of the audit trail about limits."""
    changes = []
    for name in LIMITS:
        was, now = getattr(before, name), getattr(after, name)
        changes.append(f"{name} {_limit(was)} -> {_limit(now)}" if was != now else f"{name} {_limit(now)}")
    return ", ".join(changes)


def _limit(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


class SettingInEffect(NamedTuple):
    """One setting of a topic."""

    key: str
    """The key in ``RMQ["TOPICS"][name]``."""
    value: str
    """As text in the form of the settings."""
    origin: str
    """topic: its own options have it. defaults: TOPIC_DEFAULTS have it. Empty: it is the default of the package."""
    registered: str
    """The value in Redis, if it is another one; otherwise empty."""


class TopicCard(NamedTuple):
    """All rules of one topic."""

    limits: TopicLimits
    settings: list[SettingInEffect]
    listener: Listener | None
    """The function of this project that listens, or None if there is none in this process."""
    schedules: list[ScheduleStats]
    """The schedules that send to it."""
    problems: list[str]
    """Why the settings cannot be compared with Redis, or the schedules not be read; empty if they can."""


def topic_card(context: OperationContext, name: str) -> TopicCard:
    """Return all rules of a topic. Raises ``ServerTrouble``."""
    own_limits = topic_limits(context, name)
    declared = context.declared(name)
    different, own_schedules, problems = list[Difference](), list[ScheduleStats](), []
    try:
        different = compare(declared, context.broker.definitions()).differences
    except WrongType as error:
        problems.append(str(error))
    try:
        own_schedules = schedules(context, [name])
    except WrongType as error:
        problems.append(str(error))
    registered = {one.setting: str(one.registered) for one in different}
    own, defaults = _given(settings.RMQ, "TOPICS", name), _given(settings.RMQ, "TOPIC_DEFAULTS")
    rows = [
        SettingInEffect(
            key,
            _value(declared, key),
            "topic" if key in own else "defaults" if key in defaults else "",
            registered.get(key, ""),
        )
        for key in TOPIC_KEYS
        if SETTINGS_OF_TYPES.get(key, declared.type) is declared.type
    ]
    return TopicCard(own_limits, rows, listeners().get(name), own_schedules, problems)


def _given(options: Any, *path: str) -> Mapping[str, object]:
    """Return the options that the settings give at a place; topics of tasks and of schedules have none of their own."""
    for step in path:
        options = options.get(step, {})
    return options if isinstance(options, Mapping) else {}


_MILLISECONDS = ("TIME_RANGE", "MAX_WAIT", "OUTCOME_RETENTION")
_SECONDS = ("TIMEOUT", "MAX_RUNTIME", "HARD_TIMEOUT", "DEAD_RETENTION")


def _value(topic: Topic, key: str) -> str:
    if key in ("BODY", "UPCAST") and topic.typed is not None:
        return str(topic.typed.path if key == "BODY" else getattr(topic.typed, "upcast", None))
    if key == "UPCAST":
        return "None"
    if key == "BACKOFF":
        return _back_off(topic)
    if key == "MAX_RATE" and topic.slot_rate is not None:
        return f"{topic.slot_rate:.9g} per slot"
    value = getattr(topic, TOPIC_KEYS[key][0])
    if value is not None and key in _MILLISECONDS:
        return duration_text(timedelta(milliseconds=value))
    if value is not None and key in _SECONDS:
        return duration_text(timedelta(seconds=value))
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _back_off(topic: Topic) -> str:
    if topic.backoff.function is not None:
        function: object = topic.backoff.function
        return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
    first, last = (
        duration_text(timedelta(milliseconds=ms)) for ms in (topic.backoff.base_ms, topic.backoff.cap_ms)
    )
    return first if first == last else f"{first} to {last}"
