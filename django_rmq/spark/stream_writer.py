"""Stream write: each batch is sent as by a batch write."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from django_rmq.spark.versions import too_old
from django_rmq.spark.writer import PartitionSend

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:
    raise too_old("stream writes", "4.1") from None


class StreamWriter(PartitionSend, DataSourceStreamArrowWriter):
    """``df.writeStream``: each batch is sent at least once."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self.send(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Log what was left out. The messages are already sent."""
        self.tell_left_out(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: sent messages stay, and merge if they are sent again."""
