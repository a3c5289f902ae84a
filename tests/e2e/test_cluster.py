"""Several worker processes on one Redis: they share the slots, and die in every way without losing or overlapping anything."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter

from tests.e2e.load import Load, owned_by, shares, timed
from tests.e2e.processes import WORK, Happened, Start, WorkerProcess, named
from tests.support.brokers import Broker
from tests.support.workers import eventually, send, total

# --- one command


def test_what_a_killed_process_held_is_handed_out_again_at_once(
    start: Start, broker: Broker, happened: Happened
) -> None:
    # It is the first in its slot, so that others of the same delivery have not begun when it kills the process.
    send(broker, WORK, named("held", do="kill once"))
    time.sleep(0.01)
    send(broker, WORK, named(*range(60)))
    worker = start("work", "-t", "1")
    # The session of the dead process would last 4 s, the time-out 30 s.
    eventually(lambda: re.findall(r"Worker process \d+ started", worker.output)[1:], "a successor")
    (dead,) = map(int, re.findall(r"Worker process (\d+) ended", worker.output))
    assert dead not in shares(broker, "work")
    spent = timed(lambda: len(happened.lines("done")) == 61, "being handed out again", 12)
    print(f"handed out again after {spent:.2f} s")
    assert "had taken but not begun" in worker.output
    assert re.search(
        r"Recorded a time-out for 1 messages of topic work that a dead process was running: \d+~[\w-]+; "
        r"\d+ of this topic had not begun, and were given back",
        worker.output,
    )
    assert total(broker, WORK, "expired") == 1, "what ran is charged"
    assert happened.lines("begun").count("held") == 2
    worker.end()


def test_killed_processes_lose_nothing_and_nothing_overlaps(start: Start, load: Load) -> None:
    load.send(500)
    worker = start("ledger", "-p", "2", "-t", "2")
    for done in (50, 150, 250, 350):
        load.wait_for(done)
        eventually(lambda: len(worker.children) == 2, "two children")
        load.kill(worker.children[done % 2])
    load.wait()
    worker.end()
    load.examine()
    assert load.charged() <= 4 * 2, "only what each thread of the dead processes ran was charged"
    assert worker.output.count("killed by SIGKILL") == 4


def test_the_children_of_a_killed_parent_end_by_themselves(start: Start, load: Load) -> None:
    load.send(400)
    worker = start("ledger", "-p", "2", "-t", "2")
    load.wait_for(20)
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.wait()
    spent = timed(lambda: not worker.children, "the end of the children", 10)
    print(f"the children ended after {spent:.2f} s")
    rest = start("ledger", "--burst", "-t", "4")
    assert rest.wait() == 0
    load.wait()
    assert not load.examine().doubled
    assert load.charged() == 0


def test_replacing_all_processes_under_load_loses_nothing(start: Start, load: Load) -> None:
    load.send(500)
    worker = start("ledger", "-p", "2", "-t", "2")
    load.wait_for(30)
    before = set(worker.children)
    worker.signal(signal.SIGHUP)
    eventually(lambda: len(set(worker.children) - before) == 2, "the successors", 20)
    worker.signal(signal.SIGHUP)
    load.wait()
    worker.end()
    found = load.examine()
    assert not found.doubled
    assert load.charged() == 0
    assert not before & set(worker.children)


def test_sigusr1_writes_down_where_parent_and_children_are(start: Start, load: Load) -> None:
    worker = start("ledger")
    worker.ready()
    load.send(1)
    load.wait()

    def are_written() -> bool:
        # Asked again: a thread may just have come from its listener.
        worker.signal(signal.SIGUSR1)
        time.sleep(0.2)
        return "mailbox.py" in worker.output and "in run" in worker.output

    eventually(are_written, "the stacks")
    worker.end()


# --- two commands


def both_share(broker: Broker, first: WorkerProcess, second: WorkerProcess) -> None:
    eventually(
        lambda: owned_by(broker, first) + owned_by(broker, second) == 16 and owned_by(broker, second) == 8,
        "sharing the slots",
        25,
    )


def test_two_commands_share_the_slots_and_one_that_is_stopped_hands_over_at_once(
    start: Start, broker: Broker, load: Load
) -> None:
    first, second = start("ledger", "-p", "2", "-t", "2"), start("ledger", "-p", "2", "-t", "2")
    first.ready()
    second.ready()
    both_share(broker, first, second)
    eventually(lambda: sorted(shares(broker).values()) == [4, 4, 4, 4], "sharing equally", 25)
    load.send(800)
    load.wait_for(50)
    first.signal()
    spent = timed(lambda: owned_by(broker, second) == 16, "taking over", 60)
    print(f"taken over {spent:.2f} s after SIGTERM")
    assert first.wait() == 0
    load.wait()
    second.end()
    found = load.examine()
    assert not found.doubled, "nothing was handed out again"
    assert load.charged() == 0


def test_slots_are_handed_over_while_a_listener_still_runs(
    start: Start, broker: Broker, happened: Happened
) -> None:
    send(broker, WORK, named("held", do="wait"))
    first = start("work")
    happened.wait("begun", 1)
    second = start("work")
    second.ready()
    eventually(lambda: owned_by(broker, second, "work") == 2, "sharing the slots", 25)
    first.signal()
    eventually(lambda: owned_by(broker, second, "work") == 4, "taking over")
    assert first.children, "it waits for its listener"
    send(broker, WORK, named(*range(20)))
    eventually(lambda: happened.lines("done"), "the other one working")
    happened.go()
    assert first.wait() == 0
    happened.wait("done", 21)
    second.end()
    assert Counter(happened.lines("begun")) == Counter(["held", *map(str, range(20))])
    assert total(broker, WORK, "failed") == total(broker, WORK, "expired") == 0


def test_workers_come_together_as_a_dotted_path_says(start: Start, load: Load) -> None:
    load.send(20)
    worker = start("ledger", "--burst", RMQ_TEST_COORDINATOR="tests.e2e.worker_project.coordinators.alone")
    assert worker.wait() == 0
    load.wait()
    assert "alone" in worker.output
