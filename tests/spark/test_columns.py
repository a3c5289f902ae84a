"""Rows that are sent as columns become the messages that any other send of them makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    BinaryType,
    DayTimeIntervalType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from django_rmq.core.model.body_codec import decode_json, encode_decoded, encode_json
from django_rmq.core.model.topic import TopicType
from django_rmq.core.producer.placement import instant_ms
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import InvalidMessage
from django_rmq.spark.columns import instants_ms
from django_rmq.spark.source_options import WRITE, SourceOptions
from django_rmq.spark.writer import Target, Writer
from tests.spark.conftest import Queue

MakeQueue = Callable[..., Queue]

DAY = 86_400_000
LATER = 2_000_000_000_000
TYPES: dict[str, tuple[Any, Any]] = {
    "value": (StringType(), pa.string()),
    "key": (StringType(), pa.string()),
    "slot_basis": (StringType(), pa.string()),
    "priority": (LongType(), pa.int64()),
    "fixed_time": (TimestampType(), pa.timestamp("ms", "UTC")),
    "time_range": (DayTimeIntervalType(), pa.duration("ms")),
    "headers": (MapType(StringType(), StringType()), pa.map_(pa.string(), pa.string())),
}

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
documents = st.dictionaries(
    texts,
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    max_size=4,
)
many = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True)
class Kind:
    """A topic, and the columns of what is sent to it."""

    type: TopicType
    columns: tuple[str, ...]
    options: dict[str, Any]


KINDS = {
    "json": Kind(TopicType.RANGE_MERGE, (), {"time_range_ms": DAY}),
    "text": Kind(TopicType.RANGE_MERGE, (), {"time_range_ms": DAY, "body": "text"}),
    "keyed": Kind(TopicType.RANGE_MERGE, ("key",), {"time_range_ms": DAY, "identity": "key"}),
    "range": Kind(TopicType.RANGE_MERGE, ("time_range",), {}),
    "basis": Kind(TopicType.PRIORITY, ("priority", "slot_basis"), {}),
    "field": Kind(TopicType.PRIORITY, ("priority",), {"slot_basis": "shop"}),
    "priority": Kind(TopicType.PRIORITY, ("priority", "key"), {"identity": "key"}),
    "usual": Kind(TopicType.PRIORITY, (), {"default_priority": 500}),
    "time": Kind(TopicType.FIXED_TIME, ("fixed_time",), {}),
    "all": Kind(TopicType.FIXED_TIME, ("fixed_time", "key", "slot_basis"), {"identity": "key"}),
    "entity": Kind(TopicType.FIXED_TIME, ("fixed_time", "key"), {"identity": "key", "slot_basis": "shop"}),
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "key": texts,
    "slot_basis": texts,
    "priority": st.integers(100, 1 << 40),
    "fixed_time": st.integers(LATER, LATER + DAY),
    "time_range": st.sampled_from([DAY, 2 * DAY, 30 * DAY]),
}


def writer(topic: Queue, columns: tuple[str, ...]) -> Writer:
    schema = StructType([StructField(name, TYPES[name][0]) for name in ("value", *columns)])
    range_ms = topic.topic.time_range_ms
    options = {**topic.options, **({"timeRange": f"{range_ms}ms"} if range_ms else {})}
    if topic.topic.default_priority:
        options["defaultPriority"] = str(topic.topic.default_priority)
    return Writer(SourceOptions(options, WRITE, "a test"), schema, overwrite=False)


def stored(topic: Queue) -> dict[tuple[int, bytes], tuple[float, bytes | None]]:
    """Return slot and member of what waits, with score and envelope."""
    return {
        (slot, entry.member): (entry.score, entry.envelope)
        for slot, page in enumerate(topic.each("list_messages", "store"))
        for entry in page.entries
    }


@pytest.mark.parametrize("headers", [None, {"a": "b"}])
def test_a_row_without_a_priority_has_the_default_one(queue: MakeQueue, headers: Any) -> None:
    topic = queue(TopicType.PRIORITY, identity="key", default_priority=500)
    columns = {
        "value": pa.array(["1", "2", "3"]),
        "key": pa.array(["a", "b", "c"]),
        "priority": pa.array([90, None, 600], pa.int32()),
        # With headers each row is built by itself.
        "headers": pa.array([headers and list(headers.items())] * 3, TYPES["headers"][1]),
    }
    writer(topic, ("key", "priority", "headers")).write(iter([pa.RecordBatch.from_pydict(columns)]))
    found = {member: score for (_, member), (score, _) in stored(topic).items()}
    assert found == {b"a": 90.0, b"b": 500.0, b"c": 600.0}


def test_a_default_priority_is_above_the_numbers_of_retries(queue: MakeQueue) -> None:
    with pytest.raises(InvalidMessage, match=r"priority must be from 21 .* got 20"):
        writer(queue(TopicType.PRIORITY, max_retries=20, default_priority=20), ())


@many
@given(data=st.data())
@pytest.mark.parametrize("name", KINDS)
def test_columns_become_the_messages_of_any_other_send(
    queue: MakeQueue, monkeypatch: pytest.MonkeyPatch, name: str, data: st.DataObject
) -> None:
    kind = KINDS[name]
    topic = queue(kind.type, slots=4, **kind.options)
    found = documents
    if topic.topic.slot_basis:
        found = st.tuples(documents, texts | st.integers()).map(lambda pair: {**pair[0], "shop": pair[1]})
    row = st.fixed_dictionaries({"value": found, **{column: VALUES[column] for column in kind.columns}})
    rows = data.draw(st.lists(row, min_size=1, max_size=20, unique_by=lambda row: encode_json(row["value"])))
    if topic.topic.body == "text":
        rows = [{**row, "value": json.dumps(row["value"])} for row in rows]

    producer = Producer(topic.broker)
    expected: dict[tuple[int, bytes], tuple[float, bytes | None]] = {}
    for given_row in rows:
        options = {column: given_row[column] for column in kind.columns}
        out = producer.build(topic.topic, given_row["value"], **options)
        place = out.slot, out.member
        known = expected.get(place)
        # Of several messages with one key the first one decides when it is due, or the last one; the last body counts.
        first = kind.type is TopicType.RANGE_MERGE and known is not None
        expected[place] = (known[0] if first and known else out.score, out.envelope)

    alone: list[int] = []
    built = Target._built

    def spied(target: Target, batch: pa.RecordBatch, found: list[bytes], options: Sequence[str]) -> Any:
        alone.append(len(found))
        return built(target, batch, found, options)

    monkeypatch.setattr(Target, "_built", spied)
    text = [
        row if isinstance(row["value"], str) else {**row, "value": json.dumps(row["value"])} for row in rows
    ]
    columns = {
        name: pa.array([row[name] for row in text], TYPES[name][1]) for name in ("value", *kind.columns)
    }
    writer(topic, kind.columns).write(iter([pa.RecordBatch.from_pydict(columns)]))
    monkeypatch.undo()

    # To make it known that there are explicit slot bases, one message is built.
    assert alone == ([1] if "slot_basis" in kind.columns else [])
    waiting = stored(topic)
    assert waiting.keys() == expected.keys()
    now = topic.broker.now_ms()
    for place, (score, envelope) in waiting.items():
        wanted, body = expected[place]
        assert envelope == body
        if kind.type is TopicType.RANGE_MERGE:
            # What is inserted may be due later by the time that one request takes.
            assert now + wanted - 600_000 < score <= now + wanted + 10_000
        else:
            assert score == wanted


@pytest.mark.parametrize(
    ("name", "bad", "error"),
    [
        ("keyed", {"key": "x" * 2_000}, "key has 2000 bytes"),
        ("keyed", {"key": ""}, "non-empty"),
        ("range", {"time_range": 0}, "time_range must be"),
        ("range", {"time_range": None}, "column time_range is null"),
        ("time", {"fixed_time": 1_000}, "not in the future"),
        ("time", {"fixed_time": 1 << 42}, "is after"),
        ("time", {"fixed_time": None}, "column fixed_time is null"),
        ("priority", {"priority": 3}, "priority must be from"),
        ("field", {"value": "{}"}, "SLOT_BASIS 'shop'"),
        ("entity", {"value": json.dumps({"shop": "x" * 2_000})}, "slot_basis has 2000 bytes"),
        ("json", {"value": "{"}, "Expecting property name"),
        ("json", {"value": "[NaN]"}, "NaN or infinity"),
        ("json", {"value": '"\\ud800"'}, "not valid Unicode"),
    ],
)
def test_a_bad_row_is_named_and_nothing_of_its_chunk_is_sent(
    queue: MakeQueue, name: str, bad: dict[str, Any], error: str
) -> None:
    kind = KINDS[name]
    topic = queue(kind.type, slots=4, **kind.options)
    good = {
        "value": '{"shop":1}',
        "key": "k",
        "slot_basis": "b",
        "priority": 500,
        "fixed_time": LATER,
        "time_range": DAY,
    }
    rows = [good, {**good, "value": '{"shop":2}'}, {**good, **bad}]
    columns = {
        each: pa.array([row[each] for row in rows], TYPES[each][1]) for each in ("value", *kind.columns)
    }
    with pytest.raises(InvalidMessage, match=error) as raised:
        writer(topic, kind.columns).write(iter([pa.RecordBatch.from_pydict(columns)]))
    shown = repr(next(iter(bad.values())))[:20]
    assert str(raised.value).startswith("row {") and shown in str(raised.value)
    assert stored(topic) == {}


@given(
    st.recursive(
        documents, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
    )
)
def test_a_json_text_has_one_canonical_form(body: Any) -> None:
    for text in (json.dumps(body), json.dumps(body, indent=1, ensure_ascii=False)):
        assert encode_decoded(decode_json(text)) == encode_json(json.loads(text)) == encode_json(body)


@given(st.datetimes(datetime(2030, 1, 1), datetime(2099, 1, 1)))  # noqa: DTZ001 - hypothesis wants naive bounds
def test_a_timestamp_is_due_at_the_first_millisecond_that_is_not_before_it(when: datetime) -> None:
    at = when.replace(tzinfo=UTC)
    exact = -((datetime(1970, 1, 1, tzinfo=UTC) - at) // timedelta(milliseconds=1))
    assert instant_ms("fixed_time", at) == exact
    assert instants_ms(pa.array([at], pa.timestamp("us", tz="UTC"))).to_pylist() == [exact]
    assert instants_ms(pa.array([when], pa.timestamp("us"))).to_pylist() == [exact]


def test_timestamps_of_spark_are_columns_too(queue: MakeQueue) -> None:
    topic = queue(TopicType.FIXED_TIME, slots=2, body="bytes")
    schema = StructType([StructField("value", BinaryType()), StructField("fixed_time", TimestampType())])
    at = datetime(2040, 1, 1, 0, 0, 0, 1_500, UTC)
    batch = pa.RecordBatch.from_pydict(
        {"value": pa.array([b"a", b"b"]), "fixed_time": pa.array([at, at], pa.timestamp("us", tz="UTC"))}
    )
    Writer(SourceOptions(topic.options, WRITE, "a test"), schema, overwrite=False).write(iter([batch]))
    exact = int(datetime(2040, 1, 1, tzinfo=UTC).timestamp()) * 1000 + 2
    assert {score for score, _ in stored(topic).values()} == {exact}


def test_one_member_with_two_ranges_is_sent_row_by_row(queue: MakeQueue) -> None:
    kind = KINDS["range"]
    topic = queue(kind.type, slots=1, **kind.options)
    rows = {
        "value": pa.array(["1", "2", "1"]),
        "time_range": pa.array([30 * DAY, DAY, DAY], pa.duration("ms")),
    }
    writer(topic, kind.columns).write(iter([pa.RecordBatch.from_pydict(rows)]))
    scores = {member: score for (_, member), (score, _) in stored(topic).items()}
    # The first send decides.
    assert scores[b"1"] - scores[b"2"] > 28 * DAY


def test_a_topic_that_was_reslotted_is_followed_with_keys_and_bases(queue: MakeQueue) -> None:
    kind = KINDS["all"]
    topic = queue(kind.type, slots=4, **kind.options)
    topic.each("configure")
    known = Queue(topic.broker, topic.url, replace(topic.topic, slots=2))
    sending = writer(known, kind.columns)
    topic.broker.define(topic.topic)
    rows = {
        "value": pa.array(["{}"] * 50),
        "key": pa.array([f"k{n}" for n in range(50)]),
        "slot_basis": pa.array([f"b{n}" for n in range(50)]),
        "fixed_time": pa.array([LATER] * 50, pa.timestamp("ms", "UTC")),
    }
    written = sending.write(iter([pa.RecordBatch.from_pydict(rows)]))
    assert written.counts == {"stored": 50}  # type: ignore[attr-defined]
    producer = Producer(topic.broker)
    expected = {
        (out.slot, out.member)
        for n in range(50)
        for out in [producer.build(topic.topic, {}, key=f"k{n}", slot_basis=f"b{n}", fixed_time=LATER)]
    }
    assert stored(topic).keys() == expected
