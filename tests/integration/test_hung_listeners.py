"""Listeners that do not return: what waits for them is due again, other threads go on, and nobody is charged."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from django_rmq.core.consumer import batch as in_flight_batches
from django_rmq.core.consumer import executor_pool
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.producer.producer import Producer
from tests.support.workers import LONG, Heard, Worker, audit, eventually, live, send, total

HUNG = Topic("hung", TopicType.RANGE_MERGE, slots=8, time_range_ms=0, backoff=BackOff(0, 0))
OTHER = replace(HUNG, name="other")
KINDS = {
    "serial": OTHER,
    "shared": replace(OTHER, serial=False, slots=2),
    "by priority": Topic("other", TopicType.PRIORITY, slots=8),
    "shared by priority": Topic("other", TopicType.PRIORITY, slots=2, serial=False),
    "strict": Topic("other", TopicType.FIFO, slots=8, order="strict"),
    "in flow": replace(OTHER, flow="auto"),
    "limited": replace(OTHER, max_in_flight=6),
}


MANY = 800
"""More messages than one prepare hands out of a slot, so that a slot has two batches in hand."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_pool, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(in_flight_batches, "TAKEN_SECONDS", 0.1)


@pytest.fixture
def go() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def hanging(go: threading.Event, running: list[Any]) -> Callable[[Any], None]:
    def listener(message: Any) -> None:
        running.append(message)
        assert go.wait(LONG)

    return listener


@contextmanager
def working(broker: Any, topics: Any, listener: Any, go: threading.Event, **options: Any) -> Iterator[Worker]:
    """A worker whose listeners return at the end, whatever happens."""
    with Worker(broker, topics, listener, poll_seconds=0.1, **options) as worker:
        try:
            yield worker
        finally:
            go.set()


def post(broker: Any, topic: Topic, bodies: Iterable[Any]) -> None:
    send(broker, topic, bodies, **({"priority": 100} if topic.is_priority else {}))


def in_flight(broker: Any, *topics: Topic) -> int:
    return sum(ledger.prepare for topic in topics for ledger in audit(broker, topic))


def stays_calm(broker: Any, worker: Worker, topics: list[Topic], running: int) -> None:
    """Wait until only what runs is in flight, and look whether it stays so while the worker looks ten times more."""
    # A thread whose call has just begun may still be given messages ahead.
    held = worker.dispatcher._in_flight
    eventually(lambda: len(held.slow()) == len(held.slow(0.0)) > 0, "calls that hang")
    refresh = worker.dispatcher._router._next_refresh
    eventually(lambda: worker.dispatcher._router._next_refresh != refresh, "a look at the calls that hang")
    eventually(lambda: in_flight(broker, *topics) == running, "all that has not begun being given back")
    handed_out = sum(total(broker, topic, "prepared") for topic in topics)
    looked = set[float]()
    pause = threading.Event()
    end = time.monotonic() + LONG
    while len(looked) < 10:
        assert time.monotonic() < end
        looked.add(worker.dispatcher._router._next_refresh)
        assert in_flight(broker, *topics) == running
        pause.wait(0.01)
    assert sum(total(broker, topic, "prepared") for topic in topics) == handed_out, "nothing is taken"


def nobody_is_charged(broker: Any, *topics: Topic) -> None:
    for topic in topics:
        assert total(broker, topic, "failed") == total(broker, topic, "expired") == 0
        assert total(broker, topic, "stale") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_while_all_threads_hang_what_waits_is_due_and_nothing_is_taken(
    broker: Any, kind: str, go: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    other, running, heard = KINDS[kind], list[Any](), Heard()
    post(broker, HUNG, range(40))
    caplog.set_level(logging.WARNING)
    listeners = {"hung": hanging(go, running), "other": heard}
    with working(broker, [HUNG, other], listeners, go, threads=4) as worker:
        eventually(lambda: len(running) == 4, "all threads hanging")
        post(broker, other, range(200))
        stays_calm(broker, worker, [HUNG, other], 4)
        if other.max_in_flight is None:
            assert sum(ledger.store for ledger in audit(broker, other)) == 200
        go.set()
        heard.wait(200)
        eventually(lambda: live(broker, HUNG) == 0, "the end of all")
    assert len(running) == 40
    nobody_is_charged(broker, HUNG, other)
    assert "came too late" not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_behind_hung_calls_of_its_own_topic_nothing_waits_in_hand(
    broker: Any, kind: str, go: threading.Event
) -> None:
    topic, running = KINDS[kind], list[Any]()
    post(broker, topic, range(MANY))
    with working(broker, topic, hanging(go, running), go, threads=4) as worker:
        eventually(lambda: running, "a call")
        eventually(lambda: in_flight(broker, topic) == len(running), "the others being given back")
        stays_calm(broker, worker, [topic], len(running))
        assert sum(ledger.store for ledger in audit(broker, topic)) == MANY - len(running)
        go.set()
        eventually(lambda: live(broker, topic) == 0, "the end of all")
    assert len(running) == MANY
    nobody_is_charged(broker, topic)


def test_of_a_slot_with_two_batches_in_hand_each_message_is_given_back_once(
    broker: Any, go: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executor_pool, "REFRESH_SECONDS", 10 * LONG)
    monkeypatch.setattr(in_flight_batches, "TAKEN_SECONDS", 10 * LONG)
    topic, running = KINDS["by priority"], list[Any]()
    post(broker, topic, range(MANY))
    with caplog.at_level(logging.INFO), working(broker, topic, hanging(go, running), go, threads=1) as worker:
        places = worker.dispatcher._table.awake
        eventually(
            lambda: running and all(place.batches == 2 for place in places.values()), "two batches of each"
        )
        monkeypatch.setattr(executor_pool, "REFRESH_SECONDS", 0.0)
        monkeypatch.setattr(in_flight_batches, "TAKEN_SECONDS", 0.0)
        worker.dispatcher._router._next_refresh = 0.0
        eventually(lambda: in_flight(broker, topic) == 1, "the others being given back")
        assert total(broker, topic, "stale") == 0
    assert "came too late" not in caplog.text


def test_lists_behind_a_list_that_hangs_are_given_back(broker: Any, go: threading.Event) -> None:
    topic, running = replace(OTHER, slots=1), list[Any]()
    post(broker, topic, range(100))
    with working(broker, topic, hanging(go, running), go, batch_size=5, threads=2) as worker:
        eventually(lambda: running, "a call")
        stays_calm(broker, worker, [topic], 5)
        go.set()
        eventually(lambda: live(broker, topic) == 0, "the end of all")
    assert sum(map(len, running)) == 100
    nobody_is_charged(broker, topic)


@pytest.mark.parametrize("serial", [True, False])
def test_calls_of_an_async_listener_that_do_not_return_keep_nothing_in_hand(
    broker: Any, serial: bool, go: threading.Event
) -> None:
    topic = replace(OTHER, concurrency=4, serial=serial, slots=16 if serial else 1)
    running: list[Any] = []

    async def listener(message: Message) -> None:
        running.append(message)
        await asyncio.to_thread(go.wait, LONG)

    post(broker, topic, range(200))
    with working(broker, topic, listener, go, threads=1) as worker:
        eventually(lambda: len(running) == 4, "all that may overlap")
        stays_calm(broker, worker, [topic], 4)
        go.set()
        eventually(lambda: live(broker, topic) == 0, "the end of all")
    assert len(running) == 200
    nobody_is_charged(broker, topic)


def test_what_waits_for_a_blocked_event_loop_is_given_back(broker: Any, go: threading.Event) -> None:
    topic, running = replace(OTHER, concurrency=4), list[Any]()

    async def listener(message: Message) -> None:
        hanging(go, running)(message)

    post(broker, topic, range(200))
    with working(broker, topic, listener, go, threads=1) as worker:
        eventually(lambda: running, "the call that blocks the loop")
        eventually(lambda: in_flight(broker, topic) <= 4, "what waits being given back")
        stays_calm(broker, worker, [topic], in_flight(broker, topic))
        go.set()
        eventually(lambda: live(broker, topic) == 0, "the end of all")
    nobody_is_charged(broker, topic)


def test_the_other_slots_of_a_thread_that_hangs_go_to_threads_that_are_free(
    broker: Any, go: threading.Event
) -> None:
    topic, heard = replace(OTHER, slots=16), Heard()

    def listener(message: Message) -> None:
        if message.body < 3:
            assert go.wait(LONG)
        heard(message)

    post(broker, topic, range(3))
    with working(broker, topic, listener, go, threads=4) as worker:
        eventually(lambda: in_flight(broker, topic) == 3, "calls that hang")
        hung = {slot_of(broker, topic, n) for n in range(3)}
        post(broker, topic, range(3, 200))
        behind = [n for n in range(3, 200) if slot_of(broker, topic, n) not in hung]
        heard.wait(len(behind))
        assert sorted(heard.bodies) == behind
        go.set()
        heard.wait(200)
        eventually(lambda: live(broker, topic) == 0, "the end of all")
        # They return to their thread, so that all threads have work again.
        assert all(place.home < 4 for place in worker.dispatcher._table.awake.values())
        counts = worker.dispatcher._table.slots_of_thread
        assert max(counts[:4]) - min(counts[:4]) <= 1
    nobody_is_charged(broker, topic)


def test_after_a_long_call_the_highest_priority_of_all_slots_is_first(
    broker: Any, go: threading.Event
) -> None:
    topic, order = Topic("other", TopicType.PRIORITY, slots=16), list[int]()

    def listener(message: Message) -> None:
        order.append(message.body)
        if len(order) == 1:
            assert go.wait(LONG)

    send(broker, topic, [0], priority=100)
    with working(broker, topic, listener, go, threads=1) as worker:
        eventually(lambda: order, "a call")
        eventually(lambda: worker.dispatcher._in_flight.is_taken(0), "its thread being taken")
        # One in each slot, and the highest one in the middle.
        bodies = {Producer(broker).build(topic, n, priority=100).slot: n for n in range(1, 400)}
        assert len(bodies) == 16
        for n, body in enumerate(bodies.values()):
            send(broker, topic, [body], priority=1_000 - abs(8 - n))
        stays_calm(broker, worker, [topic], 1)
        go.set()
        eventually(lambda: len(order) == 17, "the end of all")
    assert order[1] == list(bodies.values())[8]


def slot_of(broker: Any, topic: Topic, body: Any) -> int:
    return Producer(broker).build(topic, body).slot


def test_busy_threads_keep_nothing_from_the_event_loop(broker: Any, go: threading.Event) -> None:
    slow, quick = replace(HUNG, slots=64), replace(OTHER, concurrency=4)
    running, heard = list[Any](), Heard()

    async def listener(message: Message) -> None:
        heard(message)

    post(broker, slow, range(300))
    with working(broker, [slow, quick], {"hung": hanging(go, running), "other": listener}, go, threads=2):
        eventually(lambda: len(running) == 2, "both threads hanging")
        post(broker, quick, range(100))
        heard.wait(100)
        go.set()
