"""Lets Spark find ``format("rmq")`` by itself: PySpark imports every top-level module named ``pyspark_*``.

If one of them raises, all Python data sources of that Spark are lost, so this one never raises. If the format
cannot be imported, a source in its place gives the reason when it is used.
"""

from __future__ import annotations

from typing import Any

__all__ = ["DefaultSource"]

try:
    from django_rmq.spark.source import RmqDataSource as DefaultSource
except Exception as error:  # noqa: BLE001 - whatever is missing is missed when the format is asked for, not before
    reason = f"{type(error).__name__}: {error}"
    try:
        from pyspark.sql.datasource import DataSource
    except Exception:  # noqa: BLE001 - without PySpark, or before 4.0, nobody asks for a format
        __all__ = []
    else:

        class DefaultSource(DataSource):  # type: ignore[no-redef]
            """Gives the reason why the format is unavailable."""

            @classmethod
            def name(cls) -> str:
                return "rmq"

            def __init__(self, options: Any) -> None:
                raise ImportError(f"format rmq is installed, but cannot be imported: {reason}")
