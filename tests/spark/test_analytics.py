"""`deaths`: what dies of which cause, when and where; and the recipe for how late messages are."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from django_rmq import send_messages
from django_rmq.core.model.envelope import Envelope, encode_envelope
from django_rmq.core.model.replies import Failure
from tests.spark.conftest import Run, topic
from tests.support.brokers import Broker

PAGE = Path(__file__).parents[2] / "docs/how-to/spark-pipelines.md"


def told(printed: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(printed[printed.index("[") : printed.rindex("]") + 1])
    return found


def reject(broker: Broker, name: str, worker: str, error: str) -> int:
    """Let a worker take all that waits, and reject it; return how many there were."""
    rejected = 0
    for slot in range(topic(name).slots):
        taken = broker.prepare(topic(name), slot, worker, None, 100)
        if taken.deliveries:
            failures = [Failure(one.member, "rejected", None, error) for one in taken.deliveries]
            broker.rollback(topic(name), slot, taken.receipt, failures)
            rejected += len(failures)
    return rejected


def test_the_dead_are_counted_by_cause_hour_and_worker(run: Run, broker: Broker, tmp_path: Path) -> None:
    send_messages("kept", list(range(12)), priority=40)
    assert reject(broker, "kept", "shop-1:7", "shop.Down: no answer\nfrom there") == 12
    send_messages("kept", list(range(100, 105)), priority=40)
    assert reject(broker, "kept", "shop-2:9", "shop.Bad: 1") == 5
    send_messages("events", list(range(4)), priority=40)
    for slot in range(4):
        names = [entry.member for entry in broker.list_messages(topic("events"), slot, "store").entries]
        broker.bury(topic("events"), slot, names, "by hand")

    by_cause = told(run("deaths", "--json"))
    assert by_cause == [
        {"topic": "kept", "cause": "rejected shop.Down", "messages": 12},
        {"topic": "kept", "cause": "rejected shop.Bad", "messages": 5},
        {"topic": "events", "cause": "buried by hand", "messages": 4},
    ]
    by_worker = told(run("deaths", "kept", "events", "--by", "worker,topic", "--json"))
    assert [tuple(row.values()) for row in by_worker] == [
        ("shop-1:7", "kept", 12),
        ("shop-2:9", "kept", 5),
        ("unknown", "events", 4),
    ]
    hours = told(run("deaths", "--by", "hour,day", "--json"))
    assert sum(row["messages"] for row in hours) == 21 and all(
        row["hour"].startswith(row["day"]) and row["hour"].endswith(":00") for row in hours
    )
    lines = run("deaths", "--where", "body < 3 and reason = 'rejected'", "--top", 1).splitlines()
    assert lines == ["topic  cause               messages", "kept   rejected shop.Down         3"]
    assert "--by must be among" in run("deaths", "--by", "cause,colour", code=2)

    time.sleep(1.1)  # what has just died is not archived yet
    run("archive", tmp_path / "archive")
    assert run("deaths", "--json").strip() == "[]"
    kept = ("deaths", "--archive", tmp_path / "archive")
    assert told(run(*kept, "--json")) == by_cause
    assert told(run(*kept, "events", "--json")) == by_cause[2:]
    assert "leave out --by worker" in run(*kept, "--by", "worker", code=2)
    assert "does not hold an archive" in run("deaths", "--archive", tmp_path / "none", code=2)


def test_the_recipe_for_lateness_reads_what_consume_has_written(
    run: Run, broker: Broker, spark: Any, tmp_path: Path
) -> None:
    now = broker.now_ms()
    for n in range(100):
        # Due from 1 to 100 minutes ago.
        envelope = encode_envelope(Envelope(b'{"n":%d}' % n))
        broker.send_replace(topic("keyed"), n % 2, [now - (n + 1) * 60_000], [b"k%d" % n], [envelope])
    run(
        *(
            "consume",
            "keyed",
            "--metadata",
            "--parquet",
            tmp_path / "out",
            "--checkpoint",
            tmp_path / "checkpoint",
        ),
        *("--available-now", "--schema", "n int"),
    )
    (recipe,) = re.findall(r"(late = messages.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"messages": spark.read.parquet(str(tmp_path / "out"))}
    exec(recipe, names)
    (hour,) = names["by_hour"].groupBy().sum("count(1)").collect()
    seconds = sorted(row.seconds for row in names["late"].collect())
    assert hour[0] == 100 == len(seconds) and 60 <= seconds[0] < 360
    assert seconds[-1] - seconds[0] == pytest.approx(99 * 60)
