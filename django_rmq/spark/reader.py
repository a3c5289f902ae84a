"""Batch read: reads topics without changing anything.

The driver counts and groups slots into tasks. A task pages by a cursor of (score, member), so that every
entry that is present throughout is read exactly once, whatever changes meanwhile. If only members and scores
are requested, ``row_pages`` reads them without scripts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from django_rmq.core.commands import inspect
from django_rmq.core.commands.inspect import walk
from django_rmq.core.model.replies import Counts
from django_rmq.core.model.topic import Topic
from django_rmq.spark.broker_connection import RetryPolicy, broker_of, topic_of
from django_rmq.spark.row_pages import (
    FIRST_PAGE,
    SCRIPT_BYTES,
    LiveRows,
    entry_batch,
    following,
    narrow_batch,
)
from django_rmq.spark.source_options import SourceOptions
from django_rmq.spark.versions import arrow_schema


class RowRange(NamedTuple):
    """A part of a task: one state of one slot."""

    topic: Topic
    slot: int
    queue: str


class ReadTask(InputPartition):
    """The content of one task."""

    def __init__(self, pieces: Sequence[RowRange]) -> None:
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

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._queues = options.queues()
        self._topics = options.topics()
        self._low, self._high = options.bounds()
        options.tasks(0)
        self._metadata = options.metadata
        self._patience = RetryPolicy(options.patience, f"topic {', '.join(self._topics)}")

    def partitions(self) -> list[InputPartition]:
        return self._patience(self._tasks)

    def _tasks(self) -> list[InputPartition]:
        broker = broker_of(self._options)
        definitions = broker.definitions()
        pieces: list[RowRange] = []
        sizes: list[int] = []
        for name in self._topics:
            topic = topic_of(name, definitions.of(name))
            slots = self._options.slots(topic.slots)
            asked = [inspect.count(topic, slot) for slot in slots]
            for slot, counts in zip(slots, walk(broker, asked), strict=True):
                for queue in self._queues:
                    size = _size(counts, queue)
                    if size:
                        pieces.append(RowRange(topic, slot, queue))
                        sizes.append(size)
        tasks = min(len(pieces), self._options.tasks(sum(sizes)))
        return [ReadTask([pieces[i] for i in group]) for group in grouped(sizes, tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # If there is nothing to read, Spark makes a partition of its own.
        if not isinstance(partition, ReadTask):
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
            size = FIRST_PAGE
            while True:
                call = inspect.peek(
                    topic,
                    slot,
                    queue,
                    after=cursor,
                    limit=size,
                    min_score=self._low,
                    max_score=self._high,
                    max_bytes=SCRIPT_BYTES,
                )
                page = self._patience(partial(broker.run, call))
                if page.entries:
                    yield entry_batch(schema, topic, slot, queue, page.entries)
                    size = following(page.entries)
                cursor = page.cursor
                if cursor is None:
                    break


def _size(counts: Counts, queue: str) -> int:
    return counts.claimed if queue == "claim" else int(getattr(counts, queue))
