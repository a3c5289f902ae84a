"""The due time of a message is the event time of a query: windows are closed by a watermark, and late rows are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import TopicType
from tests.spark.conftest import MakeQueue

MINUTE = 60_000


def test_windows_of_due_times_close_behind_a_watermark(spark: Any, queue: MakeQueue, tmp_path: Path) -> None:
    from pyspark.sql import functions as sql

    topic = queue(TopicType.FIXED_TIME, slots=2)
    first = (topic.broker.now_ms() // MINUTE - 30) * MINUTE
    closed: dict[int, int] = {}

    def send(minute: int, bodies: range) -> None:
        due = [first + minute * MINUTE + n for n in bodies]
        topic.broker.send_replace(topic.topic, 0, due, [b"%d" % n for n in bodies])

    def count(frame: Any, number: int) -> None:
        for row in frame.selectExpr("unix_millis(window.start) as start", "count").collect():
            minute = (row.start - first) // MINUTE
            assert minute not in closed
            closed[minute] = row["count"]

    def consume() -> int:
        options = {**topic.options, "includeMetadata": "true"}
        rows = spark.readStream.format("rmq").options(**options).load().where("due is not null")
        windows = rows.withWatermark("due", "1 minute").groupBy(sql.window("due", "1 minute")).count()
        writer = windows.writeStream.outputMode("append").foreachBatch(count)
        query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
        assert query.awaitTermination(120)
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
