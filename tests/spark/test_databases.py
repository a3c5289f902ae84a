"""A database on either side of a topic, by JDBC: Derby, whose driver is among the jars of PySpark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from django_rmq import send_messages
from tests.spark.conftest import Run, topic, unrecorded, waiting
from tests.support.brokers import Broker
from tests.support.workers import live, total

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
    work = topic("work")
    arguments = ["work", "--jdbc", database, "--table", "taken"]
    arguments += ["--claim-timeout", "1h", "--checkpoint", str(tmp_path / "checkpoint"), "--available-now"]
    broker.define(work)
    for n in range(40):
        broker.send_merge(work, n % 4, 0, [f"{n}".encode()])
    with unrecorded():
        assert "batch 0 is written" in run("consume", *arguments, code=1)
    assert total(broker, work, "acked") == 0
    broker.send_merge(work, 0, 0, [b"later"])
    run("consume", *arguments)
    found = Counter((row.value, row.batch) for row in rows(spark, database, "taken"))
    assert found == {**{(f"{n}", 0): 1 for n in range(40)}, ("later", 1): 1}
    assert total(broker, work, "acked") == 41 and live(broker, work) == 0
    # Another checkpoint begins with batch 0 again, and deletes nothing of this one's.
    broker.send_merge(work, 0, 0, [b"another"])
    run("consume", *arguments[:-2], str(tmp_path / "second"), "--available-now")
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
