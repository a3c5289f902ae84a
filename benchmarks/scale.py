"""``python -m benchmarks.scale``: how cost grows with backlog, slots, processes, size of bodies and the part that merges.

Each point is a server that was just emptied. Sending is the producer's bulk way. Taking is prepare and commit of batches of
512 by one client, slot after slot: what a message costs in Redis and the client, without listeners. Only ``processes`` and
``drain`` run whole workers. A backlog of 10^8 takes 16 GiB: ``--only backlog --backlog 100_000_000``.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import redis

from benchmarks.harness import (
    command_line,
    conditions,
    cores_apart,
    cpu_of,
    descendants,
    redis_seconds,
    server,
    text,
    told,
    write,
)
from benchmarks.idle import workers
from django_rmq.core.commands import ack, fetch
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.core.redis.broker import RedisBroker

BACKLOGS = (10_000, 100_000, 1_000_000, 10_000_000)
SLOTS = (1, 64, 1_024, 16_384, 1 << 20)
PROCESSES = (1, 2, 3, 4)
BODIES = (50, 500, 4_096, 65_536)
MERGES = (0, 50, 90, 99)
DRAINED = (1_024, 65_536)
CHUNK = 60_000
SAMPLED = 40
"""Slots that are taken from to time prepare."""

Point = dict[str, float]


def topic_of(slots: int, body: str = "bytes") -> Topic:
    """Return a topic whose messages are due at once."""
    return Topic("scale", TopicType.RANGE_MERGE, slots=slots, time_range_ms=1, body=body)


def numbered(count: int, size: int) -> Iterator[list[bytes]]:
    """Yield lists of distinct bodies of ``size`` bytes."""
    for start in range(0, count, CHUNK):
        yield [b"%0*d" % (size, n) for n in range(start, min(start + CHUNK, count))]


def memory(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


def fill(producer: Producer, topic: Topic, bodies: Iterator[list[bytes]]) -> float:
    """Send all; return the seconds spent in sending."""
    spent = 0.0
    for chunk in bodies:
        begun = time.perf_counter()
        producer.send_bodies(topic, chunk)
        spent += time.perf_counter() - begun
    return spent


def take(broker: RedisBroker, topic: Topic, most: int, batch: int = 512) -> tuple[int, float, float, float]:
    """Take up to ``most`` messages from slots at random.

    Return how many, the seconds, the median ms of one prepare, and the mean of what it brings.
    """
    taken, calls = 0, []
    slots = random.Random(1).sample(range(topic.slots), min(topic.slots, 4_096))
    epochs = [broker.run(fetch.acquire(topic, slot)) for slot in slots]
    begun = time.perf_counter()
    for slot, epoch in zip(slots, epochs, strict=True):
        sleeps = False
        while taken < most and not sleeps:
            asked = time.perf_counter()
            found = broker.run(fetch.prepare(topic, slot, "scale", epoch, batch))
            if found.status != "ok":
                break
            calls.append(time.perf_counter() - asked)
            # As a worker does: a whole delivery is committed without names, and what is empty then is not asked again.
            taken += len(broker.run(ack.commit_delivery(topic, slot, found.receipt, len(found.deliveries))))
            sleeps = found.sleeping_until is not None
            if topic.slots > SAMPLED and len(calls) % 2 == 0:
                break  # on to other slots: the first batches of many, not all of a few
        if taken >= most:
            break
    return taken, time.perf_counter() - begun, 1000 * statistics.median(calls), taken / len(calls)


def measured(
    client: redis.Redis, topic: Topic, count: int, bodies: Iterator[list[bytes]], most: int
) -> Point:
    """Send ``bodies`` and take up to ``most`` of them."""
    client.flushall()
    empty = memory(client)
    broker = RedisBroker(client)
    spent = fill(Producer(broker), topic, bodies)
    time.sleep(0.01)
    held = memory(client) - empty
    taken, seconds, prepare_ms, each = take(broker, topic, most)
    return {
        "sent per second": count / spent,
        "taken per second": taken / seconds,
        "ms per prepare": prepare_ms,
        "messages per prepare": each,
        "bytes per message": held / count,
    }


def backlog(client: redis.Redis, _: str, value: int, slots: int = 1024) -> Point:
    return measured(client, topic_of(slots), value, numbered(value, 40), 100_000)


def slots(client: redis.Redis, _: str, value: int) -> Point:
    return measured(client, topic_of(value), 1_000_000, numbered(1_000_000, 40), 50_000)


def body(client: redis.Redis, _: str, value: int) -> Point:
    count = max(2_000, min(200_000, 200_000_000 // value))
    return measured(client, topic_of(64), count, numbered(count, value), count)


def merge(client: redis.Redis, _: str, value: int) -> Point:
    """``value`` % of the sends meet a copy that waits."""
    count, distinct = 200_000, max(1, 200_000 * (100 - value) // 100)
    mixed = [b"%040d" % (n % distinct) for n in range(count)]
    random.Random(1).shuffle(mixed)
    chunks = (mixed[start : start + CHUNK] for start in range(0, count, CHUNK))
    client.flushall()
    spent = fill(
        Producer(RedisBroker(client)),
        Topic("scale", TopicType.RANGE_MERGE, slots=64, body="bytes", time_range_ms=600_000),
        chunks,
    )
    return {"sent per second": count / spent}


def processes(client: redis.Redis, url: str, value: int) -> Point:
    """Whole workers with a per-message no-op listener, each process with its share of 64 slots."""
    client.flushall()
    count, topic = 400_000, Topic("noop", TopicType.RANGE_MERGE, slots=64, time_range_ms=1)
    Producer(RedisBroker(client)).send_bodies(topic, [{"n": n} for n in range(count)])
    script = client.register_script(
        "local n = 0 for i = 0, 63 do n = n + redis.call('ZCARD', 'noop_' .. i) "
        "+ redis.call('ZCARD', 'prepare_{noop_' .. i .. '}') end return n"
    )
    with ExitStack() as stack:
        stack.enter_context(workers(url, 64, "--processes", str(value)))
        first: tuple[float, int] | None = None
        end = time.monotonic() + 120
        while time.monotonic() < end:
            left, now = int(script()), time.perf_counter()
            if left <= 0.9 * count and first is None:
                first = (now, left)
            if first is not None and left <= 0.1 * count and now > first[0]:
                return {"consumed per second": (first[1] - left) / (now - first[0])}
            time.sleep(0.01)
    raise RuntimeError("the workers did not finish")


def drain(client: redis.Redis, url: str, value: int) -> Point:
    """Let one whole worker empty ``value`` slots, from the first slot that it acquires on."""
    client.flushall()
    count, topic = 200_000, Topic("noop", TopicType.RANGE_MERGE, slots=value, time_range_ms=1)
    with cores_apart(client):
        Producer(RedisBroker(client)).send_bodies(topic, [{"n": n} for n in range(count)])
        used, sent = sum(1 for _ in client.scan_iter("noop_*", count=10_000)), client.dbsize()
        served, begun = redis_seconds(client), 0.0
        with workers(url, value) as process:
            end = time.monotonic() + 120
            # Every slot keeps `control`, a used one `stats`. Workers have some keys, and a slot that is not empty two more.
            while not begun or client.dbsize() > value + used + 64:
                if time.monotonic() > end:
                    raise RuntimeError("the worker did not finish")
                if not begun and client.dbsize() > sent:
                    begun, worked = time.perf_counter(), cpu_of(*descendants(process.pid))
                time.sleep(0.01)
            seconds = time.perf_counter() - begun
            worked = cpu_of(*descendants(process.pid)) - worked
    return {
        "consumed per second": count / seconds,
        "Redis, µs of CPU per message": 1e6 * (redis_seconds(client) - served) / count,
        "worker, µs of CPU per message": 1e6 * worked / count,
    }


SERIES: dict[str, tuple[Callable[[redis.Redis, str, int], Point], Sequence[int], str]] = {
    "backlog": (backlog, BACKLOGS, "messages waiting in 1,024 slots, 40 bytes each"),
    "slots": (slots, SLOTS, "slots, with 1,000,000 messages of 40 bytes"),
    "body": (body, BODIES, "bytes of a body, 64 slots"),
    "merge": (merge, MERGES, "% of 200,000 sends that merge, 64 slots"),
    "processes": (processes, PROCESSES, "worker processes on 64 slots of one Redis"),
    "drain": (drain, DRAINED, "slots of a topic with 200,000 messages, and one worker process"),
}


def main() -> int:
    parser = command_line("benchmarks.scale", __doc__)
    parser.add_argument("--only", nargs="+", choices=SERIES, default=list(SERIES))
    parser.add_argument("--backlog", type=int, nargs="+", help=f"in place of {BACKLOGS}")
    parser.add_argument(
        "--backlog-slots", type=int, default=1024, help="slots of these backlogs (default 1,024)"
    )
    parser.add_argument("--largest", type=float, default=float("inf"), help="leave out larger values")
    options = parser.parse_args()
    series: dict[str, list[Any]] = {}
    where: dict[str, str] = {}
    for name in options.only:
        work, values, about = SERIES[name]
        if name == "backlog":
            work = partial(backlog, slots=options.backlog_slots)
            values = options.backlog or values
            about = about.replace("1,024", f"{options.backlog_slots:,}")
        series[name] = []
        for value in values:
            if value > options.largest:
                continue
            with server() as (client, url):
                where = where or conditions(client)
                series[name].append([value, work(client, url, value)])
        print(f"\n{name}: {about}")
        print(text(*columns(name, series[name])), flush=True)
    print("\n" + told(where))
    write(options.json, where, series=series)
    return 0


def columns(name: str, points: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of one series."""
    titles = list(points[0][1]) if points else []
    rows = [[f"{value:,}", *(_shown(point[title]) for title in titles)] for value, point in points]
    return [name, *titles], rows


def _shown(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.2g}"


if __name__ == "__main__":
    sys.exit(main())
