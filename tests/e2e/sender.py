"""A process that sends until it is told to stop, and writes down what was taken.

    python -m tests.e2e.sender TOPIC NAME

Its settings say the slot count that it was started with. It sends one by one and in bulk, at once and after a commit. It
ends when the file ``stop`` is there.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from datetime import timedelta
from typing import Any

import django

ENTITIES = 24


def options(kind: str) -> dict[str, Any]:
    """Return what a send of such a topic needs."""
    from django.utils import timezone

    if kind == "priority":
        return {"priority": random.randint(20, 60)}
    return {"fixed_time": timezone.now() + timedelta(milliseconds=300)} if kind == "fixed_time" else {}


def main(topic: str, name: str) -> None:
    django.setup()
    from django_rmq import Send, send_message, send_messages
    from django_rmq.conf import get_config
    from tests.e2e import ledger
    from tests.e2e.worker_project.settings import WORKER_DATA

    declared = get_config().topic(topic)
    numbers = itertools.count()
    while not (WORKER_DATA / "stop").exists():
        bodies = []
        for _ in range(random.choice([1, 1, 12])):
            number = next(numbers)
            bodies.append(
                {"name": f"{name}-{number}", "entity": number % ENTITIES, "ms": random.choice([0, 10, 20])}
            )
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
        time.sleep(0.025)


if __name__ == "__main__":
    main(*sys.argv[1:])
