"""DEAD_RETENTION: what is older goes, step by step; what is younger, and what somebody else looks after, stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from django_rmq.core.commands import operate
from django_rmq.core.commands.script_call import Call
from django_rmq.core.dead_retention import trim_dead
from django_rmq.core.duties import DutyThread
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.testing import Clock
from tests.support.brokers import Broker
from tests.support.workers import LONG, audit, client_of, eventually

TOPIC = Topic("prices", TopicType.RANGE_MERGE, slots=4, time_range_ms=0, dead_retention=60)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def bury(broker: Any, topic: Topic, slot: int, count: int, name: str = "m") -> None:
    """Let so many messages of a slot die now."""
    members = [f"{name}{i}".encode() for i in range(count)]
    for start in range(0, count, 1000):
        part = members[start : start + 1000]
        broker.send_merge(topic, slot, 0, part)
        taken = broker.prepare(topic, slot, "A", None, 1000)
        failures = [Failure(delivery.member, "rejected") for delivery in taken.deliveries]
        broker.rollback(topic, slot, taken.receipt, failures)


def dead(broker: Any, topic: Topic) -> list[int]:
    return [ledger.dead for ledger in audit(broker, topic)]


def one_round(broker: Any, topic: Topic, slots: list[range]) -> int:
    """Trim once through the slots; return in how many steps."""
    (duty,) = trim_dead(broker, [topic], lambda _: slots)
    steps = duty()
    for number in range(1, 1000):
        if next(steps) > 0.5:
            return number
    raise AssertionError("the round does not end")


def test_only_what_is_older_than_the_retention_is_deleted(broker: Any, clock: Clock) -> None:
    bury(broker, TOPIC, 0, 5, "old")
    bury(broker, TOPIC, 3, 7, "old")
    clock.advance(59)
    bury(broker, TOPIC, 0, 2, "young")
    one_round(broker, TOPIC, [range(4)])
    assert dead(broker, TOPIC) == [7, 0, 0, 7]
    clock.advance(1)
    one_round(broker, TOPIC, [range(4)])
    assert dead(broker, TOPIC) == [2, 0, 0, 0]
    assert [ledger["purged_dead"] for ledger in audit(broker, TOPIC)] == [5, 0, 0, 7]


def test_slots_of_another_worker_are_left_to_it(broker: Any, clock: Clock) -> None:
    for slot in range(4):
        bury(broker, TOPIC, slot, 1)
    clock.advance(61)
    one_round(broker, TOPIC, [range(1, 2), range(3, 4)])
    assert dead(broker, TOPIC) == [1, 0, 1, 0]


def test_many_are_deleted_in_many_bounded_steps(
    broker: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    purge = operate.purge

    bury(broker, TOPIC, 0, 3500)
    bury(broker, TOPIC, 1, 150)
    clock.advance(61)

    def watched(topic: Topic, slot: int, state: str, up_to: float, limit: int) -> Call[int]:
        limits.append(limit)
        return purge(topic, slot, state, up_to, limit)

    monkeypatch.setattr(operate, "purge", watched)
    steps = one_round(broker, TOPIC, [range(4)])
    assert dead(broker, TOPIC) == [0, 0, 0, 0]
    assert steps >= 5
    assert max(limits) <= 1000


def test_a_round_over_many_slots_is_spread_over_its_time(broker: Any) -> None:
    topic = replace(TOPIC, slots=1024, dead_retention=7 * 86_400)
    (duty,) = trim_dead(broker, [topic], lambda _: [range(1024)])
    steps = duty()
    pauses = [next(steps) for _ in range(5)]
    # An hour for 32 trips.
    assert all(pause > 60 for pause in pauses), pauses


def test_topics_without_retention_have_no_duty(broker: Any) -> None:
    assert trim_dead(broker, [replace(TOPIC, dead_retention=None)], lambda _: [range(4)]) == []


def test_a_slot_that_redis_refuses_to_touch_does_not_keep_the_others_full(
    redis_url: str, prefix: str, clock: Clock
) -> None:
    with client_of(redis_url) as client:
        broker = Broker(client, prefix, clock)
        bury(broker, TOPIC, 1, 3)
        client.set(f"dead_{{{prefix}prices_0}}", "not a sorted set")
        clock.advance(61)
        one_round(broker, TOPIC, [range(4)])
        assert broker.audit_ledger(TOPIC, 1).dead == 0


def test_the_thread_trims_by_the_server_s_own_clock(redis_url: str, prefix: str) -> None:
    topic = replace(TOPIC, dead_retention=1)
    with client_of(redis_url) as client:
        broker = Broker(client, prefix)
        bury(broker, topic, 2, 250)
        assert sum(dead(broker, topic)) == 250
        duties = DutyThread(trim_dead(broker, [topic], lambda _: [range(4)]))
        duties.start()
        eventually(lambda: sum(dead(broker, topic)) == 0)
        duties.stop()
        duties.join(LONG)
