"""What a person has deleted can be brought back for an hour, where no newer copy is there by then."""

from __future__ import annotations

from typing import Any

import pytest

from django_rmq.core.commands import operate
from django_rmq.core.commands.operate import Deleted, TrashShare, into_trash
from django_rmq.core.model.keys import trash_key
from django_rmq.core.model.replies import Restored
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import SlotMoved
from tests.contract.keyspaces import RedisKeyspace
from tests.contract.slots import BOTH, CONSTANT, NO_BACKOFF, TYPES, Make, Slot, each_type, slot_of_each

ACT = TrashShare("act", 1_000, 1_000_000)


def trash(slot: Slot, act: str = "act") -> dict[bytes, bytes]:
    return slot.keyspace.hash(trash_key(slot.broker.prefix, slot.topic.name, slot.index, act))


def delete(slot: Slot, *members: bytes, copy: str = "live", into: TrashShare = ACT) -> Deleted[list[str]]:
    return slot.broker.run(into_trash(operate.remove(slot.topic, slot.index, members, copy), into))


def purge(slot: Slot, state: str, into: TrashShare = ACT, **options: Any) -> Deleted[int]:
    return slot.broker.run(into_trash(operate.purge(slot.topic, slot.index, state, **options), into))


def restore(slot: Slot, act: str = "act", limit: int = 250) -> tuple[int, int]:
    """Bring everything back; return how many came back, and how many were merged."""
    step = slot.restore(act, "0", limit)
    back, merged = step.back, step.merged
    while step.cursor != "0":
        step = slot.restore(act, step.cursor, limit)
        back, merged = back + step.back, merged + step.merged
    return back, merged


@slot_of_each(TYPES, identity=BOTH, backoff=CONSTANT, max_retries=3)
@pytest.mark.parametrize("how", ["delete", "purge"])
def test_what_was_deleted_comes_back_as_it_was(slot: Slot, how: str) -> None:
    slot.send(b"dead")
    slot.bury([b"dead"], "why")
    slot.send(b"rest")
    slot.fail_one(b"rest", error="boom")
    slot.send(b"wait", body=b"the body")
    before = slot.snapshot("removed", "removed_dead", "purged", "purged_dead", "restored", "restored_dead")
    if how == "delete":
        assert delete(slot, b"wait", b"rest", b"nobody").answer == ["waiting", "resting", "not_found"]
        assert delete(slot, b"dead", copy="dead")[:2] == (["dead"], 1)
    else:
        assert [purge(slot, state)[:2] for state in ("store", "retry", "dead")] == [(1, 1)] * 3
    assert [slot.where(member) for member in (b"wait", b"rest", b"dead")] == ["-", "-", "-"]
    assert slot.audit_ledger().balanced and len(trash(slot)) == 3
    assert restore(slot) == (3, 0)
    after = slot.snapshot("removed", "removed_dead", "purged", "purged_dead", "restored", "restored_dead")
    assert after == before
    assert (slot.counted("restored"), slot.counted("restored_dead")) == (2, 1)
    assert restore(slot) == (0, 0)


@slot_of_each(TYPES, backoff=NO_BACKOFF, max_retries=3)
def test_a_retry_that_waits_comes_back_with_the_retries_that_it_had(slot: Slot) -> None:
    slot.send(b"a")
    slot.fail_one(b"a", error="boom")
    delete(slot, b"a")
    restore(slot)
    assert slot.hash("failures")[b"a"].endswith(b"\nboom")
    assert slot.take_one()[1].retries_left == 2


def test_only_the_act_that_deleted_a_message_brings_it_back(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(b"a", b"b")
    delete(slot, b"a", into=ACT._replace(act="one"))
    delete(slot, b"b", into=ACT._replace(act="two"))
    assert restore(slot, "two") == (1, 0)
    assert (slot.where(b"a"), slot.where(b"b")) == ("-", "W")


def test_a_deletion_without_an_act_keeps_nothing(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(b"a", b"b")
    slot.bury([b"b"])
    before = slot.zset("dead")[b"b"]
    assert slot.remove([b"a"]) == ["waiting"]
    assert slot.discard([before], [b"b"]) == ["dead"]
    slot.send(b"c")
    assert slot.purge("store") == 1
    assert set(slot.snapshot()) == {slot.keys.stats, slot.keys.control}


def test_an_act_keeps_as_many_as_it_may_and_the_rest_is_deleted_for_good(make_slot: Make) -> None:
    slot = make_slot()
    members = [b"m%d" % n for n in range(10)]
    slot.send(*members)
    assert purge(slot, "store", ACT._replace(copies=3))[:2] == (10, 3)
    assert restore(slot) == (3, 0) and len(slot.zset("store")) == 3
    large = [b"%d" % n * 500 for n in range(4)]
    slot.send(*large)
    # The second copy exceeds the bound, and is kept; nothing follows it.
    assert delete(slot, *large, into=ACT._replace(size=700)).kept == 2
    assert delete(slot, b"nobody").kept == 0


@slot_of_each(TYPES, identity="key")
def test_discarded_deaths_come_back(slot: Slot) -> None:
    slot.send(b"a", b"b")
    slot.bury([b"a", b"b"], "why")
    seen, records = slot.zset("dead"), slot.hash("deaths")
    call = operate.discard(slot.topic, 0, [seen[b"a"], 1.0], [b"a", b"b"])
    assert slot.broker.run(into_trash(call, ACT))[:2] == (["dead", "changed"], 1)
    assert restore(slot) == (1, 0)
    assert (slot.zset("dead"), slot.hash("deaths")) == (seen, records)


@slot_of_each(TYPES, identity="key", backoff=CONSTANT)
def test_a_copy_that_was_sent_since_stays(slot: Slot) -> None:
    slot.send(b"wait", b"rest", b"dead", body=b"old")
    slot.bury([b"dead"], "old")
    purge(slot, "store")
    purge(slot, "dead")
    slot.send(b"rest", body=b"new")
    slot.fail_one(b"rest")
    slot.send(b"wait", b"dead", body=b"new")
    slot.clock.advance(1e-3)
    slot.bury([b"dead"], "new")
    states = ("store", "retry", "dead", "body", "deaths", "failures")
    before = slot.read(*states)
    assert restore(slot) == (0, 3)
    assert slot.read(*states) == before
    assert (slot.counted("dropped"), slot.counted("dead_merged")) == (2, 1)


@slot_of_each(TYPES, identity=BOTH)
def test_what_waited_behind_a_delivery_waits_behind_it_again(slot: Slot) -> None:
    slot.send(b"a", body=b"old")
    receipt, _ = slot.take_one()
    slot.clock.advance(1)
    slot.send(b"a", body=b"new")
    purge(slot, "store")
    assert slot.where(b"a") == "F"
    assert restore(slot) == (1, 0)
    assert slot.where(b"a") == "FW"
    slot.commit(receipt, [b"a"])
    assert slot.take_one()[1].envelope == slot.envelope(b"new")


@slot_of_each(TYPES, identity=BOTH)
def test_a_delivery_that_began_since_is_the_newer_copy(slot: Slot) -> None:
    slot.send(b"a", body=b"old")
    purge(slot, "store")
    slot.clock.advance(1)
    slot.send(b"a", body=b"new")
    slot.take_one()
    assert restore(slot) == (0, 1)
    assert slot.where(b"a") == "F"


@slot_of_each(TYPES, backoff=CONSTANT)
def test_a_retry_does_not_come_back_beside_a_delivery(slot: Slot) -> None:
    slot.send(b"a")
    slot.fail_one(b"a")
    slot.send(b"b")
    receipt, _ = slot.take_one()
    # A clock that was set back makes a delivery look older than it is.
    purge(slot, "retry")
    slot.commit(receipt, [b"b"])
    slot.clock.advance(-1)
    slot.send(b"a", score=0 if slot.topic.type is TopicType.RANGE_MERGE else None)
    slot.keyspace.hset(slot.keys.control, b"deliveries", b"1")
    slot.take_one()
    assert restore(slot) == (0, 1)
    assert slot.where(b"a") == "F"


@each_type
def test_a_delivery_that_a_person_has_marked_is_no_newer_copy(slot: Slot) -> None:
    slot.send(b"a")
    purge(slot, "store")
    slot.clock.advance(1)
    slot.send(b"a")
    slot.take_one()
    slot.remove([b"a"])
    assert restore(slot) == (1, 0)
    assert slot.where(b"a") == "FW"


@pytest.mark.parametrize(("identity", "where"), [("body", "CW"), ("key", "C")])
def test_beside_a_claim_only_what_has_no_body_comes_back(make_slot: Make, identity: str, where: str) -> None:
    slot = make_slot(TopicType.FIXED_TIME, identity=identity)
    slot.send(b"a", body=b"old")
    slot.claim("spark", 1, 60_000, 10)
    slot.send(b"a", body=b"new")
    purge(slot, "store")
    restore(slot)
    assert slot.where(b"a") == where


@slot_of_each(TYPES, backoff=NO_BACKOFF)
def test_what_runs_keeps_its_failures(slot: Slot) -> None:
    slot.send(b"a")
    slot.fail_one(b"a")
    receipt, _ = slot.take_one()
    slot.send(b"a")
    purge(slot, "store")
    slot.send(b"a")
    delete(slot, b"a", into=ACT._replace(act="two"))
    assert [
        value.split(b"\n")[0].split()[2] for value in (*trash(slot).values(), *trash(slot, "two").values())
    ] == [b"0", b"0"]
    slot.commit(receipt, [b"a"])
    restore(slot)
    assert slot.hash("failures") == {}


def test_fifo_messages_get_their_old_place(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIFO, order="strict", identity="key")
    for member in (b"a", b"b"):
        slot.send(member)
    delete(slot, b"a")
    slot.send(b"c")
    assert restore(slot) == (1, 0)
    assert [row[0] for row in sorted(slot.zset("store").items(), key=lambda row: row[1])] == [
        b"a",
        b"b",
        b"c",
    ]


@pytest.mark.parametrize("state", ["store", "dead"])
def test_collected_bodies_come_before_those_of_the_newer_copy(make_slot: Make, state: str) -> None:
    slot = make_slot(TopicType.RANGE_MERGE, identity="key", accumulate=5)

    def send(body: bytes) -> None:
        slot.send_merge(0, [b"a"], [slot.envelope(body, bodies=(body,))])
        if state == "dead":
            slot.bury([b"a"])

    send(b"1")
    purge(slot, state)
    slot.clock.advance(1)
    send(b"2")
    assert restore(slot) == (0, 1)
    if state == "dead":
        slot.replay([b"a"])
    assert slot.hash("body")[b"a"].endswith(b"000000002 1:11:2")


def test_collected_bodies_come_back_behind_a_newer_delivery(make_slot: Make) -> None:
    slot = make_slot(TopicType.RANGE_MERGE, identity="key", accumulate=5)
    slot.send_merge(0, [b"a"], [slot.envelope(b"1", bodies=(b"1",))])
    purge(slot, "store")
    slot.clock.advance(1)
    slot.send_merge(0, [b"a"], [slot.envelope(b"2", bodies=(b"2",))])
    slot.take_one()
    assert restore(slot) == (1, 0)
    assert slot.where(b"a") == "FW"


@each_type
def test_who_sleeps_is_woken_by_what_comes_back(slot: Slot) -> None:
    slot.send(b"a")
    purge(slot, "store")
    assert slot.take().status == "empty"
    assert b"sleeping_until" in slot.hash("control")
    with slot.woken():
        restore(slot)
    assert b"sleeping_until" not in slot.hash("control")


def test_a_slot_with_another_slot_count_takes_nothing_back(make_slot: Make) -> None:
    slot = make_slot(slots=4)
    slot.send(b"a")
    delete(slot, b"a")
    before = slot.snapshot()
    with pytest.raises(SlotMoved):
        slot.with_topic(slots=8).restore("act")
    assert slot.snapshot() == before


def test_many_messages_come_back_in_steps(make_slot: Make) -> None:
    slot = make_slot()
    members = [b"m%03d" % n for n in range(900)]
    slot.send(*members, score=100)
    assert purge(slot, "store").kept == 900
    if isinstance(slot.keyspace, RedisKeyspace):
        step: Restored = slot.restore("act", "0", 100)
        assert 50 < step.back < 300 and step.cursor != "0"
    restore(slot, limit=100)
    assert set(slot.zset("store")) == set(members) and trash(slot) == {}


def test_what_was_deleted_is_forgotten_after_an_hour(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(b"a")
    delete(slot, b"a")
    key = trash_key(slot.broker.prefix, slot.topic.name, 0, "act")
    if isinstance(slot.keyspace, RedisKeyspace):
        assert 3_590_000 < slot.keyspace.client.pttl(key) <= 3_600_000


def test_what_a_stranger_wrote_into_the_trash_stays_there(make_slot: Make) -> None:
    slot = make_slot()
    key = trash_key(slot.broker.prefix, slot.topic.name, 0, "act")
    if isinstance(slot.keyspace, RedisKeyspace):
        slot.keyspace.hset(key, b"sx", b"nonsense")
        assert restore(slot) == (0, 0)
        slot.keyspace.delete(key)
