"""Rows of a write that cannot be sent: which they are and why, and the folder of ``badRows`` in which they are kept.

``writer`` sends the others. What a message may be is decided as for any other send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark import TaskContext

from django_rmq.exceptions import CallerError, ConfigurationError

REFUSALS = (CallerError, ValueError, OverflowError)
"""What is raised for rows that cannot be sent."""

REFUSED = "refused"
"""The column that says in the files of ``badRows`` why a row could not be sent."""


def refused_rows(
    encode: Callable[[pa.RecordBatch], object], batch: pa.RecordBatch, error: Exception
) -> Iterator[tuple[int, str]]:
    """Yield each row that ``encode`` refuses, and why, by halves of ``batch``, for which it has raised ``error``."""
    todo = [(0, batch.num_rows, error)]
    while todo:
        first, count, error = todo.pop()
        if count == 1:
            yield first, str(error)
            continue
        half = count // 2
        for start, size in ((first + half, count - half), (first, half)):
            try:
                encode(batch.slice(start, size))
            except REFUSALS as refusal:
                todo.append((start, size, refusal))


def printable_row(batch: pa.RecordBatch, row: int) -> str:
    """Return the columns of a row as text, which may be cut."""
    text = repr({name: _cell(batch.column(name).slice(row, 1)) for name in batch.schema.names})
    return text if len(text) <= 300 else f"{text[:297]}..."


def _cell(column: pa.Array) -> object:
    """Return the one value of a column, also one that Python cannot represent: text that is not UTF-8, the year 10000."""
    try:
        return column[0].as_py()
    except (ValueError, OverflowError, KeyError, pa.ArrowException):
        return column.cast(pa.binary() if pa.types.is_string(column.type) else pa.string())[0].as_py()


def folder_of(path: str) -> tuple[fs.FileSystem, str]:
    """Return the file system and the folder of ``badRows``, which is made if it is not there."""
    try:
        filesystem, folder = fs.FileSystem.from_uri(path.replace("s3a://", "s3://", 1))
        filesystem.create_dir(folder, recursive=True)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise ConfigurationError(
            f"option badRows must be a folder, as an absolute path or a URI that pyarrow knows, got {path!r}: {error}"
        ) from None
    return filesystem, folder


class BadRows:
    """The rows of a task that cannot be sent, in a Parquet file: their columns, and ``refused``, which says why.

    The file appears when the task ends. A task that is tried again replaces it.
    """

    def __init__(self, path: str | None, run: str) -> None:
        self.are_kept = path is not None
        self.count = 0
        self._path, self._run = path, run
        self._writer: pq.ParquetWriter | None = None

    def keep(self, rows: pa.RecordBatch, why: Sequence[str]) -> None:
        """Add rows to the file."""
        table = pa.Table.from_batches([rows]).append_column(REFUSED, pa.array(why, pa.string()))
        if self._writer is None:
            files, folder = folder_of(self._path or "")
            name = f"{self._name()}.parquet"
            self._files, self._hidden, self._shown = files, f"{folder}/.{name}", f"{folder}/{name}"
            self._writer = pq.ParquetWriter(self._hidden, table.schema, filesystem=files)
        self._writer.write_table(table)
        self.count += len(why)

    def _name(self) -> str:
        task = TaskContext.get()
        if task is None:
            return self._run
        query, batch = (
            task.getLocalProperty(f"{name}") for name in ("sql.streaming.queryId", "streaming.sql.batchId")
        )
        of = self._run if query is None else f"{query}-{batch}"
        return f"{of}-{task.partitionId():05d}"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> None:
        if self._writer is None:
            return
        self._writer.close()
        if kind is None:
            self._files.move(self._hidden, self._shown)
        else:
            with suppress(OSError):
                self._files.delete_file(self._hidden)
