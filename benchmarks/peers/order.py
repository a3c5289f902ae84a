"""``python -m benchmarks.peers.order``: jobs of a hundred entities, of each one after the other, by this queue and others.

Each queue sends its jobs in bulk if it can, and two worker processes run them; the rate is that between nine tenths and one tenth
of the backlog. Then one job of each entity fails once and rests for a second: do later ones run before it has succeeded? The
environments are those of ``benchmarks.peers``; Procrastinate has a PostgreSQL of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers.__main__ import driven, version
from benchmarks.table import conditions, markdown, server, text, told, write
from tests.e2e.postgres import postgres

PEERS = ("procrastinate", "rq")
COLUMNS = (
    "queue",
    "version",
    "sends/s",
    "consumed/s",
    "jobs that overtook one that had failed",
    "entities out of order",
)
NOT_THERE = {
    "bullmq": "its open edition has no order by key; groups are part of BullMQ Pro, setGlobalConcurrency is for a whole queue"
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.order", description=__doc__)
    parser.add_argument(
        "--messages", type=int, default=10_000, help="messages of each queue (default 10,000)"
    )
    parser.add_argument(
        "--only", nargs="*", choices=PEERS, default=PEERS, help="only these; none: this queue alone"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all queues (default 3)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("rmq", *options.only)}
    with ExitStack() as stack:
        client, _ = stack.enter_context(server())
        where = conditions(client)
        print(told(where), flush=True)
        ports = {"PEER_REDIS_PORT": client.connection_pool.connection_kwargs["port"]}
        for _ in range(options.rounds):
            for name, results in found.items():
                with ExitStack() as own:
                    if name == "procrastinate":
                        ports["PEER_POSTGRES_PORT"] = own.enter_context(postgres()).port
                    results.append(driven(name, f"{name}_order_driver", (options.messages,), ports))
                print(f"  {name}: {results[-1].get('error') or 'measured'}", file=sys.stderr, flush=True)
    combined = {name: middle(results) for name, results in found.items()}
    as_table = markdown if options.markdown else text
    print(as_table(COLUMNS, [line(name, result) for name, result in combined.items()]))
    print("\n" + "\n".join(note(name, result) for name, result in combined.items()))
    print("\n".join(f"- {name}: not measured: {why}." for name, why in NOT_THERE.items()))
    write(options.json, where, queues=combined)
    return 0


def middle(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of the rates, and the worst of the rest; an ``error`` if there was one in any round."""
    wrong = [result for result in results if "error" in result]
    wrong += [{"error": "not all jobs succeeded"} for result in results if not result.get("complete")]
    if wrong:
        return wrong[0]
    rates = {what: statistics.median(result[what] for result in results) for what in ("bulk", "consume")}
    worst = {what: max(result[what] for result in results) for what in ("overtaken", "out_of_order")}
    return {**results[0], **rates, **worst}


def line(name: str, result: dict[str, Any]) -> list[str]:
    """Return the row of one queue."""
    if "error" in result:
        return [name, *["-"] * (len(COLUMNS) - 1)]
    rates = [f"{result[what]:,.0f}" for what in ("bulk", "consume")]
    return [name, version(name), *rates, f"{result['overtaken']:,}", f"{result['out_of_order']} of 100"]


def note(name: str, result: dict[str, Any]) -> str:
    """Return what is to be known of the figures of one queue."""
    if "error" in result:
        return f"- {name}: {result['error']}."
    return f"- {name}: {result['guarantee']}. Measured with {result['settings']}."


if __name__ == "__main__":
    sys.exit(main())
