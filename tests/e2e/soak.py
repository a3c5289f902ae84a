"""``python -m tests.e2e.soak``: thousands of deaths, hundreds of take-overs, a thousand promotions, a million messages in order.

The tests beside it do the same for a minute. Prints what each part found; ends with 1 if a promise broke.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.e2e.chaos import Chaos
from tests.e2e.in_order import InOrder
from tests.e2e.load import CHAOS, Load
from tests.e2e.processes import Start, WorkerProcess
from tests.e2e.promotions import cluster_promotions, promotions
from tests.e2e.takeover import GATED_GOAL_SECONDS, GOAL_SECONDS, takeovers
from tests.support.brokers import Broker
from tests.support.embedded_redis import start_redis
from tests.support.workers import client_of

Result = dict[str, Any]
"""What a part found; ``met``: whether all promises held."""


class Soak:
    """One server, the workers on it, and the parts of the soak."""

    def __init__(self, url: str, folder: Path, options: argparse.Namespace) -> None:
        self.url, self.folder, self.options = url, folder, options
        self.started: list[WorkerProcess] = []

    def close(self) -> None:
        for worker in self.started:
            worker.kill()

    def _starter(self, data: Path, prefix: str, **always: str) -> Start:
        def start(*arguments: str, **environment: str) -> WorkerProcess:
            self.started.append(WorkerProcess(data, self.url, prefix, *arguments, **environment, **always))
            return self.started[-1]

        return start

    def kills(self) -> Result:
        """Let workers die in runs of some hundreds, each with a ledger of its own."""
        counts: Counter[str] = Counter()
        points: Counter[str] = Counter()
        met = True
        while (dead := points.total()) < self.options.kills:
            data = self.folder / f"run{dead}"
            data.mkdir()
            prefix = f"{data.name}:"
            client = client_of(self.url)
            load = Load(Broker(client, prefix), data, CHAOS)
            start = self._starter(data, prefix, WORKER_ASYNC=str(int(self.options.is_async)))
            outcome = Chaos(start, load, data).run(min(400, self.options.kills - dead), 600)
            self.close()
            client.close()
            found = outcome.findings
            points += outcome.kills
            counts.update(
                {
                    "seconds": round(outcome.seconds),
                    "messages": outcome.messages,
                    "lost": len(found.lost),
                    "overlapping": len(found.overlapping),
                    "early": len(found.early),
                    "other": len(found.unexpected) + len(found.disordered),
                    "run twice": len(found.doubled),
                }
            )
            most_runs = max(found.runs[name] for name in load.poison)
            met &= found.clean() and outcome.died == len(load.poison) and most_runs <= 1 + CHAOS.max_retries
            progress(f"{points.total()} of {self.options.kills} deaths")
        return {"deaths": points.total(), **counts, "points": dict(sorted(points.items())), "met": met}

    def takeovers(self) -> Result:
        """Kill commands, and see how long their slots stand still."""
        kills = self.options.takeovers
        samples = takeovers(
            self.url, self.folder, "t:", kills, 2, lambda done: progress(f"{done} of {kills} take-overs")
        )
        result: Result = {"kills": kills, "met": True}
        for name, gated, goal in (
            ("nothing in flight", False, GOAL_SECONDS),
            ("something in flight", True, GATED_GOAL_SECONDS),
        ):
            seconds = sorted(sample.seconds for sample in samples if sample.gated is gated)
            p50, p99 = (seconds[min(len(seconds) - 1, int(len(seconds) * part))] for part in (0.5, 0.99))
            result[name] = {"slots": len(seconds), "p50": p50, "p99": p99, "max": seconds[-1], "goal": goal}
            result["met"] &= (seconds[-1] if gated else p99) <= goal
        return result

    def promotions(self) -> Result:
        """Cut replicas off, kill their primaries and promote them, and look for what they had confirmed."""
        count = self.options.promotions
        found = promotions(count, lambda done: progress(f"{done} of {count} promotions"))
        has_lost = found.confirmed_and_lost or found.receipts_twice
        return {**asdict(found), "met": bool(found.confirmed and found.deliveries_lost and not has_lost)}

    def clusters(self) -> Result:
        """Cut replicas of a Redis Cluster off, kill their primaries, and look for receipts that are given twice."""
        count = self.options.fail_overs
        found = cluster_promotions(count, lambda done: progress(f"{done} of {count} fail-overs"))
        return {**asdict(found), "met": found.deliveries_lost > 0 and not found.receipts_twice}

    def order(self) -> Result:
        """Fail one in a hundred messages, kill processes and commands, and compare the order of each entity."""
        broker = Broker(client_of(self.url), "o:")
        start = self._starter(self.folder, "o:")
        verdict = InOrder(start, broker, self.folder, self.options.ordered).run(600)
        return {**verdict, "met": verdict["in order"]}


PARTS: dict[str, Callable[[Soak], Result]] = {
    part.__name__: part for part in (Soak.kills, Soak.takeovers, Soak.promotions, Soak.clusters, Soak.order)
}


def progress(text: str) -> None:
    print(f"\r{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.soak", description=__doc__)
    add = parser.add_argument
    add("--only", choices=sorted(PARTS), help="only this part")
    add("--kills", type=int, default=2000, help="deaths under load (default 2000)")
    add("--async", action="store_true", dest="is_async", help="kills: with async listeners, which overlap")
    add("--takeovers", type=int, default=200, help="take-overs after kill -9 (default 200)")
    add("--promotions", type=int, default=1000, help="replicas promoted after a cut (default 1000)")
    add("--fail-overs", type=int, default=200, help="fail-overs of a Redis Cluster (default 200)")
    add("--ordered", type=int, default=1_000_000, help="messages of a strict fifo topic (default 1,000,000)")
    add("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args()
    results: dict[str, Result] = {}
    for name in [options.only] if options.only else PARTS:
        with (
            tempfile.TemporaryDirectory(prefix="rmq-soak-") as folder,
            start_redis(f"{folder}/redis") as server,
        ):
            soak = Soak(server.url, Path(folder), options)
            try:
                results[name] = PARTS[name](soak)
            finally:
                soak.close()
        print(f"\n{name}: {json.dumps(results[name], indent=2)}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    return 0 if all(part["met"] for part in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
