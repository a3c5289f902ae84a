"""A slot of a topic that nobody uses any more is forgotten, unless it holds messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_rmq.core.model.topic import TopicType
from tests.contract.slots import Slot

MakeSlot = Callable[..., Slot]
A = b"a"


def waiting(slot: Slot) -> None:
    slot.send(A)


def in_flight(slot: Slot) -> None:
    slot.send(A)
    slot.take_one()


def resting(slot: Slot) -> None:
    slot.send(A)
    slot.fail_one(A, delay_ms=60_000)


def dead(slot: Slot) -> None:
    slot.send(A)
    slot.kill(A)


def claimed(slot: Slot) -> None:
    slot.send(A)
    assert slot.claim("spark", 1, 60_000, 100).taken == 1


@pytest.mark.parametrize("hold", [waiting, in_flight, resting, dead, claimed])
@pytest.mark.parametrize("identity", ["body", "key"])
def test_a_slot_that_holds_messages_is_not_forgotten(
    make_slot: MakeSlot, hold: Callable[[Slot], None], identity: str
) -> None:
    slot = make_slot(TopicType.FIXED_TIME, identity=identity)
    hold(slot)
    before = slot.snapshot()
    assert slot.retire() == "holds"
    assert slot.snapshot() == before


@pytest.mark.parametrize("identity", ["body", "key"])
def test_an_empty_slot_leaves_nothing_behind(make_slot: MakeSlot, identity: str) -> None:
    slot = make_slot(TopicType.FIXED_TIME, identity=identity)
    slot.acquire()
    slot.send(A)
    receipt, _ = slot.take_one()
    slot.commit(receipt, [A])
    assert slot.snapshot()
    assert slot.retire() == "retired"
    assert not slot.snapshot()
    assert slot.retire() == "retired"
