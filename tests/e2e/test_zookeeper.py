"""Worker processes that come together in ZooKeeper, while it and they die in every way: nothing is lost or overlaps."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

from django_rmq.core.coordination.zookeeper import Ensemble, survey
from django_rmq.exceptions import ServerTrouble
from tests.e2e.load import LEDGER, Load, timed
from tests.e2e.processes import Start, WorkerProcess
from tests.support.servers import ZooKeeperServer
from tests.support.workers import LONG, eventually, total

SESSION = 4.0
TAKE_OVER = SESSION + 1.5
"""The goal: seconds until every slot is owned again after a process was killed."""

PATIENCE = 5
"""Tests bound liveness by so many times the goal."""


class Crew:
    """Commands that meet at one path, and who owns what there."""

    def __init__(self, start: Start, hosts: str) -> None:
        self.start_one = start
        self.ensemble = Ensemble(hosts, f"/t{uuid.uuid4().hex[:12]}", SESSION)

    def start(self, *arguments: str, timeout: int = 30, **settings: Any) -> WorkerProcess:
        """Start a command and return when it consumes."""
        given = {
            "HOSTS": self.ensemble.hosts,
            "ROOT": self.ensemble.root,
            "SESSION_TIMEOUT": SESSION,
            **settings,
        }
        worker = self.start_one(
            "ledger", *arguments, RMQ_TEST_ZOOKEEPER=json.dumps(given), WORKER_TIMEOUT=str(timeout)
        )
        worker.ready()
        return worker

    def owners(self) -> dict[int, int]:
        """Slot -> the id of the process that owns it; nothing while ZooKeeper is away."""
        try:
            workers, plan = survey(self.ensemble, 30.0)
        except ServerTrouble:
            return {}
        pids = {member.worker.id: member.worker.pid for member in workers}
        return {
            slot: pids[worker]
            for start, stop, worker, _ in plan.topics.get("ledger", ())
            if worker in pids
            for slot in range(start, stop)
        }

    def shares(self) -> list[int]:
        """How many slots each process owns, the fewest first."""
        return sorted(Counter(self.owners().values()).values())

    def wait_for_shares(self, *wanted: int, seconds: float = LONG) -> float:
        return timed(lambda: self.shares() == sorted(wanted), f"owning {wanted}", seconds)


@pytest.fixture
def crew(start: Start, zookeeper: str) -> Iterator[Crew]:
    crew = Crew(start, zookeeper)
    yield crew
    client = KazooClient(zookeeper)
    client.start(10)
    client.delete(crew.ensemble.root, recursive=True)
    client.stop()
    client.close()


def end(*workers: WorkerProcess) -> None:
    for worker in workers:
        worker.signal()
    assert [worker.wait() for worker in workers] == [0] * len(workers)


# --- workers die, come and go


def test_a_killed_command_is_replaced_by_the_others_and_no_other_slot_moves(crew: Crew, load: Load) -> None:
    # What the first has in hand times out.
    first, second, third = (crew.start("-t", "2", timeout=2) for _ in range(3))
    crew.wait_for_shares(5, 5, 6)
    load.send(500)
    load.wait_for(50)
    before = crew.owners()
    dead = load.kill_command(first)
    spent = timed(
        lambda: len(now := crew.owners()) == 16 and not set(now.values()) & set(dead),
        "taking over",
        TAKE_OVER * PATIENCE,
    )
    print(f"taken over {spent:.2f} s after kill -9, session {SESSION} s")
    after = crew.owners()
    assert {slot: after[slot] for slot in before if before[slot] not in dead} == {
        slot: pid for slot, pid in before.items() if pid not in dead
    }
    load.wait()
    end(second, third)
    load.examine()
    assert total(load.broker, LEDGER, "died") == 0


def test_a_killed_child_is_replaced_at_once_as_its_parent_ends_its_session(crew: Crew, load: Load) -> None:
    worker = crew.start("-p", "2", "-t", "2")
    crew.wait_for_shares(8, 8)
    load.send(400)
    load.wait_for(50)
    dead = worker.children[0]
    load.kill(dead)
    spent = timed(
        lambda: len(now := crew.owners()) == 16 and dead not in now.values(),
        "taking over",
        TAKE_OVER * PATIENCE,
    )
    print(f"taken over {spent:.2f} s after the death of a child")
    load.wait()
    end(worker)
    load.examine()
    assert load.charged() <= 2, "only what ran was charged"


def test_workers_that_come_and_go_under_load_lose_nothing(crew: Crew, load: Load) -> None:
    workers = [crew.start("-t", "2")]
    load.send(900)
    for done in (50, 150, 250):
        load.wait_for(done)
        workers.append(crew.start("-t", "2"))
    crew.wait_for_shares(4, 4, 4, 4)
    for done in (450, 550, 650):
        load.wait_for(done)
        leaving = workers.pop(0)
        leaving.end()
    load.wait()
    end(*workers)
    assert not load.examine().doubled
    assert load.charged() == 0


def test_settings_may_change_one_command_after_the_other(crew: Crew, load: Load) -> None:
    """For a while there are two crews, each of which shares out all slots: the gate holds."""
    old = [crew.start("-t", "2"), crew.start("-t", "2")]
    crew.wait_for_shares(8, 8)
    load.send(700)
    load.wait_for(50)
    other = f"{crew.ensemble.root}/other"
    new = [crew.start("-t", "2", ROOT=other, SESSION_TIMEOUT=6, WHEN_AWAY="stop")]
    load.wait_for(200)
    end(old[0])
    new.append(crew.start("-t", "2", ROOT=other, SESSION_TIMEOUT=6, WHEN_AWAY="stop"))
    load.wait_for(400)
    end(old[1])
    load.wait()
    end(*new)
    assert not load.examine().doubled
    assert load.charged() == 0


# --- ZooKeeper dies, is wiped, is cut off


@pytest.mark.parametrize("when_away", ["continue", "stop"])
@pytest.mark.usefixtures("java")
def test_zookeeper_is_killed_and_comes_back_and_is_wiped(start: Start, load: Load, when_away: str) -> None:
    with ZooKeeperServer() as server:
        crew = Crew(start, server.hosts)
        workers = [crew.start("-t", "2", WHEN_AWAY=when_away) for _ in range(2)]
        crew.wait_for_shares(8, 8)
        load.send(300)
        load.wait_for(30)
        # The plan is written before the second process reads it, and only ZooKeeper can tell that process.
        eventually(lambda: len(load.at_work()) == len(workers), "both consuming")
        server.kill()
        if when_away == "continue":
            load.wait()
        else:
            eventually(lambda: all("ZooKeeper is unavailable" in one.output for one in workers), "noticing")
        server.start()
        crew.wait_for_shares(8, 8)
        load.wait()

        load.send(300)
        load.wait_for(330)
        server.kill()
        server.wipe()
        server.start()
        crew.wait_for_shares(8, 8)
        load.wait()
        end(*workers)
    assert not load.examine().doubled
    assert load.charged() == 0


@pytest.mark.usefixtures("java")
def test_a_child_that_dies_while_zookeeper_is_away_is_replaced_when_it_is_back(
    start: Start, load: Load
) -> None:
    with ZooKeeperServer() as server:
        crew = Crew(start, server.hosts)
        worker = crew.start("-p", "2", "-t", "2")
        crew.wait_for_shares(8, 8)
        server.kill()
        load.send(200)
        load.wait_for(20)
        load.kill(worker.children[0])
        eventually(
            lambda: "others take over its slots when it expires" in worker.output, "its parent noticing"
        )
        server.start()
        crew.wait_for_shares(8, 8)
        load.wait()
        end(worker)
        assert "will time out" not in worker.output
    load.examine()
    assert load.charged() <= 2, "only what ran was charged"


def test_a_worker_that_stood_still_for_longer_than_its_session_joins_again(crew: Crew, load: Load) -> None:
    first, second = crew.start("-t", "2"), crew.start("-t", "2")
    crew.wait_for_shares(8, 8)
    frozen = first.child()
    os.kill(frozen, signal.SIGSTOP)
    try:
        crew.wait_for_shares(16, seconds=TAKE_OVER * PATIENCE)
        load.send(200)
        load.wait()
    finally:
        os.kill(frozen, signal.SIGCONT)
    crew.wait_for_shares(8, 8)
    load.send(200)
    load.wait()
    end(first, second)
    assert not load.examine().doubled
    assert load.charged() == 0
