"""SAQ: two workers of a hundred jobs at a time, results not kept."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import measuring
from jobs import ran
from saq import Queue

SETTINGS = f"{measuring.PROCESSES} workers, concurrency=100, ttl=-1 (results not kept)"
GUARANTEE = "at least once with retries > 1: what is stuck is swept after its timeout or heartbeat"
BULK = "no bulk call: 50 enqueue at a time"
WORKERS = [[sys.executable, "-m", "saq", "saq_driver.settings"]] * measuring.PROCESSES


async def nothing(ctx: Any, *, n: int) -> None:
    ran()


queue = Queue.from_url(measuring.URL)
settings = {"queue": queue, "functions": [nothing], "concurrency": 100}


async def _send(count: int, together: int) -> None:
    sender = Queue.from_url(measuring.URL)
    await sender.connect()
    for start in measuring.paced(range(0, count, together)):
        await asyncio.gather(
            *(
                sender.enqueue("nothing", n=n, ttl=-1, retries=3)
                for n in range(start, min(start + together, count))
            )
        )
    await sender.disconnect()


def single(count: int) -> None:
    asyncio.run(_send(count, 1))


def bulk(count: int) -> None:
    asyncio.run(_send(count, 50))


def left(client: Any) -> int:
    """Return the jobs that have not ended; those that wait are among them."""
    return client.zcard("saq:default:incomplete")


if __name__ == "__main__":
    measuring.main(sys.modules[__name__])
