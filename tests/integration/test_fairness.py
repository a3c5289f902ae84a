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
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.testing import Clock
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
@pytest.mark.parametrize(("size", "limit"), [(7, 3), (40, 39), (300, 100)])
def test_each_of_k_equal_priorities_is_among_the_m_that_are_taken_in_m_of_k_prepares(
    redis_client: redis.Redis, prefix: str, size: int, limit: int
) -> None:
    taker, members = Taker(redis_client, prefix), names(size)
    taker.send(members, 50)
    counts: Counter[bytes] = Counter()
    for _ in range(ROUNDS // 3):
        taken = taker.round(limit)
        assert len(set(taken)) == limit
        counts.update(taken)
    assert_even(counts, members, ROUNDS // 3, limit / size)


def test_each_tenth_of_5000_equal_priorities_is_first_in_a_tenth_of_the_prepares(
    redis_client: redis.Redis, prefix: str
) -> None:
    taker, members = Taker(redis_client, prefix), names(5_000)
    taker.send(members, 50)
    tenths: Counter[bytes] = Counter()
    for _ in range(ROUNDS):
        tenths[b"%d" % (int(taker.round(1)[0][1:]) // 500)] += 1
    assert_even(tenths, [b"%d" % i for i in range(10)], ROUNDS)


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


def test_all_of_a_large_group_get_their_turn_when_nothing_is_given_back(
    redis_client: redis.Redis, prefix: str
) -> None:
    taker, members = Taker(redis_client, prefix), names(5_000)
    taker.send(members, 50)
    served: list[bytes] = []
    while len(served) < 5_000:
        receipt, taken = taker.take(100)
        assert set(taker.broker.commit(taker.topic, 0, receipt, taken)) == {"ok"}
        served += taken
    assert sorted(served) == members
    assert served != members and served != members[::-1]


def test_messages_that_fail_together_come_back_spread_over_half_their_rest(
    redis_client: redis.Redis, prefix: str
) -> None:
    clock = Clock(1_800_000_000_000)
    broker = Broker(redis_client, prefix, clock)
    topic = Topic("topic", TopicType.FIXED_TIME, slots=1, backoff=BackOff(60_000, 600_000))
    members = names(1_000)
    broker.send_replace(topic, 0, [clock() // 1_000] * 1_000, members)
    answer = broker.prepare(topic, 0, "A", None, 1_000)
    failures = [Failure(delivery.member) for delivery in answer.deliveries]
    assert set(broker.rollback(topic, 0, answer.receipt, failures)) == {"ok"}
    rests = sorted(
        int(entry.score) - clock() // 1_000
        for entry in broker.list_messages(topic, 0, "retry", limit=1_000).entries
    )
    assert 30_000 <= rests[0] < 33_000
    assert 57_000 < rests[-1] <= 60_000
    assert len(set(rests)) > 900
    # No tenth of the spread holds more than twice its part.
    assert max(Counter((rest - 30_000) // 3_001 for rest in rests).values()) < 200


def test_messages_that_fail_one_by_one_come_back_spread_too(redis_client: redis.Redis, prefix: str) -> None:
    broker = Broker(redis_client, prefix)
    topic = Topic("topic", TopicType.FIXED_TIME, slots=1, backoff=BackOff(60_000, 600_000))
    members = names(500)
    broker.send_replace(topic, 0, [broker.now_ms()] * 500, members)
    failed_ms = {}
    for _ in members:
        answer = broker.prepare(topic, 0, "A", None, 1)
        (delivery,) = answer.deliveries
        failed_ms[delivery.member] = broker.now_ms()
        broker.rollback(topic, 0, answer.receipt, [Failure(delivery.member)])
    resting = broker.list_messages(topic, 0, "retry", limit=500).entries
    rests = [int(entry.score) - failed_ms[entry.member] for entry in resting]
    assert len(rests) == 500
    assert min(rests) >= 30_000
    tenths = Counter(min(9, (rest - 30_000) // 3_000) for rest in rests)
    assert len(tenths) == 10, tenths
    # The jitter is that of the clock, which a busy machine reads at regular intervals.
    assert max(tenths.values()) < 250, tenths
