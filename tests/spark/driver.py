"""A Spark program of its own, for tests that kill it or want real executors."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from django_rmq.spark.java import prepare_environment


def session(master: str) -> Any:
    prepare_environment()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    builder = builder.config("spark.executor.extraJavaOptions", os.environ["SPARK_SUBMIT_OPTS"])
    return builder.getOrCreate()


def consume(spark: Any, options: dict[str, str], folder: Path, into: Any) -> Any:
    # No lease ends while processes start on a busy machine.
    frame = spark.readStream.format("rmq").options(**options, claimTimeout="1h").load()
    stream = frame.writeStream.foreachBatch(into)
    stream = stream.option("checkpointLocation", str(folder / "checkpoint"))
    return stream.trigger(availableNow=True).start()


def hang(options: dict[str, str], folder: Path) -> None:
    """Work on a batch and never come to its end."""

    def into(frame: Any, number: int) -> None:
        rows = [bytes(row.value).decode() for row in frame.collect()]
        (folder / "part").write_text(" ".join(rows))
        (folder / "part").rename(folder / f"batch-{number}")
        time.sleep(600)

    consume(session("local[2]"), options, folder, into).awaitTermination(600)


def cluster(options: dict[str, str], folder: Path) -> None:
    """Write, read and consume on two executors, each a process of its own."""
    spark = session("local-cluster[2,1,1024]")
    frame = spark.range(1_000).selectExpr("cast(id as string) as value", "100 as priority").repartition(4)
    frame.write.format("rmq").options(**options).mode("append").save()
    found = spark.read.format("rmq").options(**options, minPartitions=4).load()
    read = found.count()
    consumed: list[int] = []
    query = consume(spark, options, folder, lambda batch, number: consumed.append(batch.count()))

    def executor(batches: Any) -> Any:
        import pyarrow as pa

        for _ in batches:
            time.sleep(0.2)
            yield pa.RecordBatch.from_pydict({"process": [os.getppid()]})

    assert query.awaitTermination(120)
    executors = spark.range(8).repartition(8).mapInArrow(executor, "process long").collect()
    told = {
        "read": read,
        "consumed": sum(consumed),
        "executors": sorted({row.process for row in executors}),
    }
    (folder / "told").write_text(json.dumps(told))
    spark.stop()


if __name__ == "__main__":
    {"hang": hang, "cluster": cluster}[sys.argv[1]](json.loads(sys.argv[2]), Path(sys.argv[3]))
