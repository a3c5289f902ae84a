"""What one user may ask of REST: requests, messages, bytes, kept answers and requests that wait."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.cache import cache
from django.test import override_settings
from rest_framework.throttling import SimpleRateThrottle

from django_rmq.api import view
from django_rmq.conf import get_config
from django_rmq.core.commands import operate, send
from django_rmq.core.commands.schedules import change_schedule
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.schedule import Schedule
from django_rmq.exceptions import InvalidRequest, TooManySends
from django_rmq.operations import Actor, Permission, sends
from django_rmq.operations.consumption import LongPollLimiter, seats
from django_rmq.operations.sends import SendCharge
from django_rmq.testing import Clock
from tests.support.brokers import OracleBroker, project_on
from tests.support.programs import ALL, Program, broker_of_project, user_with
from tests.support.workers import LONG, eventually

pytestmark = pytest.mark.django_db

TOPICS = {
    "ranked": {"TYPE": "priority", "SLOTS": 1},
    "small": {"TYPE": "priority", "SLOTS": 1, "MAX_BACKLOG": 1},
    "timed": {"TYPE": "fixed_time", "SLOTS": 1, "IDENTITY": "key"},
}
PATH = "topics/ranked/messages/"


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from broker_of_project(request, TOPICS=TOPICS)


@contextmanager
def limited(broker: Any, **api: Any) -> Iterator[None]:
    with project_on(broker, TOPICS=TOPICS, API={"SEND_RATE": None, **api}):
        yield


def message(n: int, size: int = 1) -> dict[str, Any]:
    return {"body": f"{n:0>{size}}", "priority": 50}


def test_sends_are_limited_in_bytes_per_user(broker: Any) -> None:
    with limited(broker, SEND_BYTES="5kB/h"):
        one, other = Program(user_with(*ALL)), Program(user_with(*ALL))
        for n in range(2):
            one.ok("POST", PATH, message(n, 2_000), 202)
        refused = one.refused(429, "too_many_sends", "POST", PATH, message(2, 2_000))
        assert "bytes" in refused.json()["detail"]
        assert 600 < int(refused["Retry-After"]) < 900
        one.ok("POST", PATH, message(3, 500), 202)
        other.ok("POST", PATH, message(4, 2_000), 202)
        too_large = other.refused(400, "invalid_request", "POST", PATH, message(5, 6_000))
        assert "bytes in one request" in too_large.json()["detail"]


def test_many_messages_are_charged_with_all_their_bytes(broker: Any) -> None:
    with limited(broker, SEND_BYTES="5kB/h"):
        program = Program(user_with(*ALL))
        many = {"messages": [message(n, 1_000) for n in range(4)]}
        program.ok("POST", PATH, many, 202)
        program.refused(429, "too_many_sends", "POST", PATH, many)
        assert program.ok("GET", "topics/ranked/")["waiting"] == 4


def test_what_one_limit_refuses_is_charged_to_none() -> None:
    broker, actor = OracleBroker("m:", Clock()), Actor("somebody", "rest")
    messages, size = SendCharge("messages", 3, 10, 3600.0), SendCharge("bytes", 600, 1_000, 3600.0)
    sends.spend(broker, actor, [messages, size])
    for _ in range(9):
        with pytest.raises(TooManySends, match="the limit of 1000 bytes in 3600 s is reached: send 600 more"):
            sends.spend(broker, actor, [messages, size])
    sends.spend(broker, actor, [messages._replace(wanted=7)])
    with pytest.raises(TooManySends, match="messages"):
        sends.spend(broker, actor, [messages._replace(wanted=1)])
    sends.spend(broker, actor, [])
    with pytest.raises(InvalidRequest, match="1001 bytes in one request exceed the limit of 1000 in 3600 s"):
        sends.spend(broker, actor, [size._replace(wanted=1_001)])


RUNS = "schedules/often/run/"


def scheduled(broker: Any, body: Any = 1) -> None:
    """Let Redis have a schedule of the topic `timed`, as a worker declares it."""
    broker.run(change_schedule("often", "spec", Schedule("often", "timed", body, every=60).text))


def test_a_run_of_a_schedule_is_charged_like_a_send(broker: Any) -> None:
    with limited(broker, SEND_RATE="3/h"):
        scheduled(broker)
        program = Program(user_with(*ALL))
        program.ok("POST", PATH, message(1), 202)
        for _ in range(2):
            program.ok("POST", RUNS, status=202)
        refused = program.refused(429, "too_many_sends", "POST", RUNS)
        assert 600 < int(refused["Retry-After"]) <= 1_201
        program.refused(429, "too_many_sends", "POST", PATH, message(2))
        assert sum(topic(program, name) for name in ("timed", "ranked")) == 3
        Program(user_with(*ALL)).ok("POST", RUNS, status=202)


def test_a_run_of_a_schedule_is_charged_with_the_size_of_its_body(broker: Any) -> None:
    with limited(broker, SEND_BYTES="5kB/h"):
        scheduled(broker, "x" * 2_000)
        program = Program(user_with(*ALL))
        for _ in range(2):
            program.ok("POST", RUNS, status=202)
        program.refused(429, "too_many_sends", "POST", RUNS)
        assert topic(program, "timed") == 2
        scheduled(broker, "x" * 6_000)
        program.refused(400, "invalid_request", "POST", RUNS)


def test_a_replay_with_a_body_is_charged_like_a_send_and_one_without_is_not(broker: Any) -> None:
    with limited(broker, SEND_RATE="3/h", SEND_BYTES="5kB/h"):
        dead = dying(broker, 5)
        program = Program(user_with(*(each for each in ALL if each is not Permission.SEND)))
        for n in range(2):
            program.ok("POST", f"{PATH}{dead[n]}/replay/", {"body": "y" * 2_000 + str(n)})
        refused = program.refused(
            429, "too_many_sends", "POST", f"{PATH}{dead[2]}/replay/", {"body": "y" * 2_000}
        )
        assert "bytes" in refused.json()["detail"]
        program.ok("POST", f"{PATH}{dead[2]}/replay/", {"body": "small"})
        program.refused(429, "too_many_sends", "POST", f"{PATH}{dead[3]}/replay/", {"body": "smaller"})
        # What was sent before is no new message, and what is not dead is none at all.
        program.ok("POST", f"{PATH}{dead[3]}/replay/")
        program.refused(409, "conflict", "POST", f"{PATH}{dead[3]}/replay/", {"body": "smaller"})


def dying(broker: Any, count: int) -> list[str]:
    """Put messages into Dead; return their ids."""
    ranked = get_config().topics["ranked"]
    members = [str(n).encode() for n in range(count)]
    broker.run(send.send_replace(ranked, 0, [100] * count, members))
    broker.run(operate.bury(ranked, 0, members))
    return [message_id(0, member) for member in members]


def topic(program: Program, name: str) -> int:
    """Return how many messages wait in a topic."""
    return int(program.ok("GET", f"topics/{name}/")["waiting"])


def test_answers_that_are_kept_are_bounded_and_those_that_are_there_are_still_given(broker: Any) -> None:
    with limited(broker, IDEMPOTENT_RATE="3/day"):
        program = Program(user_with(*ALL))
        two = {"messages": [message(1), message(2)]}
        first = program.ok("POST", PATH, two, 202, Idempotency_Key="k1")
        refused = program.refused(429, "too_many_sends", "POST", PATH, two, Idempotency_Key="k2")
        assert "Idempotency-Key" in refused.json()["detail"]
        assert 20_000 < int(refused["Retry-After"]) <= 28_801
        # Nothing was sent, nothing is kept of it, and a smaller one fits.
        assert program.ok("GET", "topics/ranked/")["waiting"] == 2
        program.ok("POST", PATH, message(3), 202, Idempotency_Key="k2")
        for _ in range(3):
            assert program.ok("POST", PATH, two, 202, Idempotency_Key="k1") == first
        # Without a key there is nothing to keep; other users have a rate of their own.
        program.ok("POST", PATH, message(4), 202)
        Program(user_with(*ALL)).ok("POST", PATH, two, 202, Idempotency_Key="k1")


def test_a_send_that_fails_keeps_no_answer_and_is_not_charged(broker: Any) -> None:
    with limited(broker, IDEMPOTENT_RATE="2/day"):
        program, path = Program(user_with(*ALL)), "topics/small/messages/"
        (sent,) = program.ok("POST", path, message(1), 202)["results"]
        for _ in range(4):
            program.refused(507, "topic_full", "POST", path, message(2), Idempotency_Key="k")
        program.ok("DELETE", f"topics/small/messages/{sent['id']}/")
        program.ok("POST", path, message(2), 202, Idempotency_Key="k")


@pytest.fixture
def throttled(broker: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a project whose users have five requests a minute, and whose strangers have two."""
    monkeypatch.setattr(SimpleRateThrottle, "THROTTLE_RATES", {"user": "5/min", "anon": "2/min"})
    kinds = ["rest_framework.throttling.AnonRateThrottle", "rest_framework.throttling.UserRateThrottle"]
    rest = {
        "DEFAULT_AUTHENTICATION_CLASSES": ["rest_framework.authentication.SessionAuthentication"],
        "DEFAULT_THROTTLE_CLASSES": kinds,
    }
    cache.clear()
    view._log_throttle_once.cache_clear()
    with override_settings(REST_FRAMEWORK=rest):
        yield
    cache.clear()


def test_the_throttles_of_the_project_hold_here_too(throttled: None) -> None:
    program = Program(user_with(*ALL))
    for path in ("topics/", "stats/", "workers/", "topics/ranked/"):
        program.ok("GET", path)
    program.ok("POST", PATH, message(1), 202)
    for method, path, body in (("GET", "topics/", None), ("POST", PATH, message(2))):
        refused = program.refused(429, "throttled", method, path, body)
        assert 0 < int(refused["Retry-After"]) <= 60
    Program(user_with(*ALL)).ok("GET", "topics/")


def test_a_probe_is_never_throttled(throttled: None) -> None:
    stranger = Program()
    for _ in range(20):
        assert stranger("GET", "health/live").status_code == 200
        assert stranger("GET", "health/ready").status_code == 200
    known = Program(user_with(*ALL))
    answers = [known("GET", "health/ready").status_code for _ in range(7)]
    assert answers == [200] * 5 + [429] * 2


def test_a_throttle_without_a_rate_throttles_nothing_and_the_log_says_so(
    throttled: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SimpleRateThrottle, "THROTTLE_RATES", {})
    program = Program(user_with(*ALL))
    with caplog.at_level(logging.ERROR, "django_rmq.api"):
        for _ in range(20):
            program.ok("GET", "topics/")
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"The throttle rest_framework.throttling.{kind}RateThrottle does not limit the API of RMQ"
        for kind in ("Anon", "User")
    ]


def test_seats_are_bounded_in_all_and_per_user() -> None:
    found, one, other = LongPollLimiter(), Actor("one", "rest"), Actor("other", "rest")
    with found.seat(one, 3, 2) as first, found.seat(one, 3, 2) as second, found.seat(one, 3, 2) as third:
        assert (first, second, third) == (True, True, False)
        with found.seat(other, 3, 2) as fourth, found.seat(other, 3, 2) as fifth:
            assert (fourth, fifth) == (True, False)
        with pytest.raises(KeyError), found.seat(other, 3, 2):
            raise KeyError
        with found.seat(other, 3, 2) as again:
            assert again
    assert not found._taken
    with found.seat(one, 0, 0) as none:
        assert not none


def test_a_request_without_a_seat_is_answered_at_once_and_says_so(broker: Any) -> None:
    consumer = {"consumer": str(uuid.uuid4())}
    user = user_with(*ALL)
    program, path = Program(user), "topics/ranked/prepare/"
    begun, done = threading.Event(), threading.Event()

    def sit() -> None:
        with seats.seat(Actor.of_user(user, "rest"), 1, 1):
            begun.set()
            done.wait(LONG)

    sitting = threading.Thread(target=sit)
    sitting.start()
    try:
        assert begun.wait(LONG)
        began = time.monotonic()
        refused = program("POST", path, {**consumer, "wait": 20})
        assert time.monotonic() - began < 15
        assert (refused.json()["messages"], refused.json()["wait_refused"]) == ([], True)
        assert refused["Retry-After"] == "1"
        # What is there is handed out all the same, and who does not want to wait is not refused.
        assert program.ok("POST", path, consumer)["wait_refused"] is False
        program.ok("POST", PATH, message(1), 202)
        taken = program("POST", path, {**consumer, "wait": 20})
        assert (len(taken.json()["messages"]), taken.json()["wait_refused"]) == (1, False)
        assert not taken.has_header("Retry-After")
    finally:
        done.set()
        sitting.join(LONG)
    eventually(lambda: not seats._taken, "the seat")
    began = time.monotonic()
    assert program.ok("POST", path, {**consumer, "wait": 0.2})["wait_refused"] is False
    assert time.monotonic() - began >= 0.2


def test_under_a_server_with_one_thread_nobody_waits_unless_the_settings_say_so(broker: Any) -> None:
    program = Program(user_with(*ALL))
    program.client.defaults["wsgi.multithread"] = False  # type: ignore[assignment]
    asked = {"consumer": str(uuid.uuid4()), "wait": 0.2}
    assert program.ok("POST", "topics/ranked/prepare/", asked)["wait_refused"] is True
    with limited(broker, LONG_POLLS=1):
        assert program.ok("POST", "topics/ranked/prepare/", asked)["wait_refused"] is False
