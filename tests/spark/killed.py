"""A job for a cluster, by spark-submit: consumes a topic into files, a folder for each batch, and notes what it saw."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

SECONDS = 0.4
"""How long a task works, so that there is time to kill it."""


def slowly(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        time.sleep(SECONDS)
        yield batch


def main(options: dict[str, str], folder: Path) -> None:
    spark: Any = SparkSession.builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")

    def into(frame: Any, number: int) -> None:
        values = frame.selectExpr("cast(value as string) as value")
        seen = sorted(row.value for row in values.collect())
        with (folder / "seen").open("a") as notes:
            notes.write(f"{number} {len(seen)} {hashlib.sha256(' '.join(seen).encode()).hexdigest()}\n")
        out = str(folder / "out" / str(number))
        values.mapInArrow(slowly, "value string").write.mode("overwrite").parquet(out)

    stream = spark.readStream.format("rmq").options(**options).load().writeStream.foreachBatch(into)
    query = stream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
