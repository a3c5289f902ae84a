"""A worker has no more bytes in hand than a bound, however large its messages and however many slots they wait in."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from django_rmq.core.consumer import capacity
from django_rmq.core.consumer.capacity import MemoryBudget
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic, TopicType
from tests.support.workers import LONG, Worker, eventually, live, send, total

TOPIC = Topic("pictures", TopicType.RANGE_MERGE, slots=16, time_range_ms=0)
KEYED = Topic("albums", TopicType.RANGE_MERGE, slots=16, time_range_ms=0, identity="key")
BODY = 20_000


def deliveries(*bodies: int) -> list[Delivery]:
    return [Delivery(b"m", 1.0, 16, bytes(size)) for size in bodies]


@pytest.mark.parametrize("topic", [TOPIC, KEYED], ids=["in the member", "in the envelope"])
@pytest.mark.parametrize("serial", [True, False])
def test_large_messages_are_worked_off_within_a_bound(
    broker: Any, monkeypatch: pytest.MonkeyPatch, topic: Topic, serial: bool
) -> None:
    monkeypatch.setattr(capacity, "MOST", 40 * BODY)
    monkeypatch.setattr(capacity, "MOST_AT_ONCE", 10 * BODY)
    monkeypatch.setattr(capacity, "LEAST_AT_ONCE", BODY)
    count = 320
    begun, go = threading.Event(), threading.Event()
    held: list[int] = []

    def listener(message: Message) -> None:
        assert len(message.body) == BODY
        held.append(
            sum(len(batch.messages) for batch in worker.dispatcher._in_flight.batches.copy().values())
        )
        begun.set()
        assert go.wait(LONG)

    for i in range(count):
        key = {"key": str(i)} if topic.keyed else {}
        send(broker, topic, [f"{i:0{BODY}}"], **key)
    worker = Worker(broker, topic, listener, poll_seconds=0.05)
    with worker:
        assert begun.wait(LONG)
        eventually(lambda: worker.dispatcher._capacity.bytes.held >= 20 * BODY, "a prefetch")
        threading.Event().wait(0.3)
        assert worker.dispatcher._capacity.bytes.held <= 40 * (BODY + 2)
        go.set()
        eventually(lambda: live(broker, topic) == 0, "the end of all", 3 * LONG)
        in_hand = worker.dispatcher._capacity.bytes
        eventually(lambda: in_hand.held == in_hand._granted == 0, "nothing in hand")
    assert total(broker, topic, "committed") == count
    assert max(held) <= 40


def test_grants_follow_the_size_of_messages() -> None:
    bound = MemoryBudget([KEYED])
    assert bound.grant(KEYED, 512) == capacity.MOST_AT_ONCE, "nobody knows how large they are"
    assert bound.weigh(KEYED, deliveries(99, 199)) == 300
    for _ in range(50):
        bound.weigh(KEYED, deliveries(99, 99))
    assert bound.grant(KEYED, 10) == capacity.LEAST_AT_ONCE
    assert bound.grant(KEYED, 1000) == pytest.approx(2 * 1000 * 100, rel=0.2)
    bound.weigh(KEYED, deliveries(1_000_000))
    assert bound.grant(KEYED, 1) == pytest.approx(2_000_000, rel=0.01)


def test_nothing_is_granted_beyond_the_bound_until_it_is_answered_or_worked_off() -> None:
    bound = MemoryBudget([TOPIC])
    granted = []
    while size := bound.grant(TOPIC, 512):
        granted.append(size)
    assert sum(granted) == capacity.MOST
    bound.held = capacity.MOST_AT_ONCE
    bound.answered(granted[0])
    assert not bound.grant(TOPIC, 512)
    bound.held = 0
    assert bound.grant(TOPIC, 512) == granted[0]


def test_one_message_beyond_the_bound_is_worked_off_alone(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "MOST", BODY // 2)
    monkeypatch.setattr(capacity, "MOST_AT_ONCE", BODY // 4)
    monkeypatch.setattr(capacity, "LEAST_AT_ONCE", 1000)
    send(broker, TOPIC, (f"{i:0{BODY}}" for i in range(20)))
    with Worker(broker, TOPIC, lambda message: message.body, poll_seconds=0.05):
        eventually(lambda: live(broker, TOPIC) == 0, "the end of all")
