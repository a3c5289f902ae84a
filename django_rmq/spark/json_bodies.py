"""The rows of a frame as messages whose bodies are JSON objects of columns, written by Spark's own functions.

The texts are those of ``core.model.body_codec.encode_json``, by which every other send encodes values: Spark's ``to_json`` writes
floats, decimals, times and intervals otherwise. Bodies of a write with ``bodyColumns`` are made in the tasks instead
(``columns.canonical_rows``); ``encode_rows`` makes them before, so that an ingest can merge equal ones and store them in pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import cast

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from django_rmq.exceptions import InvalidRequest
from django_rmq.spark.columns import check_json_type, shortest_float


def encode_rows(
    rows: DataFrame, options: Mapping[str, str], *, value: str | None, select: Sequence[str]
) -> DataFrame:
    """Return ``value``, a body for each row, and ``options``, all of which are SQL over the rows.

    Without ``value`` a body is the JSON object of the columns ``select``, or of all, as ``encode_json`` writes their values.
    Raises ``InvalidRequest`` if two columns have one name, and ``ConfigurationError`` for a type that JSON cannot represent.
    """
    others = [sql.expr(text).alias(name) for name, text in options.items()]
    if value is not None:
        return rows.select(sql.expr(value).cast("string").alias("value"), *others)
    body = sql.expr(f"struct({', '.join(select) or '*'})")
    kind = cast("StructType", rows.select(body.alias("body")).schema["body"].dataType)
    if len(set(kind.names)) < len(kind.names):
        raise InvalidRequest(f"two columns of the body have one name: {', '.join(kind.names)}")
    for one in kind:
        check_json_type(one.name, one.dataType, "ingest")
    mark = token_hex(16)
    exact = _with_text(body, kind, mark)
    # In the order of a body that is stored, so that a task has nothing to reorder.
    columns = [exact.getField(name).alias(name) for name in sorted(kind.names)]
    text = sql.to_json(sql.struct(*columns), {"ignoreNullFields": "false"})
    if _FLOATS.search(kind.simpleString()):
        text = sql.udf(_numbers_behind(mark), "string", useArrow=False)(text)
    return rows.select(text.alias("value"), *others)


_FLOATS = re.compile(r"float|double")
_OTHER_TEXTS = re.compile(rf"{_FLOATS.pattern}|decimal|time|interval")
"""The names of types whose values Spark writes as other texts than Python."""


def _numbers_behind(mark: str) -> Callable[[str], str]:
    """Return a function that writes the floats of a JSON text as Python does. They are texts there, behind ``mark``."""
    marked = re.compile(f'"{mark}(double|float)([^"]*)"')

    def number(match: re.Match[str]) -> str:
        value = float(match[2])
        # A task refuses a row with NaN, which JSON does not have.
        return json.dumps(shortest_float(value) if match[1] == "float" else value)

    return lambda text: marked.sub(number, text)


def _with_text(column: Column, kind: DataType, mark: str) -> Column:
    """Return a column with the text that every other send writes in place of each decimal, such as ``1E-7``, and each time.

    Floats become texts behind ``mark``, because Spark writes them as Java does: 1.0E7.
    """
    if not _OTHER_TEXTS.search(kind.simpleString()):
        return column
    if isinstance(kind, ArrayType):
        return sql.transform(column, lambda item: _with_text(item, kind.elementType, mark))
    if isinstance(kind, MapType):
        return sql.transform_values(column, lambda _, value: _with_text(value, kind.valueType, mark))
    if isinstance(kind, StructType):
        fields = [_with_text(column.getField(one.name), one.dataType, mark).alias(one.name) for one in kind]
        return sql.when(column.isNotNull(), sql.struct(*fields))
    name, text = kind.typeName(), column
    if name == "decimal":
        # What ``cast`` writes depends on ANSI mode: with it, small decimals have no exponent.
        text = sql.format_string("%s", column)
    elif name in ("float", "double"):
        text = sql.concat(sql.lit(mark + name), column.cast("double").cast("string"))
    elif name == "daytimeinterval":
        text = _interval_text(column)
    elif name in ("timestamp", "timestamp_ntz", "time"):
        text = _time_text(column, has_zone=name == "timestamp")
    return sql.when(column.isNotNull(), text)


def _time_text(column: Column, *, has_zone: bool) -> Column:
    """Return times as ``isoformat`` writes them: with six digits of a second, or none."""
    text = column.cast("string")
    whole, digits = (sql.split_part(text, sql.lit("."), sql.lit(part)) for part in (1, 2))
    fraction = sql.when(digits != "", sql.concat(sql.lit("."), sql.rpad(digits, 6, "0"))).otherwise("")
    offset = sql.date_format(column, "xxxxx") if has_zone else sql.lit("")
    return sql.concat(sql.translate(whole, " ", "T"), fraction, offset)


def _interval_text(column: Column) -> Column:
    """Return intervals as ``encode_json`` writes a ``timedelta``."""
    size = sql.abs(column)
    days, hours, minutes, seconds = (
        sql.extract(sql.lit(unit), size) for unit in ("DAY", "HOUR", "MINUTE", "SECOND")
    )
    # ``seconds`` has six digits behind the point.
    rest = sql.concat((hours * 3_600 + minutes * 60 + sql.floor(seconds)).cast("string"), sql.lit("."))
    micros = sql.lpad(((seconds - sql.floor(seconds)) * 1_000_000).cast("int").cast("string"), 6, "0")
    sign = sql.when(column < sql.expr("interval '0' second"), "-").otherwise("")
    return sql.concat(sign, sql.lit("P"), days.cast("string"), sql.lit("DT"), rest, micros, sql.lit("S"))
