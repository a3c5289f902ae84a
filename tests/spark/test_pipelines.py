"""Pipelines as `manage.py runrmqpipeline` runs them: in this process' session, and in processes of their own."""

from __future__ import annotations

import json
import re
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.test import override_settings

from django_rmq import connections, send_message, send_messages
from django_rmq.conf import get_config
from django_rmq.core.model.envelope import decode_envelope
from django_rmq.core.model.topic import Topic
from tests.spark.conftest import TOPICS, Run, Start, topic, waiting
from tests.support.brokers import Broker
from tests.support.servers import RedisCluster
from tests.support.workers import eventually, live, total

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


def test_files_are_ingested_merged_and_by_rule(run: Run, broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("sku,price\na,1.5\nb,2\na,1.5\nc,\n")
    foretold = run("ingest", "notes", tmp_path / "rows.csv", "--dry-run")
    assert "4 rows, 3 messages" in foretold and '"sku":"c"' in foretold and "nothing was sent" in foretold
    assert waiting(broker, "notes") == {}
    run("ingest", "notes", tmp_path / "rows.csv", "--where", "double(price) > 1")
    assert set(waiting(broker, "notes")) == {'{"price":"1.5","sku":"a"}', '{"price":"2","sku":"b"}'}
    (tmp_path / "events.json").write_text(
        "\n".join(json.dumps(row) for row in [{"n": 1, "p": 30}, {"n": 1, "p": 90}, {"n": 2, "p": 20}])
    )
    run("ingest", "events", tmp_path / "events.json", "--select", "n as item", "--priority", "p")
    assert waiting(broker, "events") == {'{"item":1}': 90.0, '{"item":2}': 20.0}
    assert "--priority is missing" in run("ingest", "events", tmp_path / "events.json", code=2)
    run("ingest", "usual", tmp_path / "events.json", "--select", "n as item")
    assert waiting(broker, "usual") == {'{"item":1}': 500.0, '{"item":2}': 500.0}
    assert "use --format" in run("ingest", "notes", tmp_path, code=2)
    assert run("ingest", "notes", tmp_path / "none.csv", code=1).startswith("[PATH_NOT_FOUND]")
    bad = run("ingest", "events", tmp_path / "events.json", "--priority", "3", code=2)
    assert "priority must be from 17" in bad and "\n" not in bad.splitlines()[-1]


def test_rows_of_csv_keep_their_text_whatever_else_is_in_the_file(
    run: Run, broker: Broker, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("sku,zip,price\n00123,01234,10.50\n")
    run("ingest", "notes", tmp_path / "rows.csv")
    (tmp_path / "more.csv").write_text("sku,zip,price\n00123,01234,10.50\nx1,a,b\n")
    run("ingest", "notes", tmp_path / "more.csv")
    kept = '{"price":"10.50","sku":"00123","zip":"01234"}'
    assert set(waiting(broker, "notes")) == {kept, '{"price":"b","sku":"x1","zip":"a"}'}
    run("ingest", "doubled", tmp_path / "rows.csv", "--priority", "50", "--option", "inferSchema=true")
    assert set(waiting(broker, "doubled")) == {'{"price":10.5,"sku":123,"zip":1234}'}


def test_a_topic_is_consumed_into_files_and_each_batch_is_there_once(
    run: Run, broker: Broker, spark: Any, tmp_path: Path
) -> None:
    send_messages("events", [{"n": n} for n in range(500)], priority=40)
    arguments = ["consume", "events", "--parquet", tmp_path / "out", "--schema", "n int"]
    arguments += ["--checkpoint", tmp_path / "checkpoint", "--available-now", "--max-messages", 200]
    told = run(*arguments)
    assert "500 messages of events consumed" in told
    assert re.search(r"batch 0: \d+ messages, \d+/s, \d+ wait\n", told), told
    found = sorted(row.n for row in spark.read.parquet(str(tmp_path / "out")).collect())
    assert found == list(range(500))
    assert total(broker, topic("events"), "acked") == 500 and live(broker, topic("events")) == 0
    send_messages("events", ["later"], priority=40)
    assert "1 messages of events consumed" in run(*arguments)
    assert "--checkpoint is missing" in run("consume", "events", "--parquet", tmp_path / "out", code=2)
    assert "--each" in run("consume", "events", "--each", "nowhere.at", "--checkpoint", "x", code=2)


def test_a_cluster_is_read_written_and_consumed(
    spark: Any, redis_cluster: RedisCluster, prefix: str, tmp_path: Path
) -> None:
    rmq = {"REDIS": {"CLUSTER": redis_cluster.url}, "KEY_PREFIX": prefix, "TOPICS": TOPICS}
    (tmp_path / "rows.csv").write_text("n\n" + "\n".join(map(str, range(100))))
    with override_settings(RMQ=rmq):
        call_command("runrmqpipeline", "ingest", "events", str(tmp_path / "rows.csv"), "--priority", "50")
        call_command(
            *("runrmqpipeline", "consume", "events", "--parquet", str(tmp_path / "out")),
            *("--checkpoint", str(tmp_path / "checkpoint"), "--available-now"),
        )
        assert spark.read.parquet(str(tmp_path / "out")).count() == 100
        assert total(connections.get_broker(), topic("events"), "acked") == 100
        connections.close()


# --- the dead


def kill(broker: Broker, name: str, error: str = "shop.Boom: no") -> int:
    """Bury all that waits; return how many."""
    killed = 0
    for slot in range(topic(name).slots):
        names = [
            entry.member for entry in broker.list_messages(topic(name), slot, "store", limit=1_000).entries
        ]
        killed += len(broker.bury(topic(name), slot, names, error))
    return killed


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


def archived(spark: Any, path: Path) -> list[Any]:
    return list(spark.read.parquet(str(path)).collect())


def test_the_dead_are_archived_by_topic_and_date_and_then_deleted(
    run: Run, broker: Broker, spark: Any, tmp_path: Path, past: None
) -> None:
    send_messages("events", [{"n": n} for n in range(60)], priority=70)
    for n in range(10):
        send_message("keyed", {"n": n}, key=f"k{n}", fixed_time=LATER)
    assert (kill(broker, "events"), kill(broker, "keyed", "shop.Bang: it")) == (60, 10)
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
    kill(broker, "007")
    told = run("archive", out)
    assert "events: 1 deleted" in told and "007: 5 deleted" in told
    assert len(archived(spark, out)) == 75 and dead(broker, "007") == 0


def test_fifo_messages_are_archived_and_come_back_with_and_without_a_key(
    run: Run, broker: Broker, spark: Any, tmp_path: Path, past: None
) -> None:
    send_messages("queue", [{"n": n} for n in range(5)])
    send_message("queue", {"n": 5}, key="five")
    send_message("queue", {"n": 6, "much": "x" * 2_000})
    assert kill(broker, "queue") == 7
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
    kill(broker, "events")
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
    kill(broker, "events")
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
    run: Run, broker: Broker, tmp_path: Path, past: None
) -> None:
    send_messages("events", [{"n": n} for n in range(30)], priority=70)
    kill(broker, "events")
    few = "get_json_object(body, '$.n') < 10"
    assert "10 messages would be" in run("replay", "events", "--where", few, "--dry-run")
    assert "10 replayed" in run("replay", "events", "--where", few)
    assert dead(broker, "events") == 20 and set(waiting(broker, "events").values()) == {70.0}
    send_message("keyed", {"n": 1}, key="k", fixed_time=LATER, slot_basis="elsewhere")
    kill(broker, "keyed")
    run("archive", tmp_path / "out")
    revived = run("replay", "events", "--archive", tmp_path / "out", "--where", "reason = 'buried'")
    assert "20 stored" in revived and len(waiting(broker, "events")) == 30
    assert set(waiting(broker, "events").values()) == {70.0}
    assert "20 replaced" in run("replay", "events", "--archive", tmp_path / "out")
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
    kill(broker, "events")
    printed = run("report", "--json")
    told = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    assert told["notes"]["backlog"]["store"] == 40 == sum(told["notes"]["depths"])
    assert told["notes"]["due"]["in 1 min"] == 40 and told["notes"]["merge_ratio"] == 0.2
    assert told["events"]["dead"]["< 1 min"] == 7 and told["events"]["errors"] == {"shop.Boom": 7}
    assert told["notes"]["skew"] >= 1
    assert "notes (range_merge, 4 slots): 40 store" in run("report", "notes")


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
