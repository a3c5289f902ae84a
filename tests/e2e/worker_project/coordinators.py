"""A coordinator of the project's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django_rmq.core.coordination import Coordinator, Slots, StaticCoordinator, Worker


def alone(
    broker: Any, worker: Worker, own: Callable[[Slots], None], disown: Callable[[Slots], None]
) -> Coordinator:
    print("alone", flush=True)
    return StaticCoordinator(worker, own, disown)
