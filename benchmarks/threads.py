"""``python -m benchmarks.threads``: listeners of 1 ms of computing and of 10 ms of waiting, in 1, 8 and 32 threads.

The ideal of those that compute is 1,000 per second, whatever the threads: Python runs one of them at a time. The ideal of
those that wait is threads / 10 ms. The backlog is spread over 1,024 slots, and rates are medians over interleaved rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import redis

from benchmarks.table import conditions, markdown, server, text, told
from benchmarks.works import Listener
from django_rmq.core.consumer import Dispatcher, Terms, Watching
from django_rmq.core.consumer.notes import Notes
from django_rmq.core.producer.sending import Producer
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.core.redis.pool import Pool
from django_rmq.core.words.topics import Topic, TopicType

TOPIC = Topic("threads", TopicType.RANGE_MERGE, slots=1024, time_range_ms=1)
COLUMNS = ("listener", "threads", "messages/s", "ideal", "of the ideal")


def compute(_: Any) -> None:
    """Compute for 1 ms of this thread's time."""
    end = time.thread_time() + 0.001
    while time.thread_time() < end:
        pass


def wait(_: Any) -> None:
    """Wait for 10 ms."""
    time.sleep(0.01)


WORKS: dict[str, tuple[Callable[[Any], None], Callable[[int], float]]] = {
    "1 ms of CPU": (compute, lambda threads: 1_000.0),
    "10 ms of waiting": (wait, lambda threads: threads / 0.01),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threads", description=__doc__)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 8, 32], help="default 1 8 32")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="how long the ideal would take (default 4)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args()
    found: dict[tuple[str, int], list[float]] = {}
    with server() as (client, _):
        print(told(conditions(client)), flush=True)
        for _, work, threads in product(range(options.rounds), WORKS, options.threads):
            listen, ideal = WORKS[work]
            rate = measured(client, listen, threads, int(ideal(threads) * options.seconds))
            found.setdefault((work, threads), []).append(rate)
    lines = []
    for (work, threads), rates in found.items():
        rate, ideal_rate = statistics.median(rates), WORKS[work][1](threads)
        lines.append([work, str(threads), f"{rate:,.0f}", f"{ideal_rate:,.0f}", f"{rate / ideal_rate:.2f}"])
    print((markdown if options.markdown else text)(COLUMNS, lines))
    return 0


def measured(client: redis.Redis, listen: Callable[[Any], None], threads: int, count: int) -> float:
    """Return how many of ``count`` waiting messages one process ends per second."""
    client.flushdb()
    broker = RedisBroker(redis.Redis(connection_pool=Pool(**client.connection_pool.connection_kwargs)))
    Producer(broker).send_bodies(TOPIC, list(range(count)))
    time.sleep(0.01)
    ended = 0.0

    def beat() -> None:
        nonlocal ended
        if not ended and dispatcher.processed >= count:
            ended = time.perf_counter()

    dispatcher = Dispatcher(
        broker,
        [TOPIC],
        {TOPIC.name: Listener(TOPIC.name, listen)},
        Terms(threads=threads, burst=True),
        notes=Notes(1),
        watching=Watching(beat=beat),
    )
    dispatcher.own((TOPIC.name, slot) for slot in range(TOPIC.slots))
    begun = time.perf_counter()
    dispatcher.run()
    if dispatcher.processed != count or not ended:
        raise RuntimeError(f"ended {dispatcher.processed} of {count} messages")
    return count / (ended - begun)


if __name__ == "__main__":
    sys.exit(main())
