"""django-tasks-rq: two SimpleWorkers (no fork for each task)."""

from __future__ import annotations

import sys
from typing import Any

import measuring
import tasking
from tasking import BULK, enqueue

SETTINGS = "2 SimpleWorkers (no fork), results kept for 500 s"
GUARANTEE = "at most once: a task whose worker dies is marked failed; no retries"
WORKERS = [
    tasking.manage(
        *("rqworker", "default", "--worker-class", "rq.SimpleWorker", "--job-class", "django_tasks_rq.Job"),
        *("--verbosity", "0"),
    )
    for _ in range(2)
]
single = bulk = enqueue


def left(client: Any) -> int:
    return client.llen("rq:queue:default") + client.zcard("rq:wip:default")


if __name__ == "__main__":
    tasking.prepare("rq")
    measuring.main(sys.modules[__name__])

__all__ = ["BULK", "GUARANTEE", "SETTINGS", "WORKERS", "bulk", "left", "single"]
