"""For charts and monitoring systems: measurements of topics, their history by minutes, and events as they happen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.replies import Times
from django_rmq.core.model.topic import Topic, former_slot_counts
from django_rmq.core.monitoring import events as published_events
from django_rmq.core.monitoring import history as recorded_history
from django_rmq.core.monitoring.history import EDGES_MS, Depth, HistoryTotals, Latest, Minute
from django_rmq.exceptions import OperationRefused, RmqError, WrongType
from django_rmq.operations import shared_reads, topic_survey
from django_rmq.operations.authorization import Permission
from django_rmq.operations.context import OperationContext
from django_rmq.operations.stats import TopicStats


@dataclass(frozen=True, slots=True)
class TopicMetrics:
    """The measurements of one topic: current depths, and counters since its first message.

    Of topics that are too large for an overview both are the sums of the last record of the history.
    """

    figures: TopicStats
    """The depths, unless ``depth`` is given."""
    depth: Depth | None
    """For large topics: the depths of all slots together at ``sampled_ms``."""
    totals: HistoryTotals | None
    """The counters; None if the topic is large and no worker has sampled it recently, or they cannot be read."""
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
    """Return the measurements of topics: up to 8,192 slots are read directly, the others come from the samples of workers.

    It costs two reads of each of these slots, and one of the times of each topic, all in a few round trips. The depths are
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
    large = [one.topic for one in seen.topics if one.looked_at + len(one.problems) < one.topic.slots]
    latest = dict(zip(large, recorded_history.latest(broker, large), strict=True))
    counted = {topic: _everywhere(topic, definitions) for topic in topics if topic not in latest}
    totals = dict(zip(counted, recorded_history.totals(broker, list(counted.values())), strict=True))
    metrics, now_ms = [], broker.now_ms()
    for one, times in zip(seen.topics, recorded_history.times(broker, topics), strict=True):
        record, sums = latest.get(one.topic), totals.get(one.topic)
        problems = tuple(str(each) for each in (record, sums, times) if isinstance(each, RmqError))
        known = None if isinstance(times, RmqError) else times
        if isinstance(record, Latest):
            metrics.append(
                TopicMetrics(
                    one,
                    record.depth,
                    record.totals,
                    known,
                    record.sampled_ms,
                    now_ms,
                    record.is_scaled,
                    problems,
                )
            )
        else:
            sums = None if isinstance(sums, RmqError) else sums
            metrics.append(TopicMetrics(one, None, sums, known, one.now_ms, now_ms, problems=problems))
    return Measurement(metrics, seen.workers, seen.problem)


def _everywhere(topic: Topic, definitions: Mapping[str, dict[str, object]]) -> Topic:
    """Return ``topic`` including its former slots, which have counters too."""
    former = former_slot_counts(definitions.get(topic.name, {}))
    return replace(topic, slots=min(max(topic.slots, *former), topic_survey.LIVE_SLOTS)) if former else topic


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


__all__ = [
    "EDGES_MS",
    "Depth",
    "Measurement",
    "TopicMetrics",
    "events",
    "history",
    "measured",
]
