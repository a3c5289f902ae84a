"""The cells in which an event loop records its messages: no batch writes into those of another one."""

from __future__ import annotations

from typing import Any

import pytest

from django_rmq.core.consumer.batch import Batch
from django_rmq.core.consumer.run_order import FairQueue
from django_rmq.core.consumer.shared_notes import BEGUN, DONE, MARKS, ProgressCells, SharedNotes, mark_of
from django_rmq.core.consumer.slots import ConsumedSlot
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic, TopicType
from tests.support.workers import Listener

SERIAL = Topic("serial", TopicType.RANGE_MERGE)
PRIORITY = Topic("priority", TopicType.PRIORITY)


def test_what_ran_while_many_others_came_and_went_is_known_after_a_death() -> None:
    notes = SharedNotes(1)
    cells = ProgressCells(notes.thread(0))
    long = cells.take("t", 0, 1, [b"long"])
    long[0] = BEGUN
    for receipt in range(2, MARKS // 100):
        short = cells.take("t", 1, receipt, [b"%d" % n for n in range(300)])
        for at in range(300):
            short[at] = DONE
        short.end()
    found = notes.begun()
    assert found[mark_of("t", 0, 1, b"long")] is False
    long[0] = DONE
    assert notes.begun()[mark_of("t", 0, 1, b"long")] is True
    assert len(notes.begun()) == MARKS


def test_what_is_done_stays_known_until_the_other_cells_were_used() -> None:
    notes = SharedNotes(1)
    cells = ProgressCells(notes.thread(0))
    done = cells.take("t", 0, 1, [b"done"])
    done[0] = DONE
    done.end()
    for receipt in range(2, 10):
        cells.take("t", 1, receipt, [b"%d" % n for n in range(1000)]).end()
    assert notes.begun()[mark_of("t", 0, 1, b"done")] is True


def test_without_room_nothing_is_recorded_and_nothing_is_overwritten() -> None:
    notes = SharedNotes(1)
    cells = ProgressCells(notes.thread(0))
    all_of_them = cells.take("t", 0, 1, [b"%d" % n for n in range(MARKS)])
    for at in range(MARKS):
        all_of_them[at] = BEGUN
    more = cells.take("t", 1, 2, [b"more"])
    more[0] = DONE
    more.end()
    assert set(notes.begun().values()) == {False}
    nowhere = ProgressCells(None).take("t", 0, 1, [b"a"])
    nowhere[0] = BEGUN
    nowhere.end()


def batch(topic: Topic, slot: ConsumedSlot, score: float = 1.0, receipt: int = 1) -> Batch:
    message = Message(topic, 0, receipt, Delivery(b"m", score, 16))
    return Batch(slot, Listener(topic.name, print), receipt, [message], 0.0)


@pytest.fixture
def turns() -> FairQueue:
    return FairQueue({"serial": 2, "priority": 1})


def test_a_slot_has_one_turn_at_a_time_in_the_order_of_its_receipts(turns: FairQueue) -> None:
    place = ConsumedSlot(SERIAL, 0, 0)
    first, second, third = (batch(SERIAL, place, receipt=receipt) for receipt in (1, 2, 3))
    for each in (first, second, third):
        turns.add(each)
    assert turns.take() == [first]
    assert turns.take() == []
    turns.ended(first)
    assert turns.take() == [second]
    assert turns.remove(third)
    turns.ended(second)
    assert turns.take() == []
    assert not turns


def test_what_is_taken_back_lets_the_next_of_its_slot_go_on(turns: FairQueue) -> None:
    place = ConsumedSlot(SERIAL, 0, 0)
    first, second = batch(SERIAL, place), batch(SERIAL, place, receipt=2)
    turns.add(first)
    turns.add(second)
    assert turns.remove(first)
    assert not turns.remove(first)
    assert turns.take() == [second]
    assert not turns.remove(second), "it runs"


def test_the_highest_priority_has_the_next_turn(turns: FairQueue) -> None:
    batches: list[Any] = [batch(PRIORITY, ConsumedSlot(SERIAL, 0, 0), score) for score in (20.0, 40.0, 30.0)]
    for each in batches:
        turns.add(each)
    assert turns.take() == [batches[1]]
    turns.ended(batches[1])
    assert turns.take() == [batches[2]]


def test_topics_do_not_wait_for_each_other(turns: FairQueue) -> None:
    for _ in range(3):
        turns.add(batch(SERIAL, ConsumedSlot(SERIAL, 0, 0)))
        turns.add(batch(PRIORITY, ConsumedSlot(SERIAL, 0, 0)))
    assert len(turns.take()) == 3
    assert turns
