"""Sends: what they answer and refuse, a member named twice, one message to each of many slots, and DEBOUNCE."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from django_rmq.core.model.bounds import BATCH, MAX_PRIORITY
from django_rmq.core.model.replies import Sent
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ServerRefused, SlotMoved
from django_rmq.testing import Clock
from tests.contract.slots import NO_BACKOFF, TYPES, Make, Slot, each_type, slot_of_each


def ensure(slot: Slot, *members: bytes) -> list[str]:
    scores = [0 if slot.topic.type is TopicType.RANGE_MERGE else slot.fresh_score()] * len(members)
    return [sent.status for sent in slot.ensure(scores, list(members), slot.envelopes(len(members)))]


@each_type
def test_ensure_tells_the_score_of_what_it_stored(slot: Slot) -> None:
    scores = [1_000, 2_000]
    if slot.topic.type is TopicType.FIXED_TIME:
        scores = [slot.now_ms + 1_000, slot.now_ms + 2_000]
    sent = slot.ensure(scores, [b"a", b"b"])
    assert [one.status for one in sent] == ["stored", "stored"]
    assert {b"a": sent[0].score, b"b": sent[1].score} == slot.zset("store")


@slot_of_each(TYPES, max_backlog=2)
def test_a_full_slot_refuses_what_is_new_and_takes_what_merges(slot: Slot) -> None:
    slot.send(b"a")
    sent = slot.send(b"b", b"c", b"a", b"c")
    met = "merged" if slot.topic.type is TopicType.RANGE_MERGE else "replaced"
    assert [one.status for one in sent] == ["stored", "refused", met, "refused"]
    assert math.isnan(sent[1].score)
    assert set(slot.zset("store")) == {b"a", b"b"}
    assert slot.counted("refused") == 2
    assert ensure(slot, b"a", b"d") == ["present", "refused"]


@slot_of_each(TYPES, max_backlog=2)
def test_what_rests_counts_as_backlog_and_what_runs_does_not(slot: Slot) -> None:
    slot.send(b"a", b"b")
    receipt, delivery = slot.take_one()
    assert slot.send(b"c")[0].status == "stored"
    slot.fail(receipt, delivery.member, delay_ms=1_000)
    assert slot.zset("retry") and len(slot.zset("store")) == 2
    assert slot.send(b"d")[0].status == "refused"
    assert slot.send(delivery.member)[0].status == "superseded"


def test_the_backlog_of_a_topic_is_split_by_its_slots_rounded_up(make_slot: Make) -> None:
    slot = make_slot(slots=4, max_backlog=5)
    assert [sent.status for sent in slot.send(b"a", b"b", b"c")] == ["stored", "stored", "refused"]


def test_a_refused_keyed_message_leaves_no_body(make_slot: Make) -> None:
    slot = make_slot(identity="key", max_backlog=1)
    slot.send(b"a", b"b")
    assert slot.hash("body") == {b"a": slot.envelope()}


@slot_of_each(TYPES, slots=4)
def test_a_client_with_another_slot_count_is_told_and_nothing_changes(slot: Slot) -> None:
    slot.send(b"a")
    slot.send(b"dead")
    slot.take(2)
    slot.bury([b"dead"])
    before = slot.snapshot()
    other = slot.with_topic(slots=8)
    for call in (lambda: other.send(b"b"), lambda: ensure(other, b"b"), lambda: other.replay([b"a"])):
        with pytest.raises(SlotMoved, match="4 slots"):
            call()
    assert other.take().status == "moved"
    assert slot.snapshot() == before
    assert other.configure() == "ok"
    assert other.take().status != "moved" and slot.take().status == "moved"


@each_type
@pytest.mark.parametrize("seen", [(), (b"before",)])
def test_scores_that_no_sender_may_use_are_refused_as_a_whole(slot: Slot, seen: tuple[bytes, ...]) -> None:
    for member in seen:
        slot.send(member)
    before = slot.snapshot()
    bad = {
        TopicType.RANGE_MERGE: [-1, 10**15],
        TopicType.PRIORITY: [-1, 0, 16, MAX_PRIORITY + 1],
        TopicType.FIXED_TIME: [-1, 0, 999, 10**15],
    }[slot.topic.type]
    for score in bad:
        with pytest.raises(ServerRefused):
            slot.send(b"a", score=score)
        with pytest.raises(ServerRefused):
            slot.ensure([slot.fresh_score(), score], [b"a", b"b"])
    assert slot.snapshot() == before


@pytest.mark.parametrize("count", [1, 2])
def test_the_first_priority_settles_retries_where_only_the_slot_count_is_known(
    make_slot: Make, count: int
) -> None:
    slot = make_slot(TopicType.PRIORITY, slots=2, max_retries=5)
    slot.shut(1)
    assert b"max_retries" not in slot.hash("control")
    slot.send(*[b"%d" % n for n in range(count)])
    assert slot.hash("control")[b"max_retries"] == b"5"


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("identity", ["key", "body"])
def test_one_by_one_comes_to_the_same_as_together(make_slot: Make, kind: TopicType, identity: str) -> None:
    one_by_one, together = (make_slot(kind, identity=identity, name=name) for name in ("one", "all"))
    members = [b"a", b"b", b"a", b"c"]
    score = 5_000 if kind is TopicType.RANGE_MERGE else one_by_one.fresh_score()
    found = [one_by_one.send(member, score=score, body=b"body")[0] for member in members]
    assert found == together.send(*members, score=score, body=b"body")
    for name in ("zset", "hash"):
        for state in {"zset": ("store", "retry"), "hash": ("body", "stats", "control")}[name]:
            assert getattr(one_by_one, name)(state) == getattr(together, name)(state)


@slot_of_each(TYPES, identity="key")
def test_a_call_takes_a_batch_and_no_more(slot: Slot) -> None:
    score = 0 if slot.topic.type is TopicType.RANGE_MERGE else slot.fresh_score()
    members = [b"%d" % n for n in range(BATCH)]
    assert {sent.status for sent in slot.send(*members, score=score)} == {"stored"}
    assert len(slot.hash("body")) == BATCH
    many = [*members, b"one more"]
    send = slot.send_merge if slot.topic.type is TopicType.RANGE_MERGE else slot.send_replace
    scores = 0 if slot.topic.type is TopicType.RANGE_MERGE else [score] * len(many)
    with pytest.raises(ServerRefused):
        send(scores, many, slot.envelopes(len(many), b"body"))
    with pytest.raises(ServerRefused):
        slot.commit(1, [*members, b"one more"])


@each_type
def test_a_time_in_the_past_or_none_at_all_is_due_at_once(slot: Slot) -> None:
    slot.send(b"a", score={TopicType.RANGE_MERGE: 0, TopicType.FIXED_TIME: 1_000}.get(slot.topic.type))
    assert slot.take_one()[1].member == b"a"


@slot_of_each(TYPES, slots=2)
def test_slots_of_one_topic_know_nothing_of_each_other(slot: Slot) -> None:
    other = Slot(slot.broker, slot.keyspace, slot.clock, slot.topic, 1)
    slot.send(b"a")
    assert other.take().status == "empty"
    assert other.send(b"a")[0].status == "stored"
    assert slot.take_one("A")[0] == other.take_one("B")[0] == slot.clock() + 1


def test_the_first_priority_settles_which_scores_are_retries_whatever_else_is_noted(
    make_slot: Make,
) -> None:
    slot = make_slot(max_retries=5)
    slot.keyspace.hset(slot.keys.control, b"undrained_since", b"%d" % slot.now_ms)
    slot.send(b"a")
    assert slot.hash("control")[b"max_retries"] == b"5"


@each_type
def test_a_member_sent_twice_in_one_call_is_stored_once(slot: Slot) -> None:
    words = [sent.status for sent in slot.send(b"a", b"b", b"a")]
    assert words == ["stored", "stored", "merged" if slot.topic.type is TopicType.RANGE_MERGE else "replaced"]
    assert set(slot.zset("store")) == {b"a", b"b"}


def test_of_two_priorities_in_one_call_the_last_counts(make_slot: Make) -> None:
    slot = make_slot()
    sent = slot.send_replace([50, 70], [b"a", b"a"])
    assert [(one.status, one.score) for one in sent] == [("stored", 50), ("replaced", 70)]
    assert slot.zset("store") == {b"a": 70}


def test_of_two_bodies_in_one_call_the_last_counts(make_slot: Make) -> None:
    slot = make_slot(identity="key")
    first, second = slot.envelope(b"1"), slot.envelope(b"2")
    slot.send_replace([50, 50], [b"a", b"a"], [first, second])
    assert slot.hash("body") == {b"a": second}


@each_type
def test_of_two_ensures_in_one_call_the_first_counts(slot: Slot) -> None:
    scores = [1_000, 2_000] if slot.topic.type is TopicType.RANGE_MERGE else [slot.now_ms, slot.now_ms + 5]
    sent = slot.ensure(scores, [b"a", b"a"])
    assert [one.status for one in sent] == ["stored", "present"]
    assert sent[0].score == sent[1].score == slot.zset("store")[b"a"]


def scatter(slot: Slot, *members: bytes, range_ms: int = 0) -> list[Sent | None]:
    """Send one member to each slot from the first on; return the answers."""
    answers = slot.broker.scatter(slot.topic, range(len(members)), range_ms, members)
    return [None if answer is None else Sent(*answer[0]) for answer in answers]


def slots(make_slot: Make, count: int) -> list[Slot]:
    options = {"identity": "body", "slots": 4, "backoff": NO_BACKOFF}
    return [make_slot(TopicType.RANGE_MERGE, name="topic", index=i, **options) for i in range(count)]


def test_it_leaves_in_each_slot_what_a_send_leaves(make_slot: Make) -> None:
    some = slots(make_slot, 3)
    due = some[0].now_ms + 500
    assert scatter(some[0], b"a", b"b", b"c", range_ms=500) == [Sent("stored", due)] * 3
    other = make_slot(TopicType.RANGE_MERGE, identity="body", slots=4)
    for slot, member in zip(some, (b"a", b"b", b"c"), strict=True):
        assert slot.zset("store") == {member: due}
        other.send_merge(500, [member])
        assert slot.hash("control") == other.hash("control") == {b"slots": b"4"}
        assert slot.hash("stats") == {b"stored": b"1"}


def test_a_copy_that_waits_keeps_its_time(make_slot: Make) -> None:
    one, other = slots(make_slot, 2)
    first = one.now_ms + 500
    one.send_merge(500, [b"a"])
    assert scatter(one, b"a", b"a", range_ms=900) == [Sent("merged", first), Sent("stored", first + 400)]
    assert one.zset("store") == {b"a": first}
    assert other.hash("stats") == {b"stored": b"1"}


def test_each_slot_wakes_its_own_sleeper_if_that_sleeps_longer(make_slot: Make) -> None:
    some = slots(make_slot, 4)
    some[2].send_merge(100, [b"early"])
    for slot in some[1:]:
        assert slot.take().status == "empty"
    wakeups = some[0].broker.wakeups([some[0].topic])
    try:
        scatter(some[0], b"a", b"a", b"a", b"a", range_ms=500)
        heard = [*wakeups.get(timeout=2), *wakeups.get(timeout=0.5)]
        assert sorted(heard) == [("topic", 1), ("topic", 3)]
        assert not wakeups.get(timeout=0.05)
    finally:
        wakeups.close()
    assert [b"sleeping_until" in slot.hash("control") for slot in some] == [False, False, True, False]


@pytest.mark.parametrize("what", ["rests", "waits as a retry", "has moved", "has a fraction"])
def test_a_slot_that_needs_another_step_is_left_as_it_is(make_slot: Make, what: str) -> None:
    one, other = slots(make_slot, 2)
    if what in ("rests", "waits as a retry"):
        one.send(b"a")
        one.fail_one(b"a", delay_ms=60_000 if what == "rests" else 0)
        if what == "waits as a retry":
            one.promote()
            assert one.where(b"a") == "w"
    elif what == "has moved":
        one.with_topic(slots=16).configure()
    else:
        one.keyspace.zadd(one.keys.store, b"a", one.now_ms + 0.5)
        one.strangers += 1
    before = one.snapshot()
    assert scatter(one, b"a", b"b") == [None, Sent("stored", one.now_ms)]
    assert one.snapshot().items() >= before.items()
    assert other.zset("store") == {b"b": one.now_ms}


def test_what_rests_in_a_slot_keeps_no_other_message_from_it(make_slot: Make) -> None:
    (slot,) = slots(make_slot, 1)
    slot.send(b"a")
    slot.fail_one(b"a", delay_ms=60_000)
    assert scatter(slot, b"b") == [Sent("stored", slot.now_ms)]
    assert scatter(slot, b"b") == [Sent("merged", slot.now_ms)]
    assert (slot.where(b"a"), slot.where(b"b")) == ("T", "W")


@pytest.mark.parametrize("name", ["store", "retry", "body", "stats", "control"])
def test_a_foreign_key_concerns_its_slot_only(make_slot: Make, name: str) -> None:
    one, other = slots(make_slot, 2)
    with one.foreign(name):
        before = one.snapshot()
        assert scatter(one, b"a", b"b") == [None, Sent("stored", one.now_ms)]
        assert {key: value for key, value in one.snapshot().items() if key in before} == before
        assert not one.snapshot().keys() & ({*one.keys} - before.keys())
        assert other.zset("store") == {b"b": one.now_ms}


@pytest.mark.parametrize("range_ms", [-1, 10**15])
def test_a_wait_that_no_sender_may_use_is_refused(make_slot: Make, range_ms: int) -> None:
    (slot,) = slots(make_slot, 1)
    with pytest.raises(ServerRefused):
        scatter(slot, b"a", range_ms=range_ms)
    assert not slot.zset("store")


def debounced(make_slot: Make, max_wait_ms: int = 10_000, **options: Any) -> Slot:
    return make_slot(TopicType.RANGE_MERGE, debounce=True, max_wait_ms=max_wait_ms, **options)


def due(slot: Slot, member: bytes = b"a") -> int:
    """When a message that waits is due, in ms."""
    return math.floor(slot.zset("store")[member])


def now(clock: Clock) -> int:
    return clock() // 1_000


def test_each_send_starts_the_wait_again(make_slot: Make, clock: Clock) -> None:
    slot = debounced(make_slot)
    for _ in range(5):
        slot.send(b"a", score=1_000)
        assert due(slot) == now(clock) + 1_000
        clock.advance(0.9)
        assert slot.take().status == "empty"
    clock.advance(0.2)
    assert [given.member for given in slot.take().deliveries] == [b"a"]


@pytest.mark.parametrize("max_wait_ms", [1_500, 10_000, 86_400_000])
def test_no_message_waits_longer_than_max_wait(make_slot: Make, clock: Clock, max_wait_ms: int) -> None:
    slot = debounced(make_slot, max_wait_ms)
    latest = now(clock) + max_wait_ms
    for _ in range(400):
        slot.send(b"a", score=1_000)
        assert due(slot) <= latest
        clock.advance((max_wait_ms // 350) / 1000)
    assert latest - math.ceil(max_wait_ms / 1_000) <= due(slot)
    assert len(slot.take().deliveries) == 1


def test_messages_of_one_slot_have_deadlines_of_their_own(make_slot: Make, clock: Clock) -> None:
    slot, rng = debounced(make_slot, 60_000), random.Random(7)
    latest: dict[bytes, int] = {}
    for _ in range(300):
        member = rng.choice([b"a", b"b", b"c", b"d"])
        if slot.send(member, score=rng.choice([5_000, 20_000]))[0].status == "stored":
            latest[member] = now(clock) + 60_000
        assert due(slot, member) <= latest[member]
        clock.advance(rng.randrange(4_000) / 1000)
        taken = slot.take()
        for given in taken.deliveries:
            assert now(clock) <= latest.pop(given.member) + 4_000
            slot.commit(taken.receipt, [given.member])


def test_a_longer_range_than_max_wait_waits_no_longer(make_slot: Make, clock: Clock) -> None:
    slot = debounced(make_slot, 2_000)
    slot.send(b"a", score=30_000)
    assert now(clock) + 1_998 <= due(slot) <= now(clock) + 2_000


def test_several_sends_of_a_message_in_one_call_are_one(make_slot: Make, clock: Clock) -> None:
    slot = debounced(make_slot)
    assert [sent.status for sent in slot.send(b"a", b"b", b"a", score=1_000)] == [
        "stored",
        "stored",
        "merged",
    ]
    clock.advance(0.5)
    assert [sent.status for sent in slot.send(b"b", b"c", score=1_000)] == ["merged", "stored"]
    clock.advance(0.6)
    assert [given.member for given in slot.take().deliveries] == [b"a"]


def test_an_ensure_starts_no_wait_again_and_its_message_has_a_deadline(make_slot: Make, clock: Clock) -> None:
    slot = debounced(make_slot, 2_000)
    slot.ensure([1_000], [b"a"], slot.envelopes(1, b"body"))
    first = now(clock)
    clock.advance(0.9)
    slot.ensure([1_000], [b"a"], slot.envelopes(1, b"body"))
    assert due(slot) == first + 1_000
    slot.send(b"a", score=1_000)
    clock.advance(0.9)
    slot.send(b"a", score=1_000)
    assert first + 1_998 <= due(slot) <= first + 2_000


def test_a_retry_is_superseded_and_waits_from_then_on(make_slot: Make, clock: Clock) -> None:
    slot = debounced(make_slot, 5_000, backoff=NO_BACKOFF)
    slot.send(b"a", score=1_000)
    clock.advance(1.1)
    slot.fail_one(b"a")
    assert slot.send(b"a", score=1_000)[0].status == "superseded"
    assert due(slot) == now(clock) + 1_000


def test_a_message_in_flight_does_not_prolong_its_newer_copy(make_slot: Make, clock: Clock) -> None:
    slot = debounced(make_slot)
    slot.send(b"a", score=1_000)
    clock.advance(1.1)
    receipt, _ = slot.take_one()
    assert slot.send(b"a", score=1_000)[0].status == "stored"
    slot.commit(receipt, [b"a"])
    clock.advance(1.1)
    assert len(slot.take().deliveries) == 1


@pytest.mark.parametrize("score", [0.5, 99.75, 1e15, 1e300, math.inf])
def test_a_foreign_score_is_prolonged_to_no_more_than_max_wait(make_slot: Make, score: float) -> None:
    slot = debounced(make_slot, 2_000)
    slot.zadd(b"a", score)
    slot.send(b"a", score=1_000)
    assert due(slot) <= now(slot.clock) + 2_000


def test_others_keep_the_time_of_the_first_send(make_slot: Make, clock: Clock) -> None:
    slot = make_slot(TopicType.RANGE_MERGE, debounce=False, max_wait_ms=10_000)
    slot.send(b"a", score=1_000)
    first = due(slot)
    clock.advance(0.5)
    slot.send(b"a", score=1_000)
    assert due(slot) == first


def test_what_was_sent_is_the_sum_of_what_sends_became(make_slot: Make) -> None:
    one, other = slots(make_slot, 2)
    one.send_merge(500, [b"a", b"b"])
    first, _ = scatter(one, b"a", b"c", range_ms=900)
    assert first and first.status == "merged"
    ledgers = [slot.audit_ledger() for slot in (one, other)]
    assert [(ledger["sent"], ledger["stored"], ledger["merged"]) for ledger in ledgers] == [
        (3, 2, 1),
        (1, 1, 0),
    ]
    sample = one.broker.sample(one.topic, [0, 1])
    assert (sample.counters["sent"], sample.counters["merged"]) == (4, 1)
