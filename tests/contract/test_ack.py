"""How deliveries end: 1 + MAX_RETRIES of them, back-off, what is released, and a member named twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from django_rmq.core.model.bounds import MAX_PRIORITY
from django_rmq.core.model.replies import Death, FailureRecord
from django_rmq.core.model.topic import BackOff, TopicType
from django_rmq.testing import Clock
from tests.contract.slots import CONSTANT, NO_BACKOFF, TIME_TYPES, TYPES, Make, Slot, each_type, slot_of_each

KINDS = [
    pytest.param(TopicType.PRIORITY, "original", id="original"),
    pytest.param(TopicType.PRIORITY, "lowest", id="lowest"),
    pytest.param(TopicType.RANGE_MERGE, "original", id="range_merge"),
    pytest.param(TopicType.FIXED_TIME, "original", id="fixed_time"),
]


@pytest.mark.parametrize(
    "backoff", [NO_BACKOFF, CONSTANT, BackOff(100, 1_000)], ids=["at once", "const", "exp"]
)
@pytest.mark.parametrize(("kind", "retry_priority"), KINDS)
@pytest.mark.parametrize("identity", ["body", "key"])
def test_a_message_that_always_fails_is_delivered_seventeen_times_with_16_to_0_left(
    make_slot: Make, kind: TopicType, retry_priority: str, identity: str, backoff: BackOff
) -> None:
    slot = make_slot(kind, retry_priority=retry_priority, identity=identity, backoff=backoff)
    slot.send(b"a")
    assert slot.fail_to_death(b"a") == list(range(16, -1, -1))
    assert slot.where(b"a") == "D"


@pytest.mark.parametrize(("kind", "retry_priority"), KINDS)
@pytest.mark.parametrize("max_retries", [0, 1, 3, 17, 999])
def test_max_retries_is_exact_whatever_it_is(
    make_slot: Make, kind: TopicType, retry_priority: str, max_retries: int
) -> None:
    slot = make_slot(kind, retry_priority=retry_priority, max_retries=max_retries, backoff=NO_BACKOFF)
    slot.send(b"a", score=2_000 if kind is TopicType.PRIORITY else None)
    assert slot.fail_to_death(b"a") == list(range(max_retries, -1, -1))


@pytest.mark.parametrize("priority", [17, 1 << 42, MAX_PRIORITY - 1, MAX_PRIORITY, 1e15, 1e300, float("inf")])
def test_the_largest_priorities_carry_an_exact_budget_too(make_slot: Make, priority: float) -> None:
    slot = make_slot(backoff=NO_BACKOFF)
    slot.zadd(b"a", priority)
    assert slot.fail_to_death(b"a") == list(range(16, -1, -1))


@slot_of_each(TIME_TYPES)
def test_the_longest_delay_does_not_cost_or_give_a_retry(slot: Slot, clock: Clock) -> None:
    slot.send(b"a")
    slot.fail_one(b"a", delay_ms=0)
    receipt, delivery = slot.take_one()
    assert delivery.retries_left == 15
    slot.fail(receipt, b"a", delay_ms=10**15)
    clock.advance((1 << 42) / 1000)
    assert slot.take_one()[1].retries_left == 14


def test_a_resting_message_that_is_rescheduled_far_away_keeps_its_budget(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIXED_TIME)
    slot.send(b"a")
    slot.fail_one(b"a", delay_ms=0)
    slot.fail_one(b"a")
    assert slot.reschedule([10**14], [b"a"]) == ["resting"]
    slot.clock.advance(((1 << 43) - slot.now_ms) / 1000)
    assert slot.take_one()[1].retries_left == 14


@pytest.mark.parametrize(("kind", "retry_priority"), KINDS)
def test_the_slots_own_retries_count_and_not_those_of_a_workers_settings(
    make_slot: Make, kind: TopicType, retry_priority: str
) -> None:
    slot = make_slot(kind, retry_priority=retry_priority, max_retries=3, backoff=NO_BACKOFF)
    assert slot.configure() == "ok"
    slot.send(b"a")
    other = Slot(slot.broker, slot.keyspace, slot.clock, replace(slot.topic, max_retries=9))
    assert other.fail_to_death(b"a") == [3, 2, 1, 0]


def test_an_error_is_kept_whatever_its_text_and_not_more_than_a_kilobyte(make_slot: Make) -> None:
    slot = make_slot(max_retries=2, backoff=NO_BACKOFF)
    slot.send(b"a")
    for error, kept in [("nul \0 in it", b"nul \0 in it"), ("é" * 1_000, "é".encode() * 512)]:
        slot.fail_one(b"a", error=error)
        assert FailureRecord.parse(slot.hash("failures")[b"a"]).error == kept
    slot.fail_one(b"a", error="x\ny" * 1_000)
    assert Death.parse(slot.hash("deaths")[b"a"]).error == (b"x\ny" * 1_000)[:1024]


@slot_of_each(TYPES, backoff=NO_BACKOFF)
def test_a_released_retry_gives_way_to_the_fresh_copy_that_waits(slot: Slot) -> None:
    slot.send(b"a")
    slot.fail_one(b"a")
    receipt, _ = slot.take_one()
    slot.send(b"a")
    fresh = slot.zset("store")
    assert slot.release(receipt, [b"a"]) == ["ok"]
    assert slot.zset("store") == fresh
    assert slot.counted("dropped") == 1
    assert slot.take_one()[1].retries_left == 16


@slot_of_each(TYPES, backoff=NO_BACKOFF)
def test_a_released_retry_that_nothing_replaces_has_the_budget_it_had(slot: Slot, clock: Clock) -> None:
    slot.send(b"a")
    slot.fail_one(b"a")
    for _ in range(3):
        receipt, delivery = slot.take_one()
        assert delivery.retries_left == 15
        assert slot.extend(receipt, [b"a"]) == ["ok"]
        assert [held.delivery.retries_left for held in slot.list_held("A")] == [15]
        assert slot.release(receipt, [b"a"]) == ["ok"]


@each_type
@pytest.mark.parametrize("score", [7, 16, 0, -5])
def test_what_died_with_a_strangers_retry_score_is_replayed_fresh(slot: Slot, score: float) -> None:
    slot.zadd(b"a", score)
    slot.kill(b"a")
    assert slot.replay([b"a"]) == ["replayed"]
    assert slot.where(b"a") == "W"
    assert slot.take_one()[1].retries_left == 16


@pytest.mark.parametrize("mark", ["remove", "bury"])
@pytest.mark.parametrize("end", ["commit", "release"])
def test_a_marked_delivery_that_is_ended_twice_in_one_call_is_counted_once(
    make_slot: Make, mark: str, end: str
) -> None:
    slot = make_slot()
    slot.send(b"a")
    receipt, _ = slot.take_one()
    getattr(slot, mark)([b"a"])
    words = getattr(slot, end)(receipt, [b"a", b"a"])
    assert words[0] == "ok"
    assert slot.where(b"a") == ("D" if mark == "bury" else "-")
    assert slot.counted("ended_marked") == 1


@each_type
def test_a_delivery_committed_twice_in_one_call_is_committed_once(slot: Slot) -> None:
    slot.send(b"a")
    receipt, _ = slot.take_one()
    assert slot.commit(receipt, [b"a", b"a"]) == ["ok", "ok"]
    assert slot.counted("committed") == 1


@slot_of_each(TYPES, backoff=NO_BACKOFF)
def test_a_delivery_failed_twice_in_one_call_fails_once(slot: Slot) -> None:
    slot.send(b"a")
    receipt, _ = slot.take_one()
    assert slot.fail(receipt, b"a", b"a") == ["ok", "stale"]
    assert slot.take_one()[1].retries_left == 15


def test_no_members_are_no_error(make_slot: Make) -> None:
    slot = make_slot()
    for method in ("commit", "release", "extend"):
        assert getattr(slot, method)(1, []) == []
    assert slot.rollback(1, []) == [] and slot.bury([]) == [] and slot.remove([]) == []
    assert slot.replay([]) == [] and slot.reschedule([], []) == []
