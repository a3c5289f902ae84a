"""Waits for a Redis that is briefly unavailable, instead of failing a query."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from django_rmq.exceptions import ServerUnavailable

logger = logging.getLogger("django_rmq.spark")

SAY_SECONDS = 10.0
"""Seconds between two log lines about the same wait."""

PAUSES = (0.05, 1.0)
"""Seconds between two tries: the first pause, and the longest."""

Result = TypeVar("Result")


class RetryPolicy:
    """Repeats work while Redis is unavailable: ``patience(work)`` returns the result of ``work()``.

    ``seconds``: how long one piece of work is repeated; after that the last ``ServerUnavailable`` is raised.
    All other errors are raised at once. The work must be repeatable, because a request whose answer was lost
    may have run.
    """

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds = seconds
        self.what = what
        """The subject of the work, for log lines."""

    def __call__(self, work: Callable[[], Result]) -> Result:
        began = time.monotonic()
        next_line, pause = began, PAUSES[0]
        while True:
            try:
                found = work()
            except ServerUnavailable as error:
                waited = time.monotonic() - began
                if waited >= self.seconds:
                    raise
                if began + waited >= next_line:
                    next_line = began + waited + SAY_SECONDS
                    logger.warning(
                        "%s: Redis is unavailable for %.0f s (%s). The request is repeated for %.0f s more",
                        self.what,
                        waited,
                        error,
                        self.seconds - waited,
                    )
                time.sleep(min(pause, self.seconds - waited))
                pause = min(2 * pause, PAUSES[1])
            else:
                if next_line != began:
                    logger.warning(
                        "%s: Redis is available again after %.1f s", self.what, time.monotonic() - began
                    )
                return found
