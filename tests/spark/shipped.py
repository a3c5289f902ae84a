"""A job for a cluster, by spark-submit: writes, reads and consumes a topic, and says which Python its tasks had."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

COUNT = 200


def python(_: int) -> tuple[str, str]:
    """Return the Python of a task, and which of these modules it finds."""
    import importlib.util
    import sys

    has = [name for name in ("django", "hiredis", "redis") if importlib.util.find_spec(name)]
    return sys.prefix, ",".join(has)


def main(options: dict[str, str], checkpoint: Path, *, registers: bool) -> None:
    spark: Any = SparkSession.builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    if registers:
        from django_rmq.spark.source import RmqDataSource

        spark.dataSource.register(RmqDataSource)
    frame = spark.range(COUNT).selectExpr("cast(id as string) as value", "100 as priority").repartition(4)
    frame.write.format("rmq").options(**options).mode("append").save()
    read = spark.read.format("rmq").options(**options, minPartitions=4).load().count()
    seen: list[int] = []
    stream = spark.readStream.format("rmq").options(**options).load().writeStream
    stream = stream.foreachBatch(lambda batch, number: seen.append(batch.count()))
    stream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()
    tasks = spark.sparkContext.range(8, numSlices=8).map(python).distinct().collect()
    told = {"read": read, "consumed": sum(seen), "tasks": sorted(tasks)}
    print(json.dumps(told))
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), registers=sys.argv[3] == "register")
