"""The broker that most tests of this folder ask for: on Redis and in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from django_rmq.core.memory.broker import InMemoryBroker
from django_rmq.core.memory.clock import Clock
from tests.brokers import Broker
from tests.workers import client_of


@pytest.fixture
def clock() -> Clock | None:
    """The brokers' time; None: real time."""
    return None


@pytest.fixture(params=["redis", "memory"])
def broker(request: pytest.FixtureRequest, clock: Clock | None) -> Iterator[Any]:
    if request.param == "memory":
        yield InMemoryBroker("m:", clock)
        return
    client = client_of(request.getfixturevalue("redis_url"))
    yield Broker(client, request.getfixturevalue("prefix"), clock)
    client.close()
