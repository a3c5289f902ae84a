"""The works that are measured, and the bare limits of each: what redis-py alone, and a raw socket, do for the same bytes.

Every work runs on a database that was just emptied, and returns messages per second.
"""

from __future__ import annotations

import gc
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import hiredis
import redis

from django_rmq.core.commands import ack, fetch
from django_rmq.core.consumer import Dispatcher, WorkerCallbacks, WorkerOptions
from django_rmq.core.consumer.shared_notes import SharedNotes
from django_rmq.core.model.body_codec import encode_json
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.placement import slot_of
from django_rmq.core.producer.producer import Producer
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.core.redis.clients import Pool
from django_rmq.core.worker_processes.supervisor import collect_less

SLOTS = 64
TOPIC = Topic("bench", TopicType.RANGE_MERGE, slots=SLOTS, time_range_ms=1)
BYTES_TOPIC = Topic("bench", TopicType.RANGE_MERGE, slots=SLOTS, time_range_ms=1, body="bytes")
DEBOUNCED = replace(BYTES_TOPIC, debounce=True, max_wait_ms=60_000)
FIFO = Topic("bench", TopicType.FIFO, slots=SLOTS, identity="key", slot_basis="shop")
KEPT = replace(TOPIC, outcome_retention_ms=3_600_000)
CHUNK = 6_000
"""Messages per round trip of the bare loop."""


@dataclass(frozen=True)
class Listener:
    """What the registry would hand to the consumer."""

    topic: str
    function: Callable[[Any], Any]
    batch_size: int | None = None
    coroutine: None = None


def bodies(count: int) -> list[dict[str, Any]]:
    """Return distinct bodies of about 50 bytes as JSON."""
    return [{"sku": i, "shop": i % 100, "source": f"feed-{i % 7}"} for i in range(count)]


class Bench:
    """One server, and the works on it."""

    def __init__(self, client: redis.Redis, count: int, singles: int) -> None:
        self.client = client
        # Ours as the settings build it: its pool is part of what a send costs.
        self.broker = RedisBroker(
            redis.Redis(connection_pool=Pool(**client.connection_pool.connection_kwargs))
        )
        self.producer = Producer(self.broker)
        self.dicts = bodies(count)
        self.raws = [encode_json(body) for body in self.dicts]
        self.singles = singles

    def _timed(
        self, count: int, work: Callable[[], object], fill: Callable[[], object] | None = None
    ) -> float:
        """Return messages per second of ``work`` on a database that was emptied, and then filled."""
        # Now: in the background it would slow this work down.
        self.client.execute_command("FLUSHDB", "SYNC")
        if fill is not None:
            fill()
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
        return self._timed(len(self.raws), lambda: self._bare_send(self.raws))

    def bare_send_dicts(self) -> float:
        return self._timed(
            len(self.dicts), lambda: self._bare_send([encode_json(body) for body in self.dicts])
        )

    def send_bytes(self) -> float:
        return self._timed(len(self.raws), lambda: self.producer.send_bodies(BYTES_TOPIC, self.raws))

    def send_dicts(self) -> float:
        return self._timed(len(self.dicts), lambda: self.producer.send_bodies(TOPIC, self.dicts))

    def bare_send_twice(self) -> float:
        return self._timed(2 * len(self.raws), lambda: self._bare_send(self.raws + self.raws))

    def send_debounced(self) -> float:
        """Send each message twice, so that every second send starts a wait again."""
        return self._timed(
            2 * len(self.raws),
            lambda: [self.producer.send_bodies(DEBOUNCED, self.raws) for _ in range(2)],
        )

    def send_fifo(self) -> float:
        """Send the dicts into the lines of their entities. Each is a message of its own, with a key and an envelope."""
        return self._timed(len(self.dicts), self._send_fifo)

    def _send_fifo(self) -> None:
        self.producer.send_bodies(FIFO, self.dicts)

    def raw_send_bytes(self) -> float:
        """The same commands through a socket without a client; Redis works on one trip while the next is packed."""

        def work() -> None:
            with self._socket() as connection:
                owed = 0
                for start in range(0, len(self.raws), CHUNK):
                    groups: defaultdict[int, list[Any]] = defaultdict(list)
                    for raw in self.raws[start : start + CHUNK]:
                        groups[slot_of(raw, SLOTS)] += (b"1800000000000", raw)
                    commands = [(b"ZADD", b"bare_%d" % slot, *pairs) for slot, pairs in groups.items()]
                    connection.sendall(b"".join(map(hiredis.pack_command, commands)))
                    # All but this trip's replies, and perhaps some of those.
                    owed = len(commands) + _read_lines(connection, owed)
                _read_lines(connection, owed)

        return self._timed(len(self.raws), work)

    def raw_single(self) -> float:
        def work() -> None:
            with self._socket() as connection:
                for raw in self.raws[: self.singles]:
                    key = b"bare_%d" % slot_of(raw, SLOTS)
                    connection.sendall(
                        hiredis.pack_command(cast("Any", (b"ZADD", key, b"1800000000000", raw)))
                    )
                    _read_lines(connection, 1)

        return self._timed(self.singles, work)

    def _socket(self) -> socket.socket:
        address = self.client.connection_pool.connection_kwargs
        connection = socket.create_connection((address["host"], address["port"]))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def bare_single(self) -> float:
        def work() -> None:
            for raw in self.raws[: self.singles]:
                self.client.zadd(f"bare_{slot_of(raw, SLOTS)}", {raw: 1_800_000_000_000})

        return self._timed(self.singles, work)

    def single(self) -> float:
        def work() -> None:
            for body in self.dicts[: self.singles]:
                self.producer.send([self.producer.build(TOPIC, body)])

        return self._timed(self.singles, work)

    # --- consuming

    def _consume(self, function: Callable[[Any], Any], batch_size: int | None, topic: Topic = TOPIC) -> float:
        self.client.execute_command("FLUSHDB", "SYNC")
        if topic is FIFO:
            self._send_fifo()
        else:
            self.producer.send_bodies(topic, self.dicts)
        time.sleep(0.01)
        ended = 0.0

        def beat() -> None:
            """Note when the last message was settled: the threads take up to 0.1 s more to end."""
            nonlocal ended
            if not ended and dispatcher.processed >= len(self.dicts):
                ended = time.perf_counter()

        dispatcher = Dispatcher(
            self.broker,
            [topic],
            {topic.name: Listener(topic.name, function, batch_size)},
            WorkerOptions(threads=1, burst=True),
            notes=SharedNotes(1),
            callbacks=WorkerCallbacks(beat=beat),
        )
        dispatcher.own((topic.name, slot) for slot in range(SLOTS))
        thresholds = gc.get_threshold()
        collect_less()  # as runrmqconsumers does
        begun = time.perf_counter()
        dispatcher.run()
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        if dispatcher.processed != len(self.dicts) or not ended:
            raise RuntimeError(f"settled {dispatcher.processed} of {len(self.dicts)} messages")
        return len(self.dicts) / (ended - begun)

    def consume_each(self) -> float:
        return self._consume(_read_body, None)

    def consume_fifo(self) -> float:
        return self._consume(_read_body, None, FIFO)

    def consume_kept(self) -> float:
        """Consume each message, and keep what became of it (OUTCOME_RETENTION)."""
        return self._consume(_read_body, None, KEPT)

    def consume_batches(self) -> float:
        return self._consume(lambda messages: [message.body for message in messages], 500)

    # --- the price of safety

    def _fill(self) -> None:
        self.producer.send_bodies(BYTES_TOPIC, self.raws)
        time.sleep(0.01)

    def safe_scripts(self) -> float:
        """Prepare and commit by our scripts, at the worker's batch size, a round trip each."""

        def work() -> None:
            for slot in range(SLOTS):
                epoch = self.broker.run(fetch.acquire(BYTES_TOPIC, slot))
                while True:
                    taken = self.broker.run(
                        fetch.prepare(BYTES_TOPIC, slot, "bench", epoch, BYTES_TOPIC.prefetch)
                    )
                    if taken.status != "ok":
                        break
                    assert taken.is_alone
                    self.broker.run(
                        ack.commit_delivery(BYTES_TOPIC, slot, taken.receipt, len(taken.deliveries))
                    )

        return self._timed(len(self.raws), work, self._fill)

    def bare_scripts(self) -> float:
        """The same by the article's scripts: no receipt, no gate, no ledger, no retries to be kept apart."""
        take, forget = self.client.register_script(TAKE), self.client.register_script(FORGET)

        def work() -> None:
            for slot in range(SLOTS):
                store, prepare = f"bench_{slot}", f"prepare_{{bench_{slot}}}"
                while True:
                    now = time.time()
                    stamp = int(now) * 1000 + 16
                    rows = take(keys=[store, prepare], args=[int(now * 1000), BYTES_TOPIC.prefetch, stamp])
                    members, scores = rows[::2], list(map(float, rows[1::2]))
                    if not scores:
                        break
                    forget(keys=[prepare], args=members)

        return self._timed(len(self.raws), work, self._fill)


TAKE = """
local rows = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'WITHSCORES', 'LIMIT', 0, ARGV[2])
if #rows == 0 then return rows end
local members, prepared = {}, {}
for i = 1, #rows, 2 do
  members[#members + 1] = rows[i]
  prepared[i], prepared[i + 1] = ARGV[3], rows[i]
end
redis.call('ZREM', KEYS[1], unpack(members))
redis.call('ZADD', KEYS[2], unpack(prepared))
return rows
"""
FORGET = "return redis.call('ZREM', KEYS[1], unpack(ARGV))"


def _read_body(message: Any) -> None:
    message.body  # noqa: B018 - decoding belongs to the work


def _read_lines(connection: socket.socket, count: int) -> int:
    """Read so many integer replies; return by how many fewer there are to come of the next ones, as a negative number."""
    while count > 0:
        count -= connection.recv(65_536).count(b"\n")
    return count


@dataclass(frozen=True)
class Work:
    """One row of the table: what is measured, against what, and the goal for the ratio."""

    name: str
    ours: str
    bare: str
    goal: float
    raw: str | None = None
    """The same without a client library, for comparison."""


WORKS = (
    Work("bulk send, bytes", "send_bytes", "bare_send_bytes", 0.7, "raw_send_bytes"),
    Work("bulk send, dicts", "send_dicts", "bare_send_dicts", 0.8),
    Work("bulk send, debounced", "send_debounced", "bare_send_twice", 0.4),
    Work("bulk send, fifo", "send_fifo", "bare_send_dicts", 0.6),
    Work("single send", "single", "bare_single", 0.6, "raw_single"),
    Work("consume, each message", "consume_each", "bare_send_bytes", 0.25, "raw_send_bytes"),
    Work("consume, OUTCOME_RETENTION beside without", "consume_kept", "consume_each", 0.65),
    Work("consume, fifo", "consume_fifo", "bare_send_bytes", 0.45),
    Work("consume, batches of 500", "consume_batches", "bare_send_bytes", 0.35, "raw_send_bytes"),
    Work("price of safety, batches of 512", "safe_scripts", "bare_scripts", 1 / 1.2),
)
