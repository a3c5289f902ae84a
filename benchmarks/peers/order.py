"""``python -m benchmarks.peers.order``: jobs of a hundred entities, of each one after the other, by this queue and others.

Each queue sends its jobs in bulk if it can, and two worker processes run them; the rate is that between nine tenths and one tenth
of the backlog. Then one job of each entity fails once and rests for a second: do later ones run before it has succeeded? The
environments are those of ``benchmarks.peers``; Procrastinate has a PostgreSQL of its own.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from benchmarks.peers.harness import (
    Result,
    command_line,
    driven,
    measure_in_rounds,
    medians,
    publish,
    shared_redis,
    version,
)
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
    options = command_line("benchmarks.peers.order", __doc__, PEERS, 10_000).parse_args()
    with shared_redis() as (where, port):

        def measure_order(name: str) -> Result:
            ports = {"PEER_REDIS_PORT": port}
            with ExitStack() as own:
                if name == "procrastinate":
                    ports["PEER_POSTGRES_PORT"] = own.enter_context(postgres()).port
                return driven(name, f"{name}_order_driver", (options.messages,), ports)

        rounds = measure_in_rounds(("rmq", *options.only), options.rounds, measure_order)
    queues = {name: middle([each[name] for each in rounds]) for name in rounds[0]}
    lines = [line(name, result) for name, result in queues.items()]
    notes = [note(name, result) for name, result in queues.items()]
    notes += [f"- {name}: not measured: {why}." for name, why in NOT_THERE.items()]
    publish(options, where, COLUMNS, lines, notes=notes, queues=queues)
    return 0


def middle(results: list[Result]) -> Result:
    """Return the medians of the rates, and the worst of the rest; an ``error`` if there was one in any round."""
    wrong = [result for result in results if "error" in result]
    wrong += [{"error": "not all jobs succeeded"} for result in results if not result.get("complete")]
    if wrong:
        return wrong[0]
    worst = {what: max(result[what] for result in results) for what in ("overtaken", "out_of_order")}
    return results[0] | medians(results, ("bulk", "consume")) | worst


def line(name: str, result: Result) -> list[str]:
    """Return the row of one queue."""
    if "error" in result:
        return [name, *["-"] * (len(COLUMNS) - 1)]
    rates = [f"{result[what]:,.0f}" for what in ("bulk", "consume")]
    return [name, version(name), *rates, f"{result['overtaken']:,}", f"{result['out_of_order']} of 100"]


def note(name: str, result: Result) -> str:
    """Return what is to be known of the figures of one queue."""
    if "error" in result:
        return f"- {name}: {result['error']}."
    return f"- {name}: {result['guarantee']}. Measured with {result['settings']}."


if __name__ == "__main__":
    sys.exit(main())
