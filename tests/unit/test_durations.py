"""Durations and instants: one form of each, wherever one is given. Whatever else is given gets a sentence."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from django.test import override_settings
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from django_rmq import Retry, Send, ensure_message, schedule, send_message, send_messages
from django_rmq.admin.forms import DurationField
from django_rmq.conf import read_settings
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.durations import (
    LONGEST,
    AmbiguousDuration,
    InvalidDuration,
    duration_text,
    milliseconds,
    parse_duration,
)
from django_rmq.exceptions import ConfigurationError, InvalidMessage
from django_rmq.management.rmq_command import duration
from django_rmq.spark.source_options import STREAM, SourceOptions
from django_rmq.testing import Clock, RMQTestMixin, assert_message_sent, captured_messages, memory_broker

TOPICS = {
    "merged": {"TYPE": "range_merge", "TIME_RANGE": "1d"},
    "line": {"TYPE": "fifo"},
    "timed": {"TYPE": "fixed_time", "IDENTITY": "key", "TIMEOUT": "7d"},
}
LATE = datetime(2050, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with override_settings(RMQ={"BROKER": "memory", "TOPICS": TOPICS}), memory_broker(), captured_messages():
        yield


FORMS: list[tuple[Any, int]] = [
    (0, 0), (5, 5_000), (2.5, 2_500), (np.float64(1.5), 1_500), (timedelta(minutes=2), 120_000),
    ("90", 90_000), ("250ms", 250), ("2s", 2_000), ("1.5s", 1_500), (".5s", 500), ("15m", 900_000),
    ("15 min", 900_000), ("2h", 7_200_000), ("2H", 7_200_000), ("7d", 604_800_000), ("1h30m", 5_400_000),
    ("1d 2h 3m 4s 5ms", 93_784_005),
]  # fmt: skip
BAD: list[Any] = [
    math.nan, math.inf, -math.inf, -1, -0.5, timedelta(seconds=-1), timedelta.max, True, False, 10**13,
    10**5000, 1e308, Decimal(5), np.int64(5), "5 parsecs", "", "soon", "-5s", "1e3", "inf", "nan", "30m1h",
    "5s5s", "٥s", "9" * 5000, "9" * 5000 + "d", b"5s", [10**5000], object(),
]  # fmt: skip
each_bad = pytest.mark.parametrize("value", BAD, ids=lambda value: InvalidDuration("", "", value).given[:30])


@pytest.mark.parametrize(("value", "ms"), FORMS, ids=str)
def test_a_duration_is_seconds_a_timedelta_or_text(value: Any, ms: int) -> None:
    assert milliseconds(parse_duration(value)) == ms


@each_bad
def test_what_is_no_duration_is_refused_with_the_forms_that_are(value: Any) -> None:
    with pytest.raises(
        InvalidDuration, match=r'^seconds, a timedelta or text such as "250ms", .* from 0s to 36525d$'
    ):
        parse_duration(value)


@given(st.timedeltas(timedelta(), LONGEST))
def test_a_duration_is_written_as_it_is_read(value: timedelta) -> None:
    assert parse_duration(duration_text(value)) == value
    assert parse_duration(value) == value
    assert parse_duration(value.total_seconds()) == pytest.approx(value, abs=timedelta(microseconds=1))


@given(st.one_of(st.text(max_size=8), st.from_regex(r"[0-9.]{1,4} ?(d|h|m|s|ms)?", fullmatch=True)))
def test_no_text_whatever_is_another_error(value: str) -> None:
    try:
        found = parse_duration(value)
    except InvalidDuration:
        return
    assert timedelta() <= found <= LONGEST


def setting(*path: str) -> Callable[[Any], Any]:
    """Return a function that reads settings in which the value is at ``path``; raises the first problem."""

    def read(value: Any) -> None:
        rmq: Any = {"BROKER": "memory", "TOPICS": {"merged": dict(TOPICS["merged"])}}
        place = rmq
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
        with override_settings(RMQ=rmq):
            config, problems = read_settings()
        if config is None:
            raise ConfigurationError(f"{problems[0].message} {problems[0].hint}")

    return read


def topic_setting(key: str) -> Callable[[Any], Any]:
    more: dict[str, dict[str, Any]] = {
        "MAX_WAIT": {"DEBOUNCE": True, "TIME_RANGE": "1ms"},
        "HARD_TIMEOUT": {"MAX_RUNTIME": 1},
    }

    def read(value: Any) -> None:
        topic = {**TOPICS["merged"], **more.get(key, {}), key: value}
        return setting("TOPICS", "merged")(topic)

    return read


def task_option(value: Any) -> None:
    tasks = {"default": {"BACKEND": "django_rmq.tasks.RMQBackend", "OPTIONS": {"RESULT_RETENTION": value}}}
    with override_settings(TASKS=tasks):
        setting("ON_COMMIT")(True)


def retry_of_a_batch(value: Any) -> None:
    Message(Topic("t", TopicType.FIFO), 0, 1, Delivery(b"1", 0.0, 3)).retry(delay=value)


def option_of_spark(value: Any) -> None:
    _ = SourceOptions(
        {"url": "redis://rmq", "topic": "any", "claimTimeout": value}, STREAM, "a test"
    ).lease_ms


def in_the_admin(value: Any) -> None:
    DurationField(timedelta(seconds=1)).clean(value)


def advance(value: Any) -> None:
    RMQTestMixin.advance(type("Test", (), {"rmq_clock": Clock()})(), value)


SHORT: dict[str, Callable[[Any], Any]] = {
    "time_range=": lambda value: send_message("merged", 1, time_range=value),
    "time_range= of many": lambda value: send_messages("merged", [1, 2], time_range=value),
    "time_range= of one of many": lambda value: send_messages("merged", [1, Send(2, time_range=value)]),
    "delay=": lambda value: ensure_message("line", 1, key="k", delay=value),
    "TIME_RANGE": topic_setting("TIME_RANGE"),
    "MAX_WAIT": topic_setting("MAX_WAIT"),
}
"""Places where a plain number of 1000 or more is asked for its unit."""
PLACES: dict[str, Callable[[Any], Any]] = {
    **SHORT,
    "timeout=": lambda value: send_message("timed", 1, fixed_time=LATE, timeout=value),
    **{
        key: topic_setting(key)
        for key in (
            "TIMEOUT", "BACKOFF", "MAX_RUNTIME", "HARD_TIMEOUT", "DEAD_RETENTION", "OUTCOME_RETENTION",
        )
    },
    "ONCE_RETENTION": setting("ONCE_RETENTION"),
    "GRACE": setting("OUTBOX", "GRACE"),
    **{
        key: setting("CONSUMER", key)
        for key in ("SHUTDOWN_TIMEOUT", "POLL_INTERVAL", "WATCHDOG", "MAX_IDLE_TIME")
    },
    "RESULT_RETENTION": task_option,
    "EVERY": lambda value: setting("SCHEDULES", "nightly")({"TOPIC": "timed", "EVERY": value}),
    "every=": lambda value: schedule("nightly", topic="timed", every=value),
    "Retry": lambda value: Retry(delay=value),
    "message.retry": retry_of_a_batch,
    "advance": advance,
}  # fmt: skip
TYPED: dict[str, Callable[[Any], Any]] = {
    "a flag": duration,
    "Spark": option_of_spark,
    "the admin": in_the_admin,
}
"""Places where everything is text."""


@pytest.mark.parametrize("value", [5, 5.0, timedelta(seconds=5), "5", "5s", "5000ms", "1m"], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_every_duration_takes_every_form(place: str, value: Any) -> None:
    PLACES[place](value)


@pytest.mark.parametrize("value", ["5", "5s", "5000ms", "1m"])
@pytest.mark.parametrize("place", TYPED)
def test_every_typed_duration_takes_text(place: str, value: str) -> None:
    TYPED[place](value)


@pytest.mark.parametrize("place", [place for place in PLACES if place != "advance"])
def test_every_duration_refuses_what_is_none_with_a_sentence(place: str) -> None:
    for value in BAD:
        with pytest.raises((InvalidMessage, ConfigurationError, ValueError)) as caught:
            PLACES[place](value)
        told = str(caught.value)
        assert "seconds, a timedelta or text such as" in told, told
        assert len(told) < 400


@pytest.mark.parametrize("value", [value for value in BAD if isinstance(value, str) and value])
@pytest.mark.parametrize("place", TYPED)
def test_every_typed_duration_refuses_what_is_none(place: str, value: str) -> None:
    from django.core.exceptions import ValidationError

    with pytest.raises((ArgumentTypeError, ConfigurationError, ValidationError)) as caught:
        TYPED[place](value)
    assert "such as " in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [1000, 5000, 5000.0, 60_000, "5000", 3_600_000], ids=repr)
@pytest.mark.parametrize("place", SHORT)
def test_a_number_that_may_be_milliseconds_is_asked_for_its_unit(place: str, value: Any) -> None:
    seconds = f"{float(value) / 1000:g}"
    hint = f'In milliseconds? Say {seconds} or "{seconds}s". For {float(value):.15g} seconds say "{float(value):.15g}s".'
    with pytest.raises((InvalidMessage, ConfigurationError)) as caught:
        SHORT[place](value)
    assert hint in str(caught.value)
    SHORT[place](f"{float(value):.15g}s")
    SHORT[place](timedelta(seconds=float(value)))


def test_the_largest_number_that_is_clear_is_taken() -> None:
    assert parse_duration(999.999, is_short=True) == timedelta(seconds=999.999)
    with pytest.raises(AmbiguousDuration):
        parse_duration(1000, is_short=True)


def test_the_check_of_the_settings_has_an_id_and_a_hint_of_its_own() -> None:
    with override_settings(
        RMQ={"BROKER": "memory", "TOPICS": {"a": {"TYPE": "range_merge", "TIME_RANGE": 5000}}}
    ):
        _, (problem,) = read_settings()
    assert problem.id == "django_rmq.E105"
    assert problem.message == (
        'RMQ["TOPICS"]["a"]["TIME_RANGE"] is 5000: it must be a duration with a unit, because numbers are seconds; or None.'
    )
    assert problem.hint == 'In milliseconds? Say 5 or "5s". For 5000 seconds say "5000s".'


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (30, "say Retry(delay=30)"),
        (30.5, "say Retry(delay=30.5)"),
        (timedelta(seconds=30), "say Retry(delay=datetime.timedelta(seconds=30))"),
        (ValueError("no"), "say Retry(str(error))"),
    ],
    ids=str,
)
def test_a_retry_has_a_reason_that_is_text(reason: Any, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        Retry(reason)
    assert str(caught.value).startswith("the first argument of Retry is the reason, a text, got ")
    assert str(caught.value).endswith(said)
    with pytest.raises(TypeError, match=r"the first argument of message\.retry is the reason"):
        Message(Topic("t", TopicType.FIFO), 0, 1, Delivery(b"1", 0.0, 3)).retry(reason)


def test_a_retry_has_its_delay_in_seconds() -> None:
    assert (Retry("busy", delay="1m").delay, Retry(delay=timedelta(hours=1)).delay, Retry().delay) == (
        60,
        3600,
        None,
    )


@pytest.mark.parametrize("name", ["fixed_time", "expires"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (60, "timezone.now() + timedelta(seconds=60)"),
        (2_524_608_000, "datetime.fromtimestamp(2524608000, timezone.utc)"),
        (2_524_608_000_000, "datetime.fromtimestamp(2524608000000 / 1000, timezone.utc)"),
        (2_524_608_000.5, "datetime.fromtimestamp(2524608000.5, timezone.utc)"),
        (timedelta(minutes=1), "timezone.now() + that timedelta"),
        (date(2050, 1, 1), "timezone.make_aware(datetime.combine(that date, time()))"),
        ("2050-01-01T00:00:00Z", "datetime.fromisoformat(that text)"),
        (datetime(2050, 1, 1), "timezone.make_aware"),  # noqa: DTZ001 - that it is naive is the point
        *[
            (value, "must be an aware datetime")
            for value in (math.nan, -5, True, 10**5000, Decimal(5), object())
        ],
    ],
    ids=lambda value: InvalidDuration("", "", value).given[:30],
)
def test_an_instant_is_a_datetime_and_anything_else_is_told_the_call(
    name: str, value: Any, said: str
) -> None:
    with pytest.raises(InvalidMessage) as caught:
        send_message("timed", 1, **{"fixed_time": LATE, name: value})
    assert str(caught.value).startswith(f"{name} ")
    assert said in str(caught.value)


def test_the_calls_that_are_shown_are_right() -> None:
    expected = LATE.timestamp()
    for call in (
        datetime.fromtimestamp(expected, UTC),
        datetime.fromtimestamp(expected * 1000 / 1000, UTC),
        datetime.fromisoformat("2050-01-01T00:00:00Z"),
    ):
        assert send_message("timed", 1, fixed_time=call).status == "stored"
    with override_settings(USE_TZ=False):
        assert send_message("timed", 2, fixed_time=datetime(2050, 1, 1)).status == "stored"  # noqa: DTZ001


def test_a_test_may_name_a_duration_in_any_form() -> None:
    with captured_messages() as messages:
        send_message("merged", 1, time_range="1m")
        send_message("timed", 2, fixed_time=LATE)
        for form in ("1m", 60, timedelta(minutes=1), "60s"):
            assert_message_sent("merged", 1, time_range=form, messages=messages)
        assert_message_sent(
            "timed", 1, fixed_time=LATE.astimezone(timezone.get_fixed_timezone(60)), messages=messages
        )
        with pytest.raises(AssertionError):
            assert_message_sent("merged", 1, time_range="2m", messages=messages)


def test_a_clock_is_advanced_by_any_duration_to_the_microsecond() -> None:
    clock = Clock(0)
    for by in (1, 0.5, "250ms", timedelta(microseconds=3), -1):
        clock.advance(by)
    assert clock() == 750_003


@pytest.mark.parametrize("by", [math.nan, math.inf, True, Decimal(5), np.int64(5), "soon", None], ids=repr)
def test_a_clock_is_not_advanced_by_what_is_no_duration(by: Any) -> None:
    with pytest.raises(InvalidDuration, match="seconds, a timedelta or text such as"):
        Clock().advance(by)
