"""Runs the recipes of docs/how-to/spark-sinks.md, and hangs where a test wants to kill it."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from django_rmq.spark.foreach_batch import Batches, Each, Files
from django_rmq.spark.java import open_session
from tests.docs.modules import ROOT, shown
from tests.spark.transactional import Table

PAGE = ROOT / "docs/how-to/spark-sinks.md"
BODY = "from_json(cast(value as string), 'item int, units int')"
LOG = "derby.stream.error.file"


def recipes(folder: Path) -> ModuleType:
    """Return the module that the page shows, with addresses of a test."""
    module = shown("docs/how-to/spark-sinks.md", "shop/sinks.py")
    vars(module).update(DELTA=str(folder / "delta"), DATABASE=f"jdbc:derby:{folder / 'database'};create=true")
    return module


def prepare(spark: Any, folder: Path) -> None:
    """Make the tables that the page says have to be there."""
    spark._jvm.java.lang.System.setProperty(LOG, str(folder / "derby.log"))
    spark.dataSource.register(Table)
    if (folder / "database").exists():
        return
    connection = recipes(folder).connect(spark)
    for statement in re.findall(r"^CREATE TABLE .*$", PAGE.read_text(), re.MULTILINE):
        connection.createStatement().execute(statement)
    connection.close()


def begin(
    spark: Any,
    topics: dict[str, dict[str, str]],
    folder: Path,
    around: Callable[[str, Any], Any] = lambda name, write: write,
) -> list[Any]:
    """Begin one query for each sink, up to what is due now; ``around`` may wrap the functions."""
    module = recipes(folder)
    files = Files(str(folder / "files"))

    def into_files(frame: Any, number: int, query: str) -> None:
        files.write(frame, query, number, may_repeat=True)

    sinks = {"delta": module.into_delta, "table": module.into_table, "files": into_files}
    queries = []
    for name, options in topics.items():
        stream = spark.readStream.format("rmq").options(**options).load()
        checkpoint = str(folder / f"{name}-checkpoint")
        frame = stream.selectExpr(f"{BODY} as body").select("body.*")
        batches = Batches(checkpoint, Each(around(name, sinks[name])))
        writer = frame.writeStream.foreachBatch(batches).option("checkpointLocation", checkpoint)
        queries.append(writer.trigger(availableNow=True).start())
    return queries


class Unfinished:
    """A connection that is never committed."""

    def __init__(self, connection: Any, marker: Path) -> None:
        self._connection = connection
        self._marker = marker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def commit(self) -> None:
        self._marker.touch()
        time.sleep(600)


def main(topics: dict[str, dict[str, dict[str, str]]], folder: Path) -> None:
    """Hang ``before`` the commit of each sink, and ``after`` it: before Spark has recorded the batch.

    ``topics``: where -> name of a sink -> its options. Each place has a folder with the name of where it hangs.
    """
    spark = open_session("sinking", master="local[2]")

    def hanging(where: str, name: str, write: Any) -> Any:
        marker = folder / where / f"{name}-{where}"

        def write_and_wait(*batch: Any) -> None:
            write(*batch)
            marker.touch()
            time.sleep(600)

        if where == "before" and name == "table":
            connect = write.__globals__["connect"]
            write.__globals__["connect"] = lambda spark: Unfinished(connect(spark), marker)
        return write_and_wait if where == "after" else write

    queries = []
    for where, sinks in topics.items():
        prepare(spark, folder / where)
        queries += begin(spark, sinks, folder / where, partial(hanging, where))
    for query in queries:
        query.awaitTermination(600)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
