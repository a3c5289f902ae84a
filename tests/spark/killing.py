"""A query on a standalone cluster whose parts are killed in mid-batch, and what it did.

Drivers, executors and Python workers are killed in turn (SIGKILL) while the query consumes a topic into files. Then each
message has to be in the files once, each batch that was repeated has to have had the same messages, and the ledger has to
balance. ``python -m tests.spark.flights --kills N`` does so with real data, and for longer.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.producer.producer import Producer
from tests.spark.clusters import Cluster
from tests.support.brokers import Broker

JOB = Path(__file__).with_name("killed.py")
PARTS = {"python": "pyspark.daemon", "executor": "CoarseGrainedExecutorBackend"}
"""A part that runs on a worker's machine -> what its command line contains. The third part is the driver."""

PATIENCE = 240.0
"""Seconds in which a batch must begin, or the query must end."""


def _stat(pid: int) -> tuple[int, str]:
    """Return the parent and the command line of a process."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return int(stat.rpartition(") ")[2].split()[1]), line


def below(roots: list[int], text: str) -> list[int]:
    """Return the processes that descend from ``roots`` and have ``text`` in their command lines."""
    found: dict[int, tuple[int, str]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found[int(process.name)] = _stat(int(process.name))

    def descends(pid: int) -> bool:
        while pid in found:
            pid = found[pid][0]
            if pid in roots:
                return True
        return False

    return [pid for pid, (_, line) in found.items() if text in line and descends(pid)]


class Killing:
    """One query, from its first batch to its end."""

    def __init__(self, cluster: Cluster, options: dict[str, str], folder: Path, executors: int) -> None:
        self._cluster = cluster
        self._options = options
        self._cores = ("--conf", f"spark.cores.max={executors}")
        self._folder = folder
        self._chance = random.Random(7)
        self.killed: Counter[str] = Counter()
        self._driver: subprocess.Popen[bytes] | None = None

    def _start(self) -> subprocess.Popen[bytes]:
        if self._driver is None or self._driver.poll() is not None:
            job = json.dumps(self._options), str(self._folder)
            command = self._cluster.command(JOB, *job, options=self._cores)
            with (self._folder / "log").open("ab") as log:
                self._driver = subprocess.Popen(
                    command,
                    env=self._cluster.environment(Path(sys.executable)) | {"PYSPARK_PYTHON": sys.executable},
                    start_new_session=True,
                    stdout=log,
                    stderr=log,
                )
        return self._driver

    def attempts(self) -> list[tuple[int, int, str]]:
        """Return number, size and digest of each batch that has begun, also of repeated ones."""
        path = self._folder / "seen"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(number), int(size), digest) for number, size, digest in map(str.split, lines)]

    def run(self, kills: Iterator[str]) -> None:
        """Kill one part after the other, each in another batch that runs; then let the query end."""
        begun = 0
        for part in kills:
            begun = self._in_batch(begun)
            if not begun:
                break
            time.sleep(self._chance.uniform(0.05, 0.8))
            self._kill(part)
        assert self._start().wait(PATIENCE) == 0, (self._folder / "log").read_text()[-3_000:]

    def _in_batch(self, before: int) -> int:
        """Wait for a batch to begin; return how many have. 0: the query has ended."""
        end = time.monotonic() + PATIENCE
        while (begun := len(self.attempts())) <= before:
            if self._start().poll() == 0:
                return 0
            assert time.monotonic() < end, (self._folder / "log").read_text()[-3_000:]
            time.sleep(0.05)
        return begun

    def _kill(self, part: str) -> None:
        driver = self._start()
        if part == "driver":
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait(30)
            self.killed[part] += 1
        elif found := below(self._cluster.workers, PARTS[part]):
            with suppress(ProcessLookupError):
                os.kill(max(found), signal.SIGKILL)
                self.killed[part] += 1

    def close(self) -> None:
        """End a driver that still runs."""
        if self._driver is not None and self._driver.poll() is None:
            os.killpg(self._driver.pid, signal.SIGKILL)
            self._driver.wait(30)


def stored(folder: Path) -> Counter[str]:
    """Return how often each value is in the files; files that Spark has not finished begin with ``_`` or ``.``."""
    found: Counter[str] = Counter()
    for path in folder.glob("*/*.parquet"):
        found.update(pq.read_table(path, partitioning=None).column("value").to_pylist())
    return found


def killing(
    cluster: Cluster,
    folder: Path,
    broker: Broker,
    url: str,
    messages: int,
    kills: list[str],
    executors: int = 2,
) -> dict[str, Any]:
    """Run it, and return what was found; raises ``AssertionError`` if the query does not end."""
    topic = Topic("killed", TopicType.PRIORITY, slots=8, backoff=BackOff(0, 0), body="text")
    broker.define(topic)
    wanted = {f"m{n}" for n in range(messages)}
    Producer(broker).send_bodies(topic, sorted(wanted), priority=100)
    options = {"url": url, "prefix": broker.prefix, "topic": topic.name, "claimTimeout": "300"}
    options |= {"maxMessagesPerTrigger": "4000", "messagesPerTask": "1000"}
    run = Killing(cluster, options, folder, executors)
    began = time.monotonic()
    try:
        run.run(iter(kills))
    finally:
        run.close()
    batches: defaultdict[int, set[tuple[int, str]]] = defaultdict(set)
    attempts = run.attempts()
    for number, size, digest in attempts:
        batches[number].add((size, digest))
    found = stored(folder / "out")
    ledgers = [broker.audit_ledger(topic, slot) for slot in range(topic.slots)]
    return {
        "killed": dict(run.killed),
        "batches": len(batches),
        "repeated": len(attempts) - len(batches),
        "repeated with other messages": sum(len(seen) > 1 for seen in batches.values()),
        "missing": len(wanted - found.keys()),
        "strange": len(found.keys() - wanted),
        "twice": sum(count > 1 for count in found.values()),
        "acknowledged": sum(ledger["acked"] for ledger in ledgers),
        "unbalanced ledgers": sum(not ledger.balanced for ledger in ledgers),
        "seconds": round(time.monotonic() - began),
    }


def is_right(found: dict[str, Any], messages: int) -> bool:
    """Return whether each message was stored once and acknowledged, and every repeated batch was the same."""
    wrong = ("repeated with other messages", "missing", "strange", "twice", "unbalanced ledgers")
    return not any(found[name] for name in wrong) and found["acknowledged"] == messages
