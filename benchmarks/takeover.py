"""``python -m benchmarks.takeover``: how slots change hands, ours against kazoo's SetPartitioner, on one ZooKeeper in one run.

Every member is a process. The events: one of two members is killed with -9, a third joins two, one member takes many slots,
two members have one id. Times are of the machine's monotonic clock; a slot is unowned while no member says that it owns it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from example_project.demo.embedded_redis import start_redis
from example_project.demo.embedded_zookeeper import EmbeddedZooKeeper

SLOTS = 64
MANY_SLOTS = 1024
LONG = 120.0


class Way(NamedTuple):
    """A way to share slots."""

    name: str
    kind: str
    session: float
    boundary: float = 0.0
    """kazoo: seconds that a membership must stand."""


WAYS = (
    Way("SetPartitioner, as it comes", "kazoo", 10.0, 30.0),
    Way("SetPartitioner, tuned", "kazoo", 4.0, 1.0),
    Way("ours, ZooKeeper, as it comes", "zookeeper", 10.0),
    Way("ours, ZooKeeper", "zookeeper", 4.0),
    Way("ours, Redis, as it comes", "redis", 4.0),
)


# --- a member, in a process of its own


def say(slots: Any) -> None:
    """Tell the parent what is owned now."""
    print(json.dumps([time.monotonic(), sorted(slots)]), flush=True)


def be_ours(way: Way, where: str, path: str, identity: str, slots: int) -> None:
    from django_rmq.core.coordination import TopicSlots, Worker

    owned: set[int] = set()

    def own(pairs: Any) -> None:
        owned.update(slot for _, slot in pairs)
        say(owned)

    def disown(pairs: Any) -> None:
        owned.difference_update(slot for _, slot in pairs)
        say(owned)

    worker = Worker(identity, "host", os.getpid(), time.time(), 1, (TopicSlots("topic", slots),))
    coordinator: Any
    if way.kind == "zookeeper":
        from django_rmq.core.coordination.zookeeper import Ensemble, ZooKeeperCoordinator

        ensemble = Ensemble(where, path, way.session)
        token = uuid.uuid4().hex
        coordinator = ZooKeeperCoordinator(ensemble, worker, own, disown, registered=dict, token=token)
    else:
        import redis

        from django_rmq.core.coordination.redis_coordinator import RedisCoordinator
        from django_rmq.core.redis.broker import RedisBroker

        client = redis.Redis.from_url(where, socket_timeout=1, protocol=2)
        broker = RedisBroker(client, path)
        coordinator = RedisCoordinator(broker, worker, own, disown, session_seconds=way.session)
    coordinator.start()
    signal.pause()


def be_kazoo(way: Way, where: str, path: str, identity: str, slots: int) -> None:
    from kazoo.client import KazooClient

    client = KazooClient(where, timeout=way.session)
    client.start()
    partitioner = client.SetPartitioner(
        path, set=tuple(range(slots)), identifier=identity, time_boundary=way.boundary
    )
    before = None
    while True:
        if partitioner.failed:
            raise SystemExit("failed")
        if partitioner.release:
            say(())
            before = None
            partitioner.release_set()
        elif partitioner.acquired:
            owned = sorted(partitioner)
            if owned != before:
                before = owned
                say(owned)
            time.sleep(0.01)
        else:
            partitioner.wait_for_acquire()


# --- the one who looks


class Member:
    """A process, and what it said that it owns."""

    def __init__(self, way: Way, where: str, path: str, slots: int, identity: str = "") -> None:
        self.owned: frozenset[int] = frozenset()
        self.history: list[tuple[float, frozenset[int]]] = []
        command = [
            *(sys.executable, "-m", "benchmarks.takeover", "--member", str(WAYS.index(way))),
            *(where, path, identity or uuid.uuid4().hex, str(slots)),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            at, slots = json.loads(line)
            self.owned = frozenset(slots)
            self.history.append((at, self.owned))

    def kill(self) -> float:
        at = time.monotonic()
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.owned = frozenset()
        self.history.append((at, self.owned))
        return at


def wait_for(fact: Callable[[], bool], seconds: float = LONG) -> bool:
    """Return whether ``fact`` came true in time."""
    end = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def shared_out(members: list[Member], slots: int = SLOTS) -> bool:
    """Every slot is owned, by one member, and each has about its share."""
    counts = [len(member.owned) for member in members]
    every = frozenset().union(*(member.owned for member in members))
    return sum(counts) == slots == len(every) and max(counts) - min(counts) <= 1


def unowned(members: list[Member], since: float, until: float) -> float:
    """Slot-seconds in which a slot had no owner."""
    times = sorted(
        {at for member in members for at, _ in member.history if since < at < until} | {since, until}
    )
    total = 0.0
    for start, stop in itertools.pairwise(times):
        owned = frozenset[int]().union(
            *(next((s for at, s in reversed(m.history) if at <= start), frozenset()) for m in members)
        )
        total += (SLOTS - len(owned)) * (stop - start)
    return total


@contextmanager
def crew() -> Iterator[list[Member]]:
    members: list[Member] = []
    try:
        yield members
    finally:
        for member in members:
            if member.process.poll() is None:
                member.process.kill()
            member.process.wait()
            for pipe in (member.process.stdout, member.process.stderr):
                assert pipe is not None
                pipe.close()


def measure(way: Way, where: str) -> dict[str, object]:
    row: dict[str, object] = {"way": way.name, "session": way.session}

    def path() -> str:
        return f"/b{uuid.uuid4().hex[:8]}" if way.kind != "redis" else f"b{uuid.uuid4().hex[:8]}:"

    with crew() as members:
        place = path()
        members += [Member(way, where, place, SLOTS), Member(way, where, place, SLOTS)]
        assert wait_for(lambda: shared_out(members)), way
        before = [member.owned for member in members]
        started = time.monotonic()
        members.append(Member(way, where, place, SLOTS))
        assert wait_for(lambda: shared_out(members)), way
        row["moved by a join"] = sum(len(old - new.owned) for old, new in zip(before, members, strict=False))
        row["slot-seconds unowned by a join"] = round(unowned(members, started, time.monotonic()), 1)
        killed = members.pop(0).kill()
        assert wait_for(lambda: shared_out(members)), way
        row["seconds after kill -9"] = round(max(m.history[-1][0] for m in members) - killed, 2)

    with crew() as members:
        members.append(Member(way, where, path(), MANY_SLOTS))
        assert wait_for(lambda: len(members[0].owned) == MANY_SLOTS), way
        began = time.monotonic()
        members.append(Member(way, where, path(), MANY_SLOTS))
        assert wait_for(lambda: len(members[1].owned) == MANY_SLOTS), way
        row["seconds for 1,024 slots"] = round(members[1].history[-1][0] - began - way.boundary, 2)

    with crew() as members:
        place, twice = path(), "0" * 32
        members.append(Member(way, where, place, SLOTS, twice))
        assert wait_for(lambda: len(members[0].owned) == SLOTS), way
        members.append(Member(way, where, place, SLOTS, twice))
        wait_for(lambda: members[1].process.poll() is not None, way.boundary + 20)
        every = members[0].owned | members[1].owned
        refused = members[1].process.poll() is not None
        row["two with one id"] = (
            "the second is refused" if refused else f"{SLOTS - len(every)} of {SLOTS} slots unowned"
        )
    return row


def main() -> int:
    if sys.argv[1:2] == ["--member"]:
        way = WAYS[int(sys.argv[2])]
        where, path, identity, slots = sys.argv[3:7]
        (be_kazoo if way.kind == "kazoo" else be_ours)(way, where, path, identity, int(slots))
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.takeover", description=__doc__)
    parser.add_argument("--only", default="", help="only ways whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        zookeeper = EmbeddedZooKeeper(Path(directory, "zookeeper"))
        server = start_redis(Path(directory, "redis"))
        try:
            zookeeper.start()
            for way in WAYS:
                if options.only in way.name:
                    where = server.url if way.kind == "redis" else zookeeper.hosts
                    rows.append(measure(way, where))
                    print(json.dumps(rows[-1]), flush=True)
        finally:
            zookeeper.stop()
            server.stop()
    names = list(rows[0]) if rows else []
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(str(row[name]) for name in names) + " |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
