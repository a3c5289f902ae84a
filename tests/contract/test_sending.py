"""send_merge, send_replace and ensure: what they answer and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from django_rmq.core.model.limits import BATCH, MAX_PRIORITY
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ServerRefused, SlotMoved
from tests.contract.slots import TYPES, Slot, each_type, slot_of_each

MakeSlot = Callable[..., Slot]


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


def test_the_backlog_of_a_topic_is_split_by_its_slots_rounded_up(make_slot: MakeSlot) -> None:
    slot = make_slot(slots=4, max_backlog=5)
    assert [sent.status for sent in slot.send(b"a", b"b", b"c")] == ["stored", "stored", "refused"]


def test_a_refused_keyed_message_leaves_no_body(make_slot: MakeSlot) -> None:
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
    make_slot: MakeSlot, count: int
) -> None:
    slot = make_slot(TopicType.PRIORITY, slots=2, max_retries=5)
    slot.shut(1)
    assert b"max_retries" not in slot.hash("control")
    slot.send(*[b"%d" % n for n in range(count)])
    assert slot.hash("control")[b"max_retries"] == b"5"


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("identity", ["key", "body"])
def test_one_by_one_comes_to_the_same_as_together(
    make_slot: MakeSlot, kind: TopicType, identity: str
) -> None:
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
    make_slot: Callable[..., Slot],
) -> None:
    slot = make_slot(max_retries=5)
    slot.keyspace.hset(slot.keys.control, b"undrained_since", b"%d" % slot.now_ms)
    slot.send(b"a")
    assert slot.hash("control")[b"max_retries"] == b"5"
