"""``python -m benchmarks.peers.lone``: what one message costs this queue and others, which most queues mostly carry.

Single messages come one after the other, so many a second, and one worker process takes each as it comes. Costs are CPU by the
accounting of the processes, so that what else a machine does matters little, and medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.__main__ import PEERS, driven, version
from benchmarks.table import TITLES, Row, cells, conditions, markdown, server, text, told, write

COSTS = ("redis", "worker", "sender", "commands", "p50", "p99")
COLUMNS = ("queue", "version", "Redis µs", "worker µs", "sender µs", "commands", "call after ms, p50", "p99")
NOT_AT_LEAST_ONCE = ("huey", "rq")
GOALS = {
    "redis": (1.1, "CPU of Redis"),
    "worker": (1.0, "CPU of the worker"),
    "p50": (1.0, "time to the call, p50"),
}
"""What is compared with the best queue that delivers at least once -> the goal of the ratio, and its name."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.lone", description=__doc__)
    parser.add_argument("--messages", type=int, default=3_000, help="messages of each queue (default 3,000)")
    parser.add_argument("--rate", type=float, default=300, help="messages in a second (default 300)")
    parser.add_argument(
        "--only", nargs="*", choices=PEERS, default=PEERS, help="only these; none: this queue alone"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all queues (default 3)")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("rmq", *options.only)}
    with server() as (client, _):
        where = conditions(client)
        print(told(where), flush=True)
        environment = {
            "PEER_REDIS_PORT": client.connection_pool.connection_kwargs["port"],
            "PEER_RATE": options.rate,
            "PEER_PROCESSES": 1,
        }
        for _ in range(options.rounds):
            for name, results in found.items():
                results.append(driven(name, f"{name}_driver", (options.messages, 0), environment))
                print(f"  {name}: {results[-1].get('error') or 'measured'}", file=sys.stderr, flush=True)
    queues = {name: middle(results) for name, results in found.items()}
    as_table = markdown if options.markdown else text
    print(as_table(COLUMNS, [line(name, result) for name, result in queues.items()]))
    rows = compared(queues)
    if rows:
        print("\n" + as_table(TITLES, cells(rows)))
    write(options.json, where, queues=queues, rows=rows)
    return 0


def middle(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians; an ``error`` if there was one in any round."""
    wrong = [result for result in results if "error" in result]
    if wrong:
        return wrong[0]
    return {**results[0], **{what: statistics.median(result[what] for result in results) for what in COSTS}}


def line(name: str, result: dict[str, Any]) -> list[str]:
    """Return the row of one queue."""
    if "error" in result:
        return [name, result["error"], *["-"] * len(COSTS)]
    costs = [f"{result[what]:,.0f}" for what in COSTS[:4]]
    return [name, version(name), *costs, *(f"{result[what]:.2f}" for what in COSTS[4:])]


def compared(queues: dict[str, dict[str, Any]]) -> list[Row]:
    """Return our costs beside the least of the queues that deliver at least once."""
    ours = queues["rmq"]
    others = {
        name: result
        for name, result in queues.items()
        if name not in ("rmq", *NOT_AT_LEAST_ONCE) and "error" not in result
    }
    if "error" in ours or not others:
        return []
    rows = []
    for what, (goal, title) in GOALS.items():
        best = min(others, key=lambda name: others[name][what])
        ratio = ours[what] / others[best][what]
        unit = "ms" if what == "p50" else "µs"
        values = {"ratio": ratio, "best": best, "goal": goal}
        rows.append(
            Row(
                f"one message: {title}",
                f"{ours[what]:,.4g} {unit}",
                f"{others[best][what]:,.4g} {unit} ({best})",
                f"× {ratio:.3g}",
                f"≤ × {goal:g}",
                ratio <= goal,
                values,
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
