"""ARQ: two workers of a hundred jobs at a time, results not kept."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import measuring
from arq import create_pool
from arq.connections import RedisSettings
from jobs import ran

SETTINGS = f"{measuring.PROCESSES} workers, max_jobs=100, poll_delay=10 ms, keep_result=0, log_results=False"
GUARANTEE = "at least once: a job runs again when its in-progress mark ends (job_timeout, 300 s)"
BULK = "no bulk call: 50 enqueue_job at a time"
WORKERS = [[sys.executable, "-m", "arq", "arq_driver.WorkerSettings"]] * measuring.PROCESSES

REDIS = RedisSettings(host="127.0.0.1", port=measuring.PORT)


async def nothing(ctx: Any, n: int) -> None:
    ran()


class WorkerSettings:
    functions = [nothing]
    redis_settings = REDIS
    max_jobs = 100
    poll_delay = 0.01
    keep_result = 0
    log_results = False


async def _send(count: int, together: int) -> None:
    pool = await create_pool(REDIS)
    for start in measuring.paced(range(0, count, together)):
        await asyncio.gather(
            *(pool.enqueue_job("nothing", n) for n in range(start, min(start + together, count)))
        )
    await pool.aclose()


def single(count: int) -> None:
    asyncio.run(_send(count, 1))


def bulk(count: int) -> None:
    asyncio.run(_send(count, 50))


def left(client: Any) -> int:
    return client.zcard("arq:queue")


if __name__ == "__main__":
    measuring.main(sys.modules[__name__])
