"""taskiq: workers on a Redis stream, whose entries are acknowledged after the job."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import measuring
from jobs import job
from taskiq_redis import RedisStreamBroker

SETTINGS = f"{measuring.PROCESSES} processes, max-async-tasks={measuring.CONCURRENCY}, prefetch as it comes"
GUARANTEE = "at least once: an entry of the stream that is not acknowledged is claimed by another worker when it is idle"
BULK = "no bulk call: 50 kiq at a time"
WORKERS = [
    [
        sys.executable,
        "-m",
        "taskiq",
        "worker",
        "taskiq_driver:broker",
        "--workers",
        str(measuring.PROCESSES),
        "--max-async-tasks",
        str(measuring.CONCURRENCY),
        "--ack-type",
        "when_executed",
        "--no-configure-logging",
    ]
]

broker = RedisStreamBroker(measuring.URL)


# By its module it would have another name in the worker, which knows the module by its path.
@broker.task(task_name="nothing")
async def nothing(n: int) -> None:
    await job()


async def _send(count: int, together: int) -> None:
    await broker.startup()
    for start in measuring.paced(range(0, count, together)):
        await asyncio.gather(*(nothing.kiq(n) for n in range(start, min(start + together, count))))
    await broker.shutdown()


def single(count: int) -> None:
    asyncio.run(_send(count, 1))


def bulk(count: int) -> None:
    asyncio.run(_send(count, 50))


def left(client: Any) -> int:
    """Return the entries that no worker has acknowledged."""
    [group] = client.xinfo_groups("taskiq")
    return int(client.xlen("taskiq")) - int(group["entries-read"] or 0) + int(group["pending"])


if __name__ == "__main__":
    measuring.main(sys.modules[__name__])
