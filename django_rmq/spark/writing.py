"""Write: rows become messages by the same rules as a send from Python.

At least once: a task that is tried again sends again, and messages that still wait merge. Rows are sent as
columns where they can be; fifo topics, and what has limits of its own, are built row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from django_rmq.core.calls import people
from django_rmq.core.producer.checks import check_time_range
from django_rmq.core.producer.placing import Outgoing
from django_rmq.core.producer.sending import Producer, takes_bodies
from django_rmq.core.words.bodies import decode_json, encode_decoded, encode_json, exact_json
from django_rmq.core.words.topics import TopicType
from django_rmq.exceptions import ConfigurationError, InvalidMessage, RmqError, TopicFull
from django_rmq.spark.canonical import canonical_rows, canonical_texts
from django_rmq.spark.columns import rows_of, values
from django_rmq.spark.connection import broker_of, topic_of
from django_rmq.spark.options import PAST_TIMES, Options
from django_rmq.spark.packing import Bulk
from django_rmq.spark.past import moved_up
from django_rmq.spark.patience import Patience

Value = TypeVar("Value")

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
        self._moves_up = self._topic.type is TopicType.FIXED_TIME and _moves_up(options)
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
        _check_texts(batch)
        batch = moved_up(batch) if self._moves_up else batch
        bodies, parsed = self._bodies(batch)

        def build(chosen: Sequence[int]) -> list[Outgoing]:
            part = batch.take(pa.array(chosen, pa.int64()))
            return self._built(producer, part, [bodies[row] for row in chosen])

        rows = (
            None if self._options.is_cluster else rows_of(topic, self._columns, batch, bodies, parsed, build)
        )
        if rows is not None:
            if "slot_basis" in self._columns:
                # Building one makes it known that the topic has such messages.
                build([0])
                self._patience(producer.note_slot_bases)
            bulk.send(rows)
            return Counter()
        # What was sent before must not be overtaken.
        bulk.finish()
        if not self._columns and takes_bodies(topic) and topic.slot_basis is None:
            # Values that are encoded already are sent as bytes.
            send = partial(producer.send_bodies, replace(topic, body="bytes"), bodies)
            return self._refusing(batch, lambda: self._patience(send).counts())
        built = self._built(producer, batch, bodies)
        return Counter(result.status for result in self._patience(lambda: producer.send(built)))

    def _built(self, producer: Producer, batch: pa.RecordBatch, bodies: list[bytes]) -> list[Outgoing]:
        """Return the messages as any other send has them. Raises ``InvalidMessage`` that names the bad row."""
        topic, built = self._topic, []
        decodes = topic.slot_basis is not None
        raw = topic if decodes else replace(topic, body="bytes")
        columns = {name: values(batch, name) for name in self._columns}
        for row, body in enumerate(bodies):
            given = {name: column[row] for name, column in columns.items() if column[row] is not None}
            try:
                built.append(producer.build(raw, exact_json(body.decode()) if decodes else body, **given))
            except (RmqError, ValueError) as error:
                raise InvalidMessage(f"row {_shown(batch, row)}: {error}") from None
        return built

    @staticmethod
    def _refusing(batch: pa.RecordBatch, send: Callable[[], Counter[str]]) -> Counter[str]:
        try:
            return send()
        except InvalidMessage as error:
            # The producer names the row by its number.
            number = str(error).removeprefix("item ").partition(":")[0]
            row = int(number) if number.isdigit() else 0
            raise InvalidMessage(f"row {_shown(batch, row)}: {error}") from None

    def _bodies(self, batch: pa.RecordBatch) -> tuple[list[bytes], list[Any] | None]:
        """Return the body of each row as it is stored, and as plain data if the topic has SLOT_BASIS."""
        topic = self._topic
        if self._body_columns:
            return self._of_columns(batch)
        column = batch.column("value")
        if column.null_count:
            row = next(i for i, value in enumerate(column) if not value.is_valid)
            raise InvalidMessage(f"row {_shown(batch, row)}: value is null")
        if topic.body != "bytes" and not pa.types.is_string(column.type):
            try:
                column = column.cast(pa.string())
            except pa.ArrowInvalid:
                self._each(batch, bytes.decode, column.to_pylist())
                raise
        if topic.body == "json" and (self._canonical or topic.slot_basis is not None):
            return self._of_texts(batch, column)
        return column.cast(pa.binary()).to_pylist(), None

    def _of_columns(self, batch: pa.RecordBatch) -> tuple[list[bytes], list[Any] | None]:
        basis = self._topic.slot_basis
        try:
            found = canonical_rows(batch, self._body_columns)
        except InvalidMessage:
            self._each(batch, encode_json, batch.select(self._body_columns).to_pylist())
            raise
        parsed = batch.select([basis]).to_pylist() if basis in self._body_columns else None
        return found.cast(pa.binary()).to_pylist(), parsed

    def _of_texts(self, batch: pa.RecordBatch, column: pa.Array) -> tuple[list[bytes], list[Any] | None]:
        """Return JSON texts as bodies. They are parsed if that is needed for the canonical form or the slot basis."""
        parsed: list[Any] | None = None
        if self._topic.slot_basis is not None:
            parsed = self._each(batch, decode_json, column.to_pylist())
        known = canonical_texts(column) if self._canonical else column
        found: list[bytes] = known.cast(pa.binary()).to_pylist()
        rest = pc.indices_nonzero(known.is_null())
        built = self._each(batch.take(rest), _reencoded, column.take(rest).to_pylist())
        for row, body in zip(rest.to_pylist(), built, strict=True):
            found[row] = body
        return found, parsed

    @staticmethod
    def _each(batch: pa.RecordBatch, work: Callable[[Any], Value], values: Iterable[Any]) -> list[Value]:
        """Return what ``work`` makes of each value; an error names the row."""
        found: list[Value] = []
        try:
            found.extend(map(work, values))
        except (RmqError, ValueError) as error:
            raise InvalidMessage(f"row {_shown(batch, len(found))}: {error}") from None
        return found


def _check_texts(batch: pa.RecordBatch) -> None:
    """Raise ``InvalidMessage`` for text that is not UTF-8, which Spark makes of bytes by a cast, and Python cannot read."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise InvalidMessage(f"text is not UTF-8: {error}") from None


def _reencoded(text: str) -> bytes:
    return encode_decoded(exact_json(text))


def _moves_up(options: Options) -> bool:
    given = options.text("pastTimes") or "refuse"
    if given not in PAST_TIMES:
        raise ConfigurationError(f"option pastTimes must be refuse or now, got {given!r}")
    return given == "now"


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
