"""``python -m benchmarks.soak``: thousands of deaths, hundreds of take-overs, a thousand promotions, a million messages in order.

Ends with 1 if a promise broke.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis

from benchmarks.harness import command_line
from example_project.demo.embedded_redis import EmbeddedRedis, start_redis
from tests.e2e.chaos import Chaos
from tests.e2e.in_order import InOrder
from tests.e2e.load import CHAOS, Load
from tests.e2e.processes import WorkerProcess
from tests.e2e.promotions import cluster_promotions, promotions
from tests.e2e.takeover import GATED_GOAL_SECONDS, GOAL_SECONDS, takeovers
from tests.support.brokers import Broker
from tests.support.workers import client_of


def main() -> int:
    parser = command_line("benchmarks.soak", __doc__)
    add = parser.add_argument
    add("--only", choices=sorted(PARTS), help="only this part")
    add("--kills", type=int, default=2000, help="deaths under load (default 2000)")
    add("--async", action="store_true", dest="is_async", help="kills: with async listeners, which overlap")
    add("--takeovers", type=int, default=200, help="take-overs after kill -9 (default 200)")
    add("--promotions", type=int, default=1000, help="replicas promoted after a cut (default 1000)")
    add("--fail-overs", type=int, default=200, help="fail-overs of a Redis Cluster (default 200)")
    add("--ordered", type=int, default=1_000_000, help="messages of a strict fifo topic (default 1,000,000)")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in [options.only] if options.only else PARTS:
        with tempfile.TemporaryDirectory(prefix="rmq-soak-") as directory:
            server = start_redis(f"{directory}/redis")
            try:
                print(
                    f"{name}: Python {platform.python_version()}, redis-py {redis.__version__}, {os.cpu_count()} cores"
                )
                results[name] = PARTS[name](server, Path(directory), options)
            finally:
                server.stop()
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    return 0 if all(part["met"] for part in results.values()) else 1


def _kills(server: EmbeddedRedis, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Let workers die in runs of some hundreds, each with a ledger of its own."""
    counts = dict.fromkeys(("deaths", "messages", "lost", "overlapping", "early", "other", "run_twice"), 0)
    total: dict[str, Any] = {**counts, "seconds": 0.0, "points": Counter(), "met": True}
    number = 0
    while total["deaths"] < options.kills:
        number += 1
        data = directory / f"run{number}"
        data.mkdir()
        started: list[WorkerProcess] = []

        def start(*arguments: str, _data: Path = data, _to: list = started, **environment: str) -> WorkerProcess:  # fmt: skip
            environment["WORKER_ASYNC"] = str(int(options.is_async))
            _to.append(WorkerProcess(_data, server.url, f"{_data.name}:", *arguments, **environment))
            return _to[-1]

        client = client_of(server.url)
        try:
            load = Load(Broker(client, f"{data.name}:"), data, CHAOS)
            outcome = Chaos(start, load, data).run(min(400, options.kills - total["deaths"]), 600)
        finally:
            for worker in started:
                worker.kill()
            client.close()
        found = outcome.findings
        total["deaths"] += outcome.kills.total()
        total["seconds"] += outcome.seconds
        total["messages"] += outcome.messages
        total["lost"] += len(found.lost)
        total["overlapping"] += len(found.overlapping)
        total["early"] += len(found.early)
        total["other"] += len(found.unexpected) + len(found.disordered)
        total["run_twice"] += len(found.doubled)
        total["points"] += outcome.kills
        ran_too_often = max(found.runs[name] for name in load.poison) > 1 + CHAOS.max_retries
        total["met"] &= found.clean() and outcome.died == len(load.poison) and not ran_too_often
        _progress(f"{total['deaths']} of {options.kills} deaths")
    print(
        f"\n{total['deaths']} deaths in {total['seconds']:.0f} s, {total['messages']} messages: "
        f"{total['lost']} lost, {total['overlapping']} overlapping, {total['early']} early, "
        f"{total['other']} otherwise wrong, {total['run_twice']} run twice"
    )
    for point, count in sorted(total["points"].items()):
        print(f"  {point:<20}{count:>6}")
    return total


def _takeovers(server: EmbeddedRedis, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Kill commands, and see how long their slots stand still."""
    samples = takeovers(
        server.url,
        directory / "worlds",
        "t:",
        options.takeovers,
        2,
        lambda done: _progress(f"{done} of {options.takeovers} take-overs"),
    )
    found: dict[str, Any] = {"kills": options.takeovers, "met": True}
    print(f"\n{'slots with':<22}{'slots':>8}{'p50 s':>8}{'p99 s':>8}{'max s':>8}{'goal s':>8}   met")
    for name, gated, goal in (
        ("nothing in flight", False, GOAL_SECONDS),
        ("something in flight", True, GATED_GOAL_SECONDS),
    ):
        seconds = sorted(sample.seconds for sample in samples if sample.gated is gated)
        p50, p99 = (seconds[min(len(seconds) - 1, int(len(seconds) * part))] for part in (0.5, 0.99))
        met = (seconds[-1] if gated else p99) <= goal
        found[name] = {"slots": len(seconds), "p50": p50, "p99": p99, "max": seconds[-1], "goal": goal}
        found["met"] &= met
        print(
            f"{name:<22}{len(seconds):>8}{p50:>8.2f}{p99:>8.2f}{seconds[-1]:>8.2f}{goal:>8.1f}   {'yes' if met else 'no'}"
        )
    return found


def _promotions(server: EmbeddedRedis, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Cut replicas off, kill their primaries and promote them, and look for what they had confirmed."""
    found = promotions(
        options.promotions, lambda done: _progress(f"{done} of {options.promotions} promotions")
    )
    print(
        f"\n{found.runs} promotions: {found.confirmed} messages confirmed, {found.confirmed_and_lost} of them lost; "
        f"{found.others_lost} others lost; {found.deliveries_lost} deliveries lost, {found.receipts_twice} receipts given twice"
    )
    met = (
        found.confirmed
        and found.deliveries_lost
        and not found.confirmed_and_lost
        and not found.receipts_twice
    )
    return {**asdict(found), "met": bool(met)}


def _clusters(server: EmbeddedRedis, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Cut replicas of a Redis Cluster off, kill their primaries, and look for receipts that are given twice."""
    found = cluster_promotions(
        options.fail_overs, lambda done: _progress(f"{done} of {options.fail_overs} fail-overs")
    )
    print(
        f"\n{found.runs} fail-overs of a Redis Cluster: {found.deliveries_lost} deliveries lost, "
        f"{found.receipts_twice} receipts given twice"
    )
    return {**asdict(found), "met": found.deliveries_lost > 0 and not found.receipts_twice}


def _order(server: EmbeddedRedis, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Fail one in a hundred messages of a hundred entities, kill processes and commands, and compare the order of each entity."""
    started: list[WorkerProcess] = []

    def start(*arguments: str, **environment: str) -> WorkerProcess:
        started.append(WorkerProcess(directory, server.url, "o:", *arguments, **environment))
        return started[-1]

    try:
        broker: Any = Broker(client_of(server.url), "o:")
        verdict = InOrder(start, broker, directory, options.ordered).run(600)
    finally:
        for worker in started:
            worker.kill()
    print(f"\n{json.dumps(verdict)}")
    return {**verdict, "met": verdict["in order"]}


def _progress(text: str) -> None:
    print(f"\r{text}", end="", file=sys.stderr, flush=True)


PARTS: dict[str, Callable[[EmbeddedRedis, Path, argparse.Namespace], dict[str, Any]]] = {
    "kills": _kills,
    "takeovers": _takeovers,
    "promotions": _promotions,
    "clusters": _clusters,
    "order": _order,
}

if __name__ == "__main__":
    sys.exit(main())
