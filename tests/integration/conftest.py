"""The broker that most tests of this folder ask for, on Redis and in memory, and people with permissions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from django_rmq.testing import Clock
from tests.support.brokers import Broker, OracleBroker
from tests.support.workers import client_of


@pytest.fixture
def clock() -> Clock | None:
    """The brokers' time; None: real time."""
    return None


@pytest.fixture
def redis_broker(redis_url: str, prefix: str) -> Iterator[Broker]:
    client = client_of(redis_url)
    yield Broker(client, prefix)
    client.close()


@pytest.fixture(params=["redis", "memory"])
def broker(request: pytest.FixtureRequest, clock: Clock | None) -> Iterator[Any]:
    if request.param == "memory":
        yield OracleBroker("m:", clock)
        return
    client = client_of(request.getfixturevalue("redis_url"))
    yield Broker(client, request.getfixturevalue("prefix"), clock)
    client.close()


@pytest.fixture(autouse=True)
def _surveys_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test looks at what it has just done."""
    monkeypatch.setattr("django_rmq.operations.shared_reads.KEPT_MS", 0)


@pytest.fixture
def staff(db: None) -> Callable[..., Client]:
    """Log in a new member of the staff who has these permissions, by their codenames."""

    def log_in(*permissions: str) -> Client:
        user = User.objects.create_user(f"user{User.objects.count()}", is_staff=True)
        user.user_permissions.set(
            Permission.objects.filter(content_type__app_label="django_rmq", codename__in=permissions)
        )
        client = Client()
        client.force_login(user)
        return client

    return log_in
