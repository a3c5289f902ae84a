"""The check for django-health-check: the same look as `rmqhealth`, and no word of a server on the page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import AsyncRequestFactory, override_settings
from health_check.views import HealthCheckView

from django_rmq.conf import get_config
from django_rmq.health_check import RmqHealthCheck
from django_rmq.testing import Clock
from tests.support.brokers import OracleBroker, project_on

TOPICS = {
    "work": {"TYPE": "fixed_time", "SLOTS": 1, "LISTENER": False},
    "heard": {"TYPE": "fixed_time", "SLOTS": 1},
}
NAME = "django_rmq.health_check.RmqHealthCheck"


@pytest.fixture
def broker() -> Iterator[OracleBroker]:
    broker = OracleBroker("m:", Clock(1_800_000_000_000))
    with project_on(broker, BROKER="memory", TOPICS=TOPICS):
        yield broker


def asked(**options: Any) -> tuple[int, str]:
    """What the page of django-health-check answers: the status, and what it says of our check."""
    view = HealthCheckView.as_view(checks=[(NAME, options)])
    response = asyncio.run(view(AsyncRequestFactory().get("/health/?format=json")))
    (told,) = json.loads(response.content).values()
    return response.status_code, told


def test_all_is_well(broker: OracleBroker) -> None:
    assert asked(topics=("work",), max_age=60.0, max_dead=0) == (200, "OK")


def test_no_worker_is_unavailable_and_may_be_allowed(broker: OracleBroker) -> None:
    status, told = asked()
    assert status == 500 and "Unavailable: heard: no live worker serves it" in told
    assert asked(needs_workers=False) == (200, "OK")


def test_what_is_late_or_dead_is_a_warning(broker: OracleBroker) -> None:
    work = get_config().topic("work")
    broker.send_replace(work, 0, [1_799_999_000_000] * 2, [b"1", b"2"])
    broker.bury(work, 0, [b"2"], "test")
    status, told = asked(needs_workers=False, max_age=60.0, max_dead=0)
    assert status == 500 and told.startswith("Warning")
    assert "due for 17 min" in told and "1 message is dead" in told
    assert asked(needs_workers=False, max_age=6_000.0, max_dead=1) == (200, "OK")


def test_redis_away_says_nothing_of_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with override_settings(RMQ={"REDIS": "redis://:secret@127.0.0.1:1/0", "TOPICS": TOPICS}):
        status, told = asked()
    assert status == 500 and "redis is unhealthy" in told
    assert "127.0.0.1" not in told and "secret" not in told + caplog.text
    assert "127.0.0.1" in caplog.text


def test_a_topic_that_is_not_declared_is_unavailable(broker: OracleBroker) -> None:
    assert "Unavailable" in asked(topics=("other",))[1]


def test_its_repr_holds_what_was_given_and_no_secret() -> None:
    assert repr(RmqHealthCheck(max_age=5)) == (
        "RmqHealthCheck(max_age=5, max_dead=None, needs_workers=True, max_outbox_age=None, "
        "max_schedule_lateness=None, max_running=None, topics=None)"
    )
