"""Batch reads: each row once, whatever goes before it meanwhile, and whatever filters follow."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from django_rmq.core import reslotting
from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import SlotMoved
from django_rmq.spark import reader
from django_rmq.spark.broker_connection import RetryPolicy
from django_rmq.spark.reader import COLUMNS, METADATA, PAGE_BYTES, PAGES, LiveRows, Reader, RowPosition
from django_rmq.spark.source_options import READ, SourceOptions
from tests.spark.conftest import MakeQueue, Queue

NONE = RetryPolicy(0, "a test")


def one_slot(queue: MakeQueue, count: int, *, scores: int = 3) -> Queue:
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
    topic = one_slot(queue, count) if count else queue(TopicType.PRIORITY, slots=1, body="bytes")
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
    assert read(one_slot(queue, 300), low, high) == [b"%04d" % n for n in range(first, last)]


@pytest.mark.parametrize("low", [-math.inf, 100])
@pytest.mark.parametrize(
    "change", ["goes from before", "goes around", "comes before", "comes and goes", "goes all"]
)
def test_what_is_there_throughout_is_read_exactly_once(
    queue: MakeQueue, small_pages: None, low: float, change: str
) -> None:
    topic = one_slot(queue, 600)
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


def test_large_rows_behind_many_small_ones_are_read_in_small_pages(queue: MakeQueue) -> None:
    topic = one_slot(queue, 900)
    for first in range(0, 4_000, 100):
        small = [b"a%04d" % n for n in range(first, first + 100)]
        large = [(b"b%04d" % n).ljust(100_000, b".") for n in range(first // 10, first // 10 + 10)]
        topic.broker.send_replace(topic.topic, 0, [200] * 110, [*small, *large])
    pages = list(LiveRows(topic.broker, NONE, topic.topic, 0, "store").pages())
    assert sum(len(page) // 2 for page in pages) == 5_300
    assert max(sum(map(len, page)) for page in pages) < PAGES * PAGE_BYTES


def test_scores_at_both_ends_of_what_there_is_are_read(queue: MakeQueue) -> None:
    topic = one_slot(queue, 3)
    key = f"{topic.broker.prefix}{topic.topic.name}_0"
    topic.broker.client.zadd(key, {b"least": -math.inf, b"most": math.inf})
    assert read(topic) == [b"least", b"0000", b"0001", b"0002", b"most"]


@pytest.mark.parametrize("record", [b"", b"x", b"failed 1 1 1 1 9", b"\xff 1 1 1 1 0 0\n"])
def test_a_record_that_another_program_has_written_is_none(queue: MakeQueue, record: bytes) -> None:
    topic = queue(slots=1, identity="key")
    client, keys = topic.broker.client, slot_keys(topic.broker.prefix, topic.topic.name, 0)
    for n, key in enumerate((keys.store, keys.retry, keys.dead)):
        client.zadd(key, {f"k{n}": 100, "other": 100})
    client.hset(keys.failures, mapping={"k0": record, "k1": record})
    client.hset(keys.deaths, "k2", record)
    given = {**topic.options, "includeMetadata": "true", "queues": "store,retry,dead"}
    source = Reader(SourceOptions(given, READ, "spark.read"), METADATA)
    rows = [row for task in source.partitions() for each in source.read(task) for row in each.to_pylist()]
    assert {row["key"] for row in rows} == {b"k0", b"k1", b"k2", b"other"} and len(rows) == 6
    assert {row["reason"] for row in rows} == {None}


def test_a_place_is_behind_a_member_or_behind_a_score() -> None:
    rows = [b"a", b"1", b"b", b"1", b"c", b"2"]
    places = RowPosition(1.0), RowPosition(1.0, b"a"), RowPosition(0.5, b"z"), RowPosition(2.0, b"c")
    assert [place.passed(rows) for place in places] == [2, 1, 0, 3]


@pytest.mark.parametrize("metadata", ["false", "true"])
@pytest.mark.parametrize("until", ["begun", "moved", "finished", "before"])
def test_a_read_during_which_the_topic_is_reslotted_says_so(
    queue: MakeQueue, until: str, metadata: str
) -> None:
    topic = queue(slots=2)
    topic.send([*range(40)])
    given = SourceOptions({**topic.options, "includeMetadata": metadata}, READ, "spark.read")
    reader = Reader(given, METADATA if metadata == "true" else COLUMNS)
    tasks = reader.partitions() if until != "before" else []
    change = reslotting.begin(topic.broker, topic.topic, 8)
    assert change is not None
    if until != "begun":
        reslotting.move(topic.broker, change)
    if until == "finished":
        reslotting.finish(topic.broker, change)
    with pytest.raises(SlotMoved, match="Load the frame again when"):
        assert [list(reader.read(task)) for task in tasks or reader.partitions()]
    reslotting.finish(topic.broker, change)
    assert sum(batch.num_rows for task in reader.partitions() for batch in reader.read(task)) == 40


def test_filters_of_one_frame_leave_each_other_alone(spark: Any, queue: MakeQueue) -> None:
    """Spark keeps the plan of a read for all queries of a frame, and would keep with it what one of them pushes down."""
    frame = one_slot(queue, 30).read(spark)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        low, high = frame.where("score = 100"), frame.where("score > 100")
        assert [low.count(), high.count(), frame.count(), low.union(high).count()] == [10, 20, 30, 30]
        assert low.join(high, "slot").count() == 200
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
