"""REST while Redis is away, full, or holds what is not ours: an answer in time, with a code, and never a 500."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import override_settings

from django_rmq import connections
from django_rmq.api import errors
from django_rmq.api import topics as answers
from django_rmq.exceptions import RmqError
from django_rmq.operations import Permission
from tests.support.programs import Program, requests_of_routes, user_with
from tests.support.servers import RedisServer, ask
from tests.support.workers import client_of

pytestmark = pytest.mark.django_db

TOPICS = {"timed": {"TYPE": "priority", "SLOTS": 1}}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server of the test's own, which the settings name."""
    with RedisServer() as started, override_settings(RMQ={"REDIS": started.url, "TOPICS": TOPICS}):
        yield started
        connections.close()


@pytest.fixture
def program(server: RedisServer) -> Program:
    return Program(user_with(*Permission))


def body_of(path: str) -> Any:
    """What a route takes."""
    consumer = {"consumer": str(uuid.uuid4())}
    deliveries = {"deliveries": [{"id": "0.MQ", "receipt": "1.0123456789abcdef0123"}]}
    last = path.rstrip("/").rpartition("/")[2]
    return {
        "messages": {"body": 1, "priority": 100},
        "prepare": consumer,
        "reschedule": {"priority": 100} | ({} if "messages" in path else {"filter": {}}),
        "purge": {"state": "dead"},
        "background": {"action": "replay"},
        "limits": {"max_rate": 5},
        **dict.fromkeys(("commit", "rollback", "extend", "release"), deliveries),
        "replay": {} if "messages" in path else {"filter": {}},
    }.get(last, {})


def with_query(method: str, path: str) -> str:
    return f"{path}?topic=timed" if method == "GET" and path == "slots/" else path


def test_every_route_says_that_redis_is_away(server: RedisServer, program: Program) -> None:
    server.stop()
    settling = {"commit", "rollback", "extend", "release"}
    for method, path, _ in requests_of_routes():
        began = time.monotonic()
        if path.rstrip("/").rpartition("/")[2] in settling:
            # A receipt that is none of ours is told without asking Redis; what asks it is the comparison of definitions.
            assert program(method, path, body_of(path)).status_code == 503
            continue
        refused = program.refused(503, "redis_unavailable", method, with_query(method, path), body_of(path))
        assert int(refused["Retry-After"]) >= 1
        assert time.monotonic() - began < 15, path
    assert Program().ok("GET", "health/live") == {"ok": True}
    assert Program().ok("GET", "health/ready", status=503) == {"ok": False}
    assert program.ok("GET", "health/ready", status=503)["findings"][0]["ok"] is False


def test_a_full_redis_refuses_sends_and_lets_consumers_go_on(server: RedisServer, program: Program) -> None:
    many = {"messages": [{"body": n, "priority": 100} for n in range(3)]}
    program.ok("POST", "topics/timed/messages/", many, 202)
    consumer = {"consumer": str(uuid.uuid4()), "max": 3}
    first = program.ok("POST", "topics/timed/prepare/", {**consumer, "max": 1})["messages"]
    ask(server.port, "CONFIG", "SET", "maxmemory", 1)
    refused = program.refused(
        507, "redis_full", "POST", "topics/timed/messages/", {"body": 9, "priority": 100}
    )
    assert int(refused["Retry-After"]) >= 1
    program.refused(507, "redis_full", "POST", "topics/timed/messages/", many, Idempotency_Key="k")
    taken = [*first, *program.ok("POST", "topics/timed/prepare/", consumer)["messages"]]
    named = [{"id": one["id"], "receipt": one["receipt"]} for one in taken]
    assert program.ok("POST", "topics/timed/commit/", {"deliveries": named})["outcomes"] == {"ok": 3}
    assert len(program.ok("GET", "topics/")["results"]) == 1


def test_a_limited_topic_is_consumed_from_a_full_redis(server: RedisServer) -> None:
    topics = {"timed": {**TOPICS["timed"], "MAX_IN_FLIGHT": 2, "MAX_RATE": 1000}}
    with override_settings(RMQ={"REDIS": server.url, "TOPICS": topics}):
        program = Program(user_with(*Permission))
        many = {"messages": [{"body": n, "priority": 100} for n in range(4)]}
        program.ok("POST", "topics/timed/messages/", many, 202)
        consumer = {"consumer": str(uuid.uuid4()), "max": 4}
        # What it needs to keep of itself is there before the server is full.
        taken = program.ok("POST", "topics/timed/prepare/", consumer)["messages"]
        ask(server.port, "CONFIG", "SET", "maxmemory", 1)
        done = 0
        while taken:
            named = [{"id": one["id"], "receipt": one["receipt"]} for one in taken]
            done += program.ok("POST", "topics/timed/commit/", {"deliveries": named})["outcomes"]["ok"]
            taken = program.ok("POST", "topics/timed/prepare/", {**consumer, "wait": 2})["messages"]
        assert done == 4
        connections.close()


def test_a_key_of_a_stranger_is_named(server: RedisServer, program: Program) -> None:
    client = client_of(server.url)
    client.set("timed_0", "foreign")
    program.refused(409, "wrong_type", "POST", "topics/timed/messages/", {"body": 1, "priority": 100})
    program.refused(409, "wrong_type", "POST", "topics/timed/prepare/", {"consumer": str(uuid.uuid4())})
    assert "timed_0" in program.ok("GET", "topics/timed/")["problems"][0]
    client.close()


def test_wrong_settings_are_told_to_the_log_only(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    with override_settings(RMQ={"REDIS": "redis://127.0.0.1:1/0", "TOPICS": TOPICS, "API": {"COLOUR": 1}}):
        refused = program.refused(503, "misconfigured", "GET", "topics/")
        assert "COLOUR" not in refused.json()["detail"]
        assert "COLOUR" in caplog.text


def test_every_error_of_ours_has_an_answer() -> None:
    def kinds(kind: type[RmqError]) -> Iterator[type[RmqError]]:
        for one in kind.__subclasses__():
            yield one
            yield from kinds(one)

    # One that a module keeps for itself reaches no face.
    leaves = [kind for kind in kinds(RmqError) if not kind.__subclasses__() and kind.__name__[0] != "_"]
    assert len(leaves) > 12
    for kind in leaves:
        assert any(issubclass(kind, known) for known in errors.ANSWERS), kind


def test_a_mistake_of_ours_is_not_disguised(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers.TopicAnswer, "of", lambda one: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        program("GET", "topics/")


def test_a_project_that_wraps_requests_in_transactions_keeps_nothing_of_those_that_failed(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def fail(one: Any) -> Any:
        User.objects.create_user("ghost")
        seen.append(connection.in_atomic_block)
        raise RmqError("it failed") from None

    monkeypatch.setitem(errors.ANSWERS, RmqError, errors.ErrorStatus(503, "failed"))
    monkeypatch.setattr(answers.TopicAnswer, "of", fail)
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    program.refused(503, "failed", "GET", "topics/")
    assert seen == [True]
    assert not User.objects.filter(username="ghost").exists()
