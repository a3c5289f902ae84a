"""What a write takes and refuses: columns, their types, rows that cannot be sent, headers, topics of each row."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from django_rmq.core.model.body_codec import encode_json
from django_rmq.core.model.envelope import decode_envelope
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ConfigurationError, InvalidMessage
from django_rmq.spark.writer import Written, printable_row
from tests.spark.conftest import MakeQueue, Queue, begin, finish, refused_in

LATER = 2_000_000_000_000
HEADERS = pa.map_(pa.string(), pa.string())
INSTANT, WAIT = pa.timestamp("us", "UTC"), pa.duration("s")
TOPICS_OF: dict[str, tuple[TopicType, dict[str, Any]]] = {
    "merge": (TopicType.RANGE_MERGE, {}),
    "keyed": (TopicType.RANGE_MERGE, {"identity": "key"}),
    "priority": (TopicType.PRIORITY, {}),
    "field": (TopicType.PRIORITY, {"slot_basis": "shop"}),
    "time": (TopicType.FIXED_TIME, {}),
    "entity": (TopicType.FIXED_TIME, {"identity": "key", "slot_basis": "shop"}),
}
TIME, PRIORITY, KEY = (INSTANT, LATER * 1_000), (pa.int64(), 500), (pa.string(), "k")
GOOD: dict[str, dict[str, tuple[pa.DataType, Any]]] = {
    "keyed": {"key": KEY},
    "time": {"fixed_time": TIME},
    "entity": {"fixed_time": TIME, "key": KEY},
    "priority": {"priority": PRIORITY},
    "field": {"priority": PRIORITY},
}
"""Kind of a topic -> the columns that it needs beside the value."""


def of_kind(queue: MakeQueue, kind: str) -> Queue:
    type_, options = TOPICS_OF[kind]
    return queue(type_, **options)


def batch_of(**columns: tuple[pa.DataType, list[Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {name: pa.array(values, kind) for name, (kind, values) in columns.items()}
    )


# --- columns and types, told on the driver


@pytest.mark.parametrize(
    ("kind", "columns", "options", "said"),
    [
        ("keyed", "value", {}, "has IDENTITY 'key': a write needs the column key"),
        ("keyed", "value key:long", {}, "key has the type bigint, it must be text, such as cast"),
        ("keyed", "value key headers", {}, "must be a map<string,string>"),
        ("keyed", "value key expires:date", {}, "expires has the type date"),
        ("priority", "value priority", {}, "priority has the type string, it must be a whole"),
        ("priority", "value priority:decimal", {}, "decimal(10,2), it must be a whole"),
        ("priority", "value priority:long fixed_time:timestamp", {}, "takes no column fixed_time"),
        ("priority", "value priority:long headers:headers", {}, "whose messages have no keys"),
        ("priority", "value priority:long odd:long", {}, "odd"),
        ("priority", "value priority:long", {"patience": "long"}, "option patience"),
        ("field", "value priority:long slot_basis", {}, "it has SLOT_BASIS 'shop'"),
        ("time", "value fixed_time:long", {}, "fixed_time has the type bigint, it must be a timestamp"),
        ("time", "value fixed_time", {}, "fixed_time has the type string, it must be a timestamp"),
        ("time", "value fixed_time:date", {}, "such as timestamp_millis(fixed_time)"),
        ("time", "value fixed_time:naive", {}, "timestamp_ntz, it must be a timestamp, such as"),
        ("keyed", "value key expires:naive", {}, "such as timestamp_millis(expires) or cast(expires as"),
        ("time", "value", {}, "a write needs the column fixed_time"),
        *(
            (
                "time",
                "value fixed_time:timestamp",
                {"pastTimes": given},
                f"must be refuse or now, got '{given}'",
            )
            for given in ("always", "Now")
        ),
        ("merge", "value:struct", {}, "it must be text or bytes, such as to_json(value)"),
        ("merge", "value:variant", {}, "it must be text or bytes, such as to_json(value)"),
        ("merge", "a:interval", {"bodyColumns": "a"}, "a has the type interval year to month, which"),
        ("merge", "a:array", {"bodyColumns": "a"}, "the column a[] has the type binary"),
        ("merge", "a:map", {"bodyColumns": "a"}, "map<bigint,bigint>, which JSON cannot"),
        ("merge", "value Value", {}, "cannot use two columns with one name"),
        (
            "merge",
            "value",
            {"timeRange": ""},
            "set the option timeRange (such as 5s), or add a column time_range",
        ),
        ("merge", "value", {"topic": ""}, "needs the option topic, or a column topic"),
        ("merge", "value", {"badRows": "not/absolute"}, "option badRows must be a folder"),
        (
            "merge",
            "value",
            {"path": "t"},
            "takes no path: name the topic by the option topic, got the path 't'",
        ),
    ],
)
def test_what_a_write_cannot_use_is_told_on_the_driver(
    queue: MakeQueue, kind: str, columns: str, options: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        of_kind(queue, kind).writer(columns, **options)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("texts", "raws"), [(pa.large_string(), pa.large_binary()), (pa.string(), pa.binary())]
)
def test_texts_and_bytes_of_either_size_are_one_message(
    queue: MakeQueue, texts: pa.DataType, raws: pa.DataType
) -> None:
    """A setting of Spark makes all texts and bytes large."""
    topic = of_kind(queue, "keyed")
    topic.write_batch(batch_of(value=(raws, [b"1"]), key=(raws, [b"a"])))
    topic.write_batch(batch_of(value=(texts, ["1"]), key=(texts, ["b"])))
    assert topic.scores().keys() == {"a", "b"} and topic.total("stored") == 2


def test_names_of_columns_ignore_case_and_whole_decimals_are_numbers(queue: MakeQueue) -> None:
    topic = queue()
    priorities = (pa.decimal128(10, 0), [Decimal(40), Decimal(50)])
    rows = batch_of(VALUE=(pa.string(), ["1", "2"]), Priority=priorities)
    assert topic.write_batch(rows) == {"stored": 2} and topic.scores() == {"1": 40, "2": 50}


@pytest.mark.parametrize("by_row", [False, True])
def test_columns_of_a_body_may_be_called_as_options(queue: MakeQueue, by_row: bool) -> None:
    topic, keyed = queue(default_priority=1_000), queue(identity="key", default_priority=1_000)
    texts = {name: (pa.string(), ["1"]) for name in ("key", "Score", "delay", "VALUE")}
    for one in (topic, keyed):
        named = {"topic": (pa.string(), [one.topic.name])} if by_row else {}
        options = {"bodyColumns": ",".join(texts), **({"topic": ""} if by_row else {})}
        assert one.write_batch(batch_of(**texts, **named), **options) == {"stored": 1}
    body = {"Score": "1", "VALUE": "1", "delay": "1", "key": "1"}
    assert [json.loads(entry.member) for entry in topic.entries()] == [body]
    assert [entry.member for entry in keyed.entries()] == [b"1"]


def test_an_option_in_a_body_is_there_as_in_any_other_send(queue: MakeQueue) -> None:
    topic = queue(identity="key")
    given = {"key": "a", "priority": Decimal(2_000), "timeout": timedelta(seconds=12)}
    kinds = (pa.string(), pa.decimal128(10, 0), pa.duration("us"))
    columns = {name: (kind, [given[name]]) for name, kind in zip(given, kinds, strict=True)}
    assert topic.write_batch(batch_of(**columns), bodyColumns=",".join(columns)) == {"stored": 1}
    [entry] = topic.entries()
    envelope = decode_envelope(entry.envelope or b"")
    assert (entry.score, envelope.timeout, envelope.body) == (2_000, 12, encode_json(given))


# --- rows that cannot be sent

DEEP = "[" * 5_000 + "]" * 5_000
YEAR_10000 = 253_402_300_800_000_000
"""In microseconds: Arrow has that year, Python does not."""


@pytest.mark.parametrize(
    ("kind", "name", "type_", "bad", "said"),
    [
        ("keyed", "key", pa.string(), None, "column key is null"),
        ("keyed", "key", pa.string(), "", "non-empty"),
        ("keyed", "key", pa.string(), "x" * 2_000, "key has 2000 bytes"),
        ("keyed", "key", pa.binary(), b"\xff", "'key': b'\\xff'}: key is not UTF-8"),
        ("keyed", "headers", HEADERS, [("a", "x" * 9_000)], "headers have"),
        ("keyed", "expires", INSTANT, 1, "expires"),
        ("time", "fixed_time", INSTANT, YEAR_10000, "fixed_time 253402300800000 ms is after"),
        ("time", "fixed_time", INSTANT, 1_000_000, "not in the future"),
        ("time", "fixed_time", INSTANT, None, "column fixed_time is null"),
        ("merge", "time_range", WAIT, 0, "time_range must be"),
        ("merge", "time_range", WAIT, None, "column time_range is null"),
        ("priority", "priority", pa.int64(), 3, "priority must be from"),
        ("field", "value", pa.string(), "{}", "SLOT_BASIS 'shop'"),
        ("entity", "value", pa.string(), f'{{"shop":"{"x" * 2_000}"}}', "slot_basis has 2000 bytes"),
        ("merge", "value", pa.string(), "{", "Expecting property name"),
        ("merge", "value", pa.string(), "[NaN]", "NaN or infinity"),
        ("merge", "value", pa.string(), '"\\ud800"', "not valid Unicode"),
        ("merge", "value", pa.string(), DEEP, "column value: body is nested too deeply"),
        ("merge", "value", pa.string(), None, "column value is null"),
        ("merge", "value", pa.binary(), b"\xff", "row {'value': b'\\xff'}: column value: "),
        ("merge", "value", pa.string(), "", "column value"),
        ("merge", "value", pa.string(), f'"{"x" * 300_000}"', "column value: body has 300002 bytes"),
        ("merge", "n", pa.float64(), float("nan"), "column n: body contains NaN"),
        ("merge", "at", INSTANT, YEAR_10000, "column at: "),
    ],
)
def test_an_error_names_the_row_and_its_column(
    queue: MakeQueue, kind: str, name: str, type_: pa.DataType, bad: Any, said: str
) -> None:
    topic, options = of_kind(queue, kind), {}
    columns: dict[str, tuple[pa.DataType, Any]] = {"value": (pa.string(), '{"shop":1}'), **GOOD.get(kind, {})}
    if name in ("n", "at"):
        columns, options = {}, {"bodyColumns": name}
    others = {INSTANT: LATER * 1_000, pa.binary(): b"1", pa.int64(): 500, WAIT: 1}
    rows = {one: (kind_of, [good] * 3) for one, (kind_of, good) in columns.items()}
    good = others.get(type_, columns.get(name, (None, None))[1])
    rows[name] = type_, [good, bad, good]
    with pytest.raises(InvalidMessage) as raised:
        topic.write_batch(batch_of(**rows), **options)
    assert str(raised.value).startswith("row {") and said in str(raised.value)
    assert topic.depth("store") == 0


@pytest.mark.parametrize("columns", [["value"], ["key", "value"], ["body"]])
@pytest.mark.parametrize("body", ["json", "text"])
def test_text_that_is_not_utf_8_is_refused(queue: MakeQueue, columns: list[str], body: str) -> None:
    topic = queue(TopicType.RANGE_MERGE, body=body, identity="key" if "key" in columns else "body")
    raw = pa.array([b'"\xff"'], pa.binary())
    # As Spark passes on what it was given: Arrow itself would refuse to make it.
    texts = pa.StringArray.from_buffers(1, *raw.buffers()[1:])
    bad = next(column for column in ("key", "value", "body") if column in columns)
    writer = topic.writer(" ".join(columns), **({"bodyColumns": "body"} if bad == "body" else {}))
    with pytest.raises(
        InvalidMessage, match=rf"row \{{.*xff.*\}}: column {bad}: text is not UTF-8: .*Invalid UTF8"
    ):
        writer.write(iter([pa.record_batch(dict.fromkeys(columns, texts))]))
    assert topic.depth("store") == 0


def test_an_error_shows_values_that_python_cannot_read(queue: MakeQueue) -> None:
    """Texts that are not UTF-8 may be large ones, and Java knows zones that Arrow does not."""
    raw = pa.array([b'"\xff"'], pa.large_binary())
    texts = pa.LargeStringArray.from_buffers(1, *raw.buffers()[1:])
    at = pa.array([0], pa.timestamp("us", "GMT+8"))
    row = {"value": texts, "fixed_time": at, "year": pa.array([YEAR_10000], pa.timestamp("us", "GMT+8"))}
    assert printable_row(pa.record_batch(row), 0) == (
        "{'value': b'\"\\xff\"', 'fixed_time': datetime.datetime(1970, 1, 1, 0, 0), "
        "'year': 'a value of type timestamp[us, tz=GMT+8]'}"
    )


def test_bad_rows_are_left_out_on_request_and_are_in_files(
    queue: MakeQueue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = queue(TopicType.RANGE_MERGE, identity="key")
    keys: list[Any] = [f"k{n}" for n in range(100)]
    texts: list[Any] = [f'{{"n":{n}}}' for n in range(100)]
    keys[10], texts[20], texts[99], keys[21] = None, "{", None, "x" * 5_000
    texts[30] = '{"n":30,"n":30}'
    batch = batch_of(value=(pa.string(), texts), key=(pa.string(), keys))
    writer = topic.writer("value key", badRows=str(tmp_path / "bad"))
    for again in (False, True):
        written = writer.write(iter([batch]))
        assert isinstance(written, Written)
        assert written.counts == {"merged" if again else "stored": 95, "left out": 5}
    assert topic.scores().keys() == {f"k{n}" for n in range(99)} - {"k10", "k20", "k21", "k30"}
    # A task that is tried again replaces its file.
    bad = {(row["key"], row["value"]): row["refused"] for row in refused_in(tmp_path / "bad")}
    assert len(list((tmp_path / "bad").iterdir())) == 1
    assert bad == {
        (None, '{"n":10}'): "column key is null",
        ("k20", "{"): bad["k20", "{"],
        ("x" * 5_000, '{"n":21}'): "key has 5000 bytes, more than 512",
        ("k30", texts[30]): "column value: an object has the key 'n' twice",
        ("k99", None): "column value is null",
    }
    assert bad["k20", "{"].startswith("column value: Expecting property name")
    with caplog.at_level(logging.WARNING):
        writer.commit([written, None])
    assert f"5 rows could not be sent and are in {tmp_path / 'bad'}; 95 were sent" in caplog.text


def test_a_task_that_fails_leaves_no_file_of_bad_rows(queue: MakeQueue, tmp_path: Path) -> None:
    topic = queue(TopicType.RANGE_MERGE)
    writer = topic.writer("value", badRows=str(tmp_path))

    def batches() -> Any:
        yield batch_of(value=(pa.string(), ["{"] * 64_000))
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        writer.write(batches())
    assert list(tmp_path.iterdir()) == []


class Task:
    """What a task knows of itself, in a batch of a query."""

    def __init__(self, attempt: int) -> None:
        self.taskAttemptId, self.partitionId = lambda: attempt, lambda: 0
        self.getLocalProperty = {"sql.streaming.queryId": "q", "streaming.sql.batchId": "0"}.get


def test_two_attempts_at_one_task_at_a_time_leave_a_whole_file(
    queue: MakeQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = queue(TopicType.RANGE_MERGE).writer("value", badRows=str(tmp_path))
    bad = batch_of(value=(pa.string(), ["{"] * 64_000))

    def attempt(number: int, *, meanwhile: Callable[[], object] = int) -> Written:
        def batches() -> Iterator[pa.RecordBatch]:
            yield bad
            meanwhile()
            monkeypatch.setattr("pyspark.TaskContext.get", lambda: Task(number))
            yield bad

        monkeypatch.setattr("pyspark.TaskContext.get", lambda: Task(number))
        return writer.write(batches())

    written = attempt(1, meanwhile=lambda: attempt(2))
    assert written.counts == {"left out": 128_000}
    assert len(refused_in(tmp_path)) == 128_000 and len(list(tmp_path.iterdir())) == 1


def test_two_writes_of_one_batch_keep_their_bad_rows_beside_each_other(
    queue: MakeQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function for foreachBatch may write twice into one folder."""
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: Task(1))
    topic = queue(TopicType.RANGE_MERGE)
    for text in ("{", "["):
        topic.write_batch(batch_of(value=(pa.string(), [text])), badRows=str(tmp_path))
    assert {row["value"] for row in refused_in(tmp_path)} == {"{", "["}


def test_times_are_compared_with_the_clock_of_the_server(
    queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose clock is an hour ahead sends what is due in half an hour, and delays nothing that has passed."""
    topic = queue(TopicType.FIXED_TIME)
    now = topic.broker.now_ms()
    monkeypatch.setattr("time.time", lambda: now / 1000 + 3_600)
    soon, past = now + 1_800_000, now - 1_800_000
    batch = batch_of(value=(pa.string(), ["1", "2"]), fixed_time=(INSTANT, [soon * 1_000, past * 1_000]))
    assert topic.write_batch(batch, pastTimes="now") == {"stored": 2}
    scores = topic.scores()
    assert scores["1"] == soon and now <= scores["2"] < now + 900_000


# --- what any other send can say


def test_headers_and_expires_are_columns(queue: MakeQueue) -> None:
    topic = queue(TopicType.RANGE_MERGE, identity="key")
    at = datetime(2040, 1, 1, 0, 0, 0, 1, UTC)
    batch = batch_of(
        value=(pa.string(), ["1", "2"]),
        key=(pa.string(), ["a", "b"]),
        headers=(HEADERS, [[("trace", "t")], None]),
        expires=(INSTANT, [None, at]),
    )
    assert topic.write_batch(batch) == {"stored": 2}
    found = {entry.member: decode_envelope(entry.envelope or b"") for entry in topic.entries()}
    assert (found[b"a"].headers, found[b"a"].expires_ms) == ({"trace": "t"}, 0)
    assert (found[b"b"].headers, found[b"b"].expires_ms) == (None, 2_208_988_800_001)


def test_a_frame_that_was_read_can_be_written_with_all_that_its_messages_had(
    spark: Any, queue: MakeQueue
) -> None:
    source, target = (
        queue(TopicType.RANGE_MERGE, identity="key", time_range_ms=1, body="text") for _ in range(2)
    )
    said = {"headers": {"trace": "t"}, "expires": LATER, "slot_basis": "shop", "max_retries": 3, "timeout": 7}
    source.send(["one"], key="a", **said)
    source.send(["two"], key="b")
    target.write(source.read(spark, includeMetadata="true"), timeRange="1ms")
    assert [(one.member, one.envelope) for one in target.entries()] == [
        (one.member, one.envelope) for one in source.entries()
    ]
    # Without includeMetadata, and with a topic in place of the option.
    plain, other = queue(TopicType.RANGE_MERGE), queue(TopicType.RANGE_MERGE)
    plain.send([1, 2], time_range=1)
    frame = plain.read(spark)
    other.write(frame, timeRange="1ms")
    options = {name: value for name, value in other.options.items() if name != "topic"}
    named = frame.selectExpr("value", f"'{other.topic.name}' as topic").write.format("rmq")
    named.options(**options, timeRange="1ms").mode("append").save()
    assert other.scores().keys() == {"1", "2"} and other.total("merged") == 2


def test_each_row_may_name_its_topic(queue: MakeQueue, tmp_path: Path) -> None:
    first, second, keyed = queue(), queue(TopicType.RANGE_MERGE), queue(TopicType.RANGE_MERGE, identity="key")
    one, two, three = (topic.topic.name for topic in (first, second, keyed))
    names = [one, two, three, None, "nobody", three, two]
    batch = batch_of(
        value=(pa.string(), [str(n) for n in range(7)]),
        topic=(pa.string(), names),
        priority=(pa.int64(), [40, None, None, None, None, None, 50]),
        key=(pa.string(), [None, None, "k", None, None, None, None]),
    )
    counts = first.write_batch(batch, topic="", badRows=str(tmp_path))
    assert counts == {"stored": 3, "left out": 4}
    assert [set(topic.scores()) for topic in (first, second, keyed)] == [{"0"}, {"1"}, {"k"}]
    why = {row["value"]: row["refused"] for row in refused_in(tmp_path)}
    assert why["3"] == "column topic is null" and "nobody is not registered" in why["4"]
    assert why["5"] == "column key is null" and "takes no column priority" in why["6"]


@pytest.mark.parametrize("wide", [False, True])
def test_a_topic_or_a_priority_that_nobody_can_read_is_refused_in_its_row(
    queue: MakeQueue, tmp_path: Path, wide: bool
) -> None:
    topic, other = queue(), queue()
    good, names = topic.topic.name.encode(), pa.large_binary() if wide else pa.binary()
    priorities = [Decimal(40), Decimal(40), Decimal(10**30), Decimal(40)]
    batch = batch_of(
        value=(pa.string(), list("0123")),
        Topic=(names, [good, b"\xff", good, other.topic.name.encode()]),
        priority=(pa.decimal128(38, 0), priorities),
    )
    counts = topic.write_batch(batch, topic="", badRows=str(tmp_path))
    assert counts == {"stored": 2, "left out": 2}
    assert (topic.scores(), other.scores()) == ({"0": 40}, {"3": 40})
    why = {row["value"]: row["refused"] for row in refused_in(tmp_path)}
    assert "\ufffd is not registered" in why["1"] and why["2"].startswith("column priority: ")


def test_a_stream_names_the_files_of_its_bad_rows_by_query_and_batch(
    spark: Any, queue: MakeQueue, tmp_path: Path
) -> None:
    target = queue(TopicType.RANGE_MERGE)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.txt").write_text("1\n2\n{\n3\n")
    options = {**target.options, "timeRange": "1ms", "badRows": str(tmp_path / "bad")}
    lines = spark.readStream.text(str(tmp_path / "rows"))
    query = finish(begin(lines, options, tmp_path / "checkpoint"))
    assert target.scores().keys() == {"1", "2", "3"}
    (file,) = (tmp_path / "bad").iterdir()
    assert file.name == f"{query.id}-0-00000.parquet"
    assert [row["value"] for row in refused_in(tmp_path / "bad")] == ["{"]
