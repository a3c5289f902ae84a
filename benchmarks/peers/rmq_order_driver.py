"""This queue: a strict fifo topic, whose slots are chosen by the entity."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import measuring
import ordering

ROOT = Path(__file__).parents[2]
SLOTS = 1024
MANY = 20

os.environ |= {
    "DJANGO_SETTINGS_MODULE": "benchmarks.worker_project.settings",
    "REDIS_URL": measuring.URL,
    "SLOTS": str(SLOTS),
    "ORDERED": "1",
}
sys.path.insert(0, str(ROOT))

SETTINGS = f"1 worker of 2 processes, {SLOTS} slots, TYPE fifo, ORDER strict, SLOT_BASIS, BACKOFF 1"
GUARANTEE = "a slot holds behind a message that failed until it succeeds or is dead"
WORKERS = [[sys.executable, str(ROOT / "manage.py"), "runrmqconsumers", "--processes", "2"]]


def bulk(count: int) -> None:
    from django_rmq import send_messages

    send_messages("ordered", [{"entity": entity, "n": n} for entity, n in ordering.share(count)])


def left(client: Any) -> int:
    pipeline = client.pipeline(transaction=False)
    for slot in range(SLOTS):
        pipeline.zcard(f"ordered_{slot}")
        pipeline.zcard(f"prepare_{{ordered_{slot}}}")
    return sum(pipeline.execute())


if __name__ == "__main__":
    import django

    django.setup()
    ordering.main(sys.modules[__name__])
