"""Spark reads, writes and consumes topics, on a real session and a real Redis."""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType

from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery, Failure
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.reader import COLUMNS
from django_rmq.spark.source import RmqDataSource
from tests.spark.conftest import MakeQueue, Queue, begin, finish
from tests.support.workers import eventually


def values(frame: Any) -> Counter[str]:
    return Counter(bytes(row.value).decode() for row in frame.select("value").collect())


def available(spark: Any, queue: Queue, checkpoint: Path, into: Any, **options: Any) -> Any:
    """Run a query until what is due now is consumed."""
    return finish(begin(queue.stream(spark, **options), into, checkpoint))


# --- batch


@pytest.mark.parametrize("identity", ["body", "key"])
def test_a_round_trip(spark: Any, queue: MakeQueue, identity: str) -> None:
    topic = queue(identity=identity, slots=8)
    rows = [(json.dumps({"n": n, "a": "é"}), 100 + n) for n in range(2_500)]
    frame = spark.createDataFrame(rows, "value string, priority bigint")
    frame = frame.selectExpr("*", "value as key") if identity == "key" else frame
    topic.write(frame)
    assert topic.total("stored") == 2_500 == topic.depth("store")
    # The same bytes as a send from Python makes.
    if identity == "body":
        topic.send([{"a": "é", "n": 7}])
        assert topic.depth("store") == 2_500

    found = topic.read(spark, minPartitions=2, includeMetadata="true")
    assert found.rdd.getNumPartitions() == 2
    told = found.collect()
    assert len(told) == 2_500
    assert {json.loads(bytes(row.value))["n"] for row in told} == set(range(2_500))
    assert {(row.topic, row.queue, row.retries) for row in told} == {(topic.topic.name, "store", 16)}
    assert {row.slot for row in told} == set(range(8))
    # Nothing has changed.
    assert topic.depth("store") == 2_500 and topic.total("prepared") == 0


def test_equal_messages_merge_and_the_columns_say_when(spark: Any, queue: MakeQueue) -> None:
    topic = queue(TopicType.RANGE_MERGE)
    rows = [("1", 60), ("1", 5), ("2", 90)]
    frame = spark.createDataFrame(rows, "value string, time_range bigint").coalesce(1)
    before = topic.broker.now_ms()
    topic.write(frame)
    assert (topic.total("merged"), topic.depth("store")) == (1, 2)
    told = {bytes(row.value): row for row in topic.read(spark, includeMetadata="true").collect()}
    due = told[b"1"].due.astimezone(UTC).timestamp() * 1000
    assert before + 60_000 <= due <= topic.broker.now_ms() + 60_000
    assert told[b"1"].score == pytest.approx(due, abs=1)


def test_the_columns_say_how_often_a_message_is_tried_and_when_it_times_out(
    spark: Any, queue: MakeQueue
) -> None:
    topic = queue(slots=1, identity="key", serial=False)
    rows = [("1", 100, "a", 2, 5), ("2", 100, "b", None, None)]
    columns = "value string, priority bigint, key string, max_retries int, timeout int"
    topic.write(spark.createDataFrame(rows, columns))
    found = topic.read(spark, includeMetadata="true").collect()
    assert {(bytes(row.value), row.retries) for row in found} == {(b"1", 2), (b"2", 16)}
    answer = topic.broker.prepare(topic.topic, 0, "A", None, 10)
    assert (answer.timeout, sorted(one.retries_left for one in answer.deliveries)) == (5, [2, 16])


def test_every_state_is_read_with_what_is_known_of_it(spark: Any, queue: MakeQueue) -> None:
    topic = queue(slots=1, max_retries=2, identity="key", serial=False)
    topic.send(["dead", "failing"])
    for _ in range(2):
        answer = topic.broker.prepare(topic.topic, 0, "A", None, 1)
        (delivery,) = answer.deliveries
        body = bytes(delivery.envelope or b"").partition(b"\n")[2]
        kind, delay = ("rejected", None) if body == b'"dead"' else ("failed", 3_600_000)
        topic.broker.rollback(
            topic.topic, 0, answer.receipt, [Failure(delivery.member, kind, delay, "no good")]
        )
    topic.send(["flying"])
    topic.broker.prepare(topic.topic, 0, "A", None, 1)
    topic.send(["claimed"])
    assert topic.broker.claim(topic.topic, 0, "s", 1, 60_000, 1).taken == 1
    topic.send(["waiting"])
    rows = topic.read(spark, includeMetadata="true", queues="store,prepare,retry,dead,claim").collect()
    told = {row.queue: row for row in rows}
    assert {queue: bytes(row.value) for queue, row in told.items()} == {
        "store": b'"waiting"',
        "prepare": b'"flying"',
        "retry": b'"failing"',
        "dead": b'"dead"',
        "claim": b'"claimed"',
    }
    assert (told["dead"].error, told["retry"].error) == ("no good", "no good")
    assert abs(told["dead"].died_at.astimezone(UTC) - datetime.now(UTC)) < timedelta(minutes=5)
    assert (told["retry"].retries, told["prepare"].retries, told["store"].retries) == (1, 2, 2)
    assert told["prepare"].deadline is not None and told["store"].died_at is None


def test_what_a_task_refuses_is_told_with_the_row_and_nothing_is_sent(spark: Any, queue: MakeQueue) -> None:
    """test_writing has the other values, without Spark."""
    topic = queue()
    frame = spark.range(1).selectExpr("cast(x'ff' as string) as value", "50 as priority")
    with pytest.raises(Exception, match="column value: text is not UTF-8: "):
        topic.write(frame)
    # An empty topic reads as nothing.
    assert topic.read(spark).count() == 0


def test_what_a_write_lacks_is_told_before_its_first_row(spark: Any, queue: MakeQueue) -> None:
    def never(rows: Any) -> Any:
        for batch in rows:
            yield batch
            raise RuntimeError("a task has begun")

    frame = spark.range(1).selectExpr("'1' as value").mapInArrow(never, "value string")
    for options, said in (
        ({}, "a write needs the column priority, or the option defaultPriority"),
        ({"colour": "red"}, "of format rmq: colour"),
    ):
        with pytest.raises(Exception, match=said):
            queue().write(frame, **options)


def test_overwrite_is_refused_unless_it_is_asked_for(spark: Any, queue: MakeQueue) -> None:
    topic = queue()
    topic.send(["old"])
    frame = spark.createDataFrame([("1", 50)], "value string, priority int")
    with pytest.raises(Exception, match="allowOverwrite"):
        frame.write.format("rmq").options(**topic.options).mode("overwrite").save()
    assert topic.depth("store") == 1
    frame.write.format("rmq").options(**topic.options, allowOverwrite="true").mode("overwrite").save()
    assert values(topic.read(spark)) == {"1": 1}


# --- streams


def test_available_now_consumes_what_is_due_and_acknowledges_it(
    spark: Any, queue: MakeQueue, tmp_path: Path
) -> None:
    topic = queue(identity="key")
    topic.send([{"n": n} for n in range(3_000)])
    seen: Counter[str] = Counter()
    batches: list[int] = []

    def into(frame: Any, number: int) -> None:
        found = values(frame)
        seen.update(found)
        batches.append(found.total())

    available(spark, topic, tmp_path, into, maxMessagesPerTrigger=2_000)
    assert len(seen) == 3_000 and set(seen.values()) == {1}
    assert max(batches) <= 2_000 + topic.topic.slots
    assert topic.depth("claimed") == topic.depth("store") == 0
    assert topic.total("acked") == 3_000 == topic.total("claimed")
    # Nothing is left for the next run.
    available(spark, topic, tmp_path, into)
    assert seen.total() == 3_000


def test_a_query_with_an_interval_tells_what_waits_for_it(
    spark: Any, queue: MakeQueue, tmp_path: Path
) -> None:
    topic = queue(TopicType.FIXED_TIME)
    now = topic.broker.now_ms()
    due = [now - 60_000 + n for n in range(500)]
    topic.broker.send_replace(topic.topic, 0, due, [b"%d" % n for n in range(500)])
    topic.send(["later"], fixed_time=now + 3_600_000)
    seen: Counter[str] = Counter()
    stream = topic.stream(spark, maxMessagesPerTrigger=200)
    query = begin(stream, lambda frame, number: seen.update(values(frame)), tmp_path, every="1 second")
    try:
        eventually(lambda: topic.total("acked") == 500, "every batch's acknowledgement", 150)
        assert len(seen) == 500 and set(seen.values()) == {1}
        batches = [progress for progress in query.recentProgress if progress["numInputRows"]]
        assert [progress["numInputRows"] for progress in batches] == [200, 200, 100]
        assert query.isActive
        told = json.loads(batches[0]["sources"][0]["latestOffset"])
        assert (told["due"], told["waiting"], told["claimed"], told["lostClaims"]) == (300, 301, 200, 0)
        assert 50 < told["oldestDueSeconds"] < 600
    finally:
        query.stop()


def test_an_idle_query_acknowledges_its_last_batch_and_asks_redis_seldom(
    spark: Any, queue: MakeQueue, tmp_path: Path
) -> None:
    topic = queue(slots=16)
    query = begin(topic.stream(spark), lambda frame, number: frame.count(), tmp_path, every="0 seconds")
    try:
        topic.send(["x"])
        eventually(lambda: topic.total("acked") == 1, "the last batch's acknowledgement", 150)
        assert topic.depth("claimed") == 0
        calls = topic.broker.client.info("stats")["total_commands_processed"]
        began = time.monotonic()
        time.sleep(2)  # the rate of an idle query is what is measured
        spent = time.monotonic() - began
        rate = (topic.broker.client.info("stats")["total_commands_processed"] - calls) / spent
        assert rate < 5 * 200
        print(f"\n{rate:.0f} commands/s")
    finally:
        query.stop()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"claimTimeout": "0"}, "claimTimeout"),
        ({"maxMessagesPerTrigger": "many"}, "maxMessagesPerTrigger"),
        ({"minMessagesPerTrigger": "11", "maxMessagesPerTrigger": "10"}, "minMessagesPerTrigger"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay"),
        ({"maxBytesPerTrigger": "0"}, "maxBytesPerTrigger"),
        ({"patience": "-1"}, "option patience must be a duration"),
        *(({"consumerId": name}, "consumerId") for name in ("a b", "", "x" * 101)),
        ({"failOnDataLoss": "maybe"}, "option failOnDataLoss must be true or false"),
        ({"slots": "1,x"}, "option slots must be numbers from 0"),
        ({"connectionOptions": "[]"}, "option connectionOptions must be a JSON object"),
        ({"url": "redis//nobody"}, "option url, or an option of connections: the options for Redis"),
        ({"url": ""}, "option url is missing"),
    ],
)
def test_a_wrong_option_is_an_error_of_the_source(
    queue: MakeQueue, options: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        RmqDataSource({**queue().options, **options}).schema()


@pytest.mark.parametrize("method", ["reader", "streamReader"])
@pytest.mark.parametrize(("column", "kind"), [("value", StringType()), ("slot", LongType())])
def test_another_schema_is_an_error_of_the_source(
    queue: MakeQueue, method: str, column: str, kind: DataType
) -> None:
    schema = StructType(
        [StructField(one.name, kind if one.name == column else one.dataType) for one in COLUMNS]
    )
    with pytest.raises(ConfigurationError, match="is fixed: struct<value:binary,score:double,"):
        getattr(RmqDataSource(queue().options), method)(schema)


def test_columns_that_are_never_null_are_no_other_schema(queue: MakeQueue) -> None:
    schema = StructType([StructField(field.name, field.dataType, nullable=False) for field in COLUMNS])
    assert list(RmqDataSource(queue().options).reader(schema).partitions()) == []


def test_a_wrong_option_is_an_error_on_the_driver(spark: Any, queue: MakeQueue, tmp_path: Path) -> None:
    topic = queue()
    with pytest.raises(Exception, match="of format rmq: colour"):
        topic.stream(spark, colour="red")
    frame = spark.readStream.format("rmq").options(**{**topic.options, "topic": "nobody"}).load()
    query = begin(frame, lambda frame, number: None, tmp_path)
    with pytest.raises(Exception, match="not registered"):
        query.awaitTermination(60)


def test_windows_of_due_times_close_behind_a_watermark(spark: Any, queue: MakeQueue, tmp_path: Path) -> None:
    from pyspark.sql import functions as sql

    topic = queue(TopicType.FIXED_TIME, slots=2)
    first = (topic.broker.now_ms() // 60_000 - 30) * 60_000
    closed: dict[int, int] = {}

    def send(minute: int, bodies: range) -> None:
        due = [first + minute * 60_000 + n for n in bodies]
        topic.broker.send_replace(topic.topic, 0, due, [b"%d" % n for n in bodies])

    def count(frame: Any, number: int) -> None:
        for row in frame.selectExpr("unix_millis(window.start) as start", "count").collect():
            minute = (row.start - first) // 60_000
            assert minute not in closed
            closed[minute] = row["count"]

    def consume() -> int:
        rows = topic.stream(spark, includeMetadata="true").where("due is not null")
        windows = rows.withWatermark("due", "1 minute").groupBy(sql.window("due", "1 minute")).count()
        query = finish(begin(windows, count, tmp_path))
        # Rows that came too late for their window.
        return sum(
            state["numRowsDroppedByWatermark"]
            for progress in query.recentProgress
            for state in progress["stateOperators"]
        )

    send(0, range(5))
    send(1, range(10, 13))
    send(2, range(20, 24))
    assert (consume(), closed) == (0, {0: 5})
    # What rests after a failure has no due time; it is consumed, and belongs to no window.
    send(3, range(30, 31))
    answer = topic.broker.prepare(topic.topic, 0, "A", None, 1)
    topic.broker.rollback(topic.topic, 0, answer.receipt, [Failure(b"30", "failed", 0, "no good")])
    send(0, range(40, 42))
    send(9, range(50, 56))
    assert consume() >= 1
    assert closed == {0: 5, 1: 3, 2: 4}
    assert topic.total("acked") == 21 and topic.depth("store") == topic.depth("retry") == 0


# --- fifo topics: what a write and a stream keep of the order, and how a waiting key is treated


def lines(queue: MakeQueue, **options: Any) -> Queue:
    return queue(TopicType.FIFO, **{"slots": 4, "identity": "key", **options})


def bodies(queue: Queue) -> list[Any]:
    """Return what waits, slot by slot, each in its order."""
    topic, found = queue.topic, []
    for slot in range(topic.slots):
        for entry in queue.broker.list_messages(topic, slot, "store", limit=1_000).entries:
            delivery = Delivery(entry.member, entry.score, 0, entry.envelope)
            found.append(Message(topic, slot, 0, delivery).body)
    return found


def of_entities(found: list[Any]) -> dict[int, list[int]]:
    numbers: defaultdict[int, list[int]] = defaultdict(list)
    for body in found:
        numbers[body["entity"]].append(body["n"])
    return dict(numbers)


def test_a_write_keeps_the_order_of_the_rows_of_each_entity(spark: Any, queue: MakeQueue) -> None:
    topic = lines(queue, slot_basis="entity")
    rows = [(n % 10, json.dumps({"entity": n % 10, "n": n // 10})) for n in range(600)]
    frame = spark.createDataFrame(rows, "entity int, value string")
    topic.write(frame.repartition(2, "entity").drop("entity"))
    assert of_entities(bodies(topic)) == {entity: list(range(60)) for entity in range(10)}


def test_a_delay_is_a_column(spark: Any, queue: MakeQueue) -> None:
    topic = lines(queue, slots=1)
    rows = [("1", 60), ("2", None), ("3", 0), ("4", 30)]
    topic.write(spark.createDataFrame(rows, "value string, delay bigint").coalesce(1))
    assert bodies(topic) == [2, 3, 4, 1]


@pytest.mark.parametrize(("way", "left"), [("keep", [1, 2]), ("replace", [3, 2])])
def test_a_row_whose_key_waits_is_left_out_or_replaces_the_body(
    spark: Any, queue: MakeQueue, way: str, left: list[int]
) -> None:
    topic = lines(queue, slots=1, on_duplicate=way)
    for rows in ([("1", "a"), ("2", "b")], [("3", "a")]):
        topic.write(spark.createDataFrame(rows, "value string, key string").coalesce(1))
    assert bodies(topic) == left


@pytest.mark.parametrize("order", ["strict", "loose"])
def test_a_stream_reads_each_slot_in_its_order_and_in_one_task(
    spark: Any, queue: MakeQueue, tmp_path: Path, order: str
) -> None:
    topic = lines(queue, slot_basis="entity", order=order)
    topic.send([{"entity": n % 10, "n": n // 10} for n in range(600)])
    read: list[Any] = []
    tasks: defaultdict[tuple[int, int], set[int]] = defaultdict(set)

    def into(frame: Any, number: int) -> None:
        from pyspark.sql.functions import spark_partition_id

        for row in frame.withColumn("task", spark_partition_id()).collect():
            read.append(json.loads(bytes(row.value)))
            tasks[number, row.slot].add(row.task)

    available(spark, topic, tmp_path, into, maxMessagesPerTrigger=300, minPartitions=3)
    assert of_entities(read) == {entity: list(range(60)) for entity in range(10)}
    assert {len(found) for found in tasks.values()} == {1}
    assert topic.depth("store") == topic.depth("claimed") == 0
