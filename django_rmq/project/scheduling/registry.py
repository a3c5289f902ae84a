"""The registry of schedules: those of ``RMQ["SCHEDULES"]``, and those that ``@schedule`` declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from django_rmq.core.words.schedules import Schedule
from django_rmq.exceptions import ConfigurationError
from django_rmq.project.settings import get_config
from django_rmq.project.settings.schedules import NAME_WANTED, SCHEDULE_KEYS, is_name
from django_rmq.project.settings.values import Wanted

Function = TypeVar("Function", bound=Callable[..., Any])

_schedules: dict[str, Schedule] = {}
"""By name. An empty time zone stands for TIME_ZONE."""


def schedule(
    name: str,
    *,
    topic: str,
    body: Any = None,
    cron: str | None = None,
    every: float | timedelta | None = None,
    timezone: str | None = None,
    catch_up: str = "last",
) -> Callable[[Function], Function]:
    """Send a message to ``topic`` at fixed times; the decorated function, usually its listener, is returned unchanged.

    ``cron``: an expression of five fields, in ``timezone`` (by default TIME_ZONE). ``every``: whole seconds
    or a timedelta. ``catch_up``: which of the ticks that were missed are sent: none, last or all.

    Raises ``ConfigurationError`` for options that cannot be used, and for a second schedule of this name.
    """
    given = {"TOPIC": topic, "BODY": body, "CRON": cron, "EVERY": every, "CATCH_UP": catch_up}
    if timezone is not None:
        given["TIMEZONE"] = timezone
    found = _parsed(name, given)

    def register(function: Function) -> Function:
        other = _schedules.get(name)
        # After a reload the same schedule is registered again.
        if other is not None and other != found:
            raise ConfigurationError(f'there are two schedules of the name "{name}"')
        _schedules[name] = found
        return function

    return register


def _parsed(name: object, given: dict[str, Any]) -> Schedule:
    if not is_name(name):
        raise ConfigurationError(f"@schedule needs a name, {NAME_WANTED}, got {name!r}")
    values: dict[str, Any] = {"timezone": ""}
    for key, value in given.items():
        field, parse = SCHEDULE_KEYS[key]
        try:
            values[field] = parse(value)
        except Wanted as wanted:
            raise ConfigurationError(
                f'@schedule("{name}"): {field} must be {wanted}, got {value!r}'
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
