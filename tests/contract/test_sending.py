"""send_merge, send_replace and ensure: what they answer, what they refuse, whom they wake."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_rmq.messages import TopicType
from tests.contract.slots import TYPES, Slot

MakeSlot = Callable[..., Slot]


def ensure(slot: Slot, *members: bytes) -> list[str]:
    scores = [0 if slot.topic.type is TopicType.RANGE_MERGE else slot.fresh_score()] * len(members)
    return [sent.status for sent in slot.ensure(scores, list(members), slot.envelopes(len(members)))]


@pytest.mark.parametrize("kind", TYPES)
def test_ensure_tells_the_score_of_what_it_stored(make_slot: MakeSlot, kind: TopicType) -> None:
    slot = make_slot(kind)
    scores = [1_000, 2_000]
    if kind is TopicType.FIXED_TIME:
        scores = [slot.now_ms + 1_000, slot.now_ms + 2_000]
    sent = slot.ensure(scores, [b"a", b"b"])
    assert [one.status for one in sent] == ["stored", "stored"]
    assert {b"a": sent[0].score, b"b": sent[1].score} == slot.zset("store")
