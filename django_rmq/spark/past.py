"""Times that have passed: a batch that Spark repeats later has the times that it had, and would be refused each time."""

from __future__ import annotations

import time

import pyarrow as pa
import pyarrow.compute as pc

MARGIN_MS = 1_000
"""How long a chunk may take from here to its check."""

COLUMN = "fixed_time"


def moved_up(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows, with each ``fixed_time`` that has passed set to a moment from now.

    What was meant in seconds stays wrong, and is refused.
    """
    column = batch.column(COLUMN)
    soon_ms = int(time.time() * 1000) + MARGIN_MS
    if pa.types.is_timestamp(column.type):
        instants = column.cast(pa.timestamp("us", column.type.tz))
        low, soon = (pa.scalar(at * 1000, instants.type) for at in (soon_ms // 10, soon_ms))
    elif pa.types.is_integer(column.type):
        instants = column.cast(pa.int64())
        low, soon = pa.scalar(soon_ms // 10), pa.scalar(soon_ms)
    else:
        return batch
    has_passed = pc.and_(pc.greater(instants, low), pc.less(instants, soon))
    found: pa.RecordBatch = batch.set_column(
        batch.schema.get_field_index(COLUMN), COLUMN, pc.if_else(has_passed, soon, instants)
    )
    return found
