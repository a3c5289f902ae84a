"""Background jobs: the duties of a worker beside consuming, done one small step at a time, in separate threads.

A duty is a generator that does one bounded step and yields the seconds until its next one. Therefore many
duties share one thread, none of them delays listeners, and none of them sends much to Redis at once.

A step may wait for its server, and then so do all duties of its thread. Those that wait for different servers,
such as Redis and a database, therefore have different threads. A duty that fails is begun again after ``AGAIN_SECONDS``.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections.abc import Callable, Generator, Iterable
from itertools import count

from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.exceptions import RmqError, ServerTrouble

logger = safe_logger("django_rmq.consumer")

Duty = Callable[[], Generator[float, None, None]]
"""Begins a duty, which yields the seconds until its next step. A duty that fails is started again; one that
ends is done."""

AGAIN_SECONDS = 5.0
"""Seconds that a duty rests after it failed."""


class DutyThread(threading.Thread):
    """Runs duties until stopped. Each is then closed, so that it can release its resources.

    ``server``: the server for which these duties wait, as it is called in the name of the thread.
    """

    def __init__(self, duties: Iterable[Duty], server: str = "redis") -> None:
        super().__init__(name=f"rmq-duties-{server}", daemon=True)
        self._duties = list(duties)
        self._stopped = threading.Event()
        self._log_throttled = LogThrottle(logger)

    def stop(self) -> None:
        """End after the current step."""
        self._stopped.set()

    def run(self) -> None:
        numbers = count()
        steps = {duty: duty() for duty in self._duties}
        due = [(0.0, next(numbers), duty) for duty in self._duties]
        while due:
            at, _, duty = due[0]
            if self._stopped.wait(max(0.0, at - time.monotonic())):
                break
            heapq.heappop(due)
            try:
                pause = next(steps[duty])
            except StopIteration:
                continue
            except Exception as error:  # noqa: BLE001 - logged, not raised
                # All duties fail while their server is unavailable, which is logged as one kind of error.
                kind = "server" if isinstance(error, ServerTrouble) else duty
                self._log_throttled(
                    kind,
                    f"A background task failed (%s) and restarts in {AGAIN_SECONDS:g} s",
                    error,
                    exc_info=not isinstance(error, RmqError),
                )
                steps[duty], pause = duty(), AGAIN_SECONDS
            heapq.heappush(due, (time.monotonic() + pause, next(numbers), duty))
        for step in steps.values():
            with contextlib.suppress(RmqError):
                step.close()
