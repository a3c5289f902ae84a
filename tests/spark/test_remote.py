"""Pipelines on a Spark Connect server: one that PySpark's own jars make, and clients in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from django_rmq.spark.pipelines.archive import YOUNGEST_MS
from tests.spark.conftest import Start, bury, end, send_work, topic
from tests.support.brokers import Broker
from tests.support.embedded_server import free_port
from tests.support.workers import eventually, live, total
from tests.support.zookeeper import spark_jars


@pytest.fixture(scope="module")
def server(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Spark Connect server, which knows nothing of Django's settings."""
    folder, port = tmp_path_factory.mktemp("connect"), free_port()
    conf = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.local.dir": folder,
        "spark.sql.warehouse.dir": folder / "warehouse",
        "spark.driver.extraJavaOptions": f"-Dderby.stream.error.file={folder / 'derby.log'}",
    }
    home = Path(os.environ.get("SPARK_HOME") or spark_jars().parent)
    command = [str(home / "bin" / "spark-submit"), "--master", "local[2]"]
    for key, value in conf.items():
        command += ["--conf", f"{key}={value}"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    settled = {key: value for key, value in os.environ.items() if not key.startswith(("DJANGO_", "RMQ_"))}
    log = folder / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, cwd=folder, env=settled, stdout=written, stderr=written, start_new_session=True
        )
    try:
        eventually(lambda: "Spark Connect server started" in log.read_text(), "the server", 200)
        yield f"sc://127.0.0.1:{port}"
    finally:
        end(process)


Remote = Callable[..., str]


@pytest.fixture
def remote(server: str, start: Start, tmp_path: Path) -> Remote:
    """Run a pipeline on the server, check its exit code, and return what it has printed."""

    def run(*arguments: object, code: int = 0) -> str:
        log = tmp_path / "log"
        said = log.stat().st_size if log.exists() else 0
        found = start(*arguments, "--remote", server).wait(300)
        told = log.read_text()[said:]
        assert found == code, told
        assert "Traceback" not in told
        return told

    return run


def rows(path: Path, numbers: range) -> Path:
    path.write_text("n\n" + "".join(f"{n}\n" for n in numbers))
    return path


def test_rows_are_ingested_reported_and_consumed(remote: Remote, broker: Broker, tmp_path: Path) -> None:
    work, source = topic("work"), tmp_path / "rows.csv"
    assert "100 messages sent to work" in remote("ingest", "work", rows(source, range(100)))
    # The server has kept nothing of the file that was there before.
    assert "20 rows, 20 messages" in remote("ingest", "work", rows(source, range(100, 120)))
    floats = ("--select", "double(n) * 1e5 as x", "--where", "n = 101")
    assert '{"x":10100000.0}' in remote("ingest", "work", source, *floats, "--dry-run")
    printed = remote("report", "work", "--json")
    told = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    assert told["work"]["backlog"]["store"] == 120
    broker.send_merge(work, 0, 0, [b'"text"'])
    consumed = remote(
        *("consume", "work", "--schema", "n int", "--checkpoint", tmp_path / "checkpoint", "--available-now"),
        *("--jdbc", f"jdbc:derby:{tmp_path / 'database'};create=true", "--table", "taken"),
    )
    assert "121 messages of work consumed" in consumed
    assert total(broker, work, "acked") == 121 and live(broker, work) == 0
    # Not even Spark's own complaint comes as a stack trace.
    assert "PATH_NOT_FOUND" in remote("ingest", "work", tmp_path / "none.csv", code=1)


def test_the_dead_are_archived_and_replayed(remote: Remote, broker: Broker, tmp_path: Path) -> None:
    work = topic("work")
    send_work(broker, 40)
    assert bury(broker, "work") == 40
    died = broker.now_ms()
    # Who has died within the last second is not archived yet.
    eventually(lambda: broker.now_ms() > died + YOUNGEST_MS, "the first second of death")
    archive = tmp_path / "archive"
    assert "work: 40 deleted" in remote("archive", archive, "work", "--older-than", "0s")
    assert "work: 40 stored" in remote("replay", "work", "--archive", archive)
    assert live(broker, work) == 40


def test_pieces_are_sent(remote: Remote, broker: Broker, tmp_path: Path) -> None:
    work, source = topic("work"), tmp_path / "rows.csv"
    ingest = ("ingest", "work", rows(source, range(100)), "--checkpoint", tmp_path / "pieces", "--rate", 20)
    assert "100 of 100 messages sent" in remote(*ingest)
    assert "100 of 100 messages were sent before" in remote(*ingest)
    assert total(broker, work, "sent") == 100


def test_sigterm_lets_a_stream_end(server: str, start: Start, broker: Broker, tmp_path: Path) -> None:
    work, log = send_work(broker, 4), tmp_path / "log"
    process = start(
        *("consume", "work", "--parquet", tmp_path / "out", "--checkpoint", tmp_path / "checkpoint"),
        *("--remote", server),
    )
    eventually(lambda: "batch 0: 4 messages" in log.read_text(), "a batch", 200)
    process.send_signal(signal.SIGTERM)
    assert process.wait(150) == 0, log.read_text()
    assert "4 messages of work consumed" in log.read_text()
    assert total(broker, work, "acked") == 4


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("sc://127.0.0.1:1", "no Spark Connect server answers at 127.0.0.1:1"),
        ("spark://127.0.0.1:7077", "has an address like sc://"),
        ("sc://host:many/;token=secret", "has an address like sc://"),
    ],
)
def test_a_server_that_is_not_there_is_told_at_once(broker: Broker, address: str, said: str) -> None:
    with pytest.raises(CommandError, match=said) as caught:
        call_command("runrmqpipeline", "report", "events", "--remote", address)
    assert caught.value.returncode == 2 and "secret" not in str(caught.value)
