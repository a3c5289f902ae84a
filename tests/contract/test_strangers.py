"""What a plain ZADD puts into Store: any score, any member, also one that rests, runs or is dead here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_rmq.core.model.replies import Acquired
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ServerRefused, WrongType
from django_rmq.testing import Clock
from tests.contract.keyspaces import in_one_form
from tests.contract.slots import BOTH, CONSTANT, NO_BACKOFF, TYPES, Make, Slot, each_type, slot_of_each

INFINITE = float("inf")


def resting_and_sent_by_a_stranger(slot: Slot, score: float | None = None) -> None:
    slot.send(b"a")
    slot.fail_one(b"a", delay_ms=5_000, error="diagnosis")
    slot.zadd(b"a", slot.fresh_score() if score is None else score)
    assert sorted(slot.where(b"a")) == sorted("WT" if score is None else "wT")


@slot_of_each(TYPES, identity=BOTH)
def test_a_strangers_send_supersedes_the_resting_retry_when_it_is_taken(slot: Slot) -> None:
    resting_and_sent_by_a_stranger(slot)
    receipt, delivery = slot.take_one()
    assert (delivery.retries_left, delivery.envelope) == (16, slot.envelope())
    assert slot.where(b"a") == "F"
    assert slot.fail(receipt, b"a", delay_ms=0) == ["ok"]
    assert slot.where(b"a") == "w"


@each_type
def test_a_resting_retry_that_finds_a_strangers_send_is_dropped(slot: Slot, clock: Clock) -> None:
    resting_and_sent_by_a_stranger(slot)
    clock.advance(6)
    assert slot.promote() == 1
    assert slot.where(b"a") == "W"
    assert slot.counted("dropped") == 1


@each_type
def test_a_send_that_meets_both_merges_with_the_strangers_and_drops_the_resting_one(slot: Slot) -> None:
    resting_and_sent_by_a_stranger(slot)
    merges = slot.topic.type is TopicType.RANGE_MERGE
    assert slot.send(b"a")[0].status == ("merged" if merges else "replaced")
    assert slot.where(b"a") == "W"
    assert slot.counted("dropped") == 1


@each_type
def test_a_send_that_meets_a_strangers_retry_score_and_a_resting_retry_supersedes_both(slot: Slot) -> None:
    resting_and_sent_by_a_stranger(slot, 7)
    assert slot.send(b"a")[0].status == "superseded"
    assert slot.where(b"a") == "W"
    assert slot.counted("dropped") == 2


@slot_of_each(TYPES, identity="key")
@pytest.mark.parametrize(("purged", "left"), [("store", "T"), ("retry", "W")])
def test_purging_one_of_two_live_copies_keeps_body_and_diagnosis_of_the_other(
    slot: Slot, purged: str, left: str
) -> None:
    resting_and_sent_by_a_stranger(slot)
    assert slot.purge(purged) == 1
    assert slot.where(b"a") == left
    assert slot.hash("body") == {b"a": slot.envelope()}
    assert set(slot.hash("failures")) == {b"a"}
    assert slot.purge("store") + slot.purge("retry") == 1
    assert not slot.hash("body") and not slot.hash("failures")


@slot_of_each(TYPES, identity="key")
@pytest.mark.parametrize("action", ["bury", "remove"])
def test_a_person_acts_on_both_live_copies_at_once(slot: Slot, action: str) -> None:
    resting_and_sent_by_a_stranger(slot)
    assert getattr(slot, action)([b"a"]) == ["waiting"]
    assert slot.where(b"a") == ("D" if action == "bury" else "-")
    assert not slot.hash("body") and not slot.hash("failures")


def test_rescheduling_a_strangers_retry_score_drops_the_resting_one(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIXED_TIME)
    resting_and_sent_by_a_stranger(slot, 7)
    assert slot.reschedule([slot.now_ms + 9_000], [b"a"]) == ["resting"]
    assert slot.zset("retry") == {b"a": slot.now_ms + 9_000 + 7 / 1024}
    assert slot.counted("dropped") == 1


def test_an_expired_message_sent_by_a_stranger_while_it_rests_dies_once(make_slot: Make) -> None:
    slot = make_slot(identity="key")
    slot.send_replace([50], [b"a"], [slot.envelope(expires_ms=slot.now_ms + 1_000)])
    slot.fail_one(b"a", delay_ms=5_000)
    slot.zadd(b"a", 60)
    slot.clock.advance(2)
    assert slot.take().status == "empty"
    assert slot.where(b"a") == "D"
    assert slot.counted("dropped") == 1 and slot.counted("lapsed") == 1


@slot_of_each([TopicType.RANGE_MERGE, TopicType.FIXED_TIME], identity="key")
@pytest.mark.parametrize("end", ["commit", "fail", "release"])
def test_a_delivery_whose_newer_copy_rests_ends_without_touching_it(slot: Slot, end: str) -> None:
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
def test_a_dead_message_has_its_score_in_one_form_whatever_the_version_of_redis(
    make_slot: Make, score: float, text: bytes
) -> None:
    slot = make_slot()
    slot.zadd(b"a", score)
    receipt, _ = slot.take_one()
    assert in_one_form(slot.hash("inflight")[b"a"]) == b"%d %s" % (receipt, text)
    assert slot.release(receipt, [b"a"]) == ["ok"]
    assert slot.zset("store") == {b"a": score}
    slot.bury([b"a"])
    assert slot.hash("deaths")[b"a"].split(b" ")[4] == text


FOREIGN = [
    -INFINITE, INFINITE, 0, -0.0, -5, -1e300, 1e300, 0.5, 3, 16, 16.5, 999, 999.5, 1e15, 1 << 43, 5e-324,
]  # fmt: skip


@slot_of_each(TYPES, backoff=NO_BACKOFF)
@pytest.mark.parametrize("score", FOREIGN)
def test_any_score_is_served_or_waits_and_never_costs_more_than_a_full_budget(
    slot: Slot, score: float
) -> None:
    slot.zadd(b"a", score)
    assert slot.count().store == 1 and len(slot.list_messages("store").entries) == 1
    assert slot.broker.heads(slot.topic, [0])[0] is not None or score > 2**53
    if slot.topic.type is not TopicType.PRIORITY and score > slot.now_ms:
        assert slot.take().status == "empty"
        assert slot.purge("store") == 1
        return
    lefts: list[int] = []
    while slot.where(b"a") != "D":
        receipt, delivery = slot.take_one()
        assert delivery.score == score or lefts
        lefts.append(delivery.retries_left)
        slot.fail(receipt, b"a")
    assert lefts == list(range(lefts[0], -1, -1)) and lefts[0] <= 16
    assert slot.replay([b"a"]) == ["replayed"]
    assert slot.take_one()[1].retries_left == 16


@each_type
def test_the_smallest_and_largest_scores_do_not_stop_what_is_between(slot: Slot) -> None:
    slot.zadd(b"low", -INFINITE)
    slot.zadd(b"high", INFINITE)
    slot.send(b"a")
    due = {b"low", b"a"} | ({b"high"} if slot.topic.type is TopicType.PRIORITY else set())
    assert {delivery.member for delivery in slot.take().deliveries} == due


MEMBERS = [b"", b"\0", b"\0\xff", b"\xff\xfe not UTF-8", b"a\nb", b" ", b"{}", b"%d %s", b"x" * 1_000_000]


@slot_of_each(TYPES, identity=BOTH, backoff=CONSTANT, max_retries=1)
@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: repr(member[:9]))
def test_any_member_lives_a_whole_life(slot: Slot, member: bytes) -> None:
    slot.zadd(member, slot.fresh_score())
    receipt, delivery = slot.take_one()
    assert (delivery.member, delivery.envelope) == (member, None)
    assert slot.extend(receipt, [member]) == ["ok"]
    assert slot.release(receipt, [member]) == ["ok"]
    receipt, _ = slot.take_one()
    assert slot.list_held("A")[0].delivery.member == member
    assert slot.fail(receipt, member) == ["ok"]
    slot.clock.advance(1)
    receipt, _ = slot.take_one()
    assert slot.fail(receipt, member) == ["ok"]
    assert slot.list_messages("dead").entries[0].member == member
    assert slot.search_messages("dead", member[:50]).entries[0].member == member
    assert slot.replay([member]) == ["replayed"]
    assert slot.bury([member]) == ["waiting"]
    assert slot.remove([member]) == ["dead"]


@pytest.mark.parametrize(
    "name", ["store", "prepare", "retry", "dead", "control", "stats", "inflight", "failures"]
)
@pytest.mark.parametrize(
    "action",
    ["send", "ensure", "prepare", "commit", "rollback", "release", "time_out", "audit_ledger", "purge"],
)
def test_a_key_of_another_type_is_named_and_nothing_is_changed(
    make_slot: Make, name: str, action: str
) -> None:
    slot = make_slot()
    slot.send(b"a", b"b")
    receipt, delivery = slot.take_one()
    slot.send(b"c")
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: slot.send(b"d"),
        "ensure": lambda: slot.ensure([50], [b"d"]),
        "prepare": slot.take,
        "commit": lambda: slot.commit(receipt, [delivery.member]),
        "rollback": lambda: slot.fail(receipt, delivery.member),
        "release": lambda: slot.release(receipt, [delivery.member]),
        "time_out": slot.time_out,
        "audit_ledger": slot.audit_ledger,
        "purge": lambda: slot.purge("store"),
    }
    declared = {
        "send": {"store", "retry", "stats", "control"},
        "ensure": {"store", "retry", "stats", "control", "prepare"},
        "audit_ledger": {"store", "prepare", "retry", "dead", "stats"},
        "purge": {"store", "prepare", "retry", "dead", "stats", "failures"},
    }.get(action)
    if declared is None or name in declared:
        with slot.foreign(name):
            before = slot.snapshot()
            with pytest.raises(WrongType, match=getattr(slot.keys, name).decode().replace("{", ".")):
                calls[action]()
            assert slot.snapshot() == before


def test_heads_reads_a_key_of_another_type_as_due(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIXED_TIME)
    with slot.foreign("store"):
        assert slot.broker.heads(slot.topic, [0, 1]) == [0, None]


@each_type
@pytest.mark.parametrize("score", [1e20, 1e300, INFINITE])
def test_a_foreign_lease_without_an_end_is_read_as_late_as_an_instant_can_be(
    slot: Slot, score: float
) -> None:
    slot.send(b"a")
    slot.keyspace.zadd(slot.keys.claimants, b"x", score)
    answer = slot.take()
    assert (answer.status, answer.next_due) == ("busy", 2**53 - 1)
    assert slot.broker.heads(slot.topic, [0], upkeep=True) == [None]
    slot.keyspace.delete(slot.keys.claimants)
    assert slot.take().status == "ok"


@pytest.mark.parametrize("epoch", [b"", b"x", b"1.5"])
def test_an_epoch_that_is_no_number_keeps_no_other_slot_from_its_owner(make_slot: Make, epoch: bytes) -> None:
    wrong, fine = make_slot(index=1, name="t"), make_slot(index=2, name="t")
    wrong.keyspace.hset(wrong.keys.control, b"epoch", epoch)
    assert wrong.broker.acquire_slots(wrong.topic, [1, 2]) == [Acquired(None, False), Acquired(1, True)]
    with pytest.raises(ServerRefused, match="not an integer"):
        wrong.acquire()
    assert fine.acquire() == 2
    wrong.keyspace.delete(wrong.keys.control)
