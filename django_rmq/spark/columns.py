"""Rows as columns: whether they can be sent as they are, and what they become.

The messages are those of ``Producer.build``, without Python code for each option of each row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from django_rmq.core.producer.checks import check_stored_basis
from django_rmq.core.producer.placing import Outgoing
from django_rmq.core.words.bounds import MAX_DURATION_MS, MAX_INSTANT_MS, MAX_KEY_BYTES, MAX_PRIORITY
from django_rmq.core.words.envelopes import Envelope, basis_bytes, encode_envelope
from django_rmq.core.words.topics import Topic, TopicType
from django_rmq.exceptions import InvalidMessage
from django_rmq.spark.packing import Rows

_SCORED = {
    TopicType.RANGE_MERGE: "time_range",
    TopicType.PRIORITY: "priority",
    TopicType.FIXED_TIME: "fixed_time",
}
"""The column that says when a message is due, or how urgent it is."""


def rows_of(
    topic: Topic,
    columns: Sequence[str],
    batch: pa.RecordBatch,
    bodies: list[bytes],
    parsed: list[Any] | None,
    build: Callable[[list[int]], list[Outgoing]],
) -> Rows | None:
    """Return rows that can be sent as columns. None: each has to be looked at, or one is invalid.

    ``columns``: those of the options. ``bodies`` are encoded; ``parsed``: the same as plain data, if SLOT_BASIS needs it.
    """
    given, scored = set(columns), _SCORED.get(topic.type)
    if (
        topic.is_fifo
        or topic.origin
        or topic.accumulate
        or given - {"key", "slot_basis", scored}
        or not bodies
    ):
        return None
    if topic.keyed != ("key" in given) or not all(bodies) or max(map(len, bodies)) > topic.max_body:
        return None
    members = _keys(batch.column("key")) if topic.keyed else bodies
    column = batch.column(scored) if scored in given else None
    when = None if column is None else _numbers(topic, column)
    if members is None or (column is not None and when is None):
        return None
    scores, ranges = (None, when) if topic.type is TopicType.RANGE_MERGE else (when, None)
    if ranges is not None and len(set(members)) < len(members):
        return None
    if topic.slot_basis is None and "slot_basis" not in given:
        return Rows(members, build, scores, ranges, _enveloped(bodies) if topic.keyed else None)
    try:
        bases = _bases(topic, batch, given, parsed)
        envelopes = _enveloped(bodies, bases) if topic.keyed and bases is not None else None
    except InvalidMessage:
        return None
    return None if bases is None else Rows(members, build, scores, ranges, envelopes, bases)


def _enveloped(raws: Sequence[bytes], bases: Sequence[bytes] | None = None) -> list[bytes]:
    """Return the envelopes of messages without options, with their slot bases if these are given.

    Raises ``InvalidMessage`` for a basis that a keyed message cannot have.
    """
    if bases is None:
        head = encode_envelope(Envelope(b""))
        return [head + raw for raw in raws]
    heads = {
        basis: encode_envelope(Envelope(b"", slot_basis=check_stored_basis(basis))) for basis in set(bases)
    }
    return [heads[basis] + raw for basis, raw in zip(bases, raws, strict=True)]


def _bases(
    topic: Topic, batch: pa.RecordBatch, given: set[str], parsed: list[Any] | None
) -> list[bytes] | None:
    """Return the slot basis of each row. None: some have none. Raises ``InvalidMessage`` for one that is invalid."""
    if topic.slot_basis is None:
        is_whole = not batch.column("slot_basis").null_count
        return list(map(basis_bytes, values(batch, "slot_basis"))) if is_whole else None
    if parsed is None or "slot_basis" in given:
        return None
    try:
        return [basis_bytes(body[topic.slot_basis]) for body in parsed]
    except (KeyError, TypeError):
        return None


def _numbers(topic: Topic, column: pa.Array) -> pa.Array | None:
    """Return the column that says when messages are due, or how urgent they are. None: one is missing or invalid."""
    if topic.type is TopicType.RANGE_MERGE:
        return _whole_numbers(column, 1, MAX_DURATION_MS)
    if topic.type is TopicType.PRIORITY:
        return _whole_numbers(column, topic.min_priority, MAX_PRIORITY)
    soon = max(999, int(time.time() * 1000)) + 1
    return _whole_numbers(_instants(column), soon, MAX_INSTANT_MS)


def _keys(column: pa.Array) -> list[bytes] | None:
    """Return keys as members. None: one is missing or invalid."""
    if column.null_count or not pa.types.is_string(column.type):
        return None
    sizes = pc.min_max(pc.binary_length(column)).as_py()
    if not 0 < sizes["min"] <= sizes["max"] <= MAX_KEY_BYTES:
        return None
    found: list[bytes] = column.cast(pa.binary()).to_pylist()
    return found


def _whole_numbers(column: pa.Array, least: int, most: int) -> pa.Array | None:
    """Return a column of whole numbers within bounds. None: it is something else, or one is missing or out of bounds."""
    if column.null_count or not pa.types.is_integer(column.type):
        return None
    found = pc.min_max(column).as_py()
    return column if least <= found["min"] and found["max"] <= most else None


def _instants(column: pa.Array) -> pa.Array:
    """Return a column of timestamps in ms, rounded up; any other column as it is."""
    if not pa.types.is_timestamp(column.type):
        return column
    us = column.cast(pa.timestamp("us")).cast(pa.int64())
    # Division rounds towards 0, so instants before 1970 come out too late; they are invalid in any case.
    return pc.divide(pc.add(us, 999), 1000)


def values(batch: pa.RecordBatch, name: str) -> list[Any]:
    """Return a column as values for ``Producer.build``; a timestamp without a zone is in UTC, as in Arrow."""
    column = batch.column(name)
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", tz="UTC"))
    found: list[Any] = column.to_pylist()
    return found
