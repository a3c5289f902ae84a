"""The two queries of the selection, on Spark's driver: files become facts and messages; messages become members.

Files hold what is new, a message only says whose facts to look at: whoever evaluates an item reads what is known at that
moment, so messages may merge, come twice, and come late. The database is written here alone, by one batch at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from django.db import connection, connections, router
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what every Spark program calls it

from example_project.selection.changes import KEY_ACCOUNT_WAIT, MOST_ITEMS, key_accounts
from example_project.selection.columns import column_of
from example_project.selection.facts import LARGEST_SKU, Event, is_noted, note, take_in
from example_project.selection.fetching import COLUMNS, FACTS, fetching
from example_project.selection.models import Item, ProductSet, Work
from example_project.selection.rules import FIELDS, Facts, RuleError
from example_project.selection.sets import Evaluation, settle
from example_project.selection.sources import SOURCES, Source

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

logger = logging.getLogger(__name__)

FILES_PER_BATCH = 100

Options = Mapping[str, Any]
"""Of format("rmq"): the server, and the topic."""


def intake(spark: SparkSession, feeds: Path, options: Options) -> DataStreamWriter:
    """Return the query that reads the files of all sources in bulk, and sends a message for each item.

    Facts are written first: whoever gets the message finds them.
    """
    events = reduce(DataFrame.unionByName, [_events(spark, source, feeds) for source in SOURCES])

    def take(frame: DataFrame, number: int) -> None:
        usable = (
            F.col("sku").between(1, LARGEST_SKU) & F.col("version").isNotNull() & F.col("value").isNotNull()
        )
        newest = (
            frame.withColumn("usable", F.coalesce(usable, F.lit(False)))
            .groupBy("usable", "source", F.when(F.col("usable"), F.col("sku")).alias("sku"))
            .agg(
                F.max_by("value", "version").alias("value"),
                F.max("version").alias("version"),
                F.count("*").alias("rows"),
            )
            .collect()
        )
        if not newest:
            return
        found = [Event(row.source, row.sku, row.version, row.value) for row in newest if row.usable]
        try:
            impossible = take_in(found)
            items = sorted({event.sku for event in found})
            if items:
                first = key_accounts(items)
                waits = pa.array(
                    [KEY_ACCOUNT_WAIT if sku in first else None for sku in items], pa.duration("us")
                )
                changes = spark.createDataFrame(pa.table({"item": items, "time_range": waits}))
                writer = changes.write.format("rmq").options(**options).option("bodyColumns", "item")
                writer.mode("append").save()
            # Only now: a batch that was not sent to its end is done again.
            query = _query_of(frame)
            if not is_noted(query, number):
                note(
                    query,
                    number,
                    work=Work.INTAKE,
                    rows=sum(row.rows for row in newest),
                    unusable=impossible + sum(row.rows for row in newest if not row.usable),
                    items=len(items),
                )
        finally:
            connection.close()

    return events.writeStream.queryName("selection-intake").foreachBatch(take)


def selecting(spark: SparkSession, options: Options) -> DataStreamWriter:
    """Return the query that consumes the messages, one batch at a time, and writes which sets their items belong to."""
    messages = (
        spark.readStream.format("rmq").options(**{"maxMessagesPerTrigger": MOST_ITEMS, **options}).load()
    )

    def select(frame: DataFrame, number: int) -> None:
        body = F.from_json(F.col("value").cast("string"), "item long")
        named = frame.select(body["item"].alias("item")).groupBy("item").count().collect()
        if not named:
            return
        skus = [row["item"] for row in named if row["item"] is not None]
        try:
            settle(
                _query_of(frame),
                number,
                evaluate(spark, skus),
                rows=sum(row["count"] for row in named),
                unusable=sum(row["count"] for row in named if row["item"] is None),
            )
        finally:
            connection.close()

    return messages.writeStream.queryName("selection").foreachBatch(select)


def evaluate(spark: SparkSession, skus: list[int]) -> Evaluation:
    """Return which of these items belong to which running set, by the facts and rules of this moment."""
    rules = {}
    revisions = {}
    for product_set in ProductSet.objects.filter(running=True):
        try:
            rules[product_set.pk] = product_set.parsed
        except RuleError:
            logger.exception(
                "The rule of the set %r cannot be read, so the set stays unchanged", product_set.name
            )
            continue
        revisions[product_set.pk] = product_set.revision
    known: dict[int, Facts] = {}
    belonging: dict[int, set[int]] = {pk: set() for pk in rules}
    if skus:
        columns = [column_of(rule).alias(str(pk)) for pk, rule in rules.items()]
        for row in facts_of(spark, skus).select("*", *columns).collect():
            known[row.sku] = {field: row[field] for field in FIELDS}
            for pk in rules:
                if row[str(pk)]:
                    belonging[pk].add(row.sku)
    return Evaluation(list(known), revisions, belonging, known)


def facts_of(spark: SparkSession, skus: list[int]) -> DataFrame:
    """Return what is known of these items: tasks read it from a PostgreSQL, and the driver reads any other database."""
    database = connections[router.db_for_read(Item)]
    if database.vendor != "postgresql":
        known = [{"sku": sku, **item.facts} for sku, item in Item.objects.in_bulk(skus).items()]
        return spark.createDataFrame(pa.Table.from_pylist(known, FACTS))
    # What Django passes to psycopg besides is of its own connections.
    parameters = database.get_connection_params()
    address = {name: value for name, value in parameters.items() if isinstance(value, str | int)}
    asked = spark.createDataFrame(pa.table({"sku": pa.array(skus, pa.int64())}))
    return asked.mapInArrow(fetching(address, Item._meta.db_table), COLUMNS)


def _events(spark: SparkSession, source: Source, feeds: Path) -> DataFrame:
    folder = source.folder(feeds)
    # A folder that is not there yet would be an error.
    folder.mkdir(parents=True, exist_ok=True)
    files = spark.readStream.format(source.format).schema(source.schema)
    files = files.option("maxFilesPerTrigger", FILES_PER_BATCH).option("mode", "PERMISSIVE")
    value = F.col(source.field).cast("string").alias("value")
    return files.load(str(folder)).select("sku", "version", F.lit(source.name).alias("source"), value)


def _query_of(frame: DataFrame) -> str:
    """The identity of a query's checkpoint: numbers of batches start at 0 with another one."""
    found = frame.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    assert found, "Spark sets it for every batch"
    return found
