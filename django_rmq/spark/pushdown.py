"""Batch read with filters: what a query asks for narrows what is read from Redis.

Spark refuses a reader with ``pushFilters`` unless ``spark.sql.python.filterPushdown.enabled`` is set, so this is an
option. Every filter is returned: Spark applies all of them to the rows that are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from django_rmq.spark.reader import Reader, ReadTask
from django_rmq.spark.source_options import SourceOptions
from django_rmq.spark.versions import too_old

try:
    from pyspark.sql.datasource import (
        EqualTo,
        Filter,
        GreaterThan,
        GreaterThanOrEqual,
        In,
        LessThan,
        LessThanOrEqual,
    )
except ImportError:
    raise too_old("pushed filters", "4.1") from None


class PushdownReader(Reader):
    """Reads the topics, slots, queues and scores that the filters of a query leave, and some more."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._slots: set[Any] | None = None
        """The slots that may have rows. None: all."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        for each in filters:
            match each:
                case EqualTo(("score",), value):
                    self._between(value, value)
                case GreaterThan(("score",), value) | GreaterThanOrEqual(("score",), value):
                    self._between(value, math.inf)
                case LessThan(("score",), value) | LessThanOrEqual(("score",), value):
                    self._between(-math.inf, value)
                case EqualTo((column,), value):
                    self._among(column, (value,))
                case In((column,), values):
                    self._among(column, values)
        return filters

    def _between(self, low: float, high: float) -> None:
        self._low, self._high = max(self._low, float(low)), min(self._high, float(high))

    def _among(self, column: str, values: Sequence[Any]) -> None:
        if column == "topic":
            self._topics = [topic for topic in self._topics if topic in values]
        elif column == "queue":
            self._queues = [queue for queue in self._queues if queue in values]
        elif column == "slot":
            self._slots = set(values) if self._slots is None else self._slots.intersection(values)

    def partitions(self) -> list[InputPartition]:
        """Return the tasks without the slots that have no such rows."""
        found = super().partitions() if self._low <= self._high else []
        if self._slots is None:
            return found
        pieces = [
            [one for one in task.pieces if one.slot in self._slots]
            for task in found
            if isinstance(task, ReadTask)
        ]
        return [ReadTask(left) for left in pieces if left]


__all__ = ["PushdownReader"]
