"""The history of a topic: sampled once a minute by whoever claims it, kept for its time, read with its gaps."""

from __future__ import annotations

import random
import uuid
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from django_rmq.core.model.keys import history_keys, slot_keys
from django_rmq.core.model.replies import LATENESS_BUCKETS, Delivery, Failure
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.monitoring import history
from django_rmq.core.monitoring import history as sampler_of_history
from django_rmq.core.monitoring.history import EDGES_MS, Lateness, Minute, SummedHour, TimesCount
from django_rmq.exceptions import ServerRefused, WrongType
from django_rmq.testing import Clock
from tests.support.brokers import Broker, ClusterBroker, OracleBroker
from tests.support.servers import RedisCluster
from tests.support.workers import Heard, Worker, client_of, cluster_of, flush, send

TOPIC = Topic("prices", TopicType.RANGE_MERGE, slots=4, time_range_ms=0)
START_MS = 1_800_000_000_000
"""The beginning of a minute."""


@pytest.fixture
def clock() -> Clock:
    return Clock(START_MS)


class Sampler:
    """A worker's duty for one topic, led through given time."""

    def __init__(self, broker: Any, topic: Topic, clock: Clock, hours: int = 48, ours: bool = True) -> None:
        (duty,) = history.sampling(broker, [topic], hours * 60, lambda _: ours)
        self.clock = clock
        self.steps = duty()
        self.pause = 0.0

    def minute(self) -> None:
        """Go on until the next minute is waited for."""
        for _ in range(1000):
            self.pause = next(self.steps)
            if self.pause > 30:
                return
            self.clock.advance(self.pause)
        raise AssertionError("the sampling does not end")

    def minutes(self, count: int) -> None:
        for _ in range(count):
            self.minute()
            self.clock.advance(self.pause)


def merge(broker: Any, slot: int, *names: str, topic: Topic = TOPIC) -> None:
    broker.send_merge(topic, slot, 0, [name.encode() for name in names])


def take(broker: Any, slot: int, limit: int = 1000, topic: Topic = TOPIC) -> Any:
    return broker.prepare(topic, slot, "A", None, limit)


def last(broker: Any, topic: Topic = TOPIC, **options: Any) -> Minute:
    return [one for one in history.read_minutes(broker, topic, **options) if one.depth][-1]


def test_depths_and_rates_are_sums_over_all_slots(broker: Any, clock: Clock) -> None:
    sampler = Sampler(broker, TOPIC, clock)
    sampler.minutes(1)
    merge(broker, 0, "a", "b", "c")
    merge(broker, 0, "a", "b")
    merge(broker, 3, "d", "e")
    taken = take(broker, 0, 2)
    members = [delivery.member for delivery in taken.deliveries]
    broker.commit(TOPIC, 0, taken.receipt, members[:1])
    broker.rollback(TOPIC, 0, taken.receipt, [Failure(members[1], "rejected")])
    take(broker, 3, 1)
    sampler.minute()
    found = last(broker)
    assert found.depth is not None
    assert (found.depth.store, found.depth.due, found.depth.prepare) == (2, 2, 1)
    assert (found.depth.retry, found.depth.dead, found.depth.claimed) == (0, 1, 0)
    assert found.depth.oldest_due_ms is not None
    assert found.rates is not None
    rates = found.rates
    assert (rates.sent, rates.merged, rates.handed_out) == pytest.approx((7, 2, 3))
    assert (rates.committed, rates.failed, rates.died) == pytest.approx((1, 1, 1))
    assert rates.merge_ratio == pytest.approx(2 / 7)
    assert not found.is_scaled


def test_what_is_not_due_yet_is_no_backlog(broker: Any, clock: Clock) -> None:
    broker.send_merge(TOPIC, 0, 3_600_000, [b"later"])
    merge(broker, 1, "now")
    Sampler(broker, TOPIC, clock).minute()
    depth = last(broker).depth
    assert depth is not None
    assert (depth.store, depth.due) == (2, 1)
    assert depth.oldest_due_ms == START_MS


def test_priorities_have_no_oldest_due_time_but_it_is_known_since_when_something_waits(
    broker: Any, clock: Clock
) -> None:
    topic = Topic("renders", TopicType.PRIORITY, slots=2)
    broker.send_replace(topic, 0, [50], [b"a"])
    Sampler(broker, topic, clock).minute()
    depth = last(broker, topic).depth
    assert depth is not None
    assert (depth.store, depth.due, depth.oldest_due_ms) == (1, 1, None)
    assert depth.undrained_since_ms == START_MS


def test_a_slot_of_another_type_is_left_out_and_the_others_are_told(broker: Any) -> None:
    merge(broker, 1, "a", "b")
    key = slot_keys(broker.prefix, TOPIC.name, 0).dead
    broker.client.hset(key, "a", "b")
    sample = broker.sample(TOPIC, range(4))
    assert (sample.slots, sample.store) == (3, 2)


def test_more_than_256_slots_at_once_are_refused(broker: Any) -> None:
    with pytest.raises(ServerRefused):
        broker.sample(replace(TOPIC, slots=1024), range(257))


def test_of_very_many_slots_a_part_is_read_and_scaled(
    broker: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_of_history, "MOST_SLOTS", 256)
    topic = replace(TOPIC, slots=1024)
    for slot in range(1024):
        merge(broker, slot, "a", "b", topic=topic)
    sampler = Sampler(broker, topic, clock)
    sampler.minutes(1)
    for slot in range(1024):
        merge(broker, slot, "c", topic=topic)
    sampler.minute()
    found = last(broker, topic)
    assert found.is_scaled
    assert found.depth is not None and found.rates is not None
    assert found.depth.store == 3 * 1024
    assert found.rates.sent == pytest.approx(1024, rel=0.01)


def test_above_4096_slots_the_reading_is_spread_over_the_minute(broker: Any, clock: Clock) -> None:
    topic = replace(TOPIC, slots=8192)
    sampler = Sampler(broker, topic, clock)
    clock.advance(6)
    begun = clock()
    pauses = [next(sampler.steps) for _ in range(31)]
    assert pauses == [pytest.approx(45 / 32)] * 31
    assert clock() == begun
    clock.advance(45)
    assert next(sampler.steps) < 20
    assert last(broker, topic).sampled_ms == START_MS + 51_000


def test_the_slots_of_now_are_sampled(broker: Any, clock: Clock) -> None:
    topics = iter([replace(TOPIC, slots=2), replace(TOPIC, slots=8), replace(TOPIC, slots=8)])
    merge(broker, 1, "a")
    merge(broker, 7, "b")
    (duty,) = history.sampling(broker, [TOPIC], 1, lambda _: True, lambda _: next(topics))
    sampler = Sampler(broker, TOPIC, clock)
    clock.advance(5)
    sampler.steps = duty()
    sampler.minutes(1)
    first = last(broker).depth
    sampler.minute()
    second = last(broker)
    assert first is not None and second.depth is not None
    assert (first.store, second.depth.store) == (1, 2)
    assert second.rates is None, "of other slots before"


def test_one_of_many_samples_a_minute(broker: Any, clock: Clock) -> None:
    clock.advance(10)
    samples: list[int] = []
    run = broker.run

    def counted(call: Any) -> Any:
        if call.script == "history/sample":
            samples.append(len(call.place.slots))
        return run(call)

    broker.run = counted
    samplers = [Sampler(broker, TOPIC, clock) for _ in range(5)]
    for _ in range(3):
        for sampler in samplers:
            sampler.minute()
        clock.advance(60)
    assert samples == [4] * 3
    sampled = [one.depth is not None for one in history.read_minutes(broker, TOPIC, 0.1)]
    assert sampled == [False, False, True, True, True, False]


def test_who_does_not_own_the_first_slot_does_not_try(broker: Any, clock: Clock) -> None:
    Sampler(broker, TOPIC, clock, ours=False).minute()
    assert not [one for one in history.read_minutes(broker, TOPIC) if one.depth]


def test_a_clock_that_was_set_back_does_not_end_the_history(broker: Any) -> None:
    assert broker.take_minute(TOPIC, 30_000_000)
    assert not broker.take_minute(TOPIC, 29_999_990)
    assert broker.take_minute(TOPIC, 29_000_000)


def test_nothing_is_sampled_with_zero_hours(broker: Any) -> None:
    assert history.sampling(broker, [TOPIC], 0, lambda _: True) == []


def test_no_more_minutes_are_kept_than_asked_for(broker: Any, clock: Clock) -> None:
    sampler = Sampler(broker, TOPIC, clock, hours=1)
    sampler.minutes(70)
    kept = [one for one in history.read_minutes(broker, TOPIC, 3) if one.depth]
    assert len(kept) == 60
    clock.advance(3600 * 5)
    sampler.minutes(1)
    assert len([one for one in history.read_minutes(broker, TOPIC, 9) if one.depth]) == 1, (
        "also after a long pause"
    )


def test_forgetting_is_bounded_and_catches_up(broker: Any) -> None:
    for minute in range(2500):
        assert broker.store_minute(TOPIC, 30_000_000 + minute, "r", 10_000) == "kept"
    for more in range(1, 4):
        broker.store_minute(TOPIC, 30_002_500 + more, "r", 60)
    found = broker.minutes(TOPIC, 30_000_000, 30_002_600)
    assert sum(record is not None for record in found) <= 60


def test_a_minute_is_kept_once(broker: Any) -> None:
    assert broker.store_minute(TOPIC, 7, "first", 60) == "kept"
    assert broker.store_minute(TOPIC, 7, "second", 60) == "present"
    assert broker.minutes(TOPIC, 6, 8) == [None, b"first|", None]


def test_a_topic_that_nobody_samples_any_more_leaves_nothing(redis_url: str, prefix: str) -> None:
    with client_of(redis_url) as client:
        broker = Broker(client, prefix)
        broker.take_minute(TOPIC, 30_000_000)
        broker.store_minute(TOPIC, 30_000_000, "r", 60)
        for key in history_keys(prefix, TOPIC.name):
            assert 0 < client.ttl(key) <= 120 * 60


def test_48_hours_of_a_topic_take_less_than_a_megabyte(redis_url: str, prefix: str) -> None:
    record = "1800000000000 65536 65536 1234567 123456 1234 0 12345 123456 1800000000000 " + " ".join(
        ["123456789"] * 6
    )
    with client_of(redis_url) as client:
        broker = Broker(client, prefix)
        for minute in range(2880):
            broker.count_lateness(TOPIC, [1234] * 8)
            broker.store_minute(TOPIC, 30_000_000 + minute, record, 2880)
        size = client.memory_usage(history_keys(prefix, TOPIC.name).minutes, samples=0)
        assert size is not None
        assert size < 1_000_000


def test_both_brokers_keep_the_same(redis_url: str, prefix: str, clock: Clock) -> None:
    kept = []
    with client_of(redis_url) as client:
        for broker in (Broker(client, prefix, clock), OracleBroker(prefix, clock)):
            merge(broker, 0, "a", "b")
            assert broker.take_minute(TOPIC, 30_000_000)
            broker.count_lateness(TOPIC, [3, 0, 5] + [0] * 20 + [1])
            broker.count_lateness(TOPIC, [1] + [0] * 23)
            for minute in (30_000_000, 30_000_001, 30_000_070):
                broker.store_minute(TOPIC, minute, f"r{minute}", 60)
            dumps = [
                dict(broker.keyspace[key]) if isinstance(broker, OracleBroker) else client.hgetall(key)
                for key in history_keys(prefix, TOPIC.name)
            ]
            kept.append((dumps, broker.sample(TOPIC, range(4))))
    assert kept[0] == kept[1]
    assert kept[0][0][0] == {b"30000070": b"r30000070|"}


def test_a_foreign_key_is_named_and_left_alone(redis_url: str, prefix: str) -> None:
    with client_of(redis_url) as client:
        broker = Broker(client, prefix)
        client.set(history_keys(prefix, TOPIC.name).minutes, "foreign")
        with pytest.raises(WrongType, match="minutes_"):
            broker.store_minute(TOPIC, 1, "r", 60)


def test_minutes_without_a_sample_are_gaps(broker: Any, clock: Clock) -> None:
    sampler = Sampler(broker, TOPIC, clock)
    sampler.minutes(2)
    clock.advance(180)
    merge(broker, 0, *"abcdefgh")
    sampler.minutes(2)
    clock.advance(60 * 60)
    merge(broker, 0, *"ijkl")
    sampler.minutes(1)
    found = history.read_minutes(broker, TOPIC, 2)
    assert len(found) == 120
    assert [b.at_ms - a.at_ms for a, b in pairwise(found)] == [60_000] * 119
    sampled = [one for one in found if one.depth]
    assert len(sampled) == 5
    rates = [one.rates.sent if one.rates else None for one in sampled]
    assert rates[0] is None, "nothing was there before"
    assert rates[2] == pytest.approx(2), "over four minutes"
    assert rates[4] is None, "an hour says nothing of a minute"


def test_a_server_that_lost_its_data_shows_no_negative_rates(broker: Any, clock: Clock) -> None:
    sampler = Sampler(broker, TOPIC, clock)
    merge(broker, 0, *"abcd")
    sampler.minutes(1)
    key = slot_keys(broker.prefix, TOPIC.name, 0).stats
    broker.client.delete(key)
    sampler.minute()
    assert last(broker).rates is None


def test_an_hour_of_several_topics_that_is_read_on_is_the_same_as_one_that_is_read_whole(
    broker: Any, clock: Clock
) -> None:
    chance, topics = random.Random(7), [replace(TOPIC, name=name) for name in ("one", "other")]
    read_on, lengths = SummedHour(topics), set[int]()
    for at in range(150):
        minute = broker.now_ms() // 60_000
        for number, topic in enumerate(topics):
            # Sometimes a topic is not sampled for some minutes, and once none is for a quarter of an hour.
            if chance.random() < 0.6 and not 60 <= at < 75:
                depths = (minute * 60_000 + 9, 4, 4, at, at + number, 0, 0, 0, number, 0)
                record = " ".join(map(str, (*depths, 3 * at, 0, at, 2 * at, number, *[0] * 10)))
                assert broker.store_minute(topic, minute, record, 2880) == "kept"
        if chance.random() < 0.3 or at == 149:
            found = read_on.read(broker)
            assert found == SummedHour(topics).read(broker)
            lengths.add(len(found))
        clock.advance(60)
    assert min(lengths) < 10 and max(lengths) == 59
    clock.advance(-7_200)
    assert read_on.read(broker) == SummedHour(topics).read(broker) != found


def test_several_minutes_are_read_as_one(broker: Any, clock: Clock) -> None:
    sampler = Sampler(broker, TOPIC, clock)
    for number in range(20):
        merge(broker, 0, f"m{number}")
        broker.count_lateness(TOPIC, [number] + [0] * 23)
        sampler.minutes(1)
    found = history.read_minutes(broker, TOPIC, 1, step=5)
    assert len(found) == 12
    assert {one.at_ms % 300_000 for one in found} == {0}
    whole = [one for one in found if one.rates and one.depth and one.depth.store < 20][1:]
    assert whole
    assert [one.rates.sent for one in whole if one.rates] == pytest.approx([1] * len(whole))
    late = [one.lateness.messages for one in history.read_minutes(broker, TOPIC, 1, step=5) if one.lateness]
    assert sum(late) == sum(range(20))


@pytest.mark.parametrize("raw", [b"", b"x", b"1 2 3|", b"\xff\xfe", b"|0:1", b"1 " * 16 + b"1|99:1"])
def test_what_is_no_record_is_a_gap(broker: Any, raw: bytes) -> None:
    minute = START_MS // 60_000
    key = history_keys(broker.prefix, TOPIC.name).minutes
    broker.client.hset(key, str(minute), raw)
    assert history.read_minutes(broker, TOPIC, 1)[-1] == Minute(START_MS)


def test_percentiles_are_interpolated_in_their_class() -> None:
    counts = [0] * LATENESS_BUCKETS
    counts[0], counts[3], counts[-1] = 50, 49, 1
    late = Lateness(tuple(counts))
    assert late.messages == 100
    assert late.percentile(0.25) == pytest.approx(0.5)
    assert late.percentile(0.5) == pytest.approx(1)
    assert late.percentile(0.99) == pytest.approx(10)
    assert late.percentile(1) == EDGES_MS[-1]
    assert Lateness((0,) * LATENESS_BUCKETS).percentile(0.99) == 0


def test_lateness_is_counted_by_class_and_given_away_in_the_end(broker: Any, clock: Clock) -> None:
    count = TimesCount(broker)
    now = 1_800_000_000_000.0
    deliveries = [Delivery(b"m", now - late, 16) for late in (-0.4, 0, 1, 1.5, 2, 4_000, 1e9)]
    count.note(TOPIC, [*deliveries, Delivery(b"retry", 16, 15)], now)
    count.note(replace(TOPIC, type=TopicType.PRIORITY), [Delivery(b"p", 50, 16)], now)
    flush(count)
    Sampler(broker, TOPIC, clock).minute()
    late = last(broker).lateness
    assert late is not None
    counts = [0] * LATENESS_BUCKETS
    counts[0], counts[1], counts[EDGES_MS.index(5_000)], counts[-1] = 3, 2, 1, 1
    assert late.counts == tuple(counts)
    Sampler(broker, TOPIC, clock)
    clock.advance(60)
    Sampler(broker, TOPIC, clock).minute()
    assert last(broker).lateness is None, "each delivery is counted in one minute"


def test_a_dispatcher_tells_how_late_it_handed_out(broker: Any) -> None:
    broker = Broker(broker.client, broker.prefix)
    count = TimesCount(broker)
    heard = Heard()
    send(broker, TOPIC, range(100))
    with Worker(broker, TOPIC, heard, burst=True, handed_out=count.note) as worker:
        worker.join()
    flush(count)
    broker.store_minute(TOPIC, broker.now_ms() // 60_000, "", 60)
    minute = broker.now_ms() // 60_000
    (raw,) = [record for record in broker.minutes(TOPIC, minute - 1, minute) if record]
    counts = {int(pair.split(b":")[0]): int(pair.split(b":")[1]) for pair in raw.partition(b"|")[2].split()}
    assert sum(counts.values()) == 100
    assert max(counts) <= EDGES_MS.index(10_000)


def test_lateness_that_redis_does_not_take_is_told_of(broker: Any, caplog: pytest.LogCaptureFixture) -> None:
    broker.client.set(history_keys(broker.prefix, TOPIC.name).pending, "foreign")
    count = TimesCount(broker)
    count.note(TOPIC, [Delivery(b"m", 1_800_000_000_000, 16)], 1_800_000_000_000)
    flush(count)
    assert "could not be recorded" in caplog.text


def test_on_a_cluster_the_slots_of_all_nodes_are_summed(redis_cluster: RedisCluster, clock: Clock) -> None:
    client = cluster_of(redis_cluster)
    broker = ClusterBroker(client, f"h{uuid.uuid4().hex[:12]}:", clock)
    topic = replace(TOPIC, slots=64)
    sampler = Sampler(broker, topic, clock)
    sampler.minutes(1)
    for slot in range(64):
        merge(broker, slot, "a", "b", topic=topic)
    broker.count_lateness(topic, [5] + [0] * 23)
    sampler.minute()
    found = last(broker, topic)
    assert found.depth is not None and found.rates is not None and found.lateness is not None
    assert (found.depth.store, found.lateness.messages) == (128, 5)
    assert found.rates.sent == pytest.approx(128)
    limited = replace(TOPIC, max_in_flight=3, max_rate=10)
    allowed = broker.allow(limited, "A", tokens=1, in_use=0, wanted=9, lease_ms=3000)
    assert (allowed.tokens, allowed.permits) == (1, 3)
    client.close()
