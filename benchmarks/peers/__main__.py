"""``python -m benchmarks.peers``: other Python queues and this one, doing the same nothing on the same Redis, in turn.

Each is installed into an environment of its own under ``build/peers``, pinned with hashes, and used as well as it can be: its
bulk call if it has one, two worker processes, its fastest sensible settings, and at-least-once delivery where it has that. What
cannot be installed or run is shown with the reason. Rates are medians of the rounds, relations medians of what they are in each.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from functools import partial

from benchmarks.peers.harness import (
    OURS,
    Result,
    combine,
    command_line,
    measure,
    measure_in_rounds,
    publish,
    ratio_row,
    shared_redis,
)
from benchmarks.table import Row

PEERS = ("rq", "celery", "dramatiq", "huey", "arq", "saq", "bullmq")
GOALS = {"bulk": 10.0, "single": 1.0, "consume": 20.0}
WORKS = {"bulk": "bulk sends", "single": "single sends", "consume": "consuming"}
COLUMNS = ("queue", "version", "bulk sends/s", "single sends/s", "consumed/s")


def main() -> int:
    parser = command_line("benchmarks.peers", __doc__, PEERS, 10_000)
    parser.add_argument(
        "--singles", type=int, default=2_000, help="single sends of each queue (default 2,000)"
    )
    options = parser.parse_args()
    with shared_redis() as (where, port):
        work = partial(measure, port=port, messages=options.messages, singles=options.singles)
        rounds = measure_in_rounds(("rmq", *options.only), options.rounds, work)
    queues = combine(rounds, tuple(GOALS))
    lines = [line(name, result) for name, result in queues.items()]
    notes = [note(name, result) for name, result in queues.items()]
    publish(options, where, COLUMNS, lines, notes=notes, queues=queues, rows=compared(rounds))
    return 0


def line(name: str, result: Result) -> list[str]:
    """Return the row of one queue."""
    if "error" in result:
        return [name, "-", "-", "-", "-"]
    return [name, result["version"], *(f"{result[what]:,.0f}" for what in GOALS)]


def note(name: str, result: Result) -> str:
    """Return what is to be known of the figures of one queue."""
    if "error" in result:
        return f"- {name}: {result['error']}"
    return f"- {name}: {result['guarantee']}. Measured with {result['settings']}; bulk: {result['bulk_by']}."


def compared(rounds: list[dict[str, Result]], goals: Mapping[str, float] = GOALS) -> list[Row]:
    """Return our rows beside the best of the others."""
    queues = combine(rounds, tuple(goals))
    (own,) = (name for name in queues if name in OURS)
    ours = queues.pop(own)
    others = {name: result for name, result in queues.items() if "error" not in result}
    if "error" in ours or not others:
        return []
    rows = []
    for what, goal in goals.items():
        best = max(others, key=lambda name: others[name][what])
        ratio = statistics.median(each[own][what] / each[best][what] for each in rounds)
        limit = f"{others[best][what]:,.0f}/s"
        rows.append(ratio_row(WORKS[what], f"{ours[what]:,.0f}/s", (best, limit), ratio, goal))
    return rows


if __name__ == "__main__":
    sys.exit(main())
