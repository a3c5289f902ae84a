"""``python -m benchmarks.spark``: what the Spark source and sink reach, each beside its bare limit in the same rounds.

One server, one session on two cores, messages of about 90 bytes. Rounds are interleaved, the first one warms up, and
medians are shown: of the rates, and of the ratios of one round each. "By CPU" is the same ratio of the messages per second
of CPU, of server, session and Python workers together: on two cores that are busy it is that of the rates, and other work
on the machine disturbs it less.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import (
    TITLES,
    Row,
    cells,
    client_of,
    command_line,
    conditions,
    cpu_of,
    descendants,
    text,
    told,
    write,
)
from django_rmq.core.commands import inspect
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.placement import slot_of
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.spark.java import open_session
from tests.support.embedded_redis import EmbeddedRedis, start_redis

CHUNK = 1_000
"""Messages per command, or per execute, of the bare works."""

PAGE = 10_000
"""Rows per reply of the bare read."""

SMALL, SMALL_BATCHES = 1_000, 12
"""Messages of a small micro-batch, and how many of those are run."""

IDLE_SECONDS = 5.0

LATER_MS = 4_000_000_000_000
"""The beginning of the day in 2096 in which fixed times are."""

LARGE, LARGE_BYTES = 2_000, 240_000
"""How many large messages are read, and their size."""

MANY_SLOTS = 65_536

DEFAULT_BATCH = 200_000
"""``maxMessagesPerTrigger``, if it is not given."""

POP = """
local rows = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 1000)
if #rows > 0 then
  redis.call('ZREM', KEYS[1], unpack(rows))
  local flat = {}
  for i, member in ipairs(rows) do flat[i * 2 - 1], flat[i * 2] = ARGV[1], member end
  redis.call('ZADD', KEYS[2], unpack(flat))
end
return rows
"""


class Work(NamedTuple):
    """What is measured, against what, and the goal for the ratio of both."""

    name: str
    ours: str
    bare: str
    goal: float


COMPARED = (
    Work("write / raw socket", "spark_write", "bare_write", 0.8),
    Work("write / one ZADD each", "spark_write", "each_write", 3.5),
    Work("write, JSON / one ZADD each", "write_json", "each_write", 2.5),
    Work("write, JSON / its bytes", "write_json", "write_bytes", 0.9),
    Work("write, JSON with keys in order / its bytes", "write_ordered", "write_bytes", 0.9),
    Work("write, keyed / one ZADD each", "write_keyed", "each_write", 1.25),
    Work("write, fixed_time / one ZADD each", "write_times", "each_write", 1.25),
    Work("write, timestamps, JSON / one ZADD each", "write_timestamps", "each_write", 1.25),
    Work("write, time_range / one ZADD each", "write_ranges", "each_write", 1.25),
    Work("write, slot_basis / one ZADD each", "write_bases", "each_write", 1.25),
    Work("write, SLOT_BASIS, JSON / one ZADD each", "write_entities", "each_write", 1.25),
    Work("batch read / raw ZRANGE", "spark_read", "bare_read", 0.6),
    Work("stream read / two-phase", "spark_stream", "bare_consume", 1.5),
)
WORKS = (
    "bare_write",
    "bare_consume",
    "each_write",
    "write_json",
    "write_bytes",
    "write_ordered",
    "write_keyed",
    "write_times",
    "write_timestamps",
    "write_ranges",
    "write_bases",
    "write_entities",
    "spark_write",
    "bare_read",
    "spark_read",
    "spark_stream",
)
"""In the order of a round: some read what the one before has written."""


class Wire:
    """A socket to the server: commands that are built already go out, answers are counted in bytes and thrown away."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=60)

    def __call__(self, commands: Sequence[bytes]) -> None:
        """Send everything and return when the last answer is there."""
        sender = threading.Thread(target=self._send, args=(commands,))
        sender.start()
        tail = b""
        while not tail.endswith(b"+PONG\r\n"):
            tail = (tail + self._socket.recv(1 << 20))[-7:]
        sender.join()

    def _send(self, commands: Sequence[bytes]) -> None:
        for command in commands:
            self._socket.sendall(command)
        self._socket.sendall(b"*1\r\n$4\r\nPING\r\n")


def packed(*parts: Any) -> bytes:
    """Return a command as it goes over the wire."""
    encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in encoded)


def bodies(count: int) -> list[bytes]:
    """Return distinct bodies of about 90 bytes."""
    chance = random.Random(7)
    return [
        b'{"sku":%d,"change":"%032x","source":"feed-%d","price":"%d.99"}'
        % (n, chance.getrandbits(128), n % 7, n % 1_000)
        for n in range(count)
    ]


class Bench:
    """The server, the session, and the works; each returns messages per second."""

    def __init__(
        self, server: EmbeddedRedis, spark: Any, folder: Path, count: int, slots: int, batch: int
    ) -> None:
        self.client = client_of(server.url)
        self.client.config_set("slowlog-log-slower-than", 1_000)
        self.client.config_set("slowlog-max-len", 10_000)
        self.wire, self.spark, self.folder = Wire(server), spark, folder
        self.server_pid = server.pid
        self.cpu = 0.0
        """The CPU seconds of the last ``rate``, in all processes."""
        self.broker = RedisBroker(self.client)
        self.topic = Topic("bench", TopicType.RANGE_MERGE, slots=slots, time_range_ms=1, body="bytes")
        self.where = {"url": server.url, "topic": self.topic.name}
        self.options = {**self.where, "timeRange": "1ms"}
        self.functions = importlib.import_module("pyspark.sql.functions")
        self.batch = batch
        # Few tasks: one for each core.
        self.per_task = {"messagesPerTask": -(-count // 2)}
        self.per_batch = {"messagesPerTask": -(-batch // 2)}
        self.raws = bodies(count)
        self.slots = [slot_of(raw, slots) for raw in self.raws]
        ordered = [json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":")) for raw in self.raws]
        self.frame = self._frame("raw", pa.array(self.raws, pa.binary()))
        self.ordered = self._frame("ordered", pa.array(ordered))
        self.commands = self._commands()
        self.longest: dict[str, list[float]] = defaultdict(list)
        """Work -> ms of its longest command, round by round."""
        self.phases: dict[str, list[float]] = defaultdict(list)
        """Phase of a micro-batch -> ms of each."""
        self._queries = 0

    def _frame(self, name: str, values: Any) -> Any:
        """Return values as a frame of two files, one for each core."""
        half = -(-len(values) // 2)
        paths = [str(self.folder / f"{name}-{part}.parquet") for part in range(2)]
        for part, path in enumerate(paths):
            pq.write_table(pa.table({"value": values[part * half : (part + 1) * half]}), path)
        return self.spark.read.parquet(*paths)

    def _commands(self) -> list[bytes]:
        """Return the commands that add all messages, each to its slot."""
        due, commands = int(time.time() * 1000), []
        groups: defaultdict[int, list[Any]] = defaultdict(list)
        for slot, raw in zip(self.slots, self.raws, strict=True):
            groups[slot] += (due, raw)
            if len(groups[slot]) == 2 * CHUNK:
                commands.append(packed("ZADD", f"bare_{slot}", *groups.pop(slot)))
        return commands + [packed("ZADD", f"bare_{slot}", *pairs) for slot, pairs in groups.items()]

    def fresh(self, topic: Topic | None = None) -> None:
        """Empty the server and define the topic, which is the usual one if none is given."""
        self.client.flushall()
        self.broker.define(topic or self.topic)

    @contextmanager
    def watched(self, name: str) -> Iterator[None]:
        """Note the longest that one command kept the server from everybody else.

        Meanwhile the server has a core whenever it asks for one, if this process may arrange that. Otherwise the figure
        includes the time for which the server waited for a core.
        """
        self.client.slowlog_reset()
        self._schedule(os.SCHED_FIFO, 1)
        try:
            yield
        finally:
            self._schedule(os.SCHED_OTHER, 0)
        slow = [
            entry["duration"] / 1000
            for entry in self.client.slowlog_get(10_000)
            if entry["command"] != b"FLUSHALL"  # which is ours
        ]
        self.longest[name].append(max(slow, default=1.0))

    def _schedule(self, policy: int, priority: int) -> None:
        """Set the scheduling of all threads of the server, unless this process may not."""
        with suppress(PermissionError):
            for thread in Path(f"/proc/{self.server_pid}/task").iterdir():
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))

    def watch(self) -> None:
        """Note the longest command of a write, a batch read and a stream read, in runs whose rates do not count."""
        for name, work in {
            "write": self.spark_write,
            "batch read": self.spark_read,
            "stream read": self.spark_stream,
        }.items():
            with self.watched(name):
                work()

    def rate(self, work: Callable[[], object]) -> float:
        began, cpu = time.perf_counter(), self._cpu_seconds()
        work()
        self.cpu = self._cpu_seconds() - cpu
        return len(self.raws) / (time.perf_counter() - began)

    def _cpu_seconds(self) -> float:
        """Return the CPU time so far of the server, of the session and of its Python workers."""
        return cpu_of(self.server_pid, *descendants())

    # --- bare limits

    def bare_write(self) -> float:
        self.fresh()
        return self.rate(lambda: self.wire(self.commands))

    def each_write(self) -> float:
        self.fresh()
        return self.rate(self._each_write)

    def _each_write(self) -> None:
        for start in range(0, len(self.raws), CHUNK):
            pipeline = self.client.pipeline(transaction=False)
            for slot, raw in zip(
                self.slots[start : start + CHUNK], self.raws[start : start + CHUNK], strict=True
            ):
                pipeline.zadd(f"bare_{slot}", {raw: 1_800_000_000_000})
            pipeline.execute()

    def bare_read(self) -> float:
        commands = [
            packed("ZRANGE", f"{self.topic.name}_{slot}", first, first + PAGE - 1, "WITHSCORES")
            for slot in range(self.topic.slots)
            for first in range(0, self.client.zcard(f"{self.topic.name}_{slot}"), PAGE)
        ]
        return self.rate(lambda: self.wire(commands))

    def bare_consume(self) -> float:
        return self.rate(self._bare_consume)

    def _bare_consume(self) -> None:
        pop, now = self.client.register_script(POP), int(time.time() * 1000)
        for slot in range(self.topic.slots):
            keys = [f"bare_{slot}", f"taken_{slot}"]
            while rows := pop(keys=keys, args=[now]):
                self.client.zrem(keys[1], *rows)

    # --- ours

    def spark_write(self) -> float:
        return self._write(self.topic, self.frame, timeRange="1ms")

    def _write(self, topic: Topic, frame: Any, **options: str) -> float:
        self.fresh(topic)
        writer = frame.write.format("rmq").options(**self.where, **options).mode("append")
        rate = self.rate(writer.save)
        slots = range(topic.slots)
        if sum(self.broker.run(inspect.count(topic, slot)).store for slot in slots) != len(self.raws):
            raise RuntimeError("not all messages have arrived")
        return rate

    def write_json(self) -> float:
        """Write to a topic as it is without options: JSON texts, which get their canonical form."""
        return self._write(replace(self.topic, body="json"), self._texts(), timeRange="1ms")

    def write_bytes(self) -> float:
        """Write the bytes that JSON texts become: Redis orders messages of one time by their bytes."""
        return self._write(
            self.topic, self.ordered.select(self.ordered.value.cast("binary")), timeRange="1ms"
        )

    def write_ordered(self) -> float:
        """Write JSON texts whose keys are in order, as `ingest` makes them."""
        return self._write(replace(self.topic, body="json"), self.ordered, timeRange="1ms")

    def write_keyed(self) -> float:
        frame = self.frame.withColumn("key", self.functions.expr("substring(cast(value as string), 1, 48)"))
        return self._write(replace(self.topic, identity="key"), frame, timeRange="1ms")

    def write_times(self) -> float:
        return self._write_at_times("bytes", self.frame)

    def write_timestamps(self) -> float:
        return self._write_at_times("json", self._texts())

    def _write_at_times(self, body: Any, frame: Any) -> float:
        ms = self.functions.expr(f"{LATER_MS} + pmod(hash(value), 86400000)")
        topic = replace(self.topic, type=TopicType.FIXED_TIME, time_range_ms=None, body=body)
        return self._write(topic, frame.withColumn("fixed_time", self.functions.timestamp_millis(ms)))

    def write_ranges(self) -> float:
        ranges = self.functions.expr("1 + length(value) % 4")
        topic = replace(self.topic, time_range_ms=None)
        return self._write(topic, self.frame.withColumn("time_range", ranges))

    def write_bases(self) -> float:
        basis = self.functions.expr("substring(cast(value as string), 8, 4)")
        return self._write(self.topic, self.frame.withColumn("slot_basis", basis), timeRange="1ms")

    def write_entities(self) -> float:
        topic = replace(self.topic, body="json", slot_basis="source")
        return self._write(topic, self._texts(), timeRange="1ms")

    def _texts(self) -> Any:
        return self.frame.select(self.frame.value.cast("string").alias("value"))

    def spark_read(self) -> float:
        found = self.spark.read.format("rmq").options(**self.where, **self.per_task).load()
        return self.rate(found.write.format("noop").mode("overwrite").save)

    def stream(self, most: int, **how: Any) -> Any:
        """Start a query that consumes the topic into nothing."""
        self._queries += 1
        frame = self.spark.readStream.format("rmq").options(
            **self.where, **self.per_batch, maxMessagesPerTrigger=most
        )
        writer = frame.load().writeStream.format("noop")
        writer = writer.option("checkpointLocation", str(self.folder / f"query-{self._queries}"))
        return (writer.trigger(**how) if how else writer).start()

    def triggers(self, most: int) -> list[float]:
        """Consume what is there; return the seconds of each batch."""
        query = self.stream(most, availableNow=True)
        query.awaitTermination(600)
        batches = [progress for progress in query.recentProgress if progress["numInputRows"]]
        for progress in batches:
            for phase, ms in progress["durationMs"].items():
                self.phases[phase].append(ms)
        return [progress["durationMs"]["triggerExecution"] / 1000 for progress in batches]

    def spark_stream(self) -> float:
        seconds = self.triggers(self.batch)
        ledgers = (
            self.broker.run(inspect.audit_ledger(self.topic, slot)) for slot in range(self.topic.slots)
        )
        left = sum(ledger["acked"] for ledger in ledgers)
        if left != len(self.raws):
            raise RuntimeError(f"{left} of {len(self.raws)} messages were acknowledged")
        return len(self.raws) / sum(seconds)

    def small_batch(self) -> float:
        """Return the ms of a batch of so few messages that its fixed cost is all there is."""
        self.fresh()
        few = self.frame.limit(SMALL * SMALL_BATCHES).coalesce(1)
        few.write.format("rmq").options(**self.options).mode("append").save()
        return statistics.median(self.triggers(SMALL)) * 1000

    def backlog(self, count: int) -> float:
        """Return the messages per second at which a backlog is consumed with the default options."""
        self.fresh()
        self._fill(2 * DEFAULT_BATCH)
        self.triggers(DEFAULT_BATCH)  # Warms up.
        self._fill(count)
        return count / sum(self.triggers(DEFAULT_BATCH))

    def _fill(self, count: int) -> None:
        due = int(time.time() * 1000) - 100_000
        for first in range(0, count, CHUNK):
            pairs: list[Any] = []
            for n in range(first, min(first + CHUNK, count)):
                pairs += (due, b"%s%d" % (self.raws[n % len(self.raws)], n))
            slot = first // CHUNK % self.topic.slots
            self.wire([packed("ZADD", f"{self.topic.name}_{slot}", *pairs)])

    def large(self) -> float:
        """Read large bodies by batch and by stream; return the MB of the Python worker that needed most."""
        self.fresh()
        for n in range(LARGE):
            member = b"%d" % n + bytes(LARGE_BYTES)
            self.client.zadd(f"{self.topic.name}_{n % self.topic.slots}", {member: 1_000})
        workers = _python_workers()
        for worker in workers:
            (worker / "clear_refs").write_text("5")
        with self.watched("large bodies"):
            found = self.spark.read.format("rmq").options(**self.where).load()
            found.write.format("noop").mode("overwrite").save()
            # Smaller than what a slot holds: a part of each is copied, and the rest is looked at.
            self.triggers(LARGE // self.topic.slots // 2)
        return max(_peak_mb(worker) for worker in _python_workers())

    def many_slots(self) -> tuple[float, float]:
        """Return the commands per second of an idle query on a topic of many slots, and the ms of a batch of one."""
        few = self.topic
        self.topic = replace(few, slots=MANY_SLOTS)
        try:
            idle = self.idle()
            self.fresh()
            for n in range(SMALL_BATCHES):
                self.client.zadd(f"{self.topic.name}_{n * 4_999 % MANY_SLOTS}", {b"%d" % n: 1_000})
            return idle, statistics.median(self.triggers(1)) * 1000
        finally:
            self.topic = few

    def idle(self) -> float:
        """Return the commands per second of a query that has nothing to do."""
        self.fresh()
        query = self.stream(self.batch)
        try:
            deadline = time.monotonic() + 60
            while not query.recentProgress and time.monotonic() < deadline:
                time.sleep(0.1)
            before = self.client.info("stats")["total_commands_processed"]
            time.sleep(IDLE_SECONDS)
            return (self.client.info("stats")["total_commands_processed"] - before - 1) / IDLE_SECONDS
        finally:
            query.stop()


def _python_workers() -> list[Path]:
    """Return the Python processes of the session."""
    found = []
    for process in (Path(f"/proc/{pid}") for pid in descendants()):
        with suppress(OSError):
            if b"pyspark.daemon" in (process / "cmdline").read_bytes():
                found.append(process)
    return found


def _peak_mb(process: Path) -> float:
    with suppress(OSError):
        for line in (process / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


def measure(bench: Bench, works: Sequence[str], rounds: int) -> tuple[dict[str, list[float]], ...]:
    """Return the rates of each work, and its messages per second of CPU, round by round, without the first round."""
    rates: dict[str, list[float]] = {name: [] for name in works}
    by_cpu: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        if not number:
            print("\rwarming up", end="", file=sys.stderr, flush=True)
        for name in works:
            rate = getattr(bench, name)()
            if number:
                rates[name].append(rate)
                by_cpu[name].append(len(bench.raws) / bench.cpu)
        if not number:
            bench.phases.clear()
        print(f"\rround {number} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rates, by_cpu


def compared(work: Work, rates: dict[str, list[float]], by_cpu: dict[str, list[float]]) -> Row:
    """Return the row of a work beside its bare limit."""
    ratios, cpu = (
        [a / b for a, b in zip(found[work.ours], found[work.bare], strict=True)] for found in (rates, by_cpu)
    )
    ours, bare = (f"{statistics.median(rates[name]):,.0f}/s" for name in (work.ours, work.bare))
    ratio = statistics.median(ratios)
    relation = f"× {ratio:.2f} (by CPU {statistics.median(cpu):.2f})"
    values = {"ratio": ratio, "ratios": ratios, "cpu": cpu, "goal": work.goal}
    return Row(work.name, ours, bare, relation, f"≥ × {work.goal:g}", ratio >= work.goal, values)


def bounded(name: str, value: float, goal: float, *, at_most: bool = True, **values: Any) -> Row:
    """Return the row of a figure that has a bound, and no bare limit."""
    met = value <= goal if at_most else value >= goal
    shown = f"{'≤' if at_most else '≥'} {goal:,.0f}"
    return Row(name, f"{value:,.1f}", "-", "-", shown, met, {"value": value, "goal": goal, **values})


def main() -> int:
    parser = command_line("benchmarks.spark", __doc__, rounds=5)
    add = parser.add_argument
    add("--messages", type=int, default=1_000_000, help="messages per work (default a million)")
    add("--slots", type=int, default=16, help="slots of the topic (default 16)")
    add("--batch", type=int, default=250_000, help="messages per batch of the stream read")
    add("--backlog", type=int, default=5_000_000, help="messages of the backlog (default 5 million)")
    add("--redis", type=Path, help="server to measure with (default: that of the demo)")
    add("--only", default="", help="only works whose name contains one of these, with commas")
    options = parser.parse_args()
    works = [name for name in WORKS if any(part in name for part in options.only.split(","))]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rmq-spark-")))
        server = stack.enter_context(start_redis(folder, binary=options.redis))
        conf = {
            "spark.driver.memory": "2g",
            "spark.local.dir": str(folder),
            "spark.sql.shuffle.partitions": "2",
        }
        spark: Any = open_session("benchmarks.spark", master="local[2]", conf=conf)
        stack.callback(spark.stop)
        bench = Bench(server, spark, folder, options.messages, options.slots, options.batch)
        where = conditions(bench.client) | {"Spark": f"{spark.version}, local[2]"}
        print(told(where))
        print(
            f"{options.messages:,} messages of {len(bench.raws[0])} bytes, {options.slots} slots, "
            f"{options.rounds} interleaved rounds, medians"
        )
        rates, by_cpu = measure(bench, works, options.rounds)
        figures = [
            [
                name,
                f"{statistics.median(rates[name]):,.0f}",
                f"{1_000_000 / statistics.median(by_cpu[name]):.2f}",
            ]
            for name in works
        ]
        print(text(("work", "messages/s", "µs of CPU each"), figures), flush=True)
        rows = [
            compared(work, rates, by_cpu) for work in COMPARED if work.ours in works and work.bare in works
        ]
        if bench.phases:
            shown = {phase: statistics.median(times) for phase, times in bench.phases.items()}
            print("ms of a batch: " + ", ".join(f"{phase} {ms:.0f}" for phase, ms in shown.items()))
        if not options.only:
            for _ in range(options.rounds):
                bench.watch()
            rate = bench.backlog(options.backlog)
            with bench.watched("backlog"):
                bench.backlog(options.backlog)
            rows += [
                bounded(f"backlog of {options.backlog:,}, messages/s", rate, 450_000.0, at_most=False),
                bounded(
                    "large bodies, MB of a Python worker",
                    max(bench.large() for _ in range(options.rounds)),
                    300.0,
                ),
            ]
        rows += [
            bounded(f"longest command, {name} (ms)", statistics.median(longest), 15.0, rounds=longest)
            for name, longest in bench.longest.items()
        ]
        if not options.only:
            idle, one = bench.many_slots()
            rows += [
                bounded("idle query, commands/s", bench.idle(), 200.0),
                bounded(f"micro-batch of {SMALL} (ms)", bench.small_batch(), 250.0),
                bounded(f"idle query of {MANY_SLOTS} slots, commands/s", idle, 300.0),
                bounded(f"one message in {MANY_SLOTS} slots (ms)", one, 300.0),
            ]
    print(text(TITLES, cells(rows)))
    write(options.json, where, rates=rates, by_cpu=by_cpu, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
