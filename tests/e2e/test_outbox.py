"""Nothing that was committed is lost, and nothing that was rolled back is sent, however the sender or Redis dies."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e import mariadb, postgres
from tests.e2e.outbox_deaths import ANY, RELAY_POINTS, SENDER_POINTS
from tests.support.commands import completed
from tests.support.databases import SERVERS

PROGRAMS: dict[str, Callable[[], object]] = {"postgres": postgres.programs, "mariadb": mariadb.programs}
EXACT = {"lost": 0, "never_committed": 0, "outdated": 0, "left_in_the_outbox": 0}


def run(database: str, *arguments: str, program: str = "outbox_deaths") -> dict[str, Any]:
    if database in PROGRAMS:
        PROGRAMS[database]()
    command = [sys.executable, "-m", f"tests.e2e.{program}", "--database", database, *arguments]
    done = completed(command, seconds=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    print(found)
    return found


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_senders_that_die_lose_nothing_that_was_committed(database: str) -> None:
    found = run(database, "--deaths", "51")
    assert {name: found[name] for name in EXACT} == EXACT
    assert set(found["died"]) >= {*SENDER_POINTS, *RELAY_POINTS, ANY}
    assert found["intended"] > 50 and found["rolled_back"] > 10


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_commits_without_redis_arrive_with_their_last_values(database: str) -> None:
    found = run(database, "--outage", "600", "--seconds", "4")
    assert {name: found[name] for name in EXACT} == EXACT
    assert found["commits_without_redis"] > 300


@pytest.mark.proof
@pytest.mark.parametrize("database", list(SERVERS))
def test_a_relay_that_stands_still_for_longer_than_its_transaction_may_costs_nothing(database: str) -> None:
    """Two commands share the rows; SIGSTOP stops one of them, and what it held has newer states when it goes on."""
    found = run(database, "--rows", "5000", program="outbox_relays")
    names = ("lost", "strange", "outdated", "left_in_the_outbox", "tracebacks", "ended_early")
    wanted = dict.fromkeys(names, 0)
    assert {name: found[name] for name in wanted} == wanted
    assert found["exit_codes"] == [0, 0]
    assert found["held_by_the_one_that_stood_still"] > 0
    assert max(found["peak_mb"]) < 150
