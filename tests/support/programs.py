"""Programs that use the REST API of the tests' settings, and the broker behind it."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client, override_settings

from django_rmq import connections
from django_rmq.api import urls
from django_rmq.api.view import RmqView
from django_rmq.conf import get_config
from django_rmq.core.model.envelope import Envelope, encode_envelope
from django_rmq.core.model.replies import Failure
from django_rmq.core.producer.placement import slot_of
from django_rmq.operations import Permission as Needed
from tests.support.brokers import Broker

ALL = tuple(Needed)


def broker_of_project(request: pytest.FixtureRequest, **rmq: Any) -> Iterator[Broker]:
    """Yield the broker that every purpose uses, on the Redis of the tests, while the settings are ``rmq``."""
    broker = Broker(request.getfixturevalue("redis_client"), request.getfixturevalue("prefix"))
    rmq = {"REDIS": request.getfixturevalue("redis_url"), **rmq}
    with override_settings(RMQ=rmq), connections.replaced_broker(broker):
        yield broker


class Program:
    """A client that sends and reads JSON."""

    def __init__(self, user: User | None = None) -> None:
        # As under a server with threads: only there a request may wait.
        self.client = Client()
        self.client.defaults["wsgi.multithread"] = True  # type: ignore[assignment]
        if user is not None:
            self.client.force_login(user)

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Ask, and return the response; an answer of ours is JSON, and no server error is a 500."""
        data = "" if body is None else body if isinstance(body, (str, bytes)) else json.dumps(body)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        response = self.client.generic(
            method, f"/api/rmq/{path}", data, content_type="application/json", headers=headers
        )
        assert response.status_code != 500
        return response

    def ok(self, method: str, path: str, body: Any = None, status: int = 200, **headers: str) -> Any:
        response = self(method, path, body, **headers)
        assert response.status_code == status, response.content
        return response.json()

    def refused(
        self, status: int, code: str, method: str, path: str, body: Any = None, **headers: str
    ) -> Any:
        response = self(method, path, body, **headers)
        assert (response.status_code, response.json()["code"]) == (status, code), response.content
        assert response.json()["detail"]
        return response


def user_with(*needed: Needed) -> User:
    user = User.objects.create_user(f"u{uuid.uuid4().hex[:8]}")
    user.user_permissions.set(Permission.objects.filter(codename__in=[one.value for one in needed]))
    return user


class Consumer(Program):
    """A program that consumes a topic."""

    def __init__(self, topic: str, user: User | None = None) -> None:
        super().__init__(user or user_with(*ALL))
        self.topic, self.uuid = topic, str(uuid.uuid4())

    def take(self, most: int = 1, **options: Any) -> list[dict[str, Any]]:
        body = {"consumer": self.uuid, "max": most, **options}
        return self.ok("POST", f"topics/{self.topic}/prepare/", body)["messages"]

    def settle(self, verb: str, *taken: dict[str, Any], **how: Any) -> dict[str, int]:
        named = [{"id": one["id"], "receipt": one["receipt"], **how} for one in taken]
        return self.ok("POST", f"topics/{self.topic}/{verb}/", {"deliveries": named})["outcomes"]

    def send(self, *bodies: Any, **options: Any) -> None:
        messages = [{"body": body, "priority": 100, **options} for body in bodies]
        self.ok("POST", f"topics/{self.topic}/messages/", {"messages": messages}, 202)


def kill_all(broker: Any, name: str, error: str = "shop.Boom: bad") -> None:
    """Let everything that can be taken fail for good."""
    topic = get_config().topic(name)
    for slot in range(topic.slots):
        while (taken := broker.prepare(topic, slot, "W", None, 1000)).status == "ok":
            failures = [Failure(one.member, "rejected", None, error) for one in taken.deliveries]
            broker.rollback(topic, slot, taken.receipt, failures)


def put(broker: Any, name: str, *members: bytes, score: float | None = None) -> list[int]:
    """Send members as a program would that validates nothing; return their slots."""
    topic = get_config().topic(name)
    if score is None:
        score = 100 if topic.is_priority else int(time.time() * 1000) - 60_000
    slots = [slot_of(member, topic.slots) for member in members]
    for slot in set(slots):
        group = [member for member, of in zip(members, slots, strict=True) if of == slot]
        for first in range(0, len(group), 1_000):
            part = group[first : first + 1_000]
            envelopes = [encode_envelope(Envelope(b'"body"'))] * len(part) if topic.keyed else ()
            broker.send_replace(topic, slot, [score] * len(part), part, envelopes)
    return slots


def kill(broker: Any, name: str, *members: bytes, error: str = "shop.errors.Boom: bad\nTraceback") -> None:
    """Send members and let each fail for good, and what waits beside them."""
    put(broker, name, *members)
    kill_all(broker, name, error)


def views() -> list[tuple[str, type[RmqView]]]:
    return list(urls.ROUTES.values())


def path_of(route: str) -> str:
    return re.sub(r"<str:id>", "0.MQ", route.replace("<str:topic>", "timed"))


def requests_of_routes() -> Iterator[tuple[str, str, Needed]]:
    for route, view in views():
        for method, needed in getattr(view, "needs", {}).items():
            yield method, path_of(route), needed
