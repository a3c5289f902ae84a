"""docs/how-to/kafka.md: our part of both ways, with rows of the columns that Spark's connector has."""

from __future__ import annotations

from typing import Any

import pytest

from django_rmq.core.model.topic import TopicType
from tests.docs.modules import shown
from tests.spark.conftest import MakeQueue

RECORDS = "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int"


@pytest.fixture(scope="module")
def kafka() -> Any:
    return shown("docs/how-to/kafka.md", "shop/kafka.py")


def records(spark: Any, *pairs: tuple[bytes | None, bytes | None]) -> Any:
    rows = [
        (key, value, "prices", 0, offset, None, 0) for offset, (key, value) in enumerate(pairs, start=100)
    ]
    return spark.createDataFrame(rows, RECORDS)


def test_records_become_messages_that_merge(spark: Any, kafka: Any, queue: MakeQueue) -> None:
    topic = queue(TopicType.RANGE_MERGE)
    kafka.QUEUE = {**topic.options, "timeRange": "1m"}
    batch = records(
        spark, (b"a", b'{"item": 1}'), (b"b", b'{"item": 2}'), (b"c", b'{"item": 1}'), (b"d", None)
    )
    kafka.into_topic(batch, 0)
    assert (topic.depth("store"), topic.total("sent")) == (2, 2)
    # The same batch again, as after a crash.
    kafka.into_topic(batch, 0)
    assert (topic.depth("store"), topic.total("merged")) == (2, 2)


def test_the_last_record_of_a_key_becomes_its_message(spark: Any, kafka: Any, queue: MakeQueue) -> None:
    topic = queue(TopicType.RANGE_MERGE, identity="key")
    pairs = [(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"gone", b"4"), (b"gone", None), (None, b"5")]
    messages = kafka.as_keyed_messages(records(spark, *pairs))
    assert sorted(map(tuple, messages.collect())) == [("a", "3"), ("b", "2")]
    topic.write(messages, timeRange="1m")
    found = topic.read(spark, includeMetadata="true").collect()
    assert {(bytes(row.key), bytes(row.value)) for row in found} == {(b"a", b"3"), (b"b", b"2")}


def test_messages_become_records_with_the_name_of_their_batch(
    spark: Any, kafka: Any, queue: MakeQueue
) -> None:
    topic = queue()
    topic.send([1, 2])
    frame = topic.read(spark)
    found = kafka.as_records(frame.withColumn("value", frame.value.cast("string")), 7, "q")
    # What Spark's sink for Kafka accepts.
    assert found.schema.simpleString() == (
        "struct<value:binary,headers:array<struct<key:string,value:binary>>>"
    )
    rows = found.collect()
    assert sorted(bytes(row.value) for row in rows) == [b"1", b"2"]
    assert {(one.key, bytes(one.value)) for row in rows for one in row.headers} == {("rmq-batch", b"q/7")}
