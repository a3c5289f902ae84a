"""Whatever number comes from outside: it is refused with a sentence, or used, and never an OverflowError."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.core.model import bounds
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.keys import check_slots
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.placement import check_fixed_time, check_ms, check_priority, instant_ms
from django_rmq.core.producer.producer import check_durability
from django_rmq.durations import InvalidDuration
from django_rmq.exceptions import ConfigurationError, InvalidMessage, InvalidRequest, OperationRefused
from django_rmq.operations import Actor, Filter, Limits
from django_rmq.operations.consumption import Deliveries, SettledDelivery, SettlementOutcome
from tests.support.brokers import OracleBroker

RANKED = Topic("ranked", TopicType.PRIORITY, slots=1)
TIMED = Topic("timed", TopicType.FIXED_TIME, slots=1)
HOSTILE: list[Any] = [
    int("9" * 400), 10**5000, -(10**5000), 1 << 63, math.nan, math.inf, -math.inf, 1e308, -1, True, False,
    "5", [10**5000], Decimal("NaN"), timedelta.max, timedelta.min,
]  # fmt: skip
CONSUMER = UUID(int=1)
HUNDRED_YEARS_MS = 36_525 * 86_400_000
each_hostile = pytest.mark.parametrize("value", HOSTILE, ids=lambda value: bounds.abbreviated(value)[:20])
anything = st.one_of(
    st.integers(),
    st.integers(-20, 20).map(lambda n: n * 10**400),
    st.floats(),
    st.booleans(),
    st.text(max_size=3),
    st.timedeltas(),
    st.none(),
)


def consumed() -> Deliveries:
    return Deliveries(Actor("somebody", "rest"), TIMED, OracleBroker("m:"))


REFUSED = (InvalidMessage, InvalidRequest, OperationRefused, ConfigurationError, InvalidDuration)
REFUSALS: dict[str, Any] = {
    "time_range": lambda value: check_ms("time_range", value, 1),
    "priority": lambda value: check_priority(RANKED, value),
    "fixed_time": check_fixed_time,
    "due": lambda value: check_fixed_time(value, past=True),
    "replicas": lambda value: check_durability(value, False),
    "slots": check_slots,
    "age": lambda value: Filter(older_than=value).check(TIMED, "dead"),
    "slot": lambda value: Filter(slot=value).check(TIMED, "dead"),
    "messages": lambda value: Limits(messages=value).check(),
    "seconds": lambda value: Limits(seconds=value).check(),
    "rate": lambda value: Limits(rate=value).check(),
    "max": lambda value: consumed().take(CONSUMER, value),
    "wait": lambda value: consumed().take(CONSUMER, 1, value),
    "delay": lambda value: consumed().rollback(
        [SettledDelivery("0.MQ", "1.x")], [SettlementOutcome(delay_ms=value)]
    ),
}


@each_hostile
@pytest.mark.parametrize("name", REFUSALS)
def test_a_number_out_of_bounds_is_refused_with_a_sentence(name: str, value: Any) -> None:
    if name == "replicas" and value is False:
        value = None
    with pytest.raises(REFUSED) as caught:
        REFUSALS[name](value)
    assert len(str(caught.value)) < 300


@given(anything)
def test_no_number_whatever_is_another_error(value: Any) -> None:
    for name, check in REFUSALS.items():
        # A wait that is allowed would be waited for.
        if name in ("wait", "max") and bounds.is_number(value) and 0 <= value <= 1000:
            continue
        try:
            check(value)
        except REFUSED:
            pass


@given(anything)
def test_whatever_is_a_number_can_be_used_and_anything_can_be_shown(value: Any) -> None:
    assert len(bounds.abbreviated(value)) <= 80
    if bounds.is_number(value):
        assert float(value) == value
        assert str(round(value))
    assert bounds.is_whole(value) == (bounds.is_number(value) and isinstance(value, int))


@pytest.mark.parametrize(
    ("seconds", "ms"),
    [
        (0, 0), (-5, 0), (1.5, 1500), (timedelta(seconds=2), 2000), ("1m", 60_000),
        (10**400, HUNDRED_YEARS_MS), (math.inf, HUNDRED_YEARS_MS), (timedelta.max, HUNDRED_YEARS_MS),
        (-math.inf, 0),
    ],
)  # fmt: skip
def test_the_result_of_a_back_off_function_is_limited(seconds: Any, ms: int) -> None:
    assert bounds.delay_ms(seconds) == ms


@pytest.mark.parametrize("seconds", [math.nan, "soon", object(), Decimal("1.5"), True])
def test_what_is_no_delay_is_an_error_of_the_listener(seconds: Any) -> None:
    with pytest.raises(ValueError, match="a delay must be seconds, a timedelta or text such as"):
        bounds.delay_ms(seconds)
    with pytest.raises(
        ValueError, match=r"message\.retry\(delay=\) must be seconds, a timedelta or text such as"
    ):
        Message(TIMED, 0, 1, Delivery(b"1", 0.0, 3)).retry(delay=seconds)


def test_the_bounds_themselves_are_taken() -> None:
    assert check_ms("time_range", bounds.MAX_DURATION_MS, 1) == bounds.MAX_DURATION_MS
    assert check_fixed_time(bounds.MAX_INSTANT_MS) == bounds.MAX_INSTANT_MS
    latest = datetime.fromtimestamp(bounds.MAX_INSTANT_MS / 1000, UTC)
    assert instant_ms("fixed_time", latest) == bounds.MAX_INSTANT_MS
    Filter(older_than=bounds.MAX_AGE, newer_than=0).check(TIMED, "dead")
    Limits(messages=1, seconds=0.001, rate=bounds.LARGEST).check()
