"""A Spark program without Django, for an environment and a PySpark of its own: ``python light.py FOLDER``.

It tries each way in which a topic is read or written, and prints as JSON what came of it. RMQ_URL says where Redis is.
Nothing of the tests is imported here, because they need Django.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

COUNT = 1_000


def session() -> Any:
    from django_rmq.spark.java import prepare_environment

    prepare_environment()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    found = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    found.sparkContext.setLogLevel("OFF")
    return found


def batch_write(spark: Any, options: dict[str, str], folder: Path) -> int:
    frame = spark.range(COUNT).selectExpr("cast(id as string) as value", "100 as priority")
    frame.write.format("rmq").options(**options).mode("append").save()
    return COUNT


def batch_read(spark: Any, options: dict[str, str], folder: Path) -> int:
    rows = spark.read.format("rmq").options(**options, includeMetadata="true").load().collect()
    assert all(row.due is None and row.retries == 16 for row in rows)
    assert len({bytes(row.value) for row in rows}) == len(rows)
    found = spark.read.format("rmq").options(**options).load().count()
    assert found == len(rows)
    return len(rows)


def stream_write(spark: Any, options: dict[str, str], folder: Path) -> int:
    rows = spark.range(COUNT, 2 * COUNT).selectExpr("cast(id as string) as value", "100 as priority")
    rows.write.parquet(str(folder / "rows"))
    stream = spark.readStream.schema(rows.schema).parquet(str(folder / "rows")).writeStream
    stream = stream.format("rmq").options(**options).option("checkpointLocation", str(folder / "writing"))
    stream.trigger(availableNow=True).start().awaitTermination(120)
    return COUNT


def stream_read(spark: Any, options: dict[str, str], folder: Path) -> int:
    seen: list[int] = []
    stream = spark.readStream.format("rmq").options(**options).load().writeStream
    stream = stream.foreachBatch(lambda frame, number: seen.append(frame.count()))
    stream = stream.option("checkpointLocation", str(folder / "reading")).trigger(availableNow=True)
    stream.start().awaitTermination(120)
    return sum(seen)


def said(error: Exception) -> str:
    """Return the sentence of an error that Spark passes on."""
    from django_rmq.spark.java import describe

    return ": ".join(describe(error))


def main(folder: Path) -> None:
    from django_rmq.spark.declaring import declare

    options = {"topic": "light", "prefix": f"{folder.name}:"}
    declare(options, "priority", slots=4)
    spark = session()
    told: dict[str, Any] = {name: find_spec(name) is not None for name in ("django", "hiredis")}
    told["pyspark"] = spark.version
    ways: tuple[Callable[[Any, dict[str, str], Path], int], ...]
    ways = batch_write, batch_read, stream_write, stream_read
    for way in ways:
        try:
            told[way.__name__] = way(spark, options, folder)
        except Exception as error:  # noqa: BLE001 - what it says is the outcome
            told[way.__name__] = said(error)
    print(json.dumps(told))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
