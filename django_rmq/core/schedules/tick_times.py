"""The times at which a schedule ticks: its next and last tick, missed ticks, and changed rules of its time zone.

``cronsim`` handles cron expressions and daylight saving as Debian's cron does. Nothing here reads or writes Redis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import takewhile
from zoneinfo import ZoneInfo, available_timezones

from django_rmq.core.model.schedule import LocalTime, Schedule, ScheduleRecord
from django_rmq.exceptions import ConfigurationError

MISSED_MS = 60_000
"""A tick counts as missed if it is not written this long after its instant."""

_SPANS_MS = (3_600_000, 86_400_000, 32 * 86_400_000, 366 * 86_400_000)
"""The spans before the present in which the last tick is searched, one after the other."""


def next_tick(schedule: Schedule, after_ms: int) -> int | None:
    """Return the first tick after an instant, or None if there is none."""
    return next(_ticks(schedule, after_ms), None)


def last_tick(schedule: Schedule, after_ms: int, up_to_ms: int) -> int | None:
    """Return the last tick after one instant and up to another, or None if there is none."""
    if schedule.every is not None:
        last = up_to_ms - up_to_ms % (schedule.every * 1000)
        return last if last > after_ms else None
    for span_ms in (*_SPANS_MS, up_to_ms - after_ms):
        start_ms = max(after_ms, up_to_ms - span_ms)
        ticks = list(takewhile(lambda tick: tick <= up_to_ms, _ticks(schedule, start_ms)))
        if ticks:
            return ticks[-1]
    return None


def next_instant(schedule: Schedule, after_ms: int, now_ms: int, ran: Iterable[LocalTime] = ()) -> int | None:
    """Return the tick to send after the one at ``after_ms``, or None if there is none.

    It is the next tick, unless that was missed: then ``catch_up`` applies. ``ran`` has the latest ticks that ran; none of them
    is repeated because the rules of its time zone have changed.
    """
    tick = _next_instant(schedule, after_ms, now_ms)
    while tick is not None and _is_repeated(schedule, tick, ran):
        tick = next_tick(schedule, tick)
    return tick


def _next_instant(schedule: Schedule, after_ms: int, now_ms: int) -> int | None:
    first = next_tick(schedule, after_ms)
    if first is None or first > now_ms - MISSED_MS or schedule.catch_up == "all":
        return first
    if schedule.catch_up == "none":
        return next_tick(schedule, now_ms - MISSED_MS)
    return last_tick(schedule, after_ms, now_ms)


def local_time(schedule: Schedule, instant: int) -> LocalTime:
    """Return the local time at an instant (ms), by the present rules of the schedule's time zone."""
    if schedule.every is not None:
        return LocalTime(instant, 0, "")
    offset = datetime.fromtimestamp(instant // 1000, zone(schedule.timezone)).utcoffset() or timedelta()
    return LocalTime(instant, round(offset.total_seconds()), schedule.timezone)


def has_moved(record: ScheduleRecord, now_ms: int) -> bool:
    """Return whether the waiting tick has another instant since the rules of its time zone have changed.

    A tick that would be due already by the new rules stays as it is: it runs on its day, and not again.
    """
    planned = next((each for each in record.local_times if each.instant == record.at), None)
    if planned is None or record.state != "written" or record.at <= now_ms:
        return False
    present = local_time(record.schedule, record.at)
    # rule: a_tick_stays_where_old_rules_put_it
    return (
        present.timezone == planned.timezone
        and present.offset != planned.offset
        and local_time(record.schedule, now_ms).local_ms < planned.local_ms
    )


def _is_repeated(schedule: Schedule, instant: int, ran: Iterable[LocalTime]) -> bool:
    """Return whether a tick of a fixed time of day ran before the rules of its time zone changed.

    Where the minute or the hour begins with a star, every hour that passes counts, as for daylight saving.
    """
    if schedule.cron is None or any(field.startswith("*") for field in schedule.cron.split()[:2]):
        return False
    local_ms = local_time(schedule, instant).local_ms
    # rule: new_rules_repeat_a_run
    return any(
        each.timezone == schedule.timezone
        and local_time(schedule, each.instant).offset != each.offset
        and local_ms <= each.local_ms
        for each in ran
    )


def check(cron: str, timezone: str) -> None:
    """Raise ``ConfigurationError`` unless ``cron`` is an expression of five fields that ticks in ``timezone``."""
    if next_tick(Schedule("", "", cron=cron, timezone=timezone), 1_800_000_000_000) is None:
        raise ConfigurationError(f"{cron!r} is never due")


def zone(name: str) -> tzinfo:
    """Return the time zone of this name, or raise ``ConfigurationError``."""
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        # A system without time zones still knows UTC.
        if name == "UTC":
            return UTC
        if not available_timezones():
            raise ConfigurationError(
                f"the time zone {name!r} cannot be read, because this system has no time zones: "
                "install the package tzdata, from PyPI or from the system"
            ) from None
        raise ConfigurationError(
            f"{name!r} is not a time zone; the name of one is like Europe/Berlin"
        ) from None


def _cron(expression: str, after: datetime) -> Iterator[datetime]:
    """Return the times of a cron expression. Raises ``ConfigurationError``."""
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise ConfigurationError(
            "the package cronsim, which cron expressions need, is not installed"
        ) from None
    if len(expression.split()) != 5:
        raise ConfigurationError(
            f"{expression!r} has {len(expression.split())} fields: a cron expression has five"
        )
    try:
        return iter(CronSim(expression, after))
    except CronSimError as error:
        raise ConfigurationError(f"{expression!r} is not a cron expression: {error}") from None


def _ticks(schedule: Schedule, after_ms: int) -> Iterator[int]:
    """Yield the ticks after an instant, in order."""
    if schedule.every is not None:
        step_ms = schedule.every * 1000
        tick = after_ms - after_ms % step_ms
        while True:
            tick += step_ms
            yield tick
    latest = after_ms
    for instant in _cron(
        schedule.cron or "", datetime.fromtimestamp(after_ms // 1000, zone(schedule.timezone))
    ):
        tick = int(instant.timestamp()) * 1000
        # Where the clock is set back, an hour passes twice; a fixed time of day belongs to its first pass.
        if tick > latest:
            latest = tick
            yield tick
