"""Holds a batch back until enough messages are due for it, or some have waited long enough."""

from __future__ import annotations

import time
from collections.abc import Callable


class MinBatch:
    """Whether a batch may begin: with ``least`` messages, or ``delay`` seconds after there were fewer."""

    def __init__(self, least: int, delay: float) -> None:
        self._least = least
        self._delay = delay
        self._since: float | None = None
        """When (monotonic) messages were first seen to be due, but too few."""

    def is_enough(self, due: Callable[[], int]) -> bool:
        """Return whether a batch may begin. ``due``: counts what could be claimed; not called if any number will do."""
        if self._least <= 1:
            return True
        found = due()
        if not 0 < found < self._least:
            self._since = None
            return found > 0
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since < self._delay:
            return False
        self._since = None
        return True
