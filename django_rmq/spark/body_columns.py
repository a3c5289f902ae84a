"""Bodies as columns, and columns as bodies, by functions of Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django_rmq.exceptions import InvalidRequest

MALFORMED = "malformed"
"""The column of the bodies that do not fit; NULL if the body was read."""

KEY_TEXT = "case when not startswith(key, X'FF') then cast(key as string) end as key"
"""The key as text. NULL for a message that was sent without one: its column has the member that identifies it."""

BATCH_COLUMNS = ("query", "batch")
"""The columns that identify a batch in files and tables: the query's id, which its checkpoint keeps, and the
batch number."""

JSON_OPTIONS = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""How Spark writes bodies: its own format of times has milliseconds only."""


def encoded(rows: Any, options: Mapping[str, str], *, value: str | None, select: Sequence[str]) -> Any:
    """Return ``value``, a body for each row, and ``options``, all of which are SQL over the rows.

    Without ``value`` a body is the JSON object of the columns ``select``, or of all. Decimals are text: a JSON
    number would be read as a float. Raises ``InvalidRequest`` if two columns have one name.
    """
    from pyspark.sql import functions as sql

    others = [sql.expr(text).alias(name) for name, text in options.items()]
    if value is not None:
        return rows.select(sql.expr(value).cast("string").alias("value"), *others)
    body = sql.expr(f"struct({', '.join(select) or '*'})")
    kind = rows.select(body.alias("body")).schema["body"].dataType
    if len(set(kind.names)) < len(kind.names):
        raise InvalidRequest(f"two columns of the body have one name: {', '.join(kind.names)}")
    exact = body.cast(_with_text(kind))
    # In the order of a body that is stored, so that a task has nothing to reorder.
    columns = [exact.getField(name).alias(name) for name in sorted(kind.names)]
    return rows.select(sql.to_json(sql.struct(*columns), JSON_OPTIONS).alias("value"), *others)


def _with_text(kind: Any) -> Any:
    """Return a type of Spark with text in place of decimals."""
    from pyspark.sql import types

    if isinstance(kind, types.DecimalType):
        return types.StringType()
    if isinstance(kind, types.ArrayType):
        return types.ArrayType(_with_text(kind.elementType), kind.containsNull)
    if isinstance(kind, types.MapType):
        return types.MapType(kind.keyType, _with_text(kind.valueType), kind.valueContainsNull)
    if isinstance(kind, types.StructType):
        fields = [types.StructField(field.name, _with_text(field.dataType), field.nullable) for field in kind]
        return types.StructType(fields)
    return kind


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
