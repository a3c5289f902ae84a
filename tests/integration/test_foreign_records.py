"""What others write into our hashes disables one topic or one figure, and every page, route and probe goes on."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from django.contrib.auth.models import User
from django.test import Client, override_settings
from django.urls import reverse

from django_rmq import connections, send_message
from django_rmq.conf import get_config
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.keys import (
    history_keys,
    limits_key,
    schedules_key,
    slot_keys,
    times_key,
    topics_key,
    worker_keys,
)
from django_rmq.core.monitoring import history
from django_rmq.exceptions import ConfigurationError, WrongType
from django_rmq.operations import Actor, Operations
from django_rmq.operations.health import HealthThresholds
from django_rmq.worker import startup
from tests.integration.test_definitions import run
from tests.support.brokers import Broker
from tests.support.programs import broker_of_project

pytestmark = pytest.mark.django_db

TOPICS = {
    "spoilt": {"TYPE": "fixed_time", "SLOTS": 2, "MAX_RATE": 100, "MAX_IN_FLIGHT": 10},
    "sound": {"TYPE": "fixed_time", "SLOTS": 2},
    "ranked": {"TYPE": "priority", "SLOTS": 1},
}
NO_NUMBERS = [b"", b"x", b"1.5", b"nan", b"inf", b"\xff", b"9" * 400, b"-" + b"9" * 400, b"9" * 5_000]


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    yield from broker_of_project(request, TOPICS=TOPICS, METRICS={"TOKEN": "t" * 16})


@pytest.fixture
def look(broker: Broker) -> Callable[[], dict[str, str]]:
    """Ask for everything that can be asked for; return the texts. Each is answered, and none with an error of the server."""
    client = Client()
    client.force_login(User.objects.create_superuser("boss"))
    stranger = Client()

    def ask() -> dict[str, str]:
        pages = {
            "dashboard": reverse("admin:django_rmq_topic_changelist"),
            "live": reverse("admin:django_rmq_topic_dashboard_live"),
        }
        for name in TOPICS:
            change = reverse("admin:django_rmq_topic_change", args=[name])
            tabs = ("store", "prepare", "retry", "dead", "claim", "slots", "history")
            for tab in tabs if name == "spoilt" else tabs[:1]:
                pages[f"{name} {tab}"] = f"{change}?tab={tab}&hours=48"
        pages |= {
            "send": reverse("admin:django_rmq_topic_send", args=["spoilt"]),
            "topic": "/api/rmq/topics/spoilt/",
            "messages": "/api/rmq/topics/spoilt/messages/?state=dead",
            "of slots": "/api/rmq/slots/?topic=spoilt",
        }
        pages |= {"topics": "/api/rmq/topics/", "stats": "/api/rmq/stats/"}
        found = {}
        # What was known before may be a few seconds old.
        connections.close()
        for name, page in pages.items():
            response = client.get(page)
            assert response.status_code == 200, (name, response.content[:500])
            found[name] = response.content.decode()
        metrics = stranger.get("/api/rmq/metrics", headers={"Authorization": f"Bearer {'t' * 16}"})
        found["metrics"] = metrics.content.decode()
        assert metrics.status_code == 200 and "rmq_up 1.0" in found["metrics"]
        assert stranger.get("/api/rmq/health/live").status_code == 200
        assert client.get("/api/rmq/health/ready?workers=false").status_code in (200, 503)
        assert client.get("/api/rmq/workers/").status_code in (200, 409)
        mark = time.monotonic_ns()
        due = datetime(2096, 10, 2, tzinfo=UTC)
        assert send_message("sound", mark, on_commit=False, fixed_time=due).status == "stored"
        assert send_message("ranked", mark, on_commit=False, priority=50).status == "stored"
        return found

    return ask


@pytest.mark.parametrize("text", [b"{", b"null", b'{"slots": 4, "reslot": null}'])
def test_a_definition_that_cannot_be_read_disables_its_topic_alone(
    broker: Broker, look: Callable[[], dict[str, str]], prefix: str, text: bytes
) -> None:
    broker.client.hset(topics_key(prefix), "spoilt", text)
    broker.client.hset(topics_key(prefix), b"\xff\x00", text)
    found = look()
    key = f"'{prefix}rmq:topics'"
    (row, *others) = json.loads(found["topics"])["results"]
    (problem,) = row["problems"]
    assert key in problem and "spoilt" in problem
    assert [other["problems"] for other in others] == [[], []]
    assert "rmq:topics" in found["dashboard"] and "rmq:topics" in found["spoilt store"]
    assert "rmq:topics" not in found["sound store"]
    with pytest.raises(WrongType, match="rmq:topics"):
        send_message("spoilt", 1, on_commit=False, fixed_time=datetime(2096, 10, 2, tzinfo=UTC))
    assert broker.client.hget(topics_key(prefix), "spoilt") == text, "nobody writes over it"


def test_a_probe_of_everybody_is_well_while_one_definition_cannot_be_read(
    broker: Broker, look: Callable[[], dict[str, str]], prefix: str
) -> None:
    broker.client.hset(topics_key(prefix), "spoilt", "{")
    look()
    assert Client().get("/api/rmq/health/ready").status_code == 200
    health = Operations(Actor("me", "test")).health(HealthThresholds(needs_workers=False))
    assert [(one.name, one.topic) for one in health.troubles] == [("definition", "spoilt")]


def test_a_worker_leaves_out_what_cannot_be_read_and_says_so(
    broker: Broker, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    topics = list(get_config().topics.values())
    broker.client.hset(topics_key(prefix), "spoilt", "null")
    assert [topic.name for topic in startup.check_start(topics)] == ["sound", "ranked"]
    (record,) = [one for one in caplog.records if getattr(one, "rmq_event", "") == "unreadable"]
    assert record.levelno == logging.ERROR
    assert "rmq:topics" in record.getMessage()
    broker.client.hset(topics_key(prefix), mapping={"sound": "1", "ranked": "{"})
    with pytest.raises(ConfigurationError, match="no topic can be consumed"):
        startup.check_start(topics)


def test_rmqtopics_tells_of_what_cannot_be_read_and_applies_the_rest(broker: Broker, prefix: str) -> None:
    broker.client.hset(topics_key(prefix), "spoilt", "null")
    rows = run("rmqtopics", "--json", "--apply", returncode=1)
    states = {row["topic"]: row["state"] for row in rows}
    assert states == {"spoilt": "unreadable", "sound": "registered", "ranked": "registered"}
    assert "rmq:topics" in rows[0]["obstacles"][0]
    assert "rmq:topics" in run("rmqtopics", returncode=1)
    assert broker.client.hget(topics_key(prefix), "spoilt") == b"null"


@pytest.mark.parametrize("value", [b"", b"x", b"9" * 400])
def test_counters_that_are_no_numbers_are_missing_of_their_topic_alone(
    broker: Broker, look: Callable[[], dict[str, str]], prefix: str, value: bytes
) -> None:
    spoilt = broker.client
    spoilt.hset(slot_keys(prefix, "spoilt", 0).stats, mapping={"stored": value, b"\xff": value})
    spoilt.hset(times_key(prefix, "spoilt"), mapping={"late0": value, "took": value, "took3": value})
    spoilt.hset(limits_key(prefix, "spoilt"), mapping={"empty": value, "worker:x": value})
    found = look()
    stats = json.loads(found["stats"])
    assert {one["topic"]: one["sent"] for one in stats["results"]}["sound"] >= 0
    assert stats["problems"] == [], "what is no number counts as nothing"
    assert ('rmq_listener_duration_seconds_count{topic="spoilt"}' in found["metrics"]) == (value == b"")
    assert 'rmq_listener_duration_seconds_count{topic="sound"}' in found["metrics"]


def test_a_history_that_is_none_is_a_gap(
    broker: Broker, look: Callable[[], dict[str, str]], prefix: str
) -> None:
    now = broker.now_ms() // 60_000
    keys = history_keys(prefix, "spoilt")
    records = [*NO_NUMBERS, *(b" ".join([each] * 16) for each in (b"9" * 30, b"9" * 400, b"-1"))]
    for at, value in enumerate(records):
        broker.client.hset(keys.minutes, mapping={str(now + 1 - at): value, str(now - 30 - at): value})
        broker.client.hset(keys.pending, mapping={"claimed": value, "first": value, f"late{at}": value})
    look()
    topic = get_config().topic("spoilt")
    assert not [one for one in history.read_minutes(broker, topic, 1) if one.depth]


@pytest.mark.parametrize(
    "plan", [b"{", b"null", b"\xff", b'{"topics": 1}', b'{"workers":[],"times":[],"topics":{"sound":[1]}}']
)
def test_what_workers_say_may_be_anything(
    broker: Broker, look: Callable[[], dict[str, str]], prefix: str, plan: bytes
) -> None:
    keys = worker_keys(prefix)
    for at, value in enumerate([*NO_NUMBERS, b"{", b"t null", b't {"host": NaN}', b"t 1"]):
        worker = b"\xff%d" % at
        broker.client.zadd(keys.sessions, {worker: [4e15, float("inf"), float("-inf")][at % 3]})
        broker.client.hset(keys.workers, worker, value)
    broker.client.hset(
        keys.assignment, mapping={"members": plan, "number": plan, "basis": plan, "plan": plan}
    )
    look()


def foreign_keys(prefix: str) -> dict[str, bytes]:
    slot = slot_keys(prefix, "spoilt", 0)
    return {
        "definitions": topics_key(prefix),
        "times": times_key(prefix, "spoilt"),
        "minutes": history_keys(prefix, "spoilt").minutes,
        "pending": history_keys(prefix, "spoilt").pending,
        "sessions": worker_keys(prefix).sessions,
        "workers": worker_keys(prefix).workers,
        "assignment": worker_keys(prefix).assignment,
        "limits": limits_key(prefix, "spoilt"),
        "schedules": schedules_key(prefix),
        **slot._asdict(),
    }


@pytest.mark.parametrize("name", foreign_keys(""))
def test_a_key_of_another_type_is_named_and_everything_else_is_shown(
    broker: Broker,
    look: Callable[[], dict[str, str]],
    prefix: str,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = foreign_keys(prefix)[name]
    for topic in ("sound", "ranked"):
        connections.agree(get_config().topic(topic))
    broker.client.delete(key)
    broker.client.set(key, "foreign")
    if name == "definitions":
        # Of no topic is known what is registered. Processes that have asked before go on.
        with pytest.raises(WrongType, match="rmq:topics"):
            look()
        return
    found = look()
    told = "\n".join([*found.values(), caplog.text])
    if name in ("times", "minutes", "sessions", "workers", "assignment", "store", "stats", "control"):
        assert key.decode() in told.replace("&#x27;", "'")


@pytest.mark.parametrize("queue", ["store", "prepare", "retry", "dead"])
@pytest.mark.parametrize("score", ["inf", "-inf", "-5e14", "253402300799000", "5e14", "1e300"])
@override_settings(TIME_ZONE="Asia/Shanghai")
def test_a_message_whose_score_is_no_time_is_shown_without_one(
    broker: Broker, look: Callable[[], dict[str, str]], prefix: str, queue: str, score: str
) -> None:
    member = b'{"from":"elsewhere"}'
    broker.client.execute_command("ZADD", getattr(slot_keys(prefix, "spoilt", 0), queue), score, member)
    assert "elsewhere" in look()[f"spoilt {queue}"]
    client, name = Client(), message_id(0, member)
    client.force_login(User.objects.get(username="boss"))
    page = client.get(reverse("admin:django_rmq_topic_message", args=["spoilt", name]))
    assert page.status_code == 200 and "elsewhere" in page.content.decode()
    file = client.get(reverse("admin:django_rmq_topic_export", args=["spoilt"]), {"tab": queue, "as": "csv"})
    assert "elsewhere" in b"".join(file.streaming_content).decode()  # type: ignore[attr-defined]
    shown = client.get(f"/api/rmq/topics/spoilt/messages/{name}/").json()
    assert shown["results"][0]["at_ms"] is None
    assert {hold["since_ms"] for hold in shown["held_by"] if hold["reason"] == "not_due"} <= {None}
    assert "elsewhere" in run("rmqlist", "spoilt", "--state", queue)
    run("rmqstats", "spoilt", "--id", name)
