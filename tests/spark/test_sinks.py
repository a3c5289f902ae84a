"""The recipes of docs/how-to/spark-sinks.md: each batch is there once, killed before the sink's commit and after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.spark import sinking, transactional
from tests.spark.conftest import ROOT, Queue, end
from tests.support.workers import eventually

MakeQueue = Callable[..., Queue]
ITEMS = 7


@pytest.fixture
def spark_with_sinks(spark: Any, tmp_path: Path) -> Any:
    spark.dataSource.register(transactional.Table)
    spark._jvm.java.lang.System.setProperty(sinking.LOG, str(tmp_path / "derby.log"))
    return spark


def sold(numbers: range) -> list[dict[str, int]]:
    """Messages about few items: no two are equal, so none merge."""
    return [{"item": n % ITEMS, "units": n} for n in numbers]


def stock(spark: Any, folder: Path) -> dict[int, int]:
    rows = spark.read.jdbc(sinking.recipes(folder).DATABASE, "stock").collect()
    return {row.ITEM: row.UNITS for row in rows}


def killed(where: str, topics: dict[str, dict[str, str]], folder: Path, hangs: list[Path]) -> None:
    """Run the recipes in a process of its own until all of them hang, then kill it."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.sinking", where, json.dumps(topics), str(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        eventually(
            lambda: process.poll() is not None or all(one.exists() for one in hangs),
            f"the sinks {where}",
            400,
        )
        assert process.poll() is None, (folder / "log").read_text()[-5_000:]
    finally:
        end(process)


def test_each_batch_is_stored_once_whether_killed_before_or_after_the_commit_of_the_sink(
    spark_with_sinks: Any, queue: MakeQueue, tmp_path: Path
) -> None:
    spark, delta = spark_with_sinks, tmp_path / "delta"
    queues = {name: queue() for name in ("delta", "table", "files")}
    topics = {name: {**one.options, "claimTimeout": "600"} for name, one in queues.items()}
    for one in queues.values():
        one.send(sold(range(100)))

    delta.mkdir()
    (delta / "hang").touch()
    two = {name: topics[name] for name in ("delta", "table")}
    killed("before", two, tmp_path, [delta / "hanging", tmp_path / "table-before"])
    # Its data is written, and counts for nothing.
    assert list(delta.glob("*.parquet")) and not transactional.stored(delta)
    assert stock(spark, tmp_path) == {}
    (delta / "hang").unlink()
    # Derby is one process' only.
    shut(spark, tmp_path)

    killed("after", topics, tmp_path, [tmp_path / f"{name}-after" for name in topics])
    rows = Counter({(sale["item"], sale["units"]): 1 for sale in sold(range(100))})
    sums = Counter[int]()
    for sale in sold(range(100)):
        sums[sale["item"]] += sale["units"]
    assert transactional.stored(delta) == rows
    assert stock(spark, tmp_path) == sums
    assert [one.total("acked") for one in queues.values()] == [0, 0, 0]

    for one in queues.values():
        one.send(sold(range(100, 150)))
    for sale in sold(range(100, 150)):
        rows[sale["item"], sale["units"]] += 1
        sums[sale["item"]] += sale["units"]
    # The first batch again, and a second one with what has come since.
    for query in sinking.begin(spark, topics, tmp_path):
        assert query.awaitTermination(200) and query.exception() is None
    for query in sinking.begin(spark, topics, tmp_path):
        assert query.awaitTermination(200) and query.exception() is None
    assert transactional.stored(delta) == rows
    assert stock(spark, tmp_path) == sums
    found = pyarrow.parquet.read_table(tmp_path / "files").to_pylist()
    assert Counter((row["item"], row["units"]) for row in found) == rows
    assert [one.total("acked") for one in queues.values()] == [150, 150, 150]
    # A checkpoint that is new begins with batch 0 again, which no sink takes for one that it has.
    for name, one in queues.items():
        (tmp_path / f"{name}-checkpoint").rename(tmp_path / f"{name}-lost")
        one.send([{"item": 0, "units": 1_000}])
    for query in sinking.begin(spark, topics, tmp_path):
        assert query.awaitTermination(200) and query.exception() is None
    assert transactional.stored(delta) == rows + Counter([(0, 1_000)])
    assert stock(spark, tmp_path) == sums + Counter({0: 1_000})
    assert pyarrow.parquet.read_table(tmp_path / "files").num_rows == 151


def shut(spark: Any, folder: Path) -> None:
    """Let another process open the database."""
    url = sinking.recipes(folder).DATABASE.replace("create=true", "shutdown=true")
    with pytest.raises(Exception, match="08006"):
        spark._jvm.java.sql.DriverManager.getConnection(url)
