"""Schedules in Django: those of the settings and of ``@schedule``, what each needs, and the duty that keeps them in Redis.

The registry of schedules lives in the memory of one process. The system checks and the start of workers report each
``SettingsProblem``. ``declare`` runs once when workers start, and the duty, which keeps each schedule one tick ahead, while they
run. The steps themselves are those of ``core.schedules``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from django_rmq import connections, observability
from django_rmq.conf import Config, SettingsProblem, did_you_mean, get_config, set_schedule_topics
from django_rmq.conf.parsers import InvalidSetting, printable
from django_rmq.conf.schedule_settings import SCHEDULE_KEYS, is_name
from django_rmq.connections import Purpose
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.schedules import read_schedules
from django_rmq.core.duties import Duty
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.body_codec import encode_body
from django_rmq.core.model.keys import NAME_WANTED
from django_rmq.core.model.schedule import Schedule
from django_rmq.core.model.send_results import SendResult
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import basis_of
from django_rmq.core.schedules import tick_times
from django_rmq.core.schedules.declarations import Declarations
from django_rmq.core.schedules.stepper import Stepper
from django_rmq.core.topic_registration import register_topics
from django_rmq.exceptions import CallerError, ConfigurationError, UnknownTopic

_schedules: dict[str, Schedule] = {}
"""By name. An empty time zone stands for TIME_ZONE."""


def parsed(name: object, topic: str | None, options: Mapping[str, object]) -> Schedule:
    """Return the schedule that a decorator declares. Without a ``topic`` it sends to the topic of its own name.

    ``options``: those of the settings, where None stands for one that is not given. Raises ``ConfigurationError``.
    """
    # For a body, None is a value like any other.
    values = {key: value for key, value in options.items() if value is not None or key == "BODY"}
    return _parsed(name, {"TOPIC": name if topic is None else topic, **values})


def register(schedule: Schedule) -> None:
    """Register a schedule of a decorator. Raises ``ConfigurationError`` for a second one of its name."""
    other = _schedules.get(schedule.name)
    # A reload imports a module again, and registers the same schedule a second time.
    if other is not None and other != schedule:
        raise ConfigurationError(f'there are two schedules of the name "{schedule.name}"')
    _schedules[schedule.name] = schedule
    _set_topics()


def _set_topics() -> None:
    set_schedule_topics(one.topic for one in _schedules.values() if one.topic == one.name)


def _parsed(name: object, given: dict[str, object]) -> Schedule:
    if not is_name(name):
        raise ConfigurationError(f"@schedule needs a name, {NAME_WANTED}, got {name!r}")
    values: dict[str, Any] = {"timezone": ""}
    for key, value in given.items():
        field, parse = SCHEDULE_KEYS[key]
        try:
            values[field] = parse(value)
        except InvalidSetting as wanted:
            raise ConfigurationError(
                f'@schedule("{name}"): {field} must be {wanted}, got {printable(value)}'
            ) from None
    return Schedule(str(name), **values)


def declared_schedules() -> dict[str, Schedule]:
    """Return the declared schedules by name.

    Raises ``ConfigurationError`` if the settings and a decorator declare different ones of the same name.
    """
    config = get_config()
    schedules = dict(config.schedules)
    for name, one in _schedules.items():
        complete = replace(one, timezone=one.timezone or config.time_zone)
        if schedules.setdefault(name, complete) != complete:
            raise ConfigurationError(
                f'schedule "{name}" is declared in RMQ["SCHEDULES"] and by @schedule, with different options'
            )
    return schedules


def declared() -> dict[str, Schedule]:
    """Return what decorators have declared, by name."""
    return dict(_schedules)


def replace_declared(schedules: dict[str, Schedule]) -> None:
    """For tests: replace what decorators have declared."""
    _schedules.clear()
    _schedules.update(schedules)
    _set_topics()


def problems(config: Config, schedule: Schedule) -> Iterator[SettingsProblem]:
    """Yield why ``schedule`` cannot run as it is declared."""
    place = _place(schedule)
    topic = config.topics.get(schedule.topic)
    if topic is None:
        hint = did_you_mean(schedule.topic, config.topics)
        yield SettingsProblem(
            "django_rmq.E070", f'{place} sends to "{schedule.topic}", which is not in RMQ["TOPICS"]{hint}'
        )
    else:
        yield from _of_topic(place, schedule, topic)
    yield from timing_problems(schedule)


def _place(schedule: Schedule) -> str:
    return f'Schedule "{schedule.name}"'


def timing_problems(schedule: Schedule) -> Iterator[SettingsProblem]:
    """Yield why the ticks of ``schedule`` cannot be computed."""
    place = _place(schedule)
    if not schedule.is_sound:
        has = "both CRON and EVERY" if schedule.every is not None else "neither CRON nor EVERY"
        yield SettingsProblem("django_rmq.E072", f"{place} has {has}: it needs exactly one of them.")
        return
    try:
        tick_times.zone(schedule.timezone)
        if schedule.cron is None:
            return
        if find_spec("cronsim") is None:
            hint = 'pip install "django-redis-rmq[schedules]".'
            yield SettingsProblem(
                "django_rmq.E073", f"{place} has CRON, and the package cronsim is not installed.", hint
            )
            return
        tick_times.check(schedule.cron, schedule.timezone)
    except ConfigurationError as error:
        yield SettingsProblem("django_rmq.E071", f"{place}: {error}.")


def _of_topic(place: str, schedule: Schedule, topic: Topic) -> Iterator[SettingsProblem]:
    if not topic.takes_instants:
        yield SettingsProblem(
            "django_rmq.E072",
            f'{place} sends to topic "{topic.name}", which has TYPE "{topic.type.value}" and therefore no due times.',
            'Use a topic with TYPE "fixed_time".',
        )
    if not topic.keyed:
        yield SettingsProblem(
            "django_rmq.E072",
            f'{place} sends to topic "{topic.name}", which has IDENTITY "body": two ticks with equal bodies '
            "would be one message.",
            'Set IDENTITY "key". The key of a tick is its schedule and its instant.',
        )
    try:
        encode_body(topic, schedule.body)
        basis_of(topic, schedule.body, None)
    except CallerError as error:
        yield SettingsProblem(
            "django_rmq.E072", f'{place} has a BODY that topic "{topic.name}" cannot have: {error}.'
        )


logger = safe_logger("django_rmq.schedules")
_log_throttled = LogThrottle(logger)


def declare() -> None:
    """Make Redis' schedules those of this project, and take the steps that are due.

    A schedule whose topic is not in the settings is left as it is in Redis. Raises ``ConfigurationError`` for
    another one that cannot run, and ``ServerTrouble``.
    """
    declared = declared_schedules()
    broker = connections.get_broker("worker")
    # Redis may still hold schedules that the project no longer declares, so both have to be empty.
    if not declared and not broker.run(read_schedules()):
        return
    config = get_config()
    schedules = {name: each for name, each in declared.items() if each.topic in config.topics}
    for name in declared.keys() - schedules.keys():
        _log_throttled(
            name, f"Schedule {name} does not run: %s", UnknownTopic("its topic is not in the settings")
        )
    flaws = [problem for each in schedules.values() for problem in problems(config, each)]
    if flaws:
        raise ConfigurationError(" ".join(f"{problem.message} {problem.hint}" for problem in flaws))
    for name in dict.fromkeys(each.topic for each in schedules.values()):
        try:
            connections.agree(config.topics[name])
        except CallerError as error:
            _log_throttled(name, f"Schedules of topic {name} do not run: %s", error)
    Declarations(broker, schedules, config.topics).start()
    stepper().settle()


def stepper(purpose: Purpose = "coordinator") -> Stepper:
    """Return what takes the steps of schedules on the connections of ``purpose``."""
    return Stepper(connections.get_broker(purpose), get_config().topics, _announce)


def _announce(topic: str, result: SendResult) -> None:
    observability.announce_sent(topic, [result])
    observability.count_sent(topic, 1)


def _register(broker: Broker, topics: Iterable[str]) -> None:
    """Register the topics of schedules that Redis does not know."""
    for name in topics:
        try:
            register_topics(broker, [get_config().topics[name]])
        except CallerError as error:
            _log_throttled(name, f"Schedules of topic {name} do not run: %s", error)


def duties() -> list[Duty]:
    """Return the duty of a worker that keeps schedules. It ends at once in a project without schedules."""
    broker = connections.get_broker("coordinator")
    # The declarations outlive a step that fails, so they still know the declarations of other workers.
    return [partial(_duty, broker, Declarations(broker, declared_schedules(), get_config().topics))]


def _duty(broker: Broker, declarations: Declarations) -> Generator[float, None, None]:
    """Keep the schedules in Redis those of the live workers, and take the steps that are due.

    While nothing is due, with two requests each 5 s.
    """
    steps = stepper()
    try:
        while True:
            now_ms, records = broker.now_ms(), broker.run(read_schedules())
            if declarations.reconcile(records, now_ms):
                # A server that has lost the schedules may have lost the definitions of their topics as well.
                _register(broker, declarations.topics)
                yield 0.0
            elif declarations.is_idle:
                return
            else:
                yield steps.step_each(records, now_ms)
    except GeneratorExit:
        # The worker ends in good order and reports it, so that schedules that only it declared are removed soon.
        declarations.end()
        raise
