"""What an actor sees of topics, slots and workers: figures now, what has passed through, and whether all is well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from django_rmq.core.calls.broker import Broker
from django_rmq.core.telling import events as telling
from django_rmq.core.telling import history as kept
from django_rmq.core.telling.history import Minute
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import OperationRefused, RmqError
from django_rmq.operations import crew, figures, measuring, retiring
from django_rmq.operations import flow as flows
from django_rmq.operations import health as checking
from django_rmq.operations.actors import Permission
from django_rmq.operations.crew import WorkerFigures
from django_rmq.operations.desk import Desk
from django_rmq.operations.figures import Overview, SlotsFigures, TopicFigures
from django_rmq.operations.flow import Flow
from django_rmq.operations.health import Health, Limits
from django_rmq.operations.measuring import Measurement
from django_rmq.operations.retiring import Stranded

EVENTS_SECONDS = 0.5
"""How long one look for events waits for the first."""


def overview(desk: Desk, names: Iterable[str] | None = None) -> list[TopicFigures]:
    """Return the figures of all topics (or those named), in the order of the settings, in one round trip."""
    return survey(desk, names).topics


def survey(desk: Desk, names: Iterable[str] | None = None) -> Overview:
    """Return what ``overview`` does, and how many workers there are."""
    desk.actor.require(Permission.VIEW)
    return figures.survey(desk.broker, desk.present_all(names))


def topic(desk: Desk, name: str) -> TopicFigures:
    """Return the figures of one topic."""
    (found,) = overview(desk, [name])
    return found


def slots(desk: Desk, name: str, first: int = 0, limit: int = 1_000) -> SlotsFigures:
    """Return up to ``limit`` slots from ``first``: what each holds, and who owns it since when."""
    desk.actor.require(Permission.VIEW)
    present = desk.present(name)
    wanted = range(max(0, first), min(present.slots, max(0, first) + max(1, min(limit, 5_000))))
    return figures.slots(desk.broker, present, wanted)


def flow(desk: Desk, names: Iterable[str] | None = None) -> Flow:
    """Return what has passed through topics so far; ask twice for rates. Not for those of very many slots."""
    desk.actor.require(Permission.VIEW)
    return flows.flow(desk.broker, desk.present_all(names))


def measured(desk: Desk, names: Iterable[str] | None = None) -> Measurement:
    """Return what monitoring systems want to know of topics: depths, counts since the first message, durations."""
    desk.actor.require(Permission.VIEW)
    return measuring.measured(desk.broker, desk.present_all(names))


def workers(desk: Desk) -> list[WorkerFigures]:
    """Return all live workers, and how many slots of which topics each has."""
    desk.actor.require(Permission.VIEW)
    return crew.workers(desk.broker)


def history(desk: Desk, name: str, hours: float, *, step: int = 1) -> list[Minute]:
    """Return what was sampled of a topic in the last ``hours``, oldest first, each ``step`` minutes in one.

    Raises ``WrongType`` where it cannot be read.
    """
    desk.actor.require(Permission.VIEW)
    return kept.read(desk.broker, desk.config.topic(name), hours, step=step)


def last_minutes(desk: Desk, minutes: Mapping[Topic, int]) -> dict[Topic, list[Minute] | RmqError]:
    """Return what was sampled in the last so many minutes of each topic, up to an hour; or why it cannot be read."""
    desk.actor.require(Permission.VIEW)
    return kept.read_last(desk.broker, minutes)


def health(
    desk: Desk, limits: Limits, names: Iterable[str] | None = None, *, patience: float = 0.0
) -> Health:
    """Look whether all is well with topics (or those named); Redis being away is a finding, not an error."""
    desk.actor.require(Permission.VIEW)
    topics, coordinator = desk.present_all(names), desk.config.coordinator
    left: Callable[[], list[Stranded]] = partial(stranded, desk) if names is None else list
    return checking.check(desk.broker, topics, coordinator, limits, patience=patience, stranded=left)


def stranded(desk: Desk) -> list[Stranded]:
    """Return the topics that are registered in Redis and that the settings do not declare, with what they hold."""
    desk.actor.require(Permission.VIEW)
    return retiring.stranded(desk.broker, desk.config.topics)


def find_stranded(desk: Desk, name: str) -> Stranded:
    """Return one of these topics. Raises ``OperationRefused`` if it is declared, unknown or being re-slotted."""
    desk.actor.require(Permission.VIEW)
    return retiring.find(desk.broker, desk.config.topics, name)


def events(desk: Desk) -> Iterator[list[dict[str, Any]]]:
    """Yield what happens from now on, see ``django_rmq.core.telling.events``; empty lists while nothing does, to be asked again.

    Ids hold what is stored, so it takes the right to see bodies. Raises ``OperationRefused`` where EVENTS is off,
    and ``ServerTrouble`` when the connection is lost.
    """
    desk.actor.require(Permission.VIEW, Permission.VIEW_BODIES)
    if not desk.config.events:
        raise OperationRefused('RMQ["EVENTS"] is off: nobody tells what happens')
    return _heard(desk.broker)


def _heard(broker: Broker) -> Iterator[list[dict[str, Any]]]:
    subscription = broker.events()
    try:
        while True:
            payloads = subscription.get(EVENTS_SECONDS)
            yield [event for payload in payloads for event in telling.read(payload)]
    finally:
        subscription.close()
