"""Highest first, fairly among equals, bounded however many there are."""

from __future__ import annotations

from collections import Counter

import pytest

from django_rmq.core.model.bounds import BATCH, MAX_PRIORITY
from django_rmq.core.model.topic import TopicType
from django_rmq.testing import Clock
from tests.contract.slots import BOTH, CONSTANT, NO_BACKOFF, TYPES, Make, Slot, each_type, slot_of_each


def test_the_highest_priority_is_taken_first(make_slot: Make) -> None:
    slot = make_slot()
    slot.send_replace([50, MAX_PRIORITY, 17, 51], [b"a", b"b", b"c", b"d"])
    assert [slot.take_one()[1].member for _ in range(4)] == [b"b", b"d", b"a", b"c"]


def test_one_prepare_is_in_order_of_priority(make_slot: Make) -> None:
    slot = make_slot()
    slot.send_replace([50, 90, 70, 60], [b"a", b"b", b"c", b"d"])
    assert [delivery.member for delivery in slot.take(3).deliveries] == [b"b", b"c", b"d"]


def test_the_last_priority_sent_counts(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(b"a", score=90)
    slot.send(b"b", score=50)
    slot.send(b"a", score=20)
    assert slot.take_one()[1].member == b"b"


def test_among_equals_each_comes_first_about_equally_often(make_slot: Make, clock: Clock) -> None:
    slot = make_slot()
    members = [b"%d" % n for n in range(8)]
    slot.send(*members, score=50)
    firsts: Counter[bytes] = Counter()
    for _ in range(400):
        clock.advance("0.731ms")
        receipt, delivery = slot.take_one()
        firsts[delivery.member] += 1
        slot.release(receipt, [delivery.member])
    assert set(firsts) == set(members)
    assert max(firsts.values()) < 3 * min(firsts.values())


@pytest.mark.parametrize("limit", [1, 3, 7, 8, 9])
def test_a_prepare_that_cuts_a_group_of_equals_takes_all_above_it_and_fills_up_from_it(
    make_slot: Make, clock: Clock, limit: int
) -> None:
    slot = make_slot()
    high, equal, low = [b"h1", b"h2"], [b"e%d" % n for n in range(6)], [b"l1"]
    slot.send_replace([90, 90, *[50] * 6, 20], [*high, *equal, *low])
    for _ in range(20):
        clock.advance("0.977ms")
        answer = slot.take(limit)
        taken = [delivery.member for delivery in answer.deliveries]
        assert len(set(taken)) == len(taken) == min(limit, 9)
        assert set(taken[:2]) <= set(high)
        assert set(taken[2:8]) <= set(equal)
        assert taken[8:] == low[: max(0, limit - 8)]
        assert [slot.commit, slot.release][1](answer.receipt, taken) == ["ok"] * len(taken)


def test_a_group_of_equals_is_drained_without_a_gap_while_copies_of_it_run(make_slot: Make) -> None:
    slot = make_slot()
    members = [b"%02d" % n for n in range(30)]
    slot.send(*members, score=50)
    flying = []
    for _ in range(6):
        slot.clock.advance("0.31ms")
        answer = slot.take(5)
        assert len(answer.deliveries) == 5
        flying += [(answer.receipt, delivery.member) for delivery in answer.deliveries]
        slot.send(*(member for _, member in flying), score=50)
    assert sorted(member for _, member in flying) == members
    assert slot.take(5).status == "busy"
    for receipt, member in flying:
        assert slot.commit(receipt, [member]) == ["ok"]
    assert slot.count().due == 30


def test_a_retry_comes_back_at_its_own_priority(make_slot: Make) -> None:
    slot = make_slot(backoff=NO_BACKOFF)
    slot.send_replace([90, 50], [b"high", b"low"])
    slot.fail_one(b"high")
    assert slot.zset("store") == {b"high": 90 + 16 / 1024, b"low": 50}
    assert slot.take_one()[1].member == b"high"


@pytest.mark.parametrize("retry_priority", ["original", "lowest"])
def test_a_delivery_of_fresh_messages_and_retries_knows_the_retries_of_each(
    make_slot: Make, retry_priority: str
) -> None:
    slot = make_slot(backoff=NO_BACKOFF, retry_priority=retry_priority, max_retries=5)
    slot.send_replace([90, 90, 50], [b"first", b"failed", b"last"])
    answer = slot.take(3)
    slot.fail(answer.receipt, b"failed")
    slot.release(answer.receipt, [b"first", b"last"])
    left = {delivery.member: delivery.retries_left for delivery in slot.take(3).deliveries}
    assert left == {b"first": 5, b"failed": 4, b"last": 5}


@pytest.mark.parametrize("backoff", [NO_BACKOFF, CONSTANT])
def test_the_articles_retry_waits_below_all_fresh_messages(make_slot: Make, backoff: object) -> None:
    slot = make_slot(backoff=backoff, retry_priority="lowest")
    slot.send_replace([90, 17], [b"high", b"low"])
    slot.fail_one(b"high")
    slot.clock.advance(1)
    slot.promote()
    assert slot.zset("store") == {b"high": 16, b"low": 17}
    assert slot.take_one()[1].member == b"low"


def test_a_retry_that_was_the_articles_dies_with_its_own_priority_and_is_replayed_with_it(
    make_slot: Make,
) -> None:
    slot = make_slot(backoff=NO_BACKOFF, retry_priority="lowest", max_retries=1)
    slot.send(b"a", score=90)
    for _ in range(2):
        slot.fail_one(b"a")
    assert slot.where(b"a") == "D"
    slot.replay([b"a"])
    assert slot.zset("store") == {b"a": 90}


# --- sizes


@each_type
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8_001])
def test_any_number_of_due_messages_is_drained_completely(slot: Slot, count: int) -> None:
    members = [b"%05d" % n for n in range(count)]
    for start in range(0, count, BATCH):
        slot.send(
            *members[start : start + BATCH],
            score=0 if slot.topic.type is TopicType.RANGE_MERGE else slot.now_ms,
        )
    assert slot.count().due == count
    drained: list[bytes] = []
    while (answer := slot.take(BATCH)).status == "ok":
        taken = [delivery.member for delivery in answer.deliveries]
        drained += taken
        assert slot.commit(answer.receipt, taken) == ["ok"] * len(taken)
    assert (answer.status, answer.next_due) == ("empty", None)
    assert sorted(drained) == members


@each_type
def test_a_prepare_that_left_something_says_so(slot: Slot) -> None:
    slot.send(b"a", b"b", b"c")
    assert slot.take(2).next_due == slot.now_ms
    assert slot.take(2).next_due == (slot.now_ms // 1000 + 31) * 1000


@slot_of_each(TYPES, identity=BOTH)
def test_a_prepare_takes_at_most_so_many_bytes_but_at_least_one_message(slot: Slot) -> None:
    members = [letter * (2 if slot.topic.keyed else 100) for letter in (b"a", b"b", b"c")]
    slot.send(*members, body=b"x" * 93)
    answer = slot.take(3, max_bytes=250)
    assert len(answer.deliveries) == 2 and answer.next_due == slot.now_ms
    assert len(slot.take(3, max_bytes=1).deliveries) == 1


@slot_of_each(TYPES, serial=False, max_prepared=5_000)
def test_behind_more_busy_members_than_one_scan_the_cursor_leads_to_what_can_be_taken(slot: Slot) -> None:
    busy = [b"busy%04d" % n for n in range(2_500)]
    score = {TopicType.RANGE_MERGE: 0, TopicType.PRIORITY: 90, TopicType.FIXED_TIME: slot.now_ms - 5}[
        slot.topic.type
    ]
    slot.send(*busy, score=score)
    assert [len(slot.take(BATCH).deliveries) for _ in range(3)] == [BATCH, BATCH, 500]
    slot.send(*busy, score=score)
    slot.clock.advance("1ms")
    slot.send(
        b"free", score={TopicType.RANGE_MERGE: 0, TopicType.PRIORITY: 80}.get(slot.topic.type, slot.now_ms)
    )
    answers = [slot.take(10)]
    while answers[-1].status == "more":
        assert len(answers) < 10
        assert answers[-1].next_due == slot.now_ms
        answers.append(slot.take(10, after=answers[-1].cursor))
    assert len(answers) > 2
    assert [delivery.member for delivery in answers[-1].deliveries] == [b"free"]
    assert set(slot.zset("store")) == set(busy)
