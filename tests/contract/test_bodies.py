"""Keyed messages: each copy has the body that it came with, and no newer body is lost to an older one."""

from __future__ import annotations

import pytest

from django_rmq.core.model.replies import CopyReply
from django_rmq.core.model.topic import TopicType
from tests.contract.slots import CONSTANT, NO_BACKOFF, TYPES, Make, Slot

A = b"a"
V1, V2, V3 = b"the first", b"the second", b"the third"


@pytest.fixture(params=TYPES)
def slot(request: pytest.FixtureRequest, make_slot: Make) -> Slot:
    return make_slot(request.param, identity="key", backoff=CONSTANT, max_retries=3)


def fly(slot: Slot, *, left: int = 3) -> int:
    """Hand out the first body with so many retries left, send the second one, and return the receipt."""
    slot.send(A, body=V1)
    for _ in range(3 - left):
        slot.fail_one(A, delay_ms=0)
    receipt, delivery = slot.take_one()
    assert (delivery.retries_left, delivery.envelope) == (left, slot.envelope(V1))
    slot.send(A, body=V2)
    assert slot.bodies() == {"prepare_body": V1, "body": V2}
    return receipt


def end(slot: Slot, how: str, receipt: int) -> None:
    assert slot.end(how, receipt, A, error="v1's") in (["ok"], None)


def next_body(slot: Slot) -> bytes | None:
    slot.clock.advance(2)
    envelope = slot.take_one()[1].envelope
    return None if envelope is None else envelope.rpartition(b"\n")[2]


def test_what_is_rejected_dies_with_the_body_it_was_handed_out_with(slot: Slot) -> None:
    receipt = fly(slot)
    end(slot, "reject", receipt)
    assert slot.where(A) == "WD"
    assert slot.bodies() == {"deaths": V1, "body": V2}
    [dead] = slot.list_messages("dead").entries
    assert b"v1's" in dead.record
    assert next_body(slot) == V2


@pytest.mark.parametrize("how", ["prepare", "claim"])
def test_what_expires_dies_with_its_body(make_slot: Make, how: str) -> None:
    slot = make_slot(identity="key")
    slot.send_replace([50], [A], [slot.envelope(V1, expires_ms=slot.now_ms + 500)])
    slot.clock.advance(1)
    slot.take() if how == "prepare" else slot.claim("s", 1, 60_000, 10)
    assert slot.where(A) == "D" and slot.bodies() == {"deaths": V1}


@pytest.mark.parametrize("how", ["rollback", "time_out"])
def test_what_runs_out_of_retries_dies_with_its_body_once_nothing_newer_waits(slot: Slot, how: str) -> None:
    receipt = fly(slot, left=0)
    assert slot.purge("store") == 1
    end(slot, how, receipt)
    assert slot.where(A) == "D" and slot.bodies() == {"deaths": V1}


@pytest.mark.parametrize("how", ["commit", "rollback", "release", "time_out"])
@pytest.mark.parametrize("left", [3, 0])
def test_whatever_else_ends_gives_way_to_the_newer_body(slot: Slot, how: str, left: int) -> None:
    receipt = fly(slot, left=left)
    end(slot, how, receipt)
    assert slot.where(A) == "W" and slot.bodies() == {"body": V2}
    assert next_body(slot) == V2


@pytest.mark.parametrize("how", ["rollback", "release", "time_out"])
@pytest.mark.parametrize("purged", [True, False])
def test_what_comes_back_has_the_body_it_was_handed_out_with(slot: Slot, how: str, purged: bool) -> None:
    if purged:
        receipt = fly(slot)
        assert slot.purge("store") == 1
    else:
        slot.send(A, body=V1)
        receipt, _ = slot.take_one()
    assert slot.bodies() == {"prepare_body": V1}
    end(slot, how, receipt)
    assert slot.bodies() == {"body": V1}
    assert next_body(slot) == V1


@pytest.mark.parametrize("how", ["commit", "rollback", "reject", "release", "time_out"])
def test_what_a_person_buries_in_flight_dies_with_its_body_and_the_newer_one_waits(
    slot: Slot, how: str
) -> None:
    slot.send(A, body=V1)
    receipt, _ = slot.take_one()
    assert slot.bury([A]) == ["running"]
    slot.send(A, body=V2)
    end(slot, how, receipt)
    assert slot.where(A) == "WD" and slot.bodies() == {"deaths": V1, "body": V2}


@pytest.mark.parametrize("how", ["commit", "rollback", "reject", "release", "time_out"])
@pytest.mark.parametrize("marked_again", [[], ["bury"], ["remove", "bury"]])
def test_of_two_copies_that_are_buried_the_newer_body_stays(
    slot: Slot, how: str, marked_again: list[str]
) -> None:
    receipt = fly(slot)
    assert slot.bury([A], "both") == ["running_and_waiting"]
    assert slot.bodies() == {"prepare_body": V1, "deaths": V2}
    for mark in marked_again:
        assert getattr(slot, mark)([A]) == ["running"]
    end(slot, how, receipt)
    assert slot.where(A) == "D" and slot.bodies() == {"deaths": V2}
    assert (slot.counted("ended_marked"), slot.counted("dropped"), slot.counted("died")) == (1, 1, 1)


def test_what_was_buried_with_a_newer_copy_dies_where_that_one_is_gone(slot: Slot) -> None:
    receipt = fly(slot)
    slot.bury([A])
    assert slot.remove([A], "dead") == ["dead"]
    end(slot, "rollback", receipt)
    assert slot.where(A) == "D" and slot.bodies() == {"deaths": V1}


def test_a_newer_copy_that_was_buried_is_replayed_past_the_older_one_in_flight(slot: Slot) -> None:
    receipt = fly(slot)
    slot.bury([A])
    assert slot.replay([A]) == ["replayed"]
    assert slot.bodies() == {"prepare_body": V1, "body": V2}
    end(slot, "rollback", receipt)
    assert slot.where(A) == "WD" and slot.bodies() == {"deaths": V1, "body": V2}


@pytest.mark.parametrize("mark", ["bury", "remove"])
def test_a_replay_does_not_merge_with_a_delivery_that_a_person_has_ended(slot: Slot, mark: str) -> None:
    slot.send(A, body=V1)
    slot.kill(A)
    slot.send(A, body=V2)
    receipt, _ = slot.take_one()
    getattr(slot, mark)([A], *(["live"] if mark == "remove" else []))
    assert slot.replay([A]) == ["replayed"]
    end(slot, "commit", receipt)
    left = {"deaths": V2} if mark == "bury" else {}
    assert slot.bodies() == {**left, "body": V1}


def dead_and_running(slot: Slot, *, claimed: bool) -> int:
    """Bring the first body into Dead and hand out the second one."""
    slot.send(A, body=V1)
    slot.kill(A)
    slot.send(A, body=V2)
    if claimed:
        assert slot.claim("s", 1, 60_000, 10).taken == 1
        return 1
    return slot.take_one()[0]


@pytest.mark.parametrize("claimed", [False, True])
def test_an_older_body_is_not_replayed_past_the_newer_one_that_runs(slot: Slot, claimed: bool) -> None:
    number = dead_and_running(slot, claimed=claimed)
    assert slot.replay([A]) == ["merged"]
    assert slot.where(A) == ("C" if claimed else "F")
    assert slot.bodies() == {"claim_body" if claimed else "prepare_body": V2}
    if claimed:
        assert slot.return_claim("s", number, spent=True) == ("ok", 0)
    else:
        end(slot, "rollback", number)
    assert slot.where(A) == "T" and slot.bodies() == {"body": V2}
    assert next_body(slot) == V2


@pytest.mark.parametrize("claimed", [False, True])
def test_a_replay_with_a_new_body_waits_behind_what_runs(slot: Slot, claimed: bool) -> None:
    number = dead_and_running(slot, claimed=claimed)
    edited = slot.envelope(V3)
    assert edited is not None
    assert slot.replay([A], [edited]) == ["replayed"]
    assert slot.bodies() == {"claim_body" if claimed else "prepare_body": V2, "body": V3}
    if claimed:
        assert slot.return_claim("s", number, spent=True) == ("ok", 0)
    else:
        end(slot, "reject", number)
    assert slot.bodies() == {**({} if claimed else {"deaths": V2}), "body": V3}
    assert next_body(slot) == V3


def test_a_body_that_waits_behind_a_claim_is_not_dead_before_the_older_one(slot: Slot) -> None:
    slot.send(A, body=V1)
    slot.claim("s", 1, 60_000, 10)
    slot.send(A, body=V2)
    assert slot.bury([A]) == ["running_and_waiting"]
    assert slot.bodies() == {"claim_body": V1, "body": V2}
    slot.return_claim("s", 1)
    assert slot.bury([A]) == ["waiting"]
    assert slot.bodies() == {"deaths": V2}


@pytest.mark.parametrize("how", ["commit", "rollback", "reject", "release", "time_out", "claim"])
def test_what_a_stranger_sends_meanwhile_has_the_body_of_what_ran(slot: Slot, how: str) -> None:
    slot.send(A, body=V1)
    if how == "claim":
        slot.claim("s", 1, 60_000, 10)
    else:
        receipt, _ = slot.take_one()
    slot.zadd(A, slot.fresh_score())
    if how == "claim":
        slot.return_claim("s", 1)
    else:
        end(slot, how, receipt)
    assert slot.bodies() == {"body": V1, **({"deaths": V1} if how == "reject" else {})}


def test_whoever_looks_sees_the_body_of_each_copy(slot: Slot) -> None:
    receipt = fly(slot)
    [running], [waiting] = slot.list_messages("prepare").entries, slot.list_messages("store").entries
    assert (running.envelope, waiting.envelope) == (slot.envelope(V1), slot.envelope(V2))
    assert (
        len(slot.search_messages("prepare", V1).entries)
        == len(slot.search_messages("store", V2).entries)
        == 1
    )
    assert not slot.search_messages("prepare", V2).entries and not slot.search_messages("store", V1).entries
    [looked] = slot.describe_messages([A])
    assert (looked.delivered_envelope, looked.envelope) == (slot.envelope(V1), slot.envelope(V2))
    [held] = slot.list_held("A")
    assert (held.receipt, held.delivery.envelope) == (receipt, slot.envelope(V1))


@pytest.mark.parametrize("kind", ["body", "prepare_body"])
def test_a_body_without_its_message_is_found_and_deleted(slot: Slot, kind: str) -> None:
    receipt = fly(slot)
    slot.keyspace.hset(getattr(slot.keys, kind), b"nobody's", b"0 {}\nlost")
    assert slot.find_orphans(kind).members == [b"nobody's"]
    assert slot.find_orphans(kind, repair=True).members == [b"nobody's"]
    assert slot.find_orphans(kind).members == [] and slot.bodies() == {"prepare_body": V1, "body": V2}
    end(slot, "commit", receipt)


def test_bodies_by_the_hundred_are_handed_out_and_end(slot: Slot) -> None:
    names = [b"%d" % n for n in range(200)]
    slot.send(*names, score=100 if slot.topic.is_priority else None)
    answer = slot.take(200)
    assert len(slot.hash("prepare_body")) == 200 and not slot.hash("body")
    assert set(slot.hash("prepare_body").values()) == {slot.envelope()}
    assert slot.commit(answer.receipt, names) == ["ok"] * 200
    assert not slot.hash("prepare_body")


@pytest.mark.parametrize("kind", [TopicType.RANGE_MERGE, TopicType.FIXED_TIME])
def test_a_fresh_message_that_moves_in_over_a_resting_one_has_its_own_body(
    make_slot: Make, kind: TopicType
) -> None:
    slot = make_slot(kind, identity="key", backoff=NO_BACKOFF)
    slot.send(A, body=V1)
    slot.fail_one(A, delay_ms=60_000)
    assert slot.shut(1) == "shut"
    envelope = slot.envelope(V2)
    assert envelope is not None
    moved = slot.counted("moved_in")
    row = CopyReply("store", A, str(slot.now_ms), b"", envelope)
    assert slot.move_in(1, 1, 1, [row]) == "in"
    assert slot.counted("moved_in") == moved + 1
    assert slot.where(A) == "W" and slot.bodies() == {"body": V2}


def test_a_delivery_beside_a_message_that_has_expired_is_not_plain(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIXED_TIME, identity="key")
    slot.send_replace([slot.now_ms], [A], [slot.envelope(V1, expires_ms=slot.now_ms + 5)])
    slot.zadd(b"stranger", 1_000_000)
    slot.clock.advance("10ms")
    taken = slot.prepare("W", None, 10)
    assert [one.member for one in taken.deliveries] == [b"stranger"]
    assert not taken.is_plain, "the body of the other one was read, too"
