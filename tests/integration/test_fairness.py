"""Who is served first when several could be: equal priorities by chance, and all tenants beside one that floods a topic.

On the server's own clock: its microseconds are where chance comes from. Counts may lie seven standard deviations
off, which those of fair draws do in less than one of ten million runs.
"""

from __future__ import annotations

import threading
from collections import Counter
from math import sqrt
from typing import Any

import pytest
import redis

from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.producer import Producer
from tests.support.brokers import Broker, OracleBroker
from tests.support.workers import LONG, Heard, Worker, send

ROUNDS = 3_000
DEVIATIONS = 7


def assert_even(counts: Counter[bytes], members: list[bytes], rounds: int, share: float = 0.0) -> None:
    """Assert that each of ``members`` was counted in a ``share`` of the rounds; 0: in its part of them all."""
    share = share or 1 / len(members)
    expected, deviation = rounds * share, sqrt(rounds * share * (1 - share))
    assert set(counts) <= set(members)
    for member in members:
        assert abs(counts[member] - expected) < DEVIATIONS * deviation, (member, counts, expected)


def names(count: int) -> list[bytes]:
    return [b"m%04d" % i for i in range(count)]


class Taker:
    """Takes from one slot and gives back at once, so that every round begins alike."""

    def __init__(self, client: redis.Redis, prefix: str, **options: object) -> None:
        self.broker = Broker(client, prefix)
        self.topic = Topic("topic", TopicType.PRIORITY, slots=1, **options)  # type: ignore[arg-type]

    def send(self, members: list[bytes], score: int) -> None:
        for start in range(0, len(members), BATCH):
            part = members[start : start + BATCH]
            self.broker.send_replace(self.topic, 0, [score] * len(part), part)

    def take(self, limit: int) -> tuple[int, list[bytes]]:
        answer = self.broker.prepare(self.topic, 0, "A", None, limit)
        assert answer.status == "ok", answer
        return answer.receipt, [delivery.member for delivery in answer.deliveries]

    def round(self, limit: int) -> list[bytes]:
        receipt, taken = self.take(limit)
        assert set(self.broker.release(self.topic, 0, receipt, taken)) == {"ok"}
        return taken


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_each_of_k_equal_priorities_is_first_in_one_of_k_prepares(
    redis_client: redis.Redis, prefix: str, size: int
) -> None:
    taker, members = Taker(redis_client, prefix), names(size)
    taker.send(members, 50)
    assert_even(Counter(taker.round(1)[0] for _ in range(ROUNDS)), members, ROUNDS)


@pytest.mark.slow
@pytest.mark.parametrize("serial", [True, False])
def test_with_members_in_flight_each_free_one_is_first_at_least_as_often_as_by_a_draw_of_all(
    redis_client: redis.Redis, prefix: str, serial: bool
) -> None:
    # The draw falls on all k; where it falls on one that runs, the next free one is taken.
    taker, members = Taker(redis_client, prefix, serial=serial), names(9)
    taker.send(members, 50)
    _, running = taker.take(3)
    free = sorted(set(members) - set(running))
    counts = Counter(taker.round(1)[0] for _ in range(ROUNDS))
    assert set(counts) == set(free)
    share = 1 / len(members)
    least = ROUNDS * share - DEVIATIONS * sqrt(ROUNDS * share * (1 - share))
    assert min(counts.values()) > least, counts


def test_with_a_thousand_in_flight_every_part_of_a_large_group_is_reached(
    redis_client: redis.Redis, prefix: str
) -> None:
    taker, members = Taker(redis_client, prefix), names(5_000)
    taker.send(members, 50)
    _, running = taker.take(1_000)
    tenths: Counter[int] = Counter()
    for _ in range(500):
        (first,) = taker.round(1)
        assert first not in running
        tenths[int(first[1:]) // 500] += 1
    full = {i for i in range(10) if not any(int(member[1:]) // 500 == i for member in running)}
    assert len(full) >= 7
    # Each untouched tenth by chance alone: 50 of 500, and five deviations are 34.
    assert min(tenths[i] for i in full) > 16, tenths


FLOOD = 5_000
NOISY = "tenant 0"
OTHERS = [f"tenant {n}" for n in range(1, 21)]
TOPIC = Topic("jobs", TopicType.FIFO, slots=16, identity="key", slot_basis="tenant")


def shares(tenant: str) -> bool:
    """Return whether a tenant has the slot of the noisy one."""
    producer = Producer(OracleBroker())
    noisy, other = (producer.build(TOPIC, {"tenant": name}).slot for name in (NOISY, tenant))
    return noisy == other


def flood(broker: Any) -> None:
    """Send the messages of the noisy tenant, and then one of each other tenant."""
    send(broker, TOPIC, [{"tenant": NOISY, "n": n} for n in range(FLOOD)])
    send(broker, TOPIC, [{"tenant": tenant, "n": 0} for tenant in OTHERS])


def test_one_tenant_shares_the_slot_of_the_noisy_one() -> None:
    assert sum(map(shares, OTHERS)) == 1


def test_while_a_message_of_the_flood_runs_all_are_served_who_do_not_share_its_slot(broker: Any) -> None:
    served = Heard()
    free = threading.Event()

    def work(message: Message) -> None:
        if message.body["tenant"] == NOISY:
            assert free.wait(LONG), "the others were not served beside the flood"
        served.note(message.body["tenant"])

    flood(broker)
    quiet = [tenant for tenant in OTHERS if not shares(tenant)]
    with Worker(broker, TOPIC, work, threads=2):
        try:
            assert sorted(served.wait(len(quiet))) == sorted(quiet)
        finally:
            free.set()
        order = served.wait(FLOOD + len(OTHERS), 5 * LONG)
    # Those who share the slot come where they sent: behind all of the flood.
    assert sorted(order[-sum(map(shares, OTHERS)) :]) == sorted(filter(shares, OTHERS))


@pytest.mark.parametrize("threads", [1, 4])
def test_all_who_do_not_share_its_slot_are_served_long_before_a_flood_ends(broker: Any, threads: int) -> None:
    served = Heard()
    flood(broker)
    with Worker(broker, TOPIC, lambda message: served.note(message.body["tenant"]), threads=threads):
        order = served.wait(FLOOD + len(OTHERS), 5 * LONG)
    for tenant in OTHERS:
        place = order.index(tenant)
        assert place > FLOOD if shares(tenant) else place < FLOOD / 4, tenant
