"""The broker that most tests of this folder ask for, and people with permissions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from django_rmq import connections
from django_rmq.conf import get_config
from django_rmq.testing import Clock
from tests.support.brokers import Broker
from tests.support.servers import TcpProxy
from tests.support.workers import client_of


@pytest.fixture
def clock() -> Clock | None:
    """The broker's time; None for real time."""
    return None


@pytest.fixture
def broker(redis_url: str, prefix: str, clock: Clock | None) -> Iterator[Broker]:
    client = client_of(redis_url)
    yield Broker(client, prefix, clock)
    client.close()


@pytest.fixture
def proxy(redis_url: str) -> Iterator[TcpProxy]:
    """Between the test and Redis; it may drop, delay and cut."""
    with TcpProxy(urlsplit(redis_url).port or 6379) as proxy:
        yield proxy


@pytest.fixture
def proxied(request: pytest.FixtureRequest, proxy: TcpProxy, prefix: str) -> Iterator[TcpProxy]:
    """The module's settings lead through a proxy, and two topics have been sent to before."""
    with request.module.configured(proxy.url, prefix):
        for name in ("prices", "keyed"):
            connections.agree(get_config().topic(name))
        yield proxy


@pytest.fixture(autouse=True)
def _surveys_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test looks at what it has just done."""
    monkeypatch.setattr("django_rmq.operations.shared_reads.KEPT_MS", 0)


@pytest.fixture
def staff(db: None) -> Callable[..., Client]:
    """Log in a new member of the staff who has these permissions, by their codenames; ``*``: all."""

    def log_in(*permissions: str) -> Client:
        name, has_all = f"user{User.objects.count()}", "*" in permissions
        user = User.objects.create_user(name, is_staff=True, is_superuser=has_all)
        user.user_permissions.set(
            Permission.objects.filter(content_type__app_label="django_rmq", codename__in=permissions)
        )
        client = Client()
        client.force_login(user)
        return client

    return log_in
