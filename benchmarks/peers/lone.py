"""``python -m benchmarks.peers.lone``: what one message costs this queue and others, which most queues mostly carry.

Single messages come one after the other, so many a second, and one worker process takes each as it comes. Costs are CPU by the
accounting of the processes, so that what else a machine does matters little, and medians of the rounds.
"""

from __future__ import annotations

import sys

from benchmarks.peers.__main__ import PEERS
from benchmarks.peers.harness import (
    Result,
    combine,
    command_line,
    driven,
    measure_in_rounds,
    publish,
    ratio_row,
    shared_redis,
    version,
)
from benchmarks.table import Row

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
    parser = command_line("benchmarks.peers.lone", __doc__, PEERS, 3_000)
    parser.add_argument("--rate", type=float, default=300, help="messages in a second (default 300)")
    options = parser.parse_args()
    with shared_redis() as (where, port):
        settings = {"PEER_REDIS_PORT": port, "PEER_RATE": options.rate, "PEER_PROCESSES": 1}

        def measure_costs(name: str) -> Result:
            return driven(name, (options.messages, 0), settings)

        rounds = measure_in_rounds(("rmq", *options.only), options.rounds, measure_costs)
    queues = combine(rounds, COSTS)
    lines = [line(name, result) for name, result in queues.items()]
    publish(options, where, COLUMNS, lines, queues=queues, rows=compared(queues))
    return 0


def line(name: str, result: Result) -> list[str]:
    """Return the row of one queue."""
    if "error" in result:
        return [name, result["error"], *["-"] * len(COSTS)]
    costs = [f"{result[what]:,.0f}" for what in COSTS[:4]]
    return [name, version(name), *costs, *(f"{result[what]:.2f}" for what in COSTS[4:])]


def compared(queues: dict[str, Result]) -> list[Row]:
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
        unit = "ms" if what == "p50" else "µs"
        own, limit = (f"{result[what]:,.4g} {unit}" for result in (ours, others[best]))
        ratio = ours[what] / others[best][what]
        rows.append(ratio_row(f"one message: {title}", own, (best, limit), ratio, goal, least=True))
    return rows


if __name__ == "__main__":
    sys.exit(main())
