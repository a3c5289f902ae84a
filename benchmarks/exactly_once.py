"""``python -m benchmarks.exactly_once``: money is transferred while everything dies, and then every balance is compared.

Workers are killed at named points and at any moment, or stand still until others have their messages. The sender is
killed as well. Redis fails over without its last writes, and PostgreSQL crashes. Ends with 1 if a balance is wrong.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

from benchmarks.harness import command_line
from tests.e2e.bank.run import POINTS, Outcome, Plan, Run
from tests.e2e.bank.servers import FailingRedis
from tests.e2e.postgres import postgres

MEANINGS = {
    "transfers": "transfers to make",
    "accounts": "accounts between which they are made",
    "kills": "worker processes to kill",
    "fail_overs": "fail-overs of Redis, each of which loses the last writes",
    "restarts": "restarts of PostgreSQL: crashes and orderly ones in turn",
    "commands": "runrmqconsumers at the same time",
    "processes": "worker processes of each",
    "seconds": "seconds after which the rest is transferred in peace",
    "seed": "seed of the transfers",
}


def main() -> int:
    parser = command_line("benchmarks.exactly_once", __doc__)
    for one in fields(Plan):
        if one.name in MEANINGS:
            meaning = f"{MEANINGS[one.name]} (default {one.default})"
            flag = f"--{one.name.replace('_', '-')}"
            parser.add_argument(flag, type=type(one.default), default=one.default, help=meaning)
    parser.add_argument(
        "--without-once", action="store_true", help="show that balances are wrong without once"
    )
    given = vars(parser.parse_args())
    path, without = given.pop("json"), given.pop("without_once")
    plan = Plan(**given, once=not without)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {plan}")
    with (
        tempfile.TemporaryDirectory(prefix="rmq-bank-") as folder,
        postgres() as database,
        FailingRedis() as redis,
    ):
        outcome = Run(plan, Path(folder), redis, database, _progress).run()
    _print(plan, outcome)
    if path:
        path.write_text(
            json.dumps(
                {"plan": asdict(plan), "outcome": {**vars(outcome), "kills": dict(outcome.kills)}}, indent=2
            )
        )
    return 0 if outcome.is_right and _is_whole(plan, outcome) else 1


def _is_whole(plan: Plan, outcome: Outcome) -> bool:
    """Return whether everything that was planned has happened."""
    happened = (outcome.kills.total(), outcome.fail_overs, outcome.restarts)
    return all(
        had >= wanted
        for had, wanted in zip(happened, (plan.kills, plan.fail_overs, plan.restarts), strict=True)
    )


def _print(plan: Plan, outcome: Outcome) -> None:
    print(
        f"\n{plan.transfers} transfers in {outcome.seconds:.0f} s: {outcome.kills.total()} deaths of workers, "
        f"{outcome.stops} that stood still, {outcome.senders} deaths of the sender, {outcome.fail_overs} fail-overs that lost "
        f"{outcome.lost_bytes} bytes of writes, {outcome.restarts} restarts of PostgreSQL; "
        f"{outcome.skipped} deliveries of transfers that had been made, {outcome.replayed} replayed from Dead"
    )
    for point in (*POINTS.split(","), "from-outside"):
        print(f"  {point:<24}{outcome.kills[point]:>6}")
    print("\n".join(outcome.report.splitlines()[-20:]))
    if not _is_whole(plan, outcome):
        print("not everything that was planned has happened: raise --seconds")


def _progress(text: str) -> None:
    print(f"\r{text}  ", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
