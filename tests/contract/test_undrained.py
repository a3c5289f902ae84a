"""Priorities hold no time: a slot notes since when its Store has not been empty, whatever fills and empties it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import TopicType
from tests.contract.slots import NO_BACKOFF, START_MS, TIME_TYPES, Make, Slot

A, B = b"a", b"b"


@pytest.fixture
def slot(make_slot: Make) -> Slot:
    return make_slot(backoff=NO_BACKOFF)


def since(slot: Slot) -> int | None:
    """Return since when, in ms after the beginning; None: Store is empty, or nobody knows."""
    found = slot.count().undrained_since_ms
    noted = slot.hash("control").get(b"undrained_since")
    assert found == (None if noted is None else int(noted))
    return None if found is None else found - START_MS


def later(slot: Slot) -> None:
    slot.clock.advance(1)


def test_sends_do_not_move_it_until_all_that_waited_is_taken(slot: Slot) -> None:
    assert since(slot) is None
    slot.send(A)
    for member in (B, A, b"c"):
        later(slot)
        slot.send(member)
        assert since(slot) == 0
    later(slot)
    receipt, delivery = slot.take_one()
    assert since(slot) == 0
    slot.take(5)
    assert since(slot) is None
    later(slot)
    slot.commit(receipt, [delivery.member])
    assert since(slot) is None
    slot.send(b"d")
    assert since(slot) == 5_000


def test_a_batch_and_an_ensured_message_begin_it(make_slot: Make) -> None:
    for call in (lambda slot: slot.send_replace([50, 60], [A, B]), lambda slot: slot.ensure([50], [A])):
        slot = make_slot()
        at = slot.now_ms - START_MS
        call(slot)
        assert since(slot) == at
        later(slot)
        call(slot)
        assert since(slot) == at


@pytest.mark.parametrize("back", ["rollback", "release", "time_out", "promote", "prepare"])
def test_what_comes_back_into_an_empty_store_begins_it(slot: Slot, back: str) -> None:
    slot.send(A)
    receipt, _ = slot.take_one()
    slot.clock.advance(31)
    if back == "rollback":
        slot.fail(receipt, A)
    elif back == "release":
        slot.release(receipt, [A])
    elif back == "time_out":
        assert slot.time_out() == 1
    elif back == "promote":
        slot.fail(receipt, A, delay_ms=100)
        assert since(slot) is None
        slot.clock.advance("100ms")
        assert slot.promote() == 1
    else:
        slot.pause()
        assert slot.take().status == "paused"
    assert since(slot) == (31_100 if back == "promote" else 31_000)


@pytest.mark.parametrize("spent", [True, False])
def test_a_claim_ends_it_and_what_comes_back_begins_it(slot: Slot, spent: bool) -> None:
    slot.send(A)
    assert slot.claim("s", 1, 60_000, 10).taken == 1
    assert since(slot) is None
    later(slot)
    slot.return_claim("s", 1, spent=spent)
    assert since(slot) == 1_000


def test_what_a_query_has_failed_begins_it_when_the_claim_is_acknowledged(slot: Slot) -> None:
    slot.send(A, B)
    assert slot.claim("s", 1, 60_000, 10).taken == 2
    slot.renew_claim("s", 1, 60_000, seal=True)
    slot.fail_claimed("s", 1, [Failure(A)])
    later(slot)
    slot.ack_claim("s", 1)
    assert since(slot) == 1_000


def test_a_claim_of_a_part_leaves_it(slot: Slot) -> None:
    slot.send(A, B)
    later(slot)
    assert slot.claim("s", 1, 60_000, 1).taken == 1
    assert since(slot) == 0


def test_what_a_person_sends_again_begins_it(slot: Slot) -> None:
    slot.send(A)
    slot.kill(A)
    later(slot)
    assert slot.replay([A]) == ["replayed"]
    assert since(slot) == 1_000


@pytest.mark.parametrize("how", ["bury", "remove", "purge", "expire", "claimed_expire"])
def test_whatever_empties_store_ends_it(make_slot: Make, how: str) -> None:
    slot = make_slot(identity="key")
    slot.send_replace([50], [A], [slot.envelope(expires_ms=slot.now_ms + 500)])
    assert since(slot) == 0
    later(slot)
    if how == "purge":
        assert slot.purge("store") == 1
    elif how == "expire":
        assert slot.take().status == "empty"
    elif how == "claimed_expire":
        assert slot.claim("s", 1, 60_000, 1).taken == 0
    else:
        getattr(slot, how)([A])
    assert since(slot) is None


@pytest.mark.parametrize("how", ["bury", "remove", "purge"])
def test_whatever_takes_a_part_leaves_it(slot: Slot, how: str) -> None:
    slot.send(A, B)
    later(slot)
    slot.purge("store", limit=1) if how == "purge" else getattr(slot, how)([A])
    assert since(slot) == 0


def test_a_move_ends_it_here_and_begins_it_there(make_slot: Make) -> None:
    source = make_slot(name="moving", slots=1)
    target = make_slot(name="moving", index=1, slots=2)
    source.send(A)
    later(source)
    assert target.shut(1, fresh=True) == "shut" and source.with_topic(slots=2).shut(1) == "shut"
    answer = source.move_out(1, 1, [("store", A)])
    assert since(source) is None
    assert target.move_in(1, 0, answer.ticket, answer.rows) == "in"
    assert since(target) == 1_000


def test_what_a_stranger_sends_is_seen_by_the_next_who_prepares(slot: Slot) -> None:
    slot.pause()
    slot.zadd(A, 50)
    assert since(slot) is None
    later(slot)
    assert slot.take().status == "paused"
    assert since(slot) == 1_000


def test_it_is_noted_where_all_that_waits_runs_already(slot: Slot) -> None:
    names = [b"%d" % n for n in range(1_010)]
    slot.send(*names, score=50)
    slot.take(1_000), slot.take(10)
    for name in names:
        slot.zadd(name, 50)
    later(slot)
    assert slot.take(1).status == "more"
    assert since(slot) == 1_000


@pytest.mark.parametrize("call", ["rollback", "release", "time_out", "promote"])
def test_a_call_that_ends_nothing_notes_nothing(slot: Slot, call: str) -> None:
    slot.zadd(A, 50)
    before = slot.snapshot("stale")
    calls: dict[str, Callable[[], Any]] = {
        "rollback": lambda: slot.fail(7, A),
        "release": lambda: slot.release(7, [A]),
        "time_out": slot.time_out,
        "promote": slot.promote,
    }
    calls[call]()
    assert slot.snapshot("stale") == before


@pytest.mark.parametrize("kind", TIME_TYPES)
def test_topics_of_time_note_nothing(make_slot: Make, kind: TopicType) -> None:
    slot = make_slot(kind, backoff=NO_BACKOFF)
    slot.send(A, B)
    slot.ensure([slot.now_ms], [b"c"])
    receipt, delivery = slot.take_one()
    slot.fail(receipt, delivery.member)
    assert b"undrained_since" not in slot.hash("control")
    assert slot.count().undrained_since_ms is None
    assert slot.broker.sample(slot.topic, [0]).undrained_since_ms is None


def test_a_sample_of_slots_has_the_one_that_was_not_empty_for_the_longest(make_slot: Make) -> None:
    slots = [make_slot(name="many", index=index) for index in (3, 1, 2)]
    for slot in slots[:2]:
        slot.send(A)
        later(slot)
    found = slots[0].broker.sample(slots[0].topic, range(16))
    assert found.undrained_since_ms == START_MS
    assert found.plus(found).undrained_since_ms == START_MS
    slots[0].take()
    assert slots[0].broker.sample(slots[0].topic, range(16)).undrained_since_ms == START_MS + 1_000
