"""Bulk sends: how many rows of a write are sent together, and how they get into Redis without Python code for each.

Rows are grouped by slot and encoded for the server; Python computes only the CRC of each slot basis. What a slot
refuses, because its topic is being re-slotted, ``Producer`` sends again.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from django_rmq.core.commands import insert
from django_rmq.core.commands import send as send_commands
from django_rmq.core.commands.broker_interface import Broker, BrokerPipeline
from django_rmq.core.commands.insert import transaction_time
from django_rmq.core.commands.script_call import Answers, Packed
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import Outgoing
from django_rmq.core.producer.producer import Producer
from django_rmq.core.redis import wire
from django_rmq.exceptions import RmqError, ServerUnavailable, SlotMoved
from django_rmq.spark.broker_connection import RetryPolicy

CHUNK_ROWS, ROWS_PER_SLOT, MOST_ROWS = 32_000, 500, 64_000
"""The number of rows that are sent together: the minimum, the number for each slot, and the maximum."""

CHUNK_BYTES = 8_388_608
"""The approximate number of bytes after which no more rows are collected."""


def gathered(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yield combined batches of at least ``rows`` rows, or of many bytes; Spark passes 10,000 rows at a time."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(each.num_rows for each in held) >= rows or sum(each.nbytes for each in held) >= CHUNK_BYTES:
            yield from _whole(held)
            held = []
    yield from _whole(held)


def batches_to_send(batches: Iterator[pa.RecordBatch], topic: Topic | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows that are sent together. None: a column names the topic of each row."""
    rows = MOST_ROWS if topic is None else min(MOST_ROWS, max(CHUNK_ROWS, ROWS_PER_SLOT * topic.slots))
    for whole in gathered(batches, rows):
        # Spark passes 10,000 rows, however large they are.
        few = max(1, CHUNK_BYTES * whole.num_rows // max(1, whole.nbytes))
        step = min(rows, few)
        for first in range(0, whole.num_rows, step):
            yield whole.slice(first, step)


def _whole(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if len(batches) < 2:
        return batches
    whole: list[pa.RecordBatch] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return whole


CALL_BYTES = 1_048_576
"""The number of bytes that a call may send beyond its first message: it limits how long Redis is blocked."""

RENEW_MS = 5_000
"""The age at which a reading of the server's clock is replaced."""

PAUSE = 8
"""The number of round trips without insertions after one of which a slot has declined."""


class ArrowRows(NamedTuple):
    """Valid messages of one topic. The columns have one value for each."""

    members: Sequence[bytes]
    build: Callable[[list[int]], list[Outgoing]]
    """Returns the messages of some rows as any other send has them; for rows that their slot refuses."""
    scores: pa.Array | None = None
    """Whole numbers, on priority and fixed_time topics."""
    ranges: pa.Array | None = None
    """Whole ms, on range_merge topics. No member is there twice then. None: those of the topic."""
    envelopes: Sequence[bytes] | None = None
    """On keyed topics."""
    bases: Sequence[bytes] | None = None
    """What decides the slots. None: the members."""


class SlotRows(NamedTuple):
    """The rows of one call: of one slot and one range, in their order."""

    slot: int
    rows: pa.Array
    """Their indexes."""
    packed: Packed
    range_ms: int | None


def groups(
    rows: ArrowRows, slots: int, range_ms: int | None = None, due: int | None = None
) -> Iterator[SlotRows]:
    """Yield the calls that send ``rows``. ``range_ms``: of the topic. ``due``: the score of all, if they have none."""
    # The same as ``placement.slot_of``, for all rows at once.
    crcs = pa.array(list(map(crc32, rows.bases or rows.members)), pa.uint32())
    placed = pc.bit_wise_and(crcs, pa.scalar(slots - 1, pa.uint32())).cast(pa.int64())
    ranges, codes = [range_ms], placed
    if rows.ranges is not None:
        encoded = rows.ranges.dictionary_encode()
        ranges = encoded.dictionary.to_pylist()
        codes = pc.add(pc.multiply(placed, len(ranges)), encoded.indices.cast(pa.int64()))
    # Stable: if a member is sent several times, the last one counts.
    order = pc.array_sort_indices(codes)
    scores = due if rows.scores is None else rows.scores.take(order)
    columns = [_Column(_binary(rows.members).take(order), scores)]
    if rows.envelopes is not None:
        columns.append(_Column(_binary(rows.envelopes).take(order)))
    width = len(columns) + (scores is not None)
    ends = columns[0].ends
    if len(columns) == 2:
        # Where each row ends if the bytes of both columns are counted.
        ends = memoryview(pc.add(columns[0].offsets, columns[1].offsets).buffers()[1]).cast("q")
    runs = pc.run_end_encode(codes.take(order))
    start = 0
    for code, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        while start < end:
            most = min(start + BATCH, end)
            last = max(start + 1, bisect_right(ends, ends[start] + CALL_BYTES, start, most + 1) - 1)
            packed = Packed(last - start, width, *(column.part(start, last) for column in columns))
            slot, which = divmod(code, len(ranges))
            yield SlotRows(slot, order.slice(start, last - start), packed, ranges[which])
            start = last


class _Column:
    """Texts as arguments of a command, one behind the other."""

    def __init__(self, texts: pa.Array, scores: pa.Array | int | None = None) -> None:
        before = _text(b"")
        if isinstance(scores, int):
            digits = b"%d" % scores
            before = _text(b"".join(wire.parts_of_argument(b"%d" % len(digits), digits, bytes)))
        elif scores is not None:
            before = _written(scores.cast(pa.large_string()).cast(pa.large_binary()))
        written = _written(texts, before)
        self.offsets = pa.Array.from_buffers(pa.int64(), len(written) + 1, [None, written.buffers()[1]])
        self.ends = memoryview(written.buffers()[1]).cast("q")
        self._data = memoryview(written.buffers()[2])

    def part(self, start: int, end: int) -> memoryview:
        """Return the arguments from ``start`` to before ``end``."""
        return self._data[self.ends[start] : self.ends[end]]


def _binary(texts: Sequence[bytes]) -> pa.Array:
    return pa.array(texts, pa.binary())


def _text(raw: bytes) -> pa.Scalar:
    return pa.scalar(raw, pa.large_binary())


def _written(texts: pa.Array, *before: object) -> pa.Array:
    """Return each text as an argument of a command, behind what is ``before`` it."""
    lengths = pc.binary_length(texts).cast(pa.large_string()).cast(pa.large_binary())
    parts = wire.parts_of_argument(lengths, texts.cast(pa.large_binary()), _text)
    return pc.binary_join_element_wise(*before, *parts, _text(b""))


class PackedCall(NamedTuple):
    """One round trip: its content, and its rows."""

    groups: list[SlotRows]
    rows: ArrowRows
    bounds: tuple[int, int] | None
    """The lowest and the highest score if the messages are inserted."""


class Inserting:
    """Whether the next round trip of a bulk inserts, and with which time: the server's, between two readings.

    Every reading is a transaction, so that a server that refuses these is noticed.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._reading: tuple[int, float] | None = None
        """The server's clock in ms, and the local time at which it was asked for."""
        self._pause = 0

    def now_ms(self) -> int | None:
        """Return the server's time, not earlier than now and later by one round trip at most; None: do not insert.

        Raises ``ServerUnavailable``.
        """
        if self._pause > 0:
            self._pause -= 1
            return None
        elapsed = self._elapsed()
        if elapsed is None or elapsed > RENEW_MS:
            self._read()
            elapsed = self._elapsed()
        return None if self._reading is None or elapsed is None else self._reading[0] + elapsed

    def decline(self) -> None:
        """Record that messages have to be looked at one by one: for some round trips nothing is inserted."""
        self._pause, self._reading = PAUSE, None

    def _elapsed(self) -> int | None:
        """Return the whole ms since the reading, rounded up."""
        return None if self._reading is None else int((time.monotonic() - self._reading[1]) * 1000) + 1

    def _read(self) -> None:
        # Otherwise the first reading would last as long as loading.
        self._broker.load_scripts()
        pipeline, sent_at = self._broker.pipeline(), time.monotonic()
        for call in transaction_time():
            pipeline.add(call)
        reply = pipeline.execute()[-1]
        if isinstance(reply, ServerUnavailable):
            raise reply
        if isinstance(reply, RmqError):
            self.decline()
        else:
            self._reading = reply, sent_at


class ArrowBulk:
    """Sends to one topic; ``counts`` has the results after ``finish``.

    While Redis is unavailable, everything without an answer is sent again. Of two sends of a member the later
    one counts: Redis runs one round trip while the next is packed, but two are never under way together,
    because their connections may overtake each other.
    """

    def __init__(self, producer: Producer, topic: Topic, patience: RetryPolicy) -> None:
        self.counts: Counter[str] = Counter()
        self._producer = producer
        self._topic = topic
        self.patience = patience
        self._inserting = Inserting(producer.broker)
        self._under_way: tuple[BrokerPipeline | None, PackedCall] | None = None
        """Without a pipeline: not sent."""

    def send(self, rows: ArrowRows) -> None:
        """Send valid rows."""
        topic, bounds, due = self._topic, None, None
        # Others may not be inserted without a look at each message.
        may_insert = not (topic.keyed or topic.debounce_ms or rows.ranges is not None)
        now_ms = self.patience(self._inserting.now_ms) if may_insert else None
        if now_ms is not None and rows.scores is None:
            due = now_ms + (topic.time_range_ms or 0)
            bounds = due, due
        elif now_ms is not None:
            extremes = pc.min_max(rows.scores).as_py()
            bounds = extremes["min"], extremes["max"]
        call = PackedCall(list(groups(rows, topic.slots, topic.time_range_ms, due)), rows, bounds)
        pipeline = self._pipeline(call)
        self.finish()
        try:
            self._under_way = pipeline.send(), call
        except ServerUnavailable:
            self._under_way = None, call

    def finish(self) -> None:
        """Wait for the round trip under way."""
        if self._under_way is None:
            return
        (pipeline, call), self._under_way = self._under_way, None
        try:
            answers = self._answers(call, pipeline.receive()) if pipeline is not None else None
        except ServerUnavailable:
            answers = None
        if answers is None:
            answers = self.patience(lambda: self._answers(call, self._pipeline(call).execute()))
        for group, answer in zip(call.groups, answers, strict=True):
            if isinstance(answer, SlotMoved):
                self.patience(partial(self._follow, group, call))
            else:
                self.counts.update(answer)

    def _pipeline(self, call: PackedCall) -> BrokerPipeline:
        pipeline = self._producer.broker.pipeline()
        for group in call.groups:
            if call.bounds is None:
                pipeline.add(send_commands.send_packed(self._topic, group.slot, group.packed, group.range_ms))
                continue
            rows = insert.InsertRows(len(group.packed), group.packed, *call.bounds)
            for part in insert.insert(self._topic, group.slot, rows):
                pipeline.add(part)
        return pipeline

    def _answers(self, call: PackedCall, replies: list[object]) -> Answers:
        if call.bounds is not None:
            # The answer of an insertion is that of EXEC, its last part.
            replies = self._with_declined(call, replies[insert.PARTS - 1 :: insert.PARTS])
        for answer in replies:
            if isinstance(answer, RmqError) and not isinstance(answer, SlotMoved):
                raise answer
        return replies

    def _with_declined(self, call: PackedCall, replies: list[object]) -> list[object]:
        """Return the answers, after sending what has to be looked at one by one."""
        declined = [index for index, answer in enumerate(replies) if not isinstance(answer, Counter)]
        if not declined:
            return replies
        self._inserting.decline()
        pipeline = self._producer.broker.pipeline()
        for index in declined:
            slot, rows, _, range_ms = call.groups[index]
            members = [call.rows.members[row] for row in rows.to_pylist()]
            pipeline.add(insert.end_insertion(self._topic, slot))
            if call.rows.scores is None:
                pipeline.add(send_commands.send_merge(self._topic, slot, range_ms or 0, members))
            else:
                scores = call.rows.scores.take(rows).to_pylist()
                pipeline.add(send_commands.send_replace(self._topic, slot, scores, members))
        for index, answer in zip(declined, pipeline.execute()[1::2], strict=True):
            is_error = isinstance(answer, RmqError)
            replies[index] = answer if is_error else Counter(sent.status for sent in answer)
        return replies

    def _follow(self, group: SlotRows, call: PackedCall) -> None:
        built = call.rows.build(group.rows.to_pylist())
        self.counts.update(result.status for result in self._producer.send(built))
