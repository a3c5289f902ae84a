"""What a plain ZADD puts into Store: any score, any member, also one that rests, runs or is dead here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_rmq.memory import Clock
from django_rmq.messages import TopicType
from tests.contract.slots import TYPES, Slot

MakeSlot = Callable[..., Slot]
INFINITE = float("inf")


def resting_and_sent_by_a_stranger(slot: Slot, score: float | None = None) -> None:
    slot.send(b"a")
    receipt, _ = slot.take_one()
    slot.fail(receipt, b"a", delay_ms=5_000, error="diagnosis")
    slot.zadd(b"a", slot.fresh_score() if score is None else score)
    assert sorted(slot.where(b"a")) == sorted("WT" if score is None else "wT")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("identity", ["body", "key"])
def test_a_strangers_send_supersedes_the_resting_retry_when_it_is_taken(
    make_slot: MakeSlot, kind: TopicType, identity: str
) -> None:
    slot = make_slot(kind, identity=identity)
    resting_and_sent_by_a_stranger(slot)
    receipt, delivery = slot.take_one()
    assert (delivery.retries_left, delivery.envelope) == (16, slot.envelope())
    assert slot.where(b"a") == "F"
    assert slot.fail(receipt, b"a", delay_ms=0) == ["ok"]
    assert slot.where(b"a") == "w"


@pytest.mark.parametrize("kind", TYPES)
def test_a_resting_retry_that_finds_a_strangers_send_is_dropped(
    make_slot: MakeSlot, kind: TopicType, clock: Clock
) -> None:
    slot = make_slot(kind)
    resting_and_sent_by_a_stranger(slot)
    clock.advance(seconds=6)
    assert slot.promote() == 1
    assert slot.where(b"a") == "W"
    assert slot.counted("dropped") == 1


@pytest.mark.parametrize("kind", TYPES)
def test_a_send_that_meets_both_merges_with_the_strangers_and_drops_the_resting_one(
    make_slot: MakeSlot, kind: TopicType
) -> None:
    slot = make_slot(kind)
    resting_and_sent_by_a_stranger(slot)
    merges = kind is TopicType.RANGE_MERGE
    assert slot.send(b"a")[0].status == ("merged" if merges else "replaced")
    assert slot.where(b"a") == "W"
    assert slot.counted("dropped") == 1


@pytest.mark.parametrize("kind", TYPES)
def test_a_send_that_meets_a_strangers_retry_score_and_a_resting_retry_supersedes_both(
    make_slot: MakeSlot, kind: TopicType
) -> None:
    slot = make_slot(kind)
    resting_and_sent_by_a_stranger(slot, 7)
    assert slot.send(b"a")[0].status == "superseded"
    assert slot.where(b"a") == "W"
    assert slot.counted("dropped") == 2


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("purged", "left"), [("store", "T"), ("retry", "W")])
def test_purging_one_of_two_live_copies_keeps_body_and_diagnosis_of_the_other(
    make_slot: MakeSlot, kind: TopicType, purged: str, left: str
) -> None:
    slot = make_slot(kind, identity="key")
    resting_and_sent_by_a_stranger(slot)
    assert slot.purge(purged) == 1
    assert slot.where(b"a") == left
    assert slot.hash("body") == {b"a": slot.envelope()}
    assert set(slot.hash("failures")) == {b"a"}
    assert slot.purge("store") + slot.purge("retry") == 1
    assert not slot.hash("body") and not slot.hash("failures")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("action", ["bury", "remove"])
def test_a_person_acts_on_both_live_copies_at_once(make_slot: MakeSlot, kind: TopicType, action: str) -> None:
    slot = make_slot(kind, identity="key")
    resting_and_sent_by_a_stranger(slot)
    assert getattr(slot, action)([b"a"]) == ["waiting"]
    assert slot.where(b"a") == ("D" if action == "bury" else "-")
    assert not slot.hash("body") and not slot.hash("failures")


def test_rescheduling_a_strangers_retry_score_drops_the_resting_one(make_slot: MakeSlot) -> None:
    slot = make_slot(TopicType.FIXED_TIME)
    resting_and_sent_by_a_stranger(slot, 7)
    assert slot.reschedule([slot.now_ms + 9_000], [b"a"]) == ["retry"]
    assert slot.zset("retry") == {b"a": slot.now_ms + 9_000 + 7 / 1024}
    assert slot.counted("dropped") == 1


def test_a_lapsed_message_sent_by_a_stranger_while_it_rests_dies_once(
    make_slot: MakeSlot, clock: Clock
) -> None:
    slot = make_slot(identity="key")
    slot.send_replace([50], [b"a"], [slot.envelope(expires_ms=slot.now_ms + 1_000)])
    receipt, _ = slot.take_one()
    slot.fail(receipt, b"a", delay_ms=5_000)
    slot.zadd(b"a", 60)
    clock.advance(seconds=2)
    assert slot.take().status == "empty"
    assert slot.where(b"a") == "D"
    assert slot.counted("dropped") == 1 and slot.counted("lapsed") == 1


@pytest.mark.parametrize("kind", [TopicType.RANGE_MERGE, TopicType.FIXED_TIME])
@pytest.mark.parametrize("end", ["commit", "fail", "release"])
def test_a_delivery_whose_newer_copy_rests_ends_without_touching_it(
    make_slot: MakeSlot, kind: TopicType, end: str
) -> None:
    slot = make_slot(kind, identity="key")
    slot.send(b"a")
    receipt, _ = slot.take_one()
    slot.zadd(b"a", 7)
    slot.reschedule([slot.now_ms + 9_000], [b"a"])
    assert sorted(slot.where(b"a")) == ["F", "T"]
    rest = slot.zset("retry")
    words = slot.fail(receipt, b"a") if end == "fail" else getattr(slot, end)(receipt, [b"a"])
    assert words == ["ok"]
    assert slot.where(b"a") == "T" and slot.zset("retry") == rest
    assert slot.hash("body") == {b"a": slot.envelope()}


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (-INFINITE, b"-inf"),
        (INFINITE, b"inf"),
        (0.1, b"0.10000000000000001"),
        (1e300, b"1.0000000000000001e+300"),
        (1e20, b"1e+20"),
    ],
)
def test_a_score_is_kept_in_one_form_whatever_the_version_of_redis(
    make_slot: MakeSlot, score: float, text: bytes
) -> None:
    slot = make_slot()
    slot.zadd(b"a", score)
    receipt, _ = slot.take_one()
    assert slot.hash("inflight") == {b"a": b"1 " + text}
    assert slot.release(receipt, [b"a"]) == ["ok"]
    assert slot.zset("store") == {b"a": score}
    slot.bury([b"a"])
    assert slot.hash("deaths")[b"a"].split(b" ")[4] == text
