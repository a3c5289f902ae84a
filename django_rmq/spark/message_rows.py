"""Messages as rows with all that is known of them: how often they failed, why, when they are due."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DoubleType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from django_rmq.core.model.failure_records import Death, FailureRecord
from django_rmq.core.model.message_content import content_of, raw_body
from django_rmq.core.model.replies import Entry
from django_rmq.core.model.retry_scores import is_retry, retries_left
from django_rmq.core.model.topic import Topic

COLUMNS = StructType(
    [
        StructField("value", BinaryType()),
        StructField("score", DoubleType()),
        StructField("topic", StringType()),
        StructField("slot", IntegerType()),
    ]
)
"""The columns of each frame that is read from a topic."""

METADATA = StructType(
    [
        *COLUMNS.fields,
        StructField("queue", StringType()),
        StructField("due", TimestampType()),
        StructField("retries", IntegerType()),
        StructField("deadline", TimestampType()),
        StructField("error", StringType()),
        StructField("died_at", TimestampType()),
        StructField("reason", StringType()),
        StructField("failures", IntegerType()),
        StructField("scored", DoubleType()),
        StructField("key", BinaryType()),
        StructField("envelope", BinaryType()),
        StructField("headers", MapType(StringType(), StringType())),
    ]
)
"""The columns with ``includeMetadata``."""


def entry_batch(
    schema: pa.Schema, topic: Topic, slot: int, queue: str, entries: Sequence[Entry]
) -> pa.RecordBatch:
    """Return entries of a state as a batch; ``schema``: with the columns of ``includeMetadata``, or without them."""
    n = len(entries)
    deaths = [_death(entry) for entry in entries] if queue == "dead" else []
    envelopes = (
        [death.envelope if death else None for death in deaths]
        if deaths
        else [entry.envelope for entry in entries]
    )
    columns = [
        pa.array(_bodies(topic, entries, envelopes), pa.binary()),
        pa.array([entry.score for entry in entries], pa.float64()),
        pa.array([topic.name] * n, pa.string()),
        pa.array([slot] * n, pa.int32()),
    ]
    if len(schema) > len(columns):
        rows = [_told(topic, queue, entry) for entry in entries]
        known: Sequence[Death | FailureRecord | None] = deaths or [
            _failure(queue, entry) for entry in entries
        ]
        columns += [
            pa.array([queue] * n, pa.string()),
            _instants([row[0] for row in rows]),
            pa.array([row[1] for row in rows], pa.int32()),
            _instants([row[2] for row in rows]),
            pa.array([one and one.error.decode(errors="replace") for one in known], pa.string()),
            _instants([entry.score if queue == "dead" else None for entry in entries]),
            pa.array([one and _reason(one) for one in known], pa.string()),
            pa.array([one and one.times for one in known], pa.int32()),
            pa.array([_number(one.score) if isinstance(one, Death) else None for one in known], pa.float64()),
            pa.array([entry.member if topic.keyed else None for entry in entries], pa.binary()),
            pa.array(envelopes if topic.keyed else [None] * n, pa.binary()),
            pa.array(map(_headers, repeat(topic), entries, envelopes), pa.map_(pa.string(), pa.string())),
        ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _headers(topic: Topic, entry: Entry, envelope: bytes | None) -> list[tuple[str, str]] | None:
    headers = content_of(topic, entry.member, envelope).headers
    return None if headers is None else list(headers.items())


def _death(entry: Entry) -> Death | None:
    return Death.parse(entry.record) if entry.record else None


def _failure(queue: str, entry: Entry) -> FailureRecord | None:
    return FailureRecord.parse(entry.record) if entry.record and queue != "prepare" else None


def _reason(known: Death | FailureRecord) -> str:
    return known.reason if isinstance(known, Death) else known.kind


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _bodies(topic: Topic, entries: Sequence[Entry], envelopes: Sequence[bytes | None]) -> list[bytes]:
    if not topic.keyed:
        return [entry.member for entry in entries]
    return list(map(raw_body, repeat(topic), (entry.member for entry in entries), envelopes))


def _told(topic: Topic, queue: str, entry: Entry) -> tuple[float | None, int | None, float | None]:
    """Return when it is due (ms), the retries left to its delivery, and until when its delivery is valid (ms)."""
    score = entry.score
    if queue == "dead":
        return None, None, None
    own = content_of(topic, entry.member, entry.envelope).max_retries
    failure = _failure(queue, entry)
    left = retries_left(topic, queue, score, failure.times if failure else 0, own)
    left = topic.retries_of(own) if left is None else left
    if queue == "prepare":
        return None, left, (score // 1000 + topic.timeout + 1) * 1000
    if queue != "retry" and (topic.is_priority or is_retry(topic, score)):
        return None, left, None
    has_fraction = (queue == "retry" or topic.is_fifo) and math.isfinite(score)
    return math.floor(score) if has_fraction else score, left, None


def _instants(ms: Sequence[float | None]) -> Any:
    # Foreign scores may be outside the range of a timestamp.
    micros = [None if at is None or not 0 <= at <= 253_402_300_799_999 else int(at * 1000) for at in ms]
    return pa.array(micros, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
