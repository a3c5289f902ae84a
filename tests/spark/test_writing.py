"""What a write takes and refuses: columns, their types, rows that cannot be sent, headers, topics of each row."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types
from pyspark.sql.types import StructField, StructType

from django_rmq.core.model.envelope import decode_envelope
from django_rmq.core.model.topic import TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import ConfigurationError, InvalidMessage
from django_rmq.spark.source_options import WRITE, SourceOptions
from django_rmq.spark.writer import Writer, Written
from tests.spark.conftest import Queue, Run, waiting
from tests.support.brokers import Broker

MakeQueue = Callable[..., Queue]

LATER = 2_000_000_000_000
STRING, LONG = types.StringType(), types.LongType()
SPARKS = {
    pa.string(): STRING,
    pa.binary(): types.BinaryType(),
    pa.int64(): LONG,
    pa.float64(): types.DoubleType(),
    pa.timestamp("us", "UTC"): types.TimestampType(),
    pa.map_(pa.string(), pa.string()): types.MapType(STRING, STRING),
    pa.decimal128(10, 0): types.DecimalType(10, 0),
}
HEADERS = pa.map_(pa.string(), pa.string())


def batch_of(**columns: tuple[pa.DataType, list[Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {name: pa.array(values, kind) for name, (kind, values) in columns.items()}
    )


def write(queue: Queue, batch: pa.RecordBatch, **options: str) -> dict[str, int]:
    schema = StructType([StructField(field.name, SPARKS[field.type]) for field in batch.schema])
    given = {"timeRange": "1m", **queue.options, **options}
    given = {name: value for name, value in given.items() if value}
    written = Writer(SourceOptions(given, WRITE, "a test"), schema, overwrite=False).write(iter([batch]))
    assert isinstance(written, Written)
    return written.counts


def entries(topic: Queue) -> dict[str, Any]:
    """Return what waits by member."""
    return {
        entry.member.decode(): entry
        for page in topic.each("list_messages", "store")
        for entry in page.entries
    }


# --- columns and types, told on the driver


@pytest.mark.parametrize(
    ("kind", "columns", "options", "said"),
    [
        ("keyed", {"value": STRING}, {}, "has IDENTITY 'key': a write needs the column key"),
        (
            "keyed",
            {"value": STRING, "key": LONG},
            {},
            "key has the type bigint, it must be text, such as cast",
        ),
        ("keyed", {"value": STRING, "key": STRING, "headers": STRING}, {}, "must be a map<string,string>"),
        (
            "keyed",
            {"value": STRING, "key": STRING, "expires": types.DateType()},
            {},
            "expires has the type date",
        ),
        (
            "priority",
            {"value": STRING, "priority": STRING},
            {},
            "priority has the type string, it must be a whole",
        ),
        (
            "priority",
            {"value": STRING, "priority": types.DecimalType(10, 2)},
            {},
            "decimal(10,2), it must be a whole",
        ),
        (
            "priority",
            {"value": STRING, "priority": LONG, "fixed_time": types.TimestampType()},
            {},
            "takes no column fixed_time",
        ),
        (
            "priority",
            {"value": STRING, "priority": LONG, "headers": SPARKS[HEADERS]},
            {},
            "whose messages have no keys",
        ),
        ("field", {"value": STRING, "priority": LONG, "slot_basis": STRING}, {}, "it has SLOT_BASIS 'shop'"),
        (
            "time",
            {"value": STRING, "fixed_time": types.DateType()},
            {},
            "such as timestamp_millis(fixed_time)",
        ),
        (
            "merge",
            {"value": StructType([StructField("a", LONG)])},
            {},
            "it must be text or bytes, such as to_json(value)",
        ),
        ("merge", {"value": types.VariantType()}, {}, "it must be text or bytes, such as to_json(value)"),
        (
            "merge",
            {"a": types.YearMonthIntervalType()},
            {"bodyColumns": "a"},
            "a has the type interval year to month, which",
        ),
        (
            "merge",
            {"a": types.ArrayType(types.BinaryType())},
            {"bodyColumns": "a"},
            "the column a[] has the type binary",
        ),
        (
            "merge",
            {"a": types.MapType(LONG, LONG)},
            {"bodyColumns": "a"},
            "map<bigint,bigint>, which JSON cannot",
        ),
        ("merge", {"value": STRING, "Value": STRING}, {}, "cannot use two columns with one name"),
        (
            "priority",
            {"value": STRING, "priority": LONG, "odd": LONG},
            {},
            "odd",
        ),
        ("priority", {"value": STRING, "priority": LONG}, {"patience": "long"}, "option patience"),
        ("time", {"value": STRING}, {}, "a write needs the column fixed_time"),
        (
            "merge",
            {"value": STRING},
            {"timeRange": ""},
            "set the option timeRange (such as 5s), or add a column time_range",
        ),
        ("merge", {"value": STRING}, {"topic": ""}, "needs the option topic, or a column topic"),
        ("merge", {"value": STRING}, {"badRows": "not/absolute"}, "option badRows must be a folder"),
        (
            "merge",
            {"value": STRING},
            {"path": "t"},
            "takes no path: name the topic by the option topic, got the path 't'",
        ),
    ],
)
def test_what_a_write_cannot_use_is_told_on_the_driver(
    queue: MakeQueue, kind: str, columns: dict[str, Any], options: dict[str, str], said: str
) -> None:
    topic = {
        "keyed": lambda: queue(TopicType.RANGE_MERGE, identity="key"),
        "merge": lambda: queue(TopicType.RANGE_MERGE),
        "priority": queue,
        "field": lambda: queue(slot_basis="shop"),
        "time": lambda: queue(TopicType.FIXED_TIME),
    }[kind]()
    given = {name: value for name, value in {"timeRange": "1ms", **topic.options, **options}.items() if value}
    with pytest.raises(ConfigurationError) as raised:
        Writer(
            SourceOptions(given, WRITE, "a test"),
            StructType([StructField(name, one) for name, one in columns.items()]),
            overwrite=False,
        )
    assert said in str(raised.value)


def test_names_of_columns_ignore_case_and_whole_decimals_are_numbers(queue: MakeQueue) -> None:
    topic = queue()
    priorities = (pa.decimal128(10, 0), [Decimal(40), Decimal(50)])
    assert write(topic, batch_of(VALUE=(pa.string(), ["1", "2"]), Priority=priorities)) == {"stored": 2}
    assert {member: entry.score for member, entry in entries(topic).items()} == {"1": 40, "2": 50}


# --- rows that cannot be sent

DEEP = "[" * 5_000 + "]" * 5_000
YEAR_10000 = 253_402_300_800_000_000
"""In microseconds: Arrow has that year, Python does not."""


@pytest.mark.parametrize(
    ("kind", "bad", "said"),
    [
        ("keyed", {"key": (pa.string(), None)}, "column key is null"),
        ("keyed", {"key": (pa.binary(), b"\xff")}, "row {'value': '1', 'key': b'\\xff'}: key is not UTF-8"),
        ("keyed", {"headers": (HEADERS, [("a", "x" * 9_000)])}, "headers have"),
        ("keyed", {"expires": (pa.timestamp("us", "UTC"), 1)}, "expires"),
        (
            "time",
            {"fixed_time": (pa.timestamp("us", "UTC"), YEAR_10000)},
            "fixed_time 253402300800000 ms is after",
        ),
        ("json", {"value": (pa.string(), DEEP)}, "column value: body is nested too deeply"),
        ("json", {"value": (pa.string(), None)}, "column value is null"),
        ("json", {"value": (pa.binary(), b"\xff")}, "row {'value': b'\\xff'}: column value: "),
        ("json", {"value": (pa.string(), "")}, "column value"),
        ("json", {"value": (pa.string(), f'"{"x" * 300_000}"')}, "column value: body has 300002 bytes"),
        ("columns", {"n": (pa.float64(), float("nan"))}, "column n: body contains NaN"),
        ("columns", {"at": (pa.timestamp("us", "UTC"), YEAR_10000)}, "column at: "),
    ],
)
def test_an_error_names_the_row_and_its_column(
    queue: MakeQueue, kind: str, bad: dict[str, tuple[pa.DataType, Any]], said: str
) -> None:
    fine: dict[str, tuple[pa.DataType, Any]] = {"value": (pa.string(), "1")}
    options = {}
    if kind == "keyed":
        topic, fine["key"] = queue(TopicType.RANGE_MERGE, identity="key"), (pa.string(), "k")
    elif kind == "time":
        topic = queue(TopicType.FIXED_TIME)
        fine["fixed_time"] = (pa.timestamp("us", "UTC"), LATER * 1_000)
    elif kind == "columns":
        topic, options = queue(TopicType.RANGE_MERGE), {"bodyColumns": ",".join(bad)}
        fine = {}
    else:
        topic = queue(TopicType.RANGE_MERGE)
    columns: dict[str, tuple[pa.DataType, list[Any]]] = {}
    for name in fine | bad:
        of_bad, value = bad.get(name, fine.get(name, (None, None)))
        good = fine.get(name, (None, None))[1]
        if of_bad == pa.timestamp("us", "UTC"):
            good = LATER * 1_000
        elif of_bad == pa.binary():
            good = b"1"
        columns[name] = of_bad, [good, value, good]
    with pytest.raises(InvalidMessage) as raised:
        write(topic, batch_of(**columns), **options)
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
    schema = StructType([StructField(column, STRING) for column in columns])
    options = {**topic.options, "timeRange": "1ms", **({"bodyColumns": "body"} if bad == "body" else {})}
    writer = Writer(SourceOptions(options, WRITE, "a test"), schema, overwrite=False)
    with pytest.raises(
        InvalidMessage, match=rf"row \{{.*xff.*\}}: column {bad}: text is not UTF-8: .*Invalid UTF8"
    ):
        writer.write(iter([pa.record_batch(dict.fromkeys(columns, texts))]))
    assert topic.depth("store") == 0


def test_bad_rows_are_left_out_on_request_and_are_in_files(
    queue: MakeQueue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = queue(TopicType.RANGE_MERGE, identity="key")
    keys: list[Any] = [f"k{n}" for n in range(100)]
    texts: list[Any] = [f'{{"n":{n}}}' for n in range(100)]
    keys[10], texts[20], texts[99], keys[21] = None, "{", None, "x" * 5_000
    texts[30] = '{"n":30,"n":30}'
    batch = batch_of(value=(pa.string(), texts), key=(pa.string(), keys))
    schema = StructType([StructField("value", STRING), StructField("key", STRING)])
    given = {**topic.options, "timeRange": "1m", "badRows": str(tmp_path / "bad")}
    writer = Writer(SourceOptions(given, WRITE, "a test"), schema, overwrite=False)
    for again in (False, True):
        written = writer.write(iter([batch]))
        assert isinstance(written, Written)
        assert written.counts == {"merged" if again else "stored": 95, "left out": 5}
    assert set(entries(topic)) == {f"k{n}" for n in range(99)} - {"k10", "k20", "k21", "k30"}
    # A task that is tried again replaces its file.
    (file,) = (tmp_path / "bad").iterdir()
    bad = {(row["key"], row["value"]): row["refused"] for row in pq.read_table(file).to_pylist()}
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
    schema = StructType([StructField("value", STRING)])
    given = {**topic.options, "timeRange": "1ms", "badRows": str(tmp_path)}
    writer = Writer(SourceOptions(given, WRITE, "a test"), schema, overwrite=False)

    def batches() -> Any:
        yield batch_of(value=(pa.string(), ["{"] * 64_000))
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        writer.write(batches())
    assert list(tmp_path.iterdir()) == []


def test_times_are_compared_with_the_clock_of_the_server(
    queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose clock is an hour ahead sends what is due in half an hour, and delays nothing that has passed."""
    topic = queue(TopicType.FIXED_TIME)
    now = topic.broker.now_ms()
    monkeypatch.setattr("time.time", lambda: now / 1000 + 3_600)
    soon, past = now + 1_800_000, now - 1_800_000
    batch = batch_of(
        value=(pa.string(), ["1", "2"]), fixed_time=(pa.timestamp("us", "UTC"), [soon * 1_000, past * 1_000])
    )
    assert write(topic, batch, pastTimes="now") == {"stored": 2}
    scores = {member: entry.score for member, entry in entries(topic).items()}
    assert scores["1"] == soon and now <= scores["2"] < now + 900_000


# --- what any other send can say


def test_headers_and_expires_are_columns(queue: MakeQueue) -> None:
    topic = queue(TopicType.RANGE_MERGE, identity="key")
    at = datetime(2040, 1, 1, 0, 0, 0, 1, UTC)
    batch = batch_of(
        value=(pa.string(), ["1", "2"]),
        key=(pa.string(), ["a", "b"]),
        headers=(HEADERS, [[("trace", "t")], None]),
        expires=(pa.timestamp("us", "UTC"), [None, at]),
    )
    assert write(topic, batch) == {"stored": 2}
    found = {key: decode_envelope(entry.envelope) for key, entry in entries(topic).items()}
    assert (found["a"].headers, found["a"].expires_ms) == ({"trace": "t"}, 0)
    assert (found["b"].headers, found["b"].expires_ms) == (None, 2_208_988_800_001)


def test_a_frame_that_was_read_can_be_written_with_all_that_its_messages_had(
    spark: Any, queue: MakeQueue
) -> None:
    source, target = (
        queue(TopicType.RANGE_MERGE, identity="key", time_range_ms=1, body="text") for _ in range(2)
    )
    said = {"headers": {"trace": "t"}, "expires": LATER, "slot_basis": "shop", "max_retries": 3, "timeout": 7}
    producer = Producer(source.broker)
    producer.send(
        [producer.build(source.topic, "one", key="a", **said), producer.build(source.topic, "two", key="b")]
    )
    frame = spark.read.format("rmq").options(**source.options, includeMetadata="true").load()
    frame.write.format("rmq").options(**target.options, timeRange="1ms").mode("append").save()
    copies, originals = entries(target), entries(source)
    assert {key: entry.envelope for key, entry in copies.items()} == {
        key: entry.envelope for key, entry in originals.items()
    }
    # Without includeMetadata, and with a topic in place of the option.
    plain, other = queue(TopicType.RANGE_MERGE), queue(TopicType.RANGE_MERGE)
    plain.send([1, 2], time_range=1)
    frame = spark.read.format("rmq").options(**plain.options).load()
    frame.write.format("rmq").options(**other.options, timeRange="1ms").mode("append").save()
    options = {name: value for name, value in other.options.items() if name != "topic"}
    frame.selectExpr("value", f"'{other.topic.name}' as topic").write.format("rmq").options(
        **options, timeRange="1ms"
    ).mode("append").save()
    assert set(entries(other)) == {"1", "2"} and other.total("merged") == 2


def test_each_row_may_name_its_topic(queue: MakeQueue, tmp_path: Path) -> None:
    first, second, keyed = queue(), queue(TopicType.RANGE_MERGE), queue(TopicType.RANGE_MERGE, identity="key")
    names = [
        first.topic.name,
        second.topic.name,
        keyed.topic.name,
        None,
        "nobody",
        keyed.topic.name,
        second.topic.name,
    ]
    batch = batch_of(
        value=(pa.string(), [str(n) for n in range(7)]),
        topic=(pa.string(), names),
        priority=(pa.int64(), [40, None, None, None, None, None, 50]),
        key=(pa.string(), [None, None, "k", None, None, None, None]),
    )
    counts = write(first, batch, topic="", badRows=str(tmp_path))
    assert counts == {"stored": 3, "left out": 4}
    assert [set(entries(topic)) for topic in (first, second, keyed)] == [{"0"}, {"1"}, {"k"}]
    (file,) = tmp_path.iterdir()
    why = {row["value"]: row["refused"] for row in pq.read_table(file).to_pylist()}
    assert why["3"] == "column topic is null" and "nobody is not registered" in why["4"]
    assert why["5"] == "column key is null" and "takes no column priority" in why["6"]


# --- ingest


def test_ingest_keeps_decimals_and_microseconds(run: Run, broker: Broker, spark: Any, tmp_path: Path) -> None:
    """Rows that differ in the seventeenth digit, or in a microsecond, stay different messages."""
    path = tmp_path / "amounts.parquet"
    spark.sql(
        "select * from values ('a', 12345678901234567.89BD, timestamp '2024-01-01 00:00:00.123456'),"
        " ('a', 12345678901234567.88BD, timestamp '2024-01-01 00:00:00.123456'),"
        " ('b', 10.50BD, timestamp '2024-01-01 00:00:00.123789'),"
        " ('b', 10.50BD, timestamp '2024-01-01 00:00:00.123788'),"
        " ('b', 10.50BD, timestamp '2024-01-01 00:00:00.123788') as t(account, amount, at)"
    ).selectExpr("*", "array(amount) as `all of it`").write.parquet(str(path))
    told = run("ingest", "notes", path)
    assert "5 rows, 4 messages after merging equal bodies" in told and "4 messages sent to notes" in told
    stored = [json.loads(body) for body in waiting(broker, "notes")]
    assert sorted((row["account"], row["amount"], row["all of it"], row["at"]) for row in stored) == [
        ("a", "12345678901234567.88", ["12345678901234567.88"], "2024-01-01T00:00:00.123456Z"),
        ("a", "12345678901234567.89", ["12345678901234567.89"], "2024-01-01T00:00:00.123456Z"),
        ("b", "10.50", ["10.50"], "2024-01-01T00:00:00.123788Z"),
        ("b", "10.50", ["10.50"], "2024-01-01T00:00:00.123789Z"),
    ]
    assert "two columns of the body have one name" in run(
        "ingest", "notes", path, "--select", "account as a", "--select", "amount as a", code=2
    )


@pytest.mark.parametrize("in_pieces", [False, True])
def test_ingest_leaves_bad_rows_out_on_request(
    run: Run, broker: Broker, tmp_path: Path, in_pieces: bool
) -> None:
    (tmp_path / "rows.csv").write_text("n,p\n1,40\n2,\n3,3\n4,50\n")
    arguments = ["ingest", "events", tmp_path / "rows.csv", "--select", "n", "--priority", "int(p)"]
    arguments += ["--checkpoint", tmp_path / "pieces"] if in_pieces else []
    told = run(*arguments, "--bad", tmp_path / "bad")
    assert f"2 messages sent to events; 2 could not be sent and are in {tmp_path / 'bad'}" in told
    assert waiting(broker, "events") == {'{"n":"1"}': 40, '{"n":"4"}': 50}
    rows = [row for file in (tmp_path / "bad").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert {row["value"]: row["refused"].partition(" (")[0] for row in rows} == {
        '{"n":"2"}': "column priority is null",
        '{"n":"3"}': "priority must be from 17",
    }


def test_a_stream_names_the_files_of_its_bad_rows_by_query_and_batch(
    spark: Any, queue: MakeQueue, tmp_path: Path
) -> None:
    target = queue(TopicType.RANGE_MERGE)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.txt").write_text("1\n2\n{\n3\n")
    writer = spark.readStream.text(str(tmp_path / "rows")).writeStream.format("rmq")
    writer = writer.options(**target.options, timeRange="1ms", badRows=str(tmp_path / "bad"))
    query = (
        writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    )
    assert query.awaitTermination(300) and query.exception() is None
    assert set(entries(target)) == {"1", "2", "3"}
    (file,) = (tmp_path / "bad").iterdir()
    assert file.name == f"{query.id}-0-00000.parquet"
    assert [row["value"] for row in pq.read_table(file).to_pylist()] == ["{"]
