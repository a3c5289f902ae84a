"""`manage.py runrmqconsumers` from outside: signals, exit codes, crashes, database connections."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from django_rmq.broker import Broker
from django_rmq.messages import BackOff, Topic, TopicType
from tests.servers import RedisServer
from tests.workers import client_of, eventually, live, send, total

ROOT = Path(__file__).parents[2]
WORK = Topic("work", TopicType.RANGE_MERGE, slots=4, time_range_ms=1)
ONE_SLOT = replace(WORK, name="one-slot", slots=1)
BRIEF = replace(ONE_SLOT, name="brief", timeout=1, max_retries=1, backoff=BackOff(0, 0))
LATER = replace(ONE_SLOT, name="later")


class WorkerProcess:
    """One `runrmqconsumers` and what it prints."""

    def __init__(self, data: Path, url: str, prefix: str, *arguments: str, **environment: str) -> None:
        self.data = data
        self.output_path = data / f"output-{time.monotonic_ns()}"
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "manage.py", "runrmqconsumers", *arguments],
                cwd=ROOT,
                env={
                    **os.environ,
                    "DJANGO_SETTINGS_MODULE": "tests.e2e.worker_project.settings",
                    "REDIS_URL": url,
                    "RMQ_KEY_PREFIX": prefix,
                    "WORKER_DATA": str(data),
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def ready(self) -> None:
        """Return when the worker says that it consumes."""
        eventually(lambda: "Consuming" in self.output or self.process.poll() is not None, "starting", 30)
        assert self.process.poll() is None, self.output

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 30) -> int:
        return self.process.wait(seconds)


Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(tmp_path: Path, redis_url: str, prefix: str) -> Iterator[Start]:
    """Start workers; those that still run after the test are killed."""
    started: list[WorkerProcess] = []

    def start_one(*arguments: str, url: str = redis_url, **environment: str) -> WorkerProcess:
        worker = WorkerProcess(tmp_path, url, prefix, *arguments, **environment)
        started.append(worker)
        return worker

    yield start_one
    for worker in started:
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait()


@pytest.fixture
def broker(redis_url: str, prefix: str) -> Iterator[Broker]:
    client = client_of(redis_url)
    yield Broker(client, prefix)
    client.close()


class Happened:
    """What listeners have written down."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def lines(self, word: str) -> list[str]:
        """The names of the messages of which `word` (begun, done) was written down, in order."""
        path = self.data / "happened"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split(" ")[1] for line in lines if line.startswith(f"{word} ")]

    def wait(self, word: str, count: int) -> None:
        """Return when `word` was written down so often."""
        eventually(lambda: len(self.lines(word)) >= count, f"{count} x {word}", 20)

    def go(self) -> None:
        """Let waiting listeners return."""
        (self.data / "go").touch()


@pytest.fixture
def happened(tmp_path: Path) -> Happened:
    return Happened(tmp_path)


def named(*names: object, do: str = "") -> list[dict[str, Any]]:
    return [{"name": str(name), "do": do} for name in names]


# --- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_worker_ends_at_once_and_cleanly(start: Start, number: int) -> None:
    worker = start()
    worker.ready()
    asked = time.monotonic()
    worker.signal(number)
    assert worker.wait() == 0
    assert time.monotonic() - asked < 5
    assert "Traceback" not in worker.output


def test_sigterm_lets_the_running_listener_end_and_gives_the_rest_back(
    start: Start, broker: Broker, happened: Happened
) -> None:
    send(broker, ONE_SLOT, named(*range(20), do="wait"))
    worker = start("one-slot")
    happened.wait("begun", 1)
    worker.signal()
    eventually(lambda: broker.audit(ONE_SLOT, 0).prepare == 1, "giving back")
    happened.go()
    assert worker.wait() == 0
    assert len(happened.lines("begun")) == len(happened.lines("done")) == 1
    ledger = broker.audit(ONE_SLOT, 0)
    assert ledger.balanced
    assert (ledger["committed"], ledger.store, ledger.prepare) == (1, 19, 0)
    assert ledger["failed"] == ledger["expired"] == 0, "nothing was charged"


def test_a_second_signal_ends_the_worker_at_once(start: Start, broker: Broker, happened: Happened) -> None:
    send(broker, WORK, named("x", do="wait"))
    worker = start("work")
    happened.wait("begun", 1)
    worker.signal()
    worker.signal(signal.SIGINT)
    asked = time.monotonic()
    assert worker.wait() == 1
    assert time.monotonic() - asked < 5
    assert total(broker, WORK, "prepared") == 1
    assert live(broker, WORK) == 1, "the message is left to time out"


@pytest.mark.parametrize("topic", [WORK, LATER], ids=["sync", "async"])
def test_a_listener_longer_than_the_shutdown_time_out_does_not_hold_up_the_end(
    start: Start, broker: Broker, happened: Happened, topic: Topic
) -> None:
    send(broker, topic, named("x", do="wait"))
    worker = start(topic.name, "--shutdown-timeout", "0.3")
    happened.wait("begun", 1)
    asked = time.monotonic()
    worker.signal()
    assert worker.wait() == 1
    assert time.monotonic() - asked < 5
    assert "left to time out" in worker.output
    assert sum(broker.audit(topic, slot).prepare for slot in range(topic.slots)) == 1


def test_sigterm_while_redis_is_away_is_a_clean_end(start: Start) -> None:
    with RedisServer() as server:
        worker = start(url=server.url)
        worker.ready()
        eventually(lambda: "cmdstat_evalsha" in client_of(server.url).info("commandstats"), "acquiring")
        server.kill()
        eventually(lambda: "Redis is away" in worker.output, "the worker noticing")
        worker.signal()
        assert worker.wait() == 0
    assert "Traceback" not in worker.output


def test_the_worker_goes_on_by_itself_after_a_restart_of_redis(start: Start, happened: Happened) -> None:
    with RedisServer(appendonly=True) as server:
        worker = start("work", url=server.url)
        worker.ready()
        server.restart()
        client = client_of(server.url)
        prefix = worker_prefix(worker)
        send(Broker(client, prefix), WORK, named("x"))
        happened.wait("done", 1)
        client.close()
        worker.signal()
        assert worker.wait() == 0


def worker_prefix(worker: WorkerProcess) -> str:
    environment = Path(f"/proc/{worker.process.pid}/environ").read_bytes().split(b"\0")
    return next(line for line in environment if line.startswith(b"RMQ_KEY_PREFIX=")).split(b"=")[1].decode()


# --- ends by themselves


def test_burst_runs_what_there_is_and_ends(start: Start, broker: Broker, happened: Happened) -> None:
    send(broker, WORK, named(*range(30)))
    worker = start("work", "--burst", "-t", "2")
    assert worker.wait() == 0
    assert Counter(happened.lines("done")) == Counter(map(str, range(30)))
    assert "Consuming work (4 slots) with 2 threads" in worker.output
    assert "Settled 30 deliveries" in worker.output
    assert live(broker, WORK) == 0


def test_max_messages_and_max_idle_time_end_the_worker(
    start: Start, broker: Broker, happened: Happened
) -> None:
    send(broker, ONE_SLOT, named(*range(500)))
    worker = start("one-slot", "--max-messages", "10")
    assert worker.wait() == 0
    done = len(happened.lines("done"))
    assert 10 <= done < 500
    assert live(broker, ONE_SLOT) == 500 - done
    worker = start("one-slot", "--max-idle-time", "0.3", "-v", "0")
    assert worker.wait() == 0
    assert live(broker, ONE_SLOT) == 0
    assert worker.output == ""


def test_a_listener_that_exits_is_rolled_back_once_and_ends_the_worker(
    start: Start, broker: Broker, happened: Happened
) -> None:
    send(broker, ONE_SLOT, named("x", do="exit"))
    worker = start("one-slot")
    assert worker.wait() == 0
    assert happened.lines("begun") == ["x"]
    assert (total(broker, ONE_SLOT, "failed"), live(broker, ONE_SLOT)) == (1, 1)
    assert "asked the process to exit" in worker.output


# --- it cannot start


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["nobody"], {}, "topic nobody has no listener"),
        (["unknown"], {}, "unknown"),
        (["--exclude", "unknown"], {}, "unknown"),
        (["--threads", "0"], {}, "must be at least 1, got 0"),
        (
            [],
            {"WORKER_LISTENERS": "broken"},
            "tests.e2e.worker_project.broken: ImportError: cannot import name",
        ),
    ],
    ids=["no listener", "unknown topic", "unknown exclude", "no threads", "import error"],
)
def test_usage_and_configuration_errors_end_with_2_in_one_line(
    start: Start, arguments: list[str], environment: dict[str, str], says: str
) -> None:
    worker = start(*arguments, **environment)
    assert worker.wait() == 2
    assert says in worker.output
    assert "Traceback" not in worker.output


def test_another_definition_in_redis_ends_with_2(start: Start, broker: Broker) -> None:
    broker.define(replace(WORK, slots=64))
    worker = start("work")
    assert worker.wait() == 2
    assert "SLOTS is 4 here and 64 in Redis" in worker.output


def test_a_redis_that_does_not_answer_ends_with_3(start: Start) -> None:
    with RedisServer() as server:
        url = server.url
    worker = start(url=url)
    assert worker.wait() == 3
    assert "Redis does not answer" in worker.output
    assert "Traceback" not in worker.output


# --- crashes


def test_what_a_killed_worker_ran_comes_back_after_its_time_out(
    start: Start, broker: Broker, happened: Happened
) -> None:
    send(broker, BRIEF, named("x", do="wait"))
    first = start("brief")
    happened.wait("begun", 1)
    first.process.kill()
    first.wait()
    happened.go()
    second = start("brief")
    happened.wait("done", 1)
    second.signal()
    assert second.wait() == 0
    assert happened.lines("begun") == ["x", "x"]
    ledger = broker.audit(BRIEF, 0)
    assert ledger.balanced
    assert (ledger["expired"], ledger["committed"], live(broker, BRIEF)) == (1, 1, 0)


def test_a_message_that_kills_its_worker_dies_and_takes_nobody_with_it(
    start: Start, broker: Broker, happened: Happened
) -> None:
    send(broker, BRIEF, named(*range(5)))
    send(broker, BRIEF, named("poison", do="abort"))
    for _ in range(2):
        worker = start("brief", "--max-idle-time", "5")
        assert worker.wait() == -signal.SIGABRT
    last = start("brief", "--max-idle-time", "2.5")
    assert last.wait() == 0
    assert happened.lines("begun").count("poison") == 2, "1 + MAX_RETRIES"
    assert {str(i) for i in range(5)} == set(happened.lines("done"))
    ledger = broker.audit(BRIEF, 0)
    assert ledger.balanced
    assert (ledger["committed"], ledger["died"], live(broker, BRIEF)) == (5, 1, 0)


# --- the database


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files by /proc")
def test_listeners_use_the_database_on_several_threads_and_leave_no_connections(
    start: Start, broker: Broker, happened: Happened, tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / "worker.sqlite3") as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE inserted (name, thread)")
    database.close()
    send(broker, WORK, named(*range(60), do="insert"))
    worker = start("work", "-t", "4")
    happened.wait("done", 60)

    def open_databases() -> int:
        found = 0
        for link in Path(f"/proc/{worker.process.pid}/fd").iterdir():
            try:
                found += "worker.sqlite3" in str(link.readlink())
            except OSError:
                continue
        return found

    eventually(lambda: open_databases() == 0, "closing")
    worker.signal()
    assert worker.wait() == 0
    with sqlite3.connect(tmp_path / "worker.sqlite3") as database:
        rows = database.execute("SELECT name, thread FROM inserted").fetchall()
    database.close()
    assert Counter(name for name, _ in rows) == Counter(map(str, range(60)))
    assert len({thread for _, thread in rows}) == 4
