"""Celery: two solo workers that acknowledge late, so that what a dead worker held is redelivered."""

from __future__ import annotations

import sys
from typing import Any

import measuring
from celery import Celery
from jobs import ran

SETTINGS = f"{measuring.PROCESSES} solo workers, prefetch 100, acks_late, results ignored, no gossip, mingle or heartbeat"
GUARANTEE = "at least once with acks_late: redelivered after the visibility timeout (1 h)"
BULK = "no bulk call: apply_async on one kept connection"
WORKERS = [
    [
        sys.executable, "-m", "celery", "-A", "celery_driver", "worker", "-P", "solo", "-n", f"w{n}@localhost",
        "--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "CRITICAL",
    ]
    for n in range(measuring.PROCESSES)
]  # fmt: skip

app = Celery("celery_driver", broker=measuring.URL)
app.conf.update(
    task_ignore_result=True,
    task_acks_late=True,
    worker_prefetch_multiplier=100,
    task_default_delivery_mode="transient",
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="nothing")
def nothing(n: int) -> None:
    ran()


def single(count: int) -> None:
    for n in measuring.paced(range(count)):
        nothing.delay(n)


def bulk(count: int) -> None:
    with app.producer_pool.acquire(block=True) as producer:
        for n in range(count):
            nothing.apply_async((n,), producer=producer)


def left(client: Any) -> int:
    return client.llen("celery") + client.hlen("unacked")


if __name__ == "__main__":
    measuring.main(sys.modules[__name__])
