"""What a sender and a listener see of topics that debounce and collect: from the settings to the message."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest
from django.conf import settings
from django.core.management import CommandError
from django.test import Client, override_settings
from django.urls import reverse

from django_rmq import (
    ConfigurationError,
    InvalidMessage,
    Message,
    Retry,
    Send,
    TopicFull,
    listener,
    send_message,
    send_messages,
)
from django_rmq.conf import get_config
from django_rmq.operations import Actor, Operations
from django_rmq.spark.broker_connection import topic_of
from django_rmq.testing import Clock, clock_from_now, drain, memory_broker
from django_rmq.worker.listener_registry import isolated
from tests.support.programs import Consumer
from tests.support.reports import printed

pytestmark = pytest.mark.django_db

COLLECTING = {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": 5, "IDENTITY": "key", "BACKOFF": 0}
TOPICS = {
    "views": {**COLLECTING, "ACCUMULATE": 3},
    "lines": {**COLLECTING, "ACCUMULATE": 3, "BODY": "text"},
    "paced": {
        "TYPE": "range_merge",
        "SLOTS": 2,
        "TIME_RANGE": "1ms",
        "SLOT_BASIS": "shop",
        "MAX_RATE": {"rate": 2, "per": "slot"},
    },
    "slow": {"TYPE": "priority", "MAX_RATE": 0.5, "MAX_IN_FLIGHT": 3},
    "line": {"TYPE": "fifo"},
    "jobs": {"SLOTS": 2},
    "index": {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": 2, "DEBOUNCE": True, "MAX_WAIT": 10},
}


@pytest.fixture
def clock() -> Iterator[Clock]:
    rmq = {"REDIS": "redis://nowhere", "TOPICS": TOPICS, "AUTODISCOVER": None, "ON_COMMIT": False}
    with override_settings(RMQ=rmq), isolated(), memory_broker(found := clock_from_now()):
        yield found


def collected(topic: str) -> list[list[Any]]:
    """Where a listener puts the bodies of each message."""
    heard: list[list[Any]] = []

    @listener(topic)
    def hear(message: Message) -> None:
        heard.append(message.bodies)
        assert message.body == message.bodies[-1]

    return heard


def test_a_listener_gets_all_bodies_of_its_message(clock: Clock) -> None:
    heard = collected("views")
    assert send_message("views", {"ms": 1}, key="a").status == "stored"
    assert send_message("views", {"ms": 2}, key="a").status == "merged"
    send_message("views", {"ms": 3}, key="b")
    clock.advance(6)
    drain()
    assert sorted(heard, key=len) == [[{"ms": 3}], [{"ms": 1}, {"ms": 2}]]


def test_a_full_message_refuses_until_it_is_delivered(clock: Clock) -> None:
    heard = collected("lines")
    results = send_messages("lines", [Send(f"{n}", key="a") for n in range(4)])
    assert [one.status for one in results] == ["stored", "merged", "merged", "refused"]
    with pytest.raises(TopicFull, match="ACCUMULATE = 3 bodies"):
        send_message("lines", "late", key="a")
    with pytest.raises(TopicFull, match="ACCUMULATE = 3 bodies"):
        Operations(Actor("shell", "test")).send_each("lines", [Send("late", key="a")])
    drain()  # it is due at once
    assert heard == [["0", "1", "2"]]
    assert send_message("lines", "again", key="a").status == "stored"


def test_other_topics_have_the_one_body(clock: Clock) -> None:
    heard = collected("index")
    send_message("index", {"id": 1})
    clock.advance(3)
    drain()
    assert heard == [[{"id": 1}]]


def test_what_is_sent_to_a_topic_without_a_type_runs_soon_in_order_and_past_a_failure(clock: Clock) -> None:
    heard: list[int] = []

    @listener("jobs")
    def work(message: Message) -> None:
        heard.append(message.body)
        if message.body == 3 and message.retries_left == get_config().topic("jobs").max_retries:
            raise Retry("once", delay=1)

    for number in range(10):
        assert send_message("jobs", number, slot_basis="shop 7").status == "stored"
    drain()
    assert heard == list(range(10)), "a failure holds nothing back"
    clock.advance(2)
    drain()
    assert heard[10:] == [3]


def test_over_rest_each_delivery_has_its_bodies(clock: Clock) -> None:
    consumer = Consumer("views")
    for n in (1, 2):
        consumer.ok("POST", "topics/views/messages/", {"messages": [{"body": n, "key": "a"}]}, 202)
    clock.advance(6)
    (taken,) = consumer.take()
    assert (taken["body"], taken["bodies"]) == (2, [1, 2])
    consumer.settle("release", taken)
    assert Operations(Actor("shell", "test")).listing("views", "store").copies[0].raw == b"[1,2]"


@pytest.mark.parametrize(
    ("topic", "badges"),
    [
        ("paced", ["at most 2/s per slot"]),
        ("slow", ["at most 0.5/s", "at most 3 in flight"]),
        ("line", ["strict order"]),
        ("index", []),
    ],
)
def test_the_admin_shows_what_holds_messages_back(
    clock: Clock, staff: Callable[..., Client], topic: str, badges: list[str]
) -> None:
    page = staff("view_topic").get(reverse("admin:django_rmq_topic_change", args=[topic])).content.decode()
    assert re.findall(r'<span class="rmq-badge">((?:at most|strict) [^<]*)</span>', page) == badges


def test_a_message_that_holds_several_bodies_is_replayed_and_not_edited(clock: Clock) -> None:
    heard = collected("views")
    for n in (1, 2):
        send_message("views", n, key="a")
    clock.advance(6)
    operations = Operations(Actor("shell", "test"))
    (copy,) = operations.listing("views", "store").copies
    operations.bury("views", [copy.id])
    with pytest.raises(InvalidMessage, match="ACCUMULATE"):
        operations.replay_edited("views", copy.id, 3)
    operations.replay("views", [copy.id])
    drain()
    assert heard == [[1, 2]]


def test_spark_refuses_a_topic_that_collects(clock: Clock) -> None:
    definition = json.loads(json.dumps(get_config().topic("views").definition()))
    with pytest.raises(ConfigurationError, match="ACCUMULATE"):
        topic_of("views", definition)
    assert topic_of("index", get_config().topic("index").definition()).debounce_ms == 10_000


def test_rmqsend_says_what_is_full(clock: Clock) -> None:
    lines = "".join(f'{{"body": {{"ms": {n}}}, "key": "a"}}\n' for n in range(5))
    with override_settings(
        RMQ={**settings.RMQ, "TOPICS": {"lines": {**COLLECTING, "ACCUMULATE": 3, "MAX_BACKLOG": 9}}}
    ):
        assert "their slots hold their share of MAX_BACKLOG, or they have collected" in refusal(
            "lines", lines
        )
    assert refusal("views", lines) == (
        "2 messages were refused: they have collected all their bodies (ACCUMULATE, MAX_BODY)"
    )


def refusal(topic: str, lines: str) -> str:
    """Return the error with which rmqsend ends."""
    source = Mock(buffer=io.BytesIO(lines.encode()))
    with patch("sys.stdin", source), pytest.raises(CommandError) as caught:
        printed("rmqsend", topic, "-", "--jsonl", "--options")
    return str(caught.value)
