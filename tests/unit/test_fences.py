"""When a slot that another worker has acquired is ours again."""

from __future__ import annotations

from typing import Any

from django_rmq.core.clock import uptime
from django_rmq.core.consumer.slot_acquisition import FencedSlots
from django_rmq.core.consumer.slots import ConsumedSlot, SlotState
from django_rmq.core.coordination import StaticCoordinator, Worker
from django_rmq.core.model.topic import Topic, TopicType
from tests.support.brokers import OracleBroker

TOPIC = Topic("work", TopicType.RANGE_MERGE, slots=2, timeout=30)


def fences() -> FencedSlots:
    broker: Any = OracleBroker()
    return FencedSlots(broker, "me", lambda: float("-inf"))


def test_only_a_later_question_gives_a_fenced_slot_back() -> None:
    fenced = fences()
    before, slot = uptime(), ConsumedSlot(TOPIC, 0, 0, SlotState.ACQUIRED)
    fenced.add(slot)
    assert fenced and slot.state is SlotState.FENCED and slot.fenced_at >= before
    assert fenced.ours_at(before) == fenced.ours_at(float("-inf")) == []
    assert fenced.ours_at(uptime() + 1) == [slot]
    fenced.remove(slot)
    assert not fenced
    assert fenced.ours_at(uptime() + 1) == []


def test_a_coordinator_that_asks_nobody_confirms_nothing() -> None:
    worker = Worker("me", "host", 1, 0.0, 1, ())
    one = StaticCoordinator(worker, lambda slots: None, lambda slots: None)
    one.start()
    assert one.confirmed() == float("-inf")
