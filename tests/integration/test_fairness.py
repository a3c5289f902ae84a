"""Who is served first when several could be: equal priorities by chance, retries beside fresh messages, jittered rests.

On the server's own clock: its microseconds are where chance comes from. Counts may lie seven standard deviations
off, which those of fair draws do in less than one of ten million runs.
"""

from __future__ import annotations

from collections import Counter
from math import sqrt

import pytest
import redis

from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.topic import Topic, TopicType
from tests.support.brokers import Broker

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
