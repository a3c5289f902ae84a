"""Write: rows become messages by the same rules as a send from Python.

At least once: a task that is tried again sends again, and messages that still wait merge. ``value`` is the
fast path; a topic whose slots follow from the body, a key or an explicit basis requires reading each row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from django_rmq.core.calls import people
from django_rmq.core.producer.checks import check_time_range
from django_rmq.core.producer.sending import Producer
from django_rmq.core.words.bodies import encode_json
from django_rmq.core.words.bounds import MAX_PRIORITY
from django_rmq.core.words.topics import TopicType
from django_rmq.exceptions import ConfigurationError, InvalidMessage, RmqError, TopicFull
from django_rmq.spark.connection import broker_of, topic_of
from django_rmq.spark.options import Options
from django_rmq.spark.packing import Bulk
from django_rmq.spark.patience import Patience

OPTION_COLUMNS = (
    "priority",
    "fixed_time",
    "time_range",
    "delay",
    "slot_basis",
    "key",
    "max_retries",
    "timeout",
)
CHUNK, PER_SLOT, MOST = 10_000, 500, 64_000
"""The number of rows in hand: the minimum, the number for each slot, and the maximum."""

CHUNK_BYTES = 8_388_608
"""The approximate number of bytes after which no more rows are collected."""


@dataclass
class Written(WriterCommitMessage):
    """The results of a task: status -> number of messages."""

    counts: dict[str, int]


def gathered(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yield combined batches of at least ``rows`` rows, or of many bytes; Spark passes 10,000 rows at a time."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(each.num_rows for each in held) >= rows or sum(each.nbytes for each in held) >= CHUNK_BYTES:
            yield from _whole(held)
            held = []
    yield from _whole(held)


def _whole(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if len(batches) < 2:
        return batches
    found: list[pa.RecordBatch] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return found


class Sending:
    """The common part of a batch write and a stream write."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        self._options = options
        local: dict[str, Any] = {}
        if options.text("timeRange") is not None:
            local["time_range_ms"] = check_time_range(options.whole("timeRange", 0))
        if options.text("maxBody") is not None:
            local["max_body"] = options.whole("maxBody", 0, low=1)
        if options.text("maxBacklog") is not None:
            local["max_backlog"] = options.whole("maxBacklog", 0, low=1)
        broker = broker_of(options)
        name = options.topic()
        self._patience = Patience(options.patience, f"topic {name}")
        self._topic = topic_of(name, self._patience(broker.definitions).of(name), **local)
        self._canonical = options.flag("canonical", default=True)
        self._body_columns = options.names("bodyColumns")
        columns = set(schema.fieldNames())
        wanted = set(self._body_columns) or {"value"}
        missing = wanted - columns
        if missing:
            raise ConfigurationError(
                f"a write to topic {name} needs the column {', '.join(sorted(missing))}; there are {', '.join(sorted(columns))}"
            )
        self._columns = [column for column in OPTION_COLUMNS if column in columns]
        unused = columns - wanted - set(self._columns)
        if unused:
            raise ConfigurationError(
                f"a write to topic {name} cannot use the columns {', '.join(sorted(unused))}: name them "
                "in bodyColumns, or drop them"
            )
        self._check_columns()
        if overwrite:
            if not options.flag("allowOverwrite", default=False):
                raise ConfigurationError(
                    'mode("overwrite") would purge the waiting messages of the topic: use mode("append"), '
                    "or set the option allowOverwrite to true"
                )
            for slot in range(self._topic.slots):
                while self._patience(partial(broker.run, people.purge(self._topic, slot, "store"))):
                    pass

    def _check_columns(self) -> None:
        """Raise ``ConfigurationError`` if a column or an option is missing that the topic needs."""
        topic, columns = self._topic, self._columns
        needed = {TopicType.PRIORITY: "priority", TopicType.FIXED_TIME: "fixed_time"}.get(topic.type)
        if needed is not None and needed not in columns:
            raise ConfigurationError(
                f"topic {topic.name} has the type {topic.type.value}: a write needs the column {needed}"
            )
        merges = topic.type is TopicType.RANGE_MERGE
        if merges and topic.time_range_ms is None and "time_range" not in columns:
            raise ConfigurationError(
                f"topic {topic.name} has the type range_merge: set the option timeRange (ms), or add a column time_range"
            )

    def send(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        producer = Producer(broker_of(self._options))
        bulk = Bulk(producer, self._topic, self._patience)
        counts: Counter[str] = Counter()
        try:
            rows = min(MOST, max(CHUNK, PER_SLOT * self._topic.slots))
            for whole in gathered(iterator, rows):
                # Spark passes 10,000 rows, however large they are.
                few = max(1, CHUNK_BYTES * whole.num_rows // max(1, whole.nbytes))
                step = min(rows, few)
                for first in range(0, whole.num_rows, step):
                    counts.update(self._send_chunk(producer, bulk, whole.slice(first, step)))
        finally:
            bulk.finish()
        counts.update(bulk.counts)
        if counts["refused"]:
            raise TopicFull(
                f"topic {self._topic.name} is full: {counts['refused']} of {counts.total()} messages were refused"
            )
        return Written(dict(counts))

    def _send_chunk(self, producer: Producer, bulk: Bulk, batch: pa.RecordBatch) -> Counter[str]:
        topic = self._topic
        bodies = self._bodies(batch)
        if self._is_plain(batch, bodies):
            priorities = batch.column("priority") if self._columns else None
            bulk.send(bodies, pa.array(bodies, pa.binary()), priorities)
            return Counter()
        # What was sent before must not be overtaken.
        bulk.finish()
        # Values that are encoded already are sent as bytes.
        raw = replace(topic, body="bytes")
        constant = not self._columns or (self._columns == ["priority"] and _is_constant(batch, "priority"))
        if constant and not topic.keyed and topic.slot_basis is None:
            options = {"priority": batch.column("priority")[0].as_py()} if self._columns else {}
            send = partial(producer.send_bodies, raw, bodies, **options)
            return self._refusing(batch, lambda: self._patience(send).counts())
        decode = json.loads if topic.slot_basis is not None else None
        built = []
        columns = {name: _values(batch, name) for name in self._columns}
        for row, body in enumerate(bodies):
            given = {name: column[row] for name, column in columns.items() if column[row] is not None}
            try:
                if decode is not None:
                    built.append(producer.build(topic, decode(body), **given))
                else:
                    built.append(producer.build(raw, body, **given))
            except (RmqError, ValueError) as error:
                raise InvalidMessage(f"row {_shown(batch, row)}: {error}") from None
        return Counter(result.status for result in self._patience(lambda: producer.send(built)))

    def _is_plain(self, batch: pa.RecordBatch, bodies: list[bytes]) -> bool:
        """Return whether these rows can be sent as they are: none has to be examined, and none is invalid."""
        topic = self._topic
        if topic.keyed or topic.slot_basis is not None or self._options.is_cluster or not bodies:
            return False
        if not all(bodies) or max(map(len, bodies)) > topic.max_body:
            return False
        if topic.type is TopicType.RANGE_MERGE:
            return not self._columns and topic.time_range_ms is not None
        if topic.type is not TopicType.PRIORITY or self._columns != ["priority"]:
            return False
        column = batch.column("priority")
        if column.null_count or not pa.types.is_integer(column.type):
            return False
        found = pc.min_max(column).as_py()
        return bool(topic.min_priority <= found["min"] and found["max"] <= MAX_PRIORITY)

    @staticmethod
    def _refusing(batch: pa.RecordBatch, send: Callable[[], Counter[str]]) -> Counter[str]:
        try:
            return send()
        except InvalidMessage as error:
            # The producer names the row by its number.
            number = str(error).removeprefix("item ").partition(":")[0]
            row = int(number) if number.isdigit() else 0
            raise InvalidMessage(f"row {_shown(batch, row)}: {error}") from None

    def _bodies(self, batch: pa.RecordBatch) -> list[bytes]:
        topic = self._topic
        if self._body_columns:
            rows = batch.select(self._body_columns).to_pylist()
            return [self._encoded(batch, row, encode_json, body) for row, body in enumerate(rows)]
        column = batch.column("value")
        if column.null_count:
            row = next(i for i, value in enumerate(column) if not value.is_valid)
            raise InvalidMessage(f"row {_shown(batch, row)}: value is null")
        values: list[bytes] = column.cast(pa.binary()).to_pylist()
        if topic.body != "bytes" and not pa.types.is_string(column.type):
            try:
                column.cast(pa.string())
            except pa.ArrowInvalid:
                for row, value in enumerate(values):
                    self._encoded(batch, row, lambda raw: raw.decode().encode(), value)
        if topic.body == "json" and self._canonical:
            return [
                self._encoded(batch, row, lambda raw: encode_json(json.loads(raw)), value)
                for row, value in enumerate(values)
            ]
        return values

    @staticmethod
    def _encoded(batch: pa.RecordBatch, row: int, encode: Callable[[Any], bytes], value: Any) -> bytes:
        try:
            return encode(value)
        except (RmqError, ValueError) as error:
            raise InvalidMessage(f"row {_shown(batch, row)}: {error}") from None


def _is_constant(batch: pa.RecordBatch, name: str) -> bool:
    column = batch.column(name)
    return column.null_count == 0 and len(column.unique()) == 1


def _values(batch: pa.RecordBatch, name: str) -> list[Any]:
    """Return a column as values for ``Producer.build``; a timestamp without a zone is in UTC, as in Arrow."""
    column = batch.column(name)
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", tz="UTC"))
    found: list[Any] = column.to_pylist()
    return found


def _shown(batch: pa.RecordBatch, row: int) -> str:
    found: Mapping[str, Any] = batch.slice(row, 1).to_pylist()[0]
    text = repr(found)
    return text if len(text) <= 300 else f"{text[:297]}..."


class Writer(Sending, DataSourceArrowWriter):
    """``df.write``: sends each row once, and again if a task is tried again."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self.send(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: the messages are already sent."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: sent messages stay, and merge if they are sent again."""
