"""The canonical JSON of many rows at once is what each row alone has."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_rmq.core.model.body_codec import encode_decoded, encode_json, exact_json
from django_rmq.core.model.topic import TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import InvalidMessage
from django_rmq.spark.columns import SAMPLE, canonical_rows, canonical_texts
from tests.spark.conftest import MakeQueue, Queue

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["é", "\u2028", "\x7f", 'a"b', "back\\slash", "line\nfeed", "\x00", " ", "null", "12", "{}"]
)
numbers = st.from_regex(r"\A-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?\Z")
literals = numbers | st.sampled_from(
    [
        *("true", "false", "null", "NaN", "Infinity", "-", "01", "1.", ".5", "+1"),
        *("-0", "-0.0", "0.0001", "0.00001", "1.50"),
    ]
)
spaces = st.sampled_from(["", "", "", " ", "  ", "\n", "\t"])


def alone(text: str) -> bytes | None:
    """Return what a text becomes if it is parsed and encoded by itself. None: it is invalid."""
    try:
        return encode_decoded(exact_json(text))
    except (ValueError, InvalidMessage):
        return None


@st.composite
def values(draw: st.DrawFn, depth: int = 1) -> str:
    if depth and draw(st.integers(0, 4)) == 0:
        return draw(objects(draw(st.lists(words, max_size=3, unique=True)), depth=depth - 1))
    word = draw(words)
    quoted = [json.dumps(word), json.dumps(word, ensure_ascii=False), f'"{word}"']
    return draw(literals | st.sampled_from([*quoted, "[1, 2]"]))


@st.composite
def objects(draw: st.DrawFn, keys: list[str], depth: int = 1) -> str:
    space = draw(spaces)
    written = [
        f"{json.dumps(key, ensure_ascii=draw(st.booleans()))}:{space}{draw(values(depth))}" for key in keys
    ]
    return "{" + f",{space}".join(written) + "}"


@st.composite
def columns(draw: st.DrawFn) -> list[str]:
    keys = draw(st.lists(words, min_size=1, max_size=5))
    like = objects(keys)
    other = objects(draw(st.permutations(keys))) | objects(keys[:-1]) | literals
    return [draw(like), *draw(st.lists(like | like | like | other, max_size=6))]


@settings(max_examples=150, deadline=None)
@given(columns())
def test_a_text_is_rewritten_to_its_canonical_form_or_left_to_the_parser(texts: list[str]) -> None:
    # All by itself, so that a text like no other does not keep the others from the pattern.
    for text in texts:
        found = canonical_texts(pa.array([texts[0]] * SAMPLE + [text])).to_pylist()
        assert found[-1] is None or found[-1].encode() == alone(text)
        assert found[0] is None or found[0].encode() == alone(texts[0])


@settings(max_examples=150, deadline=None)
@given(literals)
def test_a_number_keeps_its_text_as_the_parser_keeps_it(literal: str) -> None:
    # Keys in another order are taken out and joined; those in order are only looked at.
    for form in ('{"b":%s,"a":2}', '{"a":2,"b":%s}'):
        found = canonical_texts(pa.array([form % "1"] * SAMPLE + [form % literal]))[-1].as_py()
        assert found is None or found.encode() == alone(form % literal)


def test_texts_in_canonical_form_are_stored_as_they_are_and_the_others_are_left_to_the_parser() -> None:
    inner = '"of":{"b":%s,"d":"%s"}'
    texts = [f'{{"a":{n},{inner % (n / 8, "x")}}}' for n in range(200)]
    texts[7] = f'{{"a": 1,{inner % (1, "x")}}}'
    texts[8] = f'{{"a":1,{inner % (1, chr(92) + "u0041")}}}'
    texts[9] = f'{{"a":-0,{inner % (1, "x")}}}'
    found = canonical_texts(pa.array(texts)).to_pylist()
    assert [found.index(None), found.count(None)] == [7, 3]
    assert all(text == one for text, one in zip(texts, found, strict=True) if one is not None)
    # A number that may be beyond floats is looked at, however long the text is.
    long = [f'{{"a":{"9" * 400},"b":{n}}}' for n in range(200)]
    assert canonical_texts(pa.array(long)).null_count == len(long)


PLAIN = (
    '{"sku":7,"change":"é","price":12.95,"sold":true,"by":{"shop":"b","city":null}}',
    '{"sku":-8,"change":"","price":-0.0,"sold":false,"by":{"shop":null,"city":"a"}}',
    '{"sku":0, "change":"\x7f", "price":0.0001, "sold":null, "by":{"shop":"{}", "city":"a b"}}',
    '{"sku":7,"change":"x","price":1.50,"sold":true,"by":{"shop":"b","city":"c"}}',
    '{"sku":7,"change":"x","price":12345678901234567.89,"sold":true,"by":{"shop":"b","city":"c"}}',
    '{"sku":123456789012345,"change":null,"price":1.0,"sold":true,"by":{"shop":"x","city":"y"}}',
)
SPECIAL = (
    '{"sku":7,"change":"\\u00e9","price":1.5,"sold":true,"by":{"shop":"b","city":"c"}}',
    '{"sku":7,"change":"x\n","price":1.5,"sold":true,"by":{"shop":"b","city":"c"}}',
    '{"sku":7,"change":"x","price":1e5,"sold":true,"by":{"shop":"b","city":"c"}}',
    '{"sku":-0,"change":"x","price":0.00001,"sold":true,"by":{"shop":"b","city":"c"}}',
    '{"sku":7,"sku":8,"change":"x","price":1.5,"sold":true,"by":{"shop":"b","city":"c"}}',
    '{"change":"x","sku":7,"price":1.5,"sold":true,"by":{"shop":"b","city":"c"}}',
    '{"sku":7,"change":"x","price":1.5,"sold":true,"by":["b"]}',
)


def test_plain_texts_are_all_rewritten_and_the_others_are_not() -> None:
    found = canonical_texts(pa.array([*PLAIN * 30, *SPECIAL])).to_pylist()
    assert [text.encode() for text in found[: -len(SPECIAL)]] == [alone(text) for text in PLAIN] * 30
    assert found[-len(SPECIAL) :] == [None] * len(SPECIAL)


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(["[1]", '{"a":1}'], id="no object"),
        pytest.param(['{"a":[1]}'], id="a list"),
        pytest.param(['{"a":1}', '{"b":1}'], id="each text is another"),
        pytest.param(['{"a":"%s"}' % ("x" * 400)], id="long texts"),
        pytest.param(["{" + ",".join(f'"{n}":1' for n in range(13)) + "}"], id="many values"),
        pytest.param(['{"\\ud800":1}'], id="a key that is no Unicode"),
    ],
)
def test_texts_without_a_common_pattern_are_all_left_to_the_parser(texts: list[str]) -> None:
    assert canonical_texts(pa.array(texts)).null_count == len(texts)


def test_a_column_that_is_not_utf_8_is_left_to_the_parser() -> None:
    raw = pa.array([b'{"b":1,"a":"\xed\xa0\x80"}'])
    column = pa.StringArray.from_buffers(1, raw.buffers()[1], raw.buffers()[2])
    assert canonical_texts(column).null_count == 1


def test_a_column_without_rows_stays_empty() -> None:
    assert canonical_texts(pa.array([], pa.string())).to_pylist() == []


EARLY, LATE = datetime.fromisoformat("1970-01-01"), datetime.fromisoformat("9000-01-01")
KINDS: dict[pa.DataType, Any] = {
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.bool_(): st.booleans(),
    pa.string(): words,
    pa.float32(): st.floats(width=32, allow_nan=False, allow_infinity=False),
    pa.float64(): st.floats(allow_nan=False, allow_infinity=False),
    pa.decimal128(20, 4): st.decimals(-1000, 1000, places=4),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(EARLY, LATE),
    pa.timestamp("us", "UTC"): st.datetimes(EARLY, LATE, timezones=st.just(UTC)),
    pa.list_(pa.int32()): st.lists(st.integers(0, 9), max_size=3),
    pa.struct([("z", pa.string()), ("a", pa.int32())]): st.fixed_dictionaries(
        {"z": words, "a": st.integers(0, 9)}
    ),
}


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    names = draw(st.lists(words, min_size=1, max_size=4, unique=True))
    count = draw(st.integers(0, 4))
    arrays = []
    for _ in names:
        kind = draw(st.sampled_from(list(KINDS)))
        rows = st.lists(st.none() | KINDS[kind], min_size=count, max_size=count)
        arrays.append(pa.array(draw(rows), kind))
    return pa.RecordBatch.from_arrays(arrays, names)


@settings(max_examples=150, deadline=None)
@given(batches())
def test_rows_become_the_objects_that_the_encoder_makes_of_them(batch: pa.RecordBatch) -> None:
    found = [text.encode() for text in canonical_rows(batch, batch.schema.names).to_pylist()]
    assert found == [
        encode_json({name: as_json(batch.schema.field(name).type, value) for name, value in row.items()})
        for row in batch.to_pylist()
    ]


def as_json(kind: pa.DataType, value: Any) -> Any:
    """What JSON has for a value of a column: of a 32-bit float the text that Arrow gives it."""
    if kind == pa.float32() and value is not None:
        return float(pa.scalar(value, kind).cast(pa.string()).as_py())
    return value


def test_a_decimal_is_the_text_that_every_other_send_writes() -> None:
    kind = pa.decimal128(20, 10)
    values = [Decimal("0E-10"), Decimal("-1.000E-7"), Decimal("1.5000000000"), None]
    columns = [pa.array(values, kind), pa.array([[value] for value in values], pa.list_(kind))]
    found = canonical_rows(pa.RecordBatch.from_arrays(columns, ["a", "b"]), ["a", "b"]).to_pylist()
    assert found == [encode_json({"a": value, "b": [value]}).decode() for value in values]


def test_a_map_is_an_object_and_a_short_float_stays_short() -> None:
    pairs = pa.map_(pa.string(), pa.float32())
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([[("b", 0.1), ("a", None)], [], None], pairs),
            pa.array([{"m": [("x", 1.5)]}, {"m": None}, None], pa.struct([("m", pairs)])),
            pa.array([[[("y", 16777216.0)]], [], None], pa.list_(pairs)),
            pa.array([0.1, 3.4028235e38, 1e-45], pa.float32()),
        ],
        ["map", "struct", "list", "float"],
    )
    assert canonical_rows(batch, batch.schema.names).to_pylist() == [
        '{"float":0.1,"list":[{"y":16777216.0}],"map":{"a":null,"b":0.1},"struct":{"m":{"x":1.5}}}',
        '{"float":3.4028235e+38,"list":[],"map":{},"struct":{"m":null}}',
        '{"float":1e-45,"list":null,"map":null,"struct":null}',
    ]


def test_a_map_whose_keys_are_no_text_is_refused() -> None:
    numbers = pa.array([[(1, 2)]], pa.map_(pa.int32(), pa.int32()))
    with pytest.raises(InvalidMessage, match="its keys must be text"):
        canonical_rows(pa.RecordBatch.from_arrays([numbers], ["a"]), ["a"])


@pytest.mark.parametrize("wrap", [lambda at: at, pa.list_, lambda at: pa.map_(pa.string(), at)])
def test_a_zone_that_java_alone_knows_is_named(wrap: Callable[[pa.DataType], pa.DataType]) -> None:
    batch = pa.record_batch({"a": pa.nulls(1, wrap(pa.timestamp("us", "GMT+8")))})
    with pytest.raises(
        InvalidMessage, match=r"column a: the time zone GMT\+8 is unknown: set spark.sql.session"
    ):
        canonical_rows(batch, ["a"])


def test_only_the_columns_that_are_named_enter_the_object() -> None:
    batch = pa.RecordBatch.from_pydict({"b": [1], "c": ["x"], "a": [date(2026, 1, 2)]})
    assert canonical_rows(batch, ["b", "a"]).to_pylist() == ['{"a":"2026-01-02","b":1}']


def sent(topic: Queue, bodies: Sequence[Any]) -> set[tuple[int, bytes]]:
    """Return slot and member that any other send of these bodies makes."""
    built = [Producer(topic.broker).build(topic.topic, body, priority=500) for body in bodies]
    return {(out.slot, out.member) for out in built}


@pytest.mark.parametrize("basis", [None, "shop"])
def test_texts_that_the_pattern_rewrites_and_others_are_stored_side_by_side(
    queue: MakeQueue, basis: str | None
) -> None:
    topic = queue(TopicType.PRIORITY, slots=4, slot_basis=basis)
    rows = [f'{{"shop": {number}, "change": "x"}}' for number in range(200)]
    rows[120:123] = ['{"shop":-0,"change":"x"}', '{"shop":"b","change":"\\n"}', '{"shop":"b","list":[1, 2]}']
    topic.write_batch({"value": rows, "priority": [500] * len(rows)})
    assert topic.places().keys() == sent(topic, [json.loads(row) for row in rows])


def test_a_bad_text_among_those_that_the_pattern_rewrites_is_named(queue: MakeQueue) -> None:
    topic = queue(TopicType.PRIORITY, slots=4)
    rows = [f'{{"b":{number},"a":2}}' for number in range(200)]
    rows[150] = '{"b":NaN,"a":2}'
    with pytest.raises(InvalidMessage, match=r"row \{'value': .*NaN.*NaN or infinity"):
        topic.write_batch({"value": rows, "priority": [500] * len(rows)})
    assert topic.places() == {}


def test_columns_become_the_body_and_the_slot_basis_in_it(queue: MakeQueue) -> None:
    topic = queue(TopicType.PRIORITY, slots=4, slot_basis="shop")
    rows: list[dict[str, Any]] = [{"shop": "a", "n": 1.5}, {"shop": "b", "n": None}, {"shop": "c", "n": 3.0}]
    columns = pa.RecordBatch.from_pylist([{**row, "priority": 500} for row in rows])
    topic.write_batch(columns, bodyColumns="shop,n")
    assert topic.places().keys() == sent(topic, rows)


PAIRS = pa.map_(pa.string(), pa.int64())
DECIMALS = [Decimal("1.50000000"), Decimal("5.00000000"), Decimal("1E-8")]


@pytest.mark.parametrize(
    ("kind", "values", "written"),
    [
        (pa.float32(), [0.1, 3.4e38, None], [0.1, 3.4e38, None]),
        (pa.list_(pa.float32()), [[0.1]], [[0.1]]),
        (PAIRS, [[("b", 1), ("a", 2)]], [{"a": 2, "b": 1}]),
        (pa.timestamp("us", "UTC"), [datetime(2040, 1, 1, tzinfo=UTC)], ["2040-01-01T00:00:00+00:00"]),
        (pa.large_string(), ["é"], ["é"]),
        (pa.decimal128(20, 8), DECIMALS, DECIMALS),
        (pa.decimal128(38, 0), [Decimal(10**30)], [Decimal(10**30)]),
    ],
)
def test_the_slot_basis_of_a_column_is_that_of_any_other_send(
    queue: MakeQueue, kind: pa.DataType, values: list[Any], written: list[Any]
) -> None:
    topic = queue(TopicType.PRIORITY, slots=256, slot_basis="shop", default_priority=500)
    topic.write_batch(pa.record_batch({"shop": pa.array(values, kind)}), bodyColumns="shop")
    rows = [{"shop": value} for value in written]
    assert topic.places().keys() == sent(topic, rows)
    plain, bodies = (
        queue(TopicType.PRIORITY, slots=256, default_priority=500),
        list(map(str, range(len(values)))),
    )
    plain.write_batch({"value": bodies, "slot_basis": pa.array(values, kind)})
    build = Producer(plain.broker).build
    built = [
        build(plain.topic, at, priority=500, **({} if basis is None else {"slot_basis": basis}))
        for at, basis in enumerate(written)
    ]
    assert plain.places().keys() == {(out.slot, out.member) for out in built}
