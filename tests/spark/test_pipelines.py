"""Pipelines as `manage.py runrmqpipeline` runs them: in this process' session, and in processes of their own."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from django.test import override_settings

from django_rmq import connections, send_message, send_messages
from django_rmq.conf import get_config
from django_rmq.core.model.envelope import Envelope, decode_envelope, encode_envelope
from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import Topic
from django_rmq.signals import message_replayed
from django_rmq.spark.pipelines.pipeline import connection_options
from tests.spark.conftest import TOPICS, Run, Start, bury, run_pipeline, topic, waiting
from tests.support.brokers import Broker
from tests.support.servers import RedisCluster
from tests.support.workers import eventually, total

LATER = datetime(2096, 10, 2, tzinfo=UTC)


def test_pipelines_of_apps_are_listed_and_run(run: Run, broker: Broker) -> None:
    listed = run()
    assert "ingest " in listed and "Send what waits in one topic, doubled, to another." in listed
    send_messages("events", [1, 2, 3], priority=40)
    run("doubling", "events", "doubled", "--times", 3)
    assert waiting(broker, "doubled") == {"3": 50.0, "6": 50.0, "9": 50.0}
    assert "--times must be" in run("doubling", "events", "doubled", "--times", 0, code=2)
    assert "no topic 'nobody'" in run("doubling", "nobody", "doubled", code=2)
    assert "use --master or --remote, not both" in run(
        "ingest", "notes", "x.csv", "--master", "local", "--remote", "sc://x", code=2
    )


def test_a_cluster_is_read_written_and_consumed(
    spark: Any, redis_cluster: RedisCluster, prefix: str, tmp_path: Path
) -> None:
    rmq = {"REDIS": {"CLUSTER": redis_cluster.url}, "KEY_PREFIX": prefix, "TOPICS": TOPICS}
    (tmp_path / "rows.csv").write_text("n\n" + "\n".join(map(str, range(100))))
    with override_settings(RMQ=rmq):
        run_pipeline("ingest", "events", tmp_path / "rows.csv", "--priority", "50")
        files = ("--parquet", tmp_path / "out", "--checkpoint", tmp_path / "checkpoint")
        run_pipeline("consume", "events", *files, "--available-now")
        assert spark.read.parquet(str(tmp_path / "out")).count() == 100
        assert total(connections.get_broker(), topic("events"), "acked") == 100
        connections.close()


# --- the dead


def dead(broker: Broker, name: str) -> int:
    return sum(broker.count(topic(name), slot).dead for slot in range(topic(name).slots))


def die_again(broker: Broker, member: bytes) -> None:
    """Let a dead message of "events" be replayed and die."""
    for slot in range(topic("events").slots):
        if broker.replay(topic("events"), slot, [member]) == ["replayed"]:
            broker.bury(topic("events"), slot, [member], "again")


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let who has died just now be archived, too."""
    monkeypatch.setattr("django_rmq.spark.pipelines.archive.YOUNGEST_MS", 0)


@pytest.fixture
def announced() -> Iterator[list[dict[str, int]]]:
    """The outcomes of which receivers of ``message_replayed`` hear."""
    outcomes: list[dict[str, int]] = []

    def hear(**signal: Any) -> None:
        outcomes.append(signal["outcomes"])

    message_replayed.connect(hear)
    yield outcomes
    message_replayed.disconnect(hear)


def archived(spark: Any, path: Path) -> list[Any]:
    return list(spark.read.parquet(str(path)).collect())


def test_the_dead_are_archived_by_topic_and_date_and_then_deleted(
    run: Run, broker: Broker, spark: Any, tmp_path: Path, past: None
) -> None:
    send_messages("events", [{"n": n} for n in range(60)], priority=70)
    for n in range(10):
        send_message("keyed", {"n": n}, key=f"k{n}", fixed_time=LATER)
    assert (bury(broker, "events"), bury(broker, "keyed", "shop.Bang: it")) == (60, 10)
    out = tmp_path / "archive"
    assert "nothing was archived" in run("archive", out, "--dry-run")
    assert not out.exists()
    seventh = """topic = 'events' and body = '{"n":7}'"""
    told = run("archive", out, "events", "keyed", "--where", f"not ({seventh})")
    assert "69 messages written" in told and "events: 59 deleted" in told and "keyed: 10 deleted" in told
    assert (dead(broker, "events"), dead(broker, "keyed")) == (1, 0)
    assert total(broker, topic("events"), "removed_dead") == 59
    rows = archived(spark, out)
    assert len(rows) == 69 and {row.topic for row in rows} == {"events", "keyed"}
    keyed = [row for row in rows if row.topic == "keyed"]
    assert {(row.key, bytes(row.value)) for row in keyed} == {(f"k{n}", b'{"n":%d}' % n) for n in range(10)}
    assert {row.error for row in keyed} == {"shop.Bang: it"}
    assert list(out.glob("topic=events/date=2*/*.parquet"))
    # Later runs add what has died since, and nothing twice; a topic whose name looks like a number is none.
    send_messages("007", list(range(5)), priority=70)
    bury(broker, "007")
    told = run("archive", out)
    assert "events: 1 deleted" in told and "007: 5 deleted" in told
    assert len(archived(spark, out)) == 75 and dead(broker, "007") == 0


def test_what_another_program_has_put_into_dead_stays_and_hinders_nothing(
    run: Run, broker: Broker, tmp_path: Path, past: None
) -> None:
    send_messages("events", list(range(3)), priority=70)
    assert bury(broker, "events") == 3
    key = slot_keys(broker.prefix, "events", 0).dead
    broker.client.zadd(key, {"a": -7, "b": -math.inf, "c": 1e300})
    assert json.loads(run("report", "events", "--json"))["events"]["backlog"]["dead"] == 6
    assert "events: 3 deleted" in run("archive", tmp_path / "archive")
    assert dead(broker, "events") == 3


def test_fifo_messages_are_archived_and_come_back_with_and_without_a_key(
    run: Run, broker: Broker, spark: Any, tmp_path: Path, past: None
) -> None:
    send_messages("queue", [{"n": n} for n in range(5)])
    send_message("queue", {"n": 5}, key="five")
    send_message("queue", {"n": 6, "much": "x" * 2_000})
    assert bury(broker, "queue") == 7
    assert "7 deleted" in run("archive", tmp_path / "out")
    rows = archived(spark, tmp_path / "out")
    assert sorted((json.loads(row.value)["n"], row.key) for row in rows) == [
        *((n, None) for n in range(5)),
        (5, "five"),
        (6, None),
    ]
    assert "7 stored" in run("replay", "queue", "--archive", tmp_path / "out")
    out, checkpoint = tmp_path / "consumed", tmp_path / "checkpoint"
    run(
        *("consume", "queue", "--metadata", "--parquet", out, "--checkpoint", checkpoint),
        *("--available-now", "--schema", "n int"),
    )
    consumed = {(row.n, row.key) for row in spark.read.parquet(str(out)).collect()}
    assert consumed == {*((n, None) for n in (0, 1, 2, 3, 4, 6)), (5, "five")}


def test_an_archive_that_was_killed_before_it_deleted_has_nothing_twice(
    run: Run, broker: Broker, spark: Any, tmp_path: Path, past: None
) -> None:
    send_messages("events", list(range(20)), priority=70)
    bury(broker, "events")
    run("archive", tmp_path / "out", "events", "--keep")
    assert dead(broker, "events") == 20
    die_again(broker, b"5")
    told = run("archive", tmp_path / "out", "events")
    assert "1 messages written" in told and "events: 20 deleted" in told
    assert len(archived(spark, tmp_path / "out")) == 21 and dead(broker, "events") == 0


def test_what_dies_again_while_it_is_archived_stays(
    run: Run, broker: Broker, tmp_path: Path, past: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django_rmq.spark.pipelines.archive import Archive

    send_messages("events", list(range(20)), priority=70)
    bury(broker, "events")
    append = Archive._append

    def disturbed(self: Archive, *arguments: Any) -> int:
        written = append(self, *arguments)
        die_again(broker, b"5")
        return written

    monkeypatch.setattr(Archive, "_append", disturbed)
    told = run("archive", tmp_path / "out", "events")
    assert "19 deleted" in told and "1 changed" in told
    assert dead(broker, "events") == 1


def test_the_dead_are_replayed_by_a_predicate_from_dead_and_from_an_archive(
    run: Run, broker: Broker, tmp_path: Path, past: None, announced: list[dict[str, int]]
) -> None:
    send_messages("events", [{"n": n} for n in range(30)], priority=70)
    bury(broker, "events")
    few = "get_json_object(body, '$.n') < 10"
    assert "10 messages would be" in run("replay", "events", "--where", few, "--dry-run")
    assert announced == []
    run("replay", "events", "--where", "", code=1)
    run("replay", "events", "--archive", "", code=1)
    run("archive", tmp_path / "all", "events", "--where", "", code=1)
    assert dead(broker, "events") == 30
    assert "10 replayed" in run("replay", "events", "--where", few)
    assert dead(broker, "events") == 20 and set(waiting(broker, "events").values()) == {70.0}
    send_message("keyed", {"n": 1}, key="k", fixed_time=LATER, slot_basis="elsewhere")
    bury(broker, "keyed")
    run("archive", tmp_path / "out")
    revived = run("replay", "events", "--archive", tmp_path / "out", "--where", "reason = 'buried'")
    assert "20 stored" in revived and len(waiting(broker, "events")) == 30
    assert set(waiting(broker, "events").values()) == {70.0}
    assert "20 replaced" in run("replay", "events", "--archive", tmp_path / "out")
    assert announced == [{"replayed": 10}, {"replayed": 20}, {"merged": 20}]
    run("replay", "keyed", "--archive", tmp_path / "out")
    (copy,) = [
        entry for slot in range(2) for entry in broker.list_messages(topic("keyed"), slot, "store").entries
    ]
    assert (copy.member, decode_envelope(copy.envelope or b"").slot_basis) == (b"k", "elsewhere")
    assert "does not hold an archive" in run("replay", "events", "--archive", tmp_path / "none", code=2)


def test_a_report_counts_what_is_there(run: Run, broker: Broker) -> None:
    send_messages("notes", [{"n": n} for n in range(40)])
    send_messages("notes", [{"n": n} for n in range(10)])
    send_messages("events", list(range(7)), priority=70)
    bury(broker, "events")
    for n, error in enumerate(["connect to db: no answer", "a remark", "\u00dcber: no", " shop.Bang :"]):
        send_message("events", f"other {n}", priority=70)
        bury(broker, "events", error)
    printed = run("report", "--json")
    told = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    assert told["notes"]["backlog"]["store"] == 40 == sum(told["notes"]["depths"])
    assert told["notes"]["due"]["in 1 min"] == 40 and told["notes"]["merge_ratio"] == 0.2
    # A class is what all others take for one.
    assert told["events"]["dead"]["< 1 min"] == 11
    assert told["events"]["errors"] == {"shop.Boom": 7, "shop.Bang": 1}
    assert told["notes"]["skew"] >= 1
    assert "notes (range_merge, 4 slots): 40 store" in run("report", "notes")


PAGE = Path(__file__).parents[2] / "docs/how-to/spark-pipelines.md"


def reject(broker: Broker, name: str, error: str) -> int:
    """Let a worker take all that waits, and reject it; return how many there were."""
    rejected = 0
    for slot in range(topic(name).slots):
        taken = broker.prepare(topic(name), slot, "A", None, 100)
        if taken.deliveries:
            failures = [Failure(one.member, "rejected", None, error) for one in taken.deliveries]
            broker.rollback(topic(name), slot, taken.receipt, failures)
            rejected += len(failures)
    return rejected


def test_the_recipe_for_causes_counts_the_dead_and_those_of_an_archive(
    run: Run, broker: Broker, spark: Any, tmp_path: Path, past: None
) -> None:
    send_messages("events", list(range(12)), priority=40)
    assert reject(broker, "events", "shop.Down: no answer\nfrom there") == 12
    send_messages("events", list(range(4)), priority=40)
    assert bury(broker, "events", "by hand") == 4
    (recipe,) = re.findall(r"(cause = .*?)```", PAGE.read_text(), re.DOTALL)
    wanted = {("events", "rejected shop.Down", 8), ("events", "buried by hand", 4)}

    def count(dead: Any) -> set[tuple[Any, ...]]:
        names = {"dead": dead}
        exec(recipe, names)
        return {(row.topic, row.cause, row["count"]) for row in names["by_cause"].collect() if row.hour}

    options = {**connection_options(), "topic": "events", "queues": "dead", "includeMetadata": "true"}
    assert count(spark.read.format("rmq").options(**options).load()) == wanted
    run("archive", tmp_path / "archive", "events", "--keep")
    assert count(spark.read.parquet(str(tmp_path / "archive"))) == wanted


def test_the_recipe_for_lateness_reads_what_consume_has_written(
    run: Run, broker: Broker, spark: Any, tmp_path: Path
) -> None:
    now = broker.now_ms()
    for n in range(100):
        # Due from 1 to 100 minutes ago.
        envelope = encode_envelope(Envelope(b'{"n":%d}' % n))
        broker.send_replace(topic("keyed"), n % 2, [now - (n + 1) * 60_000], [b"k%d" % n], [envelope])
    run(
        *("consume", "keyed", "--metadata", "--schema", "n int", "--parquet", tmp_path / "out"),
        *("--checkpoint", tmp_path / "checkpoint", "--available-now"),
    )
    (recipe,) = re.findall(r"(late = messages.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"messages": spark.read.parquet(str(tmp_path / "out"))}
    exec(recipe, names)
    (hour,) = names["by_hour"].groupBy().sum("count(1)").collect()
    seconds = sorted(row.seconds for row in names["late"].collect())
    assert hour[0] == 100 == len(seconds) and 60 <= seconds[0] < 360
    assert seconds[-1] - seconds[0] == pytest.approx(99 * 60)


# --- signals


def test_sigterm_lets_the_batch_end_and_acknowledges_it(
    start: Start, redis_client: redis.Redis, prefix: str, tmp_path: Path
) -> None:
    work = Topic("work", get_config().topic("price-changes").type, slots=4, time_range_ms=1)
    broker = Broker(redis_client, prefix)
    process = start("consume", "work", "--parquet", tmp_path / "out", "--checkpoint", tmp_path / "checkpoint")
    eventually(lambda: "work" in broker.definitions(), "the definition", 100)
    for slot in range(4):
        broker.send_merge(work, slot, 0, [f"{slot}".encode()])
    eventually(lambda: "batch " in (tmp_path / "log").read_text(), "a batch", 200)
    process.send_signal(signal.SIGTERM)
    assert process.wait(150) == 0, (tmp_path / "log").read_text()
    assert "4 messages of work consumed" in (tmp_path / "log").read_text()
    # Long before the lease ends: what Spark had recorded was acknowledged at the end.
    assert total(broker, work, "acked") == 4


def test_sigterm_cancels_a_job(start: Start, tmp_path: Path) -> None:
    process = start("endless", tmp_path / "marker", "--master", "local[1]")
    eventually((tmp_path / "marker").exists, "a running task", 200)
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 0, (tmp_path / "log").read_text()
    assert "stopped" in (tmp_path / "log").read_text().splitlines()
