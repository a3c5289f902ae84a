"""Canonical JSON of many rows at once: the same bytes as ``encode_json`` makes of each.

Most texts of a topic have the same keys in the same order. A pattern made from the first one takes their values
out, and these are joined in the canonical order. It matches only texts of which this is the whole difference; all
others are parsed and encoded one by one. Columns are written as JSON one by one and then joined.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from django_rmq.core.model.body_codec import decode_json, encode_json
from django_rmq.exceptions import InvalidMessage

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
        found = decode_json(text)
        if not isinstance(found, dict):
            return None
        kinds: list[str] = []
        pattern, form = _described(found, kinds)
        canonical = _canonical_pattern(found)
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
    parts: list[Any] = []
    for name in sorted(set(columns)):
        try:
            written = _written(batch.column(name))
        except (InvalidMessage, ValueError, OverflowError) as error:
            raise InvalidMessage(f"column {name}: {error}") from None
        parts += [f"{',' if parts else '{'}{encode_json(name).decode()}:", written]
    return _joined([*parts, "}"])


def _written(column: pa.Array) -> pa.Array:
    """Return the values of a column as JSON texts."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return pc.coalesce(column.cast(pa.string()), "null")
    if pa.types.is_string(kind) and _is_plain(column):
        return pc.coalesce(_joined(['"', column, '"']), "null")
    convert = _converter(kind)
    rows = column.to_pylist() if convert is None else map(convert, column.to_pylist())
    return pa.array([encode_json(value).decode() for value in rows], pa.string())


def _converter(kind: pa.DataType) -> Callable[[Any], Any] | None:
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


def _same(value: Any) -> Any:
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


def _joined(parts: Sequence[Any]) -> pa.Array:
    """Return rows of parts, each of which is a text or a column of texts; null if one of its parts is null."""
    return pc.binary_join_element_wise(*parts, "")
