"""The retries that a message has left, as people and Spark see them."""

from __future__ import annotations

import math

import pytest

from django_rmq.core.words.retries import retries_left
from django_rmq.core.words.topics import Topic, TopicType

MERGE = Topic("m", TopicType.RANGE_MERGE, slots=1, time_range_ms=1, identity="key", max_retries=5)
PRIORITY = Topic("p", TopicType.PRIORITY, slots=1, identity="key", max_retries=5)
FIFO = Topic("f", TopicType.FIFO, slots=1, identity="key", max_retries=5)
NOW = 1_800_000_000_000


@pytest.mark.parametrize(
    ("topic", "state", "score", "failures", "own", "left"),
    [
        (MERGE, "store", NOW, 0, 2, None),
        (MERGE, "store", 4, 2, None, 3),
        (MERGE, "store", 4, 2, 1, 1),
        (MERGE, "store", -math.inf, 0, None, None),
        (MERGE, "retry", NOW + 4 / 1024, 2, None, 3),
        (MERGE, "retry", NOW + 4 / 1024, 2, 0, 0),
        (MERGE, "claim", 1, 5, None, 0),
        (MERGE, "prepare", NOW + 2, 0, None, 2),
        (MERGE, "dead", NOW, 6, None, None),
        (PRIORITY, "store", 500, 0, 2, None),
        (PRIORITY, "store", 500 + 4 / 1024, 2, None, 3),
        (PRIORITY, "store", 500 + 4 / 1024, 2, 1, 1),
        (PRIORITY, "store", 4, 2, None, 3),
        (PRIORITY, "store", math.inf, 0, None, None),
        (FIFO, "store", NOW, 0, 2, None),
        (FIFO, "store", NOW, 1, 2, 1),
        (FIFO, "store", NOW, 9, None, 0),
        (FIFO, "retry", NOW + 3 / 1024, 1, 9, 2),
    ],
)
def test_the_retries_left_are_those_of_the_next_delivery(
    topic: Topic, state: str, score: float, failures: int, own: int | None, left: int | None
) -> None:
    assert retries_left(topic, state, float(score), failures, own) == left
