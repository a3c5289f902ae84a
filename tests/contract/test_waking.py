"""Who goes to sleep is woken by whatever comes earlier, once; and by the gate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from redis.crc import key_slot

from django_rmq.core.cluster.nodes import Node
from django_rmq.core.model.bounds import NEVER
from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.topic import TopicType
from django_rmq.testing import Clock
from tests.contract.slots import CONSTANT, NO_BACKOFF, TIME_TYPES, TYPES, Make, Slot, each_type, slot_of_each
from tests.oracle.slot import GATE
from tests.support.brokers import ClusterBroker


class Ear:
    """Hears the wake-ups of a slot's topic; a sentinel of its own proves that nothing more is under way."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.sentinel = Slot(slot.broker, slot.keyspace, slot.clock, slot.topic, beside(slot))
        self.wakeups = slot.broker.wakeups([slot.topic])
        self.pauses = 0

    def heard(self) -> int:
        """Return how often the slot was woken since the last time."""
        self.sentinel.pause()
        self.sentinel.pause(False)
        heard: list[tuple[str, int]] = []
        while (self.slot.topic.name, self.sentinel.index) not in heard:
            more = self.wakeups.get(10)
            assert more, "no wake-up came through"
            heard += more
        self.pauses = heard.count((self.slot.topic.name, -1 - self.slot.index))
        return heard.count((self.slot.topic.name, self.slot.index))


def beside(slot: Slot) -> int:
    """Return a later slot on the same node of a cluster: only of one node's wake-ups the order is known."""
    later = count(slot.index + 1)
    if not isinstance(slot.broker, ClusterBroker):
        return next(later)
    broker, topic = slot.broker, slot.topic.name

    def node(index: int) -> Node:
        return broker.client.serving(key_slot(slot_keys(broker.prefix, topic, index).store))

    broker.ping()
    return next(index for index in later if node(index) is node(slot.index))


@pytest.fixture
def ear(slot: Slot) -> Iterator[Ear]:
    ear = Ear(slot)
    yield ear
    ear.wakeups.close()


def sleeping_until(slot: Slot) -> int | None:
    raw = slot.hash("control").get(b"sleeping_until")
    return None if raw is None else int(raw)


@slot_of_each(TYPES, index=3)
def test_a_send_wakes_who_sleeps_without_end_exactly_once(slot: Slot, ear: Ear) -> None:
    assert slot.take().status == "empty"
    assert sleeping_until(slot) == NEVER
    slot.send(b"a", b"b")
    assert ear.heard() == 1
    slot.send(b"c")
    assert ear.heard() == 0
    assert sleeping_until(slot) is None
    assert len(slot.take().deliveries) == 3
    assert ear.heard() == 0


@each_type
def test_nobody_is_woken_who_does_not_sleep(slot: Slot, ear: Ear) -> None:
    slot.send(b"a")
    slot.take_one()
    slot.send(b"b")
    assert ear.heard() == 0


@each_type
def test_who_takes_the_last_message_sleeps_and_is_woken_by_the_next_one(slot: Slot, ear: Ear) -> None:
    slot.send(b"a", b"b")
    answer = slot.take()
    assert answer.sleeping_until == NEVER == sleeping_until(slot)
    slot.commit(answer.receipt, [b"a", b"b"])
    assert ear.heard() == 0
    slot.send(b"c")
    slot.send(b"d")
    assert ear.heard() == 1
    assert sleeping_until(slot) is None


@slot_of_each(TIME_TYPES)
def test_who_takes_the_last_message_that_is_due_sleeps_until_the_next_one(slot: Slot, ear: Ear) -> None:
    slot.send(b"a")
    slot.send(b"b", score=slot.due_in(90_000))
    answer = slot.take()
    assert answer.sleeping_until == slot.now_ms + 90_000 == sleeping_until(slot)
    assert answer.next_due == (slot.now_ms // 1000 + 31) * 1000, "its own delivery times out before"
    slot.send(b"c", score=slot.due_in(90_001))
    assert ear.heard() == 0
    slot.send(b"d", score=slot.due_in(60_000))
    assert ear.heard() == 1


@each_type
def test_who_leaves_something_that_can_be_taken_does_not_sleep(slot: Slot, ear: Ear) -> None:
    slot.send(b"a", b"b")
    answer = slot.take(1)
    assert answer.sleeping_until is None is sleeping_until(slot)
    slot.commit(answer.receipt, [answer.deliveries[0].member])
    slot.send(b"c")
    assert ear.heard() == 0


@each_type
def test_who_takes_beside_a_delivery_does_not_sleep_because_its_copy_may_wait(slot: Slot, ear: Ear) -> None:
    slot.send(b"a")
    first, _ = slot.take_one()
    slot.send(b"a")
    slot.send(b"b")
    second = slot.take()
    assert [each.member for each in second.deliveries] == [b"b"]
    assert second.sleeping_until is None is sleeping_until(slot)
    slot.commit(first, [b"a"])
    assert ear.heard() == 0
    assert slot.take_one()[1].member == b"a"


@each_type
def test_who_continues_behind_an_entry_does_not_sleep_because_others_may_wait_before_it(slot: Slot) -> None:
    slot.send(b"first", b"second", score=0 if slot.topic.type is TopicType.RANGE_MERGE else None)
    first = slot.zset("store")[b"first"]
    answer = slot.take(after=(f"{first:.17g}", b"first"))
    assert [each.member for each in answer.deliveries] == [b"second"]
    assert answer.sleeping_until is None is sleeping_until(slot)
    assert slot.take_one()[1].member == b"first"


@slot_of_each(TYPES, backoff=CONSTANT)
def test_who_sleeps_while_its_message_runs_is_woken_by_its_failure(slot: Slot, ear: Ear) -> None:
    slot.send(b"a")
    answer = slot.take()
    assert answer.sleeping_until == NEVER
    slot.fail(answer.receipt, b"a")
    assert ear.heard() == 1


@slot_of_each(TIME_TYPES)
def test_only_what_is_due_earlier_wakes(slot: Slot, ear: Ear) -> None:
    slot.send(b"a", score=slot.due_in(5_000))
    assert slot.take().next_due == slot.now_ms + 5_000 == sleeping_until(slot)
    slot.send(b"b", score=slot.due_in(5_000))
    slot.send(b"c", score=slot.due_in(9_000))
    assert ear.heard() == 0
    slot.send(b"d", score=slot.due_in(4_999))
    slot.send(b"e", score=slot.due_in(10))
    assert ear.heard() == 1


@slot_of_each([TopicType.RANGE_MERGE])
def test_a_merge_that_changes_nothing_wakes_nobody(slot: Slot, ear: Ear) -> None:
    slot.send(b"a", b"b", score=5_000)
    slot.take()
    slot.send(b"a", score=1)
    slot.send(b"a", b"b", score=1)
    assert ear.heard() == 0


@slot_of_each(TYPES, backoff=CONSTANT)
@pytest.mark.parametrize("end", ["commit", "fail", "release", "reject", "time_out"])
def test_who_met_a_shut_gate_is_woken_when_it_opens_and_not_before(slot: Slot, ear: Ear, end: str) -> None:
    slot = slot.with_topic(max_retries=0 if end == "time_out" else 16)
    slot.send(b"a", b"b")
    first, second = slot.take(1, "A"), slot.take(1, "A")
    assert slot.take(1, "B").status == "busy"
    assert sleeping_until(slot) == GATE
    slot.commit(first.receipt, [first.deliveries[0].member])
    assert ear.heard() == 0
    member = second.deliveries[0].member
    slot.end(end, second.receipt, member)
    assert ear.heard() == 1


@slot_of_each(TYPES, serial=False, max_prepared=2)
def test_who_met_a_full_topic_is_woken_when_there_is_room(slot: Slot, ear: Ear) -> None:
    slot.send(b"a", b"b", b"c")
    answer = slot.take(2, "A")
    assert slot.take(2, "B").status == "busy"
    slot.commit(answer.receipt, [answer.deliveries[0].member])
    assert ear.heard() == 1


@each_type
def test_whose_own_message_runs_is_woken_by_its_end(slot: Slot, ear: Ear) -> None:
    slot.send(b"a")
    receipt, _ = slot.take_one()
    slot.send(b"a")
    assert slot.take().status == "busy"
    slot.commit(receipt, [b"a"])
    assert ear.heard() == 1
    assert slot.take_one()[1].member == b"a"


@slot_of_each(TYPES, backoff=CONSTANT)
def test_a_rollback_wakes_who_sleeps_longer_than_the_back_off(slot: Slot, ear: Ear, clock: Clock) -> None:
    slot.send(b"a")
    receipt, _ = slot.take_one()
    due = slot.take().next_due
    assert sleeping_until(slot) == due == (slot.now_ms // 1000 + 31) * 1000
    slot.fail(receipt, b"a")
    assert ear.heard() == 1
    assert slot.take().next_due == slot.now_ms + 1_000 == sleeping_until(slot)
    clock.advance(1)
    assert slot.promote() == 1
    assert ear.heard() == 0, "who sleeps until then wakes by itself"


@slot_of_each(TYPES, backoff=NO_BACKOFF)
def test_promote_and_time_out_wake_who_sleeps_on(slot: Slot, ear: Ear, clock: Clock) -> None:
    slot.send(b"a")
    slot.fail_one(b"a", delay_ms=1_000)
    slot.send(b"x")
    slot.take()
    slot.keyspace.hset(slot.keys.control, b"sleeping_until", b"%d" % NEVER)
    clock.advance(1)
    slot.promote()
    assert ear.heard() == 1
    slot.keyspace.hset(slot.keys.control, b"sleeping_until", b"%d" % NEVER)
    clock.advance(31)
    assert slot.time_out() == 1
    assert ear.heard() == 1


@each_type
def test_replay_and_reschedule_wake(slot: Slot, ear: Ear) -> None:
    slot.send(b"a")
    slot.kill(b"a")
    slot.take()
    slot.replay([b"a"])
    assert ear.heard() == 1
    slot.kill(b"a")
    slot.send(b"b", score=90_000 if slot.topic.type is TopicType.RANGE_MERGE else slot.now_ms + 90_000)
    if slot.topic.type is TopicType.PRIORITY:
        slot.keyspace.hset(slot.keys.control, b"sleeping_until", b"%d" % NEVER)
    else:
        slot.take()
    slot.reschedule([slot.now_ms + 10], [b"b"])
    assert ear.heard() == 1


@each_type
def test_resuming_wakes_once_and_pausing_is_told_once(slot: Slot, ear: Ear) -> None:
    slot.take()
    assert [slot.pause(), slot.pause()] == ["paused", "unchanged"]
    slot.send(b"a")
    ear.heard()
    assert ear.pauses == 1
    assert slot.take().status == "paused"
    assert sleeping_until(slot) is None
    assert [slot.pause(False), slot.pause(False)] == ["resumed", "unchanged"]
    assert ear.heard() == 1 and ear.pauses == 0
    assert slot.take().status == "ok"


@slot_of_each([TopicType.PRIORITY])
def test_wake_ups_of_other_topics_are_not_heard(slot: Slot, ear: Ear, make_slot: Make) -> None:
    other = make_slot()
    other.take()
    other.send(b"a")
    assert ear.heard() == 0


def test_several_topics_are_heard_by_one_subscription(make_slot: Make) -> None:
    slots = [make_slot(index=n) for n in (0, 5)]
    wakeups = slots[0].broker.wakeups([slot.topic for slot in slots])
    for slot in slots:
        slot.take()
        slot.send(b"a")
    heard: list[tuple[str, int]] = []
    while len(heard) < 2:
        more = wakeups.get(10)
        assert more
        heard += more
    assert sorted(heard) == [("topic0", 0), ("topic1", 5)]
    wakeups.close()


@slot_of_each(TYPES, serial=False)
@pytest.mark.parametrize("end", ["commit", "fail", "release", "time_out"])
def test_a_call_that_ends_nothing_wakes_nobody(slot: Slot, ear: Ear, end: str) -> None:
    slot.send(b"a")
    slot.take_one()
    slot.send(b"a")
    assert slot.take().status == "busy"
    before = slot.snapshot("stale")
    if end == "time_out":
        assert slot.time_out() == 0
    else:
        assert slot.end(end, 77, b"a") == ["stale"]
    assert slot.snapshot("stale") == before
    assert ear.heard() == 0
