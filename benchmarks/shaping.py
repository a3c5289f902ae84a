"""``python -m benchmarks.shaping``: bodies collected into keys (ACCUMULATE), counted and compared after their delivery."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.table import server
from benchmarks.works import CHUNK, Listener
from django_rmq.core.consumer import Dispatcher, WorkerOptions
from django_rmq.core.consumer.progress import SharedProgress
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.core.redis.clients import Pool

TOPIC = Topic(
    "views",
    TopicType.RANGE_MERGE,
    slots=64,
    time_range_ms=1,
    identity="key",
    accumulate=10_000,
    max_body=1 << 20,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shaping", description=__doc__)
    parser.add_argument("--bodies", type=int, default=1_000_000, help="bodies in all")
    parser.add_argument("--keys", type=int, default=1_000, help="messages that collect them")
    options = parser.parse_args()
    heard: dict[str, list[int]] = {}

    def listen(message: Any) -> None:
        heard.setdefault(message.key, []).extend(message.bodies)

    with server() as (client, _):
        import redis

        broker = RedisBroker(redis.Redis(connection_pool=Pool(**client.connection_pool.connection_kwargs)))
        producer = Producer(broker)
        rates = {}
        for name, topic in (("collected", TOPIC), ("merged", replace(TOPIC, name="plain", accumulate=None))):
            began = time.perf_counter()
            for first in range(0, options.bodies, CHUNK):
                numbers = range(first, min(first + CHUNK, options.bodies))
                producer.send([producer.build(topic, n, key=f"k{n % options.keys}") for n in numbers])
            rates[name] = options.bodies / (time.perf_counter() - began)
        dispatcher = Dispatcher(
            broker,
            [TOPIC],
            {TOPIC.name: Listener(TOPIC.name, listen)},
            WorkerOptions(threads=1, burst=True),
            notes=SharedProgress(1),
        )
        dispatcher.own((TOPIC.name, slot) for slot in range(TOPIC.slots))
        dispatcher.run()
    told = {name: f"{rate:,.0f}/s" for name, rate in rates.items()}
    kept = sum(map(len, heard.values()))
    ordered = sum(
        bodies == list(range(int(key[1:]), options.bodies, options.keys)) for key, bodies in heard.items()
    )
    print(
        f"sent: {told}; {kept:,} of {options.bodies:,} bodies arrived; {ordered:,} of {options.keys:,} keys whole and in order"
    )
    return 0 if ordered == options.keys else 1


if __name__ == "__main__":
    sys.exit(main())
