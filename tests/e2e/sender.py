"""A process that sends until it is told to stop, and writes down what was taken.

    python -m tests.e2e.sender TOPIC NAME BACKLOG

Its settings say the slot count that it was started with. It sends one by one and in bulk, at once and after a commit. It
ends when the file ``stop`` is there. It makes no pause while fewer than BACKLOG of its messages wait, so that workers never
run out of messages, however busy the machine is.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import django
from django.utils import timezone

from django_rmq import Send, send_message, send_messages
from django_rmq.conf import get_config
from tests.e2e import ledger

ENTITIES = 24


def options(kind: str) -> dict[str, Any]:
    """Return what a send of such a topic needs."""
    if kind == "priority":
        return {"priority": random.randint(20, 60)}
    return {"fixed_time": timezone.now() + timedelta(milliseconds=300)} if kind == "fixed_time" else {}


def pauses(path: Path, backlog: int, sent: Callable[[], int]) -> Iterator[float]:
    """Yield how many seconds to wait before the next send. The ledger is read again at each tenth of them."""
    ended = 0
    for number in itertools.count():
        if number % 10 == 0 and path.exists():
            ended = path.read_bytes().count(b"\nend ")
        yield 0.0 if sent() - ended < backlog else 0.04


def main(topic: str, name: str, backlog: str) -> None:
    django.setup()
    from tests.e2e.worker_project.settings import WORKER_DATA

    declared = get_config().topic(topic)
    sent = 0
    waits = pauses(WORKER_DATA / "ledger", int(backlog), lambda: sent)
    while not (WORKER_DATA / "stop").exists():
        bodies = []
        for _ in range(random.choice([1, 1, 12])):
            bodies.append(
                {"name": f"{name}-{sent}", "entity": sent % ENTITIES, "ms": random.choice([20, 40])}
            )
            sent += 1
        how = options(declared.type.value)
        keyed: list[dict[str, Any]] = [
            {"key": body["name"], "slot_basis": body["entity"]} if declared.keyed else {} for body in bodies
        ]
        if len(bodies) == 1:
            results = [send_message(topic, bodies[0], **how, **keyed[0])]
        elif declared.keyed:
            results = list(
                send_messages(
                    topic, [Send(body, **own) for body, own in zip(bodies, keyed, strict=True)], **how
                )
            )
        else:
            results = list(send_messages(topic, bodies, **how))
        assert all(result.status == "stored" for result in results), results
        for body in bodies:
            ledger.write(WORKER_DATA / f"sent-{name}", "sent", 0, 0, body["entity"], 0, body["name"])
        time.sleep(next(waits))


if __name__ == "__main__":
    main(*sys.argv[1:])
