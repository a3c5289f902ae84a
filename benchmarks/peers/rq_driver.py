"""RQ: two SimpleWorkers (no fork for each job), results not kept."""

from __future__ import annotations

import sys
from typing import Any

import measuring
from rq import Queue

SETTINGS = f"{measuring.PROCESSES} SimpleWorkers (no fork), result_ttl=0"
GUARANTEE = "at most once: a job whose worker dies is marked failed, unless Retry is set"
BULK = "enqueue_many of 1,000"
WORKERS = [
    [
        sys.executable,
        "-m",
        "rq.cli",
        "worker",
        "--url",
        measuring.URL,
        "-w",
        "rq.SimpleWorker",
        "--quiet",
        "bench",
    ]
] * measuring.PROCESSES

queue = Queue("bench", connection=measuring.client())


def single(count: int) -> None:
    for n in measuring.paced(range(count)):
        queue.enqueue("noop.nothing", n, result_ttl=0)


def bulk(count: int) -> None:
    for start in range(0, count, 1000):
        queue.enqueue_many(
            [
                Queue.prepare_data("noop.nothing", (n,), result_ttl=0)
                for n in range(start, min(start + 1000, count))
            ]
        )


def left(client: Any) -> int:
    return client.llen("rq:queue:bench") + client.zcard("rq:wip:bench")


if __name__ == "__main__":
    measuring.main(sys.modules[__name__])
