"""The works that are measured, and the bare limit of each: what redis-py alone does for the same bytes.

Every work runs on a database that was just emptied, and returns messages per second.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from django_rmq.broker import Broker
from django_rmq.consumer import Dispatcher
from django_rmq.consumer.notes import Notes
from django_rmq.keys import slot_of
from django_rmq.messages import Topic, TopicType, encode_json
from django_rmq.producer import Producer

SLOTS = 64
TOPIC = Topic("bench", TopicType.RANGE_MERGE, slots=SLOTS, time_range_ms=1)
BYTES_TOPIC = Topic("bench", TopicType.RANGE_MERGE, slots=SLOTS, time_range_ms=1, body="bytes")
CHUNK = 6_000
"""Messages per round trip of the bare loop."""


@dataclass(frozen=True)
class Listener:
    """What the registry would hand to the consumer."""

    topic: str
    function: Callable[[Any], Any]
    batch_size: int | None = None


def bodies(count: int) -> list[dict[str, Any]]:
    """Return distinct bodies of about 50 bytes as JSON."""
    return [{"sku": i, "shop": i % 100, "source": f"feed-{i % 7}"} for i in range(count)]


class Bench:
    """One server, and the works on it."""

    def __init__(self, client: redis.Redis, count: int, singles: int) -> None:
        self.client = client
        self.broker = Broker(client)
        self.producer = Producer(self.broker)
        self.dicts = bodies(count)
        self.raws = [encode_json(body) for body in self.dicts]
        self.singles = singles

    def _empty(self) -> None:
        self.client.flushdb()

    def _timed(self, count: int, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return count / (time.perf_counter() - began)

    # --- sending

    def _bare_send(self, raws: Sequence[bytes]) -> None:
        for start in range(0, len(raws), CHUNK):
            groups: defaultdict[int, list[Any]] = defaultdict(list)
            for raw in raws[start : start + CHUNK]:
                groups[slot_of(raw, SLOTS)] += (1_800_000_000_000, raw)
            pipeline = self.client.pipeline(transaction=False)
            for slot, pairs in groups.items():
                pipeline.execute_command("ZADD", f"bare_{slot}", *pairs)
            pipeline.execute()

    def bare_send_bytes(self) -> float:
        self._empty()
        return self._timed(len(self.raws), lambda: self._bare_send(self.raws))

    def bare_send_dicts(self) -> float:
        self._empty()
        return self._timed(
            len(self.dicts), lambda: self._bare_send([encode_json(body) for body in self.dicts])
        )

    def send_bytes(self) -> float:
        self._empty()
        return self._timed(len(self.raws), lambda: self.producer.send_bodies(BYTES_TOPIC, self.raws))

    def send_dicts(self) -> float:
        self._empty()
        return self._timed(len(self.dicts), lambda: self.producer.send_bodies(TOPIC, self.dicts))

    def bare_single(self) -> float:
        self._empty()

        def work() -> None:
            for raw in self.raws[: self.singles]:
                self.client.zadd(f"bare_{slot_of(raw, SLOTS)}", {raw: 1_800_000_000_000})

        return self._timed(self.singles, work)

    def single(self) -> float:
        self._empty()

        def work() -> None:
            for body in self.dicts[: self.singles]:
                self.producer.send([self.producer.build(TOPIC, body)])

        return self._timed(self.singles, work)

    # --- consuming

    def _consume(self, function: Callable[[Any], Any], batch_size: int | None) -> float:
        self._empty()
        self.producer.send_bodies(TOPIC, self.dicts)
        time.sleep(0.01)
        dispatcher = Dispatcher(
            self.broker,
            [TOPIC],
            {TOPIC.name: Listener(TOPIC.name, function, batch_size)},
            threads=1,
            burst=True,
            notes=Notes(1),
        )
        dispatcher.own((TOPIC.name, slot) for slot in range(SLOTS))
        gc.collect()
        gc.freeze()  # as runrmqconsumers does
        rate = self._timed(len(self.dicts), dispatcher.run)
        gc.unfreeze()
        if dispatcher.processed != len(self.dicts):
            raise RuntimeError(f"settled {dispatcher.processed} of {len(self.dicts)} messages")
        return rate

    def consume_each(self) -> float:
        def listen(message: Any) -> None:
            message.body  # noqa: B018 - decoding belongs to the work

        return self._consume(listen, None)

    def consume_batches(self) -> float:
        def listen(messages: list[Any]) -> None:
            for message in messages:
                message.body  # noqa: B018

        return self._consume(listen, 500)


@dataclass(frozen=True)
class Work:
    """One row of the table: what is measured, against what, and the goal."""

    name: str
    ours: str
    bare: str
    goal: float


WORKS = (
    Work("bulk send, bytes", "send_bytes", "bare_send_bytes", 0.7),
    Work("bulk send, dicts", "send_dicts", "bare_send_dicts", 0.8),
    Work("single send", "single", "bare_single", 0.6),
    Work("consume, each message", "consume_each", "bare_send_bytes", 0.25),
    Work("consume, batches of 500", "consume_batches", "bare_send_bytes", 0.35),
)
