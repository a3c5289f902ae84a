"""Who takes messages, one owner at a time: acquired slots, the gate, epochs, claims, MAX_PREPARED, MAX_RATE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from django_rmq.core.model.bounds import BATCH, NEVER
from django_rmq.core.model.keys import SlotKeys
from django_rmq.core.model.replies import Acquired
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ServerRefused, WrongType
from django_rmq.testing import Clock
from tests.contract.slots import BOTH, CONSTANT, NO_BACKOFF, TYPES, Make, Slot, each_type, slot_of_each

kinds = pytest.mark.parametrize("kind", TYPES)


def begin(slot: Slot) -> Acquired:
    [found] = slot.broker.acquire_slots(slot.topic, [slot.index])
    assert isinstance(found, Acquired)
    return found


@kinds
def test_what_is_empty_is_left_as_an_acquire_and_an_empty_prepare_would(
    make_slot: Make, kind: TopicType
) -> None:
    one, other = make_slot(kind), make_slot(kind)
    for _ in range(2):
        epoch = other.acquire()
        assert other.take(epoch=epoch).status == "empty"
        assert begin(one) == Acquired(epoch, True)
        assert one.hash("control") == other.hash("control")
    assert one.snapshot().keys() == {one.keys.control, other.keys.control}


@each_type
def test_who_was_let_sleep_is_woken_by_the_next_send(slot: Slot) -> None:
    assert begin(slot).is_asleep
    with slot.woken():
        slot.send(b"a")
    assert slot.take(epoch=1).status == "ok"


@slot_of_each(TYPES, backoff=NO_BACKOFF)
@pytest.mark.parametrize("what", ["waits", "waits for its time", "rests", "runs", "is claimed"])
def test_nobody_sleeps_where_anything_is(slot: Slot, what: str) -> None:
    if what == "waits for its time":
        slot.send(b"a", score=50 if slot.topic.type is TopicType.PRIORITY else slot.now_ms + 60_000)
    else:
        slot.send(b"a")
    if what in ("rests", "runs"):
        receipt, _ = slot.take_one()
        if what == "rests":
            slot.fail(receipt, b"a", delay_ms=60_000)
    elif what == "is claimed":
        slot.claim("spark", 1, 60_000, 10)
    before = slot.hash("control")
    assert begin(slot) == Acquired(1, False)
    assert slot.hash("control") == {**before, b"epoch": b"1"}


def test_nobody_sleeps_in_a_slot_that_is_paused_or_shut_or_of_another_count(make_slot: Make) -> None:
    paused, shut, moved = (make_slot(TopicType.FIXED_TIME) for _ in range(3))
    paused.pause()
    shut.shut(1)
    moved.broker.configure(replace(moved.topic, slots=16), 0)
    for slot in (paused, shut, moved):
        before = slot.hash("control")
        assert begin(slot) == Acquired(1, False)
        assert slot.hash("control") == {**before, b"epoch": b"1"}


def test_a_slot_keeps_a_time_out_and_retries_of_its_own(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIXED_TIME, timeout=7, max_retries=3)
    slot.configure()
    assert begin(slot.with_topic(timeout=99, max_retries=9)).is_asleep
    control = slot.hash("control")
    assert (control[b"timeout"], control[b"max_retries"]) == (b"7", b"3")


def test_older_prepares_are_fenced_in_every_slot(make_slot: Make) -> None:
    slots = [make_slot(TopicType.FIXED_TIME, name="topic", index=i) for i in range(1, 4)]
    for _ in range(2):
        answers = slots[0].broker.acquire_slots(slots[0].topic, [1, 2, 3])
    assert answers == [Acquired(2, True)] * 3
    assert [slot.take(epoch=1).status for slot in slots] == ["fenced"] * 3


def test_one_slot_that_holds_something_keeps_no_other_awake(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIXED_TIME, name="topic", index=9, slots=64)
    slot.send(b"a")
    answers = slot.broker.acquire_slots(slot.topic, range(64))
    assert answers == [Acquired(1, i != 9) for i in range(64)]


def test_a_slot_with_a_foreign_control_is_left_to_acquire(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIXED_TIME, name="topic", index=1)
    with slot.foreign("control"):
        found = slot.broker.acquire_slots(slot.topic, [0, 1, 2])
        assert found == [Acquired(1, True), Acquired(None, False), Acquired(1, True)]
        with pytest.raises(WrongType, match="control"):
            slot.acquire()


def test_a_slot_with_a_foreign_store_is_looked_at(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIXED_TIME)
    with slot.foreign("store"):
        assert begin(slot) == Acquired(1, False)


def test_a_thousand_slots_are_acquired_at_once_and_no_more(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIXED_TIME, name="topic", slots=2048, index=1)
    assert slot.broker.acquire_slots(slot.topic, range(1_024)) == [Acquired(1, True)] * 1_024
    if type(slot.broker).__name__ != "ClusterBroker":
        with pytest.raises(ServerRefused):
            slot.broker.acquire_slots(slot.topic, range(1_025))


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
    slot.end(end, receipt, delivery.member)
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


def test_epochs_rise_and_an_old_one_is_fenced(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(b"a")
    assert [slot.acquire(), slot.acquire(), slot.acquire()] == [1, 2, 3]
    before = slot.snapshot("fenced")
    assert slot.take(epoch=1).status == slot.take(epoch=2).status == "fenced"
    assert slot.snapshot("fenced") == before
    assert slot.counted("fenced") == 2
    assert slot.take(epoch=3).status == "ok"


def test_without_an_epoch_nobody_is_fenced(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(b"a")
    slot.acquire()
    assert slot.take(epoch=None).status == "ok"


def test_an_epoch_counts_where_nobody_has_acquired(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(b"a")
    assert slot.take(epoch=0).status == "ok"


def test_a_fenced_owner_still_ends_what_it_holds(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(b"a", b"b")
    slot.acquire()
    answer = slot.take(2, "A", epoch=1)
    slot.acquire()
    assert slot.commit(answer.receipt, [b"a"]) == ["ok"]
    assert slot.release(answer.receipt, [b"b"]) == ["ok"]


# --- lost replies


@slot_of_each(TYPES, identity=BOTH, backoff=NO_BACKOFF)
def test_after_a_lost_reply_of_prepare_the_owner_is_told_what_it_holds(slot: Slot) -> None:
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


def test_held_is_refused_to_others_while_anything_is_in_flight(make_slot: Make) -> None:
    slot = make_slot()
    assert slot.list_held("A") == []
    slot.send(b"a")
    receipt, _ = slot.take_one("A")
    assert slot.list_held("B") is None
    slot.commit(receipt, [b"a"])
    assert slot.list_held("B") == [] == slot.list_held("A")


def test_held_goes_page_by_page(make_slot: Make) -> None:
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
def test_receipts_go_on_above_those_that_a_fail_over_has_lost(slot: Slot, lost: bytes | None) -> None:
    slot.send(b"a")
    before, _ = slot.take_one()
    slot.commit(before, [b"a"])
    kept = slot.hash("control")
    slot.send(b"a")
    gone, _ = slot.take_one()
    slot.commit(gone, [b"a"])
    # The new primary has not heard of the last delivery, or of none at all.
    slot.keyspace.hset(slot.keys.control, b"deliveries", kept[b"deliveries"] if lost is None else b"0")
    slot.clock.advance((gone - slot.clock() + 1) / 1_000_000)
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


def test_a_receipt_is_not_mistaken_for_one_that_begins_or_ends_like_it(make_slot: Make) -> None:
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


def test_after_a_time_out_the_old_receipt_is_stale_although_the_message_runs_again(make_slot: Make) -> None:
    slot = make_slot(backoff=NO_BACKOFF)
    slot.send(b"a")
    old, _ = slot.take_one("A")
    slot.clock.advance(31)
    new, delivery = slot.take_one("B")
    assert (delivery.retries_left, new) == (15, slot.clock())
    assert slot.commit(old, [b"a"]) == slot.extend(old, [b"a"]) == slot.fail(old, b"a") == ["stale"]
    assert slot.commit(new, [b"a"]) == ["ok"]


def test_no_call_takes_more_than_a_batch(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(*(b"%d" % n for n in range(BATCH)), score=100)
    slot.send(b"more")
    assert len(slot.take(10**6).deliveries) == BATCH
    assert len(slot.take(0).deliveries) == 1


def test_the_keys_of_a_slot_share_its_hash_tag(make_slot: Make) -> None:
    slot = make_slot()
    assert all(b"{" + slot.keys.store + b"}" in key for key in slot.keys[1:])
    assert len(set(slot.keys)) == len(SlotKeys._fields)


@slot_of_each(TYPES, slot_rate=50.0)
def test_a_slot_delivers_no_more_than_its_rate(slot: Slot, clock: Clock) -> None:
    slot.send(*(b"%02d" % n for n in range(20)))
    assert len(slot.take(20).deliveries) == 5  # what gathers in a tenth of a second
    answer = slot.take(20)
    assert (answer.status, answer.next_due) == ("busy", clock() // 1_000 + 20)
    clock.advance(0.04)
    assert len(slot.take(20).deliveries) == 2
    assert slot.take(20).status == "busy"


@slot_of_each(TYPES, slot_rate=0.5)
def test_a_slot_whose_rate_is_spent_says_when_there_is_more(slot: Slot, clock: Clock) -> None:
    slot.send(b"a", b"b")
    answer = slot.take(20)
    assert (len(answer.deliveries), answer.next_due) == (1, clock() // 1_000 + 2_000)
    clock.advance(1.999)
    assert slot.take(20).status == "busy"
    clock.advance(0.001)
    assert len(slot.take(20).deliveries) == 1


@kinds
def test_each_slot_has_a_rate_of_its_own(make_slot: Make, clock: Clock, kind: TopicType) -> None:
    first = make_slot(kind, slot_rate=1.0, name="paced", slots=16)
    second = make_slot(kind, slot_rate=1.0, name="paced", index=3)
    for slot in (first, second):
        slot.send(b"a", b"b")
        assert len(slot.take(20).deliveries) == 1


@slot_of_each(TYPES, slot_rate=10.0)
def test_a_clock_that_was_set_back_does_not_stop_a_paced_slot(slot: Slot, clock: Clock) -> None:
    clock.advance(3_600)
    slot.send(b"a", b"b")
    assert len(slot.take(20).deliveries) == 1
    clock.advance(-1_800)
    slot.send(b"c")
    assert len(slot.take(20).deliveries) == 1


all_kinds = pytest.mark.parametrize("kind", [*TYPES, TopicType.FIFO])
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


@all_kinds
def test_it_takes_no_more_messages_and_bytes_than_it_may(make_slot: Make, kind: TopicType) -> None:
    slot = make_slot(kind)
    slot.send(A, B, b"c")
    assert len(members(slot, 2)) == 2
    slot = make_slot(kind)
    slot.send(b"a" * 60, b"b" * 60, b"c" * 60)
    assert len(members(slot, max_bytes=130)) == 2
    slot = make_slot(kind)
    slot.send(b"a" * 60)
    assert len(members(slot, max_bytes=1)) == 1


def test_only_as_many_come_as_others_may_take_beside_each_other(make_slot: Make) -> None:
    slot = make_slot(TopicType.RANGE_MERGE, serial=False, max_prepared=2)
    slot.send(A, B, b"c")
    assert len(members(slot)) == 2


def test_who_fills_the_room_of_a_slot_does_not_sleep(make_slot: Make) -> None:
    """It may have been given less than there is."""
    slot = make_slot(TopicType.RANGE_MERGE, serial=False, max_prepared=1)
    slot.send(A)
    prepared = slot.take()
    assert [delivery.member for delivery in prepared.deliveries] == [A]
    assert prepared.sleeping_until is None
    assert b"sleeping_until" not in slot.hash("control")


def test_the_highest_priority_comes_first(make_slot: Make) -> None:
    slot = make_slot(TopicType.PRIORITY)
    slot.send_replace([50, 90, 70], [A, B, b"c"], [])
    assert members(slot) == [B, b"c", A]


def test_a_slot_of_priorities_that_is_emptied_waits_no_longer(make_slot: Make) -> None:
    slot = make_slot(TopicType.PRIORITY)
    slot.send(A)
    assert slot.hash("control")[b"undrained_since"]
    assert members(slot) == [A]
    assert b"undrained_since" not in slot.hash("control")


@slot_of_each([TopicType.RANGE_MERGE, TopicType.FIXED_TIME, TopicType.PRIORITY])
def test_a_retry_in_store_has_the_deliveries_that_its_score_tells(slot: Slot) -> None:
    slot.zadd(A, 3)
    assert [delivery.retries_left for delivery in slot.take().deliveries] == [2]


def test_the_retries_of_the_slot_are_told_where_the_caller_has_others(make_slot: Make) -> None:
    slot = make_slot(TopicType.RANGE_MERGE)
    slot.send(A)
    slot.commit(slot.take().receipt, [A])
    slot.send(B)
    assert [each.retries_left for each in slot.with_topic(max_retries=5).take().deliveries] == [16]
