"""`consume`: what is acknowledged is in the files or the table, once, whatever was killed and whichever checkpoint came."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet
import pytest

from django_rmq import send_messages
from django_rmq.exceptions import InvalidRequest
from django_rmq.spark import foreach_batch
from django_rmq.spark.foreach_batch import Batches, Files
from django_rmq.spark.pipelines.consume import decoded
from tests.spark.conftest import Run, send_work, topic, unrecorded, waiting
from tests.support.brokers import Broker
from tests.support.workers import live, total


def stored(path: Path, *columns: str) -> Counter[Any]:
    """Return the rows of a folder, as a program without Spark reads them."""
    if not path.exists():
        return Counter()
    rows = pyarrow.parquet.read_table(path).to_pylist()
    return Counter(
        tuple(row[name] for name in columns) if len(columns) > 1 else row[columns[0]] for row in rows
    )


def consume_again(run: Run, broker: Broker, *arguments: object) -> None:
    """Consume a batch whose record fails, and then again, with one more message."""
    work = send_work(broker, 40)
    consume = ("consume", "work", *arguments, "--claim-timeout", "1h", "--available-now")
    with unrecorded():
        assert "batch 0 is written" in run(*consume, code=1)
    assert total(broker, work, "acked") == 0
    broker.send_merge(work, 0, 0, [b"later"])
    run(*consume)
    assert total(broker, work, "acked") == 41 and live(broker, work) == 0


def test_a_new_checkpoint_writes_beside_what_another_has_written(
    run: Run, broker: Broker, spark: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def consume(checkpoint: str, **how: Any) -> str:
        return run(
            *("consume", "events", "--parquet", out, "--checkpoint", tmp_path / checkpoint),
            *("--available-now", "--max-messages", 100),
            **how,
        )

    send_messages("events", [{"n": n} for n in range(150)], priority=40)
    told = consume("one")
    assert "150 messages of events consumed" in told
    assert re.search(r"batch 0: \d+ messages, \d+/s, \d+ wait\n", told), told
    send_messages("events", [{"n": n} for n in range(150, 250)], priority=40)
    assert "100 messages of events consumed" in consume("two")
    send_messages("events", [{"n": 250}], priority=40)
    consume("one")
    wanted = Counter({f'{{"n":{n}}}': 1 for n in range(251)})
    assert stored(out, "value") == wanted
    assert total(broker, topic("events"), "acked") == 251 and live(broker, topic("events")) == 0
    # Spark and pandas read the same; a batch has a name of its own.
    assert spark.read.parquet(str(out)).count() == 251
    batches = stored(out, "query", "batch")
    assert len({query for query, _ in batches}) == 2
    assert sorted(batch for _, batch in batches)[:2] == [0, 0]
    # What Spark's own file sink has written, its readers would go on to read alone.
    (out / "_spark_metadata").mkdir()
    send_messages("events", ["kept"], priority=40)
    assert "Use another folder" in consume("three", code=2)
    assert live(broker, topic("events")) == 1
    assert "--checkpoint is missing" in run("consume", "events", "--parquet", out, code=2)
    assert "--each" in run("consume", "events", "--each", "nowhere.at", "--checkpoint", "x", code=2)


def test_a_batch_that_lost_its_claim_is_replaced_by_what_it_has_left(spark: Any, tmp_path: Path) -> None:
    files = Files(str(tmp_path / "out"))
    rows = spark.createDataFrame([("a",), ("b",)], "value string")
    files.write(rows, "q", 0, may_repeat=True)
    files.write(rows, "q", 1, may_repeat=False)
    assert stored(tmp_path / "out", "value") == {"a": 2, "b": 2}
    files.write(rows.where("value = 'a'"), "q", 1, may_repeat=True)
    assert stored(tmp_path / "out", "value") == {"a": 2, "b": 1}
    files.write(rows.where("value = 'none'"), "q", 1, may_repeat=True)
    files.write(rows.where("value = 'none'"), "q", 7, may_repeat=True)
    assert stored(tmp_path / "out", "value") == {"a": 1, "b": 1}


def test_bodies_that_do_not_fit_are_counted_and_kept(
    run: Run, broker: Broker, spark: Any, tmp_path: Path
) -> None:
    bodies: list[Any] = [{"n": 1, "v": "a"}, {"n": "not a number", "v": "b"}, {"other": 3}, [1, 2, 3], "text"]
    bodies.append({"n": 9007199254740993000})
    raw = ['{"n":"not a number","v":"b"}', '{"other":3}', "[1,2,3]", '"text"', '{"n":9007199254740993000}']
    consume = ("consume", "events", "--schema", "n int, v string", "--available-now")
    send_messages("events", bodies, priority=40)
    fine, bad = tmp_path / "fine", tmp_path / "bad"
    arguments = ("--parquet", fine, "--bad", bad, "--checkpoint", tmp_path / "two")
    told = run(*consume, *arguments)
    assert "batch 0: 5 bodies do not fit the schema" in told and "6 messages of events consumed" in told
    assert stored(fine, "n", "v", "batch") == {(1, "a", 0): 1}
    assert stored(bad, "value") == Counter(raw)
    assert total(broker, topic("events"), "acked") == 6
    assert "--bad requires --schema" in run("consume", "events", *arguments, code=2)


def test_a_function_is_told_the_name_of_a_batch(
    run: Run, broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    send_messages("events", [1, 2, {"n": 3}], priority=40)
    consume = ("consume", "events", "--checkpoint", tmp_path / "checkpoint {a}", "--available-now", "--each")
    assert "must take a frame" in run(*consume, "tests.spark.project.pipelines.unnamed", code=2)
    told = run(*consume, "tests.spark.project.pipelines.noted", "--schema", "n int")
    # Spark counts what the function reads twice as six.
    assert "batch 0: 3 messages" in told and "3 messages of events consumed" in told
    assert "batch 0: 2 bodies do not fit" in told
    name = (tmp_path / "checkpoint {a}" / "metadata").read_text().split('"')[3]
    assert f"batch 0 of {name}: 3 rows" in capsys.readouterr().out


# --- bodies that do not fit a schema: none of them becomes a row of NULLs and nothing else

FITTING = {
    '{"n":1,"v":"a"}': (1, "a"),
    '{"n":2}': (2, None),
    '{"v":null}': (None, None),
    '{"n":3,"other":{"x":1}}': (3, None),
}
MALFORMED = [
    '{"n":"not a number","v":"b"}',
    '{"other":3}',
    "[1,2,3]",
    '"text"',
    '{"n":9007199254740993000}',
    "null",
    "{",
    '[{"n":1}]',
    '{"n":1.5}',
]


@pytest.mark.parametrize("kind", ["string", "binary"])
def test_a_body_that_does_not_fit_is_kept_as_it_is(spark: Any, kind: str) -> None:
    bodies = [*FITTING, *MALFORMED]
    frame = spark.createDataFrame([(body, "t", 3) for body in bodies], "value string, topic string, slot int")
    found = decoded(frame.withColumn("value", frame["value"].cast(kind)), "n int, v string")
    assert found.columns == ["n", "v", "topic", "slot", "malformed"]
    rows = found.collect()
    read = [(row.n, row.v) for row in rows if row.malformed is None]
    assert read == list(FITTING.values())
    kept = [row.malformed for row in rows if row.malformed is not None]
    assert [bytes(body).decode() if kind == "binary" else body for body in kept] == MALFORMED
    assert {(row.topic, row.slot) for row in rows} == {("t", 3)}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("array<int>", "list of columns"),
        ("n int, slot int", "column slot"),
        ("Malformed string", "column malformed"),
        ("n int, batch int", "column batch"),
    ],
)
def test_a_schema_names_columns_that_are_not_there_already(spark: Any, schema: str, said: str) -> None:
    frame = spark.createDataFrame([("1", "t", 0)], "value string, topic string, slot int")
    with pytest.raises(InvalidRequest, match=said):
        decoded(frame, schema)


# --- Derby, whose driver is among the jars of PySpark

LOG = "derby.stream.error.file"
"""The property of Java's that says where Derby writes its log: otherwise into the folder it is started in."""


@pytest.fixture
def database(spark: Any, tmp_path: Path) -> str:
    """The URL of a Derby in the session's own Java, made when somebody comes."""
    spark._jvm.java.lang.System.setProperty(LOG, str(tmp_path / "derby.log"))
    return f"jdbc:derby:{tmp_path / 'database'};create=true"


def rows(spark: Any, database: str, table: str) -> list[Any]:
    return list(spark.read.jdbc(database, table).collect())


def test_a_topic_is_consumed_into_a_table_and_a_table_is_ingested(
    run: Run, broker: Broker, spark: Any, database: str, tmp_path: Path
) -> None:
    send_messages("events", [{"n": n, "name": f"n{n}"} for n in range(300)], priority=40)
    told = run(
        *("consume", "events", "--jdbc", database, "--table", "taken", "--schema", "n int, name string"),
        *("--checkpoint", tmp_path / "checkpoint", "--available-now", "--max-messages", 200),
    )
    assert "300 messages of events consumed" in told
    found = rows(spark, database, "taken")
    assert sorted((row.n, row.name, row.topic) for row in found) == [
        (n, f"n{n}", "events") for n in range(300)
    ]
    assert {row.batch for row in found} == {0, 1}
    assert total(broker, topic("events"), "acked") == 300 and live(broker, topic("events")) == 0

    ingest = ("ingest", "notes", database, "--format", "jdbc", "--select", "n")
    run(*ingest, "--option", "dbtable=taken", "--where", "n % 3 = 0")
    assert set(waiting(broker, "notes")) == {f'{{"n":{n}}}' for n in range(0, 300, 3)}
    assert "dbtable" in run(*ingest, code=1)
    assert "NOWHERE" in run(*ingest, "--option", "dbtable=nowhere", code=1)
    assert "--table" in run("consume", "events", "--jdbc", database, "--checkpoint", "x", code=2)


def test_a_batch_that_is_in_the_table_but_not_recorded_is_there_once(
    run: Run, broker: Broker, spark: Any, database: str, tmp_path: Path
) -> None:
    arguments = ("--jdbc", database, "--table", "taken", "--checkpoint")
    consume_again(run, broker, *arguments, tmp_path / "checkpoint")
    found = Counter((row.value, row.batch) for row in rows(spark, database, "taken"))
    assert found == {**{(f"{n}", 0): 1 for n in range(40)}, ("later", 1): 1}
    # Another checkpoint begins with batch 0 again, and deletes nothing of this one's.
    broker.send_merge(topic("work"), 0, 0, [b"another"])
    run("consume", "work", *arguments, tmp_path / "second", "--available-now")
    found = Counter((row.value, row.batch) for row in rows(spark, database, "taken"))
    assert found.total() == 42 and found["another", 0] == 1
    assert len({row.query for row in rows(spark, database, "taken")}) == 2


def test_a_table_without_the_name_of_a_batch_is_refused(
    run: Run, broker: Broker, spark: Any, database: str, tmp_path: Path
) -> None:
    old = "value string, score double, topic string, slot int, batch long"
    spark.createDataFrame([("a", 1.0, "t", 0, 0)], old).write.jdbc(database, "old")
    send_messages("events", [1], priority=40)
    consume = ("consume", "events", "--jdbc", database, "--table", "old", "--available-now")
    said = run(*consume, "--checkpoint", tmp_path / "checkpoint", code=1)
    assert "column `query` is not defined in table `old`" in said and "Traceback" not in said
    assert [row.value for row in rows(spark, database, "old")] == ["a"]
    assert total(broker, topic("events"), "acked") == 0


# --- whether a batch may have been written before, which decides if its sink looks for what is there


class ToldSink:
    """A sink that fails where it is to, and remembers what it was told."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, bool]] = []
        self.fails = False

    def write(self, frame: Any, query: str, number: int, *, may_repeat: bool) -> None:
        self.batches.append((number, may_repeat))
        if self.fails:
            raise ConnectionError


def test_a_batch_that_comes_again_to_the_same_object_may_have_been_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreach_batch, "query_of", lambda *_: "q")
    sink = ToldSink()
    batches = Batches("checkpoint", sink)
    batches(Mock(), 0)
    batches(Mock(), 1)
    batches(Mock(), 1)  # the query failed before Spark recorded it, and was started again
    batches(Mock(), 2)
    sink.fails = True
    with pytest.raises(ConnectionError):
        batches(Mock(), 3)
    sink.fails = False
    batches(Mock(), 3)
    batches(Mock(), 4)
    assert sink.batches == [(0, True), (1, False), (1, True), (2, False), (3, False), (3, True), (4, False)]


def test_a_batch_that_is_in_the_files_but_not_recorded_is_there_once(
    run: Run, broker: Broker, tmp_path: Path
) -> None:
    consume_again(run, broker, "--parquet", tmp_path / "out", "--checkpoint", tmp_path / "checkpoint")
    rows = {**{(str(n), 0): 1 for n in range(40)}, ("later", 1): 1}
    assert stored(tmp_path / "out", "value", "batch") == rows
