"""How long calls to Redis block: each that takes longer than a second is written to `WORKER_DATA/stalls`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from redis.connection import AbstractConnection

from tests.e2e.worker_project.settings import WORKER_DATA


def install() -> None:
    """Measure connecting, sending and receiving, in whatever thread."""
    connection: Any = AbstractConnection
    for name in ("connect", "send_packed_command", "read_response"):
        setattr(connection, name, _measured(getattr(connection, name)))


def _measured(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        began = time.monotonic()
        try:
            return function(*args, **options)
        finally:
            spent = time.monotonic() - began
            if spent > 1.0:
                with (WORKER_DATA / "stalls").open("a") as file:
                    file.write(f"{spent:.2f} {function.__name__} {threading.current_thread().name}\n")

    return call
