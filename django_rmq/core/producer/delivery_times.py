"""Times as the sender of a message gives them. This is the one place where they become the milliseconds of the core."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any

from django_rmq.core.model.limits import (
    LONGEST_WAIT,
    MAX_TIMEOUT,
    SHORTEST_WAIT,
    shown,
)
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.validation import check_placement
from django_rmq.durations import AmbiguousDuration, InvalidDuration, milliseconds, parse_duration
from django_rmq.exceptions import InvalidMessage

TIMES = frozenset({"time_range", "delay", "fixed_time", "expires", "timeout"})
"""The options of a message that are durations or instants."""


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_SECONDS, _FIRST_MS, _LAST_MS = 1_000_000_000, 100_000_000_000, 100_000_000_000_000
"""Where numbers begin that read as seconds since the epoch (2001), and as milliseconds, and where those end."""


def in_milliseconds(topic: Topic, options: Mapping[str, Any], zone: tzinfo | None = None) -> dict[str, Any]:
    """Return the options of a message of ``topic`` with their times as the producer takes them.

    Those are whole milliseconds, since the epoch if they are instants; ``timeout`` is in seconds. ``zone``: that of
    naive datetimes. None: they are refused.

    Raises ``InvalidMessage`` for a value that is not a duration or an instant.
    """
    found = dict(options)
    if TIMES.isdisjoint(found):
        return found
    given = found.get
    check_placement(topic, given("priority"), given("time_range"), given("fixed_time"), given("delay"))
    for name in TIMES & found.keys():
        value = found[name]
        if value is None:
            continue
        if name in ("fixed_time", "expires"):
            found[name] = instant_ms(name, value, zone)
        elif name == "timeout":
            found[name] = _duration(
                name, value, timedelta(seconds=1), timedelta(seconds=MAX_TIMEOUT)
            ).total_seconds()
        else:
            least = SHORTEST_WAIT if name == "time_range" else timedelta()
            found[name] = milliseconds(_duration(name, value, least, LONGEST_WAIT, is_short=True))
    return found


def instant_ms(name: str, value: object, zone: tzinfo | None = None) -> int:
    """Return an aware datetime in ms since the epoch, rounded up. Raises ``InvalidMessage`` about ``name`` for others."""
    if not isinstance(value, datetime):
        raise InvalidMessage(f"{name} must be an aware datetime, got {shown(value)}{_call_for(value)}")
    if value.tzinfo is None:
        if zone is None:
            raise InvalidMessage(
                f"{name} {value!r} is naive; it needs a time zone: say timezone.make_aware(...), or begin with "
                "timezone.now()"
            )
        value = value.replace(tzinfo=zone)
    return -((_EPOCH - value) // timedelta(milliseconds=1))


def _call_for(value: object) -> str:
    """Return the end of a sentence that shows the call for what is probably meant by ``value``."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if _FIRST_SECONDS <= value < _FIRST_MS:
            return f": say datetime.fromtimestamp({value}, timezone.utc)"
        if _FIRST_MS <= value < _LAST_MS:
            return f": say datetime.fromtimestamp({value} / 1000, timezone.utc)"
        return (
            f": say timezone.now() + timedelta(seconds={shown(value)})" if 0 <= value < _FIRST_SECONDS else ""
        )
    if isinstance(value, timedelta):
        return ": say timezone.now() + that timedelta"
    if isinstance(value, date):
        return ": say timezone.make_aware(datetime.combine(that date, time()))"
    return ": say datetime.fromisoformat(that text)" if isinstance(value, str) else ""


def _duration(
    name: str, value: object, least: timedelta, most: timedelta, *, is_short: bool = False
) -> timedelta:
    try:
        return parse_duration(value, least, most, is_short=is_short)
    except AmbiguousDuration as error:
        raise InvalidMessage(f"{name} is {error.given}: it must be {error}. {error.hint}") from None
    except InvalidDuration as error:
        raise InvalidMessage(f"{name} must be {error}, got {error.given}") from None


__all__ = ["TIMES", "in_milliseconds", "instant_ms"]
