"""BullMQ for Python: two workers of a hundred jobs at a time, finished jobs removed."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import measuring
from bullmq import Queue, Worker
from jobs import ran

SETTINGS = f"{measuring.PROCESSES} workers, concurrency=100, removeOnComplete"
GUARANTEE = "at least once: a stalled job runs again when its lock has ended (30 s), once by default"
BULK = "addBulk of 1,000"
WORKERS = [[sys.executable, "-m", "bullmq_driver", "worker"]] * measuring.PROCESSES

OPTIONS: Any = {"connection": measuring.URL}
KEPT = {"removeOnComplete": True}


async def nothing(job: Any, token: str) -> None:
    ran()


async def _single(count: int) -> None:
    queue = Queue("bench", OPTIONS)
    for n in measuring.paced(range(count)):
        await queue.add("nothing", {"n": n}, KEPT)
    await queue.close()


async def _bulk(count: int) -> None:
    queue = Queue("bench", OPTIONS)
    for start in range(0, count, 1000):
        await queue.addBulk(
            [
                {"name": "nothing", "data": {"n": n}, "opts": KEPT}
                for n in range(start, min(start + 1000, count))
            ]
        )
    await queue.close()


async def _work() -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    worker = Worker("bench", nothing, {**OPTIONS, "concurrency": 100})
    await ended.wait()
    await worker.close()


def single(count: int) -> None:
    asyncio.run(_single(count))


def bulk(count: int) -> None:
    asyncio.run(_bulk(count))


def left(client: Any) -> int:
    return client.llen("bull:bench:wait") + client.llen("bull:bench:active")


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        asyncio.run(_work())
    else:
        measuring.main(sys.modules[__name__])
