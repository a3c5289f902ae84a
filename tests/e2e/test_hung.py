"""Workers whose listeners do not return: what people and probes see, and who gets the other messages."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from django_rmq.core.model.topic import Topic, TopicType
from tests.e2e.processes import Happened, Start, environment_of, manage, named
from tests.support.brokers import Broker
from tests.support.workers import audit, eventually, live, send, total

HUNG = Topic("shared", TopicType.RANGE_MERGE, slots=4, time_range_ms=1, serial=False)
WORK = Topic("work", TopicType.RANGE_MERGE, slots=4, time_range_ms=1)
TOPICS = ("work", "shared")
PATIENCE = 120.0


@pytest.mark.slow
def test_messages_behind_hung_listeners_are_late_and_workers_with_free_threads_get_them(
    start: Start, broker: Broker, happened: Happened, tmp_path: Path, redis_url: str, prefix: str
) -> None:
    environment = environment_of(tmp_path, redis_url, prefix)
    workers = [start(*TOPICS, "--threads", "4") for _ in range(2)]
    for worker in workers:
        worker.ready()
    send(broker, HUNG, named(*(f"hung {n}" for n in range(40)), do="hang"))
    happened.wait("begun", 8)
    send(broker, WORK, named(*range(500)))

    def stats() -> dict[str, dict[str, Any]]:
        told = manage(environment, "rmqstats", *TOPICS, "--json")
        assert told.returncode == 0, told.stderr
        return {row["topic"]: row for row in json.loads(told.stdout)}

    def is_late() -> bool:
        found = manage(environment, "rmqhealth", *TOPICS, "--max-age", "5s", "--max-running", "5s", "--json")
        troubles = {
            (one["check"], one["topic"]) for one in json.loads(found.stdout)["findings"] if not one["ok"]
        }
        wanted = {("age", "work"), ("age", "shared"), ("running", "shared")}
        assert (found.returncode == 1) == bool(troubles)
        return wanted <= troubles

    eventually(is_late, "health being red", PATIENCE)
    rows = stats()
    assert (rows["work"]["due"], rows["work"]["running"]) == (500, 0)
    assert (rows["shared"]["due"], rows["shared"]["running"]) == (32, 8)
    assert rows["work"]["oldest_due_seconds"] > 5 and rows["shared"]["oldest_running_seconds"] > 5
    assert rows["work"]["oldest_running_seconds"] is None

    start("work", "--threads", "4").ready()
    eventually(lambda: total(broker, WORK, "committed") == 500, "a worker with free threads", PATIENCE)
    assert total(broker, HUNG, "committed") == 0

    happened.go()
    eventually(lambda: live(broker, HUNG) == 0, "the end of all", PATIENCE)
    assert len(happened.lines("done")) == 540
    for topic in (HUNG, WORK):
        assert total(broker, topic, "failed") == total(broker, topic, "stale") == 0
    for worker in workers:
        assert "came too late" not in worker.output
        assert "No thread is free for topics: shared, work" in worker.output


def test_a_worker_without_a_free_thread_is_not_ready_and_gives_up_its_slots_until_one_is_free(
    start: Start, broker: Broker, happened: Happened
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10):
                return True
        except urllib.error.HTTPError as error:
            return error.code != 503

    wide = replace(WORK, slots=4)
    worker = start(
        "work", "--threads", "2", "--health-addr", f"127.0.0.1:{port}", WORKER_LISTENERS="impatient"
    )
    worker.ready()
    eventually(is_ready, "being ready", PATIENCE)
    send(broker, wide, named(*range(40), do="hang"))
    happened.wait("begun", 2)
    eventually(lambda: not is_ready(), "being full", PATIENCE)
    assert sum(ledger.prepare for ledger in audit(broker, wide)) == 2
    happened.go()
    eventually(is_ready, "being ready again", PATIENCE)
    eventually(lambda: live(broker, wide) == 0, "the end of all", PATIENCE)
    worker.end()
