"""`manage.py runrmqconsumers` from outside: signals, exit codes, crashes, database connections."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from django_rmq.core.commands.membership import roster
from django_rmq.core.commands.reports import ask_worker, read_reports
from django_rmq.core.coordination.worker_records import members_of_roster
from django_rmq.core.model.topic import Topic
from tests.e2e.processes import (
    ONE_SLOT,
    WORK,
    Happened,
    Start,
    WorkerProcess,
    is_gone,
    make_app,
    named,
    probed,
)
from tests.support.brokers import Broker
from tests.support.embedded_server import free_port
from tests.support.servers import RedisServer
from tests.support.workers import LONG, client_of, eventually, live, send

LATER = replace(WORK, name="later")


# --- what a person asks of it


def ask_all(broker: Broker, request: str, count: int) -> None:
    """Ask each live worker, as the page of workers does."""
    eventually(lambda: len(broker.run(read_reports())) == count, "reports")
    for worker in broker.run(read_reports()):
        broker.run(ask_worker(worker, f"{request} {broker.now_ms()}"))


def are_all(broker: Broker, state: str) -> bool:
    return {one.state for one in broker.run(read_reports()).values()} == {state}


def topics_served(broker: Broker) -> set[str]:
    members = members_of_roster(broker.run(roster()))
    assert members
    return {topic.name for member in members for topic in member.worker.topics}


def test_a_quiet_worker_ends_what_runs_and_gives_its_slots_away_until_it_resumes(
    start: Start, broker: Broker, happened: Happened
) -> None:
    send(broker, WORK, named("first", do="wait"))
    worker = start("work", "--processes", "2", "-t", "2")
    happened.wait("begun", 1)
    ask_all(broker, "quiet", 2)
    eventually(lambda: are_all(broker, "quiet") and not topics_served(broker), "being quiet")
    happened.go()
    happened.wait("done", 1)
    assert len(worker.children) == 2
    send(broker, WORK, named("second"))
    ask_all(broker, "resume", 2)
    happened.wait("done", 2)
    eventually(lambda: are_all(broker, "working") and topics_served(broker) == {"work"}, "working")
    worker.end()


def test_a_stop_of_its_workers_ends_the_command_as_one_sigterm_does(
    start: Start, broker: Broker, happened: Happened
) -> None:
    send(broker, WORK, named("running", do="wait"))
    worker = start("work", "--processes", "2", "-t", "2")
    happened.wait("begun", 1)
    # A second SIGTERM would end the processes at once, and two stops do not.
    ask_all(broker, "stop", 2)
    eventually(lambda: "was asked to stop the command" in worker.output, "the parent")
    happened.go()
    assert worker.wait(LONG) == 0
    assert happened.lines("done") == ["running"]
    assert "Stopping immediately" not in worker.output and "Traceback" not in worker.output
    assert broker.run(read_reports()) == {}
    assert live(broker, WORK) == 0


# --- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_worker_ends_at_once_and_cleanly(start: Start, number: int) -> None:
    worker = start()
    worker.ready()
    worker.signal(number)
    assert worker.wait(25) == 0
    assert "Traceback" not in worker.output


def test_sigterm_lets_the_running_listener_end_and_gives_the_rest_back(
    start: Start, broker: Broker, happened: Happened
) -> None:
    send(broker, ONE_SLOT, named(*range(20), do="wait"))
    worker = start("one-slot")
    happened.wait("begun", 1)
    worker.signal()
    eventually(lambda: broker.audit_ledger(ONE_SLOT, 0).prepare == 1, "giving back")
    happened.go()
    assert worker.wait() == 0
    assert len(happened.lines("begun")) == len(happened.lines("done")) == 1
    ledger = broker.audit_ledger(ONE_SLOT, 0)
    assert ledger.balanced
    assert (ledger["committed"], ledger.store, ledger.prepare) == (1, 19, 0)
    assert ledger["failed"] == ledger["expired"] == 0, "nothing was charged"


# --- ends by themselves


@pytest.mark.parametrize("processes", ["1", "3"])
def test_burst_runs_what_there_is_and_ends(
    start: Start, broker: Broker, happened: Happened, processes: str
) -> None:
    send(broker, WORK, named(*range(200)))
    worker = start("work", "--burst", "-p", processes, "-t", "2")
    assert worker.wait() == 0
    assert Counter(happened.lines("done")) == Counter(map(str, range(200)))
    assert "Consuming work (4 slots) with 2 threads" in worker.output
    assert processes == "3" or "Settled 200 deliveries" in worker.output
    assert live(broker, WORK) == 0


def test_max_messages_replaces_the_process_and_max_idle_time_ends_it(
    start: Start, broker: Broker, happened: Happened
) -> None:
    send(broker, ONE_SLOT, named(*range(300)))
    # On a busy machine a successor has its slot after a second or two.
    worker = start("one-slot", "--max-messages", "100", "--max-idle-time", "8")
    assert worker.wait() == 0
    assert live(broker, ONE_SLOT) == 0
    assert Counter(happened.lines("done")) == Counter(map(str, range(300)))
    assert worker.output.count("stopped on request, or to be replaced") >= 1
    assert "Settled 300 deliveries" in worker.output
    assert 2 <= len(happened.processes()) <= 4
    # The checks print their warnings whatever the verbosity, as for all commands of Django.
    quiet = start("one-slot", "--max-idle-time", "0.3", "-v", "0", "--skip-checks")
    assert quiet.wait() == 0
    assert quiet.output == ""


def test_a_process_that_uses_more_than_max_memory_is_replaced(
    start: Start, broker: Broker, happened: Happened
) -> None:
    replaced = "is above the limit of 1 MiB; the process is replaced\n"
    worker = start("one-slot", "--max-memory", "1")
    eventually(lambda: "Raise --max-memory" in worker.output, "the error", 20)
    assert replaced not in worker.output
    for n in range(2):
        # A process whose memory is above the limit from its start has to consume something before it is replaced.
        send(broker, ONE_SLOT, named(n))
        eventually(
            partial(_has_consumed, worker, happened, replaced, n + 1), "a message and a replacement", 20
        )
    worker.end()


def _has_consumed(worker: WorkerProcess, happened: Happened, replaced: str, count: int) -> bool:
    return len(happened.lines("done")) == worker.output.count(replaced) == count


def test_flags_come_from_the_environment_too(start: Start, broker: Broker, happened: Happened) -> None:
    send(broker, WORK, named(*range(5)))
    worker = start(RMQ_CONSUMER_TOPICS="work", RMQ_CONSUMER_BURST="1", RMQ_CONSUMER_THREADS="3")
    assert worker.wait() == 0
    assert "Consuming work (4 slots) with 3 threads" in worker.output
    assert len(happened.lines("done")) == 5
    shown = start("--help")
    assert shown.wait() == 0
    for flag in ("PROCESSES", "THREADS", "MAX_MEMORY", "HEALTH_ADDR", "BURST", "TOPICS"):
        assert f"[RMQ_CONSUMER_{flag}]" in " ".join(shown.output.split())


def _says(worker: WorkerProcess, text: str) -> bool:
    return text in worker.output


def test_it_begins_anew_when_its_code_changes(
    start: Start, broker: Broker, tmp_path: Path, happened: Happened
) -> None:
    code = """
from django_rmq import listener
from tests.e2e.worker_project.settings import WORKER_DATA


@listener("work")
def work(message):
    with open(WORKER_DATA / "happened", "a") as file:
        file.write(f"old {message.body['name']} 0 0\\n")
"""
    send(broker, WORK, named("a"))
    worker = start("--reload", **make_app(tmp_path, "changing_app", listeners=code))
    listeners = tmp_path / "changing_app/listeners.py"
    happened.wait("old", 1)
    mistakes = {
        "def work(:\n": "SyntaxError: invalid syntax ({}, line 1)",
        "import shop_that_is_missing\n": "No module named 'shop_that_is_missing' ({}, line 1)",
        code.replace("@listener", "\n@listner"): "NameError: name 'listner' is not defined ({}, line 7)",
        "raise SystemExit(0)\n": "ended with exit code 0",
        "print('loaded', flush=True)\nimport os\nos._exit(0)\n": "ended with exit code 0",
    }
    for number, (mistake, says) in enumerate(mistakes.items(), 2):
        listeners.write_text(mistake)
        eventually(partial(_says, worker, says.format(listeners)), "noticing the mistake", 30)
        send(broker, WORK, named(f"b{number}"))
        happened.wait("old", number)
    assert worker.output.count("so the old code keeps running") == 4
    listeners.write_text(code.replace("old", "new"))
    eventually(lambda: worker.output.count("Consuming work") == 2, "beginning again", 30)
    send(broker, WORK, named("c"))
    happened.wait("new", 1)
    worker.end()
    assert happened.lines("old") == ["a", "b2", "b3", "b4", "b5", "b6"]
    assert live(broker, WORK) == 0


LISTENER = "from django_rmq import listener\n\nlistener('work')(print)\n"


def test_it_ends_on_sigterm_while_changed_code_blocks(start: Start, broker: Broker, tmp_path: Path) -> None:
    worker = start("--reload", **make_app(tmp_path, "blocking_app", listeners=LISTENER))
    listeners = tmp_path / "blocking_app/listeners.py"
    worker.ready()
    child = worker.child()
    begun = tmp_path / "begun"
    listeners.write_text(f"import pathlib, time\n\npathlib.Path('{begun}').touch()\ntime.sleep(600)\n")
    eventually(begun.exists, "trying the code out")
    [trial] = {*worker.children} - {child}
    worker.signal()
    assert worker.wait(LONG / 2) == 0
    assert is_gone(trial)


def test_signals_about_its_processes_do_not_end_a_worker_that_has_none_yet(
    start: Start, tmp_path: Path
) -> None:
    begun, done = tmp_path / "begun", tmp_path / "done"
    listeners = f"""
import pathlib, time
from django_rmq import listener

def load_slowly():
    pathlib.Path({str(begun)!r}).touch()
    while not pathlib.Path({str(done)!r}).exists():
        time.sleep(0.01)

load_slowly()
listener("work")(print)
"""
    worker = start(**make_app(tmp_path, "slow_app", listeners=listeners))
    eventually(begun.exists, "loading the project")
    worker.signal(signal.SIGHUP)
    worker.signal(signal.SIGUSR1)
    eventually(lambda: "in load_slowly" in worker.output, "the stack")
    done.touch()
    worker.ready()
    worker.end()


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
            "tests.e2e.worker_project.broken cannot be imported: ImportError: cannot import name",
        ),
        ([], {"RMQ_TEST_COORDINATOR": "tests.e2e.worker_project.coordinators.nobody"}, "nobody"),
    ],
    ids=["no listener", "unknown topic", "unknown exclude", "no threads", "import error", "no coordinator"],
)
def test_usage_and_configuration_errors_end_with_2_in_one_line(
    start: Start, arguments: list[str], environment: dict[str, str], says: str
) -> None:
    worker = start(*arguments, **environment)
    assert worker.wait() == 2
    assert says in worker.output
    assert "Traceback" not in worker.output


def test_a_failed_check_of_the_project_ends_with_2_unless_checks_are_skipped(
    start: Start, tmp_path: Path
) -> None:
    apps = """
from django.apps import AppConfig
from django.core import checks


class UnsoundConfig(AppConfig):
    name = "unsound_app"

    def ready(self):
        checks.register(lambda app_configs, **kwargs: [checks.Error("no roof", id="unsound.E001")])
"""
    environment = make_app(tmp_path, "unsound_app", listeners=LISTENER, apps=apps)
    worker = start("--dry-run", **environment)
    assert worker.wait() == 2
    assert "(unsound.E001) no roof" in worker.output
    assert "Consuming" not in worker.output
    assert "Traceback" not in worker.output
    worker = start("--dry-run", "--skip-checks", **environment)
    assert worker.wait() == 0
    assert "Consuming" in worker.output


def test_another_definition_in_redis_ends_with_2(start: Start, broker: Broker) -> None:
    broker.define(replace(WORK, slots=64))
    worker = start("work")
    assert worker.wait() == 2
    assert "SLOTS is 4 here and 64 in Redis" in worker.output


def test_a_worker_that_starts_before_its_redis_waits_for_it(start: Start, happened: Happened) -> None:
    port = free_port()
    with RedisServer() as server:
        url = server.url
    worker = start("work", "--health-addr", f"127.0.0.1:{port}", url=url)
    eventually(lambda: probed(port, "live") == 200, "being alive")
    eventually(lambda: "No worker process starts, because a server is unreachable" in worker.output, "a line")
    assert probed(port, "ready") == 503
    assert "Consuming" not in worker.output
    assert "Redis does not answer" in worker.output
    with RedisServer(port=server.port):
        eventually(lambda: "Consuming" in worker.output, "the start")
        send(Broker(client_of(url), worker.prefix), WORK, named("x"))
        happened.wait("done", 1)
        worker.end()
    assert "The server answers after" in worker.output
    assert "Traceback" not in worker.output


def test_sigterm_while_a_worker_waits_for_its_redis_is_a_clean_end(start: Start) -> None:
    with RedisServer() as server:
        url = server.url
    worker = start("work", url=url)
    eventually(lambda: "No worker process starts" in worker.output, "a line")
    worker.end()
    assert "Traceback" not in worker.output


def test_a_worker_that_starts_before_its_zookeeper_waits_for_it(start: Start) -> None:
    hosts = f"127.0.0.1:{free_port()}"
    more = {"RMQ_TEST_COORDINATOR": "zookeeper", "RMQ_TEST_ZOOKEEPER": json.dumps({"HOSTS": hosts})}
    worker = start("work", **more)
    eventually(lambda: "No worker process starts" in worker.output, "a line")
    assert f"ZooKeeper at {hosts} does not answer" in worker.output
    assert worker.process.poll() is None, "it waits for its server"
    worker.end()


def test_a_burst_does_not_wait_for_its_redis(start: Start) -> None:
    with RedisServer() as server:
        url = server.url
    worker = start("work", "--burst", url=url)
    assert worker.wait(LONG) == 3
    assert "Redis does not answer" in worker.output
    assert "Traceback" not in worker.output


def test_a_redis_that_refuses_the_worker_ends_it_with_3(start: Start) -> None:
    with RedisServer() as server:
        client_of(server.url).config_set("requirepass", "secret")
        worker = start("work", url=server.url)
        assert worker.wait(LONG) == 3
    assert "Redis denies access" in worker.output
    assert "No worker process starts" not in worker.output
    assert "Traceback" not in worker.output


# --- the database


@pytest.mark.usefixtures("proc")
@pytest.mark.parametrize("topic", [WORK, LATER], ids=["sync", "async"])
def test_listeners_use_the_database_on_several_threads_and_leave_no_connections(
    start: Start, broker: Broker, happened: Happened, tmp_path: Path, topic: Topic
) -> None:
    with sqlite3.connect(tmp_path / "worker.sqlite3") as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE inserted (name, thread)")
    database.close()
    send(broker, topic, named(*range(60), do="insert"))
    worker = start(topic.name, "-t", "4")
    happened.wait("done", 60)

    def open_databases() -> int:
        found = 0
        for pid in (worker.process.pid, worker.child()):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    found += "worker.sqlite3" in str(link.readlink())
                except OSError:
                    continue
        return found

    eventually(lambda: open_databases() == 0, "closing")
    worker.end()
    with sqlite3.connect(tmp_path / "worker.sqlite3") as database:
        rows = database.execute("SELECT name, thread FROM inserted").fetchall()
    database.close()
    assert Counter(name for name, _ in rows) == Counter(map(str, range(60)))
    threads = len({thread for _, thread in rows})
    # An async listener has one for each call that overlaps, and here it is one call for each slot.
    assert threads == 4 if topic is WORK else 1 <= threads <= 4
