"""Facts as rows of Spark, and read by its tasks where the database is a server that executors reach.

Tasks need psycopg and what this module imports; Django is not among it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from example_project.selection.rules import FIELDS, folded

FACTS = pa.schema(
    [
        pa.field("sku", pa.int64(), nullable=False),
        pa.field("price", pa.decimal128(9, 2)),
        pa.field("stock", pa.int64()),
        pa.field("rating", pa.decimal128(2, 1)),
        pa.field("title", pa.string()),
    ]
)
NAMES = ("sku", *FIELDS)
COLUMNS = "sku long, price decimal(9, 2), stock long, rating decimal(2, 1), title string"
"""The same in Spark's words."""

Batches = Iterator[pa.RecordBatch]


def fetching(address: Mapping[str, Any], table: str) -> Callable[[Batches], Batches]:
    """Return what a task does: it reads the facts of the items that it is given, over a connection of its own.

    ``address`` are the arguments of psycopg's `connect`.
    """

    def fetch(batches: Batches) -> Batches:
        from psycopg import connect, sql

        names = sql.SQL(", ").join(map(sql.Identifier, NAMES))
        query = sql.SQL("SELECT {} FROM {} WHERE sku = ANY(%s)").format(names, sql.Identifier(table))
        with connect(**address) as connection:
            for batch in batches:
                rows = connection.execute(query, [batch.column("sku").to_pylist()]).fetchall()
                found = [dict(zip(NAMES, row, strict=True)) for row in rows]
                known = [{**facts, "title": folded(facts["title"])} for facts in found]
                yield pa.RecordBatch.from_pylist(known, FACTS)

    return fetch
