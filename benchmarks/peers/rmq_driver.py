"""This queue: its public functions, and two worker processes that acknowledge after the work, as they always do."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import measuring

ROOT = Path(__file__).parents[2]
SLOTS = 64
MANY = 40
"""So many times the messages of the others: else it would be over before it is looked at."""

os.environ |= {
    "DJANGO_SETTINGS_MODULE": "benchmarks.worker_project.settings",
    "REDIS_URL": measuring.URL,
    "SLOTS": str(SLOTS),
    "TYPE": "fifo" if measuring.RATE else "range_merge",
}
sys.path.insert(0, str(ROOT))

SETTINGS = (
    f"1 worker of {measuring.PROCESSES} processes, {SLOTS} slots, per-message listener, all else as it comes"
)
GUARANTEE = "at least once: settled by receipt; what a dead worker held is taken over at once, or after its time-out (30 s)"
BULK = "send_messages"
WORKERS = [
    [sys.executable, str(ROOT / "manage.py"), "runrmqconsumers", "--processes", str(measuring.PROCESSES)]
]

_sent = 0


def bodies(count: int) -> list[dict[str, int]]:
    """Return bodies that were not sent before: equal ones would merge."""
    global _sent  # noqa: PLW0603 - a driver is one program
    _sent += count
    return [{"n": n} for n in range(_sent - count, _sent)]


def single(count: int) -> None:
    from django_rmq import send_message

    sent = bodies(count)
    for n in measuring.paced(range(count)):
        send_message("noop", sent[n])


def bulk(count: int) -> None:
    from django_rmq import send_messages

    send_messages("noop", bodies(count))


def left(client: Any) -> int:
    pipeline = client.pipeline(transaction=False)
    for slot in range(SLOTS):
        pipeline.zcard(f"noop_{slot}")
        pipeline.zcard(f"prepare_{{noop_{slot}}}")
    return sum(pipeline.execute())


if __name__ == "__main__":
    import django

    django.setup()
    measuring.main(sys.modules[__name__])
