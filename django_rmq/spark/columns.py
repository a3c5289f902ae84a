"""The columns of a write: which a topic takes, which types they may have, and what becomes of their values.

``writer.Target`` makes messages of rows, from these values.
Durations (numbers of seconds, intervals, or text such as ``15m``) and instants (timestamps) become milliseconds. ``rows_of``
returns the messages that ``Producer.build`` would make, without Python code for each row, where no row needs a look.

Bodies become canonical JSON, the bytes that ``encode_json`` would make. Most texts of a topic have the same keys in the same
order, so a pattern made from the first one takes their values out, and these are joined in the canonical order. Texts that
differ in anything else are parsed and encoded one by one.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Collection, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StructType

from django_rmq.core.model.body_codec import decode_json, encode_json
from django_rmq.core.model.bounds import MAX_DURATION_MS, MAX_INSTANT_MS, MAX_KEY_BYTES, MAX_PRIORITY
from django_rmq.core.model.envelope import Envelope, basis_bytes, encode_envelope, is_drawn
from django_rmq.core.model.scores import LAST_RETRY
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.placement import Outgoing, check_stored_basis
from django_rmq.durations import AMBIGUOUS, InvalidDuration, milliseconds, parse_duration
from django_rmq.exceptions import ConfigurationError, InvalidMessage
from django_rmq.spark.bulk_write import ArrowRows
from django_rmq.spark.reader import COLUMNS, METADATA

MARGIN_MS = 1_000
"""How long a chunk may take from here to its check."""

WAITS = frozenset(["time_range", "delay"])
DURATIONS = WAITS | {"timeout"}
INSTANTS = frozenset(["fixed_time", "expires"])


def with_numbers(batch: pa.RecordBatch, options: Collection[str], now_ms: int | None) -> pa.RecordBatch:
    """Return the rows with the times among the ``options`` in ms, ``timeout`` in seconds, and whole decimals as integers.

    ``now_ms``: by the server's clock, for a ``fixed_time`` that has passed, which becomes a moment from now: a batch
    that Spark repeats later has the times that it had, and would be refused each time. None: such times stay.

    Raises ``InvalidMessage`` for a value that is not a duration, or a number that is too large.
    """
    for name in options:
        column = batch.column(name)
        if name in DURATIONS:
            ms = _milliseconds(name, column)
            column = ms if name in WAITS else pc.divide(ms.cast(pa.float64()), 1000)
        elif name in INSTANTS:
            column = instants_ms(column)
            if now_ms is not None and name == "fixed_time":
                soon = now_ms + MARGIN_MS
                # What was meant in seconds stays wrong.
                has_passed = pc.and_(pc.greater(column, soon // 10), pc.less(column, soon))
                column = pc.if_else(has_passed, soon, column)
        elif name != "slot_basis" and pa.types.is_decimal(column.type):
            try:
                column = column.cast(pa.int64())
            except pa.ArrowInvalid as error:
                raise InvalidMessage(f"column {name}: {error}") from None
        batch = batch.set_column(batch.schema.get_field_index(name), name, column)
    return batch


def instants_ms(column: pa.Array) -> pa.Array:
    """Return timestamps in ms, rounded up."""
    us = column.cast(pa.timestamp("us")).cast(pa.int64())
    # Division rounds towards 0, so instants before 1970 come out too late; they are invalid in any case.
    return pc.divide(pc.add(us, 999), 1000)


def _milliseconds(name: str, column: pa.Array) -> pa.Array:
    if pa.types.is_duration(column.type):
        return pc.divide(column.cast(pa.duration("us")).cast(pa.int64()), 1000)
    if pa.types.is_integer(column.type):
        bounds: dict[str, Any] = pc.min_max(column).as_py()
        # Such whole numbers can only be seconds, so that no value has to be looked at by itself.
        if bounds["min"] is None or (bounds["min"] >= 0 and bounds["max"] < AMBIGUOUS):
            return pc.multiply(column.cast(pa.int64()), 1000)
    times = []
    for value in column.to_pylist():
        given = float(value) if isinstance(value, Decimal) else value
        try:
            ms = None if given is None else milliseconds(parse_duration(given, is_short=name in WAITS))
        except InvalidDuration as error:
            what = f"column {name}: {name} must be {error.typed}, got {error.given}. {error.hint}"
            raise InvalidMessage(what.rstrip(". ")) from None
        times.append(ms)
    return pa.array(times, pa.int64())


OPTION_COLUMNS = (
    *("priority", "fixed_time", "time_range", "delay", "slot_basis"),
    *("key", "max_retries", "timeout", "headers", "expires"),
)
"""The columns with the options of a send."""

OF_A_READ, OF_A_READ_ONLY = frozenset(COLUMNS.fieldNames()), frozenset(METADATA.fieldNames())
"""The columns that each frame has that was read from a topic, and those that it may have."""

WITH_KEYS = frozenset(["key", "headers", "expires", "max_retries", "timeout"])
"""The options that only messages with keys have."""

_WHOLE = frozenset(["byte", "short", "integer", "long", "decimal", "void"])
_DURATION = _WHOLE | {"float", "double", "daytimeinterval", "string", "char", "varchar"}
_SECONDS = "seconds, an interval such as interval '90' second, or text such as 15m"
_INSTANT = frozenset(["timestamp", "void"])
_TEXT = frozenset(["string", "char", "varchar", "binary", "void"])
_TYPES = {
    "priority": (_WHOLE, "a whole number, such as cast(priority as bigint)"),
    "max_retries": (_WHOLE, "a whole number, such as cast(max_retries as int)"),
    **{
        # A timestamp without a zone is refused, as every other send refuses a naive datetime.
        name: (_INSTANT, f"a timestamp, such as timestamp_millis({name}) or cast({name} as timestamp)")
        for name in INSTANTS
    },
    "time_range": (_DURATION, _SECONDS),
    "delay": (_DURATION, _SECONDS),
    "timeout": (_DURATION, _SECONDS),
    "key": (_TEXT, "text, such as cast(key as string)"),
    "headers": (frozenset(["map", "void"]), "a map<string,string>"),
    "envelope": (frozenset(["binary", "void"]), "bytes, as they were read"),
    "value": (_TEXT, "text or bytes, such as to_json(value)"),
    "topic": (_TEXT, "text"),
}
"""Column -> the names of Spark's types that it may have, and what is said of others."""

_IN_JSON = (_TEXT - {"binary"}) | _WHOLE | _DURATION | _INSTANT | {"boolean", "date", "time", "timestamp_ntz"}
"""The names of Spark's types whose values JSON can represent, beside lists, objects and maps."""

_SHORT_TYPES = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}

_SCORED = {
    TopicType.RANGE_MERGE: "time_range",
    TopicType.PRIORITY: "priority",
    TopicType.FIXED_TIME: "fixed_time",
}
"""The column that says when a message is due, or how urgent it is: ``SCORE_OPTIONS``, without that of fifo topics, which no row
needs."""


class WriteColumns:
    """The columns of a frame as a write uses them. Raises ``ConfigurationError`` for those that it cannot use.

    The names of columns ignore case, as Spark's do. A frame that was read from a topic may have all columns that
    a read has: those that a write does not use are ignored. A column of the body whose name is that of an option is the option
    too where the topic takes it.
    """

    def __init__(
        self, schema: StructType, body_columns: Sequence[str], what: str, topic: Topic | None
    ) -> None:
        reserved = {*OPTION_COLUMNS, *METADATA.fieldNames()}
        lower = {name: name.lower() for name in schema.fieldNames()}
        self._ours = {
            name: low if low in reserved and name not in body_columns else name for name, low in lower.items()
        }
        types = {self._ours[field.name]: field.dataType for field in schema.fields}
        if len(types) < len(schema.fields):
            raise ConfigurationError(
                f"{what} cannot use two columns with one name: {', '.join(schema.names)}"
            )
        body_names = list(body_columns) or ["value"]
        missing = sorted(set(body_names) - set(types))
        if missing:
            raise ConfigurationError(
                f"{what} needs the column {', '.join(missing)}; there are {', '.join(sorted(types))}"
            )
        was_read = set(types) >= OF_A_READ
        self.options = [name for name in OPTION_COLUMNS if name in types]
        if topic is not None:
            may_be_left = types if was_read else body_columns
            self.options = [
                name for name in self.options if name in taken_by(topic) or name not in may_be_left
            ]
        self.has_topics = topic is None
        """Whether a column names the topic of each row."""
        self.has_envelopes = was_read and "envelope" in types
        """Whether the options that a message had when it was read are in a column."""
        used = {*body_names, *self.options, *(["topic"] if self.has_topics else ())}
        unused = set(types) - used - (OF_A_READ_ONLY if was_read else frozenset())
        if self.has_topics and "topic" not in types:
            raise ConfigurationError(
                f"{what} needs the option topic, or a column topic; there are {', '.join(sorted(types))}"
            )
        if unused:
            raise ConfigurationError(
                f"{what} cannot use the columns {', '.join(sorted(unused))}: name them in bodyColumns, or drop them"
            )
        for name in sorted(used | ({"envelope"} if self.has_envelopes else set())):
            if name in body_columns:
                check_json_type(name, types[name], what)
            if name in self.options or name in ("value", "topic", "envelope"):
                _check_type(name, types[name], what)

    def topics(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the column with the topic of each row, as bytes."""
        return batch.column([self._ours.get(name) for name in batch.schema.names].index("topic")).cast(
            pa.binary()
        )

    def named(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows with our names for their columns.

        Texts and bytes have the types of short ones: with ``spark.sql.execution.arrow.useLargeVarTypes`` they are large.
        """
        names = [self._ours.get(name, name) for name in batch.schema.names]
        columns = [
            column.cast(_SHORT_TYPES[column.type]) if column.type in _SHORT_TYPES else column
            for column in batch.columns
        ]
        return pa.RecordBatch.from_arrays(columns, names=names)


def taken_by(topic: Topic) -> set[str]:
    """Return the option columns that a topic takes."""
    names = {_SCORED.get(topic.type, "delay")}
    names |= set() if topic.slot_basis is not None else {"slot_basis"}
    return names | WITH_KEYS if topic.keyed else names


def needed_by(topic: Topic) -> list[str]:
    """Return the option columns that no row may leave out."""
    scored = _SCORED.get(topic.type)
    default = {"time_range": topic.time_range_ms, "priority": topic.default_priority}.get(scored or "")
    needed = [] if scored is None or default is not None else [scored]
    return [*needed, "key"] if topic.keyed and not topic.is_fifo else needed


def check_taken(topic: Topic, columns: Sequence[str]) -> None:
    """Raise ``ConfigurationError`` if a topic does not take one of the columns, or needs another one."""
    misplaced = [name for name in columns if name not in taken_by(topic)]
    if misplaced:
        why = (
            f"it has SLOT_BASIS {topic.slot_basis!r}"
            if misplaced == ["slot_basis"]
            else f"it has IDENTITY {topic.identity!r}, whose messages have no keys"
            if set(misplaced) <= WITH_KEYS
            else f"it has the type {topic.type.value}"
        )
        raise ConfigurationError(f"topic {topic.name} takes no column {', '.join(misplaced)}: {why}")
    missing = [name for name in needed_by(topic) if name not in columns]
    if "key" in missing:
        raise ConfigurationError(
            f"topic {topic.name} has IDENTITY 'key': a write needs the column key. Without keys, what a task sends "
            "twice would be there twice"
        )
    if missing and topic.type is not TopicType.RANGE_MERGE:
        hint = ", or the option defaultPriority; in a frame that was read it may be int(score)"
        hint = hint if topic.is_priority else ""
        raise ConfigurationError(
            f"topic {topic.name} has the type {topic.type.value}: a write needs the column {missing[0]}{hint}"
        )
    if missing:
        raise ConfigurationError(
            f"topic {topic.name} has the type range_merge: set the option timeRange (such as 5s), or add a column time_range"
        )


def _check_type(name: str, kind: DataType, what: str) -> None:
    if name not in _TYPES:
        return
    names, types_text = _TYPES[name]
    fits = kind.typeName() in names
    if isinstance(kind, DecimalType):
        fits = fits and (name in DURATIONS or not kind.scale)
    if isinstance(kind, MapType):
        fits = kind.simpleString() == "map<string,string>"
    if not fits:
        raise ConfigurationError(
            f"{what}: the column {name} has the type {kind.simpleString()}, it must be {types_text}"
        )


def check_json_type(name: str, kind: DataType, what: str) -> None:
    """Raise ``ConfigurationError`` for a column whose values JSON cannot represent."""
    inner: list[tuple[str, DataType]] = []
    fits = kind.typeName() in _IN_JSON
    if isinstance(kind, StructType):
        fits, inner = True, [(f"{name}.{field.name}", field.dataType) for field in kind.fields]
    elif isinstance(kind, ArrayType):
        fits, inner = True, [(f"{name}[]", kind.elementType)]
    elif isinstance(kind, MapType):
        fits, inner = kind.keyType.typeName() in _TEXT - {"binary"}, [(f"{name}[]", kind.valueType)]
    if not fits:
        hint = f"; take to_json({name})" if kind.typeName() == "variant" else "; cast it to text"
        raise ConfigurationError(
            f"{what}: the column {name} has the type {kind.simpleString()}, which JSON cannot represent{hint}"
        )
    for path, part in inner:
        check_json_type(path, part, what)


def rows_of(
    topic: Topic,
    columns: Sequence[str],
    batch: pa.RecordBatch,
    bodies: list[bytes],
    parsed: list[object] | None,
    build: Callable[[list[int]], list[Outgoing]],
    now_ms: int,
) -> ArrowRows | None:
    """Return rows that can be sent as columns. None: each has to be looked at, or one is invalid.

    ``columns``: those of the options; times are in ms. ``bodies`` are encoded; ``parsed``: the same as plain data, if
    SLOT_BASIS needs it. ``now_ms``: the server's clock.
    """
    column_names, scored = set(columns), _SCORED.get(topic.type)
    if (
        topic.is_fifo
        or topic.origin
        or topic.accumulate
        or column_names - {"key", "slot_basis", scored}
        or not bodies
    ):
        return None
    if topic.keyed != ("key" in column_names):
        return None
    members = _keys(batch.column("key")) if topic.keyed else bodies
    column = batch.column(scored) if scored in column_names else None
    if topic.is_priority and topic.default_priority is not None:
        default = pa.scalar(topic.default_priority, pa.int64())
        column = pa.repeat(default, len(bodies)) if column is None else pc.coalesce(column, default)
    when = None if column is None else _numbers(topic, column, now_ms)
    if members is None or (column is not None and when is None):
        return None
    scores, ranges = (None, when) if topic.type is TopicType.RANGE_MERGE else (when, None)
    if ranges is not None and len(set(members)) < len(members):
        return None
    if topic.slot_basis is None and "slot_basis" not in column_names:
        return ArrowRows(members, build, scores, ranges, _enveloped(bodies) if topic.keyed else None)
    try:
        bases = _bases(topic, batch, column_names, parsed)
        envelopes = _enveloped(bodies, bases) if topic.keyed and bases is not None else None
    except InvalidMessage:
        return None
    return None if bases is None else ArrowRows(members, build, scores, ranges, envelopes, bases)


def _enveloped(raws: Sequence[bytes], bases: Sequence[bytes] | None = None) -> list[bytes]:
    """Return the envelopes of messages without options, with their slot bases if these are given.

    Raises ``InvalidMessage`` for a basis that a keyed message cannot have.
    """
    if bases is None:
        head = encode_envelope(Envelope(b""))
        return [head + raw for raw in raws]
    heads = {
        basis: encode_envelope(Envelope(b"", slot_basis=check_stored_basis(basis))) for basis in set(bases)
    }
    return [heads[basis] + raw for basis, raw in zip(bases, raws, strict=True)]


def _bases(
    topic: Topic, batch: pa.RecordBatch, given: set[str], parsed: list[Any] | None
) -> list[bytes] | None:
    """Return the slot basis of each row. None: some have none. Raises ``InvalidMessage`` for one that is invalid."""
    if topic.slot_basis is None:
        is_whole = not batch.column("slot_basis").null_count
        return list(map(basis_bytes, values(batch, "slot_basis", topic))) if is_whole else None
    if parsed is None or "slot_basis" in given:
        return None
    try:
        return [basis_bytes(body[topic.slot_basis]) for body in parsed]
    except (KeyError, TypeError):
        return None


def _numbers(topic: Topic, column: pa.Array, now_ms: int) -> pa.Array | None:
    """Return the column that says when messages are due, or how urgent they are; None if a value is missing or invalid.

    The bounds are those of ``placement.score_of``, which reports the first invalid value if the rows are built one by one.
    """
    least, most = {
        TopicType.RANGE_MERGE: (1, MAX_DURATION_MS),
        TopicType.PRIORITY: (topic.min_priority, MAX_PRIORITY),
    }.get(topic.type, (max(LAST_RETRY, now_ms) + 1, MAX_INSTANT_MS))
    if column.null_count or not pa.types.is_integer(column.type):
        return None
    bounds = pc.min_max(column).as_py()
    return column if least <= bounds["min"] and bounds["max"] <= most else None


def _keys(column: pa.Array) -> list[bytes] | None:
    """Return keys as members. None: one is missing or invalid."""
    if column.null_count or not pa.types.is_string(column.type):
        # Bytes must be text, which is looked at row by row.
        return None
    sizes = pc.min_max(pc.binary_length(column)).as_py()
    if not 0 < sizes["min"] <= sizes["max"] <= MAX_KEY_BYTES:
        return None
    keys: list[bytes] = column.cast(pa.binary()).to_pylist()
    return keys


def values(batch: pa.RecordBatch, name: str, topic: Topic) -> list[object]:
    """Return a column as values for ``Producer.build``; times are in ms."""
    column = batch.column(name)
    items: list[Any] = column.to_pylist()
    if name == "headers":
        return [None if pairs is None else dict(pairs) for pairs in items]
    if name == "slot_basis" and (convert := _converter(column.type)):
        return list(map(convert, items))
    if name == "key" and pa.types.is_binary(column.type):
        # On fifo topics the member of a message that was sent without a key begins so.
        items = [None if key is not None and is_drawn(topic, key) else key for key in items]
        try:
            return [None if key is None else key.decode() for key in items]
        except UnicodeDecodeError:
            raise InvalidMessage("key is not UTF-8") from None
    return items


MOST_VALUES, MEAN_SIZE, MOST_SIZE = 12, 40, 4_096
"""The number of values in an object, the mean number of bytes for each, and the size of a text beyond which
parsing is faster than a pattern."""

SAMPLE, MOSTLY = 100, 0.9
"""The number of texts, and the share of them that must match before the pattern is used for the others."""

LARGEST_FLOAT32 = 3.4028235e38

_JSON_TEXT = r'"[^"\\\x00-\x1f]*"|null'
"""A text without escapes: it is written as it is read."""
_JSON_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|null"
_JSON_FLAG = "true|false|null"

_ESCAPED = r'["\\\x00-\x1f]'

_REWRITTEN = r"\A-0\z|\A.{300}"
"""Numbers that may not stay as they are: an integer without its sign, and what may be beyond floats."""

_KEPT_NUMBER = r"0|-?[1-9][0-9]*|-?(?:0|[1-9][0-9]*)\.[0-9]+|null"
"""A number that stays as it is, in a text of less than ``LONG`` bytes."""

LONG = 300
"""From this size on a text may have a number beyond floats."""


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
    numbers = [index for index, kind in enumerate(kinds) if kind is _JSON_NUMBER]
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
    return (
        _JSON_FLAG
        if isinstance(value, bool)
        else _JSON_NUMBER
        if isinstance(value, (int, float))
        else _JSON_TEXT
    )


def _canonical_pattern(value: object) -> str | None:
    """Return the pattern of canonical texts of values like this one. None: its keys are in another order."""
    if not isinstance(value, dict):
        kind = _kind(value)
        return f"(?:{_KEPT_NUMBER if kind is _JSON_NUMBER else kind})"
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
    """Return what makes of a value of this type, as Arrow gives it, the value to write as JSON. None: it is that value.

    Raises ``InvalidMessage`` for a type of which no value can be written.
    """
    if pa.types.is_timestamp(kind):
        try:
            pa.scalar(0, kind).as_py()
        except (ValueError, KeyError):
            # Java knows zones that Python does not, such as GMT+8 and PST.
            raise InvalidMessage(
                f"the time zone {kind.tz} is unknown: set spark.sql.session.timeZone to a name such as Asia/Shanghai, or "
                "to an offset such as +08:00"
            ) from None
    if pa.types.is_float32(kind):
        return shortest_float
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


def shortest_float(value: float | None) -> float | None:
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
