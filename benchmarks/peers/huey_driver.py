"""Huey: two consumers of one thread each, results not kept."""

from __future__ import annotations

import sys
from typing import Any

import measuring
from huey import RedisHuey
from jobs import ran

SETTINGS = f"{measuring.PROCESSES} consumers, 1 thread each, results=False, no periodic tasks"
GUARANTEE = "at most once: popped before it runs"
BULK = "no bulk call: enqueue in a loop"
WORKERS = [
    [sys.executable, "-m", "huey.bin.huey_consumer", "huey_driver.huey", "-w", "1", "-n", "-q", "-f"]
    for _ in range(measuring.PROCESSES)
]

huey = RedisHuey("bench", results=False, url=measuring.URL)


@huey.task(name="nothing")
def nothing(n: int) -> None:
    ran()


def single(count: int) -> None:
    for n in measuring.paced(range(count)):
        nothing(n)


def bulk(count: int) -> None:
    nothing.map(range(count))


def left(client: Any) -> int:
    return client.llen("huey.redis.bench")


if __name__ == "__main__":
    import huey_driver

    measuring.main(huey_driver)
