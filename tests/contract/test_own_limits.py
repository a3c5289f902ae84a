"""Messages with a number of retries and a time-out of their own: delivered by them, and kept wherever the message goes."""

from __future__ import annotations

from typing import Any

import pytest

from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.topic import BackOff, TopicType
from django_rmq.testing import Clock
from tests.contract.slots import CONSTANT, NO_BACKOFF, START_MS, Make, Slot
from tests.oracle.operate import RESTAMPED

KINDS = [
    pytest.param({"type": kind, "retry_priority": retry}, id=f"{kind.value}-{retry}")
    for kind in TopicType
    for retry in (["original", "lowest"] if kind is TopicType.PRIORITY else ["original"])
]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, make_slot: Make) -> Make:
    return lambda **options: make_slot(
        **{**request.param, "identity": "key", "backoff": NO_BACKOFF, "on_duplicate": "replace", **options}
    )


def send(slot: Slot, *members: bytes, **limits: Any) -> None:
    slot.send(*members, envelope=slot.envelope(**limits))


# --- retries


@pytest.mark.parametrize("backoff", [NO_BACKOFF, CONSTANT], ids=["at once", "resting"])
@pytest.mark.parametrize("own", [0, 1, 3, 16])
def test_a_message_that_always_fails_is_tried_as_often_as_it_says(
    make: Make, own: int, backoff: BackOff
) -> None:
    slot = make(backoff=backoff)
    send(slot, b"a", max_retries=own)
    assert slot.fail_to_death(b"a") == list(range(own, -1, -1))


def test_other_messages_have_the_retries_of_the_topic(make: Make) -> None:
    slot = make(serial=False, order="loose")
    send(slot, b"a", max_retries=1)
    send(slot, b"b")
    send(slot, b"c", timeout=5)
    prepared = slot.take()
    assert {each.member: each.retries_left for each in prepared.deliveries} == {b"a": 1, b"b": 16, b"c": 16}


def test_a_number_above_that_of_the_topic_counts_as_that_of_the_topic(make: Make) -> None:
    slot = make(max_retries=2)
    send(slot, b"a", max_retries=900)
    assert slot.fail_to_death(b"a") == [2, 1, 0]


def test_the_rests_between_few_retries_begin_with_the_shortest(make: Make) -> None:
    slot = make(backoff=BackOff(1_000, 64_000))
    send(slot, b"a", max_retries=2)
    rests = []
    for _ in range(2):
        receipt, _delivery = slot.take_one()
        slot.fail(receipt, b"a")
        rests.append(int(slot.zset("retry")[b"a"]) - slot.now_ms)
        slot.clock.advance(64)
    assert 500 <= rests[0] <= 1_000 <= rests[1] <= 2_000


def test_a_later_send_brings_its_own_limits(make: Make) -> None:
    slot = make()
    send(slot, b"a", max_retries=1, timeout=3)
    send(slot, b"a", max_retries=4)
    prepared = slot.take()
    assert prepared.deliveries[0].retries_left == 4
    assert prepared.timeout is None


def test_a_replay_has_the_retries_of_the_message_again(make: Make) -> None:
    slot = make()
    send(slot, b"a", max_retries=2)
    assert slot.fail_to_death(b"a") == [2, 1, 0]
    assert slot.replay([b"a"]) == ["replayed"]
    assert slot.fail_to_death(b"a") == [2, 1, 0]


def test_what_is_released_has_its_retries_again(make: Make) -> None:
    slot = make()
    send(slot, b"a", max_retries=2)
    receipt, _ = slot.take_one()
    slot.release(receipt, [b"a"])
    assert slot.fail_to_death(b"a") == [2, 1, 0]


def test_a_lost_claim_counts_against_the_retries_of_the_message(make: Make) -> None:
    slot = make()
    send(slot, b"a", max_retries=1)
    for number in (1, 2):
        assert slot.claim("s", number, 1_000, 10).taken == 1
        slot.renew_claim("s", number, 1_000, seal=True)
        slot.clock.advance("1001ms")
        slot.time_out()
    assert slot.where(b"a") == "D"


# --- time-outs


def test_a_delivery_times_out_by_the_time_out_of_its_message(make: Make, clock: Clock) -> None:
    slot = make(timeout=30, serial=False, order="loose")
    send(slot, b"a", timeout=5)
    send(slot, b"b")
    assert len(slot.take().deliveries) == 2
    clock.advance(5)
    assert slot.time_out() == 0
    clock.advance(1)
    assert slot.time_out() == 1
    assert set(slot.zset("prepare")) == {b"b"}
    assert slot.counted("expired") == 1


def test_a_time_out_above_that_of_the_topic_counts_as_that_of_the_topic(make: Make, clock: Clock) -> None:
    slot = make(timeout=5)
    send(slot, b"a", timeout=900)
    assert slot.take().timeout == 5
    clock.advance(6)
    assert slot.time_out() == 1


def test_a_clock_that_is_set_back_lengthens_no_time_out_of_a_message(make: Make, clock: Clock) -> None:
    slot = make(timeout=3_600)
    send(slot, b"a", timeout=5)
    slot.take_one()
    clock.advance(-7_200)
    assert slot.time_out() == 0
    clock.advance(6)
    assert slot.time_out() == 1


@pytest.mark.parametrize("timeout_of_topic", [30, 60])
def test_extending_restarts_the_time_out_of_the_message(make: Make, timeout_of_topic: int) -> None:
    slot = make(timeout=30)
    send(slot, b"a", max_retries=3, timeout=5)
    receipt, _ = slot.take_one()
    slot = slot.with_topic(timeout=timeout_of_topic)
    assert slot.configure() == "ok"
    slot.clock.advance(4)
    assert slot.extend(receipt, [b"a"]) == ["ok"]
    slot.clock.advance(5)
    assert slot.time_out() == 0
    slot.clock.advance(1)
    assert slot.time_out() == 1
    assert slot.take_one()[1].retries_left == 2


@pytest.mark.parametrize(("before", "after"), [(30, 60), (60, 30), (30, 3), (3, 30)])
def test_a_time_out_of_a_message_stays_what_it_is_when_that_of_the_topic_changes(
    make: Make, clock: Clock, before: int, after: int
) -> None:
    slot = make(timeout=before, serial=False, order="loose")
    send(slot, b"a", timeout=5)
    send(slot, b"b")
    send(slot, b"c", timeout=900)
    assert len(slot.take().deliveries) == 3
    slot = slot.with_topic(timeout=after)
    assert slot.configure() == "ok"
    lasted = dict.fromkeys([b"a", b"b", b"c"], 0)
    while running := slot.zset("prepare").keys():
        for member in running:
            lasted[member] += 1
        clock.advance(1)
        slot.time_out()
    assert lasted == {b"a": min(5, after) + 1, b"b": after + 1, b"c": after + 1}


def test_a_time_out_of_a_message_comes_back_when_that_of_its_topic_is_raised_again(make: Make) -> None:
    slot = make(timeout=30)
    send(slot, b"a", timeout=5)
    slot.take()
    stamps = [slot.zset("prepare")]
    for seconds in (2, 30, 5, 604_800, 30):
        assert slot.with_topic(timeout=seconds).configure() == "ok"
        stamps.append(slot.zset("prepare"))
    assert stamps[0] == stamps[2] == stamps[5] == {b"a": START_MS - 25_000 + 16}
    assert stamps[1] == stamps[3] == {b"a": START_MS + 16}


def test_of_many_deliveries_those_that_time_out_first_keep_their_time_outs(
    make_slot: Make,
) -> None:
    slot = make_slot(
        TopicType.FIXED_TIME, identity="key", timeout=30, serial=False, max_prepared=10_000, max_retries=0
    )
    names = [b"%04d" % number for number in range(RESTAMPED + 1)]
    for first in range(0, len(names), BATCH):
        part = names[first : first + BATCH]
        slot.send_replace([slot.now_ms] * len(part), part, [slot.envelope(timeout=5)] * len(part))
        slot.take(limit=BATCH)
    assert slot.with_topic(timeout=60).configure() == "ok"
    stamps = slot.zset("prepare")
    assert len(stamps) == len(names)
    assert {stamps[name] for name in names[:-1]} == {START_MS - 55_000}
    assert stamps[names[-1]] == START_MS - 25_000


def test_the_time_out_outlives_a_mark(make: Make, clock: Clock) -> None:
    slot = make(timeout=30)
    send(slot, b"a", timeout=5)
    receipt, _ = slot.take_one()
    assert slot.bury([b"a"]) == ["running"]
    assert slot.extend(receipt, [b"a"]) == ["ok"]
    clock.advance(6)
    assert slot.time_out() == 1
    assert slot.where(b"a") == "D"


def test_a_message_that_timed_out_waits_with_the_score_it_had(make: Make) -> None:
    slot = make(timeout=30)
    send(slot, b"a", timeout=5)
    score = slot.zset("store")[b"a"]
    receipt, _ = slot.take_one()
    assert slot.release(receipt, [b"a"]) == ["ok"]
    assert slot.zset("store") == {b"a": score}


def test_who_takes_and_who_asks_what_he_holds_is_told_the_shortest_time_out(
    make: Make,
) -> None:
    slot = make(timeout=30, order="loose")
    send(slot, b"a", timeout=9)
    send(slot, b"b", timeout=4)
    send(slot, b"c", max_retries=1)
    assert slot.take().timeout == 4
    held = slot.list_held("A")
    assert {one.delivery.member: one.timeout for one in held} == {b"a": 9, b"b": 4, b"c": None}


def test_a_suspect_is_told_with_its_time_out(make: Make, clock: Clock) -> None:
    slot = make(timeout=30)
    send(slot, b"a", timeout=4)
    slot.take_one()
    clock.advance(5)
    prepared = slot.take()
    assert (prepared.is_suspect, prepared.timeout) == (True, 4)


def test_the_next_look_at_a_slot_is_when_the_shortest_time_out_is_over(make: Make, clock: Clock) -> None:
    slot = make(timeout=30)
    send(slot, b"a", timeout=4)
    slot.take_one()
    due = slot.take(owner="B").next_due
    assert due is not None
    clock.advance((due - slot.now_ms) / 1000)
    assert slot.time_out() == 1
    assert due <= 1_800_000_000_000 + 6_000


# --- without limits


def test_a_message_without_limits_leaves_no_trace_of_them(make: Make) -> None:
    slot = make()
    send(slot, b"a", headers={"!": "5 5"})
    prepared = slot.take()
    assert (prepared.timeout, prepared.deliveries[0].retries_left) == (None, 16)
    assert b":" not in slot.hash("inflight")[b"a"]


@pytest.mark.parametrize("head", [b'0 {"!":5}', b'0 {"!":"x y"}', b'0 {"!":"5"}', b"0 !", b'0 {"!'])
def test_limits_that_cannot_be_read_are_those_of_the_topic(make: Make, head: bytes) -> None:
    slot = make()
    slot.send(b"a", envelope=head + b"\nbody")
    prepared = slot.take()
    assert (prepared.timeout, prepared.deliveries[0].retries_left) == (None, 16)


def test_collected_bodies_have_the_limits_of_the_last_send(make_slot: Make, clock: Clock) -> None:
    slot = make_slot(TopicType.RANGE_MERGE, identity="key", accumulate=10, backoff=NO_BACKOFF)
    for own in (5, 1):
        slot.send_merge(0, [b"a"], [slot.envelope(b"x", bodies=(b"x",), max_retries=own, timeout=own)])
    prepared = slot.take()
    assert (prepared.timeout, prepared.deliveries[0].retries_left) == (1, 1)
