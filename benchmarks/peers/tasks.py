"""``python -m benchmarks.peers.tasks``: backends of ``django.tasks`` at the same work: ours, Huey's, and those of django-tasks.

All of them enqueue the same task by the same call, and keep its result. The database backend has a PostgreSQL of its own, which
does not wait for its disk. Otherwise as ``benchmarks.peers``.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial

from benchmarks.peers.__main__ import compared, note
from benchmarks.peers.harness import (
    Result,
    combine,
    command_line,
    measure,
    measure_in_rounds,
    publish,
    shared_redis,
    version,
)
from tests.e2e.postgres import postgres

PEERS = ("tasks_huey", "tasks_db", "tasks_rq")
GOALS = {"single": 1.0, "consume": 5.0}
COLUMNS = ("backend", "version", "enqueued/s", "run/s")


def main() -> int:
    parser = command_line("benchmarks.peers.tasks", __doc__, PEERS, 10_000)
    parser.add_argument(
        "--singles", type=int, default=2_000, help="tasks of which a rate is taken (default 2,000)"
    )
    options = parser.parse_args()
    with ExitStack() as stack:
        where, port = stack.enter_context(shared_redis())
        if "tasks_db" in options.only:
            os.environ["PEER_POSTGRES_PORT"] = str(stack.enter_context(postgres()).port)
        work = partial(measure, port=port, messages=options.messages, singles=options.singles)
        rounds = measure_in_rounds(("tasks_rmq", *options.only), options.rounds, work)
    queues = combine(rounds, tuple(GOALS))
    lines = [line(name, result) for name, result in queues.items()]
    notes = [note(name, result) for name, result in queues.items()]
    publish(options, where, COLUMNS, lines, notes=notes, queues=queues, rows=compared(rounds, GOALS))
    return 0


def line(name: str, result: Result) -> list[str]:
    """Return the row of one backend."""
    if "error" in result:
        return [name, "-", "-", "-"]
    return [name, version(name), *(f"{result[what]:,.0f}" for what in GOALS)]


if __name__ == "__main__":
    sys.exit(main())
