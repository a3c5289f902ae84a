"""A member named twice in one call is one message."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_rmq.core.model.topic import TopicType
from tests.contract.slots import NO_BACKOFF, TYPES, Slot, each_type, slot_of_each

MakeSlot = Callable[..., Slot]


@pytest.mark.parametrize("mark", ["remove", "bury"])
@pytest.mark.parametrize("end", ["commit", "release"])
def test_a_marked_delivery_that_is_ended_twice_in_one_call_is_counted_once(
    make_slot: MakeSlot, mark: str, end: str
) -> None:
    slot = make_slot()
    slot.send(b"a")
    receipt, _ = slot.take_one()
    getattr(slot, mark)([b"a"])
    words = getattr(slot, end)(receipt, [b"a", b"a"])
    assert words[0] == "ok"
    assert slot.where(b"a") == ("D" if mark == "bury" else "-")
    assert slot.counted("ended_marked") == 1


@each_type
def test_a_delivery_committed_twice_in_one_call_is_committed_once(slot: Slot) -> None:
    slot.send(b"a")
    receipt, _ = slot.take_one()
    assert slot.commit(receipt, [b"a", b"a"]) == ["ok", "ok"]
    assert slot.counted("committed") == 1


@slot_of_each(TYPES, backoff=NO_BACKOFF)
def test_a_delivery_failed_twice_in_one_call_fails_once(slot: Slot) -> None:
    slot.send(b"a")
    receipt, _ = slot.take_one()
    assert slot.fail(receipt, b"a", b"a") == ["ok", "stale"]
    assert slot.take_one()[1].retries_left == 15


@each_type
def test_a_member_sent_twice_in_one_call_is_stored_once(slot: Slot) -> None:
    words = [sent.status for sent in slot.send(b"a", b"b", b"a")]
    assert words == ["stored", "stored", "merged" if slot.topic.type is TopicType.RANGE_MERGE else "replaced"]
    assert set(slot.zset("store")) == {b"a", b"b"}


def test_of_two_priorities_in_one_call_the_last_counts(make_slot: MakeSlot) -> None:
    slot = make_slot()
    sent = slot.send_replace([50, 70], [b"a", b"a"])
    assert [(one.status, one.score) for one in sent] == [("stored", 50), ("replaced", 70)]
    assert slot.zset("store") == {b"a": 70}


def test_of_two_bodies_in_one_call_the_last_counts(make_slot: MakeSlot) -> None:
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


def test_no_members_are_no_error(make_slot: MakeSlot) -> None:
    slot = make_slot()
    for method in ("commit", "release", "extend"):
        assert getattr(slot, method)(1, []) == []
    assert slot.rollback(1, []) == [] and slot.bury([]) == [] and slot.remove([]) == []
    assert slot.replay([]) == [] and slot.reschedule([], []) == []
