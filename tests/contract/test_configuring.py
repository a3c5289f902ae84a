"""pause, configure, and what a slot settles on first use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contract.slots import TYPES, Slot, each_type, slot_of_each

MakeSlot = Callable[..., Slot]


@pytest.mark.parametrize(("before", "after"), [(16, 20), (3, 17), (20, 16), (20, 21)])
@pytest.mark.parametrize("prepared", [True, False])
def test_the_retries_of_a_priority_topic_change_only_where_no_live_score_would_read_otherwise(
    make_slot: MakeSlot, before: int, after: int, prepared: bool
) -> None:
    slot = make_slot(max_retries=before)
    slot.send(b"a", score=21)
    if prepared:
        receipt, _ = slot.take_one()
        slot.release(receipt, [b"a"])
    other = slot.with_topic(max_retries=after)
    assert other.configure(apply=False) == "refused"
    assert other.configure() == "refused"
    assert slot.hash("control")[b"max_retries"] == b"%d" % before
    slot.purge("store")
    assert other.configure(apply=False) == "ok"
    assert slot.hash("control")[b"max_retries"] == b"%d" % before
    assert other.configure() == "ok"
    assert slot.hash("control")[b"max_retries"] == b"%d" % after


@slot_of_each(TYPES, max_retries=16)
def test_retries_up_to_sixteen_and_time_outs_change_while_messages_wait(slot: Slot) -> None:
    slot.send(b"a")
    assert slot.with_topic(max_retries=3, timeout=7).configure() == "ok"
    control = slot.hash("control")
    assert (control[b"max_retries"], control[b"timeout"]) == (b"3", b"7")
    assert slot.take_one()[1].retries_left == 3


@each_type
def test_a_paused_slot_hands_out_nothing_and_takes_everything_else(slot: Slot) -> None:
    slot.send(b"a", b"b")
    receipt, delivery = slot.take_one()
    assert slot.pause() == "paused"
    assert slot.hash("control")[b"paused"] == b"1"
    assert slot.take().status == "paused"
    assert slot.take(owner="B").status == "busy" or not slot.topic.serial
    assert slot.send(b"c")[0].status == "stored"
    assert slot.extend(receipt, [delivery.member]) == ["ok"]
    assert slot.commit(receipt, [delivery.member]) == ["ok"]
    assert slot.take(owner="B").status == "paused"
    assert slot.pause(False) == "resumed"
    assert len(slot.take(owner="B").deliveries) == 2


@slot_of_each(TYPES, timeout=7, max_retries=5, slots=4)
def test_the_first_prepare_settles_time_out_retries_and_slots(slot: Slot) -> None:
    slot.take()
    control = slot.hash("control")
    assert (control[b"timeout"], control[b"max_retries"], control[b"slots"]) == (b"7", b"5", b"4")
    slot.with_topic(timeout=9, max_retries=6).take()
    assert slot.hash("control") == control


def test_adopting_books_what_strangers_sent_once(make_slot: MakeSlot) -> None:
    slot = make_slot()
    slot.zadd(b"a", 50)
    slot.zadd(b"b", 50)
    assert slot.audit_ledger().live_drift == 2
    assert slot.adopt(2, 1) == "changed"
    assert slot.adopt(2, 0) == "ok"
    assert slot.adopt(2, 0) == "changed"
    assert slot.audit_ledger().balanced
    slot.strangers = 0
