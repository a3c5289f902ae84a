"""Rows that are sent as columns become the messages that any other send of them makes; times that have passed are refused,
or due at once: else a batch that is repeated later could never be sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_rmq.core.model.body_codec import decode_json, encode_decoded, encode_json
from django_rmq.core.model.topic import TopicType
from django_rmq.core.producer.placement import instant_ms
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import InvalidMessage
from django_rmq.spark.columns import MARGIN_MS, instants_ms, with_numbers
from django_rmq.spark.writer import Target
from tests.spark.conftest import MakeQueue, Queue, begin

DAY, HOUR = 86_400_000, 3_600_000
LATER = 2_000_000_000_000
SPARKS = {"fixed_time": "timestamp"}
TYPES = {
    **dict.fromkeys(("value", "key", "slot_basis"), pa.string()),
    "priority": pa.int64(),
    "fixed_time": pa.timestamp("ms", "UTC"),
    "time_range": pa.duration("ms"),
    "headers": pa.map_(pa.string(), pa.string()),
}


def columns_of(rows: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, pa.Array]:
    return {name: pa.array([row[name] for row in rows], TYPES[name]) for name in ("value", *names)}


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


@pytest.mark.parametrize("headers", [None, {"a": "b"}])
def test_a_row_without_a_priority_has_the_default_one(queue: MakeQueue, headers: Any) -> None:
    topic = queue(TopicType.PRIORITY, identity="key", default_priority=500)
    # With headers each row is built by itself.
    columns = {"headers": pa.array([headers and list(headers.items())] * 3, TYPES["headers"])}
    columns["priority"] = pa.array([90, None, 600], pa.int32())
    topic.write_batch({"value": ["1", "2", "3"], "key": ["a", "b", "c"], **columns})
    assert topic.scores() == {"a": 90.0, "b": 500.0, "c": 600.0}


def test_a_default_priority_is_above_the_numbers_of_retries(queue: MakeQueue) -> None:
    with pytest.raises(InvalidMessage, match=r"priority must be from 21 .* got 20"):
        queue(TopicType.PRIORITY, max_retries=20, default_priority=20).writer("value")


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
    topic.write_batch(columns_of(text, kind.columns))
    monkeypatch.undo()

    # To make it known that there are explicit slot bases, one message is built.
    assert alone == ([1] if "slot_basis" in kind.columns else [])
    waiting = topic.places()
    assert waiting.keys() == expected.keys()
    now = topic.broker.now_ms()
    for place, entry in waiting.items():
        wanted, body = expected[place]
        assert entry.envelope == body
        if kind.type is TopicType.RANGE_MERGE:
            # What is inserted may be due later by the time that one request takes.
            assert now + wanted - 600_000 < entry.score <= now + wanted + 10_000
        else:
            assert entry.score == wanted


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


def test_timestamps_of_spark_are_columns_too(queue: MakeQueue) -> None:
    topic = queue(TopicType.FIXED_TIME, slots=2, body="bytes")
    at = datetime(2040, 1, 1, 0, 0, 0, 1_500, UTC)
    topic.write_batch({"value": [b"a", b"b"], "fixed_time": pa.array([at, at], pa.timestamp("us", tz="UTC"))})
    exact = int(datetime(2040, 1, 1, tzinfo=UTC).timestamp()) * 1000 + 2
    assert topic.scores() == {"a": exact, "b": exact}


def test_one_member_with_two_ranges_is_sent_row_by_row(queue: MakeQueue) -> None:
    kind = KINDS["range"]
    topic = queue(kind.type, slots=1, **kind.options)
    ranges = pa.array([30 * DAY, DAY, DAY], pa.duration("ms"))
    topic.write_batch({"value": ["1", "2", "1"], "time_range": ranges})
    scores = topic.scores()
    # The first send decides.
    assert scores["1"] - scores["2"] > 28 * DAY


@pytest.mark.parametrize("name", ["all", "usual"])
def test_a_topic_that_was_reslotted_is_followed(queue: MakeQueue, name: str) -> None:
    """With keys and bases of slots; and where messages are inserted."""
    kind = KINDS[name]
    topic = queue(kind.type, slots=4, **kind.options)
    topic.each("configure")
    known = Queue(topic.broker, topic.url, replace(topic.topic, slots=2))
    rows = [
        {"value": f'"{n}"', "key": f"k{n}", "slot_basis": f"b{n}", "fixed_time": LATER} for n in range(50)
    ]
    columns = columns_of(rows, kind.columns)
    sending = known.writer(" ".join(f"{column}:{SPARKS.get(column, 'string')}" for column in columns))
    topic.broker.define(topic.topic)
    written = sending.write(iter([pa.RecordBatch.from_pydict(columns)]))
    assert written.counts == {"stored": 50}
    producer = Producer(topic.broker)
    built = [
        producer.build(topic.topic, f"{n}", **{one: row[one] for one in kind.columns})
        for n, row in enumerate(rows)
    ]
    assert topic.places().keys() == {(out.slot, out.member) for out in built}


# --- times


def times(name: str, column: pa.Array, now_ms: int | None = None) -> list[Any]:
    """Return a column of a write as the core takes it."""
    batch = pa.record_batch({"n": pa.array(range(len(column))), name: column})
    found = with_numbers(batch, [name], now_ms)
    assert found.schema.names == batch.schema.names
    values: list[Any] = found.column(name).to_pylist()
    return values


@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Shanghai"])
def test_only_what_has_passed_is_moved(zone: str | None) -> None:
    now = 1_800_000_000_000
    given = [now - HOUR, None, now + HOUR, now // 1000]
    column = pa.array(given, pa.timestamp("ms", zone))
    early, empty, late, seconds = times("fixed_time", column, now)
    assert early == now + MARGIN_MS
    # An instant that was given in seconds is a mistake, which raises an error.
    assert (empty, late, seconds) == (None, now + HOUR, now // 1000)
    assert times("fixed_time", column) == given


@pytest.mark.parametrize(
    ("column", "ms"),
    [
        (pa.array([2, None, 999]), [2_000, None, 999_000]),
        (pa.array([0.25, 1.5]), [250, 1_500]),
        (pa.array([Decimal("1.5")]), [1_500]),
        (pa.array([timedelta(hours=1), None]), [3_600_000, None]),
        (pa.array([1_500], pa.duration("ms")), [1_500]),
        (pa.array(["250ms", "15m", "5"]), [250, 900_000, 5_000]),
        (pa.array([None], pa.int32()), [None]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["time_range", "delay"])
def test_a_wait_is_seconds_an_interval_or_text(name: str, column: pa.Array, ms: list[int | None]) -> None:
    assert times(name, column) == ms


def test_a_time_out_is_in_seconds() -> None:
    assert times("timeout", pa.array([20, None])) == [20, None]
    assert times("timeout", pa.array(["1h"])) == [3_600]
    # A time-out of a quarter of an hour is usual.
    assert times("timeout", pa.array([1_000])) == [1_000]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (
            pa.array([1, 5_000]),
            'column delay: delay .*In milliseconds. Say 5 or "5s". For 5000 seconds say "5000s"',
        ),
        (pa.array([1, -1]), "column delay: delay .*from 0s to 36525d, got -1"),
        (pa.array([math.nan]), "got nan"),
        (pa.array(["soon"]), "delay must be a duration such as 90, 250ms, .*got 'soon'"),
        (pa.array([True]), "got True"),
    ],
    ids=str,
)
def test_what_is_no_wait_names_its_column(column: pa.Array, said: str) -> None:
    with pytest.raises(InvalidMessage, match=said):
        times("delay", column)


def test_a_stream_goes_on_with_a_batch_whose_times_have_passed(
    spark: Any, queue: MakeQueue, tmp_path: Path
) -> None:
    topic = queue(TopicType.FIXED_TIME)
    now = topic.broker.now_ms() - 120_000
    rows = spark.range(100).selectExpr(
        "cast(id as string) as value", f"timestamp_millis({now} + id * {HOUR}) as fixed_time"
    )
    rows.write.parquet(str(tmp_path / "rows"))

    def run(**options: str) -> None:
        stream = spark.readStream.schema(rows.schema).parquet(str(tmp_path / "rows"))
        begin(stream, {**topic.options, **options}, tmp_path / "checkpoint").awaitTermination(120)

    for _ in range(2):
        with pytest.raises(Exception, match="is not in the future"):
            run()
    run(pastTimes="now")
    scores = sorted(topic.scores().values())
    assert len(scores) == 100
    assert now < scores[0] < now + HOUR
    assert scores[1:] == [now + n * HOUR for n in range(1, 100)]
