"""A broker in memory and its time, for a project with the settings RMQ of the test's module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.test import override_settings

from django_rmq import connections
from django_rmq.testing import Clock
from tests.support.brokers import OracleBroker


@pytest.fixture
def clock() -> Clock:
    return Clock(1_800_000_000_000)


@pytest.fixture
def broker(request: pytest.FixtureRequest, clock: Clock) -> Iterator[OracleBroker]:
    broker = OracleBroker("m:", clock)
    with override_settings(RMQ=request.module.RMQ), connections.replaced_broker(broker):
        yield broker
