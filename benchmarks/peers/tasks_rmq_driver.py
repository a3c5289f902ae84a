"""This queue's backend of tasks: two worker processes, as they come."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import measuring
import tasking
from tasking import BULK, enqueue

ROOT = str(Path(__file__).parents[2])
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])

SLOTS = 16
SETTINGS = "1 worker of 2 processes, results kept for a day, all else as it comes"
GUARANTEE = "at least once, with 16 retries: what a dead worker held runs again after its time-out (30 s)"
WORKERS = [tasking.manage("runrmqconsumers", "--processes", "2")]
single = bulk = enqueue


def left(client: Any) -> int:
    pipeline = client.pipeline(transaction=False)
    for slot in range(SLOTS):
        pipeline.zcard(f"tasks.default_{slot}")
        pipeline.zcard(f"prepare_{{tasks.default_{slot}}}")
    return sum(pipeline.execute())


if __name__ == "__main__":
    tasking.prepare("rmq")
    measuring.main(sys.modules[__name__])

__all__ = ["BULK", "GUARANTEE", "SETTINGS", "WORKERS", "bulk", "left", "single"]
