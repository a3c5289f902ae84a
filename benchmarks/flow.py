"""``python -m benchmarks.flow``: what FLOW "auto" does for a slow listener's neighbour, and what it finds.

One worker with 16 threads serves two topics: a no-op, and a listener whose backend takes 4 calls at a time; in the middle
its calls go from 5 to 500 ms. Shown is the no-op's rate beside it as a part of its rate alone, with and without FLOW, and
the concurrency that is found beside the best of fixed ones: the smallest that reaches 97 % of the highest throughput.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from benchmarks.works import Listener
from django_rmq.core.commands import inspect, operate
from django_rmq.core.consumer import Dispatcher, WorkerOptions
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.core.redis.broker import RedisBroker
from example_project.demo.embedded_redis import start_redis

THREADS, CAPACITY = 16, 4
BACKLOG = 250_000
"""No-op messages that wait when a measurement begins."""

FREE = Topic("free", TopicType.RANGE_MERGE, slots=64, time_range_ms=1)
SLOW = Topic("slow", TopicType.RANGE_MERGE, slots=64, time_range_ms=1)


class Worker:
    """A worker of both topics, what its listeners have done, and the slow one's seconds."""

    def __init__(self, client: redis.Redis, flow: str | None) -> None:
        client.flushdb()
        self.broker = RedisBroker(client)
        self.producer = Producer(self.broker)
        self.slow = replace(SLOW, flow=flow)
        self.seconds, self.free_done, self.slow_done, self._sent = 0.005, 0, 0, 0
        self._backend = threading.Semaphore(CAPACITY)
        self._slow_lock = threading.Lock()
        listeners = {
            "free": Listener("free", self._free),
            "slow": Listener("slow", self._slow),
        }
        self.dispatcher = Dispatcher(
            self.broker, [FREE, self.slow], listeners, WorkerOptions(threads=THREADS)
        )
        self.dispatcher.own((topic.name, slot) for topic in (FREE, self.slow) for slot in range(topic.slots))
        self._thread = threading.Thread(target=self.dispatcher.run)
        self._thread.start()

    def _free(self, message: Any) -> None:
        message.body  # noqa: B018 - decoding belongs to the work
        self.free_done += 1

    def _slow(self, message: Any) -> None:
        with self._backend:
            time.sleep(self.seconds)
        with self._slow_lock:
            self.slow_done += 1

    def send_slow(self, count: int) -> None:
        self.producer.send_bodies(self.slow, [{"n": n} for n in range(count)])

    def rate(self, seconds: float) -> float:
        """Return the no-op messages per second while there are enough of them."""
        waiting = sum(self.broker.run(inspect.count(FREE, slot)).store for slot in range(FREE.slots))
        bodies = [{"sku": self._sent + n, "shop": n % 100} for n in range(max(0, BACKLOG - waiting))]
        self._sent += len(bodies)
        self.producer.send_bodies(FREE, bodies)
        before, begun = self.free_done, time.perf_counter()
        time.sleep(seconds)
        return (self.free_done - before) / (time.perf_counter() - begun)

    def pause_slow(self, paused: bool) -> None:
        for slot in range(self.slow.slots):
            self.broker.run(operate.pause(self.slow, slot, paused))
        if paused:
            time.sleep(1.0)  # what runs ends

    def stop(self) -> None:
        self.dispatcher.stop()
        self._thread.join()


def neighbour(client: redis.Redis, flow: str | None, seconds: float, rounds: int) -> dict[str, Any]:
    """Measure the no-op beside 5 ms, right after the change, and later; each time after the same alone, in turn."""
    worker = Worker(client, flow)
    found: dict[str, Any] = {}
    limits: list[int] = []

    def compare(name: str, times: int) -> None:
        parts, alone = [], []
        for _ in range(times):
            worker.pause_slow(True)
            alone.append(worker.rate(seconds))
            worker.pause_slow(False)
            if name != "right after":
                time.sleep(1.5)
            parts.append(worker.rate(seconds) / alone[-1])
        found[name] = statistics.median(parts)
        found["alone"] = statistics.median(alone)

    try:
        worker.rate(0.5)
        worker.send_slow(30_000)
        time.sleep(3)
        compare("beside 5 ms", rounds)
        worker.seconds = 0.5
        compare("right after", 1)
        if flow:
            # Nothing else to do: it settles, and is watched.
            time.sleep(15)
            end = time.monotonic() + 20
            while time.monotonic() < end:
                limits.append(worker.dispatcher._capacity.partitions.flows["slow"].limit)
                time.sleep(0.1)
        compare("beside 500 ms", rounds)
    finally:
        worker.stop()
    return {**found, "limits": limits}


def best_fixed(client: redis.Redis, seconds: float) -> tuple[int, dict[int, float]]:
    """Return the best fixed concurrency, and calls per second by concurrency."""
    rates = {}
    for limit in (1, 2, 3, 4, 5, 6, 8, 12):
        worker = Worker(client, "auto")
        flow = worker.dispatcher._capacity.partitions.flows["slow"]
        flow.limit = limit
        flow.note = lambda *args: None  # type: ignore[method-assign]
        worker.seconds = 0.5
        try:
            worker.send_slow(2_000)
            time.sleep(1)
            before, begun = worker.slow_done, time.perf_counter()
            time.sleep(seconds)
            rates[limit] = (worker.slow_done - before) / (time.perf_counter() - begun)
        finally:
            worker.stop()
    most = max(rates.values())
    return min(limit for limit, rate in rates.items() if rate >= 0.97 * most), rates


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flow", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement (default 3)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = start_redis(directory)
        try:
            client = redis.Redis.from_url(
                server.url, retry=Retry(NoBackoff(), 0), protocol=2, socket_timeout=30
            )
            without = neighbour(client, None, options.seconds, options.rounds)
            with_flow = neighbour(client, "auto", options.seconds, options.rounds)
            best, rates = best_fixed(client, 2 * options.seconds)
        finally:
            server.stop()
    settled = statistics.median(with_flow.pop("limits"))
    without.pop("limits")
    print(f"no-op beside a listener that goes from 5 to 500 ms; {THREADS} threads, backend takes {CAPACITY}")
    for name, found in (("without FLOW", without), ('FLOW "auto"', with_flow)):
        parts = ", ".join(f"{what} {part:.0%}" for what, part in found.items() if what != "alone")
        print(f"  {name:<13} alone {found['alone']:,.0f}/s; of that: {parts}")
    print("  fixed concurrency -> calls/s: " + ", ".join(f"{n}: {rate:.1f}" for n, rate in rates.items()))
    met = abs(settled - best) <= 0.25 * best and with_flow["beside 500 ms"] >= 0.8
    print(
        f"  best fixed {best}, found {settled:g}; goals (within 25 %, no-op at least 80 %) met: {'yes' if met else 'no'}"
    )
    if options.json:
        found = {"without": without, "auto": with_flow, "fixed": rates, "best": best, "settled": settled}
        options.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
