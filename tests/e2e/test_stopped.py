"""Worker processes that are stopped (SIGSTOP) and go on later, as a machine does that swaps or is moved."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.ledger import Line, examine, read
from tests.e2e.load import LEDGER, Load, shares
from tests.e2e.processes import Start, WorkerProcess, stands_still
from tests.support.brokers import Broker
from tests.support.workers import eventually, total


@pytest.fixture
def load(broker: Broker, tmp_path: Path) -> Load:
    return Load(broker, tmp_path, LEDGER)


def two_workers(start: Start, broker: Broker, timeout: int) -> tuple[WorkerProcess, WorkerProcess]:
    first, second = (start("ledger", "-t", "2", WORKER_TIMEOUT=str(timeout)) for _ in range(2))
    first.ready()
    second.ready()
    eventually(lambda: sorted(shares(broker).values()) == [8, 8], "sharing the slots", 25)
    return first, second


def stopped_for(seconds: float, pid: int, running: Path) -> tuple[int, int]:
    """Stop a process in the middle of a message for so long; return when, by the ledger's clock."""

    def runs() -> bool:
        last = [line.word for line in read(running) if line.pid == pid]
        return bool(last) and last[-1] == "start"

    eventually(runs, "running")
    os.kill(pid, signal.SIGSTOP)
    # The signal takes its time on a busy machine, and threads run until it is there.
    eventually(lambda: stands_still(pid), "standing still")
    stopped = time.monotonic_ns()
    time.sleep(seconds)
    resumed = time.monotonic_ns()
    os.kill(pid, signal.SIGCONT)
    return stopped, resumed


def test_a_stop_longer_than_the_heartbeat_and_shorter_than_the_time_out_costs_nothing(
    start: Start, broker: Broker, load: Load
) -> None:
    first, second = two_workers(start, broker, timeout=20)
    load.send(60, ms=100)
    # Extended every 6.7 s: the last time may be so long ago when the process is stopped.
    stopped_for(8, first.child(), load.path)
    load.wait()
    for worker in (first, second):
        worker.end()
    assert not load.examine().doubled
    assert load.charged() == 0


def test_a_stop_longer_than_the_time_out_overlaps_only_with_what_ran(
    start: Start, broker: Broker, load: Load
) -> None:
    first, second = two_workers(start, broker, timeout=2)
    pid = first.child()
    load.send(40, ms=300)
    # Longer than the session of 4 s too: the other one gets all slots.
    stopped, resumed = stopped_for(6, pid, load.path)
    load.send(40, ms=5)
    load.wait()
    for worker in (first, second):
        worker.end()
    found = examine(read(load.path), load.due)
    print(f"{len(found.overlapping)} overlaps, {load.charged()} charged")
    assert not (found.lost or found.unexpected or found.early or found.disordered)

    def began_before(line: Line) -> bool:
        return line.pid == pid and line.at < stopped

    assert len({before.name for before, _ in found.overlapping}) <= 2, "one of each thread at most"
    assert all(began_before(before) and stopped < after.at for before, after in found.overlapping)
    assert not [
        line
        for line in read(load.path)
        if line.word == "start" and line.pid == pid and stopped < line.at < resumed
    ]
    assert total(broker, LEDGER, "died") == 0
