"""Pages by rank: every row once, and the place is found again when what was before it goes."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from django_rmq.core.model.topic import TopicType
from django_rmq.spark import reader
from django_rmq.spark.broker_connection import RetryPolicy
from django_rmq.spark.reader import LiveRows, RowPosition
from tests.spark.conftest import MakeQueue, Queue

NONE = RetryPolicy(0, "a test")


def filled(queue: MakeQueue, count: int, *, scores: int = 3) -> Queue:
    """Return one slot with ``count`` messages, members of 4 digits in the order of the set."""
    topic = queue(TopicType.PRIORITY, slots=1, body="bytes")
    names = [b"%04d" % n for n in range(count)]
    topic.broker.send_replace(topic.topic, 0, [100 + n * scores // count for n in range(count)], names)
    return topic


def read(topic: Queue, low: float = -math.inf, high: float = math.inf) -> list[bytes]:
    return [
        row
        for rows in LiveRows(topic.broker, NONE, topic.topic, 0, "store", low, high).pages()
        for row in rows[::2]
    ]


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "FIRST_PAGE", 10)
    monkeypatch.setattr(reader, "MOST_ROWS", 10)


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 63, 64, 65, 400])
def test_every_row_is_read_once_and_in_order(queue: MakeQueue, small_pages: None, count: int) -> None:
    topic = filled(queue, count) if count else queue(TopicType.PRIORITY, slots=1, body="bytes")
    assert read(topic) == [b"%04d" % n for n in range(count)]


@pytest.mark.parametrize(
    ("low", "high", "first", "last"),
    [
        (101, math.inf, 100, 300),
        (-math.inf, 101, 0, 200),
        (101, 101, 100, 200),
        (100.5, 101.5, 100, 200),
        (103, 200, 0, 0),
    ],
)
def test_only_scores_between_the_bounds_are_read(
    queue: MakeQueue, small_pages: None, low: float, high: float, first: int, last: int
) -> None:
    assert read(filled(queue, 300), low, high) == [b"%04d" % n for n in range(first, last)]


@pytest.mark.parametrize("low", [-math.inf, 100])
@pytest.mark.parametrize(
    "change", ["goes from before", "goes around", "comes before", "comes and goes", "goes all"]
)
def test_what_is_there_throughout_is_read_exactly_once(
    queue: MakeQueue, small_pages: None, low: float, change: str
) -> None:
    topic = filled(queue, 600)
    broker, definition = topic.broker, topic.topic
    gone: set[bytes] = set()
    new: set[bytes] = set()
    found: Counter[bytes] = Counter()
    for turn, rows in enumerate(LiveRows(broker, NONE, definition, 0, "store", low).pages()):
        members = rows[::2]
        found.update(members)
        if not members:
            continue
        if "goes" in change and turn % 3 == 0:
            leaving = {"goes from before": [b"%04d" % turn], "goes all": sorted(found)}.get(
                change, list(members[-4:])
            )
            broker.remove(definition, 0, leaving)
            gone.update(leaving)
        if "comes" in change:
            coming = [b"new%04d-%d" % (turn, n) for n in range(7)]
            broker.send_replace(definition, 0, [90] * 7 if low == -math.inf else [100] * 7, coming)
            new.update(coming)
    throughout = {b"%04d" % n for n in range(600)} - gone
    assert {member: found[member] for member in throughout} == dict.fromkeys(throughout, 1)
    assert max(found.values()) == 1 or "comes" in change
    assert set(found) - new <= {b"%04d" % n for n in range(600)}


def test_scores_at_both_ends_of_what_there_is_are_read(queue: MakeQueue) -> None:
    topic = filled(queue, 3)
    topic.broker.client.zadd(
        f"{topic.broker.prefix}{topic.topic.name}_0", {b"least": -math.inf, b"most": math.inf}
    )
    assert read(topic) == [b"least", b"0000", b"0001", b"0002", b"most"]


def test_a_place_is_behind_a_member_or_behind_a_score() -> None:
    rows = [b"a", b"1", b"b", b"1", b"c", b"2"]
    assert [
        RowPosition(1.0).passed(rows),
        RowPosition(1.0, b"a").passed(rows),
        RowPosition(0.5, b"z").passed(rows),
    ] == [
        2,
        1,
        0,
    ]
    assert RowPosition(2.0, b"c").passed(rows) == 3
