"""How a score carries the remaining retries: a message that waits as a retry of q has q deliveries left."""

from __future__ import annotations

import math

from django_rmq.core.model.limits import MAX_PRIORITY, MAX_RETRIES_LIMIT
from django_rmq.core.model.replies import FailureRecord
from django_rmq.core.model.topic import TopicType
from tests.oracle.numbers import bounded, floor
from tests.oracle.slot import Slot

LARGEST_WITH_RETRIES = (1 << 43) - 1
"""The largest score with room for ten bits of retries below it in a double. From 2^43 on they would be rounded."""


def floor_priority(slot: Slot) -> int:
    """Return the priority score up to which a score is read as a retry."""
    return max(16, slot.max_retries)


def is_retry(slot: Slot, score: float) -> bool:
    """Return whether the message waits as a retry. On fifo topics a score is a place, also after failures."""
    if slot.topic.is_fifo:
        return False
    if not slot.topic.is_priority:
        return score <= 999
    return score <= floor_priority(slot) or (math.isfinite(score) and score % 1 != 0)


def is_fresh(slot: Slot, score: float) -> bool:
    """Return whether a send may use this score."""
    if is_retry(slot, score) or not math.isfinite(score) or score % 1 != 0:
        return False
    if slot.topic.is_fifo:
        return 0 <= score <= LARGEST_WITH_RETRIES
    return score <= (MAX_PRIORITY if slot.topic.is_priority else 1e14)


def keeps_first(slot: Slot, score: float) -> bool:
    """Return whether of two copies of a message the earlier one keeps its time, or its place."""
    kind = slot.topic.type
    return kind is TopicType.FIFO or (kind is TopicType.RANGE_MERGE and not is_retry(slot, score))


def is_due(slot: Slot, score: float) -> bool:
    """Return whether the time of a score has come. A place in a fifo line is due from its millisecond on."""
    return score < slot.now_ms + 1 if slot.topic.is_fifo else score <= slot.now_ms


def fraction(score: float) -> float:
    """Return the retries in the fraction of a score, before they are limited."""
    return floor(score % 1 * 1024 + 0.5)


def budget(slot: Slot, score: float, member: bytes, most: int) -> int:
    """Return the retries left, at most ``most``, for a delivery of ``member`` that is taken with this score."""
    if slot.topic.is_fifo:
        failure = slot.failure_of(member)
        return bounded(most - (failure.times if failure else 0), 0, most)
    if not is_retry(slot, score):
        return most
    q = floor(score)
    if slot.topic.is_priority and score > floor_priority(slot):
        q = fraction(score)
    return bounded(q - 1, 0, most)


def retry_score(slot: Slot, q: float, first: float) -> float:
    """Return the Store score of a retry of ``q``. ``first``: the score before the first failure."""
    if slot.topic.is_fifo:
        return first
    q = bounded(q, 1, MAX_RETRIES_LIMIT)
    topic = slot.topic
    if topic.is_priority and topic.retry_priority == "original" and first > floor_priority(slot):
        return math.floor(min(first, LARGEST_WITH_RETRIES)) + q / 1024
    return float(q)


def first_score(slot: Slot, score: float, failure: FailureRecord | None) -> float:
    """Return the score of a message before its first failure, if known."""
    if not is_retry(slot, score):
        return score
    if slot.topic.is_priority and score > floor_priority(slot):
        return floor(score)
    return float(failure.score) if failure else score
