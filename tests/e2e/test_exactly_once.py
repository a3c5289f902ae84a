"""The short form of `make exactly-once`: each transfer happens exactly once, although processes die."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.bank.run import Outcome, Plan, Run
from tests.e2e.bank.servers import FailingRedis
from tests.e2e.postgres import postgres

PATIENCE = 900.0
"""Seconds for all deaths of a plan. It takes a minute on a machine that does nothing else."""


def run(plan: Plan, data: Path) -> Outcome:
    with postgres() as database, FailingRedis() as redis:
        outcome = Run(plan, data, redis, database, print).run()
    print(outcome)
    return outcome


@pytest.mark.proof
def test_every_transfer_happens_exactly_once_whoever_dies(tmp_path: Path) -> None:
    outcome = run(
        Plan(transfers=1_000, accounts=50, kills=60, fail_overs=2, restarts=1, seconds=PATIENCE), tmp_path
    )
    assert outcome.is_right, outcome.report
    assert outcome.kills.total() >= 60
    assert (outcome.fail_overs, outcome.restarts) == (2, 1)
    assert outcome.lost_bytes > 0
    assert outcome.skipped > 0, "some deliveries were of transfers that had been made"


@pytest.mark.proof
def test_without_once_balances_are_wrong(tmp_path: Path) -> None:
    outcome = run(
        Plan(
            transfers=600,
            accounts=50,
            kills=25,
            fail_overs=1,
            restarts=0,
            seconds=PATIENCE,
            once=False,
            # A process that dies here has made a transfer, which is made again.
            points="after-database-commit",
        ),
        tmp_path,
    )
    assert not outcome.is_right
    assert "balances are wrong" in outcome.report
