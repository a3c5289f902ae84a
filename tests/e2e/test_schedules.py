"""Each tick of a schedule becomes one message, though workers die and the clock moves over daylight saving.

SCHEDULES_SECONDS sets how long each season takes (default 6).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

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
