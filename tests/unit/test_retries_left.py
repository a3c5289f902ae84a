"""What the score of a message says: its retries left, when it is due, its priority."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.scores import due_of, priority_of, retries_left
from django_rmq.core.model.topic import Topic, TopicType

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


DUE = datetime(2027, 1, 15, 8, tzinfo=UTC)


@pytest.mark.parametrize(
    ("topic", "score", "due", "priority"),
    [
        (MERGE, NOW, DUE, None),
        (MERGE, 4, None, None),
        (MERGE, -math.inf, None, None),
        (MERGE, math.inf, None, None),
        (MERGE, math.nan, None, None),
        (FIFO, NOW, DUE, None),
        (FIFO, NOW + 0.25, DUE, None),
        (PRIORITY, 500, None, 500),
        (PRIORITY, 500 + 4 / 1024, None, 500),
        (PRIORITY, 4, None, None),
        (PRIORITY, math.inf, None, None),
        (PRIORITY, math.nan, None, None),
    ],
)
def test_a_score_says_when_a_message_was_due_or_its_priority(
    topic: Topic, score: float, due: datetime | None, priority: int | None
) -> None:
    assert (due_of(topic, score), priority_of(topic, score)) == (due, priority)
    message = Message(topic, 0, 1, Delivery(b"a", score, 3))
    assert (message.due, message.priority) == (due, priority)
