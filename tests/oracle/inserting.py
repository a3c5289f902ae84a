"""Inserting many messages at once, where none of them has to be looked at."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from django_rmq.core.commands.insert import SENTINEL
from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import WrongType
from tests.oracle.keyspace import Memory
from tests.oracle.scores import floor_priority, is_fresh
from tests.oracle.sending import note_sent
from tests.oracle.slot import Slot, on

LATE_MS = 1_000
"""By how much the clock that a sender has read may differ from that of the server."""


def insert(memory: Memory, topic: Topic, slot: int, *rest: Any) -> Counter[str] | None:
    """Insert the messages of a ZADD; None: they have to be looked at one by one, and nothing was sent."""
    pairs = rest[len(SENTINEL) + (rest[0] == "NX") :]
    try:
        return _insert(memory, topic, slot, pairs[::2], pairs[1::2])
    except WrongType:
        return None


@on("store", "retry", "failures", "stats", "control")
def _insert(slot: Slot, scores: Sequence[int], members: Sequence[bytes]) -> Counter[str] | None:
    if not is_plain(slot, scores):
        return None
    merges = slot.topic.type is TopicType.RANGE_MERGE
    counts: Counter[str] = Counter()
    for member, score in zip(members, scores, strict=True):
        is_new = member not in slot.store
        counts["stored" if is_new else "merged" if merges else "replaced"] += 1
        if is_new or not merges:
            slot.store[member] = float(score)
    slot.count("sent", len(members))
    for word, by in counts.items():
        slot.count(word, by)
    note_sent(slot, min(scores) if counts["stored"] or not merges else math.inf)
    return +counts


def is_plain(slot: Slot, scores: Sequence[int]) -> bool:
    """Return whether the messages only have to be counted: each is new, or meets a fresh copy that waits."""
    topic = slot.topic
    if slot.moved_to is not None or not 1 <= len(scores) <= BATCH:
        return False
    if not all(is_fresh(slot, score) for score in (min(scores), max(scores))):
        return False
    lowest = 999
    if topic.is_priority:
        lowest = floor_priority(slot)
        if slot.failures:
            return False
    elif topic.type is TopicType.RANGE_MERGE:
        late = slot.now_ms + (topic.time_range_ms or 0) - min(scores)
        if topic.debounce_ms or min(scores) < max(scores) or abs(late) > LATE_MS:
            return False
    elif topic.type is not TopicType.FIXED_TIME:
        return False
    if slot.retry or any(score <= lowest for score in slot.store.values()):
        return False
    if topic.slot_backlog and len(slot.store) + len(scores) > topic.slot_backlog:
        return False
    return b"" not in slot.store
