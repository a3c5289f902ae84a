"""The columns of a write that are times: what Spark has, as the milliseconds of the core.

Durations are numbers of seconds, intervals, or text such as ``15m``. Instants are timestamps.
"""

from __future__ import annotations

from collections.abc import Collection
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from django_rmq.durations import AMBIGUOUS, InvalidDuration, milliseconds, parse_duration
from django_rmq.exceptions import InvalidMessage

MARGIN_MS = 1_000
"""How long a chunk may take from here to its check."""

WAITS = frozenset(["time_range", "delay"])
DURATIONS = WAITS | {"timeout"}
INSTANTS = frozenset(["fixed_time", "expires"])


def in_milliseconds(batch: pa.RecordBatch, options: Collection[str], now_ms: int | None) -> pa.RecordBatch:
    """Return the rows with the times among the ``options`` in ms, and ``timeout`` in seconds.

    ``now_ms``: by the server's clock, for a ``fixed_time`` that has passed, which becomes a moment from now: a batch
    that Spark repeats later has the times that it had, and would be refused each time. None: such times stay.

    Raises ``InvalidMessage`` for a value that is not a duration.
    """
    for name in options:
        column = batch.column(name)
        if name in DURATIONS:
            ms = _milliseconds(name, column)
            batch = _replaced(batch, name, ms if name in WAITS else pc.divide(ms.cast(pa.float64()), 1000))
        elif name in INSTANTS:
            instants = instants_ms(column)
            moves_up = now_ms is not None and name == "fixed_time"
            batch = _replaced(batch, name, _moved_up(instants, now_ms or 0) if moves_up else instants)
    return batch


def instants_ms(column: pa.Array) -> pa.Array:
    """Return timestamps in ms, rounded up; those without a zone are in UTC, as in Arrow."""
    us = column.cast(pa.timestamp("us")).cast(pa.int64())
    # Division rounds towards 0, so instants before 1970 come out too late; they are invalid in any case.
    return pc.divide(pc.add(us, 999), 1000)


def _moved_up(instants: pa.Array, now_ms: int) -> pa.Array:
    """Return instants with those that have passed set to a moment from now. What was meant in seconds stays wrong."""
    soon = now_ms + MARGIN_MS
    has_passed = pc.and_(pc.greater(instants, soon // 10), pc.less(instants, soon))
    return pc.if_else(has_passed, soon, instants)


def _milliseconds(name: str, column: pa.Array) -> pa.Array:
    if pa.types.is_duration(column.type):
        return pc.divide(column.cast(pa.duration("us")).cast(pa.int64()), 1000)
    if pa.types.is_integer(column.type) and _are_clear(column):
        return pc.multiply(column.cast(pa.int64()), 1000)
    found = []
    for value in column.to_pylist():
        given = float(value) if isinstance(value, Decimal) else value
        try:
            ms = None if given is None else milliseconds(parse_duration(given, is_short=name in WAITS))
        except InvalidDuration as error:
            what = f"column {name}: {name} must be {error.typed}, got {error.given}. {error.hint}"
            raise InvalidMessage(what.rstrip(". ")) from None
        found.append(ms)
    return pa.array(found, pa.int64())


def _are_clear(column: pa.Array) -> bool:
    """Return whether whole numbers can only be seconds, so that no value has to be looked at by itself."""
    bounds: dict[str, Any] = pc.min_max(column).as_py()
    return bounds["min"] is None or (bounds["min"] >= 0 and bounds["max"] < AMBIGUOUS)


def _replaced(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    found: pa.RecordBatch = batch.set_column(batch.schema.get_field_index(name), name, column)
    return found


__all__ = ["DURATIONS", "in_milliseconds", "instants_ms"]
