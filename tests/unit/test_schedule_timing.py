"""When schedules tick: cron expressions over changes of the clock, intervals, and what was missed."""

from __future__ import annotations

import sys
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.core.model.schedule import Schedule, instant_text
from django_rmq.core.schedules import tick_times
from django_rmq.core.schedules.tick_times import last_tick, next_instant, next_tick
from django_rmq.exceptions import ConfigurationError
from django_rmq.schedules import timing_problems

CRONS = [
    "0 3 * * *", "30 2 * * *", "*/30 * * * *", "15 1,2,3 * * *", "0 0 1 * *", "*/7 2 * * 0", "59 23 31 12 *",
]  # fmt: skip
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"]
HOUR = 3_600_000

schedules = st.one_of(
    st.builds(
        lambda cron, zone: Schedule("a", "t", cron=cron, timezone=zone),
        st.sampled_from(CRONS),
        st.sampled_from(ZONES),
    ),
    st.builds(lambda every: Schedule("a", "t", every=every), st.sampled_from([1, 60, 3_600, 100_000])),
)
# About the changes of 2026 in Berlin and New York, and anywhere.
instants = st.one_of(
    *(
        st.integers(around - 30 * HOUR, around + 30 * HOUR)
        for around in (1_774_746_000_000, 1_792_890_000_000, 1_772_953_200_000, 1_793_512_800_000)
    ),
    st.integers(1_700_000_000_000, 1_900_000_000_000),
)


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def berlin(cron: str, after: str, count: int = 3) -> list[str]:
    schedule = Schedule("a", "t", cron=cron, timezone="Europe/Berlin")
    return [instant_text(tick) for tick in islice(tick_times._ticks(schedule, ms(after)), count)]


@pytest.mark.parametrize(
    ("cron", "after", "expected"),
    [
        ("0 3 * * *", "2026-03-28T12:00:00Z", ["2026-03-29T01:00:00Z", "2026-03-30T01:00:00Z"]),
        ("30 2 * * *", "2026-03-28T12:00:00Z", ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]),
        ("30 2 * * *", "2026-10-24T12:00:00Z", ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]),
        # In the hour that passes a second time, nothing of the first is due again.
        ("30 2 * * *", "2026-10-25T01:10:00Z", ["2026-10-26T01:30:00Z"]),
        ("*/30 * * * *", "2026-10-25T00:10:00Z", ["2026-10-25T00:30:00Z", "2026-10-25T01:00:00Z", "2026-10-25T01:30:00Z"]),
        ("*/30 * * * *", "2026-03-29T00:40:00Z", ["2026-03-29T01:00:00Z", "2026-03-29T01:30:00Z"]),
        ("0 12 * * MON", "2026-03-28T12:00:00Z", ["2026-03-30T10:00:00Z"]),
    ],
)  # fmt: skip
def test_a_cron_expression_follows_the_clock_of_its_zone(cron: str, after: str, expected: list[str]) -> None:
    assert berlin(cron, after, len(expected)) == expected


@given(schedules, instants)
def test_ticks_rise_and_the_last_one_is_one_of_them(schedule: Schedule, after: int) -> None:
    first, second = islice(tick_times._ticks(schedule, after), 2)
    assert after < first < second
    assert next_tick(schedule, first) == second
    assert next_tick(schedule, first - 1) == first
    assert last_tick(schedule, after, first - 1) is None
    for up_to in (first, second - 1):
        assert last_tick(schedule, after, up_to) == first
    assert last_tick(schedule, after, second) == second


@given(schedules, instants, st.integers(0, 400 * 24))
def test_the_last_tick_is_the_one_before_the_next(schedule: Schedule, after: int, hours: int) -> None:
    up_to = after + hours * HOUR
    found = last_tick(schedule, after, up_to)
    if found is None:
        first = next_tick(schedule, after)
        assert first is not None and first > up_to
    else:
        assert after < found <= up_to
        following = next_tick(schedule, found)
        assert following is not None and following > up_to


@pytest.mark.parametrize(
    ("catch_up", "late_ms", "expected"),
    [
        ("none", 59_999, "10:00"),
        ("none", 60_000, "11:00"),
        ("last", 59_999, "10:00"),
        ("last", 3 * HOUR + 60_000, "13:00"),
        ("all", 3 * HOUR + 60_000, "10:00"),
        ("none", 3 * HOUR + 59_999, "13:00"),
        ("last", -60_000, "10:00"),
    ],
)
def test_what_was_missed_is_chosen_by_the_schedule(catch_up: str, late_ms: int, expected: str) -> None:
    schedule = Schedule("a", "t", every=3_600, catch_up=catch_up)
    found = next_instant(schedule, ms("2026-05-05T09:00:00Z"), ms("2026-05-05T10:00:00Z") + late_ms)
    assert found == ms(f"2026-05-05T{expected}:00Z")


def test_an_expression_that_is_never_due_again_has_no_next_tick() -> None:
    schedule = Schedule("a", "t", cron="0 0 29 2 *")
    assert next_tick(schedule, ms("2096-03-01T00:00:00Z")) == ms("2104-02-29T00:00:00Z")
    with pytest.raises(ConfigurationError, match="not a cron expression"):
        tick_times.check("0 0 31 4 *", "UTC")


@pytest.mark.parametrize("cron", ["", "* * * *", "* * * * * *", "@daily", "0 25 * * *", "x * * * *"])
def test_what_is_no_expression_is_refused(cron: str) -> None:
    with pytest.raises(ConfigurationError):
        tick_times.check(cron, "UTC")


@pytest.mark.parametrize("zone", ["", "Europe/Atlantis", "/etc/passwd", "../UTC", "\0"])
def test_what_is_no_zone_is_refused(zone: str) -> None:
    with pytest.raises(ConfigurationError, match="not a time zone"):
        tick_times.check("* * * * *", zone)


def test_an_expression_without_cronsim_says_so_and_an_interval_needs_none() -> None:
    missing: Any = {"cronsim": None}
    with mock.patch.dict("sys.modules", missing):
        assert next_tick(Schedule("a", "t", every=60), 90_000) == 120_000
        with pytest.raises(ConfigurationError, match="cronsim"):
            next_tick(Schedule("a", "t", cron="* * * * *"), 0)


def test_a_schedule_is_read_as_it_was_stored() -> None:
    schedule = Schedule("a", "t", {"b": [1, None, "é"]}, cron="0 3 * * *", timezone="Europe/Berlin")
    assert Schedule.parse(schedule.text) == schedule
    for text in ("[]", "{}", '{"name": "a"}', "x"):
        with pytest.raises(ValueError):
            Schedule.parse(text)
    assert datetime.fromtimestamp(0, UTC).year == 1970 and instant_text(0) == "1970-01-01T00:00:00Z"


@pytest.fixture
def without_time_zones(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A system without the package tzdata, as slim images are."""
    for name in {"tzdata", *(one for one in sys.modules if one.startswith("tzdata."))}:
        monkeypatch.setitem(sys.modules, name, None)
    zoneinfo.ZoneInfo.clear_cache()
    zoneinfo.reset_tzpath(to=[])
    yield
    zoneinfo.reset_tzpath()
    zoneinfo.ZoneInfo.clear_cache()


def test_an_image_without_time_zones_is_told_apart_from_a_wrong_name(without_time_zones: None) -> None:
    with pytest.raises(ConfigurationError, match="no time zones: install the package tzdata"):
        tick_times.check("0 3 * * *", "Europe/Berlin")
    noon = ms("2026-05-05T12:00:00Z")
    assert next_tick(Schedule("a", "t", cron="0 3 * * *"), noon) == ms("2026-05-06T03:00:00Z")
    (found,) = timing_problems(Schedule("a", "t", every=60, timezone="Europe/Berlin"))
    assert (found.id, "tzdata" in found.message) == ("django_rmq.E071", True)
    assert list(timing_problems(Schedule("a", "t", every=60))) == []


def test_a_wrong_name_of_a_time_zone_is_named() -> None:
    with pytest.raises(ConfigurationError, match="'Europe/Bern' is not a time zone; the name of one is like"):
        tick_times.zone("Europe/Bern")
