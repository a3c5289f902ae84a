"""Dramatiq: two processes of four threads, no middleware that a no-op does not need."""

from __future__ import annotations

import sys
from typing import Any

import dramatiq
import measuring
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries
from jobs import ran

SETTINGS = f"{measuring.PROCESSES} processes, 4 threads each, only the Retries middleware"
GUARANTEE = "at least once: what a dead worker held is requeued after its heartbeat timeout (60 s)"
BULK = "no bulk call: broker.enqueue of prepared messages"
WORKERS = [[sys.executable, "-m", "dramatiq", "dramatiq_driver", "-p", str(measuring.PROCESSES), "-t", "4"]]

broker = RedisBroker(url=measuring.URL, middleware=[Retries()])
dramatiq.set_broker(broker)


@dramatiq.actor
def nothing(n: int) -> None:
    ran()


def single(count: int) -> None:
    for n in measuring.paced(range(count)):
        nothing.send(n)


def bulk(count: int) -> None:
    for message in [nothing.message(n) for n in range(count)]:
        broker.enqueue(message)


def left(client: Any) -> int:
    return client.hlen("dramatiq:default.msgs")


if __name__ == "__main__":
    # Workers know the actor by the module's name, not by "__main__".
    import dramatiq_driver

    measuring.main(dramatiq_driver)
