"""What an older PySpark lacks: batches run on 4.0, stream writes on 4.1, stream reads on 4.2."""

from __future__ import annotations

import pyarrow as pa
import pyspark
from pyspark.sql.types import StructType

from django_rmq.exceptions import ConfigurationError

ARROW = {
    "binary": pa.binary(),
    "double": pa.float64(),
    "int": pa.int32(),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
"""Spark's name of a type -> the type of Arrow in which Spark expects its column."""


def too_old(what: str, needed: str) -> ConfigurationError:
    """Return the error about something that the installed PySpark lacks."""
    return ConfigurationError(f"{what} need PySpark {needed}, this is {pyspark.__version__}")


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the schema of Arrow for one of Spark. PySpark has a function for it, with other arguments in each version."""
    return pa.schema([(field.name, ARROW[field.dataType.simpleString()]) for field in schema.fields])
