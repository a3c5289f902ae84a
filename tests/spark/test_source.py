"""Spark reads, writes and consumes topics, on a real session and a real Redis."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.source import RmqDataSource
from tests.spark.conftest import MakeQueue, Queue
from tests.support.workers import Heard, Worker, eventually


def values(frame: Any) -> Counter[str]:
    return Counter(bytes(row.value).decode() for row in frame.select("value").collect())


def available(
    spark: Any, queue: Queue, checkpoint: Path, into: Callable[[Any, int], None], **options: Any
) -> Any:
    """Run a query until what is due now is consumed."""
    query = (
        spark.readStream.format("rmq")
        .options(**queue.options, **options)
        .load()
        .writeStream.foreachBatch(into)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert query.exception() is None
    return query


# --- batch


@pytest.mark.parametrize("identity", ["body", "key"])
def test_a_round_trip(spark: Any, queue: MakeQueue, identity: str) -> None:
    topic = queue(identity=identity, slots=8)
    rows = [(json.dumps({"n": n, "a": "é"}), 100 + n) for n in range(2_500)]
    frame = spark.createDataFrame(rows, "value string, priority bigint")
    frame = frame.selectExpr("*", "value as key") if identity == "key" else frame
    frame.write.format("rmq").options(**topic.options).mode("append").save()
    assert topic.total("stored") == 2_500 == topic.depth("store")
    # The same bytes as a send from Python makes.
    if identity == "body":
        topic.send([{"a": "é", "n": 7}])
        assert topic.depth("store") == 2_500

    found = spark.read.format("rmq").options(**topic.options, minPartitions=2, includeMetadata="true").load()
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
    frame.write.format("rmq").options(**topic.options).mode("append").save()
    assert (topic.total("merged"), topic.depth("store")) == (1, 2)
    told = {
        bytes(row.value): row
        for row in spark.read.format("rmq").options(**topic.options, includeMetadata="true").load().collect()
    }
    due = told[b"1"].due.astimezone(UTC).timestamp() * 1000
    assert before + 60_000 <= due <= topic.broker.now_ms() + 60_000
    assert told[b"1"].score == pytest.approx(due, abs=1)


def test_the_columns_say_how_often_a_message_is_tried_and_when_it_times_out(
    spark: Any, queue: MakeQueue
) -> None:
    topic = queue(slots=1, identity="key", serial=False)
    rows = [("1", 100, "a", 2, 5), ("2", 100, "b", None, None)]
    columns = "value string, priority bigint, key string, max_retries int, timeout int"
    frame = spark.createDataFrame(rows, columns)
    frame.write.format("rmq").options(**topic.options).mode("append").save()
    reading = spark.read.format("rmq").options(**topic.options, includeMetadata="true")
    assert {(bytes(row.value), row.retries) for row in reading.load().collect()} == {(b"1", 2), (b"2", 16)}
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
    reading = spark.read.format("rmq").options(
        **topic.options, includeMetadata="true", queues="store,prepare,retry,dead,claim"
    )
    told = {row.queue: row for row in reading.load().collect()}
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


def test_an_empty_topic_reads_as_nothing(spark: Any, queue: MakeQueue) -> None:
    topic = queue()
    assert spark.read.format("rmq").options(**topic.options).load().count() == 0


@pytest.mark.parametrize(
    ("value", "options", "said"),
    [
        # On an executor, and on the driver. test_writing has the others, without Spark.
        ("cast(x'ff' as string)", {}, "column value: text is not UTF-8: "),
        ("'1'", {"colour": "red"}, "of format rmq: colour"),
    ],
)
def test_bad_values_are_refused_with_the_row(
    spark: Any, queue: MakeQueue, value: str, options: dict[str, str], said: str
) -> None:
    topic = queue()
    frame = spark.range(1).selectExpr(f"{value} as value", "50 as priority")
    with pytest.raises(Exception, match=re.escape(said)):
        frame.write.format("rmq").options(**topic.options, **options).mode("append").save()
    assert topic.depth("store") == 0


def test_what_a_write_lacks_is_told_before_its_first_row(spark: Any, queue: MakeQueue) -> None:
    def never(rows: Any) -> Any:
        for batch in rows:
            yield batch
            raise RuntimeError("a task has begun")

    frame = spark.range(1).selectExpr("'1' as value").mapInArrow(never, "value string")
    with pytest.raises(Exception, match="a write needs the column priority, or the option defaultPriority"):
        frame.write.format("rmq").options(**queue().options).mode("append").save()


def test_overwrite_is_refused_unless_it_is_asked_for(spark: Any, queue: MakeQueue) -> None:
    topic = queue()
    topic.send(["old"])
    frame = spark.createDataFrame([("1", 50)], "value string, priority int")
    with pytest.raises(Exception, match="allowOverwrite"):
        frame.write.format("rmq").options(**topic.options).mode("overwrite").save()
    assert topic.depth("store") == 1
    frame.write.format("rmq").options(**topic.options, allowOverwrite="true").mode("overwrite").save()
    assert values(spark.read.format("rmq").options(**topic.options).load()) == {"1": 1}


def test_bodies_from_columns_and_slots_from_a_field(spark: Any, queue: MakeQueue) -> None:
    topic = queue(slot_basis="shop", slots=16)
    frame = spark.createDataFrame([(n % 3, n, 50) for n in range(30)], "shop int, n int, priority int")
    frame.write.format("rmq").options(**topic.options, bodyColumns="shop,n").mode("append").save()
    found = spark.read.format("rmq").options(**topic.options).load().collect()
    places = {(json.loads(bytes(row.value))["shop"], row.slot) for row in found}
    assert len(found) == 30 and len(places) == 3
    topic.send([{"n": 0, "shop": 0}])
    assert topic.depth("store") == 30


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
    query = (
        spark.readStream.format("rmq")
        .options(**topic.options, maxMessagesPerTrigger=200)
        .load()
        .writeStream.foreachBatch(lambda frame, number: seen.update(values(frame)))
        .option("checkpointLocation", str(tmp_path))
        .trigger(processingTime="1 second")
        .start()
    )
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
    query = (
        spark.readStream.format("rmq")
        .options(**topic.options)
        .load()
        .writeStream.foreachBatch(lambda frame, number: frame.count())
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
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


def test_a_task_that_fails_reads_the_same_again(spark: Any, queue: MakeQueue, tmp_path: Path) -> None:
    topic = queue()
    topic.send(list(range(50)))
    marker = tmp_path / "failed"

    def fail_once(batches: Any) -> Any:
        rows = list(batches)
        if not marker.exists():
            marker.write_text("x")
            raise RuntimeError("this task fails once")
        yield from rows

    seen: Counter[str] = Counter()
    available(
        spark,
        topic,
        tmp_path / "checkpoint",
        lambda frame, number: seen.update(values(frame.mapInArrow(fail_once, frame.schema))),
    )
    assert marker.exists()
    assert len(seen) == 50 and set(seen.values()) == {1}
    assert topic.total("acked") == 50


def test_what_a_claim_holds_is_kept_from_a_running_worker_and_given_on(
    spark: Any, queue: MakeQueue, tmp_path: Path
) -> None:
    topic = queue(slots=1)
    topic.send(list(range(20)))
    heard = Heard()
    in_batch: list[int] = []

    def into(frame: Any, number: int) -> None:
        frame.count()
        with Worker(topic.broker, topic.topic, heard):
            topic.send(["late"])
            time.sleep(1)  # a worker that the gate does not stop has taken it by then
        in_batch.append(len(heard.bodies))

    available(spark, topic, tmp_path, into)
    assert in_batch[0] == 0
    with Worker(topic.broker, topic.topic, heard):
        eventually(lambda: topic.total("acked") + topic.total("committed") == 21, "the rest")
    assert topic.depth("store") == 0


def test_a_stream_is_written_to_a_topic(spark: Any, queue: MakeQueue, tmp_path: Path) -> None:
    source, target = queue(), queue(TopicType.FIXED_TIME)
    source.send(list(range(100)))
    at = int((datetime.now(UTC) + timedelta(hours=1)).timestamp())
    query = (
        spark.readStream.format("rmq")
        .options(**source.options)
        .load()
        .selectExpr("value", f"timestamp_seconds({at}) as fixed_time")
        .writeStream.format("rmq")
        .options(**target.options)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert target.total("stored") == 100 and source.total("acked") == 100


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"claimTimeout": "0"}, "claimTimeout"),
        ({"maxMessagesPerTrigger": "many"}, "maxMessagesPerTrigger"),
        ({"minMessagesPerTrigger": "11", "maxMessagesPerTrigger": "10"}, "minMessagesPerTrigger"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay"),
        ({"maxBytesPerTrigger": "0"}, "maxBytesPerTrigger"),
        ({"patience": "-1"}, "option patience must be a duration"),
        ({"consumerId": "a b"}, "consumerId"),
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


def test_a_wrong_option_is_an_error_on_the_driver(spark: Any, queue: MakeQueue, tmp_path: Path) -> None:
    options = queue().options
    with pytest.raises(Exception, match="of format rmq: colour"):
        spark.readStream.format("rmq").options(**options, colour="red").load()
    frame = spark.readStream.format("rmq").options(**{**options, "topic": "nobody"}).load()
    writer = frame.writeStream.foreachBatch(lambda frame, number: None)
    query = writer.option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(Exception, match="not registered"):
        query.awaitTermination(60)


# --- what executors need


def test_no_executor_imports_django(spark: Any, queue: MakeQueue) -> None:
    from django_rmq.spark.reader import Reader

    class Probe(Reader):
        def read(self, partition: Any) -> Any:

            for batch in super().read(partition):
                yield batch
            names = sorted(name for name in sys.modules if name.partition(".")[0] in ("django", "django_rmq"))
            row = {"value": ",".join(names).encode(), "score": 0.0, "topic": "modules", "slot": 0}
            yield batch.from_pylist([row], schema=batch.schema)

    class ProbingSource(RmqDataSource):
        @classmethod
        def name(cls) -> str:
            return "rmq_probe"

        def reader(self, schema: Any) -> Any:
            reader = super().reader(schema)
            reader.__class__ = Probe
            return reader

    topic = queue()
    topic.send(list(range(10)))
    spark.dataSource.register(ProbingSource)
    rows = spark.read.format("rmq_probe").options(**topic.options).load().collect()
    told = [bytes(row.value).decode().split(",") for row in rows if row.topic == "modules"]
    assert len(rows) == 10 + len(told) and told
    for names in told:
        assert "django_rmq.spark.reader" in names
        assert not [name for name in names if name.partition(".")[0] == "django"]
