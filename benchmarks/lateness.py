"""How late timed messages come, at several rates, and that none comes early.

Messages are due at instants spread evenly over some seconds. The listener notes by how much it was called later. Beside it a
control thread in the same process sleeps until the same instants (up to 1,000 of them per second) and notes the same: what
Python and the machine cost anybody.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import redis

from benchmarks.harness import Row
from benchmarks.works import Listener
from django_rmq.core.consumer import Dispatcher, WorkerOptions
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.core.redis.broker import RedisBroker

TOPIC = Topic("timed", TopicType.FIXED_TIME, slots=64)
RATES = (100, 1_000, 10_000)
CONTROL_RATE = 1_000
GOAL_RATE, GOAL_P50_MS, GOAL_P99_MS = 1_000, 3.0, 15.0
EDGES_MS = (0, 1, 2, 3, 5, 10, 15, 25, 50, 100, 250, 1000)


class Lateness(NamedTuple):
    """What was seen at one rate, in ms."""

    rate: int
    ours: list[float]
    control: list[float]


def part(values: list[float], share: float) -> float:
    """Return the value that ``share`` of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def histogram(values: list[float]) -> list[int]:
    """Return how many are early, and in each class that begins at an edge of ``EDGES_MS``."""
    counts = [0] * (len(EDGES_MS) + 1)
    for value in values:
        counts[sum(value >= edge for edge in EDGES_MS)] += 1
    return counts


def measure(client: redis.Redis, rate: int, seconds: float) -> Lateness:
    """Send messages that are due at ``rate`` per second for ``seconds``, and see when they come."""
    client.flushdb()
    broker, late, control = RedisBroker(client), [], []
    count = int(rate * seconds)
    finished = threading.Event()

    def listen(message: Any) -> None:
        late.append(time.time() * 1000 - message.score)
        if len(late) == count:
            finished.set()

    producer = Producer(broker)
    begin = time.time() * 1000 + 1_500 + count / 100
    dues = [int(begin + n * 1000 / rate) for n in range(count)]
    producer.send([producer.build(TOPIC, {"n": n}, fixed_time=due) for n, due in enumerate(dues)])
    dispatcher = Dispatcher(
        broker, [TOPIC], {TOPIC.name: Listener(TOPIC.name, listen)}, WorkerOptions(threads=4)
    )
    dispatcher.own((TOPIC.name, slot) for slot in range(TOPIC.slots))

    def sleep_along() -> None:
        for due in dues[:: max(1, rate // CONTROL_RATE)]:
            time.sleep(max(0.0, due / 1000 - time.time()))
            control.append(time.time() * 1000 - due)

    threads = [threading.Thread(target=dispatcher.run), threading.Thread(target=sleep_along)]
    for thread in threads:
        thread.start()
    try:
        if not finished.wait(seconds * 3 + 60):
            raise RuntimeError(f"{len(late)} of {count} timed messages came")
    finally:
        dispatcher.stop()
        for thread in threads:
            thread.join()
    return Lateness(rate, late, control)


def row(found: Lateness) -> Row:
    """Return the line of the table: how late it may be is said for 1,000/s; none may ever be early."""
    p50, p99 = (part(found.ours, share) for share in (0.5, 0.99))
    bare50, bare99 = (part(found.control, share) for share in (0.5, 0.99))
    earliest = min(found.ours)
    more50, more99 = p50 - bare50, p99 - bare99
    has_goal = found.rate == GOAL_RATE
    return Row(
        f"lateness at {found.rate:,}/s, p50 / p99",
        f"{p50:.1f} / {p99:.1f} ms",
        f"{bare50:.1f} / {bare99:.1f} ms",
        f"{more50:+.1f} / {more99:+.1f} ms",
        f"≤ +{GOAL_P50_MS:g} / +{GOAL_P99_MS:g} ms, never early" if has_goal else "never early",
        earliest >= 0 and (not has_goal or (more50 <= GOAL_P50_MS and more99 <= GOAL_P99_MS)),
        {
            "rate": found.rate,
            "p50": p50,
            "p99": p99,
            "earliest": earliest,
            "latest": max(found.ours),
            "control_p50": bare50,
            "control_p99": bare99,
            "edges_ms": EDGES_MS,
            "histogram": histogram(found.ours),
            "control_histogram": histogram(found.control),
        },
    )
