"""RQ: jobs with a RateLimit of one at a time for each entity."""

from __future__ import annotations

import sys
from typing import Any

import measuring
import ordering
from order_jobs import ENTITIES
from rq import Queue, RateLimit, Retry

SETTINGS = "2 SimpleWorkers (no fork) with scheduler, RateLimit(concurrency=1), Retry(max=3, interval=1), result_ttl=0"
GUARANTEE = "one job of a key at a time; one that rests until its retry leaves its place"
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
        "--with-scheduler",
        "--quiet",
        "bench",
    ]
] * 2

queue = Queue("bench", connection=measuring.client())


def bulk(count: int) -> None:
    # enqueue_many takes no rate_limit.
    for entity, n in ordering.share(count):
        queue.enqueue(
            "order_jobs.run",
            entity,
            n,
            rate_limit=RateLimit(f"e{entity}", 1),
            retry=Retry(max=3, interval=1),
            result_ttl=0,
        )


def left(client: Any) -> int:
    pipeline = client.pipeline(transaction=False)
    for entity in range(ENTITIES):
        pipeline.zcard(f"rq:rl:e{entity}:allowed")
        pipeline.zcard(f"rq:rl:e{entity}:rate_limited")
    return sum(pipeline.execute())


if __name__ == "__main__":
    ordering.main(sys.modules[__name__])
