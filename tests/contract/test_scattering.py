"""scatter: one message to each of many slots, where the fast way of a send suffices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_rmq.core.model.replies import Sent
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ServerRefused
from tests.contract.slots import NO_BACKOFF, Slot

MakeSlot = Callable[..., Slot]


def scatter(slot: Slot, *members: bytes, range_ms: int = 0) -> list[Sent | None]:
    """Send one member to each slot from the first on; return the answers."""
    answers = slot.broker.scatter(slot.topic, range(len(members)), range_ms, members)
    return [None if answer is None else Sent(*answer[0]) for answer in answers]


def slots(make_slot: MakeSlot, count: int) -> list[Slot]:
    options = {"identity": "body", "slots": 4, "backoff": NO_BACKOFF}
    return [make_slot(TopicType.RANGE_MERGE, name="topic", index=i, **options) for i in range(count)]


def test_it_leaves_in_each_slot_what_a_send_leaves(make_slot: MakeSlot) -> None:
    some = slots(make_slot, 3)
    due = some[0].now_ms + 500
    assert scatter(some[0], b"a", b"b", b"c", range_ms=500) == [Sent("stored", due)] * 3
    other = make_slot(TopicType.RANGE_MERGE, identity="body", slots=4)
    for slot, member in zip(some, (b"a", b"b", b"c"), strict=True):
        assert slot.zset("store") == {member: due}
        other.send_merge(500, [member])
        assert slot.hash("control") == other.hash("control") == {b"slots": b"4"}
        assert slot.hash("stats") == {b"sent": b"1", b"stored": b"1"}


def test_a_copy_that_waits_keeps_its_time(make_slot: MakeSlot) -> None:
    one, other = slots(make_slot, 2)
    first = one.now_ms + 500
    one.send_merge(500, [b"a"])
    assert scatter(one, b"a", b"a", range_ms=900) == [Sent("merged", first), Sent("stored", first + 400)]
    assert one.zset("store") == {b"a": first}
    assert other.hash("stats") == {b"sent": b"1", b"stored": b"1"}


def test_each_slot_wakes_its_own_sleeper_if_that_sleeps_longer(make_slot: MakeSlot) -> None:
    some = slots(make_slot, 4)
    some[2].send_merge(100, [b"early"])
    for slot in some[1:]:
        assert slot.take().status == "empty"
    wakeups = some[0].broker.wakeups([some[0].topic])
    try:
        scatter(some[0], b"a", b"a", b"a", b"a", range_ms=500)
        heard = [*wakeups.get(timeout=2), *wakeups.get(timeout=0.5)]
        assert sorted(heard) == [("topic", 1), ("topic", 3)]
        assert not wakeups.get(timeout=0.05)
    finally:
        wakeups.close()
    assert [b"sleeping_until" in slot.hash("control") for slot in some] == [False, False, True, False]


@pytest.mark.parametrize("what", ["rests", "waits as a retry", "has moved", "has a fraction"])
def test_a_slot_that_needs_another_step_is_left_as_it_is(make_slot: MakeSlot, what: str) -> None:
    one, other = slots(make_slot, 2)
    if what in ("rests", "waits as a retry"):
        one.send(b"a")
        one.fail_one(b"a", delay_ms=60_000 if what == "rests" else 0)
        if what == "waits as a retry":
            one.promote()
            assert one.where(b"a") == "w"
    elif what == "has moved":
        one.with_topic(slots=16).configure()
    else:
        one.keyspace.zadd(one.keys.store, b"a", one.now_ms + 0.5)
        one.strangers += 1
    before = one.snapshot()
    assert scatter(one, b"a", b"b") == [None, Sent("stored", one.now_ms)]
    assert one.snapshot().items() >= before.items()
    assert other.zset("store") == {b"b": one.now_ms}


@pytest.mark.parametrize("name", ["store", "retry", "body", "stats", "control"])
def test_a_foreign_key_concerns_its_slot_only(make_slot: MakeSlot, name: str) -> None:
    one, other = slots(make_slot, 2)
    key = getattr(one.keys, name)
    if name in ("store", "retry"):
        one.keyspace.hset(key, b"x", b"1")
    else:
        one.keyspace.zadd(key, b"x", 1)
    before = one.snapshot()
    assert scatter(one, b"a", b"b") == [None, Sent("stored", one.now_ms)]
    assert {key: value for key, value in one.snapshot().items() if key in before} == before
    assert not one.snapshot().keys() & ({*one.keys} - before.keys())
    assert other.zset("store") == {b"b": one.now_ms}
    one.keyspace.delete(key)


@pytest.mark.parametrize("range_ms", [-1, 10**15])
def test_a_wait_that_no_sender_may_use_is_refused(make_slot: MakeSlot, range_ms: int) -> None:
    (slot,) = slots(make_slot, 1)
    with pytest.raises(ServerRefused):
        scatter(slot, b"a", range_ms=range_ms)
    assert not slot.zset("store")
