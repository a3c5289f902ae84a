"""Operations that only read topics, slots and workers: each checks the permission, and asks the module that reads."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.server_info import ServerInfo, SlowCommand
from django_rmq.core.model.topic import Topic
from django_rmq.core.monitoring import events as telling
from django_rmq.core.monitoring import history as kept
from django_rmq.core.monitoring.history import Minute, Rates
from django_rmq.exceptions import OperationRefused, RmqError
from django_rmq.operations import health, shared_reads, stats, topic_metrics, topics
from django_rmq.operations import stats as flows
from django_rmq.operations.annotations import Annotation
from django_rmq.operations.authorization import Permission
from django_rmq.operations.context import OperationContext
from django_rmq.operations.health import DEFAULT_THRESHOLDS, Finding, Health, Severity
from django_rmq.operations.outbox import Waiting
from django_rmq.operations.schedules import ScheduleStats
from django_rmq.operations.stats import Overview, SlotsStats, TopicCounters, TopicStats, WorkerStats
from django_rmq.operations.topic_metrics import Measurement
from django_rmq.operations.topics import UndeclaredTopic

EVENTS_SECONDS = 0.5
"""Seconds for which one request for events waits for the first."""


def overview(context: OperationContext, names: Iterable[str] | None = None) -> list[TopicStats]:
    """Return the figures of all topics (or those named), in the order of the settings, in one round trip."""
    return survey(context, names).topics


def survey(context: OperationContext, names: Iterable[str] | None = None) -> Overview:
    """Return the same as ``overview``, and the number of workers."""
    context.actor.require(Permission.VIEW)
    return stats.survey(context.broker, context.present_all(names))


def shared_survey(context: OperationContext, names: Iterable[str] | None = None) -> Overview:
    """Return the same as ``survey``, up to three seconds old: all dashboards share one."""
    context.actor.require(Permission.VIEW)
    found = shared_reads.shared_survey(context.broker, context.present_all(names))
    if context.hides_topics and not found.problem:
        # They may have become unknown since the figures were read.
        with contextlib.suppress(RmqError):
            found = found._replace(workers=len(shared_reads.shared_workers(context).workers))
    return found


def shared_outbox(context: OperationContext) -> list[Waiting]:
    """Return how much is in the outbox, up to five seconds ago: all dashboards share one answer."""
    context.actor.require(Permission.VIEW)
    return shared_reads.shared_outbox(context)


def shared_schedules(context: OperationContext) -> list[ScheduleStats]:
    """Return the schedules, up to five seconds ago: all dashboards share one answer."""
    context.actor.require(Permission.VIEW)
    return shared_reads.shared_schedules(context)


def shared_servers(context: OperationContext) -> list[ServerInfo]:
    """Return what each Redis server reports about itself, up to a second ago; empty also if it is unknown."""
    context.actor.require(Permission.VIEW)
    return shared_reads.shared_servers(context)


def shared_health(
    context: OperationContext, figures: Sequence[TopicStats], problem: str = "", *, only_these: bool = True
) -> Health:
    """Return what ``rmqhealth`` finds wrong with its default limits, for topics whose figures were read before.

    Only what dashboards share is read: the servers, the workers, the outbox and the schedules. ``problem``: why the
    workers are unknown. ``only_these``: without vanished workers and undeclared topics, and without schedules and rows of
    other topics. The texts are in the language of this thread.
    """
    context.actor.require(Permission.VIEW)
    names = {one.topic.name for one in figures}
    found = [finding for one in figures for finding in health.judge_topic(one, DEFAULT_THRESHOLDS)]
    if problem:
        found.append(Finding("coordinator", "", Severity.BAD, problem))
    for server in shared_reads.shared_servers(context):
        found += health.judge_server(server)
    if not (only_these or problem):
        # They may have become unknown since the figures were read.
        with contextlib.suppress(RmqError):
            found += health.judge_vanished(shared_reads.shared_workers(context))
    if not only_these:
        with contextlib.suppress(RmqError):
            for undeclared in shared_reads.shared_stranded(context):
                found += health.judge_undeclared(undeclared)
    if context.config.uses_outbox:
        try:
            waiting = shared_reads.shared_outbox(context)
        except RmqError as error:
            found.append(Finding("outbox", "", Severity.BAD, str(error)))
        else:
            found += [health.judge_waiting(one, DEFAULT_THRESHOLDS) for one in waiting]
    try:
        kept_schedules = shared_reads.shared_schedules(context)
    except RmqError as error:
        found.append(Finding("schedule", "", Severity.BAD, str(error)))
    else:
        found += [health.judge_schedule(one, DEFAULT_THRESHOLDS) for one in kept_schedules]
    chosen = [
        one for one in found if one.severity and (not only_these or not one.topic or one.topic in names)
    ]
    return health.sorted_by_severity(chosen)


def slow_commands(context: OperationContext) -> list[SlowCommand]:
    """Return the commands in the slow logs of the servers, without arguments. Raises ``ServerRefused`` if not permitted."""
    context.actor.require(Permission.VIEW)
    return context.broker.slow_commands()


def topic(context: OperationContext, name: str) -> TopicStats:
    """Return the figures of one topic."""
    (found,) = overview(context, [name])
    return found


def slots(context: OperationContext, name: str, first: int = 0, limit: int = 1_000) -> SlotsStats:
    """Return up to ``limit`` slots from ``first``: the contents of each, and its owner."""
    present = context.present(name, Permission.VIEW)
    wanted = range(max(0, first), min(present.slots, max(0, first) + max(1, min(limit, 5_000))))
    return stats.slots(context.broker, present, wanted)


def flow(context: OperationContext, names: Iterable[str] | None = None) -> TopicCounters:
    """Return counters of topics; two calls give rates. Topics with very many slots are left out."""
    context.actor.require(Permission.VIEW)
    return flows.flow(context.broker, context.present_all(names))


def shared_flow(context: OperationContext, names: Iterable[str] | None = None) -> TopicCounters:
    """Return the same as ``flow``, up to a second ago: all dashboards share one answer."""
    context.actor.require(Permission.VIEW)
    return shared_reads.shared_flow(context.broker, context.present_all(names))


def measured(context: OperationContext, names: Iterable[str] | None = None) -> Measurement:
    """Return the measurements of topics for monitoring systems: depths, counters, durations."""
    context.actor.require(Permission.VIEW)
    return topic_metrics.measured(context.broker, context.present_all(names))


def workers(context: OperationContext) -> list[WorkerStats]:
    """Return all live workers, and how many slots of which topics each has."""
    context.actor.require(Permission.VIEW)
    found = stats.workers(context.broker)
    if not context.hides_topics:
        return found
    known = context.topics()
    return [seen for one in found if (seen := one.of_topics(known)) is not None]


def history(context: OperationContext, name: str, hours: float, *, step: int = 1) -> list[Minute]:
    """Return the samples of a topic in the last ``hours``, oldest first, ``step`` minutes per item.

    Raises ``WrongType`` if the history cannot be read.
    """
    return kept.read(context.broker, context.declared(name, Permission.VIEW), hours, step=step)


def last_minutes(
    context: OperationContext, minutes: Mapping[Topic, int]
) -> dict[Topic, list[Minute] | RmqError]:
    """Return the samples of the last minutes of each topic, up to an hour; or the error that prevents reading them."""
    context.actor.require(Permission.VIEW)
    return kept.read_last(context.broker, minutes)


def last_rates(
    context: OperationContext, topics: Sequence[Topic], minutes: int
) -> dict[Topic, Rates | RmqError | None]:
    """Return the latest rates of each topic within the last minutes, or None; or the error that prevents reading them."""
    context.actor.require(Permission.VIEW)
    return kept.last_rates(context.broker, topics, minutes)


def annotations_of(context: OperationContext, names: Collection[str], since_ms: float) -> list[Annotation]:
    """Return what has happened to topics since ``since_ms``, the first first, up to five seconds late."""
    context.actor.require(Permission.VIEW)
    known = context.topics()
    found = shared_reads.shared_annotations(context, [name for name in names if name in known])
    return [one for one in found if one.at_ms >= since_ms]


def stranded(context: OperationContext) -> list[UndeclaredTopic]:
    """Return the topics that are registered in Redis and not declared in the settings, with their contents."""
    context.actor.require(Permission.VIEW)
    context.require_all_topics()
    return topics.stranded(context.broker, context.config.topics)


def find_stranded(context: OperationContext, name: str) -> UndeclaredTopic:
    """Return one of these topics. Raises ``OperationRefused`` if it is declared, unknown or being re-slotted."""
    context.actor.require(Permission.VIEW)
    context.require_all_topics()
    return topics.find(context.broker, context.config.topics, name)


def events(context: OperationContext) -> Iterator[list[dict[str, Any]]]:
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
            yield [event for payload in payloads for event in telling.read(payload)]
    finally:
        subscription.close()
