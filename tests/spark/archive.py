"""Prepares what lets Spark's processes start quickly: an archive of its classes, and a home whose Python has bytecode.

With the archive (Java's class data sharing) a Java starts in a third of the time. Spark's own home has PySpark for
Python workers in a zip, from which each worker compiles it again: that is a third of the work of its tests.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:cds=off -Xlog:cds+dynamic=off"
"""Options for a Java that lives for seconds: one compiler and one collector; no words about what suits no archive."""

FEW_TASKS = "-Dspark.sql.shuffle.partitions=2"
"""What a session has that says nothing else: with Spark's 200 a small stateful query computes for half a minute."""

BUILD = Path(__file__).parents[2] / "build"
ARCHIVE, HOME = BUILD / "spark.jsa", BUILD / "spark"


def environment() -> dict[str, str]:
    """Return the variables of Spark's processes, with the archive and the home if they are there."""
    if not (ARCHIVE.exists() and HOME.exists()):
        return {"SPARK_SUBMIT_OPTS": f"{QUICK} {FEW_TASKS}"}
    options = f"{QUICK} -XX:SharedArchiveFile={ARCHIVE} {FEW_TASKS}"
    return {"SPARK_SUBMIT_OPTS": options, "SPARK_HOME": str(HOME)}


def make_home(spark: Path) -> None:
    """Make a home like ``spark``, in which folders have the place and the name of the zips with Python."""
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    for name in ("bin", "jars"):
        (HOME / name).symlink_to(spark / name)
    for zipped in (spark / "python/lib").glob("*.zip"):
        package = zipped.stem.partition("-")[0]
        folder = HOME / "python/lib" / zipped.name
        folder.mkdir(parents=True)
        (folder / package).symlink_to(Path(sysconfig.get_path("purelib")) / package)


def main() -> None:
    """Do a little of everything, in a Java that archives its classes at the end."""
    from django_rmq.spark.java import find_java, prepare_environment
    from tests.support.zookeeper import spark_jars

    if find_java() is None:
        print("No Java 17 or newer was found: no archive of its classes is made")
        return
    BUILD.mkdir(exist_ok=True)
    unfinished = ARCHIVE.with_suffix(f".{os.getpid()}")
    make_home(spark_jars().parent)
    os.environ["SPARK_SUBMIT_OPTS"] = f"{QUICK} -XX:ArchiveClassesAtExit={unfinished}"
    os.environ["SPARK_HOME"] = str(HOME)
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
