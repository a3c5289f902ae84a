"""Batch read: reads topics without changing anything.

The driver counts and groups slots into tasks. A task pages by a cursor of (score, member), so that every
entry that is present throughout is read exactly once, whatever changes meanwhile. If only members and scores
are requested, ``paging`` reads them without scripts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from django_rmq.core.calls import looking
from django_rmq.core.calls.walk import walk
from django_rmq.core.words.answers import Counts, Entry
from django_rmq.core.words.envelopes import decode_envelope
from django_rmq.core.words.failures import Death, FailureRecord
from django_rmq.core.words.topics import Topic
from django_rmq.spark.connection import broker_of, topic_of
from django_rmq.spark.options import Options
from django_rmq.spark.paging import LiveRows, narrow_batch
from django_rmq.spark.patience import Patience
from django_rmq.spark.versions import arrow_schema

PAGE = 1_000
PAGE_BYTES = 4_194_304


class Piece(NamedTuple):
    """A part of a task: one state of one slot."""

    topic: Topic
    slot: int
    queue: str


class Task(InputPartition):
    """The content of one task."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(len(pieces))
        self.pieces = list(pieces)


def grouped(sizes: Sequence[int], tasks: int) -> list[list[int]]:
    """Return indexes in at most ``tasks`` groups of about the same size, largest first into the emptiest."""
    groups: list[list[int]] = [[] for _ in range(max(1, tasks))]
    filled = [0] * len(groups)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        smallest = min(range(len(groups)), key=filled.__getitem__)
        groups[smallest].append(index)
        filled[smallest] += sizes[index]
    return [group for group in groups if group]


class Reader(DataSourceReader):
    """Reads messages that are waiting, resting, in flight, claimed or dead."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._queues = options.queues()
        self._topics = options.topics()
        self._low, self._high = options.bounds()
        options.tasks(0)
        self._metadata = options.flag("includeMetadata", default=False)
        self._patience = Patience(options.patience, f"topic {', '.join(self._topics)}")

    def partitions(self) -> list[InputPartition]:
        return self._patience(self._tasks)

    def _tasks(self) -> list[InputPartition]:
        broker = broker_of(self._options)
        definitions = broker.definitions()
        pieces: list[Piece] = []
        sizes: list[int] = []
        for name in self._topics:
            topic = topic_of(name, definitions.of(name))
            slots = self._options.slots(topic.slots)
            asked = [looking.count(topic, slot) for slot in slots]
            for slot, counts in zip(slots, walk(broker, asked), strict=True):
                for queue in self._queues:
                    size = _size(counts, queue)
                    if size:
                        pieces.append(Piece(topic, slot, queue))
                        sizes.append(size)
        tasks = min(len(pieces), self._options.tasks(sum(sizes)))
        return [Task([pieces[i] for i in group]) for group in grouped(sizes, tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # If there is nothing to read, Spark makes a partition of its own.
        if not isinstance(partition, Task):
            return
        schema = arrow_schema(self._schema)
        broker = broker_of(self._options)
        for topic, slot, queue in partition.pieces:
            if not topic.keyed and not self._metadata:
                live = LiveRows(broker, self._patience, topic, slot, queue, self._low, self._high)
                for rows in live.pages():
                    if rows:
                        yield narrow_batch(schema, topic.name, slot, rows[::2], rows[1::2])
                continue
            cursor: tuple[str, bytes] | None = None
            while True:
                call = looking.peek(
                    topic,
                    slot,
                    queue,
                    after=cursor,
                    limit=PAGE,
                    min_score=self._low,
                    max_score=self._high,
                    max_bytes=PAGE_BYTES,
                )
                page = self._patience(partial(broker.run, call))
                if page.entries:
                    yield self._batch(schema, topic, slot, queue, page.entries)
                cursor = page.cursor
                if cursor is None:
                    break

    def _batch(
        self, schema: pa.Schema, topic: Topic, slot: int, queue: str, entries: Sequence[Entry]
    ) -> pa.RecordBatch:
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
        if self._metadata:
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
                pa.array(
                    [_number(one.score) if isinstance(one, Death) else None for one in known], pa.float64()
                ),
                pa.array([entry.member if topic.keyed else None for entry in entries], pa.binary()),
                pa.array(envelopes if topic.keyed else [None] * n, pa.binary()),
            ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)


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


def _size(counts: Counts, queue: str) -> int:
    return counts.claimed if queue == "claim" else int(getattr(counts, queue))


def _bodies(topic: Topic, entries: Sequence[Entry], envelopes: Sequence[bytes | None]) -> list[bytes]:
    if not topic.keyed:
        return [entry.member for entry in entries]
    return [
        entry.member if envelope is None else decode_envelope(envelope).body
        for entry, envelope in zip(entries, envelopes, strict=True)
    ]


def _told(topic: Topic, queue: str, entry: Entry) -> tuple[float | None, int | None, float | None]:
    """Return when it is due (ms), the retries left to its delivery, and until when its delivery is valid (ms)."""
    score = entry.score
    if queue == "prepare":
        return None, int(score) % 1000, (score // 1000 + topic.timeout + 1) * 1000
    if queue == "retry":
        return math.floor(score), max(0, round(score % 1 * 1024) - 1), None
    if queue == "dead":
        return None, None, None
    if topic.is_fifo:
        failure = _failure(queue, entry)
        return (
            score if math.isinf(score) else math.floor(score),
            max(0, topic.max_retries - (failure.times if failure else 0)),
            None,
        )
    floor = max(16, topic.max_retries) if topic.is_priority else 999
    is_retry = score <= floor or (topic.is_priority and score % 1 != 0)
    left = topic.max_retries
    if is_retry:
        q = (
            round(score % 1 * 1024)
            if topic.is_priority and score > floor
            else math.floor(max(0.0, min(score, 1e3)))
        )
        left = max(0, min(q - 1, topic.max_retries))
    return (None if topic.is_priority or is_retry else score), left, None


def _instants(ms: Sequence[float | None]) -> Any:
    # Foreign scores may be outside the range of a timestamp.
    micros = [None if at is None or not 0 <= at <= 253_402_300_799_999 else int(at * 1000) for at in ms]
    return pa.array(micros, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
