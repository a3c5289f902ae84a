"""Bodies as columns; a body that does not fit the schema is kept as it is."""

from __future__ import annotations

from typing import Any

from django_rmq.exceptions import InvalidRequest

MALFORMED = "malformed"
"""The column of the bodies that do not fit; NULL if the body was read."""

KEY_TEXT = "case when not startswith(key, X'FF') then cast(key as string) end as key"
"""The key as text. NULL for a message that was sent without one: its column has the member that identifies it."""

BATCH_COLUMNS = ("query", "batch")
"""The columns that identify a batch in files and tables: the query's id, which its checkpoint keeps, and the
batch number."""


def decoded(frame: Any, schema: str) -> Any:
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
    wanted = frame.selectExpr(f"from_json(cast(value as string), '{quoted}') as body").schema["body"].dataType
    if not isinstance(wanted, StructType) or not wanted.fields:
        raise InvalidRequest(f"a schema is a list of columns, as 'sku string, n int', not {schema!r}")
    kept = [name for name in frame.columns if name != "value"]
    taken = {name.lower() for name in (*kept, MALFORMED, *BATCH_COLUMNS)} & {
        name.lower() for name in wanted.fieldNames()
    }
    if taken:
        raise InvalidRequest(
            f"the schema cannot have a column {', '.join(sorted(taken))}: the result has one of that name"
        )
    whole = StructType([*wanted.fields, StructField(MALFORMED, StringType())])
    body = sql.from_json(text, whole, {"columnNameOfCorruptRecord": MALFORMED, "mode": "PERMISSIVE"})
    has_one = sql.arrays_overlap(
        sql.json_object_keys(text), sql.array(*(sql.lit(name) for name in wanted.fieldNames()))
    )
    read = frame.select(*kept, "value", body.alias("body"), has_one.alias("has_one"))
    fits = sql.coalesce(read[f"body.{MALFORMED}"].isNull() & read["has_one"], sql.lit(False))
    columns = [read["body"].getField(name).alias(name) for name in wanted.fieldNames()]
    result = read.select(*columns, *kept, sql.when(~fits, read["value"]).alias(MALFORMED))
    return result.observe(MALFORMED, sql.count(MALFORMED).alias("bodies"))
