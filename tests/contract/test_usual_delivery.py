"""The usual delivery: a slot has nothing but a few messages that are due, or nothing at all, and no member has a key.

Scripts have a way of its own for it. What it leaves is what any delivery leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_rmq.core.model.limits import NEVER
from django_rmq.core.model.topic import TopicType
from django_rmq.testing import Clock
from tests.contract.slots import TYPES, Slot, slot_of_each

MakeSlot = Callable[..., Slot]
kinds = pytest.mark.parametrize("kind", [*TYPES, TopicType.FIFO])
A, B = b"a", b"b"


def members(slot: Slot, limit: int = 10, **more: Any) -> list[bytes]:
    return [delivery.member for delivery in slot.take(limit, **more).deliveries]


@slot_of_each([*TYPES, TopicType.FIFO])
def test_it_notes_its_owner_its_receipt_and_that_it_sleeps(slot: Slot) -> None:
    slot.send(A)
    prepared = slot.take(owner="me")
    control = slot.hash("control")
    assert (prepared.sleeping_until, prepared.next_due) == (NEVER, slot.now_ms + 31_000)
    assert control[b"owner"] == b"me"
    assert control[b"deliveries"] == b"%d" % prepared.receipt
    assert control[b"sleeping_until"] == b"%d" % NEVER
    assert (control[b"slots"], control[b"timeout"], control[b"max_retries"]) == (b"1", b"30", b"16")
    assert slot.hash("inflight")[A].startswith(b"%d " % prepared.receipt)
    assert slot.zset("prepare") == {A: slot.now_ms // 1000 * 1000 + 16}
    assert (slot.zset("store"), slot.counted("prepared")) == ({}, 1)


@slot_of_each([*TYPES, TopicType.FIFO])
def test_an_empty_slot_sleeps_until_it_is_woken(slot: Slot) -> None:
    prepared = slot.take()
    assert (prepared.status, prepared.next_due) == ("empty", None)
    assert slot.hash("control")[b"sleeping_until"] == b"%d" % NEVER


@slot_of_each([TopicType.RANGE_MERGE, TopicType.FIXED_TIME, TopicType.FIFO])
def test_nothing_comes_before_its_time(slot: Slot, clock: Clock) -> None:
    slot.send(A)
    slot.send(B, score=slot.now_ms + 500 if slot.topic.type is TopicType.FIXED_TIME else 500)
    prepared = slot.take()
    assert [delivery.member for delivery in prepared.deliveries] == [A]
    slot.commit(prepared.receipt, [A])
    clock.advance("499ms")
    assert members(slot) == []
    clock.advance("1ms")
    assert members(slot) == [B]


@kinds
def test_it_takes_no_more_messages_and_bytes_than_it_may(make_slot: MakeSlot, kind: TopicType) -> None:
    slot = make_slot(kind)
    slot.send(A, B, b"c")
    assert len(members(slot, 2)) == 2
    slot = make_slot(kind)
    slot.send(b"a" * 60, b"b" * 60, b"c" * 60)
    assert len(members(slot, max_bytes=130)) == 2
    slot = make_slot(kind)
    slot.send(b"a" * 60)
    assert len(members(slot, max_bytes=1)) == 1


def test_only_as_many_come_as_others_may_take_beside_each_other(make_slot: MakeSlot) -> None:
    slot = make_slot(TopicType.RANGE_MERGE, serial=False, max_prepared=2)
    slot.send(A, B, b"c")
    assert len(members(slot)) == 2


def test_who_fills_the_room_of_a_slot_does_not_sleep(make_slot: MakeSlot) -> None:
    """It may have been given less than there is."""
    slot = make_slot(TopicType.RANGE_MERGE, serial=False, max_prepared=1)
    slot.send(A)
    prepared = slot.take()
    assert [delivery.member for delivery in prepared.deliveries] == [A]
    assert prepared.sleeping_until is None
    assert b"sleeping_until" not in slot.hash("control")


def test_the_highest_priority_comes_first(make_slot: MakeSlot) -> None:
    slot = make_slot(TopicType.PRIORITY)
    slot.send_replace([50, 90, 70], [A, B, b"c"], [])
    assert members(slot) == [B, b"c", A]


def test_a_slot_of_priorities_that_is_emptied_waits_no_longer(make_slot: MakeSlot) -> None:
    slot = make_slot(TopicType.PRIORITY)
    slot.send(A)
    assert slot.hash("control")[b"undrained_since"]
    assert members(slot) == [A]
    assert b"undrained_since" not in slot.hash("control")


@slot_of_each([TopicType.RANGE_MERGE, TopicType.FIXED_TIME, TopicType.PRIORITY])
def test_a_retry_in_store_has_the_deliveries_that_its_score_tells(slot: Slot) -> None:
    slot.zadd(A, 3)
    assert [delivery.retries_left for delivery in slot.take().deliveries] == [2]


def test_the_retries_of_the_slot_are_told_where_the_caller_has_others(make_slot: MakeSlot) -> None:
    slot = make_slot(TopicType.RANGE_MERGE)
    slot.send(A)
    slot.commit(slot.take().receipt, [A])
    slot.send(B)
    assert [each.retries_left for each in slot.with_topic(max_retries=5).take().deliveries] == [16]
