"""DEBOUNCE: each send starts the wait of its message again, and no message waits longer than MAX_WAIT."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from django_rmq.core.model.topic import TopicType
from django_rmq.testing import Clock
from tests.contract.slots import NO_BACKOFF, Slot

MakeSlot = Callable[..., Slot]


def debounced(make_slot: MakeSlot, max_wait_ms: int = 10_000, **options: Any) -> Slot:
    return make_slot(TopicType.RANGE_MERGE, debounce=True, max_wait_ms=max_wait_ms, **options)


def due(slot: Slot, member: bytes = b"a") -> int:
    """When a message that waits is due, in ms."""
    return math.floor(slot.zset("store")[member])


def now(clock: Clock) -> int:
    return clock() // 1_000


def test_each_send_starts_the_wait_again(make_slot: MakeSlot, clock: Clock) -> None:
    slot = debounced(make_slot)
    for _ in range(5):
        slot.send(b"a", score=1_000)
        assert due(slot) == now(clock) + 1_000
        clock.advance(0.9)
        assert slot.take().status == "empty"
    clock.advance(0.2)
    assert [given.member for given in slot.take().deliveries] == [b"a"]


@pytest.mark.parametrize("max_wait_ms", [1_500, 10_000, 86_400_000])
def test_no_message_waits_longer_than_max_wait(make_slot: MakeSlot, clock: Clock, max_wait_ms: int) -> None:
    slot = debounced(make_slot, max_wait_ms)
    latest = now(clock) + max_wait_ms
    for _ in range(400):
        slot.send(b"a", score=1_000)
        assert due(slot) <= latest
        clock.advance((max_wait_ms // 350) / 1000)
    assert latest - math.ceil(max_wait_ms / 1_000) <= due(slot)
    assert len(slot.take().deliveries) == 1


def test_messages_of_one_slot_have_deadlines_of_their_own(make_slot: MakeSlot, clock: Clock) -> None:
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


def test_a_longer_range_than_max_wait_waits_no_longer(make_slot: MakeSlot, clock: Clock) -> None:
    slot = debounced(make_slot, 2_000)
    slot.send(b"a", score=30_000)
    assert now(clock) + 1_998 <= due(slot) <= now(clock) + 2_000


def test_several_sends_of_a_message_in_one_call_are_one(make_slot: MakeSlot, clock: Clock) -> None:
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


def test_an_ensure_starts_no_wait_again_and_its_message_has_a_deadline(
    make_slot: MakeSlot, clock: Clock
) -> None:
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


def test_a_retry_is_superseded_and_waits_from_then_on(make_slot: MakeSlot, clock: Clock) -> None:
    slot = debounced(make_slot, 5_000, backoff=NO_BACKOFF)
    slot.send(b"a", score=1_000)
    clock.advance(1.1)
    slot.fail_one(b"a")
    assert slot.send(b"a", score=1_000)[0].status == "superseded"
    assert due(slot) == now(clock) + 1_000


def test_a_message_in_flight_does_not_prolong_its_newer_copy(make_slot: MakeSlot, clock: Clock) -> None:
    slot = debounced(make_slot)
    slot.send(b"a", score=1_000)
    clock.advance(1.1)
    receipt, _ = slot.take_one()
    assert slot.send(b"a", score=1_000)[0].status == "stored"
    slot.commit(receipt, [b"a"])
    clock.advance(1.1)
    assert len(slot.take().deliveries) == 1


@pytest.mark.parametrize("score", [0.5, 99.75, 1e15, 1e300, math.inf])
def test_a_foreign_score_is_prolonged_to_no_more_than_max_wait(
    make_slot: MakeSlot, clock: Clock, score: float
) -> None:
    slot = debounced(make_slot, 2_000)
    slot.zadd(b"a", score)
    slot.send(b"a", score=1_000)
    assert due(slot) <= now(clock) + 2_000


def test_others_keep_the_time_of_the_first_send(make_slot: MakeSlot, clock: Clock) -> None:
    slot = make_slot(TopicType.RANGE_MERGE, debounce=False, max_wait_ms=10_000)
    slot.send(b"a", score=1_000)
    first = due(slot)
    clock.advance(0.5)
    slot.send(b"a", score=1_000)
    assert due(slot) == first
