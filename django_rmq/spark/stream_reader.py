"""Stream read: a query consumes a topic in two phases. ``StreamReader`` is what Spark calls, ``ClaimReader`` reads in the tasks.

The driver decides how much to claim (``MinBatch``), and claims it in ``latestOffset``. Tasks read all of one claim or none, so
Spark may repeat them. The next poll acknowledges what Spark has recorded, unless ``acknowledger`` has done so. The offset names
the consumer, which therefore belongs to the checkpoint.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from django_rmq.core.commands import claims, inspect
from django_rmq.core.commands.broker_interface import Broker, walk
from django_rmq.core.model.bounds import BATCH, LARGEST
from django_rmq.core.model.envelope import raw_body
from django_rmq.core.model.replies import ClaimRead
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError, LostRace, RmqError, SlotMoved
from django_rmq.spark.broker_connection import Result, RetryPolicy, broker_of, reached
from django_rmq.spark.claims import Claims
from django_rmq.spark.reader import (
    FIRST_PAGE,
    MOST_ROWS,
    PAGE_BYTES,
    PAGES,
    SCRIPT_BYTES,
    Rows,
    arrow_schema,
    entry_batch,
    fitting,
    following,
    narrow_batch,
    sampled_ranks,
    task_count,
    too_old,
)
from django_rmq.spark.source_options import SourceOptions, gathering, most_bytes

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:
    raise too_old("stream reads", "4.2") from None

logger = logging.getLogger("django_rmq.spark")


class ClaimPart(NamedTuple):
    """A part of a task: some rows of a claim in one slot."""

    slot: int
    offset: int
    rows: int


class ClaimTask(InputPartition):
    """The part of a claim that one task reads."""

    def __init__(self, consumer: str, number: int, pieces: Sequence[ClaimPart]) -> None:
        super().__init__(number)
        self.consumer = consumer
        self.number = number
        self.pieces = list(pieces)


def split(sizes: dict[int, int], tasks: int, *, whole: bool = False) -> list[list[ClaimPart]]:
    """Return the rows of each slot in ``tasks`` parts of the same size, up to whole pages.

    ``whole``: no slot is divided between two parts, so that its rows stay in their order.
    """
    rows = sum(sizes.values())
    share = max(1, math.ceil(rows / max(1, tasks)))
    parts: list[list[ClaimPart]] = [[]]
    room = share
    for slot, size in sizes.items():
        offset = 0
        while offset < size:
            if not room:
                parts.append([])
                room = share
            part_size = size if whole else min(size - offset, room)
            parts[-1].append(ClaimPart(slot, offset, part_size))
            offset += part_size
            room = max(0, room - part_size)
    return [part for part in parts if part]


class ClaimReader(NamedTuple):
    """Reads pieces of a claim."""

    broker: Broker
    topic: Topic
    schema: pa.Schema
    patience: RetryPolicy

    def piece(self, task: ClaimTask, piece: ClaimPart) -> Iterator[pa.RecordBatch]:
        slot, offset, end = piece.slot, piece.offset, piece.offset + piece.rows
        claim = (self.topic, slot, task.consumer, task.number)
        first_page = min(FIRST_PAGE, piece.rows)
        page = self.patience(lambda: self.broker.run(claims.read_claim(*claim, offset, first_page)))
        if not page.rows:
            self._check_unrecorded(task, page)
            return
        yield self._batch(slot, page.rows, page.envelopes)
        offset += len(page.rows) // 2
        # If there are bodies, a script reads both together; Redis returns members alone faster without a
        # script.
        plain = not page.envelopes
        most, most_bytes = (MOST_ROWS, PAGE_BYTES) if plain else (BATCH, SCRIPT_BYTES)
        size = min(fitting(page.rows, page.envelopes, most_bytes), most)
        while offset < end:
            samples = [(rank, 1) for rank in sampled_ranks(offset, size) if rank < end]
            if samples:
                parts, _ = self.patience(partial(self._trip, claim, samples, plain=plain))
                sampled = [part for rows, _ in parts for part in rows]
                bodies = [body for _, envelopes in parts for body in envelopes]
                size = fitting(sampled, bodies, most_bytes, size)
            last = min(end, offset + PAGES * size)
            pages = [(first, min(size, last - first)) for first in range(offset, last, size)]
            parts, state = self.patience(partial(self._trip, claim, pages, plain=plain))
            if state != "sealed" or not all(rows for rows, _ in parts):
                raise self._lost(task, slot)
            for rows, envelopes in parts:
                yield self._batch(slot, rows, envelopes)
                offset += len(rows) // 2
            size = min(fitting(rows, envelopes, most_bytes), most)

    def piece_with_metadata(self, task: ClaimTask, piece: ClaimPart) -> Iterator[pa.RecordBatch]:
        """Read a piece with what is known of its messages, by the order of (score, member), which is that of ranks."""
        topic, slot, offset = self.topic, piece.slot, piece.offset
        claim = (topic, slot, task.consumer, task.number)
        after: tuple[str, bytes] | None = None
        if offset:
            before = inspect.rows(topic, slot, "claim", offset - 1, offset - 1)
            member, score = self.patience(lambda: self.broker.run(before)) or (b"", b"inf")
            after = (score.decode(), member)
        left, size = piece.rows, FIRST_PAGE
        while left:
            page = self.patience(
                partial(
                    self.broker.run,
                    inspect.list_messages(
                        topic, slot, "claim", after=after, limit=min(left, size), max_bytes=SCRIPT_BYTES
                    ),
                )
            )
            read = self.patience(lambda: self.broker.run(claims.read_claim(*claim)))
            if read.state != "sealed" and left == piece.rows:
                self._check_unrecorded(task, read)
                return
            rest = left - len(page.entries)
            if read.state != "sealed" or (rest and page.cursor is None):
                raise self._lost(task, slot)
            yield entry_batch(self.schema, topic, slot, "claim", page.entries)
            left, after, size = rest, page.cursor, following(page.entries)

    def _check_unrecorded(self, task: ClaimTask, claim: ClaimRead) -> None:
        """Raise ``LostRace`` if the batch was recorded meanwhile, by another driver from the same checkpoint.

        Read as nothing, it would replace in a sink what that driver has stored.
        """
        if claim.state == "acked" or claim.number > task.number:  # rule: reads_a_recorded_batch_as_nothing
            raise LostRace(
                f"claim {task.number} of topic {self.topic.name} was acknowledged while this query worked on its batch: "
                "another query has recorded it, from the same checkpoint. This one ends, and loses nothing"
            )

    def _lost(self, task: ClaimTask, slot: int) -> LostRace:
        # Half of a part is neither complete nor empty; when it is tried again, it reads as empty.
        return LostRace(
            f"claim {task.number} of topic {self.topic.name} slot {slot} was lost while it was being read"
        )

    def _trip(
        self, claim: tuple[Topic, int, str, int], pages: Sequence[tuple[int, int]], *, plain: bool
    ) -> tuple[list[tuple[Rows, Sequence[bytes | None]]], str]:
        """Return pages of a claim, given by their first ranks and numbers of rows, and its state after they were read."""
        topic, slot, *_ = claim
        parts: list[tuple[Rows, Sequence[bytes | None]]]
        if plain:
            rows = [inspect.rows(topic, slot, "claim", first, first + count - 1) for first, count in pages]
            parts = [(answer, ()) for answer in walk(self.broker, rows)]
        else:
            reads = [claims.read_claim(*claim, first, count) for first, count in pages]
            parts = [(read.rows, read.envelopes) for read in walk(self.broker, reads)]
        # Checked after everything was read: if it is still sealed, nothing had been taken out before.
        return parts, self.broker.run(claims.read_claim(*claim)).state

    def _batch(self, slot: int, rows: Rows, envelopes: Sequence[bytes | None]) -> pa.RecordBatch:
        members: Rows = rows[::2]
        if envelopes or self.topic.is_fifo:
            stored = envelopes or repeat(None, len(members))
            members = list(map(raw_body, repeat(self.topic), members, stored))
        return narrow_batch(self.schema, self.topic.name, slot, members, rows[1::2])


Offset: TypeAlias = dict[str, Any]
"""An offset of the stream: an object of JSON, which Spark keeps in its checkpoint."""

MOST_RANGES = 2_000
"""Maximum number of characters of a list of slots. A longer one is left out; then all slots are asked."""


def ranges(slots: Iterable[int]) -> str | None:
    """Return slots as text, like ``0-15,18``; None if that would be long."""
    parts: list[list[int]] = []
    for slot in sorted(slots):
        if parts and parts[-1][1] == slot - 1:
            parts[-1][1] = slot
        else:
            parts.append([slot, slot])
        if len(parts) > MOST_RANGES // 2:
            return None
    text = ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)
    return text if len(text) <= MOST_RANGES else None


def slots_in(text: str | None, count: int) -> list[int]:
    """Return the slots in the output of ``ranges``; all ``count`` of them for None."""
    if text is None:
        return list(range(count))
    bounds = [part.partition("-") for part in text.split(",") if part]
    return [slot for first, _, last in bounds for slot in range(int(first), int(last or first) + 1)]


SLOTS = 16
"""The largest number of slots that are sampled."""

SAMPLE = 16
"""The largest number of messages that are sampled in one slot."""


class MinBatch:
    """Whether a batch may begin: with ``least`` messages, or ``delay`` seconds after there were fewer."""

    def __init__(self, least: int, delay: float) -> None:
        self._least = least
        self._delay = delay
        self._since: float | None = None
        """When (monotonic) messages were first seen to be due, but too few."""

    def is_enough(self, due: Callable[[], int]) -> bool:
        """Return whether a batch may begin. ``due``: counts what could be claimed; not called if any number will do."""
        if self._least <= 1:
            return True
        count, now = due(), time.monotonic()
        if 0 < count < self._least:
            self._since = now if self._since is None else self._since
            if now - self._since < self._delay:
                return False
        self._since = None
        return count > 0


COUNT_SECONDS = 5.0
"""Seconds between two counts."""

MOST_SLOTS = 4_096
"""The largest number of slots that is counted: each is one call."""


class Backlog:
    """Counts a topic from time to time. Spark asks with every trigger, also when nothing is due."""

    def __init__(self, claims: Claims, slots: int) -> None:
        self._claims = claims
        self._slots = slots
        self._last_count: dict[str, object] | None = None
        self._next_count = float("-inf")

    def count(self) -> dict[str, object] | None:
        """Return the last count. None: there is none, because the topic has too many slots or Redis was unavailable."""
        now = time.monotonic()
        if now >= self._next_count and self._slots <= MOST_SLOTS:
            self._next_count = now + COUNT_SECONDS
            try:
                self._last_count = self._count()
            except RmqError:
                # The query's own requests report it.
                self._last_count = None
        return self._last_count

    def _count(self) -> dict[str, object]:
        counts = self._claims.counts(range(self._slots))
        oldest = [
            slot_counts.oldest_due_ms for slot_counts in counts if slot_counts.oldest_due_ms is not None
        ]
        age = (self._claims.now_ms() - min(oldest)) / 1000 if oldest else 0.0
        return {
            "due": sum(slot_counts.due for slot_counts in counts),
            "waiting": sum(slot_counts.store + slot_counts.retry for slot_counts in counts),
            "oldestDueSeconds": round(max(0.0, age), 3),
            "claimed": sum(slot_counts.claimed for slot_counts in counts),
            "lostClaims": self._claims.lease.lost,
        }


LOOK_SECONDS = 5.0
"""Seconds between two checks whether a topic that seems empty was re-slotted."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Claims on the driver, reads in tasks."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        options.check()
        self._options = options
        self._schema = schema
        self._name = options.topic()
        self._patience = RetryPolicy(options.patience, f"topic {self._name}")
        self._fail_on_loss = options.fails_on_loss
        self._consumer = options.consumer
        self._checkpoint = self._consumer if options.text("consumerId") is None else uuid4().hex
        """The word of a checkpoint that has no offset yet. A consumer without a given name belongs to one checkpoint."""
        self._topic = self._patience(self._read_topic)
        self._claims = Claims(self._broker, self._topic, options.lease_ms)
        self._gathering = MinBatch(*gathering(options))
        self._most_bytes = most_bytes(options)
        self._backlog = Backlog(self._claims, self._topic.slots)
        self._last_empty = float("-inf")
        """When (monotonic) a poll last found nothing."""
        self._next_look = float("-inf")
        self._is_available_now = False
        self._rest: int | None = None
        """For AvailableNow, from the first poll on: how many messages may still be claimed."""

    def __getstate__(self) -> dict[str, object]:
        # Tasks only read. The claims stay with the driver: their locks and their thread cannot be pickled.
        names = ("_options", "_schema", "_name", "_topic", "_fail_on_loss", "_patience")
        return {name: self.__dict__[name] for name in names}

    def _read_topic(self) -> Topic:
        return reached(self._options)[1]

    @property
    def _broker(self) -> Broker:
        return broker_of(self._options)

    # --- offsets

    def _offset(self, consumer: str, checkpoint: str, claim: int, rows: int) -> Offset:
        # The engine compares offsets by their text, which includes the order of the keys.
        return {
            "version": 1,
            "consumer": consumer,
            "checkpoint": checkpoint,
            "claim": claim,
            "rows": rows,
            "slots": self._topic.slots,
            "topic": self._name,
            "held": ranges(self._claims.lease.slots(claim)),
        }

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        return self._offset(self._consumer, self._checkpoint, 0, 0)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadMaxRows(self._options.most)

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802 - Spark's name
        """Return the backlog, which Spark shows in its progress as ``latestOffset``. A queue has no final offset."""
        return self._backlog.count()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Take what is due at the first poll, wherever it is, and nothing that arrives after it.

        Nothing is counted yet: Spark replays the last batch first, and a count ends claims whose lease has ended, which
        may be the one of that batch.
        """
        self._is_available_now = True

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        """Acknowledge what is committed, claim more, and return the offset of the new claim or ``start`` itself."""
        self._check(start)
        return self._repeated(lambda: self._next(start, limit))

    def _repeated(self, work: Callable[[], Result]) -> Result:
        """Repeat an operation on claims while Redis is unavailable; the effect of a failed request is looked up."""

        def attempt() -> Result:
            try:
                return work()
            except RmqError:
                self._claims.forget()
                raise

        return self._patience(attempt)

    def _next(self, start: Offset, limit: ReadLimit) -> Offset:
        consumer, committed = start["consumer"], int(start["claim"])
        checkpoint = start["checkpoint"]
        self._claims.lease.identity.hold(consumer, checkpoint)
        self._claims.lease.begin()
        newest = self._claims.settle(consumer, committed, self._named(start))
        rows = self._claims.seal(consumer, newest) if newest > committed else 0
        if rows:
            # Made by a driver that died before it could log the offset, or before a request failed.
            return self._offset(consumer, checkpoint, newest, rows)
        self._pause()
        if self._is_available_now and self._rest is None:
            self._rest = self._claims.due()
        number = max(newest, committed) + 1
        # With AvailableNow, and with Once, there is nothing to wait for.
        is_last = self._is_available_now or isinstance(limit, ReadAllAvailable)
        may_begin = is_last or self._gathering.is_enough(self._claims.due)
        if may_begin and self._claims.claim(consumer, number, self._budget(limit)):
            rows = self._claims.seal(consumer, number)
            if rows:
                if self._rest is not None:
                    self._rest = max(0, self._rest - rows)
                return self._offset(consumer, checkpoint, number, rows)
        self._last_empty = time.monotonic()
        self._check_slots()
        if self._rest:
            logger.warning(
                "This run of topic %s leaves %d of the messages that were due at its start: another consumer or a worker "
                "holds their slots, or they are paused. The next run takes them",
                self._name,
                self._rest,
            )
            self._rest = 0
        if self._is_available_now:
            # The run ends here, and all that it has claimed is acknowledged.
            self._claims.lease.identity.leave()
        return start

    def _check_slots(self) -> None:
        """Check from time to time that an empty topic is empty: after a re-slotting other slots have its messages."""
        if self._last_empty < self._next_look:
            return
        self._next_look = self._last_empty + LOOK_SECONDS
        if self._read_topic().slots != self._topic.slots:
            raise self._claims.moved()

    def commit(self, end: Offset) -> None:
        """Acknowledge again; the poll has done it before."""
        self._repeated(lambda: self._claims.settle(end["consumer"], int(end["claim"]), self._named(end)))

    def stop(self) -> None:
        """Leave the name of the consumer to the next query, if Redis answers; otherwise it is free when its lease ends."""
        with suppress(RmqError):
            self._claims.lease.identity.leave()

    def _named(self, offset: Offset) -> Collection[int]:
        """Return the slots that an offset names."""
        return set(slots_in(offset["held"], self._topic.slots))

    def _check(self, offset: Offset) -> None:
        if offset["topic"] != self._name:
            raise ConfigurationError(
                f"the checkpoint is that of a query on topic {offset['topic']}, and option topic is {self._name}: "
                "start with a new checkpoint"
            )
        given = self._options.text("consumerId")
        if given is not None and given != offset["consumer"]:
            # Its claims would have one name, and ``fail_batch`` would look for another one.
            raise ConfigurationError(
                f"the checkpoint is that of consumerId {offset['consumer']}, and option consumerId is {given}: "
                "give the one of the checkpoint, or start with a new checkpoint"
            )
        if int(offset["slots"]) != self._topic.slots:
            raise SlotMoved(
                f"topic {self._name} now has {self._topic.slots} slots, but the checkpoint was started "
                f"with {offset['slots']}: start with a new checkpoint; messages of old claims come back "
                "when their lease ends"
            )

    def _budget(self, limit: ReadLimit) -> int:
        most = self._options.most
        if isinstance(limit, ReadMaxRows):
            most = int(limit.max_rows)
        elif isinstance(limit, ReadAllAvailable):
            most = LARGEST
        most = most if self._rest is None else min(most, self._rest)
        return most if self._most_bytes is None else min(most, self._count_within(self._most_bytes, most))

    def _count_within(self, most_bytes: int, most: int) -> int:
        """Return about how many messages have ``most_bytes``, at least one; ``most`` if nothing is due."""
        slots = list(self._claims.due_slots())
        chosen = random.sample(slots, min(len(slots), SLOTS))
        pages = self._claims.each(
            inspect.list_messages(self._topic, slot, "store", limit=SAMPLE) for slot in chosen
        )
        sizes = [len(one.member) + len(one.envelope or b"") for page in pages for one in page.entries]
        return max(1, most_bytes * len(sizes) // sum(sizes)) if sizes else most

    def _pause(self) -> None:
        rest = self._last_empty + self._options.poll_seconds - time.monotonic()
        if rest > 0:
            time.sleep(rest)

    # --- batches

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return the tasks of the batch that ends with ``end``.

        It has no effects, because Spark may call it more than once.
        """
        if start["consumer"] == end["consumer"] and start["claim"] == end["claim"]:
            return []
        self._check(end)
        consumer, number = end["consumer"], int(end["claim"])
        slots = slots_in(end["held"], self._topic.slots)
        sizes = self._patience(lambda: self._claims.read(consumer, number, slots))
        rows = sum(sizes.values())
        if rows < int(end["rows"]):
            self._claims.lease.warn(number, self._lost(number, int(end["rows"]) - rows))
        return [
            ClaimTask(consumer, number, pieces)
            for pieces in split(sizes, task_count(self._options, rows), whole=self._topic.is_fifo)
        ]

    def _lost(self, number: int, missing: int) -> str:
        """Return the warning about a batch that cannot be read as a whole. Raises ``LostRace`` with ``failOnDataLoss``."""
        text = (
            f"{missing} messages are no longer held for this batch, because their lease ended, or they were given back. "
            "They are delivered again later"
        )
        if self._fail_on_loss:
            # Spark repeats the batch at each start, until it is recorded.
            raise LostRace(
                f"Claim {number} of topic {self._name}: {text}. The query stops at this batch until it is started without "
                "failOnDataLoss, which records the batch without them"
            )
        return text

    # --- in tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # If a batch has no rows, Spark makes a partition of its own.
        if not isinstance(partition, ClaimTask):
            return
        schema = arrow_schema(self._schema)
        reading = ClaimReader(self._broker, self._topic, schema, self._patience)
        read = reading.piece_with_metadata if self._options.metadata else reading.piece
        missing = 0
        for piece in partition.pieces:
            rows = 0
            for batch in read(partition, piece):
                rows += batch.num_rows
                yield batch
            missing += 0 if rows else piece.rows
        if missing:
            text = self._lost(partition.number, missing)
            logger.warning("Claim %d of topic %s: %s", partition.number, self._name, text)
