"""Each tick of a schedule becomes one message, however often it is written, and can be taken back until it is taken."""

from __future__ import annotations

from typing import Any

import pytest

from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ServerRefused, SlotMoved
from django_rmq.testing import Clock
from tests.contract.slots import TIME_TYPES, Make, Slot

time_kinds = pytest.mark.parametrize("kind", TIME_TYPES)


def keyed(make_slot: Make, kind: TopicType = TopicType.FIXED_TIME, **options: Any) -> Slot:
    return make_slot(kind, identity="key", **options)


def tick(slot: Slot, instant: int, generation: int = 1, body: bytes = b"body") -> Any:
    return slot.put_tick("nightly", generation, instant, b"nightly@%d" % instant, slot.envelope(body))


def retract(slot: Slot, instant: int, generation: int = 2) -> Any:
    return slot.retract("nightly", generation, instant, b"nightly@%d" % instant)


@time_kinds
def test_a_tick_is_one_message_that_is_due_at_its_instant(make_slot: Make, kind: TopicType) -> None:
    slot = keyed(make_slot, kind)
    instant = slot.now_ms + 5_000
    assert [tick(slot, instant), tick(slot, instant)] == ["stored", "known"]
    slot.clock.advance("4999ms")
    assert slot.take().status == "empty"
    slot.clock.advance("1ms")
    receipt, delivery = slot.take_one()
    assert delivery.member == b"nightly@%d" % instant
    assert delivery.envelope == slot.envelope()
    assert delivery.retries_left == slot.topic.max_retries
    slot.commit(receipt, [delivery.member])
    assert tick(slot, instant) == "known"
    assert slot.where(delivery.member) == "-"


def test_an_earlier_tick_is_not_written_after_a_later_one(make_slot: Make) -> None:
    slot = keyed(make_slot)
    now = slot.now_ms
    assert [tick(slot, now + 2), tick(slot, now + 1), tick(slot, now + 3)] == ["stored", "known", "stored"]
    assert set(slot.zset("store").values()) == {now + 2, now + 3}


def test_schedules_of_one_slot_do_not_know_each_other(make_slot: Make) -> None:
    slot = keyed(make_slot)
    assert tick(slot, slot.now_ms + 9) == "stored"
    assert slot.put_tick("hourly", 1, slot.now_ms + 5, b"hourly@5", slot.envelope()) == "stored"
    assert len(slot.zset("store")) == 2


def test_a_tick_wakes_who_sleeps_past_it(make_slot: Make) -> None:
    slot = keyed(make_slot)
    slot.acquire()
    slot.take()
    with slot.woken():
        tick(slot, slot.now_ms)


def test_a_tick_of_an_earlier_generation_is_refused(make_slot: Make) -> None:
    slot = keyed(make_slot)
    assert tick(slot, slot.now_ms + 1, generation=3) == "stored"
    assert tick(slot, slot.now_ms + 2, generation=2) == "stale"
    assert tick(slot, slot.now_ms + 1, generation=4) == "stored"
    assert len(slot.zset("store")) == 1


def test_a_tick_follows_its_topic_to_another_slot_count_unless_it_was_written_before(
    make_slot: Make,
) -> None:
    slot = keyed(make_slot)
    tick(slot, slot.now_ms + 1)
    other = slot.with_topic(slots=2)
    assert tick(other, slot.now_ms + 1) == "known"
    with pytest.raises(SlotMoved):
        tick(other, slot.now_ms + 2)


def test_a_tick_that_finds_its_slot_full_is_written_later(make_slot: Make) -> None:
    slot = keyed(make_slot, max_backlog=1)
    slot.send(b"other")
    assert [tick(slot, slot.now_ms + 1), tick(slot, slot.now_ms + 1)] == ["full", "full"]
    slot.remove([b"other"])
    assert [tick(slot, slot.now_ms + 1), tick(slot, slot.now_ms + 1)] == ["stored", "known"]


@pytest.mark.parametrize("kind", [TopicType.PRIORITY, TopicType.FIFO])
def test_a_topic_without_due_times_has_no_ticks(make_slot: Make, kind: TopicType) -> None:
    slot = keyed(make_slot, kind)
    with pytest.raises(ServerRefused, match="out of bounds"):
        tick(slot, slot.now_ms)
    # Its schedule can still go, after the type was changed.
    assert retract(slot, slot.now_ms) == "unwritten"
    for instant in (0, 999, 10**15):
        with pytest.raises(ServerRefused, match="out of bounds"):
            tick(keyed(make_slot), instant)


@time_kinds
def test_a_tick_that_waits_is_taken_back_with_its_body_and_late_writers_are_refused(
    make_slot: Make, kind: TopicType
) -> None:
    slot = keyed(make_slot, kind)
    instant = slot.now_ms + 5
    tick(slot, instant)
    assert [retract(slot, instant), retract(slot, instant)] == ["removed", "removed"]
    assert (slot.zset("store"), slot.hash("body")) == ({}, {})
    assert [tick(slot, instant), tick(slot, instant + 1)] == ["stale", "stale"]
    assert [tick(slot, instant, 2), tick(slot, instant, 2)] == ["stored", "known"]


def test_a_tick_that_was_never_written_is_fenced(make_slot: Make) -> None:
    slot = keyed(make_slot)
    assert [retract(slot, slot.now_ms), retract(slot, slot.now_ms)] == ["unwritten", "unwritten"]
    assert tick(slot, slot.now_ms) == "stale"
    assert slot.zset("store") == {}


def test_what_was_taken_is_not_taken_back(make_slot: Make, clock: Clock) -> None:
    slot = keyed(make_slot)
    instant = slot.now_ms
    tick(slot, instant)
    receipt, delivery = slot.take_one()
    assert [retract(slot, instant), retract(slot, instant)] == ["written", "written"]
    assert slot.where(delivery.member) == "F"
    slot.fail(receipt, delivery.member)
    assert retract(slot, instant, 3) == "written"
    assert slot.where(delivery.member) == "T"
    clock.advance(2)
    slot.promote()
    assert retract(slot, instant, 4) == "written"
    assert slot.where(delivery.member) == "w"


def test_a_slot_that_a_tick_has_left_does_not_count_for_what_is_planned_after_a_change(
    make_slot: Make,
) -> None:
    """A re-slotting took it to another slot, and there it was taken back."""
    slot = keyed(make_slot)
    instant = slot.now_ms + 5
    tick(slot, instant)
    slot.remove([b"nightly@%d" % instant])
    assert retract(slot, instant) == "written"
    assert tick(slot, instant) == "stale"
    with pytest.raises(SlotMoved):
        tick(slot.with_topic(slots=2), instant, 2)
    assert [tick(slot, instant, 2), tick(slot, instant, 2)] == ["stored", "known"]


def test_a_retraction_remembers_what_the_one_before_did(make_slot: Make) -> None:
    """A worker died between the two, and the schedule was changed again."""
    slot = keyed(make_slot)
    instant = slot.now_ms + 5
    tick(slot, instant)
    assert [retract(slot, instant, 2), retract(slot, instant, 3)] == ["removed", "removed"]
    assert retract(slot, instant + 1, 4) == "unwritten"


def test_a_late_retraction_leaves_the_tick_of_a_later_generation(make_slot: Make) -> None:
    slot = keyed(make_slot)
    instant = slot.now_ms + 5
    tick(slot, instant, 3)
    assert retract(slot, instant, 2) == "written"
    assert retract(slot, instant, 3) == "written"
    assert len(slot.zset("store")) == 1


def test_a_retraction_forgets_the_failures_of_what_was_replayed(make_slot: Make) -> None:
    slot = keyed(make_slot)
    instant = slot.now_ms
    tick(slot, instant)
    receipt, delivery = slot.take_one()
    slot.fail(receipt, delivery.member)
    slot.reschedule([instant], [delivery.member])
    assert slot.hash("failures")
    retract(slot, instant)
    assert slot.hash("failures") == {} or slot.where(delivery.member) != "-"
