"""Scores: what the score of a message in Store says: when it is due, or its priority, and its retries left.

Scores are doubles, in Redis as in Lua. The scripts have the same numbers, and the same rules in ``lua/slot/_scores.lua``. The
score that a send gives its message comes from ``producer.placement.score_of``.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime

from django_rmq.core.model.topic import Topic

LAST_RETRY = 999
"""The highest score in Store of a retry, on topics ordered by time."""

LAST_INSTANT_MS = 1e14
"""The bound of scores that are times: no send gives a message a later one."""


def is_retry(topic: Topic, score: float) -> bool:
    """Return whether a score in Store is that of a message that failed and waits again."""
    if topic.is_fifo:
        return False
    if not topic.is_priority:
        return score <= LAST_RETRY
    return score <= topic.min_priority - 1 or (math.isfinite(score) and score % 1 != 0)


def due_of(topic: Topic, score: float) -> datetime | None:
    """Return when a message with this score in Store was due, or None on priority topics and for a retry."""
    if topic.is_priority or is_retry(topic, score) or not LAST_RETRY < score < LAST_INSTANT_MS:
        return None
    return datetime.fromtimestamp(math.floor(score) / 1000, UTC)


def priority_of(topic: Topic, score: float) -> int | None:
    """Return the priority of a message with this score in Store, or None on other topics and for a retry without one."""
    if not topic.is_priority or not math.isfinite(score) or score <= topic.min_priority - 1:
        return None
    return math.floor(score)


def retries_left(topic: Topic, state: str, score: float, failures: int, own: int | None) -> int | None:
    """Return the retries left after the next delivery of a message (in prepare: after the present one).

    None if all are left, if the message is dead, or if the score has no meaning. ``own`` is the number in the message's
    envelope; the message may have joined a later send, which has another number.
    """
    most = topic.retries_of(own)
    if state in ("store", "claim") and topic.is_fifo:
        return max(0, most - failures) if failures else None
    if not math.isfinite(score):
        return None
    if state == "prepare":
        return int(score) % 1000
    in_fraction = state == "retry" or (topic.is_priority and score > topic.min_priority - 1)
    if state == "retry" or (state in ("store", "claim") and is_retry(topic, score)):
        # A retry has the number of its deliveries left in its score, which is one more than its retries: one that keeps its
        # priority has it in the fraction, in 1024ths.
        q = round(score % 1 * 1024) if in_fraction else math.floor(score)
        return min(max(0, q - 1), most)
    return None
