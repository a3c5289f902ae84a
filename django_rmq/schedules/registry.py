"""The registry of schedules: those of ``RMQ["SCHEDULES"]``, and those that ``@schedule`` declares.

It lives in the memory of one process. ``schedules.schedule_runner`` declares its schedules in Redis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from django_rmq.conf import get_config, set_schedule_topics
from django_rmq.conf.problems import printable
from django_rmq.conf.schedule_settings import NAME_WANTED, SCHEDULE_KEYS, is_name
from django_rmq.conf.values import InvalidSetting
from django_rmq.core.model.schedule import Schedule
from django_rmq.exceptions import ConfigurationError

_schedules: dict[str, Schedule] = {}
"""By name. An empty time zone stands for TIME_ZONE."""


def parsed(name: object, topic: str | None, options: Mapping[str, Any]) -> Schedule:
    """Return the schedule that a decorator declares. Without a ``topic`` it sends to the topic of its own name.

    ``options``: those of the settings, where None stands for one that is not given. Raises ``ConfigurationError``.
    """
    given = {key: value for key, value in options.items() if value is not None or key == "BODY"}
    return _parsed(name, {"TOPIC": name if topic is None else topic, **given})


def register(found: Schedule) -> None:
    """Register a schedule of a decorator. Raises ``ConfigurationError`` for a second one of its name."""
    other = _schedules.get(found.name)
    # A reload imports a module again, and registers the same schedule a second time.
    if other is not None and other != found:
        raise ConfigurationError(f'there are two schedules of the name "{found.name}"')
    _schedules[found.name] = found
    _set_topics()


def _set_topics() -> None:
    set_schedule_topics(one.topic for one in _schedules.values() if one.topic == one.name)


def _parsed(name: object, given: dict[str, Any]) -> Schedule:
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


def schedules() -> dict[str, Schedule]:
    """Return the declared schedules by name.

    Raises ``ConfigurationError`` if the settings and a decorator declare different ones of the same name.
    """
    config = get_config()
    found = dict(config.schedules)
    for name, one in _schedules.items():
        known = replace(one, timezone=one.timezone or config.time_zone)
        if found.setdefault(name, known) != known:
            raise ConfigurationError(
                f'schedule "{name}" is declared in RMQ["SCHEDULES"] and by @schedule, with different options'
            )
    return found


def declared() -> dict[str, Schedule]:
    """Return what decorators have declared, by name."""
    return dict(_schedules)


def replace_declared(schedules: dict[str, Schedule]) -> None:
    """For tests: replace what decorators have declared."""
    _schedules.clear()
    _schedules.update(schedules)
    _set_topics()
