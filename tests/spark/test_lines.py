"""fifo topics with Spark: what a write and a stream keep of the order, and how a waiting key is treated."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import TopicType
from tests.spark.conftest import MakeQueue, Queue
from tests.spark.test_source import available


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
