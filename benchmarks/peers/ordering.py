"""Jobs of a hundred entities, of each one after the other: how many per second, and whether one that fails is overtaken.

A driver is a module of this folder with ``SETTINGS``, ``GUARANTEE``, ``WORKERS`` (as for `measuring`), ``bulk(count)``, which
sends that many jobs ``order_jobs.run(entity, n)`` with ``n`` from 0 for each entity, ``left(client)``, and ``clear()`` if jobs
are not in Redis. Each job that fails is tried again after a second. It is started as ``python -m <driver> <messages>`` in this
folder, and prints one line of JSON. Runs in the peer's own environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from typing import Any

import measuring
from order_jobs import ENTITIES, FAILING, RAN

EACH = 10
"""The number of jobs of each entity while one of them fails."""


def share(count: int) -> list[tuple[int, int]]:
    """Return the entity and the number of each of ``count`` jobs, the entities in turn."""
    return [(n % ENTITIES, n // ENTITIES) for n in range(count)]


def judged(ran: list[str]) -> dict[str, Any]:
    """Return what became of the order: jobs that ran between a failure and the success after it, and entities out of order."""
    overtaken, held, succeeded = 0, set(), defaultdict(list)
    for line in ran:
        entity, n, how = line.split()
        if how == "failed":
            held.add(entity)
        elif int(n) == FAILING:
            held.discard(entity)
        elif entity in held:
            overtaken += 1
        if how == "done":
            succeeded[entity].append(int(n))
    wrong = sum(numbers != sorted(numbers) for numbers in succeeded.values())
    complete = len(succeeded) == ENTITIES and all(len(set(each)) == EACH for each in succeeded.values())
    return {"overtaken": overtaken, "out_of_order": wrong, "complete": complete}


def order_after_a_failure(driver: Any) -> dict[str, Any]:
    """Let one job of each entity fail once, and return what became of the order."""
    looker = measuring.client()
    looker.flushall()
    getattr(driver, "clear", looker.ping)()
    os.environ["PEER_RECORD"] = "1"
    driver.bulk(ENTITIES * EACH)
    with measuring.workers(driver):
        end = time.monotonic() + measuring.PATIENCE_SECONDS
        while time.monotonic() < end and looker.llen(RAN) < ENTITIES * (EACH + 1):
            time.sleep(0.2)
    return judged([line.decode() for line in looker.lrange(RAN, 0, -1)])


def main(driver: Any) -> None:
    """Measure ``driver`` and print what was found."""
    count = int(sys.argv[1]) * getattr(driver, "MANY", 1)
    looker = measuring.client()
    looker.flushall()
    bulk = measuring.rate_of(count, driver.bulk)
    if driver.left(looker) < count:
        raise RuntimeError(f"{driver.left(looker)} of {count} messages wait")
    consumed, _ = measuring.drain(driver, count)
    found = {"bulk": bulk, "consume": consumed, **order_after_a_failure(driver)}
    print(json.dumps({**found, "settings": driver.SETTINGS, "guarantee": driver.GUARANTEE}))
