"""acquire_slots: many slots at once, and asleep at once where nothing waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from django_rmq.core.model.replies import Acquired
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ServerRefused, WrongType
from tests.contract.slots import NO_BACKOFF, TYPES, Slot, each_type, slot_of_each

MakeSlot = Callable[..., Slot]
kinds = pytest.mark.parametrize("kind", TYPES)


def begin(slot: Slot) -> Acquired:
    [found] = slot.broker.acquire_slots(slot.topic, [slot.index])
    assert isinstance(found, Acquired)
    return found


@kinds
def test_what_is_empty_is_left_as_an_acquire_and_an_empty_prepare_would(
    make_slot: MakeSlot, kind: TopicType
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
    wakeups = slot.broker.wakeups([slot.topic])
    try:
        assert begin(slot).is_asleep
        slot.send(b"a")
        assert wakeups.get(timeout=5) == [(slot.topic.name, 0)]
        assert slot.take(epoch=1).status == "ok"
    finally:
        wakeups.close()


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


def test_nobody_sleeps_in_a_slot_that_is_paused_or_shut_or_of_another_count(make_slot: MakeSlot) -> None:
    paused, shut, moved = (make_slot(TopicType.FIXED_TIME) for _ in range(3))
    paused.pause()
    shut.shut(1)
    moved.broker.configure(replace(moved.topic, slots=16), 0)
    for slot in (paused, shut, moved):
        before = slot.hash("control")
        assert begin(slot) == Acquired(1, False)
        assert slot.hash("control") == {**before, b"epoch": b"1"}


def test_a_slot_keeps_a_time_out_and_retries_of_its_own(make_slot: MakeSlot) -> None:
    slot = make_slot(TopicType.FIXED_TIME, timeout=7, max_retries=3)
    slot.configure()
    assert begin(slot.with_topic(timeout=99, max_retries=9)).is_asleep
    control = slot.hash("control")
    assert (control[b"timeout"], control[b"max_retries"]) == (b"7", b"3")


def test_older_prepares_are_fenced_in_every_slot(make_slot: MakeSlot) -> None:
    slots = [make_slot(TopicType.FIXED_TIME, name="topic", index=i) for i in range(1, 4)]
    for _ in range(2):
        answers = slots[0].broker.acquire_slots(slots[0].topic, [1, 2, 3])
    assert answers == [Acquired(2, True)] * 3
    assert [slot.take(epoch=1).status for slot in slots] == ["fenced"] * 3


def test_one_slot_that_holds_something_keeps_no_other_awake(make_slot: MakeSlot) -> None:
    slot = make_slot(TopicType.FIXED_TIME, name="topic", index=9, slots=64)
    slot.send(b"a")
    answers = slot.broker.acquire_slots(slot.topic, range(64))
    assert answers == [Acquired(1, i != 9) for i in range(64)]


def test_a_slot_with_a_foreign_control_is_left_to_acquire(make_slot: MakeSlot) -> None:
    slot = make_slot(TopicType.FIXED_TIME, name="topic", index=1)
    slot.keyspace.zadd(slot.keys.control, b"x", 1)
    assert slot.broker.acquire_slots(slot.topic, [0, 1, 2]) == [
        Acquired(1, True),
        Acquired(None, False),
        Acquired(1, True),
    ]
    with pytest.raises(WrongType, match="control"):
        slot.acquire()
    slot.keyspace.delete(slot.keys.control)


def test_a_slot_with_a_foreign_store_is_looked_at(make_slot: MakeSlot) -> None:
    slot = make_slot(TopicType.FIXED_TIME)
    slot.keyspace.hset(slot.keys.store, b"x", b"1")
    assert begin(slot) == Acquired(1, False)
    slot.keyspace.delete(slot.keys.store)


def test_a_thousand_slots_are_acquired_at_once_and_no_more(make_slot: MakeSlot) -> None:
    slot = make_slot(TopicType.FIXED_TIME, name="topic", slots=2048, index=1)
    assert slot.broker.acquire_slots(slot.topic, range(1_024)) == [Acquired(1, True)] * 1_024
    if type(slot.broker).__name__ != "ClusterBroker":
        with pytest.raises(ServerRefused):
            slot.broker.acquire_slots(slot.topic, range(1_025))
