"""``python -m benchmarks.peers``: other Python queues and this one, doing the same nothing on the same Redis, in turn.

``queues``: rates in bulk, one by one and of two worker processes. ``lone``: what a single message costs that comes to an idle
worker, which most queues mostly carry, by the accounting of the processes. ``tasks``: backends of ``django.tasks``, which all
enqueue the same task and keep its result; that of the database has a PostgreSQL that does not wait for its disk.

Each queue has an environment of its own, pinned with hashes, and is used as well as it can be: its bulk call if it has one,
its fastest sensible settings, and at-least-once delivery where it has that. What cannot be installed or run is shown with the
reason. Figures are medians of the rounds, relations medians of what they are in each.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.harness import TITLES, Row, cells, command_line, conditions, server, text, told, write
from benchmarks.peers.environments import Result, run_driver
from tests.e2e.postgres import postgres


@dataclass(frozen=True)
class Figure:
    """A column of a table, and what is asked of ours beside the best of the others."""

    title: str
    work: str = ""
    goal: float | None = None
    unit: str = "/s"
    digits: int = 0


@dataclass(frozen=True)
class Comparison:
    """What is measured of which queues. ``uncompared`` ones deliver at most once, which costs less."""

    ours: str
    peers: tuple[str, ...]
    messages: int
    singles: int
    figures: Mapping[str, Figure]
    is_cost: bool = False
    uncompared: tuple[str, ...] = ()


QUEUES = ("rq", "celery", "dramatiq", "huey", "arq", "saq", "bullmq")
COMPARISONS = {
    "queues": Comparison(
        "rmq",
        QUEUES,
        10_000,
        2_000,
        {
            "bulk": Figure("bulk sends/s", "bulk sends", 10.0),
            "single": Figure("single sends/s", "single sends", 1.0),
            "consume": Figure("consumed/s", "consuming", 20.0),
        },
    ),
    "lone": Comparison(
        "rmq",
        QUEUES,
        3_000,
        0,
        {
            "redis": Figure("Redis µs", "one message: CPU of Redis", 1.1, " µs"),
            "worker": Figure("worker µs", "one message: CPU of the worker", 1.0, " µs"),
            "sender": Figure("sender µs"),
            "commands": Figure("commands"),
            "p50": Figure("call after ms, p50", "one message: time to the call, p50", 1.0, " ms", 2),
            "p99": Figure("p99", digits=2),
        },
        is_cost=True,
        uncompared=("huey", "rq"),
    ),
    "tasks": Comparison(
        "tasks_rmq",
        ("tasks_huey", "tasks_db", "tasks_rq"),
        10_000,
        2_000,
        {
            "single": Figure("enqueued/s", "enqueueing", 1.0),
            "consume": Figure("run/s", "running", 5.0),
        },
    ),
}


def main() -> int:
    parser = command_line("benchmarks.peers", __doc__, rounds=3)
    add = parser.add_argument
    add(
        "comparison",
        nargs="?",
        choices=COMPARISONS,
        default="queues",
        help="what to compare (default queues)",
    )
    add("--only", nargs="*", help="only these other queues; none: this queue alone")
    add("--messages", type=int, help="messages of each queue (default 10,000, and 3,000 single ones)")
    add("--singles", type=int, help="messages that are sent one by one for a rate (default 2,000)")
    add("--rate", type=float, default=300, help="single messages in a second (default 300)")
    options = parser.parse_args()
    comparison = COMPARISONS[options.comparison]
    peers = [name for name in comparison.peers if options.only is None or name in options.only]
    counts = (options.messages or comparison.messages, options.singles or comparison.singles)
    with ExitStack() as stack:
        client, _ = stack.enter_context(server())
        where = conditions(client)
        settings = {"PEER_REDIS_PORT": client.connection_pool.connection_kwargs["port"]}
        if comparison.is_cost:
            settings |= {"PEER_RATE": options.rate, "PEER_PROCESSES": 1}
        if "tasks_db" in peers:
            settings["PEER_POSTGRES_PORT"] = stack.enter_context(postgres()).port
        rounds = measure([comparison.ours, *peers], options.rounds, counts, settings)
    queues, rows = combine(rounds, comparison.figures), compared(comparison, rounds)
    print("\n\n".join(sections(comparison, where, queues, rows, text)))
    write(options.json, where, queues=queues, rows=rows)
    return 0


def measure(
    names: Sequence[str], rounds: int, counts: tuple[int, int], settings: Mapping[str, float]
) -> list[dict[str, Result]]:
    """Return for each round what was found of each queue, which are measured in turn."""
    results: list[dict[str, Result]] = []
    for _ in range(rounds):
        results.append({})
        for name in names:
            results[-1][name] = run_driver(name, counts, settings)
            print(f"  {name}: {results[-1][name].get('error') or 'measured'}", file=sys.stderr, flush=True)
    return results


def combine(rounds: list[dict[str, Result]], figures: Mapping[str, object]) -> dict[str, Result]:
    """Return for each queue the medians of these figures; an ``error`` if there was one in any round."""
    combined = {}
    for name in rounds[0]:
        results = [each[name] for each in rounds]
        wrong = [result for result in results if "error" in result]
        medians = {
            what: statistics.median(result[what] for result in results) for what in figures if not wrong
        }
        combined[name] = wrong[0] if wrong else results[0] | medians
    return combined


def compared(comparison: Comparison, rounds: list[dict[str, Result]]) -> list[Row]:
    """Return our rows beside the best of the others."""
    queues = combine(rounds, comparison.figures)
    own = comparison.ours
    ours = queues.pop(own)
    others = [
        name for name, each in queues.items() if "error" not in each and name not in comparison.uncompared
    ]
    if "error" in ours or not others:
        return []
    rows = []
    for what, figure in comparison.figures.items():
        if figure.goal is None:
            continue
        choose = min if comparison.is_cost else max
        best = choose(others, key=lambda name, what=what: queues[name][what])  # type: ignore[misc]
        ratio = statistics.median(each[own][what] / each[best][what] for each in rounds)
        mine, limit = (f"{result[what]:,.{figure.digits}f}{figure.unit}" for result in (ours, queues[best]))
        sign = "≤" if comparison.is_cost else "≥"
        met = ratio <= figure.goal if comparison.is_cost else ratio >= figure.goal
        values = {"ratio": ratio, "best": best, "goal": figure.goal}
        goal = f"{sign} × {figure.goal:g}"
        rows.append(Row(figure.work, mine, f"{limit} ({best})", f"× {ratio:.3g}", goal, met, values))
    return rows


def sections(
    comparison: Comparison,
    where: dict[str, str],
    queues: dict[str, Result],
    rows: list[Row],
    table: Callable[[Sequence[str], Sequence[Sequence[str]]], str],
) -> list[str]:
    """Return the conditions, the table of the queues, ours beside the best, and what is to be known of each."""
    figures = comparison.figures
    lines = []
    for queue, result in queues.items():
        shown = [
            f"{result[what]:,.{figure.digits}f}" if what in result else "-"
            for what, figure in figures.items()
        ]
        lines.append([queue, result.get("version", "-"), *shown])
    parts = [
        f"{told(where)}.",
        table(("queue", "version", *(each.title for each in figures.values())), lines),
    ]
    if rows:
        parts.append(table(TITLES, cells(rows)))
    notes = [
        note(name, result) for name, result in queues.items() if "error" in result or not comparison.is_cost
    ]
    return [*parts, "\n".join(notes)] if notes else parts


def note(name: str, result: Result) -> str:
    """Return what is to be known of the figures of one queue."""
    if "error" in result:
        return f"- {name}: {result['error']}"
    return f"- {name}: {result['guarantee']}. Measured with {result['settings']}; bulk: {result['bulk_by']}."


if __name__ == "__main__":
    sys.exit(main())
