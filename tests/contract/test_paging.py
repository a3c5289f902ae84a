"""Lists, searches, counts and heads: what is there, page by page, while it changes."""

from __future__ import annotations

import math
import random

import pytest

from django_rmq.core.commands.script_call import AtSlots
from django_rmq.core.model.replies import Counts, DescribeReply, Entry
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ServerRefused, WrongType
from tests.contract.slots import BOTH, CONSTANT, NO_BACKOFF, TIME_TYPES, TYPES, Make, Slot, slot_of_each


def pages(slot: Slot, state: str, **options: object) -> list[bytes]:
    """Return all members of a state, page by page."""
    found: list[bytes] = []
    after = None
    for _ in range(1_000):
        page = slot.list_messages(state, after=after, **options)
        found += [entry.member for entry in page.entries]
        after = page.cursor
        if after is None:
            return found
    raise AssertionError("the pages never end")


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 7, 100])
def test_pages_show_every_entry_once_in_order(make_slot: Make, descending: bool, limit: int) -> None:
    slot = make_slot()
    members = {b"%02d" % n: 50.0 + n // 5 for n in range(23)} | {b"": 50.0, b"\0": 50.0, b"\xff": 54.0}
    slot.fill(members)
    ordered = sorted(members, key=lambda member: (members[member], member), reverse=descending)
    assert pages(slot, "store", limit=limit, descending=descending) == ordered


@pytest.mark.parametrize("descending", [False, True])
def test_entries_that_stay_are_shown_once_while_others_come_and_go(make_slot: Make, descending: bool) -> None:
    slot = make_slot()
    staying = {b"s%03d" % n: float(17 + n // 40) for n in range(300)}
    slot.fill(staying)
    chance = random.Random(7)
    found: list[bytes] = []
    after, churned = None, 0
    while True:
        page = slot.list_messages("store", after=after, limit=9, descending=descending)
        found += [entry.member for entry in page.entries]
        after = page.cursor
        if after is None:
            break
        for _ in range(6):
            churned += 1
            slot.zadd(b"x%04d" % churned, float(chance.randrange(17, 26)))
        gone = [entry.member for entry in page.entries if entry.member[:1] == b"x"]
        slot.remove([*gone, b"x%04d" % chance.randrange(1, churned + 1)])
    assert [member for member in found if member in staying] == sorted(
        staying, key=lambda member: (staying[member], member), reverse=descending
    )


@pytest.mark.parametrize("descending", [False, True])
def test_a_cursor_whose_entry_is_gone_or_was_moved_still_leads_on(make_slot: Make, descending: bool) -> None:
    slot = make_slot()
    slot.fill({b"a": 50, b"b": 50, b"c": 50, b"d": 60})
    order = [b"d", b"c", b"b", b"a"] if descending else [b"a", b"b", b"c", b"d"]
    page = slot.list_messages("store", limit=2, descending=descending)
    last = page.entries[-1].member
    slot.remove([last])
    rest = slot.list_messages("store", after=page.cursor, descending=descending)
    assert [entry.member for entry in rest.entries] == order[2:]
    slot.zadd(last, 10_000 if descending else 18)
    rest = slot.list_messages("store", after=page.cursor, descending=descending)
    assert [entry.member for entry in rest.entries] == order[2:]


@pytest.mark.parametrize("descending", [False, True])
def test_pages_keep_to_their_scores(make_slot: Make, descending: bool) -> None:
    slot = make_slot()
    slot.fill({b"%02d" % n: float(n) for n in range(30)})
    between = [b"%02d" % n for n in range(10, 20)]
    shown = pages(slot, "store", limit=3, min_score=10, max_score=19, descending=descending)
    assert shown == (between[::-1] if descending else between)
    assert pages(slot, "store", min_score=40) == []


def test_a_page_ends_behind_the_entry_that_fills_it(make_slot: Make) -> None:
    slot = make_slot()
    slot.fill({b"%d" % n * 100: 20 + n for n in range(5)})
    page = slot.list_messages("store", max_bytes=150)
    assert len(page.entries) == 2 and page.cursor is not None
    assert len(pages(slot, "store", max_bytes=1)) == 5


@slot_of_each(TYPES, identity="key", backoff=CONSTANT)
def test_every_state_shows_what_belongs_to_it(slot: Slot) -> None:
    slot.send(b"dead", body=b"1")
    slot.fail_one(b"dead", kind="rejected", error="bad")
    slot.send(b"rest", body=b"2")
    slot.fail_one(b"rest", error="worse")
    slot.send(b"run", body=b"3")
    running, _ = slot.take_one()
    slot.send(b"wait", body=b"4")
    [waits] = slot.list_messages("store").entries
    assert waits == Entry(b"wait", slot.zset("store")[b"wait"], slot.envelope(b"4"), None)
    [runs] = slot.list_messages("prepare").entries
    assert runs.record.split(b" ")[0] == b"%d" % running and runs.envelope == slot.envelope(b"3")
    [rests] = slot.list_messages("retry").entries
    assert rests.record.endswith(b"\nworse") and rests.envelope == slot.envelope(b"2")
    [dead] = slot.list_messages("dead").entries
    assert dead.record.startswith(b"rejected 1 ") and dead.envelope is None
    oldest = None if slot.topic.type is TopicType.PRIORITY else int(waits.score)
    since = slot.now_ms if slot.topic.type is TopicType.PRIORITY else None
    running_since = running // 1000
    assert slot.count() == Counts(1, 1, 1, 1, 1, 0, oldest, "A", False, since, running_since)
    looked = slot.describe_messages([b"wait", b"run", b"rest", b"dead", b"nobody"])
    assert looked[0] == DescribeReply(waits.score, None, None, None, envelope=waits.envelope)
    assert looked[1] == DescribeReply(
        None, runs.score, None, None, in_flight=runs.record, delivered_envelope=runs.envelope
    )
    assert looked[2] == DescribeReply(
        None, None, rests.score, None, failure=rests.record, envelope=rests.envelope
    )
    assert looked[3] == DescribeReply(None, None, None, dead.score, death=dead.record)
    assert looked[4] == DescribeReply(None, None, None, None)


def test_a_look_shows_all_copies_of_a_member(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(b"\xff\x00")
    slot.kill(b"\xff\x00")
    slot.send(b"\xff\x00")
    slot.take_one()
    slot.send(b"\xff\x00")
    before = slot.snapshot()
    [looked] = slot.describe_messages([b"\xff\x00"])
    assert None not in (looked.store, looked.prepare, looked.dead, looked.in_flight, looked.death)
    assert looked.retry is None and slot.describe_messages([b""]) == [DescribeReply(None, None, None, None)]
    assert slot.snapshot() == before
    assert (
        len(slot.describe_messages([b"m%d" % n for n in range(100)])) == 100
        and slot.describe_messages([]) == []
    )
    with pytest.raises(ServerRefused):
        slot.describe_messages([b"m%d" % n for n in range(101)])


def test_messages_are_counted_between_two_scores(make_slot: Make) -> None:
    slot = make_slot()
    for n, score in enumerate([-math.inf, 0, 999, 1000, 1000.5, 2000, math.inf]):
        slot.zadd(b"%d" % n, score)
    assert slot.count_between("store") == 7
    assert slot.count_between("store", 1000) == 4
    assert slot.count_between("store", 1000, 1000.5) == 2
    assert slot.count_between("store", -math.inf, 999) == 3
    assert slot.count_between("store", 3, 2) == 0 and slot.count_between("dead") == 0


def test_a_count_says_whether_a_slot_is_paused(make_slot: Make) -> None:
    slot = make_slot()
    assert not slot.count().paused
    slot.pause()
    assert slot.count().paused and slot.count().owner == ""
    slot.pause(False)
    assert not slot.count().paused


# --- find


def test_find_looks_into_members_bodies_and_records(make_slot: Make) -> None:
    slot = make_slot(identity="key")
    slot.send(b"one needle", b"two")
    slot.send(b"three", body=b"a needle too")
    slot.send(b"four")
    receipt, delivery = slot.take_one()
    slot.fail(receipt, delivery.member, kind="rejected", error="needle in the error")
    found = [entry.member for entry in slot.search_messages("store", b"needle").entries]
    assert set(found) == {b"one needle", b"three"} - {delivery.member}
    assert [entry.member for entry in slot.search_messages("dead", b"needle").entries] == [delivery.member]
    assert slot.search_messages("store", b"absent").entries == []


@pytest.mark.parametrize("text", [b".", b"%", b"[a", b"\0", b"(", b"\xff"])
def test_find_takes_text_as_it_is(make_slot: Make, text: bytes) -> None:
    slot = make_slot()
    slot.fill({b"x" + text + b"y": 20, b"plain": 21})
    assert [entry.member for entry in slot.search_messages("store", text).entries] == [b"x" + text + b"y"]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("limit", "scan"), [(1, 1), (1, 5), (3, 7), (100, 4), (100, 1_000)])
def test_find_goes_on_where_it_stopped_and_finds_each_once(
    make_slot: Make, descending: bool, limit: int, scan: int
) -> None:
    slot = make_slot()
    slot.fill({b"%02d%s" % (n, b"!" if n % 6 == 0 else b""): 20.0 + n // 4 for n in range(50)})
    found: list[bytes] = []
    after = None
    for _ in range(60):
        page = slot.search_messages("store", b"!", after=after, limit=limit, scan=scan, descending=descending)
        assert len(page.entries) <= limit
        found += [entry.member for entry in page.entries]
        after = page.cursor
        if after is None:
            break
    expected = [b"%02d!" % n for n in range(0, 50, 6)]
    assert found == (expected[::-1] if descending else expected)


# --- count and heads


@slot_of_each(TIME_TYPES, backoff=NO_BACKOFF)
def test_what_is_due_is_counted_with_its_oldest(slot: Slot) -> None:
    slot.send(b"retry")
    slot.fail_one(b"retry")
    slot.zadd(b"late", slot.now_ms - 7_000)
    slot.zadd(b"now", slot.now_ms)
    slot.zadd(b"later", slot.now_ms + 1)
    assert slot.count() == Counts(4, 3, 0, 0, 0, 0, slot.now_ms - 7_000, "A")


def waits_since(slot: Slot, due: int, since: int | None) -> bool:
    """Return whether so many messages of a slot, and of a sample of it, are due since then."""
    counts = slot.count()
    sample = slot.broker.sample(slot.topic, [slot.index])
    assert (counts.due, counts.oldest_due_ms) == (sample.due, sample.oldest_due_ms)
    assert counts.undrained_since_ms == sample.undrained_since_ms
    waits = counts.undrained_since_ms if slot.topic.is_priority else counts.oldest_due_ms
    return (counts.due, waits) == (due, since)


@slot_of_each(TYPES, backoff=CONSTANT)
def test_a_retry_is_due_when_its_rest_is_over_though_nobody_has_looked(slot: Slot) -> None:
    slot.send(b"a", b"b")
    receipt, first = slot.take_one()
    slot.fail(receipt, first.member)
    receipt, second = slot.take_one()
    slot.fail(receipt, second.member)
    rested = slot.now_ms + 1_000
    slot.clock.advance("999ms")
    assert waits_since(slot, 0, None)
    slot.clock.advance("1ms")
    assert waits_since(slot, 2, rested)
    slot.clock.advance(60)
    assert waits_since(slot, 2, rested)
    slot.send(b"c")
    # What waits in Store cannot be taken for as long.
    assert waits_since(slot, 3, rested)


@slot_of_each(TYPES, backoff=NO_BACKOFF, timeout=5)
def test_a_delivery_is_due_when_it_has_timed_out_though_nobody_has_looked(slot: Slot) -> None:
    slot.send(b"a", b"b")
    began = slot.now_ms
    slot.take_one()
    second = slot.take(1)
    assert slot.count().running_since_ms == began
    slot.clock.advance(3)
    slot.extend(second.receipt, [second.deliveries[0].member])
    slot.clock.advance("2999ms")
    assert waits_since(slot, 0, None)
    slot.clock.advance("1ms")
    assert waits_since(slot, 1, began + 6_000)
    slot.clock.advance(3)
    assert waits_since(slot, 2, began + 6_000)
    assert slot.count().running_since_ms is None, "nobody knows whether it runs"
    assert slot.time_out() == 2
    assert slot.count().due == slot.count().store == 2


@pytest.mark.parametrize("sealed", [False, True])
@slot_of_each(TYPES, backoff=NO_BACKOFF)
def test_what_is_claimed_is_due_when_its_lease_has_ended_though_nobody_has_looked(
    slot: Slot, sealed: bool
) -> None:
    slot.send(b"a", b"b", b"c")
    assert slot.claim("s", 1, 5_000, 9).taken == 3
    if sealed:
        slot.renew_claim("s", 1, 5_000, seal=True)
    ends = slot.now_ms + 5_000
    slot.clock.advance("4999ms")
    assert waits_since(slot, 0, None)
    slot.clock.advance("1ms")
    assert waits_since(slot, 3, ends)
    slot.clock.advance(60)
    # What is back already was due before.
    assert slot.count().unleased == 3
    assert slot.time_out(1) == 1
    assert (slot.count().due, slot.count().claimed, slot.count().unleased) == (3, 2, 2)
    assert slot.time_out() == 2
    assert slot.count().due == slot.count().store == 3


def test_what_is_left_of_an_acknowledged_claim_is_never_due(make_slot: Make) -> None:
    slot = make_slot(backoff=NO_BACKOFF)
    slot.send(b"a")
    slot.fail_one(b"a")
    slot.send(b"b", b"c")
    assert slot.claim("s", 1, 5_000, 9).taken == 3
    slot.renew_claim("s", 1, 5_000, seal=True)
    assert slot.ack_claim("s", 1, 1) == ("ok", 2), "interrupted"
    slot.clock.advance(5)
    assert waits_since(slot, 0, None)


@slot_of_each(TYPES, identity=BOTH, timeout=5, serial=False)
def test_what_runs_has_run_since_its_delivery_however_often_it_was_extended(slot: Slot) -> None:
    assert slot.count().running_since_ms is None
    slot.send(b"a", b"b", b"c")
    began = slot.now_ms
    receipt, first = slot.take_one()
    for _ in range(5):
        slot.clock.advance(4)
        assert slot.extend(receipt, [first.member]) == ["ok"]
        assert slot.count().running_since_ms == began
    later, second = slot.take_one()
    assert slot.count().running_since_ms == began
    slot.commit(receipt, [first.member])
    assert slot.count().running_since_ms == began + 20_000
    slot.release(later, [second.member])
    assert slot.count().running_since_ms is None


@pytest.mark.parametrize("kind", TYPES)
def test_heads_tell_when_each_slot_can_next_be_taken_from(make_slot: Make, kind: TopicType) -> None:
    empty = make_slot(kind, slots=16, backoff=CONSTANT, timeout=5)
    due, resting, running = (
        Slot(empty.broker, empty.keyspace, empty.clock, empty.topic, n) for n in (1, 2, 3)
    )
    due.send(b"a")
    resting.send(b"a")
    resting.fail_one(b"a")
    running.send(b"a")
    running.take_one()
    now = empty.now_ms
    first = 0 if kind is TopicType.PRIORITY else due.zset("store")[b"a"]
    heads = empty.broker.heads(empty.topic, [0, 1, 2, 3])
    assert heads == [None, first, now + 1_000, (now // 1000 + 6) * 1000]
    assert running.with_topic(timeout=99).broker.heads(empty.topic, [3])[0] == (now // 1000 + 6) * 1000


def test_many_slots_say_which_hold_messages_and_how_many_are_paused(make_slot: Make) -> None:
    slot = make_slot(slots=1_024, index=0)
    paused, foreign = (Slot(slot.broker, slot.keyspace, slot.clock, slot.topic, n) for n in (1, 2))
    assert slot.broker.find_occupied([AtSlots(slot.topic, range(1_024))]) == [False] * 1_024
    assert slot.broker.find_paused([AtSlots(slot.topic, range(1_024))]) == ((), ())
    assert not slot.broker.any_messages([AtSlots(slot.topic, range(1_024))])
    slot.send(b"a")
    paused.pause()
    foreign.keyspace.zadd(foreign.keys.control, b"x", 1)
    assert slot.broker.find_occupied([AtSlots(slot.topic, [2, 1, 0, 3])]) == [False, False, True, False]
    assert slot.broker.find_paused([AtSlots(slot.topic, [3, 2, 1, 0])]) == ((2,), (1,))
    assert slot.broker.any_messages([AtSlots(slot.topic, range(1_024))])
    assert not slot.broker.any_messages([AtSlots(slot.topic, range(1, 1_024))])
    with pytest.raises(WrongType):
        foreign.count()
    foreign.keyspace.delete(foreign.keys.control)
    slot.pause()
    paused.pause(False)
    assert slot.broker.find_paused([AtSlots(slot.topic, [0, 1, 2])]) == ((0,), ())


def test_many_slots_are_counted_as_each_of_them_is(make_slot: Make) -> None:
    slot = make_slot(slots=4, index=0)
    paused, foreign, control = (
        Slot(slot.broker, slot.keyspace, slot.clock, slot.topic, n) for n in (1, 2, 3)
    )
    slot.send(b"a", b"b")
    slot.take_one()
    paused.send(b"c")
    paused.pause()
    foreign.send(b"d")
    foreign.keyspace.delete(foreign.keys.dead)
    foreign.keyspace.hset(foreign.keys.dead, b"x", b"1")
    control.keyspace.zadd(control.keys.control, b"x", 1)
    counted = slot.broker.count_slots([AtSlots(slot.topic, [1, 2]), AtSlots(slot.topic, [0, 3])])
    assert counted == [paused.count(), None, slot.count(), None]
    for wrong in (foreign, control):
        with pytest.raises(WrongType):
            wrong.count()


@slot_of_each(TYPES, backoff=CONSTANT, max_retries=1, serial=False)
def test_a_slot_is_empty_while_it_has_no_message_in_any_state(slot: Slot) -> None:

    def has_messages() -> bool:
        counts = slot.count()
        assert slot.broker.find_occupied([AtSlots(slot.topic, [slot.index])]) == [counts.held > 0]
        assert slot.broker.any_messages([AtSlots(slot.topic, [slot.index])]) is (counts.held > 0)
        return counts.held > 0

    assert not has_messages()
    slot.send(b"a")
    assert has_messages()
    receipt, _ = slot.take_one()
    assert has_messages() and slot.count().prepare
    slot.fail(receipt, b"a")
    assert has_messages() and slot.count().retry
    slot.clock.advance(60)
    slot.fail_one(b"a")
    assert has_messages() and slot.count().dead
    slot.purge("dead")
    assert not has_messages()
    slot.send(b"b")
    assert slot.claim("s", 1, 5_000, 9).taken == 1
    assert has_messages() and slot.count().claimed
    slot.renew_claim("s", 1, 5_000, seal=True)
    slot.ack_claim("s", 1, 9)
    assert not has_messages()


def test_heads_answers_1024_slots_at_once(make_slot: Make) -> None:
    slot = make_slot(slots=1_024, index=0)
    slot.send(b"a")
    assert slot.broker.heads(slot.topic, range(1_024)) == [0] + [None] * 1_023
