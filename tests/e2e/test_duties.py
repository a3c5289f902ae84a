"""What worker processes do beside consuming."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import pytest

from django_rmq.core.model.topic import Topic, TopicType
from tests.e2e.postgres import postgres
from tests.e2e.processes import Happened, Start, environment_of, manage, named
from tests.support.brokers import Broker
from tests.support.workers import eventually, send

WORK = Topic("work", TopicType.RANGE_MERGE, slots=4, time_range_ms=1)


def test_a_database_that_hangs_stops_no_schedule_and_one_that_restarts_is_one_line_of_the_log(
    start: Start, tmp_path: Path, redis_url: str, prefix: str, happened: Happened
) -> None:
    options = {
        "WORKER_LISTENERS": "scheduled",
        "WORKER_SCHEDULES": json.dumps({"every-second": {"TOPIC": "ticks", "EVERY": 1, "CATCH_UP": "none"}}),
    }
    with postgres() as server:
        options["WORKER_DATABASE"] = json.dumps(server.settings)
        migrated = manage(environment_of(tmp_path, redis_url, prefix, **options), "migrate", "django_rmq")
        assert migrated.returncode == 0, migrated.stderr
        worker = start("--threads", "2", "ticks", **options)
        worker.ready()
        happened.wait("done", 3)
        # The relay asks four times in a second, and does not get an answer.
        with server.frozen():
            before = len(happened.lines("done"))
            eventually(lambda: len(happened.lines("done")) >= before + 20, "twenty ticks")
        assert "A background task failed" not in worker.output
        server.restart()
        eventually(lambda: "A background task failed (database default: " in worker.output, "the line")
        seen = len(happened.lines("done"))
        eventually(lambda: len(happened.lines("done")) > seen + 2, "ticks after the restart")
        worker.end()
    assert "Traceback" not in worker.output


@pytest.mark.parametrize("engine", ["postgresql", "mysql"])
def test_a_worker_starts_although_a_database_takes_connections_and_never_answers(
    start: Start, broker: Broker, happened: Happened, engine: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = {"HOST": "127.0.0.1", "PORT": str(silent.getsockname()[1])}
        database = {"ENGINE": f"django.db.backends.{engine}", "NAME": "shop", "USER": "shop", **address}
        began = time.monotonic()
        worker = start(WORKER_LISTENERS="effects", WORKER_DATABASE=json.dumps(database))
        worker.ready()
        assert time.monotonic() - began < 25  # it waits 5 s for the database
        assert (
            "Database default cannot be asked whether its migrations are applied: it does not answer within 5 s"
            in worker.output
        )
        # One worker process, and none that still waits for the answer.
        worker.child()
        send(broker, WORK, named("x"))
        happened.wait("done", 1)
        worker.signal(signal.SIGTERM)
        worker.wait(60)
    assert "Traceback" not in worker.output
