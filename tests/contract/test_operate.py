"""What people do: pause, configure, bury, remove, replay, reschedule, purge, and forget a slot that nobody uses."""

from __future__ import annotations

import pytest

from django_rmq.core.model.replies import Death, FailureRecord
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ServerRefused
from django_rmq.testing import Clock
from tests.contract.slots import CONSTANT, NO_BACKOFF, TYPES, Make, Slot, each_type, slot_of_each

A = b"a"


def death(slot: Slot, member: bytes) -> Death:
    return Death.parse(slot.hash("deaths")[member])


@slot_of_each(TYPES, backoff=CONSTANT)
@pytest.mark.parametrize("action", ["bury", "remove"])
def test_each_member_of_a_call_is_answered_by_itself(slot: Slot, action: str) -> None:
    slot.bring_one_into_each()
    words = getattr(slot, action)([b"waits", b"nobody", b"runs", b"rests", b"dead", b"waits"])
    again = "dead" if action == "bury" else "not_found"
    assert words == ["waiting", "not_found", "running", "resting", "dead", again]


@slot_of_each(TYPES, identity="key", max_retries=1, backoff=NO_BACKOFF)
def test_a_death_tells_why_how_often_when_and_with_what(slot: Slot, clock: Clock) -> None:
    slot.send(b"a", body=b"the body")
    score = slot.zset("store")[b"a"]
    first_ms = slot.now_ms
    slot.fail_one(b"a", error="once")
    clock.advance(3)
    slot.fail_one(b"a", error="twice", kind="undecodable")
    told = death(slot, b"a")
    assert told == Death(
        "undecodable", 2, first_ms, slot.now_ms, f"{score:.17g}", b"twice", slot.envelope(b"the body")
    )


@slot_of_each(TYPES, max_retries=0)
@pytest.mark.parametrize("how", ["rejected", "timed_out", "buried", "failed"])
def test_the_reason_of_a_death(slot: Slot, how: str) -> None:
    slot.send(b"a")
    if how == "buried":
        slot.bury([b"a"], "no use")
    else:
        receipt, _ = slot.take_one()
        if how == "timed_out":
            slot.clock.advance(31)
            slot.time_out()
        else:
            slot.fail(receipt, b"a", kind=how, error="no use")
    told = death(slot, b"a")
    assert told.reason == how
    assert told.error == (b"" if how == "timed_out" else b"no use")
    assert told.times == (0 if how == "buried" else 1)


@each_type
def test_who_dies_again_is_overwritten(slot: Slot, clock: Clock) -> None:
    for reason in ("first", "second"):
        slot.send(b"a")
        slot.bury([b"a"], reason)
        clock.advance(1)
    assert death(slot, b"a").error == b"second"
    assert slot.zset("dead") == {b"a": slot.now_ms - 1_000}
    assert slot.counted("dead_merged") == 1


@slot_of_each(TYPES, backoff=NO_BACKOFF)
def test_a_failure_record_stays_while_the_member_lives_and_tells_the_last_failure(slot: Slot) -> None:
    slot.send(b"a")
    score, first_ms = slot.zset("store")[b"a"], slot.now_ms
    for times, error in enumerate(["one", "two"], 1):
        slot.fail_one(b"a", error=error)
        told = FailureRecord.parse(slot.hash("failures")[b"a"])
        assert told == FailureRecord("failed", times, first_ms, slot.now_ms, f"{score:.17g}", error.encode())
        slot.clock.advance(1)
    slot.send(b"a")
    receipt, _ = slot.take_one()
    assert b"a" in slot.hash("failures")
    slot.send(b"a")
    slot.commit(receipt, [b"a"])
    assert b"a" in slot.hash("failures")
    slot.commit(slot.take_one()[0], [b"a"])
    assert slot.hash("failures") == {}


@slot_of_each(TYPES, identity="key")
def test_discarding_deletes_the_death_that_was_seen_and_no_later_one(slot: Slot, clock: Clock) -> None:
    for member in (b"a", b"b", b"c"):
        slot.send(member)
    slot.bury([b"a", b"b"])
    seen = slot.zset("dead")
    clock.advance(1)
    slot.replay([b"b"])
    slot.bury([b"b"])
    assert slot.discard([seen[b"a"], seen[b"b"], 1.0], [b"a", b"b", b"c"]) == ["dead", "changed", "not_found"]
    assert slot.discard([seen[b"a"]], [b"a"]) == ["not_found"]
    assert (slot.where(b"a"), slot.where(b"b"), slot.where(b"c")) == ("-", "D", "W")
    assert set(slot.hash("deaths")) == {b"b"}
    assert slot.counted("removed_dead") == 1 and slot.audit_ledger().balanced


# --- replay


@slot_of_each(TYPES, max_retries=2, backoff=NO_BACKOFF)
def test_replay_gives_the_full_budget_and_the_old_priority(slot: Slot) -> None:
    slot.send(b"a", score=90 if slot.topic.type is TopicType.PRIORITY else None)
    for _ in range(3):
        slot.fail_one(b"a")
    assert slot.replay([b"a", b"b"]) == ["replayed", "not_found"]
    assert slot.zset("store") == {b"a": 90 if slot.topic.type is TopicType.PRIORITY else slot.now_ms}
    assert slot.take_one()[1].retries_left == 2


@pytest.mark.parametrize("score", [float("-inf"), -3.0, 0.0, 5.0, 16.0, 1e300, float("inf")])
def test_replay_of_what_had_a_strangers_score_is_a_fresh_priority(make_slot: Make, score: float) -> None:
    slot = make_slot()
    slot.zadd(b"a", score)
    slot.bury([b"a"])
    slot.replay([b"a"])
    assert slot.zset("store")[b"a"] in (17, 1 << 43)
    assert slot.take_one()[1].retries_left == 16


@slot_of_each(TYPES, identity="key")
def test_replay_may_bring_a_new_body(slot: Slot) -> None:
    slot.send(b"a", b"b", body=b"old")
    slot.bury([b"a", b"b"])
    assert not slot.hash("body")
    slot.replay([b"a", b"b"], [slot.envelope(b"new"), b""])
    assert slot.hash("body") == {b"a": slot.envelope(b"new"), b"b": slot.envelope(b"old")}


def test_replay_of_an_article_systems_dead_message_needs_no_record(make_slot: Make) -> None:
    slot = make_slot()
    slot.keyspace.zadd(slot.keys.dead, b"a", 12_345)
    assert slot.replay([b"a"]) == ["replayed"]
    assert slot.zset("store") == {b"a": 17}
    ledger = slot.audit_ledger()
    assert ledger.dead_drift == 1, "it came into Dead without having died here"
    slot.keyspace.hset(slot.keys.stats, b"died", b"1")
    slot.keyspace.hset(slot.keys.stats, b"stored", b"1")


# --- reschedule and purge


@each_type
def test_reschedule_refuses_a_bad_score_as_a_whole(slot: Slot) -> None:
    slot.send(b"a", b"b")
    before = slot.snapshot()
    with pytest.raises(ServerRefused):
        slot.reschedule([slot.now_ms, 5], [b"a", b"b"])
    assert slot.snapshot() == before


@slot_of_each(TYPES, backoff=CONSTANT, identity="key")
@pytest.mark.parametrize("state", ["store", "retry", "dead"])
def test_purge_takes_the_lowest_scores_up_to_a_bound_and_a_number(slot: Slot, state: str) -> None:
    for n in range(6):
        slot.send(b"%d" % n, score=20 + n if slot.topic.type is TopicType.PRIORITY else None)
        if state != "store":
            receipt, delivery = slot.take_one()
            slot.fail(receipt, delivery.member, kind="failed" if state == "retry" else "rejected")
        slot.clock.advance("5ms")
    scores = sorted(slot.zset(state).values())
    assert slot.purge(state, scores[3], 2) == 2
    assert sorted(slot.zset(state).values()) == scores[2:]
    assert slot.purge(state, scores[3]) == 2
    assert slot.purge(state, min_score=scores[5] + 1) == 0
    assert slot.purge(state, min_score=scores[5]) == 1
    assert slot.purge(state) == 1
    assert slot.purge(state) == 0
    assert not slot.hash("body") and not slot.hash("deaths")


def test_purge_never_takes_what_is_in_flight(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(b"a")
    slot.take_one()
    with pytest.raises(ValueError, match="prepare"):
        slot.purge("prepare")
    assert slot.purge("store") == 0 and slot.where(b"a") == "F"


# --- messages that expire


@slot_of_each(TYPES, identity="key")
def test_a_keyed_message_is_not_delivered_after_its_expiry(slot: Slot, clock: Clock) -> None:
    envelope = slot.envelope(expires_ms=slot.now_ms + 1_000)
    slot.send(b"a", envelope=envelope)
    clock.advance(1)
    receipt, delivery = slot.take_one()
    assert delivery.envelope == envelope
    slot.release(receipt, [b"a"])
    slot.send(b"good")
    clock.advance("1ms")
    answer = slot.take()
    assert [delivery.member for delivery in answer.deliveries] == [b"good"]
    assert slot.where(b"a") == "D"
    told = death(slot, b"a")
    assert (told.reason, told.times, told.envelope) == ("lapsed", 0, envelope)
    slot.commit(answer.receipt, [b"good"])
    slot.send(b"b", envelope=envelope)
    answer = slot.take()
    assert (answer.status, answer.next_due) == ("empty", slot.now_ms)
    assert slot.counted("lapsed") == 2


# --- records that belong to nothing


def all_loose(slot: Slot, kind: str, *, repair: bool = False) -> list[bytes]:
    cursor, found, scanned = "0", [], 0
    before = len(slot.hash(kind))
    while True:
        page = slot.find_orphans(kind, cursor, repair)
        found += page.members
        scanned += page.scanned
        cursor = page.cursor
        if cursor == "0":
            assert scanned >= before
            return sorted(set(found))


@pytest.mark.parametrize("kind", ["inflight", "deaths", "failures", "body"])
def test_records_that_belong_to_no_message_are_found_and_deleted(make_slot: Make, kind: str) -> None:
    slot = make_slot(backoff=CONSTANT, identity="key")
    slot.bring_one_into_each()
    assert all_loose(slot, kind) == []
    kept = slot.hash(kind)
    assert kept
    # So many that Redis hands them out in parts.
    strays = sorted(b"stray-%d" % n for n in range(700))
    for stray in strays:
        slot.keyspace.hset(getattr(slot.keys, kind), stray, b"x")
    before = slot.snapshot()
    assert all_loose(slot, kind) == strays
    assert slot.snapshot() == before, "looking changes nothing"
    assert all_loose(slot, kind, repair=True) == strays
    assert slot.hash(kind) == kept and all_loose(slot, kind) == []


def test_what_spark_holds_keeps_its_records(make_slot: Make) -> None:
    slot = make_slot(identity="key", backoff=NO_BACKOFF)
    slot.send(b"a")
    slot.fail_one(b"a")
    assert slot.claim("spark", 1, 60_000, 10).taken == 1
    assert slot.hash("failures") and slot.hash("claim_body")
    assert all_loose_ends(slot, repair=True) == []
    [looked] = slot.describe_messages([b"a"])
    assert looked.claim is not None and looked.claimed_envelope == slot.envelope()
    assert (looked.store, looked.retry, looked.envelope) == (None, None, None)
    slot.keyspace.hset(slot.keys.claim_body, b"gone", b"x")
    assert all_loose_ends(slot, repair=True) == [b"gone"]


def all_loose_ends(slot: Slot, *, repair: bool = False) -> list[bytes]:
    kinds = ("body", "failures", "claim_body")
    return [member for kind in kinds for member in slot.find_orphans(kind, "0", repair).members]


def test_purging_what_waits_leaves_the_diagnosis_of_what_runs(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(b"a")
    slot.fail_one(b"a", delay_ms=0)
    slot.take_one()
    slot.send(b"a")
    assert slot.where(b"a") == "FW"
    slot.purge("store")
    assert b"a" in slot.hash("failures")


@pytest.mark.parametrize(("before", "after"), [(16, 20), (3, 17), (20, 16), (20, 21)])
@pytest.mark.parametrize("prepared", [True, False])
def test_the_retries_of_a_priority_topic_change_only_where_no_live_score_would_read_otherwise(
    make_slot: Make, before: int, after: int, prepared: bool
) -> None:
    slot = make_slot(max_retries=before)
    slot.send(b"a", score=21)
    if prepared:
        receipt, _ = slot.take_one()
        slot.release(receipt, [b"a"])
    other = slot.with_topic(max_retries=after)
    assert other.configure(apply=False) == "refused"
    assert other.configure() == "refused"
    assert slot.hash("control")[b"max_retries"] == b"%d" % before
    slot.purge("store")
    assert other.configure(apply=False) == "ok"
    assert slot.hash("control")[b"max_retries"] == b"%d" % before
    assert other.configure() == "ok"
    assert slot.hash("control")[b"max_retries"] == b"%d" % after


@slot_of_each(TYPES, max_retries=16)
def test_retries_up_to_sixteen_and_time_outs_change_while_messages_wait(slot: Slot) -> None:
    slot.send(b"a")
    assert slot.with_topic(max_retries=3, timeout=7).configure() == "ok"
    control = slot.hash("control")
    assert (control[b"max_retries"], control[b"timeout"]) == (b"3", b"7")
    assert slot.take_one()[1].retries_left == 3


@each_type
def test_a_paused_slot_hands_out_nothing_and_takes_everything_else(slot: Slot) -> None:
    slot.send(b"a", b"b")
    receipt, delivery = slot.take_one()
    assert slot.pause() == "paused"
    assert slot.hash("control")[b"paused"] == b"1"
    assert slot.take().status == "paused"
    assert slot.take(owner="B").status == "busy" or not slot.topic.serial
    assert slot.send(b"c")[0].status == "stored"
    assert slot.extend(receipt, [delivery.member]) == ["ok"]
    assert slot.commit(receipt, [delivery.member]) == ["ok"]
    assert slot.take(owner="B").status == "paused"
    assert slot.pause(False) == "resumed"
    assert len(slot.take(owner="B").deliveries) == 2


@slot_of_each(TYPES, timeout=7, max_retries=5, slots=4)
def test_the_first_prepare_settles_time_out_retries_and_slots(slot: Slot) -> None:
    slot.take()
    control = slot.hash("control")
    assert (control[b"timeout"], control[b"max_retries"], control[b"slots"]) == (b"7", b"5", b"4")
    slot.with_topic(timeout=9, max_retries=6).take()
    assert slot.hash("control") == control


def test_adopting_books_what_strangers_sent_once(make_slot: Make) -> None:
    slot = make_slot()
    slot.zadd(b"a", 50)
    slot.zadd(b"b", 50)
    assert slot.audit_ledger().live_drift == 2
    assert slot.adopt(2, 1) == "changed"
    assert slot.adopt(2, 0) == "ok"
    assert slot.adopt(2, 0) == "changed"
    assert slot.audit_ledger().balanced
    slot.strangers = 0


@pytest.mark.parametrize("state", ["W", "F", "T", "D", "C"])
@pytest.mark.parametrize("identity", ["body", "key"])
def test_a_slot_that_holds_messages_is_not_forgotten(make_slot: Make, state: str, identity: str) -> None:
    slot = make_slot(TopicType.FIXED_TIME, identity=identity)
    slot.bring("W" if state == "D" else state)
    if state == "D":
        slot.kill(A)
    before = slot.snapshot()
    assert slot.retire() == "holds"
    assert slot.snapshot() == before


@pytest.mark.parametrize("identity", ["body", "key"])
def test_an_empty_slot_leaves_nothing_behind(make_slot: Make, identity: str) -> None:
    slot = make_slot(TopicType.FIXED_TIME, identity=identity)
    slot.acquire()
    slot.send(A)
    receipt, _ = slot.take_one()
    slot.commit(receipt, [A])
    assert slot.snapshot()
    assert slot.retire() == "retired"
    assert not slot.snapshot()
    assert slot.retire() == "retired"
