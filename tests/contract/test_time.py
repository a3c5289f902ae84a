"""When things are taken, time out and come back, to the millisecond and the second."""

from __future__ import annotations

import pytest

from django_rmq.core.model.topic import BackOff, TopicType
from django_rmq.testing import Clock
from tests.contract.slots import CONSTANT, NO_BACKOFF, TIME_TYPES, TYPES, Make, Slot, slot_of_each


@slot_of_each(TIME_TYPES)
def test_a_message_is_taken_at_its_millisecond_and_not_before(slot: Slot, clock: Clock) -> None:
    due = slot.now_ms + 5_000
    slot.send(b"a", score=slot.due_in(5_000))
    clock.advance("4999ms")
    answer = slot.take()
    assert (answer.status, answer.next_due) == ("empty", due)
    clock.advance("0.999ms")
    assert slot.take().status == "empty"
    clock.advance("0.001ms")
    assert slot.take().status == "ok"


def test_range_merge_keeps_the_first_time_and_fixed_time_the_last(make_slot: Make, clock: Clock) -> None:
    merge, fixed = make_slot(TopicType.RANGE_MERGE), make_slot(TopicType.FIXED_TIME)
    now = merge.now_ms
    merge.send(b"a", score=1_000)
    merge.send(b"a", score=10)
    fixed.send(b"a", score=now + 1_000)
    fixed.send(b"a", score=now + 10)
    clock.advance("10ms")
    assert merge.take().status == "empty" and fixed.take().status == "ok"
    clock.advance("990ms")
    assert merge.take().status == "ok"


@slot_of_each(TIME_TYPES)
def test_what_is_due_longest_is_taken_first(slot: Slot, clock: Clock) -> None:
    for member in (b"c", b"a", b"b"):
        slot.send(member, score=0 if slot.topic.type is TopicType.RANGE_MERGE else slot.now_ms)
        clock.advance("3ms")
    assert [delivery.member for delivery in slot.take(2).deliveries] == [b"c", b"a"]


# --- time-outs


@slot_of_each(TYPES, timeout=[1, 30, 3600], max_retries=[0, 16, 999], backoff=NO_BACKOFF)
@pytest.mark.parametrize("millis", [0, 1, 999])
def test_a_delivery_times_out_when_more_than_the_time_out_has_passed_in_whole_seconds(
    slot: Slot, clock: Clock, millis: int
) -> None:
    clock.advance(millis / 1000)
    slot.send(b"a", score=2_000 if slot.topic.is_priority else None)
    slot.take_one()
    taken_s = slot.now_ms // 1000
    clock.advance(((taken_s + slot.topic.timeout + 1) * 1000 - slot.now_ms - 1) / 1000)
    assert slot.time_out() == 0
    assert slot.take(owner="B").status in ("busy", "empty")
    clock.advance("1ms")
    assert slot.time_out() == 1
    assert slot.where(b"a") == ("w" if slot.topic.max_retries else "D")


@slot_of_each(TYPES, timeout=30)
def test_the_slots_own_time_out_counts_and_not_that_of_a_workers_settings(slot: Slot, clock: Clock) -> None:
    slot.send(b"a")
    slot.take_one()
    clock.advance(20)
    assert slot.with_topic(timeout=5).time_out() == 0
    assert slot.with_topic(timeout=5).take(owner="B").next_due == slot.now_ms + 11_000
    clock.advance(11)
    assert slot.with_topic(timeout=500).time_out() == 1


@slot_of_each(TYPES, timeout=30)
def test_a_delivery_dated_more_than_a_time_out_ahead_is_dated_now(slot: Slot, clock: Clock) -> None:
    slot.send(b"a")
    slot.take_one()
    clock.advance(-30)
    before = slot.zset("prepare")
    assert slot.time_out() == 0 and slot.zset("prepare") == before
    clock.advance(-1)
    slot.time_out()
    assert slot.zset("prepare") == {b"a": slot.now_ms // 1000 * 1000 + 16}
    clock.advance(31)
    assert slot.time_out() == 1


@slot_of_each(TYPES, backoff=CONSTANT)
def test_time_out_and_promote_take_a_limited_number(slot: Slot, clock: Clock) -> None:
    slot.send(*(b"%d" % n for n in range(7)))
    slot.take()
    clock.advance(31)
    assert [slot.time_out(3) for _ in range(4)] == [3, 3, 1, 0]
    clock.advance(1)
    assert [slot.promote(3) for _ in range(4)] == [3, 3, 1, 0]


@slot_of_each(TYPES, backoff=BackOff(5_000, 5_000))
def test_prepare_does_the_upkeep_first_even_at_a_shut_gate_and_while_paused(slot: Slot, clock: Clock) -> None:
    slot.send(b"a", b"b")
    failed, delivery = slot.take_one("A")
    slot.fail(failed, delivery.member)
    late, other = slot.take_one("A")
    slot.pause()
    clock.advance(31)
    assert slot.take(owner="B").status == "paused"
    assert slot.where(delivery.member) == "w" and slot.where(other.member) == "T"
    slot.pause(False)
    slot.take_one("A")
    clock.advance(6)
    assert slot.take(owner="B").status == "busy"
    assert slot.where(other.member) == "w"
    assert slot.commit(late, [other.member]) == ["stale"]


# --- after a time-out


@slot_of_each(TYPES, serial=[True, False], backoff=NO_BACKOFF)
def test_a_message_that_timed_out_is_handed_out_alone(slot: Slot, clock: Clock) -> None:
    slot.send(b"bad")
    slot.take_one()
    clock.advance(31)
    slot.time_out()
    slot.send(b"x", b"y", b"z")
    seen: list[list[bytes]] = []
    for _ in range(4):
        answer = slot.take(10)
        seen.append([delivery.member for delivery in answer.deliveries])
        assert answer.is_suspect is (seen[-1] == [b"bad"])
        if not seen[-1]:
            break
        if slot.topic.serial and seen[-1] == [b"bad"]:
            assert slot.take(10).status == "busy"
        slot.commit(answer.receipt, seen[-1])
    assert [b"bad"] in seen
    assert sorted(member for batch in seen for member in batch) == [b"bad", b"x", b"y", b"z"]


@slot_of_each(TYPES, backoff=CONSTANT)
def test_what_is_rolled_back_as_timed_out_is_charged_as_a_time_out(slot: Slot, clock: Clock) -> None:
    slot.send(b"bad", b"x")
    receipt = slot.take().receipt
    assert slot.fail(receipt, b"bad", kind="timed_out", error="its process died") == ["ok"]
    assert slot.fail(receipt, b"bad", kind="timed_out") == ["stale"]
    assert (slot.counted("expired"), slot.counted("failed")) == (1, 0)
    assert slot.where(b"bad") == "T" and slot.hash("failures")[b"bad"].startswith(b"timed_out 1 ")
    slot.commit(receipt, [b"x"])
    clock.advance(1)
    slot.send(b"y")
    answers = [slot.take()]
    slot.commit(answers[0].receipt, [each.member for each in answers[0].deliveries])
    answers.append(slot.take())
    suspect, other = sorted(answers, key=lambda answer: not answer.is_suspect)
    assert [(each.member, each.retries_left) for each in suspect.deliveries] == [(b"bad", 15)]
    assert suspect.is_suspect and not other.is_suspect
    assert [each.member for each in other.deliveries] == [b"y"]


@slot_of_each(TYPES, backoff=NO_BACKOFF)
def test_a_message_that_timed_out_waits_until_its_neighbours_have_ended(slot: Slot, clock: Clock) -> None:
    slot.send(b"bad")
    slot.take_one()
    clock.advance(31)
    slot.time_out()
    slot.reschedule([slot.now_ms + 60_000], [b"bad"])
    slot.send(b"x", score=200 if slot.topic.type is TopicType.PRIORITY else None)
    receipt, first = slot.take_one()
    assert first.member == b"x"
    for _ in range(3):
        clock.advance(21)
        assert slot.extend(receipt, [b"x"]) == ["ok"]
    assert slot.promote() == (0 if slot.topic.type is TopicType.PRIORITY else 1)
    assert slot.take().status == "busy"
    slot.commit(receipt, [b"x"])
    assert [delivery.member for delivery in slot.take().deliveries] == [b"bad"]


# --- back-off


@slot_of_each(TYPES, backoff=BackOff(1_000, 60_000))
def test_the_back_off_doubles_to_its_cap_with_up_to_half_less(slot: Slot, clock: Clock) -> None:
    slot.send(b"a")
    rests = []
    for _ in range(16):
        slot.fail_one(b"a")
        rests.append(int(slot.zset("retry")[b"a"]) - slot.now_ms)
        clock.advance((rests[-1] - 1) / 1000)
        assert slot.take().status == "empty"
        clock.advance("1.123ms")
    for n, rest in enumerate(rests):
        full = min(60_000, 1_000 * 2**n)
        assert full / 2 <= rest <= full
    assert len({rest / min(60_000, 1_000 * 2**n) for n, rest in enumerate(rests)}) > 4


@slot_of_each(TYPES, backoff=BackOff(10_000, 60_000))
def test_the_members_of_a_failed_batch_come_back_at_different_times(slot: Slot) -> None:
    slot.send(*(b"%d" % n for n in range(10)))
    answer = slot.take()
    slot.fail(answer.receipt, *(delivery.member for delivery in answer.deliveries))
    assert len({int(score) for score in slot.zset("retry").values()}) == 10


@slot_of_each(TYPES, backoff=BackOff(7_000, 7_000))
def test_a_constant_back_off_is_exact_and_a_given_delay_takes_precedence(slot: Slot) -> None:
    slot.send(b"a", b"b")
    answer = slot.take()
    slot.fail(answer.receipt, b"a")
    slot.fail(answer.receipt, b"b", delay_ms=123)
    assert {m: int(s) - slot.now_ms for m, s in slot.zset("retry").items()} == {b"a": 7_000, b"b": 123}


@slot_of_each(TYPES, backoff=BackOff(4_000, 60_000, function=lambda failures: 0.0))
def test_a_time_out_takes_the_topics_exponential_back_off(slot: Slot, clock: Clock) -> None:
    slot.send(b"a")
    slot.take_one()
    clock.advance(31)
    slot.time_out()
    assert 2_000 <= int(slot.zset("retry")[b"a"]) - slot.now_ms <= 4_000


# --- retries beside fresh messages


@slot_of_each(TIME_TYPES, backoff=NO_BACKOFF)
def test_at_most_half_of_a_prepare_is_retries_while_fresh_messages_are_due(slot: Slot, clock: Clock) -> None:
    retries, fresh = [b"r%02d" % n for n in range(20)], [b"f%02d" % n for n in range(20)]
    slot.send(*retries)
    slot.fail(slot.take(20).receipt, *retries)
    slot.send(*fresh)
    for _ in range(4):
        batch = [delivery.member for delivery in slot.take(5).deliveries]
        assert len(batch) == 5
        assert sum(member in retries for member in batch) in (2, 3)


@slot_of_each(TIME_TYPES, backoff=NO_BACKOFF)
@pytest.mark.parametrize("step_ms", [0, 0.001, 0.137, 2])
def test_one_at_a_time_retries_and_fresh_messages_take_turns_however_the_clock_goes(
    slot: Slot, clock: Clock, step_ms: float
) -> None:
    slot.send(b"r")
    slot.fail(slot.take().receipt, b"r")
    slot.send(b"f")
    taken = []
    for _ in range(6):
        clock.advance(step_ms / 1000)
        receipt, delivery = slot.take_one()
        taken.append(delivery.member)
        slot.release(receipt, [delivery.member])
    assert taken in ([b"r", b"f"] * 3, [b"f", b"r"] * 3)


@slot_of_each(TIME_TYPES, backoff=NO_BACKOFF)
@pytest.mark.parametrize(("retries", "fresh"), [(6, 1), (1, 6), (6, 0), (0, 6), (3, 3)])
def test_neither_retries_nor_fresh_messages_leave_room_unused(slot: Slot, retries: int, fresh: int) -> None:
    if retries:
        names = [b"r%d" % n for n in range(retries)]
        slot.send(*names)
        slot.fail(slot.take().receipt, *names)
    if fresh:
        slot.send(*(b"f%d" % n for n in range(fresh)))
    assert len(slot.take(6).deliveries) == 6 or retries + fresh < 6


@slot_of_each(TYPES, serial=False, max_prepared=2, max_retries=0)
@pytest.mark.parametrize(("limit", "again"), [(1, True), (2, True), (3, False)])
def test_upkeep_that_reached_its_limit_is_asked_for_again_at_once_and_other_upkeep_is_not(
    slot: Slot, clock: Clock, limit: int, again: bool
) -> None:
    slot.send(b"a", b"b")
    slot.take()
    clock.advance(31)
    answer = slot.take(limit)
    assert (answer.status, answer.next_due == slot.now_ms) == ("empty", again)
