"""The requirements of a schedule: what its topic and the installed packages need to have.

The system checks and the start of workers report each ``ScheduleProblem``.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

from django_rmq.conf import Config, did_you_mean
from django_rmq.core.model.body_codec import encode_body
from django_rmq.core.model.schedule import Schedule
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import basis_of
from django_rmq.core.schedules import tick_times
from django_rmq.exceptions import CallerError, ConfigurationError


class ScheduleProblem(NamedTuple):
    """A reason why a schedule cannot run: an id of the system checks, a sentence and a hint."""

    id: str
    message: str
    hint: str = ""


def problems(config: Config, schedule: Schedule) -> Iterator[ScheduleProblem]:
    """Yield why ``schedule`` cannot run as it is declared."""
    place = _place(schedule)
    topic = config.topics.get(schedule.topic)
    if topic is None:
        meant = did_you_mean(schedule.topic, config.topics)
        yield ScheduleProblem(
            "E070", f'{place} sends to "{schedule.topic}", which is not in RMQ["TOPICS"]{meant}'
        )
    else:
        yield from _of_topic(place, schedule, topic)
    yield from of_timing(schedule)


def _place(schedule: Schedule) -> str:
    return f'Schedule "{schedule.name}"'


def of_timing(schedule: Schedule) -> Iterator[ScheduleProblem]:
    """Yield why the ticks of ``schedule`` cannot be computed."""
    place = _place(schedule)
    if not schedule.is_sound:
        has = "both CRON and EVERY" if schedule.every is not None else "neither CRON nor EVERY"
        yield ScheduleProblem("E072", f"{place} has {has}: it needs exactly one of them.")
        return
    try:
        tick_times.zone(schedule.timezone)
        if schedule.cron is None:
            return
        if find_spec("cronsim") is None:
            hint = 'pip install "django-redis-rmq[schedules]".'
            yield ScheduleProblem(
                "E073", f"{place} has CRON, and the package cronsim is not installed.", hint
            )
            return
        tick_times.check(schedule.cron, schedule.timezone)
    except ConfigurationError as error:
        yield ScheduleProblem("E071", f"{place}: {error}.")


def _of_topic(place: str, schedule: Schedule, topic: Topic) -> Iterator[ScheduleProblem]:
    if not topic.takes_instants:
        yield ScheduleProblem(
            "E072",
            f'{place} sends to topic "{topic.name}", which has TYPE "{topic.type.value}" and therefore no due times.',
            'Use a topic with TYPE "fixed_time".',
        )
    if not topic.keyed:
        yield ScheduleProblem(
            "E072",
            f'{place} sends to topic "{topic.name}", which has IDENTITY "body": two ticks with equal bodies '
            "would be one message.",
            'Set IDENTITY "key". The key of a tick is its schedule and its instant.',
        )
    try:
        encode_body(topic, schedule.body)
        basis_of(topic, schedule.body, None)
    except CallerError as error:
        yield ScheduleProblem("E072", f'{place} has a BODY that topic "{topic.name}" cannot have: {error}.')
