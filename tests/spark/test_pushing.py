"""Filters of a query narrow what a batch read takes from Redis."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, In, LessThanOrEqual, Not

from django_rmq.spark.reader import METADATA, PushdownReader
from django_rmq.spark.source_options import READ, SourceOptions
from tests.spark.conftest import MakeQueue, Queue

PUSHED = "spark.sql.python.filterPushdown.enabled"


def taken(queue: Queue, *filters: Filter, **options: str) -> Counter[tuple[int, float]]:
    """Return slot and score of all that is read from Redis, before Spark applies the filters."""
    given = SourceOptions({**queue.options, "includeMetadata": "true", **options}, READ, "spark.read")
    reader = PushdownReader(given, METADATA)
    # Spark applies all of them, too.
    assert list(reader.pushFilters(list(filters))) == list(filters)
    found: Counter[tuple[int, float]] = Counter()
    for task in reader.partitions():
        for batch in reader.read(task):
            found.update(
                zip(batch.column("slot").to_pylist(), batch.column("score").to_pylist(), strict=True)
            )
    return found


@pytest.fixture
def filled(queue: MakeQueue) -> Queue:
    topic = queue(slots=4)
    for slot in range(4):
        topic.broker.send_replace(topic.topic, slot, range(100, 110), [b"%d" % n for n in range(10)])
    return topic


@pytest.mark.parametrize(
    ("filters", "slots", "scores"),
    [
        ([], range(4), range(100, 110)),
        ([EqualTo(("slot",), 2)], [2], range(100, 110)),
        ([In(("slot",), (1, 2, 9)), In(("slot",), (2, 3))], [2], range(100, 110)),
        ([EqualTo(("slot",), 9)], [], []),
        # The bound itself is read, and left out by Spark.
        ([GreaterThan(("score",), 105.0), LessThanOrEqual(("score",), 107)], range(4), range(105, 108)),
        ([EqualTo(("score",), 103.0)], range(4), [103]),
        ([GreaterThan(("score",), 107), LessThanOrEqual(("score",), 105)], [], []),
        ([EqualTo(("queue",), "dead")], [], []),
        ([EqualTo(("topic",), "another")], [], []),
        ([Not(EqualTo(("slot",), 2)), EqualTo(("value",), b"1")], range(4), range(100, 110)),
    ],
)
def test_only_what_the_filters_leave_is_read(
    filled: Queue, filters: list[Filter], slots: Any, scores: Any
) -> None:
    wanted = Counter((slot, float(score)) for slot in slots for score in scores)
    assert taken(filled, *filters, queues="store,dead") == wanted


def test_filters_and_options_narrow_together(filled: Queue) -> None:
    options = {"slots": "0,1", "minScore": "104", "maxScore": "108"}
    found = taken(filled, EqualTo(("slot",), 1), GreaterThan(("score",), 100), **options)
    assert found == Counter((1, float(score)) for score in range(104, 109))


def test_a_query_has_the_same_rows_with_pushed_filters(spark: Any, filled: Queue) -> None:
    def rows(**options: str) -> list[Any]:
        frame = spark.read.format("rmq").options(**filled.options, minPartitions="4", **options).load()
        chosen = frame.where("score > 105 and slot in (1, 3) and topic = '" + filled.topic.name + "'")
        assert chosen.rdd.getNumPartitions() == (2 if options else 4)
        return sorted(chosen.collect())

    before = rows()
    assert len(before) == 8
    with pytest.raises(Exception, match=PUSHED):
        rows(pushDownPredicate="true")
    spark.conf.set(PUSHED, "true")
    try:
        assert rows(pushDownPredicate="true") == before == rows()
    finally:
        spark.conf.unset(PUSHED)


def test_a_pyspark_without_filters_is_named() -> None:
    code = (
        "import pyspark.sql.datasource as source; del source.EqualTo\n"
        "from django_rmq.spark import reader; reader.PushdownReader({}, None)"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "ConfigurationError: pushed filters need PySpark 4.1, this is " in ran.stderr
