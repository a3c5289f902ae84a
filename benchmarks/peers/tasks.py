"""``python -m benchmarks.peers.tasks``: backends of ``django.tasks`` at the same work: ours, Huey's, and those of django-tasks.

All of them enqueue the same task by the same call, and keep its result. The database backend has a PostgreSQL of its own, which
does not wait for its disk. Otherwise as ``benchmarks.peers``.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers.__main__ import combined, compared, measure, note, version
from benchmarks.table import TITLES, cells, conditions, markdown, server, text, told, write
from tests.e2e.postgres import postgres

PEERS = ("tasks_huey", "tasks_db", "tasks_rq")
GOALS = {"single": 1.0, "consume": 5.0}
COLUMNS = ("backend", "version", "enqueued/s", "run/s")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.tasks", description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_000, help="tasks of each backend (default 10,000)")
    parser.add_argument("--singles", type=int, default=2_000, help="of which a rate is taken (default 2,000)")
    parser.add_argument(
        "--only", nargs="*", choices=PEERS, default=PEERS, help="only these; none: ours alone"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all backends (default 3)")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    rounds: list[dict[str, dict[str, Any]]] = []
    with ExitStack() as stack:
        client, _ = stack.enter_context(server())
        if "tasks_db" in options.only:
            os.environ["PEER_POSTGRES_PORT"] = str(stack.enter_context(postgres()).port)
        where = conditions(client)
        print(told(where), flush=True)
        port = client.connection_pool.connection_kwargs["port"]
        for _ in range(options.rounds):
            rounds.append({})
            for name in ("tasks_rmq", *options.only):
                rounds[-1][name] = measure(name, port, options.tasks, options.singles)
                error = rounds[-1][name].get("error")
                print(f"  {name}: {error or 'measured'}", file=sys.stderr, flush=True)
    found = combined(rounds)
    rows = compared(rounds, GOALS)
    as_table = markdown if options.markdown else text
    print(as_table(COLUMNS, [line(name, result) for name, result in found.items()]))
    print("\n" + "\n".join(note(name, result) for name, result in found.items()))
    if rows:
        print("\n" + as_table(TITLES, cells(rows)))
    write(options.json, where, queues=found, rows=rows)
    return 0


def line(name: str, result: dict[str, Any]) -> list[str]:
    """Return the row of one backend."""
    if "error" in result:
        return [name, "-", "-", "-"]
    return [name, version(name), *(f"{result[what]:,.0f}" for what in GOALS)]


if __name__ == "__main__":
    sys.exit(main())
