"""What comes back is as fresh as it was: released retries, and what is replayed of a stranger's score."""

from __future__ import annotations

import pytest

from django_rmq.testing import Clock
from tests.contract.slots import NO_BACKOFF, TYPES, Slot, each_type, slot_of_each


@slot_of_each(TYPES, backoff=NO_BACKOFF)
def test_a_released_retry_gives_way_to_the_fresh_copy_that_waits(slot: Slot) -> None:
    slot.send(b"a")
    slot.fail_one(b"a")
    receipt, _ = slot.take_one()
    slot.send(b"a")
    fresh = slot.zset("store")
    assert slot.release(receipt, [b"a"]) == ["ok"]
    assert slot.zset("store") == fresh
    assert slot.counted("dropped") == 1
    assert slot.take_one()[1].retries_left == 16


@slot_of_each(TYPES, backoff=NO_BACKOFF)
def test_a_released_retry_that_nothing_replaces_has_the_budget_it_had(slot: Slot, clock: Clock) -> None:
    slot.send(b"a")
    slot.fail_one(b"a")
    for _ in range(3):
        receipt, delivery = slot.take_one()
        assert delivery.retries_left == 15
        assert slot.extend(receipt, [b"a"]) == ["ok"]
        assert [held.delivery.retries_left for held in slot.list_held("A")] == [15]
        assert slot.release(receipt, [b"a"]) == ["ok"]


@each_type
@pytest.mark.parametrize("score", [7, 16, 0, -5])
def test_what_died_with_a_strangers_retry_score_is_replayed_fresh(slot: Slot, score: float) -> None:
    slot.zadd(b"a", score)
    slot.kill(b"a")
    assert slot.replay([b"a"]) == ["replayed"]
    assert slot.where(b"a") == "W"
    assert slot.take_one()[1].retries_left == 16
