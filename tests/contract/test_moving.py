"""The steps of a re-slotting between two slots: shut, move out, move in, once, and open again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import redis

from django_rmq.core.model.replies import CopyReply
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import ServerRefused, SlotMoved
from tests.contract.slots import CONSTANT, NO_BACKOFF, TYPES, Make, Slot, slot_of_each
from tests.support.brokers import Broker

LATE = 60_000


def pair(make_slot: Make, kind: TopicType = TopicType.PRIORITY, **options: Any) -> tuple[Slot, Slot]:
    """Slot 0 of a topic with one slot, and slot 1 of the same topic with two, both shut by re-slotting 1."""
    source = make_slot(kind, name="moving", slots=1, **options)
    target = make_slot(kind, name="moving", index=1, **{**options, "slots": 2})
    return source, target


def shut(source: Slot, target: Slot, reslot: int = 1) -> None:
    assert target.shut(reslot, fresh=True) == "shut"
    assert source.with_topic(slots=2).shut(reslot) == "shut"


def hand_over(source: Slot, target: Slot, *members: tuple[str, bytes], arrived: int = 0) -> int:
    """Move members; return the ticket, which the source does not know to have arrived."""
    answer = source.move_out(1, 1, members, arrived=arrived)
    assert answer.status == "moved", answer
    assert target.move_in(1, 0, answer.ticket, answer.rows) == "in"
    return int(answer.ticket)


def reopen(*slots: Slot, **how: Any) -> None:
    for slot in slots:
        assert slot.reopen(1, **how) == "open"


# --- the gate


@slot_of_each(TYPES, slots=2)
def test_a_shut_slot_hands_out_nothing_until_it_is_opened(slot: Slot) -> None:
    slot.send(b"x")
    receipt, _ = slot.take_one("A")
    slot.send(b"y")
    assert slot.shut(1) == "shut"
    assert slot.take(owner="A").status == "busy"
    assert slot.take(owner="B").status == "busy"
    assert slot.commit(receipt, [b"x"]) == ["ok"]
    assert slot.take(owner="A").status == "busy"
    reopen(slot)
    assert slot.take_one("B")[1].member == b"y"


def test_a_shut_slot_without_serial_hands_out_nothing_either(make_slot: Make) -> None:
    slot = make_slot(slots=2, serial=False)
    slot.send(b"x")
    assert slot.shut(1) == "shut"
    assert slot.take().status == "busy"


def test_a_shut_slot_is_not_claimed_from_until_it_is_opened(make_slot: Make) -> None:
    slot = make_slot(slots=2)
    slot.send(b"x")
    assert slot.shut(1) == "shut"
    assert slot.claim("s", 1, 30_000, 10).status == "busy"
    reopen(slot)
    assert slot.claim("s", 1, 30_000, 10).taken == 1


def test_a_shut_slot_times_out_what_runs(make_slot: Make) -> None:
    slot = make_slot(slots=2, backoff=NO_BACKOFF)
    slot.send(b"x")
    slot.take_one()
    slot.shut(1)
    slot.clock.advance(slot.topic.timeout + 1)
    assert slot.take().status == "busy"
    assert slot.where(b"x") == "w"


def test_a_shut_slot_takes_sends_with_the_new_count_and_refuses_the_old_one(make_slot: Make) -> None:
    source, target = pair(make_slot)
    source.send(b"before")
    shut(source, target)
    with pytest.raises(SlotMoved, match="2 slots"):
        source.send(b"x")
    assert source.take().slots == 2
    target.send(b"x")
    source.with_topic(slots=2).send(b"y")
    assert (target.where(b"x"), source.where(b"y")) == ("W", "W")


def test_a_slot_is_shut_once_by_each_re_slotting(make_slot: Make) -> None:
    slot = make_slot(slots=2)
    assert [slot.shut(2), slot.shut(2), slot.shut(1)] == ["shut", "known", "stale"]
    assert slot.reopen(1) == "stale"
    assert [slot.reopen(2), slot.reopen(2)] == ["open", "known"]
    assert [slot.shut(2), slot.take().status] == ["known", "empty"]
    assert slot.shut(3) == "shut"


def test_a_slot_that_has_to_be_empty_is_shut_only_when_it_is(make_slot: Make) -> None:
    slot = make_slot(slots=2)
    slot.send(b"x")
    assert slot.shut(1, only_empty=True) == "holds"
    receipt, _ = slot.take_one()
    assert slot.shut(1, only_empty=True) == "holds"
    slot.reject(receipt, b"x")
    assert slot.shut(1, only_empty=True) == "holds"
    slot.remove([b"x"])
    assert slot.shut(1, only_empty=True) == "shut"


def test_a_new_slot_takes_time_out_and_retries_from_its_topic(make_slot: Make) -> None:
    slot = make_slot(slots=2, timeout=30, max_retries=3)
    slot.send(b"x")
    slot.take_one()
    other = slot.with_topic(timeout=7, max_retries=9)
    other.shut(1)
    assert slot.hash("control")[b"timeout"] == b"30"
    other.shut(2, fresh=True)
    assert slot.hash("control")[b"timeout"] == b"7"
    assert slot.hash("control")[b"max_retries"] == b"9"


def test_shutting_and_opening_wake_who_sleeps(make_slot: Make) -> None:
    slot = make_slot(slots=2)
    slot.take()
    with slot.woken():
        slot.shut(1)
    slot.send(b"x")
    assert slot.take().status == "busy"
    with slot.woken():
        slot.reopen(1)


def test_receipts_go_on_above_those_of_the_slots_that_messages_came_from(make_slot: Make) -> None:
    slot = make_slot(slots=2)
    slot.shut(1)
    # The clocks of two nodes of a cluster may differ.
    ahead = slot.clock() + 40
    slot.reopen(1, deliveries=ahead)
    slot.send(b"x")
    receipt, _ = slot.take_one()
    assert receipt == ahead + 1
    slot.commit(receipt, [b"x"])
    slot.shut(2)
    slot.reopen(2, deliveries=7)
    slot.send(b"x")
    assert slot.take_one()[0] == ahead + 2


def test_what_was_paused_stays_paused(make_slot: Make) -> None:
    slot = make_slot(slots=2)
    slot.shut(1)
    reopen(slot, paused=True)
    slot.send(b"x")
    assert slot.take().status == "paused"


# --- moving


@pytest.mark.parametrize("identity", ["body", "key"])
@pytest.mark.parametrize("kind", TYPES)
def test_every_state_arrives_as_it_left(make_slot: Make, kind: TopicType, identity: str) -> None:
    source, target = pair(make_slot, kind, identity=identity, backoff=CONSTANT, max_retries=5)
    source.send(b"dead")
    source.kill(b"dead")
    source.send(b"resting")
    source.fail_one(b"resting", delay_ms=LATE)
    source.send(b"again")
    source.fail_one(b"again", delay_ms=0)
    source.send(b"fresh", body=b"mine")
    names = ("store", "retry", "dead", "deaths", "failures", "body")
    before = source.read(*names)
    shut(source, target)
    members = [("retry", b"resting"), ("store", b"again"), ("store", b"fresh"), ("dead", b"dead")]
    hand_over(source, target, *members)
    assert target.read(*names) == before
    assert [source.where(member) for _, member in members] == ["-"] * 4
    assert not any(source.hash(name) for name in ("deaths", "failures", "body"))
    assert (source.counted("moved_out"), target.counted("moved_in")) == (3, 3)
    assert (source.counted("moved_dead_out"), target.counted("moved_dead_in")) == (1, 1)


def test_scores_keep_every_digit_on_their_way(make_slot: Make) -> None:
    source, target = pair(make_slot)
    largest = (1 << 43) - 1
    source.zadd(b"x", largest + 999 / 1024)
    shut(source, target)
    hand_over(source, target, ("store", b"x"))
    assert target.zset("store") == {b"x": largest + 999 / 1024}
    target.strangers, source.strangers = 0, 1
    assert source.adopt(1, 0) == "ok"
    source.strangers = 0


def test_nothing_leaves_while_something_is_in_flight(make_slot: Make) -> None:
    source, target = pair(make_slot)
    source.send(b"x", b"y")
    receipt, delivery = source.take_one()
    shut(source, target)
    other = b"y" if delivery.member == b"x" else b"x"
    assert source.move_out(1, 1, [("store", other)]).status == "busy"
    source.commit(receipt, [delivery.member])
    assert source.move_out(1, 1, [("store", other)]).status == "moved"
    assert target.where(other) == "-"
    assert target.move_in(1, 0, 1, [CopyReply("store", other, "99")]) == "in"


def test_nothing_leaves_while_spark_holds_something(make_slot: Make) -> None:
    source, target = pair(make_slot)
    source.send(b"x")
    shut(source, target)
    source.keyspace.zadd(source.keys.claimants, b"spark", 1)
    assert source.move_out(1, 1, [("store", b"x")]).status == "busy"
    assert source.reslot_progress().claims == 1
    source.keyspace.delete(source.keys.claimants)


def test_nothing_leaves_or_arrives_where_the_slot_is_open_or_another_was_here(make_slot: Make) -> None:
    source, target = pair(make_slot)
    source.send(b"x")
    row = CopyReply("store", b"x", "50")
    assert source.move_out(1, 1, [("store", b"x")]).status == "stale"
    assert target.move_in(1, 0, 1, [row]) == "stale"
    shut(source, target, reslot=2)
    assert source.move_out(1, 1, [("store", b"x")]).status == "stale"
    assert target.move_in(1, 0, 1, [row]) == "stale"
    assert target.reopen(2) == "open"
    assert target.move_in(2, 0, 1, [row]) == "stale"
    assert (source.where(b"x"), target.where(b"x")) == ("W", "-")


def test_a_hand_over_that_is_repeated_arrives_once(make_slot: Make) -> None:
    source, target = pair(make_slot)
    source.send(b"x")
    shut(source, target)
    answer = source.move_out(1, 1, [("store", b"x")])
    assert source.move_out(1, 0)._replace(status="moved") == answer
    assert source.move_out(1, 0).status == "staged"
    assert target.move_in(1, 0, answer.ticket, answer.rows) == "in"
    target.remove([b"x"])
    assert target.move_in(1, 0, answer.ticket, answer.rows) == "known"
    assert target.where(b"x") == "-"
    assert source.reslot_progress().ticket == answer.ticket
    assert source.move_out(1, 0, arrived=answer.ticket).status == "nothing"
    assert source.reslot_progress().ticket == 0
    assert not source.hash("leaving")


def test_what_left_is_not_forgotten_before_it_has_arrived(make_slot: Make) -> None:
    source, target = pair(make_slot)
    source.send(b"x", b"y")
    shut(source, target)
    first = source.move_out(1, 1, [("store", b"x")])
    second = source.move_out(1, 1, [("store", b"y")])
    assert (second.status, second.rows) == ("staged", first.rows)
    assert source.where(b"y") == "W"
    target.move_in(1, 0, first.ticket, first.rows)
    third = source.move_out(1, 1, [("store", b"y")], arrived=first.ticket)
    assert (third.status, third.ticket, third.rows[0].member) == ("moved", first.ticket + 1, b"y")
    target.move_in(1, 0, third.ticket, third.rows)


def test_tickets_of_several_sources_are_kept_apart(make_slot: Make) -> None:
    slot = make_slot(slots=1)
    slot.shut(1)
    assert slot.move_in(1, 2, 5, [CopyReply("store", b"x", "50")]) == "in"
    assert slot.move_in(1, 3, 1, [CopyReply("store", b"y", "50")]) == "in"
    assert slot.move_in(1, 2, 4, [CopyReply("store", b"z", "50")]) == "known"
    assert set(slot.zset("store")) == {b"x", b"y"}
    reopen(slot)
    assert not slot.hash("arrived")


def test_a_hand_over_ends_at_its_bytes_and_at_250(make_slot: Make) -> None:
    source, target = pair(make_slot)
    source.send(b"a" * 100, b"b" * 100, b"c" * 100)
    shut(source, target)
    members = [("store", bytes([letter]) * 100) for letter in b"abc"]
    answer = source.move_out(1, 1, members, max_bytes=150)
    assert [row.member for row in answer.rows] == [b"a" * 100, b"b" * 100]
    target.move_in(1, 0, answer.ticket, answer.rows)
    last = source.move_out(1, 1, members, arrived=answer.ticket, max_bytes=1)
    assert [row.member for row in last.rows] == [b"c" * 100]
    target.move_in(1, 0, last.ticket, last.rows)
    with pytest.raises(ServerRefused):
        source.move_out(1, 1, [("store", b"x%d" % n) for n in range(251)])
    with pytest.raises(ServerRefused):
        target.move_in(1, 0, 9, [CopyReply("store", b"x", "50")] * 251)


def test_a_member_named_twice_or_gone_leaves_once_or_not(make_slot: Make) -> None:
    source, target = pair(make_slot)
    source.send(b"x")
    shut(source, target)
    answer = source.move_out(1, 1, [("store", b"x"), ("store", b"x"), ("retry", b"x"), ("store", b"gone")])
    assert [row.member for row in answer.rows] == [b"x"]
    target.move_in(1, 0, answer.ticket, answer.rows)
    assert source.move_out(1, 1, [("store", b"x")], arrived=answer.ticket).status == "nothing"


def test_a_member_that_waits_and_rests_takes_its_body_along_with_the_last_copy(make_slot: Make) -> None:
    source, target = pair(make_slot, identity="key", backoff=CONSTANT)
    source.send(b"x")
    source.fail_one(b"x", delay_ms=LATE)
    source.zadd(b"x", 50)
    shut(source, target)
    first = hand_over(source, target, ("retry", b"x"))
    assert source.hash("body")
    hand_over(source, target, ("store", b"x"), arrived=first)
    assert not source.hash("body")
    assert target.where(b"x") == "W"
    assert target.counted("dropped") == 1
    source.adopt(1, 0)
    source.strangers = 0


# --- meeting what was sent since


@pytest.mark.parametrize("kind", TYPES)
def test_a_fresh_message_merges_with_the_later_send(make_slot: Make, kind: TopicType) -> None:
    source, target = pair(make_slot, kind, identity="key")
    source.send(b"x", body=b"old")
    (score,) = source.zset("store").values()
    shut(source, target)
    source.clock.advance(1)
    target.send(b"x", score=900 if kind is not TopicType.FIXED_TIME else target.now_ms + 900, body=b"new")
    (later,) = target.zset("store").values()
    hand_over(source, target, ("store", b"x"))
    assert target.zset("store") == {b"x": score if kind is TopicType.RANGE_MERGE else later}
    assert target.hash("body")[b"x"].endswith(b"new")
    assert target.counted("dropped") == 1


@pytest.mark.parametrize(("max_wait_ms", "wait_ms"), [(60_000, 1_900), (1_500, 1_500)])
def test_a_debounced_message_waits_for_its_later_send_but_not_beyond_its_deadline(
    make_slot: Make, max_wait_ms: int, wait_ms: int
) -> None:
    source, target = pair(make_slot, TopicType.RANGE_MERGE, debounce=True, max_wait_ms=max_wait_ms)
    first = source.now_ms
    source.send(b"x", score=1_000)
    shut(source, target)
    source.clock.advance(0.9)
    target.send(b"x", score=1_000)
    hand_over(source, target, ("store", b"x"))
    (score,) = target.zset("store").values()
    assert math.floor(score) == first + wait_ms
    # Further sends know the deadline of the first one.
    reopen(target)
    target.send(b"x", score=60_000)
    (score,) = target.zset("store").values()
    assert first + max_wait_ms - math.ceil(max_wait_ms / 1_000) <= math.floor(score) <= first + max_wait_ms


@pytest.mark.parametrize("state", ["store", "retry"])
def test_a_retry_gives_way_to_the_later_send(make_slot: Make, state: str) -> None:
    source, target = pair(make_slot, backoff=CONSTANT)
    source.send(b"x")
    source.fail_one(b"x", delay_ms=0 if state == "store" else LATE)
    shut(source, target)
    target.send(b"x", score=77)
    hand_over(source, target, (state, b"x"))
    assert target.zset("store") == {b"x": 77}
    assert not target.zset("retry")
    assert target.hash("failures")


@pytest.mark.parametrize("here", ["store", "retry"])
@pytest.mark.parametrize("there", ["fresh", "store", "retry"])
def test_a_retry_that_is_here_gives_way_to_a_fresh_message_only(
    make_slot: Make, there: str, here: str
) -> None:
    source, target = pair(make_slot, backoff=CONSTANT)
    for slot, state in ((source, there), (target, here)):
        slot.send(b"x", score=55)
        if state != "fresh":
            slot.fail_one(b"x", delay_ms=0 if state == "store" else LATE)
    shut(source, target)
    kept = (target.zset("store"), target.zset("retry"))
    hand_over(source, target, ("retry" if there == "retry" else "store", b"x"))
    assert (target.zset("store"), target.zset("retry")) == (({b"x": 55}, {}) if there == "fresh" else kept)
    assert target.counted("dropped") == 1


@pytest.mark.parametrize("later", ["source", "target"])
def test_of_two_deaths_the_later_one_stays(make_slot: Make, later: str) -> None:
    source, target = pair(make_slot)
    for slot in (target, source) if later == "source" else (source, target):
        slot.send(b"x")
        slot.fail_one(b"x", kind="rejected", error=str(slot.index))
        slot.clock.advance(1)
    shut(source, target)
    wanted = (source if later == "source" else target).hash("deaths")
    hand_over(source, target, ("dead", b"x"))
    assert target.hash("deaths") == wanted
    assert target.counted("dead_merged") == 1


# --- looking


def test_the_progress_of_a_re_slotting_says_how_far_a_slot_is(make_slot: Make) -> None:
    slot = make_slot(slots=2)
    assert slot.reslot_progress() == (None, 0, False, False, 0, 0, 0, 0, 0, 0)
    slot.send(b"x", b"y")
    receipt, delivery = slot.take_one()
    slot.pause()
    slot.shut(3)
    assert slot.reslot_progress() == (2, 3, True, True, receipt, 1, 0, 0, 0, 0)
    slot.reject(receipt, delivery.member)
    slot.replay([delivery.member])
    assert slot.reslot_progress()[7:9] == (0, 1)
    slot.reschedule([60], [b"x"])
    assert slot.reslot_progress()[7:9] == (1, 1)
    slot.move_out(3, 1, [("store", b"y")])
    assert slot.reslot_progress().ticket == 1
    again = slot.move_out(3, 1)
    assert slot.with_topic().move_in(3, 0, again.ticket, again.rows) == "in"


def test_a_definition_keeps_what_is_noted_of_its_re_slottings(broker: Any, make_slot: Make) -> None:
    topic, noted = make_slot().topic, {"number": 1, "former": [4]}
    assert broker.redefine(topic.name, lambda known: known) == {}
    broker.define(topic)
    broker.redefine(topic.name, lambda known: {**known, "reslot": noted})
    broker.define(replace(topic, timeout=11), replace=True)
    found = broker.definitions()[topic.name]
    assert (found["timeout"], found["reslot"]) == (11, noted)
    assert broker.define(replace(topic, timeout=12)) == found


def test_a_definition_that_somebody_else_changed_is_changed_anew(
    redis_client: redis.Redis, prefix: str
) -> None:
    broker, topic = Broker(redis_client, prefix), Topic("topic", TopicType.PRIORITY)
    broker.define(topic)
    asked: list[int] = []

    def change(known: dict[str, Any]) -> dict[str, Any]:
        asked.append(known["timeout"])
        if len(asked) == 1:
            broker.define(replace(topic, timeout=9), replace=True)
        return {**known, "slots": 4}

    assert broker.redefine(topic.name, change)["timeout"] == 9
    assert asked == [30, 9]
