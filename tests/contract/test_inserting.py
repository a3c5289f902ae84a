"""Inserting: a transaction without a look at each message leaves the same as a send, or nothing."""

from __future__ import annotations

from typing import Any

import pytest

from django_rmq.core.model.bounds import BATCH, MAX_PRIORITY
from django_rmq.core.model.topic import TopicType
from tests.contract.conftest import ON_ONE_SERVER
from tests.contract.slots import NO_BACKOFF, TYPES, Make, Slot, slot_of_each
from tests.contract.test_waking import Ear

pytestmark = ON_ONE_SERVER
kinds = pytest.mark.parametrize("kind", TYPES)
A, B, C = b"a", b"b", b"c"


def met(kind: TopicType) -> str:
    return "merged" if kind is TopicType.RANGE_MERGE else "replaced"


@kinds
def test_it_leaves_what_a_send_leaves(make_slot: Make, kind: TopicType) -> None:
    inserted, sent = (make_slot(kind, time_range_ms=5_000, identity="body") for _ in range(2))
    score = 5_000 if kind is TopicType.RANGE_MERGE else 100 if kind is TopicType.PRIORITY else None
    for members in ([A, B, A], [B, C], [A, B, C]):
        given = None if kind is TopicType.RANGE_MERGE or score is None else [score] * len(members)
        counts = inserted.insert(*members, scores=given)
        words = [one.status for one in sent.send(*members, score=score)]
        assert counts == {word: words.count(word) for word in words}
        assert inserted.zset("store") == sent.zset("store")
        for name in ("stats", "control"):
            assert inserted.hash(name) == sent.hash(name)
        inserted.clock.advance("700ms")
    assert not inserted.zset("inserting")


@slot_of_each(TYPES, time_range_ms=5_000)
def test_as_many_as_a_call_may_hold(slot: Slot) -> None:
    members = [b"%d" % n for n in range(BATCH)]
    assert slot.insert(
        *members, scores=None if slot.topic.type is TopicType.RANGE_MERGE else [slot.fresh_score()] * BATCH
    )
    assert slot.insert(*members, b"one more") is None
    assert len(slot.zset("store")) == slot.counted("stored") == BATCH


def declined(slot: Slot, *members: bytes, **how: Any) -> bool:
    """Return whether nothing was inserted, and nothing changed."""
    before = slot.snapshot()
    answer = slot.insert(*members, **how)
    assert (answer is None) == (slot.snapshot() == before)
    return answer is None


@slot_of_each(TYPES, time_range_ms=5_000, backoff=NO_BACKOFF)
def test_a_retry_that_waits_is_looked_at(slot: Slot) -> None:
    slot.send(A)
    slot.fail_one(A, delay_ms=0)
    slot.promote()
    assert slot.where(A) == "w"
    assert declined(slot, B) and declined(slot, A)
    receipt, _ = slot.take_one()
    slot.commit(receipt, [A])
    assert not declined(slot, B)


@slot_of_each(TYPES, time_range_ms=5_000)
def test_a_retry_that_rests_is_looked_at(slot: Slot) -> None:
    slot.send(A)
    slot.fail_one(A, delay_ms=60_000)
    assert slot.where(A) == "T"
    slot.keyspace.delete(slot.keys.failures)
    assert declined(slot, B) and declined(slot, A)


def test_priorities_are_looked_at_while_something_has_failed(make_slot: Make) -> None:
    slot = make_slot(TopicType.PRIORITY, backoff=NO_BACKOFF, retry_priority="original")
    slot.send(A)
    slot.fail_one(A, delay_ms=0)
    slot.promote()
    assert slot.where(A) == "w" and min(slot.zset("store").values()) > 16
    assert declined(slot, B)


@slot_of_each(TYPES, time_range_ms=5_000)
def test_a_client_with_another_slot_count_inserts_nothing(slot: Slot) -> None:
    slot.configure()
    assert declined(slot.with_topic(slots=2), A)
    assert not declined(slot, A)


@slot_of_each(TYPES, time_range_ms=5_000, max_backlog=3)
def test_what_would_not_all_fit_is_looked_at(slot: Slot) -> None:
    assert slot.insert(A, B, C) == {"stored": 3}
    assert declined(slot, A)


@pytest.mark.parametrize(
    ("kind", "scores"),
    [
        (TopicType.PRIORITY, [16]),
        (TopicType.PRIORITY, [100, 16]),
        (TopicType.PRIORITY, [MAX_PRIORITY + 1, 100]),
        (TopicType.FIXED_TIME, [999]),
        (TopicType.FIXED_TIME, [10**14 + 1]),
    ],
)
def test_scores_that_no_sender_may_use(make_slot: Make, kind: TopicType, scores: list[int]) -> None:
    slot = make_slot(kind)
    assert declined(slot, *[A, B][: len(scores)], scores=scores)


@pytest.mark.parametrize(
    ("late", "is_inserted"), [(-1_001, False), (-1_000, True), (1_000, True), (1_001, False)]
)
def test_the_time_that_a_sender_has_read_may_be_a_second_off(
    make_slot: Make, late: int, is_inserted: bool
) -> None:
    slot = make_slot(TopicType.RANGE_MERGE, time_range_ms=5_000)
    assert declined(slot, A, scores=[slot.now_ms + 5_000 - late]) != is_inserted
    assert slot.zset("store") == ({A: slot.now_ms + 5_000 - late} if is_inserted else {})


def test_a_debounced_message_is_looked_at(make_slot: Make) -> None:
    slot = make_slot(TopicType.RANGE_MERGE, time_range_ms=5_000, debounce=True, max_wait_ms=60_000)
    assert declined(slot, A)


@slot_of_each(TYPES, time_range_ms=5_000)
def test_an_empty_message_of_somebody_else_is_no_receipt(slot: Slot) -> None:
    slot.zadd(b"", slot.fresh_score())
    assert declined(slot, A)


@slot_of_each(TYPES, time_range_ms=5_000)
@pytest.mark.parametrize("name", ["store", "retry", "failures", "stats", "control"])
def test_keys_of_foreign_types_are_left_alone(slot: Slot, name: str) -> None:
    key = getattr(slot.keys, name)
    if name in ("store", "retry"):
        slot.keyspace.hset(key, b"field", b"value")
    else:
        slot.keyspace.zadd(key, b"field", 1)
    assert declined(slot, A)
    slot.keyspace.delete(key)
    assert not declined(slot, A)


@slot_of_each(TYPES, time_range_ms=5_000)
def test_it_wakes_who_sleeps_longer(slot: Slot) -> None:
    ear = Ear(slot)
    slot.take()
    slot.insert(A)
    assert ear.heard() == 1
    slot.insert(A, B)
    assert ear.heard() == 0
    assert b"sleeping_until" not in slot.hash("control")


def test_what_merges_wakes_nobody(make_slot: Make) -> None:
    slot = make_slot(TopicType.RANGE_MERGE, time_range_ms=5_000)
    ear = Ear(slot)
    slot.insert(A)
    slot.take()
    slot.clock.advance(1)
    assert slot.insert(A) == {"merged": 1}
    assert ear.heard() == 0


@slot_of_each(TYPES, time_range_ms=0)
def test_what_is_taken_and_inserted_again_is_new(slot: Slot) -> None:
    assert slot.insert(A, B) == {"stored": 2}
    receipt, delivery = slot.take_one()
    assert slot.insert(A, B) == {"stored": 1, met(slot.topic.type): 1}
    assert slot.commit(receipt, [delivery.member]) == ["ok"]
    assert set(slot.zset("store")) == {A, B}
