"""Rows that a query fails: the others of their batch are acknowledged, and they are tried again or die."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from django_rmq.core.commands import claims
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.topic import BackOff
from django_rmq.exceptions import ConfigurationError, LostRace, ServerUnavailable
from django_rmq.spark.failing import fail, fail_batch
from tests.spark.conftest import MakeQueue, Queue, begin, finish


def consume(
    spark: Any, queue: Queue, folder: Path, into: Callable[[Any, dict[str, str]], None], **more: str
) -> None:
    """Consume what there is, in as many batches as it takes."""
    more["consumerId"] = "loader"
    options = {**queue.options, **more}
    finish(begin(queue.stream(spark, **more), lambda frame, number: into(frame, options), folder))


def test_failed_rows_are_tried_again_and_die_while_the_others_are_stored_once(
    spark: Any, queue: MakeQueue, tmp_path: Path
) -> None:
    from pyspark.sql import functions as sql

    topic = queue(slots=4, max_retries=2, backoff=BackOff(0, 0))
    topic.send(list(range(600)))
    stored: Counter[int] = Counter()
    tried: Counter[int] = Counter()

    def into(frame: Any, options: dict[str, str]) -> None:
        number = frame["value"].cast("string").cast("int")
        bad = frame.where(number % 10 == 3)
        tried.update(json.loads(bytes(row.value)) for row in bad.collect())
        why = sql.concat(sql.lit("BadPrice: "), number.cast("string"))
        assert fail(bad, options, why) == bad.count()
        # A task or a batch may run twice.
        assert fail(bad, options, "another reason") == bad.count()
        stored.update(json.loads(bytes(row.value)) for row in frame.where(number % 10 != 3).collect())

    for _ in range(4):
        consume(spark, topic, tmp_path, into)
    assert stored == Counter(n for n in range(600) if n % 10 != 3)
    assert tried == {n: 3 for n in range(600) if n % 10 == 3}
    assert [topic.depth(state) for state in ("dead", "store", "retry", "claimed")] == [60, 0, 0, 0]
    assert (topic.total("acked"), topic.total("died")) == (540, 60)
    entry = topic.entries("dead")[0]
    record = entry.record or b""
    assert record.startswith(b"failed 3 ") and record.endswith(b"BadPrice: " + entry.member), record


def test_rejected_rows_of_a_keyed_topic_go_to_dead_at_once_with_their_bodies(
    spark: Any, queue: MakeQueue, tmp_path: Path
) -> None:
    topic = queue(identity="key", slots=2)
    for n in range(20):
        topic.send([{"price": n}], key=f"item-{n}")

    def into(frame: Any, options: dict[str, str]) -> None:
        bad = frame.where(frame["key"].isin(b"item-3", b"item-4"))
        assert fail(bad.select("slot", "key"), options, "no such item", reject=True) == 2

    consume(spark, topic, tmp_path, into, includeMetadata="true")
    assert (topic.depth("dead"), topic.total("acked"), topic.total("died")) == (2, 18, 2)
    dead = topic.entries("dead")
    assert {entry.member for entry in dead} == {b"item-3", b"item-4"}
    records = [entry.record or b"" for entry in dead]
    assert all(record.startswith(b"rejected 1 ") and b'"price"' in record for record in records)


def test_what_cannot_be_failed_says_so(spark: Any, queue: MakeQueue, tmp_path: Path) -> None:
    from pyspark.sql import functions as sql

    topic = queue(slots=2, max_retries=0)
    topic.send(list(range(20)))
    said: list[str] = []

    def into(frame: Any, options: dict[str, str]) -> None:
        def refuse(rows: Any, options: dict[str, str] = options) -> None:
            with pytest.raises((ConfigurationError, LostRace, ValueError)) as refused:
                fail(rows, options, "no")
            said.append(str(refused.value))

        refuse(frame, topic.options)
        refuse(frame.select("slot"))
        refuse(frame.withColumn("value", sql.lit("another body")))
        refuse(frame.withColumn("slot", sql.lit(None)))
        rows = frame.localCheckpoint()
        assert fail(rows.limit(0), options, "no") == 0
        assert fail_batch(options) == 20
        refuse(rows)

    consume(spark, topic, tmp_path, into)
    strangers = (
        "20 of 20 rows are not messages of the batch of loader: fail needs slot and value as they were read"
    )
    assert said == [
        "option consumerId is missing: fail needs the one with which the stream was loaded",
        "the frame has no column value: fail needs slot and value as they were read",
        strangers,
        strangers,
        (
            f"the batch of loader on topic {topic.topic.name} is no longer its own: 20 of the rows are delivered again "
            "as they were"
        ),
    ]
    # No row was noted: fail_batch has charged all of them alike.
    assert (topic.depth("dead"), topic.total("acked")) == (20, 0)
    keyed = queue(identity="key")
    with pytest.raises(ConfigurationError, match="load the stream with includeMetadata"):
        fail(spark.range(1).selectExpr("0 as slot"), {**keyed.options, "consumerId": "x"}, "no")
    with pytest.raises(ConfigurationError, match=r"no query consumes topic .* with consumerId x"):
        fail(spark.range(1).selectExpr("0 as slot", "'k' as key"), {**keyed.options, "consumerId": "x"}, "no")


def test_a_batch_that_is_given_back_in_two_tries_is_counted_wholly(queue: MakeQueue) -> None:
    topic = queue(slots=4)
    topic.send(list(range(40)))
    assert topic.broker.hold_consumer(topic.topic, "loader", "d", "c", "a test", 60_000, starts=True) is None
    topic.each("claim", "loader", 1, 60_000, 1_000)
    for slot in range(4):
        assert topic.broker.renew_claim(topic.topic, slot, "loader", 1, 60_000, seal=True)
    give_back, asked = claims.return_claim, []

    def fail_once(*args: Any, **more: Any) -> Call[tuple[str, int]]:
        asked.append(args[1])
        if len(asked) == 3:
            raise ServerUnavailable("a restart")
        return give_back(*args, **more)

    with patch.object(claims, "return_claim", fail_once):
        assert fail_batch({**topic.options, "consumerId": "loader"}) == 40
    assert asked[:3] == [0, 1, 2] and topic.depth("claimed") == 0
