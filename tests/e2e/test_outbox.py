"""Nothing that was committed is lost, and nothing that was rolled back is sent, however the sender or Redis dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.outbox_processes import ANY, RELAY_POINTS, SENDER_POINTS
from tests.e2e.postgres import programs

ROOT = Path(__file__).parents[2]
EXACT = {"lost": 0, "never_committed": 0, "outdated": 0, "left_in_the_outbox": 0}


def run(database: str, *arguments: str) -> dict[str, Any]:
    if database == "postgres":
        programs()
    command = [sys.executable, "-m", "tests.e2e.outbox_deaths", "--database", database, *arguments]
    done = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    print(found)
    return found


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_senders_that_die_lose_nothing_that_was_committed(database: str) -> None:
    found = run(database, "--deaths", "102")
    assert {name: found[name] for name in EXACT} == EXACT
    assert set(found["died"]) >= {*SENDER_POINTS, *RELAY_POINTS, ANY}
    assert found["intended"] > 50 and found["rolled_back"] > 10


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_commits_without_redis_arrive_with_their_last_values(database: str) -> None:
    found = run(database, "--outage", "600", "--seconds", "4")
    assert {name: found[name] for name in EXACT} == EXACT
    assert found["commits_without_redis"] > 300
