"""How long the slots of a command that was killed with all its processes stand still, by what listeners wrote down."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.e2e.ledger import read
from tests.e2e.load import TAKEN_OVER, Load, shares
from tests.e2e.processes import WorkerProcess
from tests.support.brokers import Broker
from tests.support.workers import client_of, describe, eventually, members

GOAL_SECONDS = 5.5
"""A slot with nothing in flight: the session of 4 s, and what it takes to notice and to assign."""

GATED_GOAL_SECONDS = TAKEN_OVER.timeout + 2.0
"""A slot with something in flight: its time-out, and two seconds."""


class Sample(NamedTuple):
    """One slot of a killed worker: how long until a message of it began elsewhere."""

    seconds: float
    gated: bool


class World:
    """Two commands that share the slots of one topic; one of them is killed again and again."""

    def __init__(self, url: str, data: Path, prefix: str) -> None:
        data.mkdir(parents=True)
        self._arguments = (data, url, prefix, TAKEN_OVER.name, "-t", "2")
        self._client = client_of(url)
        self._broker = Broker(self._client, prefix)
        self._load = Load(self._broker, data, TAKEN_OVER)
        self._stays = WorkerProcess(*self._arguments)
        self._victim: WorkerProcess | None = None

    def close(self) -> None:
        """End everything at once."""
        for worker in (self._stays, self._victim):
            if worker is not None:
                worker.kill()
        self._client.close()

    def kill_one(self) -> list[Sample]:
        """Start a second command, kill it under load, and return a sample for each slot it owned."""
        victim = self._victim = WorkerProcess(*self._arguments)
        pid, other = victim.child(), self._stays.child()
        eventually(lambda: shares(self._broker, TAKEN_OVER.name) == {pid: 32, other: 32}, "sharing", 60)
        dead = next(one.worker.id for one in members(self._broker) if one.worker.pid == pid)
        owned = {
            slot
            for holding in describe(self._broker)
            if holding.worker == dead
            for slot in range(holding.start, holding.stop)
        }
        before = len(read(self._load.path))
        # So many that the victim has messages left when it dies, however late this process finds it at work.
        self._load.send(256, ms=20)
        eventually(lambda: any(line.pid == pid for line in read(self._load.path)[before:]), "working")
        killed = time.monotonic_ns()
        self._load.kill_command(victim)
        gated = {slot for slot in owned if self._broker.count(TAKEN_OVER, slot).prepare}
        waiting = {slot for slot in owned if self._broker.count(TAKEN_OVER, slot).store} | gated
        self._load.wait(90)
        self._load.examine()
        first: dict[int, int] = {}
        for line in read(self._load.path)[before:]:
            if line.word == "start" and line.at > killed and line.pid != pid:
                first.setdefault(line.slot, line.at)
        return [Sample((first[slot] - killed) / 1e9, slot in gated) for slot in waiting]


def takeovers(
    url: str,
    data: Path,
    prefix: str,
    kills: int,
    worlds: int,
    note: Callable[[int], None] = lambda done: None,
) -> list[Sample]:
    """Kill so many commands, in several worlds at once; ``note`` hears how many it were so far."""
    samples: list[Sample] = []
    left = iter(range(1, kills + 1))

    def work(world: World) -> None:
        try:
            for number in left:
                samples.extend(world.kill_one())
                note(number)
        finally:
            world.close()

    with ThreadPoolExecutor(worlds) as pool:
        list(pool.map(work, [World(url, data / f"world{i}", f"{prefix}w{i}:") for i in range(worlds)]))
    return samples
