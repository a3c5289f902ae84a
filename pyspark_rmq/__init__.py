"""Lets Spark find ``format("rmq")`` by itself: PySpark imports every top-level module named ``pyspark_*``.

One of them that raises would take every Python data source of that Spark with it, so this one never does.
"""

from __future__ import annotations

try:
    from django_rmq.spark.source import RmqDataSource as DefaultSource
except Exception:  # noqa: BLE001 - whatever is missing is missed when the format is asked for, not before
    __all__: list[str] = []
else:
    __all__ = ["DefaultSource"]
