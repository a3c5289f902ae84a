"""Starts: notes in Redis which tasks run, unless they have ended before anybody could have asked.

The number of attempts must survive the death of a worker, and a program may ask for the state of a task that takes long.
A task that ends within milliseconds needs no such note, and its end has one in any case.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.exceptions import RmqError
from django_rmq.tasks.attempts import Attempt

logger = safe_logger("django_rmq.tasks")

SECONDS = 0.02
"""How long a task runs before its start is noted."""


class StartRecords:
    """The attempts of this process that have begun. ``broker`` is called in the thread that notes them."""

    def __init__(self, broker: Callable[[], Broker]) -> None:
        self._broker = broker
        self._begun: deque[tuple[float, Attempt]] = deque()
        self._wanted = threading.Event()
        self._starting = threading.Lock()
        self._pid = 0
        self._complain = LogThrottle(logger)

    def begin(self, attempt: Attempt) -> None:
        """Note the start of ``attempt``, soon."""
        self._begun.append((time.monotonic(), attempt))
        if not self._wanted.is_set():
            self._wanted.set()
        if self._pid != os.getpid():
            self._start()

    def _start(self) -> None:
        with self._starting:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                threading.Thread(target=self._run, name="rmq-task-starts", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            while self._begun:
                time.sleep(max(0.0, self._begun[0][0] + SECONDS - time.monotonic()))
                try:
                    self.note()
                except Exception as error:  # noqa: BLE001 - the thread has to go on
                    self._complain("noted", "Cannot note which tasks run: %s", error)

    def note(self) -> None:
        """Note the starts that are due, in one round trip."""
        until, due = time.monotonic() - SECONDS, []
        while self._begun and self._begun[0][0] <= until:
            _, attempt = self._begun.popleft()
            if not attempt.ended:
                due.append(attempt.start())
        for answer in run_all(self._broker(), due) if due else ():
            if isinstance(answer, RmqError):
                raise answer


__all__ = ["StartRecords"]
