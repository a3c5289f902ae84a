"""What every driver does with its queue. Runs in the peer's own environment: nothing but the standard library and redis-py.

A driver is a module of this folder with ``SETTINGS``, ``GUARANTEE``, ``BULK`` (how it sends in bulk), ``single(count)`` and
``bulk(count)``, ``left(client)`` (how many messages wait or run), ``clear()`` if they are not in Redis, and ``WORKERS`` (the
command lines of its worker processes). It is started as ``python -m <driver> <messages> <single sends>`` in this folder, and
prints one line of JSON. The server's port is in PEER_REDIS_PORT; with PEER_DEBUG the workers show what they say. For
``benchmarks.peers lone`` PEER_RATE says how many single messages are sent in a second, and PEER_PROCESSES how many worker
processes there are.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from jobs import RAN, STARTED, started

PORT = int(os.environ.get("PEER_REDIS_PORT", "6379"))
URL = f"redis://127.0.0.1:{PORT}/0"
PROCESSES = int(os.environ.get("PEER_PROCESSES", "2"))
RATE = float(os.environ.get("PEER_RATE", "0"))
WARM_UP = 200
"""Single messages before those that are measured."""
LOOK_SECONDS = 0.005
"""Seconds between two looks at how much is left."""
PATIENCE_SECONDS = 90.0
"""After so long without an end the rate so far is what counts."""


def client() -> Any:
    return redis.Redis(host="127.0.0.1", port=PORT)


def rate_of(count: int, work: Any) -> float:
    """Return how many per second ``work(count)`` sends."""
    begun = time.perf_counter()
    work(count)
    return count / (time.perf_counter() - begun)


def paced(numbers: Iterable[int]) -> Iterator[int]:
    """Yield the numbers; with PEER_RATE each at its time, and note when it was sent. Nothing else may wait for this thread."""
    if not RATE:
        yield from numbers
        return
    begun = time.monotonic()
    for place, number in enumerate(numbers):
        time.sleep(max(0.0, begun + place / RATE - time.monotonic()))
        sent.append(time.time_ns())
        yield number


sent: list[int] = []
"""When each message was sent, in ns since the epoch."""


def lone(driver: Any, count: int) -> dict[str, float]:
    """Return what single messages cost, that come one after the other to an idle worker: CPU in µs, commands, ms to the call."""
    looker = client()
    with ExitStack() as stack:
        # Each job writes into this file when it began.
        file = stack.enter_context(tempfile.NamedTemporaryFile())
        file.write(bytes(8 * (WARM_UP + count)))
        file.flush()
        os.environ[STARTED] = file.name
        processes = stack.enter_context(workers(driver))
        driver.single(1)
        await_jobs(1)  # the worker has started
        driver.single(WARM_UP - 1)
        await_jobs(WARM_UP)
        looker.config_resetstat()
        server, worker, own = cpu_of_server(looker), sum(map(cpu_of, processes)), time.process_time()
        driver.single(count)
        own = time.process_time() - own
        await_jobs(WARM_UP + count)
        time.sleep(0.2)  # what is left to do after the last call
        server, worker = cpu_of_server(looker) - server, sum(map(cpu_of, processes)) - worker
        commands = sum(each["calls"] for each in looker.info("commandstats").values())
        waits = sorted(
            (began - at) / 1e6 for began, at in zip(started()[WARM_UP:], sent[WARM_UP:], strict=True)
        )
    costs = {"redis": server, "worker": worker, "sender": own}
    return {
        **{name: seconds / count * 1e6 for name, seconds in costs.items()},
        "commands": commands / count,
        "p50": statistics.median(waits),
        "p99": waits[round(count * 0.99) - 1],
    }


def await_jobs(count: int) -> None:
    """Wait until the first ``count`` jobs have begun."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not all(started()[:count]):
        if time.monotonic() > end:
            raise RuntimeError(f"{sum(map(bool, started()))} of {count} jobs have begun")
        time.sleep(0.05)


def cpu_of(leader: subprocess.Popen[bytes]) -> float:
    """Return the seconds of CPU that a group of processes has taken."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == leader.pid:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        except OSError:
            continue  # it has just ended
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_of_server(looker: Any) -> float:
    """Return the seconds of CPU that Redis has taken."""
    info = looker.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


@contextmanager
def workers(driver: Any) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run the workers of ``driver`` while the block does."""
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=None if os.environ.get("PEER_DEBUG") else subprocess.DEVNULL,
            start_new_session=True,
        )
        for command in driver.WORKERS
    ]
    try:
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def drain(driver: Any, count: int) -> float:
    """Start the workers and return how many messages per second leave between a tenth and nine tenths of all.

    So neither the start of the processes nor the last messages count.
    """
    looker = client()
    looker.delete(RAN)
    with workers(driver) as processes:
        end = time.monotonic() + PATIENCE_SECONDS
        first: tuple[float, int] | None = None
        last: tuple[float, int] | None = None
        while time.monotonic() < end:
            left, now = driver.left(looker), time.perf_counter()
            if left <= 0.9 * count:
                first = first or (now, left)
                last = (now, left)
                if left <= 0.1 * count and first != last:
                    break
            if all(process.poll() is not None for process in processes) and left > 0:
                raise RuntimeError("the workers ended")
            time.sleep(LOOK_SECONDS)
        if first is None or last is None or first == last:
            raise RuntimeError("nothing was consumed")
        if not looker.exists(RAN):
            raise RuntimeError("what was consumed has not run")
        return (first[1] - last[1]) / (last[0] - first[0])


def main(driver: Any) -> None:
    """Measure ``driver`` and print what was found."""
    count, singles = int(sys.argv[1]), int(sys.argv[2])
    count *= 1 if RATE else getattr(driver, "MANY", 1)
    looker = client()
    clear = getattr(driver, "clear", looker.flushall)
    clear()
    result = {"settings": driver.SETTINGS, "guarantee": driver.GUARANTEE, "bulk_by": driver.BULK}
    if RATE:
        result |= lone(driver, count)
    else:
        driver.single(50)
        result["single"] = rate_of(singles, driver.single)
        clear()
        result["bulk"] = rate_of(count, driver.bulk)
        if driver.left(looker) < count:
            raise RuntimeError(f"{driver.left(looker)} of {count} messages wait")
        result["consume"] = drain(driver, count)
    print(json.dumps(result))
