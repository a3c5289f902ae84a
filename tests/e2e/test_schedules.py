"""Each tick of a schedule becomes one message, though workers die and the clock moves over daylight saving.

SCHEDULES_SECONDS sets how long each season takes (default 6).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import Happened, Start, WorkerProcess
from tests.support.servers import RedisServer
from tests.support.workers import client_of, eventually

ROOT = Path(__file__).parents[2]
SECONDS = os.environ.get("SCHEDULES_SECONDS", "6")
HOURS = 10


def named(name: str, instant: datetime) -> str:
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
    done = subprocess.run(
        [*command, "--start", start, "--hours", str(HOURS), "--seconds", SECONDS],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120 + 2 * float(SECONDS),
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    begin = datetime.fromisoformat(start).astimezone(UTC)
    minutes = range(1, HOURS * 60 + 1)
    instants = [begin + timedelta(minutes=minute) for minute in minutes]
    wanted = {f"nightly@{nightly}", f"in-the-gap@{in_the_gap}"}
    wanted |= {named("half-hourly", one) for one in instants if one.minute % 30 == 0}
    wanted |= {named("interval", one) for one in instants if one.minute % 10 == 0}
    assert set(found["seen"]) == wanted
    # One more of each waits, written ahead; the ledger knows of no other message.
    assert len(found["waiting"]) == 4
    assert (found["written"], found["held"]) == (len(wanted) + 4, 0)
    assert found["deaths"] >= 10, found["deaths"]
    print({name: found[name] for name in ("written", "deaths", "delivered_again")})


EVERY_SECOND = {"every-second": {"TOPIC": "ticks", "EVERY": 1, "CATCH_UP": "none"}}
GOAL = 10.0
"""Within so many seconds schedules go on after Redis has lost its data; a busy machine gets five times as many."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server that the test may empty."""
    with RedisServer(save="") as found:
        yield found


def schedule_worker(start: Start, url: str, scheduled: dict[str, Any]) -> WorkerProcess:
    worker = start(
        "--threads",
        "2",
        url=url,
        WORKER_LISTENERS="scheduled",
        WORKER_SCHEDULES=json.dumps(scheduled),
    )
    worker.ready()
    return worker


@pytest.mark.parametrize("how", ["flushed", "restarted"])
def test_schedules_go_on_after_redis_has_lost_its_data(
    start: Start, server: RedisServer, happened: Happened, how: str
) -> None:
    workers = [schedule_worker(start, server.url, EVERY_SECOND) for _ in range(2)]
    happened.wait("done", 2)
    if how == "flushed":
        client_of(server.url).flushall()
    else:
        server.kill()
        server.start()
    before, lost = set(happened.lines("done")), time.monotonic()
    eventually(lambda: len(set(happened.lines("done")) - before) >= 3, "three more ticks", 5 * GOAL)
    print(f"three ticks after {time.monotonic() - lost:.1f} s")
    eventually(
        lambda: any("was not known to Redis; it is declared again" in one.output for one in workers),
        "a line of the log",
    )
    ticks = happened.lines("done")
    assert len(ticks) == len(set(ticks))
    for worker in workers:
        worker.signal()
        assert worker.wait(60) == 0
