"""Archives the classes that Spark loads (Java's class data sharing): a Java of the tests then starts in a third of the time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:cds=off -Xlog:cds+dynamic=off"
"""Options for a Java that lives for seconds: one compiler and one collector; no words about what suits no archive."""

ARCHIVE = Path(__file__).parents[2] / "build" / "spark.jsa"


def options() -> str:
    """Return the options for Spark's Java, with the archive if there is one."""
    return f"{QUICK} -XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else QUICK


def main() -> None:
    """Do a little of everything, in a Java that archives its classes at the end."""
    from django_rmq.spark.java import find_java, prepare_environment

    if find_java() is None:
        print("No Java 17 or newer was found: no archive of its classes is made")
        return
    ARCHIVE.parent.mkdir(exist_ok=True)
    unfinished = ARCHIVE.with_suffix(f".{os.getpid()}")
    os.environ["SPARK_SUBMIT_OPTS"] = f"{QUICK} -XX:ArchiveClassesAtExit={unfinished}"
    prepare_environment()
    from pyspark.sql import SparkSession

    spark: Any = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    with tempfile.TemporaryDirectory() as folder:
        rows = spark.createDataFrame([(n, f"{n}") for n in range(10)], "n int, name string")
        rows.groupBy("n").count().orderBy("n").write.parquet(f"{folder}/rows")
        stream = (
            spark.readStream.schema(rows.groupBy("n").count().schema).parquet(f"{folder}/rows").writeStream
        )
        stream = stream.foreachBatch(lambda frame, number: frame.write.mode("append").csv(f"{folder}/out"))
        stream.option("checkpointLocation", f"{folder}/log").trigger(
            availableNow=True
        ).start().awaitTermination()
        spark._jvm.java.lang.System.setProperty("derby.stream.error.file", f"{folder}/derby.log")
        rows.write.jdbc(f"jdbc:derby:{folder}/database;create=true", "taken")
    java = spark.sparkContext._gateway.proc
    spark.stop()
    java.stdin.close()
    java.wait(120)
    unfinished.rename(ARCHIVE)


if __name__ == "__main__":
    main()
