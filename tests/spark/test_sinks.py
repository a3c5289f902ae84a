"""The recipes of docs/how-to/spark-sinks.md: each batch is there once, killed before the sink's commit and after it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet
import pytest

from django_rmq.spark.foreach_batch import Batches, Each, Files
from django_rmq.spark.java import open_session
from tests.docs.modules import shown
from tests.spark import transactional
from tests.spark.conftest import ROOT, MakeQueue, end
from tests.support.workers import eventually

ITEMS = 7
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
    spark.dataSource.register(transactional.Table)
    if (folder / "database").exists():
        return
    connection = recipes(folder).connect(spark)
    for statement in re.findall(r"^CREATE TABLE .*$", PAGE.read_text(), re.MULTILINE):
        connection.createStatement().execute(statement)
    connection.close()


def begin_all(
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


@pytest.fixture
def spark_with_sinks(spark: Any, tmp_path: Path) -> Any:
    spark.dataSource.register(transactional.Table)
    spark._jvm.java.lang.System.setProperty(LOG, str(tmp_path / "derby.log"))
    return spark


def sold(numbers: range) -> list[dict[str, int]]:
    """Messages about few items: no two are equal, so none merge."""
    return [{"item": n % ITEMS, "units": n} for n in numbers]


def stock(spark: Any, folder: Path) -> dict[int, int]:
    rows = spark.read.jdbc(recipes(folder).DATABASE, "stock").collect()
    return {row.ITEM: row.UNITS for row in rows}


def kill_in(topics: dict[str, dict[str, dict[str, str]]], folder: Path, hangs: list[Path]) -> None:
    """Run the recipes in a process of its own until all of them hang, then kill it."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.test_sinks", json.dumps(topics), str(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        eventually(
            lambda: process.poll() is not None or all(one.exists() for one in hangs), "the sinks hanging", 400
        )
        assert process.poll() is None, (folder / "log").read_text()[-5_000:]
    finally:
        end(process)


def consume(spark: Any, topics: dict[str, dict[str, str]], folder: Path) -> None:
    """Run the recipes up to what is due now."""
    for query in begin_all(spark, topics, folder):
        assert query.awaitTermination(200) and query.exception() is None


def test_each_batch_is_stored_once_whether_killed_before_or_after_the_commit_of_the_sink(
    spark_with_sinks: Any, queue: MakeQueue, tmp_path: Path
) -> None:
    spark, sinks = spark_with_sinks, {"before": ("delta", "table"), "after": ("delta", "table", "files")}
    queues = {(where, name): queue() for where, names in sinks.items() for name in names}
    topics: dict[str, dict[str, dict[str, str]]] = {where: {} for where in sinks}
    for (where, name), one in queues.items():
        topics[where][name] = {**one.options, "claimTimeout": "600"}
        one.send(sold(range(100)))
    before, after = tmp_path / "before", tmp_path / "after"
    after.mkdir()
    (before / "delta").mkdir(parents=True)
    (before / "delta/hang").touch()

    hangs = [before / "delta/hanging", before / "table-before"]
    hangs += [after / f"{name}-after" for name in topics["after"]]
    kill_in(topics, tmp_path, hangs)
    # Its data is written, and counts for nothing.
    assert list(before.glob("delta/*.parquet")) and not transactional.stored(before / "delta")
    assert stock(spark, before) == {}
    (before / "delta/hang").unlink()
    rows = Counter({(sale["item"], sale["units"]): 1 for sale in sold(range(100))})
    sums = Counter[int]()
    for sale in sold(range(100)):
        sums[sale["item"]] += sale["units"]
    assert transactional.stored(after / "delta") == rows
    assert stock(spark, after) == sums
    assert {one.total("acked") for one in queues.values()} == {0}

    for one in queues.values():
        one.send(sold(range(100, 150)))
    for sale in sold(range(100, 150)):
        rows[sale["item"], sale["units"]] += 1
        sums[sale["item"]] += sale["units"]
    for where, folder in (("before", before), ("after", after)):
        # The first batch again, and a second one with what has come since.
        consume(spark, topics[where], folder)
        assert transactional.stored(folder / "delta") == rows
        assert stock(spark, folder) == sums
    found = pyarrow.parquet.read_table(after / "files").to_pylist()
    assert Counter((row["item"], row["units"]) for row in found) == rows
    assert {one.total("acked") for one in queues.values()} == {150}

    # A checkpoint that is new begins with batch 0 again, which no sink takes for one that it has.
    for name in sinks["after"]:
        (after / f"{name}-checkpoint").rename(after / f"{name}-lost")
        queues["after", name].send([{"item": 0, "units": 1_000}])
    consume(spark, topics["after"], after)
    assert transactional.stored(after / "delta") == rows + Counter([(0, 1_000)])
    assert stock(spark, after) == sums + Counter({0: 1_000})
    assert pyarrow.parquet.read_table(after / "files").num_rows == 151


# --- a process of its own, which hangs where it is to be killed


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
        queries += begin_all(spark, sinks, folder / where, partial(hanging, where))
    for query in queries:
        query.awaitTermination(600)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
