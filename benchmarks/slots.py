"""``python -m benchmarks.slots``: what slots cost: a real worker process on 1,024, 65,536 and 2**20 of them.

Of each: how long after its start it hands out what waited, how long until it has acquired everything, what it and Redis
remember of a slot, what both do while nothing happens, and how long a clean stop takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import redis

from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.redis.broker import RedisBroker
from example_project.demo.embedded_redis import EmbeddedRedis, start_redis
from tests.e2e.ledger import read
from tests.e2e.processes import WorkerProcess
from tests.workers import client_of, eventually, send

COUNTS = (1_024, 65_536, 1_048_576)
PAGE, TICK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
LONG = 1800.0


def cpu_seconds(pid: int) -> float:
    """Return what a process has used of a core so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def resident(pid: int) -> int:
    """Return the bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def scripts(client: redis.Redis) -> int:
    """Return how many scripts Redis has run."""
    return int(client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))


def measure(server: EmbeddedRedis, data: Path, slots: int, idle: float) -> dict[str, Any]:
    """Start a worker on so many slots, let it be, and stop it."""
    client = client_of(server.url)
    broker = RedisBroker(client)
    topic = Topic("many", TopicType.RANGE_MERGE, slots=slots, time_range_ms=1)
    send(broker, topic, [{"name": f"before{i}"} for i in range(100)])
    empty = int(client.info("memory")["used_memory"])
    began = time.monotonic()
    worker = WorkerProcess(
        data, server.url, "", "many", "-t", "2", WORKER_SLOTS=str(slots), WORKER_LISTENERS="many"
    )
    try:
        pid = worker.child()
        before = resident(pid)

        def done(count: int) -> bool:
            assert worker.process.poll() is None, worker.output
            return len(read(data / "ledger")) >= count

        eventually(lambda: done(1), "the first message", LONG)
        first = time.monotonic() - began
        control = slot_keys("", "many", slots - 1).control
        eventually(lambda: client.hget(control, "sleeping_until"), "the last slot", LONG)
        every = time.monotonic() - began
        eventually(lambda: done(100), "all that waited", LONG)
        woken = time.monotonic()
        send(broker, topic, [{"name": f"after{i}"} for i in range(100)])
        eventually(lambda: done(200), "a hundred messages more", LONG)
        hundred = time.monotonic() - woken
        pause = time.monotonic() + 3
        eventually(lambda: time.monotonic() > pause, "a breath", 60)
        most = resident(pid)
        at, busy, redis_busy, ran = (
            time.monotonic(),
            cpu_seconds(pid),
            cpu_seconds(server.pid),
            scripts(client),
        )
        eventually(lambda: time.monotonic() > at + idle, "being idle", idle + 60)
        spent = time.monotonic() - at
        row = {
            "slots": slots,
            "first message s": round(first, 2),
            "all acquired s": round(every, 2),
            "100 sent, 100 done s": round(hundred, 3),
            "worker B/slot": round((most - before) / slots),
            "Redis B/slot": round((int(client.info("memory")["used_memory"]) - empty) / slots),
            "idle scripts/s": round((scripts(client) - ran) / spent, 1),
            "idle worker %": round(100 * (cpu_seconds(pid) - busy) / spent, 2),
            "idle Redis %": round(100 * (cpu_seconds(server.pid) - redis_busy) / spent, 2),
        }
        ending = time.monotonic()
        worker.signal()
        assert worker.wait(120) == 0, worker.output
        row["stop s"] = round(time.monotonic() - ending, 2)
        return row
    finally:
        worker.kill()
        client.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slots", description=__doc__)
    parser.add_argument(
        "--slots", type=int, action="append", help="only this number of slots; may be repeated"
    )
    parser.add_argument("--idle", type=float, default=20, help="seconds to watch an idle worker (default 20)")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, redis-py {redis.__version__}, {os.cpu_count()} cores")
    rows: list[dict[str, Any]] = []
    for slots in options.slots or COUNTS:
        with tempfile.TemporaryDirectory(prefix="rmq-slots-") as directory:
            server = start_redis(f"{directory}/redis")
            try:
                rows.append(measure(server, Path(directory), slots, options.idle))
                print(json.dumps(rows[-1]), flush=True)
            finally:
                server.stop()
    print("| " + " | ".join(rows[0]) + " |\n|" + "---:|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{value:,}" for value in row.values()) + " |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
