"""A table that takes each version of an application once, as Delta Lake does by `txnAppId` and `txnVersion`.

Data is in Parquet files, which count when a numbered file of the log names them. It has Delta's name, so that
the recipe of the documents runs as it stands there.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType


@dataclass
class Written(WriterCommitMessage):
    """A file of a task."""

    name: str


def log_of(path: Path) -> list[dict[str, Any]]:
    """Return the commits of a table, in order."""
    return [json.loads(one.read_text()) for one in sorted(path.glob("_log/*.json"))]


def stored(path: Path) -> Counter[tuple[Any, ...]]:
    """Return the rows that count."""
    files = [name for commit in log_of(path) for name in commit["add"]]
    rows = [row for name in files for row in pyarrow.parquet.read_table(path / name).to_pylist()]
    return Counter(tuple(row.values()) for row in rows)


class Writer(DataSourceArrowWriter):
    """Writes files in tasks, and a commit on the driver."""

    def __init__(self, options: dict[str, str]) -> None:
        self._path = Path(options["path"])
        self._app, self._version = options["txnappid"], int(options["txnversion"])

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        name = f"{uuid.uuid4().hex}.parquet"
        batches = list(iterator)
        self._path.mkdir(parents=True, exist_ok=True)
        if batches:
            pyarrow.parquet.write_table(pa.Table.from_batches(batches), self._path / name)
        return Written(name if batches else "")

    def commit(self, messages: list[Any]) -> None:
        if (self._path / "hang").exists():
            (self._path / "hanging").touch()
            time.sleep(600)
        before = log_of(self._path)
        if any(one["app"] == self._app and one["version"] >= self._version for one in before):
            return
        commit = {
            "app": self._app,
            "version": self._version,
            "add": [one.name for one in messages if one and one.name],
        }
        log = self._path / "_log"
        log.mkdir(exist_ok=True)
        part = log / uuid.uuid4().hex
        part.write_text(json.dumps(commit))
        # Fails where another writer has taken this number.
        (log / f"{len(before):020}.json").hardlink_to(part)
        part.unlink()


class Table(DataSource):
    """``format("delta")`` of the tests."""

    @classmethod
    def name(cls) -> str:
        return "delta"

    def writer(self, schema: StructType, overwrite: bool) -> Writer:
        return Writer({name.lower(): value for name, value in self.options.items()})
