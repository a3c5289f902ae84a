"""The data source: the capabilities of ``format("rmq")``, and the schema of what is read.

Spark's calls have fixed argument names; the work is done in the module of each class. All but ``reader`` are imported in their
method, because older versions of PySpark lack what some of them need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.reader import COLUMNS, METADATA, Reader
from django_rmq.spark.source_options import READ, STREAM, WRITE, SourceOptions

if TYPE_CHECKING:
    from django_rmq.spark.writer import StreamWriter, Writer


class RmqDataSource(DataSource):
    """Messages of RMQ topics: ``spark.read``, ``df.write``, ``spark.readStream`` and ``df.writeStream``."""

    @classmethod
    def name(cls) -> str:
        return "rmq"

    def schema(self) -> StructType:
        # Spark calls it at load(), on the driver, so errors in options are raised there.
        from django_rmq.spark.broker_connection import broker_of

        options = SourceOptions(dict(self.options), READ | STREAM, "load()")
        options.check()
        broker_of(options)  # connects to nothing
        return _schema(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = SourceOptions(dict(self.options), READ, "spark.read")
        _check(schema, options)
        return Reader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from django_rmq.spark.stream_reader import StreamReader

        options = SourceOptions(dict(self.options), STREAM, "spark.readStream")
        _check(schema, options)
        return StreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> Writer:
        from django_rmq.spark.writer import Writer

        return Writer(SourceOptions(dict(self.options), WRITE, "df.write"), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 - Spark's name
        from django_rmq.spark.writer import StreamWriter

        return StreamWriter(
            SourceOptions(dict(self.options), WRITE, "df.writeStream"), schema, overwrite=overwrite
        )


def _schema(options: SourceOptions) -> StructType:
    return METADATA if options.metadata else COLUMNS


def _check(schema: StructType, options: SourceOptions) -> None:
    # Spark may declare the same columns as never NULL.
    given, fixed = ([(field.name, field.dataType) for field in one] for one in (schema, _schema(options)))
    if given != fixed:
        raise ConfigurationError(
            f"the schema of format rmq is fixed: {_schema(options).simpleString()}; read value, then decode it"
        )
