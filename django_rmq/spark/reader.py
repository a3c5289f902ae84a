"""Batch read: reads topics without changing anything, as rows of Arrow.

The slots are divided between tasks, the partitions of the frame. ``task_count`` decides how many tasks there are, also for a
stream; ``grouped`` decides which slots a task reads.

A task reads every entry exactly once that is present throughout, whatever changes meanwhile, because it pages by a cursor of
(score, member); a re-slotting, which moves entries between slots, fails it. Members and scores alone are read by rank, many per
round trip, which is faster. Ranks change, except in a sealed claim, so each page begins with the row before it. If that row is
not after what has been read, an earlier entry was removed, and the place is looked up by (score, member).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

import pyarrow as pa
import pyspark
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import Broker, walk
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.envelope import content_of, raw_body
from django_rmq.core.model.replies import Death, Entry, FailureRecord, read_record
from django_rmq.core.model.scores import is_retry, retries_left
from django_rmq.core.model.topic import Definition, Topic, slot_counts
from django_rmq.exceptions import ConfigurationError, SlotMoved
from django_rmq.spark.broker_connection import RetryPolicy, broker_of, topic_of
from django_rmq.spark.source_options import SourceOptions

ARROW = {
    "binary": pa.binary(),
    "double": pa.float64(),
    "int": pa.int32(),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
"""Spark's name of a type -> the type of Arrow in which Spark expects its column."""


def too_old(what: str, needed: str) -> ConfigurationError:
    """Return the error about something that the installed PySpark lacks."""
    return ConfigurationError(f"{what} need PySpark {needed}, this is {pyspark.__version__}")


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the schema of Arrow for one of Spark. PySpark has a function for it, with other arguments in each version."""
    return pa.schema([(field.name, ARROW[field.dataType.simpleString()]) for field in schema.fields])


def _columns(**types: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


_BYTES, _TEXT, _WHOLE, _NUMBER, _TIME = (
    BinaryType(),
    StringType(),
    IntegerType(),
    DoubleType(),
    TimestampType(),
)

COLUMNS = _columns(value=_BYTES, score=_NUMBER, topic=_TEXT, slot=_WHOLE)
"""The columns of each frame that is read from a topic."""

_MORE = _columns(
    queue=_TEXT,
    due=_TIME,
    retries=_WHOLE,
    deadline=_TIME,
    error=_TEXT,
    died_at=_TIME,
    reason=_TEXT,
    failures=_WHOLE,
    scored=_NUMBER,
    key=_BYTES,
    envelope=_BYTES,
    headers=MapType(_TEXT, _TEXT),
)
METADATA = StructType([*COLUMNS.fields, *_MORE.fields])
"""The columns with ``includeMetadata``."""


def entry_batch(
    schema: pa.Schema, topic: Topic, slot: int, queue: str, entries: Sequence[Entry]
) -> pa.RecordBatch:
    """Return entries of a state as a batch; ``schema``: with the columns of ``includeMetadata``, or without them."""
    n = len(entries)
    deaths = [read_record(Death.parse, entry.record) for entry in entries if queue == "dead"]
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
        rows = [_due_retries_and_lease(topic, queue, entry) for entry in entries]
        failures: Sequence[Death | FailureRecord | None] = deaths or [
            _failure(queue, entry) for entry in entries
        ]
        columns += [
            pa.array([queue] * n, pa.string()),
            _instants([row[0] for row in rows]),
            pa.array([row[1] for row in rows], pa.int32()),
            _instants([row[2] for row in rows]),
            pa.array([one and one.error.decode(errors="replace") for one in failures], pa.string()),
            _instants([entry.score if queue == "dead" else None for entry in entries]),
            pa.array(
                [one and (one.reason if isinstance(one, Death) else one.kind) for one in failures],
                pa.string(),
            ),
            pa.array([one and one.times for one in failures], pa.int32()),
            pa.array([one.first_score if isinstance(one, Death) else None for one in failures], pa.float64()),
            pa.array([entry.member if topic.keyed else None for entry in entries], pa.binary()),
            pa.array(envelopes if topic.keyed else [None] * n, pa.binary()),
            pa.array(map(_headers, repeat(topic), entries, envelopes), pa.map_(pa.string(), pa.string())),
        ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _headers(topic: Topic, entry: Entry, envelope: bytes | None) -> list[tuple[str, str]] | None:
    headers = content_of(topic, entry.member, envelope).headers
    return None if headers is None else list(headers.items())


def _failure(queue: str, entry: Entry) -> FailureRecord | None:
    return None if queue == "prepare" else read_record(FailureRecord.parse, entry.record)


def _bodies(topic: Topic, entries: Sequence[Entry], envelopes: Sequence[bytes | None]) -> list[bytes]:
    if not topic.keyed:
        return [entry.member for entry in entries]
    return list(map(raw_body, repeat(topic), (entry.member for entry in entries), envelopes))


def _due_retries_and_lease(
    topic: Topic, queue: str, entry: Entry
) -> tuple[float | None, int | None, float | None]:
    """Return when it is due (ms), the retries left to its delivery, and until when its delivery is valid (ms)."""
    score = entry.score
    if queue == "dead":
        return None, None, None
    own = content_of(topic, entry.member, entry.envelope).max_retries
    failure = _failure(queue, entry)
    retries = retries_left(topic, queue, score, failure.times if failure else 0, own)
    retries = topic.retries_of(own) if retries is None else retries
    if queue == "prepare":
        # The same rule is in lua/slot/_time_outs.lua, which says more of it.
        return None, retries, (score // 1000 + topic.timeout + 1) * 1000
    if queue != "retry" and (topic.is_priority or is_retry(topic, score)):
        return None, retries, None
    has_fraction = (queue == "retry" or topic.is_fifo) and math.isfinite(score)
    return math.floor(score) if has_fraction else score, retries, None


def _instants(ms: Sequence[float | None]) -> object:
    # Foreign scores may be outside the range of a timestamp.
    micros = [None if at is None or not 0 <= at <= 253_402_300_799_999 else int(at * 1000) for at in ms]
    return pa.array(micros, pa.int64()).cast(pa.timestamp("us", tz="UTC"))


FIRST_PAGE = 4
"""The number of rows requested before their size is known: a MiB of the largest."""

GROWTH = 16
"""A page has at most this many times the rows of the one before it: the next ones may be larger."""

MOST_ROWS = 5_000
PAGE_BYTES = 2_097_152
"""The approximate number of bytes in a page."""

SCRIPT_BYTES = 524_288
"""That number in a page from a script, which copies large messages more often than a command of Redis does."""

PAGES = 4
"""The number of pages requested in one round trip."""

SAMPLES, SAMPLED_ROWS = 32, 64
"""How many rows are read before a round trip, to see their size, and from which size of a page on."""

Rows = Sequence[bytes]
"""Member, score, member, ... as Redis writes them, in the order of the set."""


def fitting(
    rows: Rows,
    envelopes: Sequence[bytes | None] = (),
    most_bytes: int = PAGE_BYTES,
    most_rows: int | None = None,
) -> int:
    """Return how many rows like these make the next page; bodies of one topic have similar sizes."""
    size = sum(map(len, rows)) + sum(len(envelope or b"") for envelope in envelopes)
    n = len(rows) // 2
    most_rows = min(MOST_ROWS, GROWTH * n) if most_rows is None else most_rows
    return max(1, min(most_rows, most_bytes * n // max(1, size)))


def sampled_ranks(rank: int, size: int) -> range:
    """Return the ranks of some rows of the next round trip; none if its pages are small.

    Messages that are due at the same time are in the order of their bodies, and what was sent in one hour stands
    together. A page of thousands, which fits small messages, may therefore meet many large ones.
    """
    return range(rank, rank + PAGES * size, PAGES * size // SAMPLES) if size >= SAMPLED_ROWS else range(0)


def following(entries: Sequence[Entry]) -> int:
    """Return how many entries to request next from a script, which reads members before it looks at their size."""
    rows = [part for entry in entries for part in (entry.member, b"")]
    return min(BATCH, fitting(rows, [entry.envelope for entry in entries], SCRIPT_BYTES))


def narrow_batch(
    schema: pa.Schema, topic: str, slot: int, members: Sequence[bytes], scores: Rows
) -> pa.RecordBatch:
    """Return the batch of value, score, topic and slot."""
    n = len(members)
    # Redis writes scores as text; Arrow parses them all at once.
    if scores[0] == scores[-1]:
        numbers = pa.repeat(pa.scalar(float(scores[0])), n)
    else:
        numbers = pa.array(scores, pa.binary()).cast(pa.string()).cast(pa.float64())
    columns = [
        pa.array(members, pa.binary()),
        numbers,
        pa.repeat(pa.scalar(topic, pa.string()), n),
        pa.repeat(pa.scalar(slot, pa.int32()), n),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class RowPosition:
    """How far a live set has been read: up to (score, member), or up to the score if there is no member."""

    def __init__(self, score: float, member: bytes | None = None) -> None:
        self.score = score
        self.member = member

    def passed(self, rows: Rows) -> int:
        """Return how many of ``rows``, from the first on, are not after this place."""
        for at in range(0, len(rows), 2):
            score = float(rows[at + 1])
            if score > self.score:
                return at // 2
            if score == self.score and self.member is not None and rows[at] > self.member:
                return at // 2
        return len(rows) // 2


class LiveRows:
    """Reads one state of one slot between two scores: every entry that is present throughout, exactly once."""

    def __init__(
        self,
        broker: Broker,
        patience: RetryPolicy,
        topic: Topic,
        slot: int,
        state: str,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> None:
        self._broker = broker
        self._patience = patience
        self._where = (topic, slot, state)
        self._low = low
        self._high = high
        self._place: RowPosition | None = (
            None if low == -math.inf else RowPosition(math.nextafter(low, -math.inf))
        )
        self._rank: int | None = 0
        """The rank of the next row at the last read. None: unknown."""
        if self._place is not None:
            below = self._place.score
            self._rank = patience(lambda: broker.run(inspect.count_between(*self._where, max_score=below)))
        self._is_over = False

    def pages(self) -> Iterator[Rows]:
        """Yield rows until there are no more."""
        size, pages = FIRST_PAGE, 1
        while not self._is_over:
            rows: Rows = ()
            if self._rank is None:
                rows = self._read_by_script()
                yield rows
            else:
                for rows in self._trip(self._rank, size, pages):
                    yield rows
            if rows:
                size, pages = fitting(rows), PAGES

    def _trip(self, rank: int, size: int, pages: int) -> Iterator[Rows]:
        if samples := sampled_ranks(rank, size):
            calls = [inspect.rows(*self._where, at, at) for at in samples]
            parts = self._patience(lambda: list(walk(self._broker, calls)))
            size = fitting([part for rows in parts for part in rows], most_rows=size)
        ranks = range(rank, rank + pages * size, size)
        for first, rows in zip(ranks, self._patience(lambda: self._pages(ranks)), strict=True):
            passed = 0 if self._place is None else self._place.passed(rows)
            if first and not passed:
                self._rank = None
                return
            self._rank = first + size
            yield self._take(rows[2 * passed :], is_last=len(rows) // 2 < size + (first > 0))
            if self._is_over:
                return

    def _pages(self, ranks: range) -> list[Rows]:
        """Return the pages that begin at ``ranks``, each with the row before it."""
        calls = [inspect.rows(*self._where, max(0, first - 1), first + ranks.step - 1) for first in ranks]
        return [*walk(self._broker, calls, len(calls))]

    def _take(self, rows: Rows, *, is_last: bool) -> Rows:
        end = len(rows)
        while end and float(rows[end - 1]) > self._high:
            end -= 2
        self._is_over = is_last or end < len(rows)
        if end:
            self._place = RowPosition(float(rows[end - 1]), rows[end - 2])
        return rows[:end]

    def _read_by_script(self) -> Rows:
        """Return the entries after the place with a script, which is atomic; find the rank again."""
        after = None
        if self._place is not None and self._place.member is not None:
            after = (f"{self._place.score:.17g}", self._place.member)
        page = self._patience(
            lambda: self._broker.run(
                inspect.list_messages(
                    *self._where,
                    after=after,
                    limit=BATCH,
                    min_score=self._low,
                    max_score=self._high,
                    max_bytes=SCRIPT_BYTES,
                )
            )
        )
        rows: list[bytes] = []
        for entry in page.entries:
            rows += (entry.member, f"{entry.score:.17g}".encode())
        batches = self._take(rows, is_last=page.cursor is None)
        if not self._is_over:
            rank = self._patience(partial(self._broker.run, inspect.rank(*self._where, batches[-2])))
            self._rank = None if rank is None else rank + 1
        return batches


class RowRange(NamedTuple):
    """A part of a task: one state of one slot."""

    topic: Topic
    slot: int
    queue: str
    reslotting: int
    """The number of the topic's last re-slotting."""


def last_reslotting(name: str, definition: Definition) -> int:
    """Return the number of a topic's last re-slotting, 0 if there was none. Raises ``SlotMoved`` while one is under way."""
    if len(slot_counts(definition)) > 1:
        raise _moves(name)
    return int(definition.get("reslot", {}).get("number", 0))


def _moves(name: str) -> SlotMoved:
    return SlotMoved(
        f"topic {name} was re-slotted after the read was planned, or is at the moment: the read would miss messages that "
        "move, or have them twice. Load the frame again when the re-slotting has ended"
    )


class ReadTask(InputPartition):
    """The content of one task."""

    def __init__(self, pieces: Sequence[RowRange]) -> None:
        super().__init__(len(pieces))
        self.pieces = list(pieces)


def task_count(options: SourceOptions, messages: int) -> int:
    """Return in how many tasks, the partitions of a frame, this many messages are read."""
    return max(options.min_tasks, math.ceil(messages / options.messages_per_task))


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
        task_count(options, 0)
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
            reslotting = last_reslotting(name, definitions[name])
            slots = self._options.slots(topic.slots)
            calls = [inspect.count(topic, slot) for slot in slots]
            for slot, counts in zip(slots, walk(broker, calls), strict=True):
                for queue in self._queues:
                    size = counts.claimed if queue == "claim" else int(getattr(counts, queue))
                    if size:
                        pieces.append(RowRange(topic, slot, queue, reslotting))
                        sizes.append(size)
        tasks = min(len(pieces), task_count(self._options, sum(sizes)))
        return [ReadTask([pieces[i] for i in group]) for group in grouped(sizes, tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # If there is nothing to read, Spark makes a partition of its own.
        if not isinstance(partition, ReadTask):
            return
        schema = arrow_schema(self._schema)
        broker = broker_of(self._options)
        for topic, slot, queue, _ in partition.pieces:
            if not topic.keyed and not self._metadata:
                live = LiveRows(broker, self._patience, topic, slot, queue, self._low, self._high)
                for rows in live.pages():
                    if rows:
                        yield narrow_batch(schema, topic.name, slot, rows[::2], rows[1::2])
                continue
            cursor: tuple[str, bytes] | None = None
            size = FIRST_PAGE
            while True:
                call = inspect.list_messages(
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
        # What was read before a re-slotting began is right, so each task looks when it has read everything.
        definitions = self._patience(broker.definitions)
        for name, reslotting in {(piece.topic.name, piece.reslotting) for piece in partition.pieces}:
            definition = definitions.of(name)
            if definition is not None and last_reslotting(name, definition) != reslotting:
                raise _moves(name)
