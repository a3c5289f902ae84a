"""``python -m benchmarks.threads``: listeners of 1 ms CPU and 10 ms waiting, in 1, 8 and 32 threads of one process.

The ideal is threads / 11 ms, but not more than the 1,000 per second that one interpreter can compute. A bare pool of as
many threads shows what Python leaves of it. Both run in turn; rates are medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import redis

from benchmarks.table import conditions, markdown, server, text, told, write
from benchmarks.works import Listener
from django_rmq.core.consumer import Dispatcher, WorkerOptions
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.core.redis.broker import RedisBroker

CPU_SECONDS, WAITING_SECONDS = 0.001, 0.01
TOPIC = Topic("threads", TopicType.RANGE_MERGE, slots=256, time_range_ms=1)
COLUMNS = ("threads", "ideal/s", "bare pool/s", "rmq/s", "of the ideal", "of the pool")


def work(argument: Any = None) -> None:
    """Compute for 1 ms, and wait for 10 ms."""
    end = time.thread_time() + CPU_SECONDS
    while time.thread_time() < end:
        pass
    time.sleep(WAITING_SECONDS)


def bare(threads: int, seconds: float) -> float:
    """Return the calls per second of a pool of threads without a queue."""
    end, done = time.monotonic() + seconds, [0] * threads

    def loop(index: int) -> None:
        while time.monotonic() < end:
            work()
            done[index] += 1

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(loop, range(threads)))
    return sum(done) / seconds


def ours(client: redis.Redis, threads: int, seconds: float) -> float:
    """Return the messages per second of a worker, once it knows how long the listener takes."""
    client.flushdb()
    broker, lock, done = RedisBroker(client), threading.Lock(), 0

    def listener(message: Any) -> None:
        nonlocal done
        work()
        with lock:
            done += 1

    most = int(ideal(threads) * (seconds + 4))
    Producer(broker).send_bodies(TOPIC, [{"n": n} for n in range(most)])
    dispatcher = Dispatcher(
        broker, [TOPIC], {TOPIC.name: Listener(TOPIC.name, listener)}, WorkerOptions(threads=threads)
    )
    dispatcher.own((TOPIC.name, slot) for slot in range(TOPIC.slots))
    worker = threading.Thread(target=dispatcher.run)
    worker.start()
    try:
        time.sleep(2)
        before, begun = done, time.perf_counter()
        time.sleep(seconds)
        return (done - before) / (time.perf_counter() - begun)
    finally:
        dispatcher.stop()
        worker.join()


def ideal(threads: int) -> float:
    return min(threads / (CPU_SECONDS + WAITING_SECONDS), 1 / CPU_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threads", description=__doc__)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 8, 32], help="default 1 8 32")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement (default 5)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in turn (default 3)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    lines, found = [], []
    with server() as (client, _):
        where = conditions(client)
        print(told(where), flush=True)
        for threads in options.threads:
            rates: dict[Callable[..., float], list[float]] = {bare: [], ours: []}
            for _ in range(options.rounds):
                rates[bare].append(bare(threads, options.seconds))
                rates[ours].append(ours(client, threads, options.seconds))
            pool, rate, best = statistics.median(rates[bare]), statistics.median(rates[ours]), ideal(threads)
            shares = (f"{rate / best:.2f}", f"{rate / pool:.2f}")
            lines.append([str(threads), f"{best:,.0f}", f"{pool:,.0f}", f"{rate:,.0f}", *shares])
            found.append({"threads": threads, "ideal": best, "pool": pool, "rmq": rate})
    print((markdown if options.markdown else text)(COLUMNS, lines))
    write(options.json, where, threads=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
