"""Operations that only read topics, slots and workers: each checks the permission, and asks the module that reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.server_info import ServerInfo, SlowCommand
from django_rmq.core.model.topic import Topic
from django_rmq.core.monitoring import events as telling
from django_rmq.core.monitoring import history as kept
from django_rmq.core.monitoring.history import Minute
from django_rmq.exceptions import OperationRefused, RmqError
from django_rmq.operations import health, shared_reads, stats, topic_metrics, topics
from django_rmq.operations import stats as flows
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


def overview(desk: OperationContext, names: Iterable[str] | None = None) -> list[TopicStats]:
    """Return the figures of all topics (or those named), in the order of the settings, in one round trip."""
    return survey(desk, names).topics


def survey(desk: OperationContext, names: Iterable[str] | None = None) -> Overview:
    """Return the same as ``overview``, and the number of workers."""
    desk.actor.require(Permission.VIEW)
    return stats.survey(desk.broker, desk.present_all(names))


def shared_survey(desk: OperationContext, names: Iterable[str] | None = None) -> Overview:
    """Return the same as ``survey``, up to three seconds old: all dashboards share one."""
    desk.actor.require(Permission.VIEW)
    return shared_reads.shared_survey(desk.broker, desk.present_all(names))


def shared_outbox(desk: OperationContext) -> list[Waiting]:
    """Return how much is in the outbox, up to five seconds ago: all dashboards share one answer."""
    desk.actor.require(Permission.VIEW)
    return shared_reads.shared_outbox(desk)


def shared_schedules(desk: OperationContext) -> list[ScheduleStats]:
    """Return the schedules, up to five seconds ago: all dashboards share one answer."""
    desk.actor.require(Permission.VIEW)
    return shared_reads.shared_schedules(desk)


def shared_servers(desk: OperationContext) -> list[ServerInfo]:
    """Return what each Redis server reports about itself, up to a second ago; empty also if it is unknown."""
    desk.actor.require(Permission.VIEW)
    return shared_reads.shared_servers(desk)


def shared_health(
    desk: OperationContext, figures: Sequence[TopicStats], problem: str = "", *, only_these: bool = True
) -> Health:
    """Return the findings of ``rmqhealth`` with its default limits, for topics whose figures were read before.

    Only what dashboards share is read: the servers, the outbox and the schedules. ``problem``: why the workers are unknown.
    ``only_these``: without schedules and rows of other topics. The texts are in the language of this thread.
    """
    desk.actor.require(Permission.VIEW)
    names = {one.topic.name for one in figures}
    found = [finding for one in figures for finding in health.judge_topic(one, DEFAULT_THRESHOLDS)]
    if problem:
        found.append(Finding("coordinator", "", Severity.BAD, problem))
    for server in shared_reads.shared_servers(desk):
        found += health.judge_server(server)
    if desk.config.uses_outbox:
        try:
            waiting = shared_reads.shared_outbox(desk)
        except RmqError as error:
            found.append(Finding("outbox", "", Severity.BAD, str(error)))
        else:
            found += [health.judge_waiting(one, DEFAULT_THRESHOLDS) for one in waiting]
    try:
        kept_schedules = shared_reads.shared_schedules(desk)
    except RmqError as error:
        found.append(Finding("schedule", "", Severity.BAD, str(error)))
    else:
        found += [health.judge_schedule(one, DEFAULT_THRESHOLDS) for one in kept_schedules]
    chosen = [one for one in found if not only_these or not one.topic or one.topic in names]
    return health.sorted_by_severity(chosen)


def slow_commands(desk: OperationContext) -> list[SlowCommand]:
    """Return the commands in the slow logs of the servers, without arguments. Raises ``ServerRefused`` if not permitted."""
    desk.actor.require(Permission.VIEW)
    return desk.broker.slow_commands()


def topic(desk: OperationContext, name: str) -> TopicStats:
    """Return the figures of one topic."""
    (found,) = overview(desk, [name])
    return found


def slots(desk: OperationContext, name: str, first: int = 0, limit: int = 1_000) -> SlotsStats:
    """Return up to ``limit`` slots from ``first``: the contents of each, and its owner."""
    desk.actor.require(Permission.VIEW)
    present = desk.present(name)
    wanted = range(max(0, first), min(present.slots, max(0, first) + max(1, min(limit, 5_000))))
    return stats.slots(desk.broker, present, wanted)


def flow(desk: OperationContext, names: Iterable[str] | None = None) -> TopicCounters:
    """Return counters of topics; two calls give rates. Topics with very many slots are left out."""
    desk.actor.require(Permission.VIEW)
    return flows.flow(desk.broker, desk.present_all(names))


def shared_flow(desk: OperationContext, names: Iterable[str] | None = None) -> TopicCounters:
    """Return the same as ``flow``, up to a second ago: all dashboards share one answer."""
    desk.actor.require(Permission.VIEW)
    return shared_reads.shared_flow(desk.broker, desk.present_all(names))


def measured(desk: OperationContext, names: Iterable[str] | None = None) -> Measurement:
    """Return the measurements of topics for monitoring systems: depths, counters, durations."""
    desk.actor.require(Permission.VIEW)
    return topic_metrics.measured(desk.broker, desk.present_all(names))


def workers(desk: OperationContext) -> list[WorkerStats]:
    """Return all live workers, and how many slots of which topics each has."""
    desk.actor.require(Permission.VIEW)
    return stats.workers(desk.broker)


def history(desk: OperationContext, name: str, hours: float, *, step: int = 1) -> list[Minute]:
    """Return the samples of a topic in the last ``hours``, oldest first, ``step`` minutes per item.

    Raises ``WrongType`` if the history cannot be read.
    """
    desk.actor.require(Permission.VIEW)
    return kept.read(desk.broker, desk.config.topic(name), hours, step=step)


def last_minutes(
    desk: OperationContext, minutes: Mapping[Topic, int]
) -> dict[Topic, list[Minute] | RmqError]:
    """Return the samples of the last minutes of each topic, up to an hour; or the error that prevents reading them."""
    desk.actor.require(Permission.VIEW)
    return kept.read_last(desk.broker, minutes)


def stranded(desk: OperationContext) -> list[UndeclaredTopic]:
    """Return the topics that are registered in Redis and not declared in the settings, with their contents."""
    desk.actor.require(Permission.VIEW)
    return topics.stranded(desk.broker, desk.config.topics)


def find_stranded(desk: OperationContext, name: str) -> UndeclaredTopic:
    """Return one of these topics. Raises ``OperationRefused`` if it is declared, unknown or being re-slotted."""
    desk.actor.require(Permission.VIEW)
    return topics.find(desk.broker, desk.config.topics, name)


def events(desk: OperationContext) -> Iterator[list[dict[str, Any]]]:
    """Yield lists of events from now on, see ``django_rmq.core.monitoring.events``; an empty list if there were none.

    Ids contain what is stored, so it needs the permission to see bodies. Raises ``OperationRefused`` if
    EVENTS is off, and ``ServerTrouble`` when the connection is lost.
    """
    desk.actor.require(Permission.VIEW, Permission.VIEW_BODIES)
    if not desk.config.events:
        raise OperationRefused('RMQ["EVENTS"] is off, so no events are published')
    return _heard(desk.broker)


def _heard(broker: Broker) -> Iterator[list[dict[str, Any]]]:
    subscription = broker.events()
    try:
        while True:
            payloads = subscription.get(EVENTS_SECONDS)
            yield [event for payload in payloads for event in telling.read(payload)]
    finally:
        subscription.close()
