"""``python -m benchmarks.in_order``: a strict fifo topic keeps the order of each entity.

One in a hundred messages fails once, worker processes and whole commands are killed, others take their slots over. An
independent program reads what happened. Ends with 1 if an entity was not served in order.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from example_project.demo.embedded_redis import start_redis
from tests.brokers import Broker
from tests.e2e.in_order import InOrder
from tests.e2e.processes import WorkerProcess
from tests.workers import client_of

PREFIX = "in-order:"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_order", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="default 1,000,000")
    parser.add_argument("--entities", type=int, default=100, help="default 100")
    parser.add_argument(
        "--seconds", type=float, default=600, help="for how long to kill, at most (default 600)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rmq-in-order-") as directory:
        server = start_redis(f"{directory}/redis")
        started: list[WorkerProcess] = []

        def start(*arguments: str, **environment: str) -> WorkerProcess:
            started.append(WorkerProcess(Path(directory), server.url, PREFIX, *arguments, **environment))
            return started[-1]

        try:
            broker: Any = Broker(client_of(server.url), PREFIX)
            run = InOrder(start, broker, Path(directory), options.messages, options.entities)
            verdict = run.run(options.seconds)
        finally:
            for worker in started:
                worker.kill()
            server.stop()
    print(json.dumps(verdict, indent=2))
    return 0 if verdict["in order"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
