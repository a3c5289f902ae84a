"""A worker process that has lost a thread and can start no other one: whoever watches it notices, and another one takes over."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from django_rmq.core.model.topic import Topic, TopicType
from tests.e2e.processes import Happened, Start, environment_of, manage, named
from tests.support.brokers import Broker
from tests.support.embedded_server import free_port
from tests.support.workers import eventually, send

ONE_SLOT = Topic("one-slot", TopicType.RANGE_MERGE, slots=1, time_range_ms=1)


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=60) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        with error:
            return False


@pytest.mark.slow
def test_a_process_that_cannot_replace_a_thread_is_not_ready_and_gives_way(
    start: Start, broker: Broker, happened: Happened, tmp_path: Path, redis_url: str, prefix: str
) -> None:
    port = free_port()

    def health() -> int:
        environment = environment_of(tmp_path, redis_url, prefix, WORKER_LISTENERS="threadless")
        return manage(environment, "rmqhealth", "one-slot", "--patience", "0").returncode

    worker = start(
        "one-slot",
        *("-t", "1", "--health-addr", f"127.0.0.1:{port}"),
        WORKER_LISTENERS="threadless",
        WORKER_GIVE_UP="2",
    )
    worker.ready()
    eventually(lambda: is_ready(port), "being ready", 20)
    eventually(lambda: health() == 0, "being well", 20)
    first = worker.child()
    (tmp_path / "no-threads").touch()
    send(broker, ONE_SLOT, named("ends its thread", do="die"))
    happened.wait("begun", 1)
    send(broker, ONE_SLOT, named("comes after it"))
    eventually(lambda: not is_ready(port), "not being ready", 20)
    eventually(lambda: worker.children != [first], "the end of the process", 30)
    eventually(lambda: health() != 0, "being unwell", 20)
    assert not is_ready(port)
    assert "cannot be replaced" in worker.output
    (tmp_path / "no-threads").unlink()
    happened.wait("begun", 2)
    eventually(lambda: is_ready(port), "being ready again", 30)
    worker.end()


@pytest.mark.slow
def test_the_watchdog_counts_while_a_thread_cannot_be_replaced(
    start: Start, broker: Broker, happened: Happened, tmp_path: Path
) -> None:
    worker = start(
        "one-slot",
        *("-t", "1", "--watchdog", "8"),
        WORKER_LISTENERS="threadless",
        WORKER_GIVE_UP="600",
    )
    worker.ready()
    send(broker, ONE_SLOT, named("ends its thread", do="die"))
    happened.wait("begun", 1)
    (tmp_path / "no-threads").touch()
    send(broker, ONE_SLOT, named("comes after it"))
    assert worker.wait() == 4
    assert "has made no progress for 8 s" in worker.output
