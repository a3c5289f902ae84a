"""Worker processes are killed, at every named point and at any moment, or stopped (SIGSTOP) and go on later."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.chaos import Chaos, Outcome
from tests.e2e.ledger import Line, examine, read
from tests.e2e.load import CHAOS, KILLING, LEDGER, POISON, Load, shares
from tests.e2e.processes import Start, WorkerProcess, stands_still
from tests.e2e.takeover import GATED_GOAL_SECONDS, GOAL_SECONDS, takeovers
from tests.e2e.worker_project.points import POINTS
from tests.support.brokers import Broker
from tests.support.workers import LONG, eventually, total

DELIVERIES = 1 + CHAOS.max_retries

DEATHS = 50
"""Of processes, in CI; `make soak` has thousands."""


@pytest.mark.proof
@pytest.mark.parametrize("environment", [{}, {"WORKER_ASYNC": "1"}], ids=["threads", "async"])
def test_deaths_at_every_point_lose_and_overlap_nothing(
    start: Start, broker: Broker, tmp_path: Path, environment: dict[str, str]
) -> None:
    def start_one(*arguments: str, **more: str) -> WorkerProcess:
        return start(*arguments, **environment, **more)

    load = Load(broker, tmp_path, CHAOS)
    outcome = Chaos(start_one, load, tmp_path).run(DEATHS, 10 * LONG, per_point=1)
    check_clean(outcome, load)
    assert outcome.kills.total() >= DEATHS


def check_clean(outcome: Outcome, load: Load) -> None:
    findings = outcome.findings
    print(
        f"{outcome.kills.total()} deaths in {outcome.seconds:.0f} s, {outcome.messages} messages",
        outcome.kills,
    )
    print(f"{outcome.charged} deliveries charged, {len(findings.doubled)} messages run twice")
    assert findings.clean(), findings
    assert not [point for point in POINTS if not outcome.kills[point]]
    assert outcome.died == len(load.poison)
    assert max(findings.runs[name] for name in load.poison) <= DELIVERIES


@pytest.mark.proof
@pytest.mark.parametrize(
    "points", ["", "before-thread,after-thread,in-listener,after-listener,rollback-sent"]
)
def test_a_message_that_always_fails_is_handed_out_seventeen_times(
    start: Start, broker: Broker, tmp_path: Path, points: str
) -> None:
    load = Load(broker, tmp_path, POISON)
    load.send_poison("fail")
    workers = [start("poison", "-t", "1", WORKER_POINTS=points) for _ in range(2)]
    for worker in workers:
        worker.ready()
    eventually(lambda: total(broker, POISON, "died") == 1, "dying", 120)
    (tmp_path / "peace").touch()
    for worker in workers:
        worker.signal()
    # Who dies just before the end has failed while ending.
    assert {worker.wait() for worker in workers} <= ({0, 1} if points else {0})
    runs = load.examine().runs["poison0"]
    assert total(broker, POISON, "prepared") - total(broker, POISON, "released") == DELIVERIES
    assert load.charged() == DELIVERIES
    if points:
        assert runs <= DELIVERIES
        assert sum(worker.output.count("killed by SIGKILL") for worker in workers) >= 3
    else:
        assert runs == DELIVERIES


@pytest.mark.proof
def test_a_message_that_kills_its_process_runs_seventeen_times_and_takes_no_neighbour_with_it(
    start: Start, broker: Broker, tmp_path: Path
) -> None:
    load = Load(broker, tmp_path, POISON)
    load.send(40, ms=1)
    load.send_poison()
    load.send(40, ms=1)
    # One thread: what another one runs at the instant of a kill is charged as well, and rightly so.
    worker = start("poison", "-t", "1", WORKER_POINTS="")
    load.wait(120)
    worker.end()
    found = load.examine()
    assert found.runs["poison0"] == DELIVERIES
    assert (total(broker, POISON, "died"), total(broker, POISON, "committed")) == (1, 80)
    assert load.charged() == DELIVERIES, "nobody else was charged"


@pytest.mark.proof
def test_beside_other_threads_a_killing_message_costs_each_neighbour_two_retries_at_most(
    start: Start, broker: Broker, tmp_path: Path
) -> None:
    load = Load(broker, tmp_path, KILLING)
    # Long ones, so that at each death the other thread runs one: without a rule the same one again and again.
    load.send(6, ms=1_500)
    load.send_poison()
    load.send(6, ms=1_500)
    worker = start("killing", "-t", "2", WORKER_POINTS="")
    load.wait(120)
    worker.end()
    found = load.examine()
    deliveries = 1 + KILLING.max_retries
    assert found.runs.pop("poison0") == deliveries
    assert (total(broker, KILLING, "died"), total(broker, KILLING, "committed")) == (1, 12)
    assert max(found.runs.values()) <= 3, found.runs
    # Who is killed between being begun and its first line is charged and did not run.
    assert found.runs.total() - 12 <= load.charged() - deliveries <= deliveries


@pytest.mark.proof
def test_what_a_killed_command_owned_is_taken_over(redis_url: str, prefix: str, tmp_path: Path) -> None:
    samples = takeovers(redis_url, tmp_path, prefix, kills=5, worlds=2)
    for gated, goal in ((False, GOAL_SECONDS), (True, GATED_GOAL_SECONDS)):
        seconds = sorted(sample.seconds for sample in samples if sample.gated is gated)
        assert len(seconds) >= 5
        print(
            f"{'gated' if gated else 'free'}: {len(seconds)} slots, {seconds[0]:.2f} to {seconds[-1]:.2f} s"
        )
        assert seconds[-1] <= 5 * goal


def two_workers(start: Start, broker: Broker, timeout: int) -> tuple[WorkerProcess, WorkerProcess]:
    first, second = (start("ledger", "-t", "2", WORKER_TIMEOUT=str(timeout)) for _ in range(2))
    first.ready()
    second.ready()
    eventually(lambda: sorted(shares(broker).values()) == [8, 8], "sharing the slots")
    return first, second


def stopped_for(seconds: float, pid: int, running: Path) -> tuple[int, int]:
    """Stop a process for so long while both of its threads are in a listener; return when, by the ledger's clock."""

    def runs() -> bool:
        last = {line.thread: line.word for line in read(running) if line.pid == pid}
        return list(last.values()) == ["start", "start"]

    def stops() -> bool:
        """Stop the process if both threads run. One that has begun a message before, and not yet its listener, would go on."""
        if not runs():
            return False
        os.kill(pid, signal.SIGSTOP)
        # The signal takes its time on a busy machine, and threads run until it is there.
        eventually(lambda: stands_still(pid), "standing still")
        if runs():
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    eventually(stops, "stopping while both threads run")
    stopped = time.monotonic_ns()
    time.sleep(seconds)
    resumed = time.monotonic_ns()
    os.kill(pid, signal.SIGCONT)
    return stopped, resumed


def test_a_stop_longer_than_the_heartbeat_and_shorter_than_the_time_out_costs_nothing(
    start: Start, broker: Broker, load: Load
) -> None:
    first, second = two_workers(start, broker, timeout=40)
    load.send(60, ms=100)
    # Extended every 13.3 s: the last time may be so long ago when the process is stopped. What is left of the time-out is for a
    # busy machine, on which the other process may stand still as well.
    stopped_for(14, first.child(), load.path)
    load.wait()
    for worker in (first, second):
        worker.end()
    assert not load.examine().doubled
    assert load.charged() == 0


def test_a_stop_longer_than_the_time_out_overlaps_only_with_what_ran(
    start: Start, broker: Broker, load: Load
) -> None:
    # Two thirds of it are so long that the other process does not stand still for them on a busy machine.
    first, second = two_workers(start, broker, timeout=12)
    pid = first.child()
    load.send(40, ms=300)
    # Longer than the session of 4 s too: the other one gets all slots.
    stopped, resumed = stopped_for(16, pid, load.path)
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
