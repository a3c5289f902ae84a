"""Write: ``Writer`` and ``StreamWriter`` make messages of rows, by the same rules as a send from Python.

``columns`` says what a row may contain, and ``bulk_write`` how many rows are sent together. ``Target.encode`` chooses the fastest
form in which rows can be sent. At least once: a task that is tried again sends again, and messages that still wait merge. Rows
that cannot be sent are an error, or go into the folder of ``badRows``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from django_rmq.core.commands import operate
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.body_codec import DEEPEST, decode_json, encode_decoded, exact_json
from django_rmq.core.model.bounds import LONGEST_WAIT, MAX_PRIORITY, SHORTEST_WAIT
from django_rmq.core.model.envelope import decode_envelope
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.bulk_send import takes_bodies
from django_rmq.core.producer.placement import Outgoing, check_priority
from django_rmq.core.producer.producer import Producer
from django_rmq.durations import milliseconds
from django_rmq.exceptions import CallerError, ConfigurationError, InvalidMessage, MessageTooLarge, TopicFull
from django_rmq.spark.broker_connection import RetryPolicy, broker_of, topic_of
from django_rmq.spark.bulk_write import ArrowBulk, ArrowRows, batches_to_send
from django_rmq.spark.columns import (
    WriteColumns,
    canonical_rows,
    canonical_texts,
    check_taken,
    needed_by,
    rows_of,
    taken_by,
    values,
    with_numbers,
)
from django_rmq.spark.reader import too_old
from django_rmq.spark.source_options import PAST_TIMES, SourceOptions

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:
    # PySpark 4.0 does not have it; batch writes need none of it.
    from pyspark.sql.datasource import DataSourceStreamWriter as DataSourceStreamArrowWriter  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LEFT_OUT = "left out"
"""What is counted beside the statuses of messages: rows that ``badRows`` has left out."""


REFUSALS = (CallerError, ValueError, OverflowError)
"""What is raised for rows that cannot be sent."""

REFUSED = "refused"
"""The column that says in the files of ``badRows`` why a row could not be sent."""


def refused_rows(
    encode: Callable[[pa.RecordBatch], object], batch: pa.RecordBatch, error: Exception
) -> Iterator[tuple[int, str]]:
    """Yield each row that ``encode`` refuses, and why, by halves of ``batch``, for which it has raised ``error``."""
    todo = [(0, batch.num_rows, error)]
    while todo:
        first, count, error = todo.pop()
        if count == 1:
            yield first, str(error)
            continue
        half = count // 2
        for start, size in ((first + half, count - half), (first, half)):
            try:
                encode(batch.slice(start, size))
            except REFUSALS as refusal:
                todo.append((start, size, refusal))


def printable_row(batch: pa.RecordBatch, row: int) -> str:
    """Return the columns of a row as text, which may be cut."""
    text = repr({name: _cell(batch.column(name).slice(row, 1)) for name in batch.schema.names})
    return text if len(text) <= 300 else f"{text[:297]}..."


def _cell(column: pa.Array) -> object:
    """Return the one value of a column, in another form if Python cannot represent it.

    Such values are text that is not UTF-8, the year 10000, and instants in a zone that Arrow does not know, such as GMT+8.
    """
    for kind in (column.type, pa.binary(), pa.timestamp("us"), pa.string()):
        with suppress(ValueError, OverflowError, KeyError, pa.ArrowException):
            return column.cast(kind)[0].as_py()
    return f"a value of type {column.type}"


def folder_of(path: str) -> tuple[fs.FileSystem, str]:
    """Return the file system and the folder of ``badRows``, which is made if it is not there."""
    try:
        # Spark's name of the scheme is s3a, that of pyarrow s3.
        filesystem, folder = fs.FileSystem.from_uri(path.replace("s3a://", "s3://", 1))
        filesystem.create_dir(folder, recursive=True)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise ConfigurationError(
            f"option badRows must be a folder, as an absolute path or a URI that pyarrow knows, got {path!r}: {error}"
        ) from None
    return filesystem, folder


class BadRows:
    """The rows of a task that cannot be sent, in a Parquet file: their columns, and ``refused``, which says why.

    The file appears when the task ends. A task that is tried again replaces it.
    """

    def __init__(self, path: str | None, write: str) -> None:
        self.are_kept = path is not None
        self.count = 0
        self._path, self._write = path, write
        """The folder, and the name of the write."""
        self._writer: pq.ParquetWriter | None = None

    def keep(self, rows: pa.RecordBatch, why: Sequence[str]) -> None:
        """Add rows to the file."""
        table = pa.Table.from_batches([rows]).append_column(REFUSED, pa.array(why, pa.string()))
        if self._writer is None:
            self._files, folder = folder_of(self._path or "")
            task = TaskContext.get()
            name = self._write if task is None else f"{self._write}-{task.partitionId():05d}"
            # Spark may run two attempts at one task at the same time: a speculative one, or one that it takes for dead.
            attempt = 0 if task is None else task.taskAttemptId()
            # Spark reads no file whose name begins with a dot, so readers never see half of a file.
            self._hidden, self._shown = f"{folder}/.{name}-{attempt}.parquet", f"{folder}/{name}.parquet"
            self._writer = pq.ParquetWriter(self._hidden, table.schema, filesystem=self._files)
        self._writer.write_table(table)
        self.count += len(why)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> None:
        if self._writer is None:
            return
        self._writer.close()
        if kind is None:
            self._files.move(self._hidden, self._shown)
        else:
            with suppress(OSError):
                self._files.delete_file(self._hidden)


@dataclass
class Written(WriterCommitMessage):
    """The results of a task: status -> number of messages."""

    counts: dict[str, int]


class PartitionSend:
    """The common part of a batch write and a stream write: made on the driver, pickled for the tasks."""

    def __init__(self, options: SourceOptions, schema: StructType, *, overwrite: bool) -> None:
        self._options = options
        self._local: dict[str, object] = {}
        if options.text("timeRange") is not None:
            time_range = options.duration("timeRange", SHORTEST_WAIT, LONGEST_WAIT, is_short=True)
            self._local["time_range_ms"] = milliseconds(time_range)
        for option, setting in (
            ("defaultPriority", "default_priority"),
            ("maxBody", "max_body"),
            ("maxBacklog", "max_backlog"),
        ):
            if options.text(option) is not None:
                high = MAX_PRIORITY if option == "defaultPriority" else 1 << 53
                self._local[setting] = options.whole(option, 0, low=1, high=high)
        broker = broker_of(options)
        name = options.topic() if options.text("topic") is not None else None
        self._patience = RetryPolicy(options.patience, "Redis" if name is None else f"topic {name}")
        self._topic = None if name is None else self._known(broker, name)
        """None: a column names the topic of each row."""
        what = "a write" if name is None else f"a write to topic {name}"
        self.body_columns = options.names("bodyColumns")
        self.columns = WriteColumns(schema, self.body_columns, what, self._topic)
        if self._topic is not None:
            check_taken(self._topic, self.columns.options)
        self.canonical = options.flag("canonical", default=True)
        past_times = options.text("pastTimes") or "refuse"
        if past_times not in PAST_TIMES:
            raise ConfigurationError(f"option pastTimes must be refuse or now, got {past_times!r}")
        self.moves_up = past_times == "now"
        self.in_cluster = options.is_cluster
        self._bad_rows, self._run = options.text("badRows"), uuid4().hex
        if self._bad_rows is not None:
            # A folder that cannot be made is an error on the driver, before a task has sent anything.
            folder_of(self._bad_rows)
        if overwrite:
            self._purge(broker)

    def _known(self, broker: Broker, name: str) -> Topic:
        topic = topic_of(name, self._patience(broker.definitions).of(name), **self._local)
        if topic.is_priority and topic.default_priority is not None:
            check_priority(topic, topic.default_priority)
        return topic

    def _purge(self, broker: Broker) -> None:
        topic = self._topic
        if topic is None:
            raise ConfigurationError('mode("overwrite") would purge a topic: name it by the option topic')
        if not self._options.flag("allowOverwrite", default=False):
            raise ConfigurationError(
                'mode("overwrite") would purge the waiting messages of the topic: use mode("append"), '
                "or set the option allowOverwrite to true"
            )
        for slot in range(topic.slots):
            while self._patience(partial(broker.run, operate.purge(topic, slot, "store"))):
                pass

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Send the rows of a task."""
        broker = broker_of(self._options)
        producer = Producer(broker)
        targets: dict[str, Target] = {}
        bad = BadRows(self._bad_rows, self._write_name())
        counts: Counter[str] = Counter()
        with bad:
            try:
                for rows in batches_to_send(iterator, self._topic):
                    for name, part in self._by_topic(rows):
                        if name not in targets:
                            targets[name] = self._target(broker, producer, name)
                        counts.update(_send_part(targets[name], part, bad))
            finally:
                for target in targets.values():
                    target.bulk.finish()
        for target in targets.values():
            counts.update(target.bulk.counts)
        if counts["refused"]:
            names = ", ".join(sorted(targets))
            sent = counts.total()
            raise TopicFull(f"topic {names} is full: {counts['refused']} of {sent} messages were refused")
        counts[LEFT_OUT] += bad.count
        return Written(dict(+counts))

    def _write_name(self) -> str:
        """Return the name of this write, by which files of bad rows are called."""
        return self._run

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the rows of each topic. Rows without a topic have the topic ''."""
        if self._topic is not None:
            yield self._topic.name, batch
            return
        topics = pc.fill_null(self.columns.topics(batch), b"")
        for name in pc.unique(topics).to_pylist():
            # Text that is not UTF-8 names no topic, and is refused as any other unknown name.
            yield name.decode(errors="replace"), batch.filter(pc.equal(topics, name))

    def _target(self, broker: Broker, producer: Producer, name: str) -> Target:
        obstacle, topic = "", self._topic
        if topic is None:
            # Rows whose topic cannot be used are refused one by one, so that badRows can leave them out.
            topic = Topic("none", TopicType.PRIORITY)
            obstacle = "" if name else "column topic is null"
            try:
                topic = self._known(broker, name) if name else topic
                check_taken(topic, [column for column in self.columns.options if column in taken_by(topic)])
            except CallerError as error:
                obstacle = obstacle or f"column topic: {error}"
        bulk = ArrowBulk(producer, topic, self._patience)
        ahead_ms = 0.0
        if topic.type is TopicType.FIXED_TIME:
            ahead_ms = self._patience(broker.now_ms) - time.monotonic() * 1000
        return Target(topic, self, producer, bulk, ahead_ms, obstacle)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: N803 - Spark's name
        """Log how many rows were left out, and where they are. The messages are already sent."""
        written = [message.counts for message in messages if isinstance(message, Written)]
        left = sum(counts.get(LEFT_OUT, 0) for counts in written)
        if left:
            sent = sum(sum(counts.values()) for counts in written) - left
            logger.warning(
                "%d rows could not be sent and are in %s; %d were sent", left, self._bad_rows, sent
            )

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:  # noqa: N803 - Spark's name
        """Do nothing: sent messages stay, and merge if they are sent again."""


class EncodedBatch(NamedTuple):
    """Rows that can be sent, in one of three forms: the first that their topic and options allow.

    ``rows``: as columns (``rows_of`` says which). ``bodies`` alone: without options, to a topic whose messages need none, such
    as a fifo topic. ``built``: row by row, as any other send.
    """

    bodies: list[bytes]
    rows: ArrowRows | None = None
    built: list[Outgoing] | None = None


@dataclass
class Target:
    """A topic to which a task sends."""

    topic: Topic
    write: PartitionSend
    """Whose rows these are."""
    producer: Producer
    bulk: ArrowBulk
    ahead_ms: float
    """How far the server's clock is ahead of the monotonic one of this process."""
    obstacle: str
    """Why nothing can be sent to it. '': nothing prevents it."""

    def encode(self, batch: pa.RecordBatch) -> EncodedBatch:
        """Return rows as they can be sent, sending nothing.

        Raises ``InvalidMessage`` or ``ValueError`` if one of the rows cannot be sent, as each part of them would that has it.
        """
        if self.obstacle:
            raise InvalidMessage(self.obstacle)
        topic, options = self.topic, self._options(batch := self.write.columns.named(batch))
        _check_texts(batch, [*options, *(self.write.body_columns or ["value"])])
        for name in needed_by(topic):
            if batch.column(name).null_count:
                raise InvalidMessage(f"column {name} is null")
        moves_up = self.write.moves_up and topic.type is TopicType.FIXED_TIME
        bodies, parsed = self._bodies(batch)
        self._check_sizes(bodies)
        batch = with_numbers(batch, options, self._now_ms() if moves_up else None)

        def build(chosen: Sequence[int]) -> list[Outgoing]:
            part = batch.take(pa.array(chosen, pa.int64()))
            return self._built(part, [bodies[row] for row in chosen], options)

        # Each row gets back the options that its message had when it was read, so it is built.
        restores = self.write.columns.has_envelopes and topic.keyed
        if not self.write.in_cluster and not restores:
            rows = rows_of(topic, options, batch, bodies, parsed, build, self._now_ms())
            if rows is not None:
                return EncodedBatch(bodies, rows)
        if not options and takes_bodies(topic) and topic.slot_basis is None:
            return EncodedBatch(bodies)
        return EncodedBatch(bodies, built=self._built(batch, bodies, options))

    def send(self, encoded: EncodedBatch) -> Counter[str]:
        """Send rows; return the results that are known already."""
        if encoded.rows is not None:
            if encoded.rows.bases is not None and self.topic.slot_basis is None:
                # Building one makes it known that the topic has such messages.
                encoded.rows.build([0])
                self.bulk.patience(self.producer.note_slot_bases)
            self.bulk.send(encoded.rows)
            return Counter()
        # What was sent before must not be overtaken.
        self.bulk.finish()
        if encoded.built is None:
            # Values that are encoded already are sent as bytes.
            send = partial(self.producer.send_bodies, replace(self.topic, body="bytes"), encoded.bodies)
            return self.bulk.patience(send).counts()
        built = encoded.built
        return Counter(result.status for result in self.bulk.patience(lambda: self.producer.send(built)))

    def _now_ms(self) -> int:
        """Return the server's time: that of this machine may be another one, and messages are due by the server's."""
        return int(time.monotonic() * 1000 + self.ahead_ms)

    def _options(self, batch: pa.RecordBatch) -> list[str]:
        """Return the columns of options. One that the topic does not take must be null in all rows, or belong to the body."""
        taken = taken_by(self.topic)
        for name in self.write.columns.options:
            if (
                name not in taken
                and name not in self.write.body_columns
                and batch.column(name).null_count < batch.num_rows
            ):
                check_taken(self.topic, [name])
        return [name for name in self.write.columns.options if name in taken]

    def _check_sizes(self, bodies: list[bytes]) -> None:
        column = "" if self.write.body_columns else "column value: "
        if not all(bodies):
            raise InvalidMessage(f"{column}body is empty")
        if (longest := max(map(len, bodies), default=0)) > self.topic.max_body:
            raise MessageTooLarge(
                f"{column}body has {longest} bytes; topic {self.topic.name} allows MAX_BODY = {self.topic.max_body}"
            )

    def _built(self, batch: pa.RecordBatch, bodies: list[bytes], options: Sequence[str]) -> list[Outgoing]:
        """Return the messages as any other send has them."""
        topic = self.topic
        decodes = topic.slot_basis is not None
        raw = topic if decodes else replace(topic, body="bytes")
        columns = {name: values(batch, name, topic) for name in options}
        restores = self.write.columns.has_envelopes and topic.keyed
        envelopes = batch.column("envelope").to_pylist() if restores else ()
        built = []
        for row, body in enumerate(bodies):
            given = {name: column[row] for name, column in columns.items() if column[row] is not None}
            if restores and envelopes[row] is not None:
                given = {**_options_of(topic, envelopes[row]), **given}
            built.append(self.producer.build(raw, exact_json(body.decode()) if decodes else body, **given))
        return built

    def _bodies(self, batch: pa.RecordBatch) -> tuple[list[bytes], list[object] | None]:
        """Return the body of each row as it is stored, and as plain data if the topic has SLOT_BASIS."""
        topic = self.topic
        if self.write.body_columns:
            bodies, parsed = canonical_rows(batch, self.write.body_columns), None
            if topic.slot_basis in self.write.body_columns:
                # As in the body: a short float is another number there, and a map is an object.
                bases = canonical_rows(batch, [topic.slot_basis])
                parsed = list(map(decode_json, bases.to_pylist()))
            return bodies.cast(pa.binary()).to_pylist(), parsed
        column = batch.column("value")
        if column.null_count:
            raise InvalidMessage("column value is null")
        if topic.body == "bytes":
            return column.cast(pa.binary()).to_pylist(), None
        try:
            column = column.cast(pa.string())
            if topic.body == "json" and (self.write.canonical or topic.slot_basis is not None):
                return self._of_texts(column)
        except RecursionError:
            raise InvalidMessage(
                f"column value: body is nested too deeply: at most {DEEPEST} lists and objects within one another"
            ) from None
        except (InvalidMessage, ValueError) as error:
            raise InvalidMessage(f"column value: {error}") from None
        return column.cast(pa.binary()).to_pylist(), None

    def _of_texts(self, column: pa.Array) -> tuple[list[bytes], list[object] | None]:
        """Return JSON texts as bodies. They are parsed if that is needed for the canonical form or the slot basis."""
        parsed = list(map(decode_json, column.to_pylist())) if self.topic.slot_basis is not None else None
        known = canonical_texts(column) if self.write.canonical else column
        bodies: list[bytes] = known.cast(pa.binary()).to_pylist()
        rest = pc.indices_nonzero(known.is_null())
        for row, text in zip(rest.to_pylist(), column.take(rest).to_pylist(), strict=True):
            bodies[row] = encode_decoded(exact_json(text))
        return bodies, parsed


def _options_of(topic: Topic, raw: bytes) -> dict[str, object]:
    """Return the options with which a message was sent that is stored as ``raw``, as far as ``topic`` takes them."""
    envelope = decode_envelope(raw)
    options = {
        "expires": envelope.expires_ms or None,
        "headers": envelope.headers,
        "slot_basis": envelope.slot_basis if topic.slot_basis is None else None,
        "max_retries": envelope.max_retries,
        "timeout": envelope.timeout,
    }
    return {name: value for name, value in options.items() if value is not None}


def _send_part(target: Target, batch: pa.RecordBatch, bad: BadRows) -> Counter[str]:
    """Send the rows of one topic. Raises ``InvalidMessage`` that names the first row that cannot be sent."""
    try:
        encoded = target.encode(batch)
    except REFUSALS as error:
        refused = refused_rows(target.encode, batch, error)
        if not bad.are_kept:
            for row, why in refused:
                raise InvalidMessage(f"row {printable_row(batch, row)}: {why}") from None
            raise
        rows = dict(refused)
        bad.keep(batch.take(pa.array(list(rows), pa.int64())), list(rows.values()))
        left = [row for row in range(batch.num_rows) if row not in rows]
        if not left:
            return Counter()
        encoded = target.encode(batch.take(pa.array(left, pa.int64())))
    return target.send(encoded)


def _check_texts(batch: pa.RecordBatch, names: Sequence[str]) -> None:
    """Raise ``InvalidMessage`` for text that is not UTF-8, which Spark makes of bytes by a cast, and Python cannot read."""
    for name in names:
        try:
            batch.column(name).validate(full=True)
        except pa.ArrowInvalid as error:
            raise InvalidMessage(f"column {name}: text is not UTF-8: {error}") from None


class Writer(PartitionSend, DataSourceArrowWriter):
    """``df.write``: sends each row once, and again if a task is tried again."""


class StreamWriter(PartitionSend, DataSourceStreamArrowWriter):
    """``df.writeStream``: each batch is sent at least once."""

    def __init__(self, options: SourceOptions, schema: StructType, *, overwrite: bool) -> None:
        if not hasattr(datasource, "DataSourceStreamArrowWriter"):
            raise too_old("stream writes", "4.1")
        super().__init__(options, schema, overwrite=overwrite)

    def _write_name(self) -> str:
        # A batch that is repeated replaces its files. Batch writes of foreachBatch do not: one batch may have several.
        task = cast("TaskContext", TaskContext.get())
        query, batch = map(task.getLocalProperty, ("sql.streaming.queryId", "streaming.sql.batchId"))
        return f"{query}-{batch}"
