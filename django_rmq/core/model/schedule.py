"""Schedules as values: a schedule as the settings declare it, and the record that Redis has of it and its ticks.

When a schedule ticks, and the steps that write its ticks, are in ``core/schedules``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from hashlib import sha1
from typing import Any, NamedTuple, Self

from django_rmq.core.model.bounds import OTHER_FORM, abbreviated

TIMING = ("cron", "every", "timezone")
"""The fields that decide when a schedule ticks."""

EDITABLE = (*TIMING, "catch_up")
"""The fields that people may change. A change stays when the settings are deployed again."""

CATCH_UP = ("none", "last", "all")

LATEST_MS = 1 << 47
"""A time (ms) beyond every time of a schedule, for which there is still a date."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule as it is declared. Every value is validated before the object is built."""

    name: str
    topic: str
    body: object = None
    cron: str | None = None
    """Five fields, as in Debian's cron. None if the schedule has ``every``."""
    every: int | None = None
    """Seconds. The ticks are the multiples since 1970-01-01 UTC."""
    timezone: str = "UTC"
    """The time zone of ``cron``."""
    catch_up: str = "last"
    """Which missed ticks are sent: none, the last one or all."""

    @property
    def text(self) -> str:
        """The text that is stored in Redis. Equal schedules have equal texts."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """The SHA-1 of the text that is stored in Redis."""
        return sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    @property
    def timing(self) -> str:
        """When it ticks, as people read it."""
        return f"every {self.every} s" if self.every is not None else f"{self.cron} {self.timezone}"

    @property
    def is_sound(self) -> bool:
        """Whether the schedule has either ``cron`` or ``every``, but not both."""
        return (self.cron is None) != (self.every is None)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the schedule of a stored text. Raises ``ValueError``."""
        try:
            schedule: Self = cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"not a schedule: {error}") from None
        schedule.check()
        return schedule

    def check(self) -> None:
        """Raise ``ValueError`` unless the fields have the types of a schedule: its text comes from Redis."""
        texts: tuple[object, ...] = (self.name, self.topic, self.timezone, self.catch_up, self.cron or "")
        every: object = self.every
        if not (
            self.is_sound
            and all(isinstance(text, str) for text in texts)
            and (every is None or (type(every) is int and 0 < every < LATEST_MS))
        ):
            raise ValueError("not a schedule: a field has another type")

    def changed(self, override: Mapping[str, Any]) -> Schedule:
        """Return the schedule with the changes of people; ``cron`` and ``every`` replace each other."""
        changes = {name: override[name] for name in EDITABLE if name in override}
        if changes.get("cron") is not None:
            changes["every"] = None
        elif changes.get("every") is not None:
            changes["cron"] = None
        return replace(self, **changes)


class LocalTime(NamedTuple):
    """The local time at a tick, by the rules that its time zone had when the tick was planned."""

    instant: int
    """The tick, in ms."""
    offset: int
    """The number of seconds by which the zone was ahead of UTC."""
    timezone: str

    @property
    def local_ms(self) -> int:
        """The local time, in ms since the epoch as if it were UTC."""
        return self.instant + self.offset * 1000


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """The record that Redis has of a schedule. Times are in ms since the epoch."""

    name: str
    declared: Schedule
    """The schedule as the settings of the present version of the project declare it."""
    override: Mapping[str, object]
    """The fields that people have changed."""
    generation: int
    """Rises with every change."""
    state: str
    """ready: the next tick is to be planned. writing: ``at`` is to be written into its slot. written: it is there.
    retracting: it is to be taken back, because the schedule was changed or removed. ``lua/schedules.lua`` changes the state."""
    at: int
    """The latest tick that was planned, or the instant from which the next one counts."""
    changed_ms: int
    is_paused: bool = False
    is_removed: bool = False
    topic: str = ""
    """The topic of the tick ``at``; empty if there was none."""
    crc: int = 0
    """The CRC of the slot basis of the tick ``at``."""
    last: int | None = None
    """The tick before ``at``."""
    late_ms: int = 0
    """How long after its instant the latest tick was written; 0 if it was written ahead of it."""
    renewed_ms: int = 0
    """When a worker last renewed its declaration of the schedule; 0 if the last worker that did so has ended."""
    former: str = ""
    """The digest of the declaration before the present one; empty if there was none."""
    local_times: tuple[LocalTime, ...] = ()
    """The local times of the tick ``at`` and of the ticks before it."""

    @property
    def schedule(self) -> Schedule:
        """The schedule with the changes of people."""
        return self.declared.changed(self.override)

    def ran(self, now_ms: int) -> list[LocalTime]:
        """Return the local times of the latest ticks that were due."""
        return [
            each
            for each in self.local_times
            if each.instant in (self.at, self.last) and each.instant <= now_ms
        ]

    def last_run(self, now_ms: int) -> int | None:
        """Return the latest tick that was due, or None if there was none yet."""
        return self.at if self.state == "written" and self.at <= now_ms else self.last


class ScheduleRecords(list[ScheduleRecord]):
    """The records of all schedules that can be read."""

    def __init__(
        self, readable: Iterable[ScheduleRecord] = (), unreadable: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(readable)
        self.unreadable = dict(unreadable or {})
        """Schedule whose record cannot be read -> why. Another program has written it, or a later version. It does not run,
        and no worker declares it, until somebody has corrected it."""


def records(key: bytes, fields: Mapping[bytes, bytes]) -> ScheduleRecords:
    """Return the record of each schedule from the fields of the hash ``key``."""
    parts_of: dict[str, dict[str, str]] = {}
    for field, value in fields.items():
        name, colon, part = field.decode(errors="backslashreplace").partition(":")
        if colon:
            parts_of.setdefault(name, {})[part] = value.decode(errors="backslashreplace")
    readable, unreadable = [], {}
    for name, parts in sorted(parts_of.items()):
        # A version that removes a schedule leaves the fields that it does not know.
        if "spec" not in parts:
            continue
        try:
            readable.append(_record(name, parts))
        except OTHER_FORM as error:
            unreadable[name] = (
                f"fields {name + ':…'!r} of the hash {key.decode(errors='replace')!r} in Redis are not a schedule "
                f"({type(error).__name__}: {error}). Correct or delete them; workers then declare it again"
            )
    return ScheduleRecords(readable, unreadable)


def _record(name: str, parts: Mapping[str, str]) -> ScheduleRecord:
    override = json.loads(parts.get("override", "{}"))
    if not isinstance(override, dict):
        raise ValueError(f"the override of schedule {name} is not an object")  # noqa: TRY004 - a stored value
    record = ScheduleRecord(
        name,
        Schedule.parse(parts["spec"]),
        override,
        _time(parts["generation"]),
        parts["state"],
        _time(parts["at"]),
        _time(parts["changed"]),
        "paused" in parts,
        "removed" in parts,
        parts.get("topic", ""),
        int(parts.get("crc", 0)),
        _time(parts["last"]) if "last" in parts else None,
        int(parts.get("late", 0)),
        _time(parts.get("renewed", "0")),
        parts.get("former", ""),
        tuple(
            LocalTime(_time(instant), int(offset), str(zone))
            for instant, offset, zone in json.loads(parts.get("walls", "[]"))
        ),
    )
    record.schedule.check()
    return record


def _time(value: str | int) -> int:
    """Return a time in ms. Raises ``ValueError`` for one that no calendar has."""
    time_ms = int(value)
    if not 0 <= time_ms < LATEST_MS:
        raise ValueError(f"{abbreviated(time_ms)} is not a time")
    return time_ms


def local_times_text(local_times: Iterable[LocalTime]) -> str:
    """Return the text of local times that is stored in Redis; empty if there are none."""
    times = [list(each) for each in local_times]
    return json.dumps(times, separators=(",", ":")) if times else ""


def tick_member(name: str, instant: int) -> bytes:
    """Return the key of the message of a tick: ``nightly@2026-03-29T01:00:00Z``."""
    return f"{name}@{instant_text(instant)}".encode()


def instant_text(instant: int) -> str:
    """Return an instant (ms) as ISO 8601 in UTC, to the second."""
    return datetime.fromtimestamp(instant // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
