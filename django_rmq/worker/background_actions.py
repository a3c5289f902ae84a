"""The actions on many messages that a worker does in the background, beside its listeners.

A worker sees with its report what is to be done. A thread then does part after part, as long as there is one that no other
worker does; without an action there is no thread. If the worker is killed, another one goes on when its lease has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from django.db import connections as databases

from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.core.model.background_action import ActionProgress
from django_rmq.exceptions import RmqError

logger = safe_logger("django_rmq.consumer")

RunParts = Callable[[str, Callable[[], bool]], bool]
"""Does a part of each action that no other worker does, as this worker and until the function says so; returns whether there
was one. What does it is above the workers."""


class BackgroundActions:
    """Does parts of actions in a thread of its own, which lives as long as there is something to do."""

    def __init__(self, worker: str, run_parts: RunParts) -> None:
        self._worker = worker
        self._run_parts = run_parts
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._complain = LogThrottle(logger)

    def look(self, found: Sequence[ActionProgress]) -> None:
        """Begin if one of these actions has not ended."""
        is_alive = self._thread is not None and self._thread.is_alive()
        if is_alive or self._stopped.is_set() or all(one.ended_ms is not None for one in found):
            return
        self._thread = threading.Thread(target=self._run, name="rmq-actions", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the current step. Another worker goes on at once."""
        self._stopped.set()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, for at most ``seconds``."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                if not self._run_parts(self._worker, self._stopped.is_set):
                    return
        except RmqError as error:
            # The next report begins again.
            self._complain("actions", "An action in the background cannot continue now: %s", error)
        finally:
            # The audit trail may have used a database.
            databases.close_all()


__all__ = ["BackgroundActions", "RunParts"]
