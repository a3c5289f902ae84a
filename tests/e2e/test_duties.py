"""What workers do beside consuming, though they die, a database hangs, and the clock moves over daylight saving."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.postgres import postgres
from tests.e2e.processes import WORK, Happened, Start, environment_of, manage, named
from tests.support.brokers import Broker
from tests.support.commands import completed
from tests.support.workers import eventually, send


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


SECONDS = os.environ.get("SCHEDULES_SECONDS", "6")
HOURS = 10


def tick_of(name: str, instant: datetime) -> str:
    return f"{name}@{instant.strftime('%Y-%m-%dT%H:%M:%SZ')}"


@pytest.mark.parametrize(
    ("start", "nightly", "in_the_gap"),
    [
        # At two o'clock the clock is set to three: 02:30 does not exist, and runs when it would have been.
        ("2026-03-28T20:00:00+00:00", "2026-03-29T01:00:00Z", "2026-03-29T01:00:00Z"),
        # At three o'clock the clock is set back to two: 02:30 exists twice, and runs the first time.
        ("2026-10-24T20:00:00+00:00", "2026-10-25T02:00:00Z", "2026-10-25T00:30:00Z"),
    ],
    ids=["spring", "autumn"],
)
def test_each_tick_becomes_one_message_though_workers_die_and_the_clock_changes(
    redis_url: str, prefix: str, start: str, nightly: str, in_the_gap: str
) -> None:
    command = [sys.executable, "-m", "tests.e2e.schedule_workers", "--url", redis_url, "--prefix", prefix]
    command += ["--start", start, "--hours", str(HOURS), "--seconds", SECONDS]
    done = completed(command, seconds=120 + 2 * float(SECONDS))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    begin = datetime.fromisoformat(start).astimezone(UTC)
    minutes = range(1, HOURS * 60 + 1)
    instants = [begin + timedelta(minutes=minute) for minute in minutes]
    wanted = {f"nightly@{nightly}", f"in-the-gap@{in_the_gap}"}
    wanted |= {tick_of("half-hourly", one) for one in instants if one.minute % 30 == 0}
    wanted |= {tick_of("interval", one) for one in instants if one.minute % 10 == 0}
    assert set(found["seen"]) == wanted
    # One more of each waits, written ahead; the ledger knows of no other message.
    assert len(found["waiting"]) == 4
    assert (found["written"], found["held"]) == (len(wanted) + 4, 0)
    assert found["deaths"] >= 10, found["deaths"]
    print({name: found[name] for name in ("written", "deaths", "delivered_again")})
