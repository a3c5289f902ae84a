"""Topics are re-slotted while real processes send and consume: nothing is lost, doubled or run side by side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from django_rmq.core.model.topic import Topic, TopicType
from tests.e2e import ledger
from tests.e2e.mover import STEPS
from tests.e2e.processes import Start, WorkerProcess, environment_of, is_gone
from tests.support import preloaded
from tests.support.brokers import Broker
from tests.support.commands import completed, started
from tests.support.workers import eventually

TOPICS = {
    "moving-merge": TopicType.RANGE_MERGE,
    "moving-priority": TopicType.PRIORITY,
    "moving-fixed": TopicType.FIXED_TIME,
    "moving-keyed": TopicType.RANGE_MERGE,
    "moving-shared": TopicType.PRIORITY,
}
MOST = 64
"""The most slots that a topic of these tests ever has."""


class Load:
    """Processes that send to one topic, commands about it, and what became of its messages."""

    def __init__(self, data: Path, url: str, prefix: str, topic: str) -> None:
        self.data, self.topic = data, topic
        self.env = environment_of(data, url, prefix)
        self.senders: list[subprocess.Popen[bytes]] = []

    def start_sender(self, name: str, backlog: int = 0) -> None:
        """Start a process that sends, and keeps so many waiting; return when it has sent them."""
        command = [sys.executable, "-m", "tests.e2e.sender", self.topic, name, str(backlog)]
        self.senders.append(started(command, self.data / f"output-{name}", self.env))
        eventually(lambda: len(self.sent()) >= backlog, f"{backlog} messages sent", 60)

    def run(self, *arguments: str, module: str = "") -> tuple[int, str]:
        """Run a command to its end; return its exit code and what it printed."""
        how = ["-m", module] if module else ["manage.py"]
        done = completed([*preloaded.python(), *how, *arguments], self.env, seconds=120)
        return done.returncode, done.stdout + done.stderr

    def sent(self) -> dict[str, int]:
        """Name -> when it was sent (ms)."""
        return {line.name: line.wall_ms for path in self.data.glob("sent-*") for line in ledger.read(path)}

    def ended(self) -> set[str]:
        return {line.name for line in ledger.read(self.data / "ledger") if line.word == "end"}

    def wait_for_more(self, count: int) -> None:
        """Return when so many more messages have run to their end than now."""
        goal = len(self.ended()) + count
        eventually(lambda: len(self.ended()) >= goal, f"{count} more messages ending", 60)

    def stop_sending(self) -> None:
        (self.data / "stop").touch()
        for sender in self.senders:
            sender.wait(30)
        outputs = [path.read_text() for path in self.data.glob("output-s*")]
        assert [sender.returncode for sender in self.senders] == [0] * len(self.senders), outputs

    def finish(self, broker: Broker) -> ledger.Findings:
        """Stop sending, let all run, and compare."""
        self.stop_sending()
        sent = self.sent()
        eventually(lambda: self.ended() >= set(sent), "all messages ending", 60)
        code, text = self.run("rmqaudit", self.topic)
        assert code == 0, text
        assert "balanced" in text
        assert "between" not in text
        topic = Topic(self.topic, TOPICS[self.topic], slots=MOST)
        ledgers = [broker.audit_ledger(topic, slot) for slot in range(MOST)]
        totals = {
            name: sum(one[name] for one in ledgers) for name in ("sent", "stored", "moved_in", "moved_out")
        }
        assert totals["moved_in"] == totals["moved_out"] > 0
        assert totals["sent"] == totals["stored"] == len(sent)
        found = ledger.examine(ledger.read(self.data / "ledger"), dict.fromkeys(sent, 0))
        if self.topic == "moving-shared":
            found.overlapping, found.disordered = [], []
        assert found.clean(), found
        assert not found.doubled, found.doubled
        return found


@pytest.fixture
def load(request: pytest.FixtureRequest, tmp_path: Path, redis_url: str, prefix: str) -> Iterator[Load]:
    load = Load(tmp_path, redis_url, prefix, request.param)
    yield load
    for sender in load.senders:
        sender.kill()
        sender.wait()


# They differ from the rest in the order of their messages alone, which the contract holds for each type.
ALIKE = {"moving-merge", "moving-priority", "moving-fixed"}
each_topic = pytest.mark.parametrize(
    "load",
    [
        pytest.param(name, marks=[pytest.mark.proof, pytest.mark.deep] if name in ALIKE else [])
        for name in TOPICS
    ],
    indirect=True,
)
keyed_topic = pytest.mark.parametrize("load", ["moving-keyed"], indirect=True)


@each_topic
def test_a_topic_gets_more_and_fewer_slots_while_it_is_in_use(
    load: Load, start: Start, broker: Broker, tmp_path: Path
) -> None:
    load.start_sender("s1", backlog=300)
    worker = start(load.topic, "-p", "2", "-t", "2")
    worker.ready()
    load.wait_for_more(10)
    for slots in (64, 4):
        code, text = load.run("rmqreslot", load.topic, str(slots))
        assert code == 0, text
        assert f"{load.topic} has {slots} slots" in text
        assert f'Write "SLOTS": {slots} into the settings' in text
        load.wait_for_more(40)
        if slots == 64:
            # This one starts with settings that are behind.
            load.start_sender("s2")
            late = start(load.topic, "-p", "1", "-t", "2")
            late.ready()
            assert "was re-slotted to 64 slots: SLOTS is still 16" in late.output
            load.wait_for_more(40)
    found = load.finish(broker)
    assert len(found.runs) == len(load.sent())
    assert broker.definitions()[load.topic]["slots"] == 4
    for one in (worker, late):
        one.end()


@keyed_topic
@pytest.mark.parametrize("slots", [64, 4])
def test_a_mover_that_is_killed_at_any_step_is_started_again(
    load: Load, start: Start, broker: Broker, slots: int
) -> None:
    load.start_sender("s1", backlog=300)
    start(load.topic, "-p", "2", "-t", "2").ready()
    load.wait_for_more(10)
    for step in STEPS:
        code, text = load.run(load.topic, str(slots), step, module="tests.e2e.mover")
        assert code == -signal.SIGKILL, (step, text)
        load.wait_for_more(10)
    code, text = load.run("rmqreslot", load.topic)
    assert code == 0, text
    assert "Continuing with" in text
    load.finish(broker)
    assert broker.definitions()[load.topic]["slots"] == slots


@keyed_topic
def test_a_worker_that_is_killed_while_slots_move_loses_and_overlaps_nothing(
    load: Load, start: Start, broker: Broker, tmp_path: Path
) -> None:
    load.start_sender("s1", backlog=300)
    worker = start(load.topic, "-p", "2", "-t", "2")
    worker.ready()
    load.wait_for_more(10)
    load.run(load.topic, "64", "shut", module="tests.e2e.mover")
    kill_children(worker, tmp_path)
    # And again while families are shut and opened, one after the other.
    moving = threading.Thread(
        target=lambda: codes.append(load.run("rmqreslot", load.topic, "64", "--at-once", "1"))
    )
    codes: list[tuple[int, str]] = []
    moving.start()
    for _ in range(3):
        load.wait_for_more(10)
        kill_children(worker, tmp_path)
    moving.join(120)
    [(code, text)] = codes
    assert code == 0, text
    load.wait_for_more(20)
    load.stop_sending()
    eventually(lambda: load.ended() >= set(load.sent()), "all messages ending", 60)
    found = ledger.examine(ledger.read(tmp_path / "ledger"), dict.fromkeys(load.sent(), 0))
    assert found.clean(), found
    assert worker.output.count("killed by SIGKILL") == 8


def kill_children(worker: WorkerProcess, data: Path) -> None:
    """Kill the processes of a worker that consumes, and write it down when they are gone."""
    eventually(lambda: len(worker.children) == 2, "two processes", 30)
    for pid in worker.children:
        ledger.write(data / "ledger", "killing", pid)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: is_gone(pid), "dying")  # type: ignore[misc]
        ledger.write(data / "ledger", "killed", pid)
