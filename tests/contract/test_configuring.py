"""pause, configure, and what a slot settles on first use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_rmq.messages import TopicType
from tests.contract.slots import TYPES, Slot

MakeSlot = Callable[..., Slot]


@pytest.mark.parametrize(("before", "after"), [(16, 20), (3, 17), (20, 16), (20, 21)])
@pytest.mark.parametrize("prepared", [True, False])
def test_the_retries_of_a_priority_topic_change_only_where_no_live_score_would_read_otherwise(
    make_slot: MakeSlot, before: int, after: int, prepared: bool
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


@pytest.mark.parametrize("kind", TYPES)
def test_retries_up_to_sixteen_and_time_outs_change_while_messages_wait(
    make_slot: MakeSlot, kind: TopicType
) -> None:
    slot = make_slot(kind, max_retries=16)
    slot.send(b"a")
    assert slot.with_topic(max_retries=3, timeout=7).configure() == "ok"
    control = slot.hash("control")
    assert (control[b"max_retries"], control[b"timeout"]) == (b"3", b"7")
    assert slot.take_one()[1].retries_left == 3
