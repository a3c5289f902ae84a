"""The retries that a message has left, read from where it is."""

from __future__ import annotations

import math

from django_rmq.core.words.topics import Topic


def is_retry(topic: Topic, score: float) -> bool:
    """Return whether a score in Store is that of a message that failed and waits again."""
    if topic.is_fifo:
        return False
    if not topic.is_priority:
        return score <= 999
    return score <= topic.min_priority - 1 or (math.isfinite(score) and score % 1 != 0)


def retries_left(topic: Topic, state: str, score: float, failures: int, own: int | None) -> int | None:
    """Return the retries left after the next delivery (prepare: after this one). None: all, Dead, or a score without a meaning.

    ``own``: the number that the message brings along; it may have joined a later send, which has another one.
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
        q = round(score % 1 * 1024) if in_fraction else math.floor(score)
        return min(max(0, q - 1), most)
    return None


__all__ = ["is_retry", "retries_left"]
