"""MAX_RATE per slot: a slot delivers no more than its rate, and says when there is more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_rmq.core.model.topic import TopicType
from django_rmq.testing import Clock
from tests.contract.slots import TYPES, Slot, slot_of_each

MakeSlot = Callable[..., Slot]
kinds = pytest.mark.parametrize("kind", TYPES)


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
def test_each_slot_has_a_rate_of_its_own(make_slot: MakeSlot, clock: Clock, kind: TopicType) -> None:
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
