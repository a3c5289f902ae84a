"""For charts and monitoring systems: measurements of topics, their history by minutes, events, and annotations of charts.

Annotations are actions of people, from Django's LogEntry, which the admin and REST write (actions of commands are in the log
alone), and new versions of the project's code, which workers report (``RMQ["CODE_VERSION"]``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from django.apps import apps
from django.db import Error

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.reports import read_code_versions
from django_rmq.core.log import safe_logger
from django_rmq.core.model.replies import Times
from django_rmq.core.model.topic import Topic, former_slot_counts
from django_rmq.core.monitoring import events as published_events
from django_rmq.core.monitoring import history as recorded_history
from django_rmq.core.monitoring.history import EDGES_MS, Depth, HistoryTotals, Minute, MinuteRecord
from django_rmq.exceptions import OperationRefused, RmqError, WrongType
from django_rmq.operations import shared_reads, stats
from django_rmq.operations.authorization import OperationContext, Permission
from django_rmq.operations.stats import TopicStats


@dataclass(frozen=True, slots=True)
class TopicMetrics:
    """The measurements of one topic: current depths, and counters since its first message.

    Of topics that are too large for an overview both are the sums of the last record of the history. So are the counters of
    topics that had as many slots before a re-slotting.
    """

    figures: TopicStats
    """The depths, unless ``depth`` is given."""
    depth: Depth | None
    """For large topics: the depths of all slots together at ``sampled_ms``."""
    totals: HistoryTotals | None
    """The counters; None if they are those of the history and no worker has sampled recently, or they cannot be read."""
    times: Times | None
    """The durations, or None if they cannot be read."""
    sampled_ms: int
    """When the depths were read, and for large topics the totals, by the clock of Redis."""
    now_ms: int
    """When the measurement ended, by the clock of Redis."""
    is_scaled: bool = False
    """Whether not all slots were read, so that sums are scaled."""
    problems: tuple[str, ...] = ()
    """Why totals or times cannot be read."""


class Measurement(NamedTuple):
    """The measurements of all topics."""

    topics: list[TopicMetrics]
    workers: int | None
    problem: str


def measured(context: OperationContext, names: Iterable[str] | None = None) -> Measurement:
    """Return the measurements of topics: of small topics they are read directly, and those of others are samples of workers.

    ``stats.slots_to_look_at`` says which topics are small. It costs two reads of each of their slots, one of 256 slots of each
    other topic, and one of the times of each topic, all in a few round trips. The depths are
    those of the survey that all dashboards share, so they are up to three seconds old, and the counters are of this moment.
    Values that cannot be read are missing only from their own topic. Raises ``ServerTrouble``.
    """
    context.actor.require(Permission.VIEW)
    broker, topics = context.broker, context.present_all(names)
    try:
        definitions: Mapping[str, dict[str, object]] = broker.definitions()
    except WrongType:
        # Another program has put a value of another type in place of the definitions, so former slots are not known.
        definitions = {}
    seen = shared_reads.shared_survey_of(broker, topics)
    large = {one.topic for one in seen.topics if one.looked_at + len(one.problems) < one.topic.slots}
    counted = {topic: _everywhere(topic, definitions) for topic in topics if topic not in large}
    small = {topic: all_slots for topic, all_slots in counted.items() if all_slots.slots <= stats.LIVE_SLOTS}
    sampled = [topic for topic in topics if topic not in small]
    latest = dict(zip(sampled, recorded_history.latest(broker, sampled), strict=True))
    totals = dict(zip(small, recorded_history.totals(broker, list(small.values())), strict=True))
    metrics, now_ms = [], broker.now_ms()
    for one, times in zip(seen.topics, recorded_history.times(broker, topics), strict=True):
        record, sums = latest.get(one.topic), totals.get(one.topic)
        problems = tuple(str(each) for each in (record, sums, times) if isinstance(each, RmqError))
        if isinstance(record, MinuteRecord):
            sums = record.totals
        # Of a topic that had very many slots before a re-slotting, the counters alone are sampled.
        sample = record if isinstance(record, MinuteRecord) and one.topic in large else None
        metrics.append(
            TopicMetrics(
                one,
                sample and sample.depth,
                None if isinstance(sums, RmqError) else sums,
                None if isinstance(times, RmqError) else times,
                sample.sampled_ms if sample else one.now_ms,
                now_ms,
                sample is not None and sample.is_scaled,
                problems,
            )
        )
    return Measurement(metrics, seen.workers, seen.problem)


def _everywhere(topic: Topic, definitions: Mapping[str, dict[str, object]]) -> Topic:
    """Return ``topic`` including its former slots, which have counters too."""
    former = former_slot_counts(definitions.get(topic.name, {}))
    return replace(topic, slots=max(topic.slots, *former)) if former else topic


def history(context: OperationContext, name: str, hours: float, *, step: int = 1) -> list[Minute]:
    """Return the samples of a topic in the last ``hours``, oldest first, ``step`` minutes per item.

    Raises ``WrongType`` if the history cannot be read.
    """
    return recorded_history.read_minutes(
        context.broker, context.declared(name, Permission.VIEW), hours, step=step
    )


EVENTS_SECONDS = 0.5
"""Seconds for which one request for events waits for the first."""


def events(context: OperationContext) -> Iterator[list[dict[str, object]]]:
    """Yield lists of events from now on, see ``django_rmq.core.monitoring.events``; an empty list if there were none.

    Ids contain what is stored, so it needs the permission to see bodies. Raises ``OperationRefused`` if
    EVENTS is off, and ``ServerTrouble`` when the connection is lost.
    """
    context.actor.require(Permission.VIEW, Permission.VIEW_BODIES)
    context.require_all_topics()
    if not context.config.events:
        raise OperationRefused('RMQ["EVENTS"] is off, so no events are published')
    return _heard(context.broker)


def _heard(broker: Broker) -> Iterator[list[dict[str, object]]]:
    subscription = broker.events()
    try:
        while True:
            payloads = subscription.get(EVENTS_SECONDS)
            yield [event for payload in payloads for event in published_events.decode_events(payload)]
    finally:
        subscription.close()


logger = safe_logger("django_rmq.operations")

MOST_ACTIONS = 200
"""The number of actions of people that are looked at: the newest ones on any topic."""


class Annotation(NamedTuple):
    """Something that happened at ``at_ms``, by the clock of the database or of Redis."""

    at_ms: int
    kind: Literal["action", "version"]
    text: str
    """What was done, with its outcomes, or the version."""
    topic: str = ""
    """The topic of an action."""
    actor: str = ""
    """Who did it."""


def annotations_of(context: OperationContext, names: Collection[str], since_ms: float) -> list[Annotation]:
    """Return what has happened to topics since ``since_ms``, the first first, up to five seconds late."""
    context.actor.require(Permission.VIEW)
    known = context.topics()
    names = [name for name in names if name in known]
    annotations = shared_reads.share_answer(
        ("annotations", context.broker, *names),
        partial(_read_annotations, context.broker, names),
        shared_reads.OTHERS_SECONDS,
    )
    return [one for one in annotations if one.at_ms >= since_ms]


def _read_annotations(broker: Broker, names: Collection[str]) -> list[Annotation]:
    """Return the newest actions on the topics ``names``, and the versions that workers have reported, the first first.

    A database or a Redis that does not answer leaves its part out: a chart is drawn without it.
    """
    return sorted([*_versions(broker), *reversed(_actions(names))], key=lambda one: one.at_ms)


def _actions(names: Collection[str]) -> list[Annotation]:
    # Where Django's admin is not installed, there is no table, and nobody writes to it.
    if not apps.is_installed("django.contrib.admin"):
        return []
    from django.contrib.admin.models import LogEntry
    from django.contrib.contenttypes.models import ContentType

    from django_rmq.models import Topic

    try:
        of_topics = ContentType.objects.get_for_model(Topic)
        # The newest by their keys: the table has no index of times.
        rows = LogEntry.objects.filter(content_type=of_topics, object_id__in=names).order_by("-pk")
        return [
            Annotation(
                round(row.action_time.timestamp() * 1000),
                "action",
                row.change_message,
                row.object_id or "",
                str(row.user),
            )
            for row in rows.select_related("user")[:MOST_ACTIONS]
        ]
    except Error:
        logger.warning("The actions of people could not be read for a chart", exc_info=True)
        return []


def _versions(broker: Broker) -> list[Annotation]:
    try:
        versions = broker.run(read_code_versions())
    except RmqError:
        return []  # the page says itself that Redis does not answer
    return [Annotation(one.since_ms, "version", one.name) for one in versions]


__all__ = ["EDGES_MS", "Depth", "Measurement", "TopicMetrics", "events", "history", "measured"]
