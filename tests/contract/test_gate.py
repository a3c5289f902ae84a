"""One owner at a time: the gate, epochs, lost replies, claims, and MAX_PREPARED where there is no gate."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_rmq.core.model.keys import SlotKeys
from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.topic import TopicType
from django_rmq.testing import Clock
from tests.contract.slots import CONSTANT, NO_BACKOFF, TYPES, Slot, each_type, slot_of_each

MakeSlot = Callable[..., Slot]
kinds = pytest.mark.parametrize("kind", TYPES)


@each_type
def test_while_one_owner_holds_anything_no_other_gets_anything(slot: Slot) -> None:
    slot.send(b"a", b"b", b"c")
    first, second = slot.take(1, "A"), slot.take(1, "A")
    before = slot.snapshot()
    assert slot.take(1, "B").status == "busy"
    after = slot.snapshot()
    assert after[slot.keys.control].pop(b"sleeping_until") == b"9007199254740992"
    assert after == before
    slot.commit(first.receipt, [first.deliveries[0].member])
    assert slot.take(1, "B").status == "busy"
    slot.commit(second.receipt, [second.deliveries[0].member])
    assert slot.take(1, "B").status == "ok"
    assert slot.take(1, "A").status == "busy"


@each_type
@pytest.mark.parametrize("size", [1, 2, 40])
def test_what_is_delivered_alone_is_committed_without_naming_it(slot: Slot, size: int) -> None:
    slot.send(*(b"%d" % n for n in range(size)))
    alone = slot.take(40)
    assert (alone.is_alone, len(alone.deliveries)) == (True, size)
    slot.send(b"0", b"later")
    before = slot.snapshot()
    assert slot.commit_delivery(alone.receipt, size + 1) == []
    assert slot.snapshot() == before
    assert slot.commit_delivery(alone.receipt, size) == ["ok"] * size
    assert (slot.zset("prepare"), slot.hash("inflight"), slot.counted("committed")) == ({}, {}, size)
    assert {each.member for each in slot.take(40).deliveries} == {b"0", b"later"}


@each_type
def test_what_is_delivered_from_a_slot_with_failures_is_not_alone(slot: Slot) -> None:
    slot.send(b"failing")
    slot.fail_one(b"failing")
    slot.send(b"other")
    other = slot.take(1)
    assert ([each.member for each in other.deliveries], other.is_alone) == ([b"other"], False)
    assert slot.commit_delivery(other.receipt, 1) == []


@each_type
@pytest.mark.parametrize("size", [1, 40])
def test_what_is_delivered_beside_another_delivery_is_not_alone(slot: Slot, size: int) -> None:
    slot.send(b"first")
    first = slot.take(1)
    slot.send(*(b"%d" % n for n in range(size)))
    assert (slot.take(40).is_alone, first.is_alone) == (False, True)
    before = slot.snapshot()
    assert slot.commit_delivery(first.receipt, size + 1) == []
    assert slot.snapshot() == before


@slot_of_each(TYPES, backoff=CONSTANT)
@pytest.mark.parametrize("end", ["commit", "fail", "release", "reject", "time_out"])
def test_every_end_of_the_last_delivery_opens_the_gate(slot: Slot, end: str) -> None:
    slot.send(b"a", b"b")
    receipt, delivery = slot.take_one("A")
    if end == "time_out":
        slot.clock.advance(31)
        slot.time_out()
    elif end in ("fail", "reject"):
        getattr(slot, end)(receipt, delivery.member)
    else:
        getattr(slot, end)(receipt, [delivery.member])
    assert slot.take(1, "B").status == "ok"


@slot_of_each(TYPES, serial=False, max_prepared=3)
def test_a_topic_without_a_gate_gives_to_everybody_up_to_max_prepared(slot: Slot) -> None:
    slot.send(*(b"%d" % n for n in range(6)))
    assert len(slot.take(2, "A").deliveries) == 2
    answer = slot.take(2, "B")
    assert len(answer.deliveries) == 1
    assert slot.take(2, "C").status == "busy"
    slot.commit(answer.receipt, [answer.deliveries[0].member])
    assert len(slot.take(9, "C").deliveries) == 1


@slot_of_each(TYPES, max_prepared=1)
def test_one_owner_may_hold_any_number_of_a_serial_slot(slot: Slot) -> None:
    slot.send(b"a", b"b", b"c")
    assert len(slot.take(2).deliveries) == 2
    assert len(slot.take(2).deliveries) == 1


@each_type
def test_an_open_claim_shuts_the_gate_for_all_but_the_slots_owner(slot: Slot) -> None:
    slot.send(b"a", b"b")
    receipt, delivery = slot.take_one("A")
    slot.commit(receipt, [delivery.member])
    slot.keyspace.zadd(slot.keys.claimants, b"spark", slot.now_ms + 60_000)
    assert slot.take(1, "B").status == "busy"
    assert slot.take(1, "A").status == "ok"


# --- epochs


def test_epochs_rise_and_an_old_one_is_fenced(make_slot: MakeSlot) -> None:
    slot = make_slot()
    slot.send(b"a")
    assert [slot.acquire(), slot.acquire(), slot.acquire()] == [1, 2, 3]
    before = slot.snapshot("fenced")
    assert slot.take(epoch=1).status == slot.take(epoch=2).status == "fenced"
    assert slot.snapshot("fenced") == before
    assert slot.counted("fenced") == 2
    assert slot.take(epoch=3).status == "ok"


def test_without_an_epoch_nobody_is_fenced(make_slot: MakeSlot) -> None:
    slot = make_slot()
    slot.send(b"a")
    slot.acquire()
    assert slot.take(epoch=None).status == "ok"


def test_an_epoch_counts_where_nobody_has_acquired(make_slot: MakeSlot) -> None:
    slot = make_slot()
    slot.send(b"a")
    assert slot.take(epoch=0).status == "ok"


def test_a_fenced_owner_still_ends_what_it_holds(make_slot: MakeSlot) -> None:
    slot = make_slot()
    slot.send(b"a", b"b")
    slot.acquire()
    answer = slot.take(2, "A", epoch=1)
    slot.acquire()
    assert slot.commit(answer.receipt, [b"a"]) == ["ok"]
    assert slot.release(answer.receipt, [b"b"]) == ["ok"]


# --- lost replies


@kinds
@pytest.mark.parametrize("identity", ["body", "key"])
def test_after_a_lost_reply_of_prepare_the_owner_is_told_what_it_holds(
    make_slot: MakeSlot, kind: TopicType, identity: str
) -> None:
    slot = make_slot(kind, identity=identity, backoff=NO_BACKOFF)
    slot.send(b"a", b"b")
    slot.acquire()
    receipt, _ = slot.take_one()
    slot.fail(receipt, *slot.zset("prepare"))
    answer = slot.take(5, "A", epoch=1)
    slot.remove([b"b"])
    assert slot.acquire() == 2
    assert slot.take(5, "A", epoch=1).status == "fenced"
    held = slot.list_held("A")
    assert {one.delivery for one in held} == set(answer.deliveries)
    assert {one.receipt for one in held} == {answer.receipt}
    assert {one.delivery.member: one.marked for one in held} == {b"a": False, b"b": True}
    assert slot.commit(answer.receipt, [b"a", b"b"]) == ["ok", "ok"]


def test_held_is_refused_to_others_while_anything_is_in_flight(make_slot: MakeSlot) -> None:
    slot = make_slot()
    assert slot.list_held("A") == []
    slot.send(b"a")
    receipt, _ = slot.take_one("A")
    assert slot.list_held("B") is None
    slot.commit(receipt, [b"a"])
    assert slot.list_held("B") == [] == slot.list_held("A")


def test_held_goes_page_by_page(make_slot: MakeSlot) -> None:
    slot = make_slot()
    slot.send(*(b"%04d" % n for n in range(25)))
    slot.take(25)
    pages = [slot.list_held("A", offset, 10) for offset in (0, 10, 20, 30)]
    assert [len(page) for page in pages] == [10, 10, 5, 0]
    assert len({one.delivery.member for page in pages for one in page}) == 25


# --- receipts


@slot_of_each(TYPES, backoff=NO_BACKOFF)
def test_receipts_rise_with_every_prepare_and_not_with_anything_else(slot: Slot, clock: Clock) -> None:
    slot.send(b"a", b"b")
    first = slot.take(2).receipt
    assert first == clock() + 1
    assert slot.take(2).receipt == 0
    slot.fail(first, b"a"), slot.release(first, [b"b"])
    assert slot.take(2).receipt == first + 1
    slot.commit(first + 1, [b"a", b"b"])
    slot.send(b"a")
    assert slot.take(2).receipt == first + 2
    slot.send(b"b")
    slot.commit(first + 2, [b"a"])
    clock.advance("0.002ms")
    assert slot.take(2).receipt == first + 3
    clock.advance("0.004ms")
    slot.commit(first + 3, [b"b"])
    slot.send(b"a")
    assert slot.take(2).receipt == clock() + 1 == first + 6


@each_type
@pytest.mark.parametrize("lost", [b"deliveries", None])
def test_receipts_go_on_above_those_that_a_fail_over_has_lost(
    slot: Slot, clock: Clock, lost: bytes | None
) -> None:
    slot.send(b"a")
    before, _ = slot.take_one()
    slot.commit(before, [b"a"])
    kept = slot.hash("control")
    slot.send(b"a")
    gone, _ = slot.take_one()
    slot.commit(gone, [b"a"])
    # The new primary has not heard of the last delivery, or of none at all.
    slot.keyspace.hset(slot.keys.control, b"deliveries", kept[b"deliveries"] if lost is None else b"0")
    clock.advance((gone - clock() + 1) / 1_000_000)
    slot.send(b"a")
    assert slot.take_one()[0] > gone > before


@each_type
def test_receipts_rise_while_the_clock_goes_back(slot: Slot, clock: Clock) -> None:
    slot.send(b"a", b"b")
    first, _ = slot.take_one()
    slot.release(first, [b"a"]), slot.release(first, [b"b"])
    clock.advance(-0.0005)
    slot.send(b"c")
    assert slot.take_one()[0] == first + 1


@slot_of_each(TYPES, backoff=NO_BACKOFF)
@pytest.mark.parametrize("event", ["commit", "fail", "reject", "release", "extend"])
@pytest.mark.parametrize("off_by", [-1, 1, 10**15])
def test_a_receipt_other_than_the_deliverys_changes_nothing(slot: Slot, event: str, off_by: int) -> None:
    slot.send(b"a")
    for _ in range(2):
        receipt, _ = slot.take_one()
        slot.release(receipt, [b"a"])
    stale = slot.take_one()[0] + off_by
    before = slot.snapshot("stale")
    call = getattr(slot, event)
    words = call(stale, b"a", b"x") if event in ("fail", "reject") else call(stale, [b"a", b"x"])
    assert words == ["stale", "stale"]
    assert slot.snapshot("stale") == before
    assert slot.counted("stale") == 2


def test_a_receipt_is_not_mistaken_for_one_that_begins_or_ends_like_it(make_slot: MakeSlot) -> None:
    slot = make_slot()
    slot.send(b"a")
    receipt, _ = slot.take_one()
    for like in (receipt // 10, receipt % 10**12, receipt * 10, int(f"2{receipt}"), 0):
        assert slot.commit(like, [b"a"]) == ["stale"]
    assert slot.commit(receipt, [b"a"]) == ["ok"]


@slot_of_each(TYPES, serial=False)
def test_a_mixed_call_ends_what_is_its_own_and_leaves_the_rest(slot: Slot) -> None:
    slot.send(b"a", b"b")
    first, second = slot.take(1, "A"), slot.take(1, "B")
    mine, other = first.deliveries[0].member, second.deliveries[0].member
    assert slot.commit(first.receipt, [other, mine, b"x"]) == ["stale", "ok", "stale"]
    assert slot.where(mine) == "-" and slot.where(other) == "F"


def test_after_a_time_out_the_old_receipt_is_stale_although_the_message_runs_again(
    make_slot: MakeSlot, clock: Clock
) -> None:
    slot = make_slot(backoff=NO_BACKOFF)
    slot.send(b"a")
    old, _ = slot.take_one("A")
    clock.advance(31)
    new, delivery = slot.take_one("B")
    assert (delivery.retries_left, new) == (15, clock())
    assert slot.commit(old, [b"a"]) == slot.extend(old, [b"a"]) == slot.fail(old, b"a") == ["stale"]
    assert slot.commit(new, [b"a"]) == ["ok"]


def test_no_call_takes_more_than_a_batch(make_slot: MakeSlot) -> None:
    slot = make_slot()
    slot.send(*(b"%d" % n for n in range(BATCH)), score=100)
    slot.send(b"more")
    assert len(slot.take(10**6).deliveries) == BATCH
    assert len(slot.take(0).deliveries) == 1


def test_the_keys_of_a_slot_share_its_hash_tag(make_slot: MakeSlot) -> None:
    slot = make_slot()
    assert all(b"{" + slot.keys.store + b"}" in key for key in slot.keys[1:])
    assert len(set(slot.keys)) == len(SlotKeys._fields)
