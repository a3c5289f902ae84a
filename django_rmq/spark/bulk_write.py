"""Rows of Arrow on their way into Redis, without Python code for each row: canonical JSON, and bulk sends.

``encode_json`` would make the same bytes of each text. Most texts of a topic have the same keys in the same order, so a pattern
made from the first one takes their values out, and these are joined in the canonical order. Texts that differ in
anything else are parsed and encoded one by one.

Rows to send are grouped by slot and encoded for the server; Python computes only the CRC of each slot basis. What a slot
refuses, because its topic is being re-slotted, ``Producer`` sends again.
"""

from __future__ import annotations

import math
import re
import struct
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from django_rmq.core.commands import insert
from django_rmq.core.commands import send as send_commands
from django_rmq.core.commands.broker_interface import Broker, BrokerPipeline
from django_rmq.core.commands.insert import transaction_time
from django_rmq.core.commands.script_call import Answers, Packed
from django_rmq.core.model.body_codec import decode_json, encode_json
from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import Outgoing
from django_rmq.core.producer.producer import Producer
from django_rmq.core.redis import wire
from django_rmq.exceptions import InvalidMessage, RmqError, ServerUnavailable, SlotMoved
from django_rmq.spark.broker_connection import RetryPolicy

CHUNK_ROWS, ROWS_PER_SLOT, MOST_ROWS = 32_000, 500, 64_000
"""The number of rows that are sent together: the minimum, the number for each slot, and the maximum."""

CHUNK_BYTES = 8_388_608
"""The approximate number of bytes after which no more rows are collected."""

MOST_VALUES, MEAN_SIZE, MOST_SIZE = 12, 40, 4_096
"""The number of values in an object, the mean number of bytes for each, and the size of a text beyond which
parsing is faster than a pattern."""

SAMPLE, MOSTLY = 100, 0.9
"""The number of texts, and the share of them that must match before the pattern is used for the others."""

LARGEST_FLOAT32 = 3.4028235e38

_TEXT = r'"[^"\\\x00-\x1f]*"|null'
"""A text without escapes: it is written as it is read."""
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|null"
_FLAG = "true|false|null"

_ESCAPED = r'["\\\x00-\x1f]'

_REWRITTEN = r"\A-0\z|\A.{300}"
"""Numbers that may not stay as they are: an integer without its sign, and what may be beyond floats."""

_KEPT_NUMBER = r"0|-?[1-9][0-9]*|-?(?:0|[1-9][0-9]*)\.[0-9]+|null"
"""A number that stays as it is, in a text of less than ``LONG`` bytes."""

LONG = 300
"""From this size on a text may have a number beyond floats."""


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


class Shape(NamedTuple):
    """What texts have in common: a pattern of them, and their canonical form."""

    pattern: str
    form: list[str | int]
    """Literal texts, and the numbers of values in the pattern."""
    numbers: list[int]
    """Which of the values are numbers."""
    values: int
    canonical: str | None
    """A pattern of texts that are canonical already; it takes no values out, which is three times as fast. None: the keys
    of these texts are in another order."""


def shape_of(text: str) -> Shape | None:
    """Return the shape of a JSON text. None: it is not an object of texts, numbers, flags and such objects."""
    try:
        body = decode_json(text)
        if not isinstance(body, dict):
            return None
        kinds: list[str] = []
        pattern, form = _described(body, kinds)
        canonical = _canonical_pattern(body)
    except (ValueError, TypeError, RecursionError, InvalidMessage):
        return None
    numbers = [index for index, kind in enumerate(kinds) if kind is _NUMBER]
    return Shape(rf"\A{pattern}\z", form, numbers, len(kinds), canonical and rf"\A{canonical}\z")


def _described(value: object, kinds: list[str]) -> tuple[str, list[str | int]]:
    """Return the pattern of values like this one, and their canonical form; add the kinds of its parts to ``kinds``.

    Raises ``TypeError`` for a list.
    """
    if isinstance(value, dict):
        names = {key: encode_json(key).decode() for key in value}
        parts = {key: _described(item, kinds) for key, item in value.items()}
        pattern = ", ?".join(f"{re.escape(names[key])}: ?{parts[key][0]}" for key in value)
        form: list[str | int] = []
        for key in sorted(value):
            form += [f"{',' if form else '{'}{names[key]}:", *parts[key][1]]
        return rf"\{{{pattern}\}}", [*form, "}" if form else "{}"]
    if isinstance(value, list):
        raise TypeError("the length of a list differs from text to text")
    kind = _kind(value)
    kinds.append(kind)
    return f"(?P<v{len(kinds)}>{kind})", [len(kinds) - 1]


def _kind(value: object) -> str:
    return _FLAG if isinstance(value, bool) else _NUMBER if isinstance(value, (int, float)) else _TEXT


def _canonical_pattern(value: object) -> str | None:
    """Return the pattern of canonical texts of values like this one. None: its keys are in another order."""
    if not isinstance(value, dict):
        kind = _kind(value)
        return f"(?:{_KEPT_NUMBER if kind is _NUMBER else kind})"
    parts = [_canonical_pattern(item) for item in value.values()]
    if None in parts or list(value) != sorted(value):
        return None
    names = [re.escape(encode_json(key).decode()) for key in value]
    return rf"\{{{','.join(f'{name}:{part}' for name, part in zip(names, parts, strict=True))}\}}"


def canonical_texts(column: pa.Array) -> pa.Array:
    """Return the canonical form of JSON texts; null for each that has to be parsed."""
    shape = shape_of(column[0].as_py()) if len(column) and _is_valid(column) else None
    if shape is None:
        return pa.nulls(len(column), pa.string())
    if shape.canonical is not None and pc.max(pc.binary_length(column)).as_py() < LONG:
        is_canonical = pc.match_substring_regex(column, shape.canonical)
        if pc.sum(is_canonical).as_py() >= MOSTLY * len(column):
            return pc.if_else(is_canonical, column, None)
    return _reshaped(column, shape) if _pays(column, shape) else pa.nulls(len(column), pa.string())


def _pays(column: pa.Array, shape: Shape) -> bool:
    """Return whether the pattern is faster than parsing, and matches nearly all of the first texts."""
    sizes = pc.binary_length(column)
    fits = pc.max(sizes).as_py() <= MOST_SIZE and pc.mean(sizes).as_py() <= MEAN_SIZE * (shape.values + 1)
    if not fits or not 0 < shape.values <= MOST_VALUES:
        return False
    sample = column.slice(0, SAMPLE)
    return bool(_reshaped(sample, shape).null_count <= (1 - MOSTLY) * len(sample))


def canonical_rows(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.Array:
    """Return each row as a JSON object of some columns. Raises ``InvalidMessage`` for what JSON cannot represent."""
    parts: list[object] = []
    for name in sorted(set(columns)):
        try:
            written = _number_texts(batch.column(name))
        except (InvalidMessage, ValueError, OverflowError) as error:
            raise InvalidMessage(f"column {name}: {error}") from None
        parts += [f"{',' if parts else '{'}{encode_json(name).decode()}:", written]
    return _joined([*parts, "}"])


def _number_texts(column: pa.Array) -> pa.Array:
    """Return the values of a column as JSON texts."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return pc.coalesce(column.cast(pa.string()), "null")
    if pa.types.is_string(kind) and _is_plain(column):
        return pc.coalesce(_joined(['"', column, '"']), "null")
    convert = _converter(kind)
    rows = column.to_pylist() if convert is None else map(convert, column.to_pylist())
    return pa.array([encode_json(value).decode() for value in rows], pa.string())


def _converter(kind: pa.DataType) -> Callable[[Any], object] | None:
    """Return what makes of a value of this type, as Arrow gives it, the value to write as JSON. None: it is that value."""
    if pa.types.is_float32(kind):
        return _shortest_float
    if pa.types.is_map(kind):
        if not (pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type)):
            raise InvalidMessage(
                f"a map with keys of type {kind.key_type} cannot be a JSON object: its keys must be text"
            )
        item = _converter(kind.item_type) or _same
        return lambda pairs: None if pairs is None else {key: item(value) for key, value in pairs}
    if pa.types.is_struct(kind):
        parts = {field.name: convert for field in kind if (convert := _converter(field.type))}
        if not parts:
            return None
        return lambda row: row and {name: parts.get(name, _same)(value) for name, value in row.items()}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        one = _converter(kind.value_type)
        return None if one is None else lambda items: items and [one(each) for each in items]
    return None


def _same(value: object) -> object:
    return value


def _shortest_float(value: float | None) -> float | None:
    """Return the shortest number that is this 32-bit float: 0.1, which as a 64-bit float is 0.10000000149011612."""
    if value is None or not math.isfinite(value):
        return value
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        # Rounded up, it may be beyond 32 bits, which cannot be packed.
        if abs(short) <= LARGEST_FLOAT32 and struct.unpack("f", struct.pack("f", short))[0] == value:
            return short
    return float(f"{value:.9g}")


def _is_plain(column: pa.Array) -> bool:
    """Return whether no text has to be escaped."""
    return _is_valid(column) and not pc.any(pc.match_substring_regex(column, _ESCAPED)).as_py()


def _is_valid(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        # It is not UTF-8, which patterns overlook in part.
        return False
    return True


def _reshaped(column: pa.Array, shape: Shape) -> pa.Array:
    values = pc.extract_regex(column, shape.pattern).flatten()
    for number in shape.numbers:
        rewritten = pc.match_substring_regex(values[number], _REWRITTEN)
        values[number] = pc.if_else(rewritten, None, values[number])
    return _joined([part if isinstance(part, str) else values[part] for part in shape.form])


def _joined(parts: Sequence[object]) -> pa.Array:
    """Return rows of parts, each of which is a text or a column of texts; null if one of its parts is null."""
    return pc.binary_join_element_wise(*parts, "")


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
    ends = columns[0].ends if len(columns) == 1 else _sums(columns)
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


def _sums(columns: list[_Column]) -> memoryview:
    """Return where each row ends, if those of all columns are counted."""
    first, second = columns
    return memoryview(pc.add(first.offsets, second.offsets).buffers()[1]).cast("q")


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
        now_ms = self.patience(self._inserting.now_ms) if self._may_insert(rows) else None
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

    def _may_insert(self, rows: ArrowRows) -> bool:
        """Return whether a transaction without a look at each message may be tried."""
        topic = self._topic
        return not (topic.keyed or topic.debounce_ms or rows.ranges is not None)

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
            for part in insert.insertion(self._topic, group.slot, rows):
                pipeline.add(part)
        return pipeline

    def _answers(self, call: PackedCall, replies: list[object]) -> Answers:
        if call.bounds is not None:
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
