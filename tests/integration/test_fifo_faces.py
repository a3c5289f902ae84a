"""fifo topics by every way in and out: Python, coroutines, transactions, REST, commands, the admin, and tests of a project."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.management import call_command
from django.db import transaction
from django.test import Client, override_settings
from django.urls import reverse

from django_rmq import (
    InvalidMessage,
    Message,
    Retry,
    Send,
    asend_message,
    asend_messages,
    listener,
    send_message,
    send_messages,
)
from django_rmq.operations import Actor, Operations
from django_rmq.testing import Clock, clock_from_now, drain, memory_broker
from django_rmq.worker.listener_registry import isolated
from tests.support.programs import Consumer

pytestmark = pytest.mark.django_db

LINE = {"TYPE": "fifo", "SLOTS": 4, "BACKOFF": 0}
TOPICS = {
    "line": LINE,
    "accounts": {**LINE, "SLOT_BASIS": "account"},
    "unique": {**LINE, "ON_DUPLICATE": "keep"},
    "newest": {**LINE, "ON_DUPLICATE": "replace"},
}


@pytest.fixture
def clock() -> Iterator[Clock]:
    rmq = {"REDIS": "redis://nowhere", "TOPICS": TOPICS, "AUTODISCOVER": None, "ON_COMMIT": False}
    with override_settings(RMQ=rmq), isolated(), memory_broker(found := clock_from_now()):
        yield found


def heard(topic: str, clock: Clock | None = None) -> list[Any]:
    """Let a listener run what waits; return the bodies in the order of its calls."""
    found: list[Any] = []
    with isolated():
        listener(topic)(lambda message: found.append(message.body))
        if clock is not None:
            clock.advance(0.05)  # of many messages some have a place in the next milliseconds
        drain()
    return found


def operations() -> Operations:
    return Operations(Actor("shell", "test"))


def test_coroutines_send_into_the_same_line(clock: Clock) -> None:
    async_to_sync(asend_message)("line", 9)
    async_to_sync(asend_messages)("line", [Send(7), 8])
    send_message("line", 1)
    assert heard("line", clock) == [9, 7, 8, 1]


@pytest.mark.django_db(transaction=True)
def test_within_a_transaction_the_order_is_that_of_the_calls(clock: Clock) -> None:
    with transaction.atomic():
        send_message("line", 9, on_commit=True)
        send_messages("line", [7, 8], on_commit=True)
        send_message("line", 3)
        send_message("line", 1, on_commit=True)
    assert heard("line", clock) == [3, 9, 7, 8, 1]


def test_an_entity_has_one_line_whether_a_field_a_slot_basis_or_a_key_names_it(clock: Clock) -> None:
    by_field = {send_message("accounts", {"account": 7, "n": n}).slot for n in range(9)}
    by_basis = {send_message("line", n, slot_basis="account 7").slot for n in range(9)}
    by_key = {send_message("newest", n, key="account 7").slot for n in range(9)}
    by_none = {send_message("line", n).slot for n in range(9)}
    assert [len(slots) for slots in (by_field, by_basis, by_key, by_none)] == [1, 1, 1, 1]
    others = {send_message("line", n, slot_basis=f"account {n}").slot for n in range(50)}
    assert len(others) == 4


@pytest.mark.parametrize("delay", [timedelta(), timedelta(days=366)])
def test_a_delay_may_be_as_long_as_its_bounds(clock: Clock, delay: timedelta) -> None:
    assert send_message("line", 1, delay=delay).status == "stored"
    for wrong in (delay - timedelta(days=366.1), delay + timedelta(days=366.1)):
        with pytest.raises(InvalidMessage, match=r"delay must be .* from 0s to 366d, got datetime.timedelta"):
            send_message("line", 1, delay=wrong)


def test_over_rest_a_line_is_sent_listed_and_consumed_in_its_order(clock: Clock) -> None:
    consumer = Consumer("accounts")
    messages: list[dict[str, Any]] = [{"body": {"account": 7, "n": n}} for n in (9, 8, 7)]
    messages.append({"body": {"account": 7, "n": 1}, "delay_ms": 5000})
    consumer.ok("POST", "topics/accounts/messages/", {"messages": messages}, 202)
    listed = consumer.ok("GET", "topics/accounts/messages/?state=store")["results"]
    assert [one["body"]["n"] for one in listed] == [9, 8, 7, 1]
    clock.advance(1)
    (first,) = consumer.take(10)
    assert consumer.take(10) == []
    consumer.settle("rollback", first)
    (again,) = consumer.take(10)
    assert (again["body"]["n"], again["retries_left"]) == (9, 15)
    consumer.settle("commit", again)
    found = []
    clock.advance(9)
    while taken := consumer.take(10):
        found += [one["body"]["n"] for one in taken]
        consumer.settle("commit", *taken)
    assert found == [8, 7, 1]


@pytest.mark.parametrize(("topic", "status"), [("unique", "present"), ("newest", "replaced")])
def test_rest_says_what_a_send_with_a_waiting_key_does(clock: Clock, topic: str, status: str) -> None:
    consumer = Consumer(topic)
    for expected in ("stored", status):
        sent = {"body": expected, "key": "a"}
        answer = consumer.ok("POST", f"topics/{topic}/messages/", sent, 202)
        assert answer["outcomes"] == {expected: 1}


def test_rmqsend_keeps_the_order_of_its_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    call_command("rmqsend", "line", "9", stdout=StringIO())
    lines = [b"%d" % n for n in (7, 8, 5, 6)]
    monkeypatch.setattr("sys.stdin", type("Input", (), {"buffer": iter(lines)}))
    call_command("rmqsend", "line", "--jsonl", stdout=StringIO())
    call_command("rmqsend", "line", "1", "--delay", "1m", stdout=StringIO())
    assert heard("line", clock) == [9, 7, 8, 5, 6]
    clock.advance(60)
    assert heard("line") == [1]


def test_the_admin_sends_with_a_delay_and_lists_a_line_in_its_order(
    clock: Clock, staff: Callable[..., Client]
) -> None:
    person = staff("view_topic", "view_bodies", "send_messages")
    address = reverse("admin:django_rmq_topic_send", args=["line"])
    assert 'name="delay"' in person.get(address).content.decode()
    for body, delay in (("9", ""), ("8", "1m"), ("7", "")):
        answer = person.post(address, {"body": body, "delay": delay}, follow=True)
        assert "Send: 1 stored." in html.unescape(answer.content.decode())
    refused = person.post(address, {"body": "1", "delay": "-1"})
    assert "errorlist" in refused.content.decode()
    page = person.get(reverse("admin:django_rmq_topic_change", args=["line"]) + "?tab=store")
    shown = re.findall(r'"rmq-message"><a[^>]*>([^<]*)</a>', html.unescape(page.content.decode()))
    assert [one[-1] for one in shown] == ["9", "7", "8"]


def test_drain_keeps_the_order_also_behind_a_failure(clock: Clock) -> None:
    send_messages("line", [9, 8, 7])
    found: list[Any] = []

    @listener("line")
    def listen(message: Message) -> None:
        found.append(message.body)
        if len(found) <= 2:
            raise Retry(delay=0)

    clock.advance(1)
    drain()
    assert found == [9, 9, 9, 8, 7]
