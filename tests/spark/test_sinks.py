"""The recipes of docs/how-to/spark-sinks.md: each batch is there once, killed before the sink's commit and after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.spark import sinking, transactional
from tests.spark.conftest import ROOT, MakeQueue, end
from tests.support.workers import eventually

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


def kill_in(topics: dict[str, dict[str, dict[str, str]]], folder: Path, hangs: list[Path]) -> None:
    """Run the recipes in a process of its own until all of them hang, then kill it."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.sinking", json.dumps(topics), str(folder)],
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
    for query in sinking.begin(spark, topics, folder):
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
