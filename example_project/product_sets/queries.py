"""The two queries on Spark's driver: files become values and messages; messages become members.

A message only names an item. Each evaluation reads the values of that moment, so messages may merge, come twice, and come
late. SQLite has one writer, so the database is written by the driver alone, in `foreachBatch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from django.db import connection
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what every Spark program calls it

from example_project.product_sets.models import BOUNDS, FIELDS, Batch, Item, ProductSet
from example_project.product_sets.sets import (
    INTAKE,
    MOST_ITEMS,
    Evaluation,
    Event,
    write_evaluation,
    write_events,
)

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

EVENT = "field string, sku long, version long, value string"
LARGEST_SKU = 2**31 - 1
FILES_PER_BATCH = 100
ITEM = pa.schema(
    [
        pa.field("sku", pa.int64(), nullable=False),
        pa.field("title", pa.string()),
        pa.field("price", pa.decimal128(9, 2)),
        pa.field("stock", pa.int64()),
        pa.field("rating", pa.decimal128(2, 1)),
    ]
)

Options = Mapping[str, Any]
"""Of format("rmq"): the server, and the topic."""


def intake(spark: SparkSession, feeds: Path, options: Options) -> DataStreamWriter:
    """Return the query that reads files of events, and sends a message for each item.

    The query writes the values before it sends the messages, so each listener finds them.
    """
    # Spark refuses a folder that does not exist.
    feeds.mkdir(parents=True, exist_ok=True)
    events = spark.readStream.schema(EVENT).option("maxFilesPerTrigger", FILES_PER_BATCH).json(str(feeds))

    def write_batch(frame: DataFrame, number: int) -> None:
        usable = (
            F.col("field").isin(*FIELDS)
            & F.col("sku").between(1, LARGEST_SKU)
            & F.col("version").isNotNull()
            & F.col("value").isNotNull()
        )
        newest = (
            frame.withColumn("usable", F.coalesce(usable, F.lit(False)))
            .groupBy("usable", "field", F.when(F.col("usable"), F.col("sku")).alias("sku"))
            .agg(
                F.max("version").alias("version"),
                F.max_by("value", "version").alias("value"),
                F.count("*").alias("rows"),
            )
            .collect()
        )
        if not newest:
            return
        usable_rows = [row for row in newest if row.usable]
        try:
            unusable = write_events(
                [Event(row.field, row.sku, row.version, row.value) for row in usable_rows]
            )
            items = sorted({row.sku for row in usable_rows})
            if items:
                changes = spark.createDataFrame(pa.table({"item": items}))
                changes.write.format("rmq").options(**options).option("bodyColumns", "item").mode(
                    "append"
                ).save()
            # Only now: a batch that was not sent to its end is done again.
            unusable += sum(row.rows for row in newest if not row.usable)
            batch = {"work": INTAKE, "rows": sum(row.rows for row in newest), "unusable": unusable}
            Batch.objects.get_or_create(query=_query_id(frame), number=number, defaults=batch)
        finally:
            connection.close()

    return events.writeStream.queryName("intake").foreachBatch(write_batch)


def evaluation(spark: SparkSession, options: Options) -> DataStreamWriter:
    """Return the query that consumes the messages, and writes which sets their items belong to."""
    messages = (
        spark.readStream.format("rmq").options(**{"maxMessagesPerTrigger": MOST_ITEMS, **options}).load()
    )

    def write_batch(frame: DataFrame, number: int) -> None:
        body = F.from_json(F.col("value").cast("string"), "item long")
        rows = frame.select(body["item"].alias("item")).groupBy("item").count().collect()
        if not rows:
            return
        try:
            write_evaluation(
                _query_id(frame),
                number,
                evaluate(spark, [row["item"] for row in rows if row["item"] is not None]),
                rows=sum(row["count"] for row in rows),
                unusable=sum(row["count"] for row in rows if row["item"] is None),
            )
        finally:
            connection.close()

    return messages.writeStream.queryName("evaluation").foreachBatch(write_batch)


def evaluate(spark: SparkSession, skus: list[int]) -> Evaluation:
    """Return which of these items belong to which set, by the values and bounds of this moment."""
    sets = list(ProductSet.objects.all())
    belonging: dict[int, set[int]] = {product_set.pk: set() for product_set in sets}
    items = Item.objects.in_bulk(skus).values()
    if items:
        table = pa.Table.from_pylist(
            [{name: getattr(item, name) for name in ITEM.names} for item in items], ITEM
        )
        columns = [bounds_column(product_set).alias(str(product_set.pk)) for product_set in sets]
        for row in spark.createDataFrame(table).select("sku", *columns).collect():
            for pk, members in belonging.items():
                if row[str(pk)]:
                    members.add(row.sku)
    revisions = {product_set.pk: product_set.revision for product_set in sets}
    return Evaluation([item.sku for item in items], revisions, belonging)


def bounds_column(product_set: ProductSet) -> Column:
    """Return `product_set.holds` as a column over the fields of an item."""
    tests = [F.contains(F.lower(F.col("title")), F.lit(product_set.title_contains.lower()))]
    for name, (field, compare) in BOUNDS.items():
        bound = getattr(product_set, name)
        if bound is not None:
            tests.append(F.coalesce(compare(F.col(field), F.lit(bound)), F.lit(False)))
    return reduce(and_, tests)


def _query_id(frame: DataFrame) -> str:
    """The identity of a query's checkpoint: numbers of batches start at 0 with another one."""
    query = frame.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    assert query, "Spark sets it for every batch"
    return query
