"""Retries and time-outs of single messages, on every way in and on every page that shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.test import Client, override_settings
from django.urls import reverse

from django_rmq import (
    InvalidMessage,
    Message,
    Send,
    asend_message,
    asend_messages,
    ensure_message,
    listener,
    send_message,
    send_messages,
)
from django_rmq.operations import Actor, Operations
from django_rmq.testing import Clock, captured_messages, clock_from_now, drain, memory_broker
from django_rmq.worker.listener_registry import isolated
from tests.support.programs import Consumer
from tests.support.reports import printed

pytestmark = pytest.mark.django_db

KEYED = {"SLOTS": 2, "IDENTITY": "key", "BACKOFF": 0}
TOPICS = {
    "views": {"TYPE": "range_merge", "TIME_RANGE": "1ms", **KEYED},
    "renders": {"TYPE": "priority", **KEYED},
    "bookings": {"TYPE": "fifo", "SLOTS": 2, "BACKOFF": 0},
    "prices": {"TYPE": "priority", "SLOTS": 2},
}


@pytest.fixture
def clock() -> Iterator[Clock]:
    rmq = {"REDIS": "redis://nowhere", "TOPICS": TOPICS, "AUTODISCOVER": None, "ON_COMMIT": False}
    with override_settings(RMQ=rmq), isolated(), memory_broker(found := clock_from_now()):
        yield found


def limits(topic: str) -> dict[str, tuple[int | None, int | None]]:
    """Return the limits of what waits, by key."""
    copies = Operations(Actor("shell", "test")).listing(topic, "store").copies
    return {one.key or "": (one.max_retries, one.timeout) for one in copies}


@pytest.mark.parametrize("topic", ["views", "renders", "bookings"])
def test_a_listener_fails_as_often_as_the_message_says(clock: Clock, topic: str) -> None:
    heard: list[tuple[Any, int, int]] = []

    @listener(topic)
    def hear(message: Message) -> None:
        heard.append((message.body, message.retries_left, message.max_retries))
        raise RuntimeError("no")

    how: dict[str, Any] = {"priority": 50} if topic == "renders" else {}
    send_message(topic, 1, key="a", max_retries=1, **how)
    clock.advance(1)
    drain(raise_errors=False)
    assert heard == [(1, 1, 1), (1, 0, 1)]


def test_a_listener_is_told_the_time_out(clock: Clock) -> None:
    heard: list[int] = []

    @listener("views")
    def hear(message: Message) -> None:
        heard.append(message.timeout)

    send_message("views", 1, key="a", timeout=timedelta(seconds=9))
    send_message("views", 1, key="b")
    clock.advance(1)
    drain()
    assert sorted(heard) == [9, 30]


def test_bulk_async_and_ensured_sends_take_them_too(clock: Clock) -> None:
    send_messages("bookings", [Send(1, key="a"), Send(2, key="b", max_retries=0)], max_retries=5, timeout=7)
    async_to_sync(asend_message)("bookings", 3, key="c", timeout=8)
    async_to_sync(asend_messages)("bookings", [Send(4, key="d")], max_retries=6)
    ensure_message("bookings", 5, key="e", max_retries=7, timeout=9)
    assert limits("bookings") == {"a": (5, 7), "b": (0, 7), "c": (None, 8), "d": (6, None), "e": (7, 9)}


@pytest.mark.parametrize("options", [{"max_retries": 1}, {"timeout": 9}], ids=str)
def test_a_topic_without_keys_refuses_them_also_in_bulk(clock: Clock, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage, match="require IDENTITY 'key', because equal bodies merge"):
        send_message("prices", 1, priority=50, **options)
    with pytest.raises(InvalidMessage, match=r"item 0: .* require IDENTITY 'key'"):
        send_messages("prices", [1, 2], priority=50, **options)


def test_a_captured_message_shows_them(clock: Clock) -> None:
    with captured_messages() as sent:
        send_message("views", 1, key="a", max_retries=3, timeout=4)
    assert sent[0].options == {"key": "a", "max_retries": 3, "timeout": 4}


def test_over_rest_they_are_sent_shown_and_obeyed(clock: Clock) -> None:
    consumer = Consumer("views")
    fields = {"body": 1, "key": "a", "max_retries": 1, "timeout": 5}
    consumer.ok("POST", "topics/views/messages/", {"messages": [fields]}, 202)
    clock.advance(1)
    listed = consumer.ok("GET", "topics/views/messages/", None, 200)
    assert [(one["max_retries"], one["timeout"]) for one in listed["results"]] == [(1, 5)]
    (taken,) = consumer.take()
    assert (taken["retries_left"], taken["timeout"]) == (1, 5)
    clock.advance(6)
    (again,) = consumer.take()
    assert (again["id"], again["retries_left"]) == (taken["id"], 0)


def test_rmqsend_takes_them_for_one_message_and_by_line(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed("rmqsend", "bookings", "1", "--key=a", "--max-retries=3", "--timeout=4")
    lines = b'{"body": 2, "key": "b", "max_retries": 0}\n{"body": 3, "key": "c"}\n'
    monkeypatch.setattr("sys.stdin", type("Input", (), {"buffer": iter(lines.splitlines())}))
    printed("rmqsend", "bookings", "--jsonl", "--options", "--timeout=9")
    assert limits("bookings") == {"a": (3, 4), "b": (0, 9), "c": (None, 9)}


def test_the_admin_sends_them_within_the_bounds_of_the_topic(
    clock: Clock, staff: Callable[..., Client]
) -> None:
    person = staff("view_topic", "send_messages")
    address = reverse("admin:django_rmq_topic_send", args=["bookings"])
    person.post(address, {"body": "1", "key": "a", "max_retries": "3", "timeout": "4"})
    person.post(address, {"body": "1", "key": "b", "max_retries": "", "timeout": ""})
    assert limits("bookings") == {"a": (3, 4), "b": (None, None)}
    for wrong in ({"max_retries": "17"}, {"max_retries": "-1"}, {"timeout": "31"}, {"timeout": "0"}):
        assert "errorlist" in person.post(address, {"body": "1", "key": "c", **wrong}).content.decode()
    assert set(limits("bookings")) == {"a", "b"}
    without_keys = person.get(reverse("admin:django_rmq_topic_send", args=["prices"])).content.decode()
    assert 'name="priority"' in without_keys and 'name="max_retries"' not in without_keys


def test_a_delivery_is_shown_with_the_time_it_was_handed_out(clock: Clock) -> None:
    consumer = Consumer("views")
    send_message("views", 1, key="a", timeout=5)
    clock.advance(1)
    consumer.take()
    (copy,) = Operations(Actor("shell", "test")).listing("views", "prepare").copies
    now_ms = clock() // 1000
    assert copy.at_ms == now_ms // 1000 * 1000
