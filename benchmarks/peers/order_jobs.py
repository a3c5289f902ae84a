"""The work of an entity: nothing; or, while the order is recorded, a line, and a failure of each entity's fourth job at first."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import redis
from jobs import ran

ENTITIES = 100
FAILING = 3
RAN = "order:ran"


@cache
def client() -> Any:
    return redis.Redis(host="127.0.0.1", port=int(os.environ["PEER_REDIS_PORT"]))


def run(entity: int, n: int) -> None:
    """Do the work of the ``n``-th job of an entity."""
    ran()
    if not os.environ.get("PEER_RECORD"):
        return
    fails = n == FAILING and client().set(f"order:failed:{entity}", 1, nx=True)
    client().rpush(RAN, f"{entity} {n} {'failed' if fails else 'done'}")
    if fails:
        raise RuntimeError("the first time")
