"""``consume``: reads a topic's messages, in two phases, into files, a database, or a function of the project."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.utils.module_loading import import_string

from django_rmq.exceptions import ConfigurationError, InvalidRequest
from django_rmq.spark.foreach_batch import BATCH_COLUMNS, MALFORMED, Batches, Each, Files, Sink, Table
from django_rmq.spark.pipelines.pipeline import KEY_TEXT, Context, Options, Pipeline, register
from django_rmq.worker.listener_registry import check_arguments

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

METADATA = (*("value", "score", "topic", "slot", KEY_TEXT, "due", "failures"), "current_timestamp() as taken")
"""The columns with ``--metadata``. Spark records the time of a batch, so one that runs again has the same."""


LIMITS: tuple[tuple[str, type[int] | str, str, str], ...] = (
    ("--max-messages", int, "N", "messages in one batch, at most (default: 200,000)"),
    ("--max-bytes", int, "N", "bytes of messages in one batch, at most, about"),
    ("--min-messages", int, "N", "messages in one batch, at least, unless fewer have waited for --max-delay"),
    ("--max-delay", "duration", "TIME", "how long fewer than --min-messages wait (default: 15m)"),
    ("--claim-timeout", "duration", "TIME", "duration of the lease (default: 120s)"),
    ("--patience", "duration", "TIME", "how long to wait while Redis is unavailable (default: 60s)"),
)
"""The arguments that limit a batch, and the time that it may take."""


@register
class Consume(Pipeline):
    """Consume a topic into Parquet files, a table of a database, or a function of yours.

    Each message is acknowledged when Spark has recorded its batch. A batch is identified by its query's id
    and its number, and is in the files or the table exactly once, even after a crash. A function may get a
    batch twice, and receives both values to recognise it. Needs --checkpoint, which is the consumer's
    identity.
    """

    name = "consume"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        target = parser.add_mutually_exclusive_group(required=True)
        target.add_argument("--parquet", metavar="PATH", help="a folder of Parquet files")
        target.add_argument("--jdbc", metavar="URL", help="a database; requires --table")
        target.add_argument(
            "--each", metavar="PATH", help="the dotted path of a function (frame, batch number, query id)"
        )
        parser.add_argument("--table", help="the table, created if it is missing")
        parser.add_argument("--driver", help="the class of the JDBC driver")
        parser.add_argument(
            "--schema",
            metavar="DDL",
            help="read bodies as JSON objects with these columns: 'sku string, n int'. A body that does "
            "not fit is stored unchanged in the column malformed",
        )
        parser.add_argument(
            "--bad",
            metavar="PATH",
            help="with --schema: write bodies that do not fit to separate Parquet files in this folder instead",
        )
        parser.add_argument(
            "--metadata",
            action="store_true",
            help="also key, due (when it was due), failures, and taken (when its batch was claimed)",
        )
        for flag, kind, metavar, text in LIMITS:
            parser.add_argument(flag, type=kind, metavar=metavar, help=text)

    def run(self, context: Context, **options: Any) -> None:
        if context.checkpoint is None:
            raise InvalidRequest("--checkpoint is missing: give a folder, which identifies the consumer")
        if (options["jdbc"] is None) != (options["table"] is None):
            raise InvalidRequest("--jdbc and --table require each other")
        if options["bad"] and not options["schema"]:
            raise InvalidRequest("--bad requires --schema: without a schema, every body fits")
        sink = _sink(options)
        bad = Files(options["bad"]) if options["bad"] else None
        topic = context.topic(options["topic"])
        for files in (sink, bad):
            if isinstance(files, Files):
                files.check(context.spark)
        frame = context.stream(
            topic.name,
            maxMessagesPerTrigger=options["max_messages"],
            maxBytesPerTrigger=options["max_bytes"],
            minMessagesPerTrigger=options["min_messages"],
            maxTriggerDelay=options["max_delay"],
            claimTimeout=options["claim_timeout"],
            patience=options["patience"],
            includeMetadata=options["metadata"],
        )
        if options["metadata"]:
            frame = frame.selectExpr(*METADATA)
        if topic.body != "bytes":
            frame = frame.withColumn("value", frame["value"].cast("string"))
        if options["schema"]:
            frame = decoded(frame, options["schema"])
        writer = frame.writeStream.foreachBatch(Batches(context.checkpoint, sink, bad))
        consumed = context.follow(writer, topic.name)
        context.say(f"{consumed} messages of {topic.name} consumed")


def _sink(options: Options) -> Sink:
    if options["parquet"]:
        return Files(options["parquet"])
    if options["jdbc"]:
        return Table(options["jdbc"], options["table"], options["driver"])
    return Each(_function(options["each"]))


def _function(path: str) -> Callable[[DataFrame, int, str], object]:
    try:
        attribute = import_string(path)
    except ImportError as error:
        raise ConfigurationError(f"--each {path}: {error}") from error
    if not callable(attribute):
        raise ConfigurationError(f"--each {path} is not a function")
    try:
        check_arguments(attribute, None, 0, "")
    except TypeError as error:
        raise ConfigurationError(
            f"--each {path} must take a frame, the number of the batch and the id of the query: {error}"
        ) from error
    function: Callable[[DataFrame, int, str], object] = attribute
    return function


def decoded(frame: DataFrame, schema: str) -> DataFrame:
    """Return ``value`` of a frame as the columns of ``schema`` (DDL, like ``sku string, n int``), and ``malformed``.

    A body fits if it is a JSON object with at least one of the columns, and each of its values can be read as
    its column's type. Other values are left out; a missing column is NULL. Raises ``InvalidRequest`` for a
    schema that is not a list of columns, or names an existing column. ``malformed`` is also counted: the
    progress of a query has ``observedMetrics`` of that name, with ``bodies``.
    """
    from pyspark.sql import functions as sql
    from pyspark.sql.types import StringType, StructField, StructType

    text = frame["value"].cast("string")
    quoted = schema.replace("\\", "\\\\").replace("'", "\\'")
    body_type = (
        frame.selectExpr(f"from_json(cast(value as string), '{quoted}') as body").schema["body"].dataType
    )
    if not isinstance(body_type, StructType) or not body_type.fields:
        raise InvalidRequest(f"a schema is a list of columns, as 'sku string, n int', not {schema!r}")
    other_columns = [name for name in frame.columns if name != "value"]
    clashing = {name.lower() for name in (*other_columns, MALFORMED, *BATCH_COLUMNS)} & {
        name.lower() for name in body_type.fieldNames()
    }
    if clashing:
        raise InvalidRequest(
            f"the schema cannot have a column {', '.join(sorted(clashing))}: the result has one of that name"
        )
    whole = StructType([*body_type.fields, StructField(MALFORMED, StringType())])
    body = sql.from_json(text, whole, {"columnNameOfCorruptRecord": MALFORMED, "mode": "PERMISSIVE"})
    has_one = sql.arrays_overlap(
        sql.json_object_keys(text), sql.array(*(sql.lit(name) for name in body_type.fieldNames()))
    )
    read = frame.select(*other_columns, "value", body.alias("body"), has_one.alias("has_one"))
    fits = sql.coalesce(read[f"body.{MALFORMED}"].isNull() & read["has_one"], sql.lit(False))
    columns = [read["body"].getField(name).alias(name) for name in body_type.fieldNames()]
    result = read.select(*columns, *other_columns, sql.when(~fits, read["value"]).alias(MALFORMED))
    return result.observe(MALFORMED, sql.count(MALFORMED).alias("bodies"))
