"""Huey's own backend of tasks: two consumers of one thread each."""

from __future__ import annotations

import sys
from typing import Any

import measuring
import tasking
from tasking import BULK, enqueue

SETTINGS = "2 consumers, 1 thread each, no periodic tasks, results kept"
GUARANTEE = "at most once: popped before it runs; no retries"
WORKERS = [tasking.manage("run_huey", "-w", "1", "-n", "-q") for _ in range(2)]
single = bulk = enqueue


def left(client: Any) -> int:
    return client.llen("huey.redis.bench")


if __name__ == "__main__":
    tasking.prepare("huey")
    measuring.main(sys.modules[__name__])

__all__ = ["BULK", "GUARANTEE", "SETTINGS", "WORKERS", "bulk", "left", "single"]
