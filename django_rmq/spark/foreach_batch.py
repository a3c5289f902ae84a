"""Sinks for ``foreachBatch`` that contain a batch exactly once, however often it is written.

A batch is identified by its query's id and its number. Its writer is pickled: with Spark Connect it runs on
the server, without settings or a JVM. It uses only public options of Spark.

A batch whose function raises is not failed here: Spark repeats it. After the end of its lease, ``lua/slot/claims.lua`` gives its
messages back with a retry less.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from django_rmq.exceptions import OperationRefused

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, DataFrameWriter, SparkSession

    Access = TypeVar("Access", DataFrameReader, DataFrameWriter)

MALFORMED = "malformed"
"""The column of the bodies that do not fit; NULL if the body was read."""

BATCH_COLUMNS = ("query", "batch")
"""The columns that identify a batch in files and tables: the query's id, which its checkpoint keeps, and the
batch number."""
QUERY, BATCH = BATCH_COLUMNS


class Sink(Protocol):
    """Writes a batch."""

    def write(self, frame: DataFrame, query: str, number: int, *, may_repeat: bool) -> None:
        """Write a batch. ``may_repeat``: it may have been written before, in part or completely."""


@dataclass
class Each:
    """A function of the project, called with the frame, the number of the batch and the query's id."""

    function: Callable[[DataFrame, int, str], object]

    def write(self, frame: DataFrame, query: str, number: int, *, may_repeat: bool) -> None:
        self.function(frame, number, query)


@dataclass
class Files:
    """Parquet files in ``path/query=…/batch=…``, a folder that appears when it is complete.

    Spark writes into a hidden folder of ``path`` and renames it to the folder of the batch, replacing an
    earlier one.
    """

    path: str

    def check(self, session: SparkSession) -> None:
        """Raise ``OperationRefused`` for a folder whose readers would not see new files."""
        if _is_there(session, f"{self.path.rstrip('/')}/_spark_metadata"):
            raise OperationRefused(
                f"{self.path} was written by Spark's own file sink (it has a folder _spark_metadata): "
                "Spark would read only the files listed there, and none of the new ones. Use another "
                "folder; keep the checkpoint"
            )

    def write(self, frame: DataFrame, query: str, number: int, *, may_repeat: bool) -> None:
        from pyspark.sql import Observation
        from pyspark.sql import functions as sql

        seen = Observation()
        counted = frame.observe(seen, sql.count(sql.lit(1)).alias("rows")) if may_repeat else frame
        writer = _named(counted, query, number).write.partitionBy(QUERY, BATCH)
        writer.option("partitionOverwriteMode", "dynamic").mode("overwrite").parquet(self.path)
        if may_repeat and not seen.get["rows"]:
            self._empty(frame, query, number)

    def _empty(self, frame: DataFrame, query: str, number: int) -> None:
        """Replace an earlier version of a batch that has lost all its rows by a file without rows."""
        folder = f"{self.path.rstrip('/')}/{QUERY}={query}/{BATCH}={number}"
        if _is_there(frame.sparkSession, folder):
            frame.limit(0).coalesce(1).write.mode("overwrite").parquet(folder)


@dataclass
class Table:
    """A table of a database, by JDBC, with the columns ``query`` and ``batch``."""

    url: str
    table: str
    driver: str | None = None

    def write(self, frame: DataFrame, query: str, number: int, *, may_repeat: bool) -> None:
        tagged = _named(frame, query, number)
        if may_repeat:
            # Without rows: this only creates the table if there is none.
            self._append(tagged.limit(0))
            self._delete(tagged.sparkSession, query, number)
        self._append(tagged)

    def _append(self, frame: DataFrame) -> None:
        writer = self._with_options(frame.write.format("jdbc"))
        # For creating the table, because not every database can compare or index text of any length.
        writer.option("createTableColumnTypes", f"{QUERY} VARCHAR(36)").mode("append").save()

    def _delete(self, session: SparkSession, query: str, number: int) -> None:
        """Delete the rows of a batch from the table, in the first statement of a connection that then counts them."""
        there = self._with_options(session.read.format("jdbc")).load()
        names = {name.lower(): name for name in there.columns}
        quote = "`" if re.match(r"jdbc:(mysql|mariadb|databricks|hive2)\b", self.url) else '"'
        where = f"{quote}{names[QUERY]}{quote} = '{query}' AND {quote}{names[BATCH]}{quote} = {number}"
        # Spark cannot delete rows of a database. Only a read takes a statement, which runs on its connection first.
        reader = self._with_options(session.read.format("jdbc"))
        reader = reader.option("sessionInitStatement", f"DELETE FROM {self.table} WHERE {where}")  # noqa: S608 - both are Spark's
        rows = reader.load()
        remaining = rows.where((rows[names[QUERY]] == query) & (rows[names[BATCH]] == number)).count()
        if remaining:
            raise OperationRefused(
                f"table {self.table} kept {remaining} rows of batch {number} of query {query} that were deleted"
            )

    def _with_options(self, access: Access) -> Access:
        options = access.option("url", self.url).option("dbtable", self.table)
        return options.option("driver", self.driver) if self.driver else options


@dataclass
class Batches:
    """The function for ``foreachBatch``: ``sink`` gets each batch with its name, ``bad`` gets the bodies that do not fit."""

    checkpoint: str
    sink: Sink
    bad: Sink | None = None
    _query: str = field(default="", init=False)
    _fresh: int | None = field(default=None, init=False)
    """The number of the batch that cannot have been written before: the one behind a batch that was written. Spark resumes
    with a batch that has no record, also if the query is started again with this object."""

    def __call__(self, frame: DataFrame, number: int) -> None:
        self._query = self._query or query_of(frame.sparkSession, self.checkpoint)
        may_repeat, self._fresh = number != self._fresh, None
        if self.bad is None:
            self.sink.write(frame, self._query, number, may_repeat=may_repeat)
        else:
            cached = frame.persist()
            try:
                fine = cached.where(cached[MALFORMED].isNull()).drop(MALFORMED)
                self.sink.write(fine, self._query, number, may_repeat=may_repeat)
                bad = cached.where(cached[MALFORMED].isNotNull())
                bad = bad.select(bad[MALFORMED].alias("value"), "topic", "slot")
                self.bad.write(bad, self._query, number, may_repeat=may_repeat)
            finally:
                cached.unpersist()
        self._fresh = number + 1


def _named(frame: DataFrame, query: str, number: int) -> DataFrame:
    """Return a frame with the columns that identify its batch."""
    from pyspark.sql import functions as sql

    return frame.withColumns({QUERY: sql.lit(query), BATCH: sql.lit(number).cast("long")})


def query_of(session: SparkSession, checkpoint: str) -> str:
    """Return the id of the query to which a checkpoint belongs."""
    (row,) = session.read.text(_literally(f"{checkpoint.rstrip('/')}/metadata")).collect()
    return str(json.loads(row.value)["id"])


def _is_there(session: SparkSession, path: str) -> bool:
    from pyspark.errors import AnalysisException

    try:
        # A Spark Connect server reads it only when a result is requested.
        session.read.text(_literally(path)).schema  # noqa: B018
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            return False
        raise
    return True


def _literally(path: str) -> str:
    """Return a path with its wildcards escaped."""
    return re.sub(r"([\\{}\[\]*?])", r"\\\1", path)
