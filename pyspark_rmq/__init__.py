"""Lets Spark find ``format("rmq")`` by itself: PySpark imports every top-level module named ``pyspark_*``.

If one of them raises, all Python data sources of that Spark are lost, so this one never raises.
"""

from __future__ import annotations

try:
    from django_rmq.spark.source import RmqDataSource as DefaultSource
except Exception:  # noqa: BLE001 - whatever is missing is missed when the format is asked for, not before
    __all__: list[str] = []
else:
    __all__ = ["DefaultSource"]
