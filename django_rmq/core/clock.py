"""The clocks of a worker: one that counts while the machine is suspended, and an estimate of the clock of Redis."""

from __future__ import annotations

import time
from functools import partial

uptime = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Return seconds on a clock that also counts while the machine is suspended, as time-outs and sessions do."""


class ServerClock:
    """An estimate of the clock of Redis. Each reading bounds its difference to ``uptime``, and readings that agree narrow it."""

    def __init__(self) -> None:
        self._low = self._high = 0.0

    def note(self, before: float, server_ms: int, after: float) -> None:
        """Add an answer of TIME (truncated to ms), read between two instants of ``uptime``."""
        low, high = server_ms - after * 1000, server_ms + 1 - before * 1000
        self._low, self._high = max(self._low, low), min(self._high, high)
        if self._low > self._high:
            # This is the first reading, or one of the clocks was set or has drifted since.
            self._low, self._high = low, high

    def ms(self) -> float:
        return uptime() * 1000 + (self._low + self._high) / 2

    def uptime_at(self, server_ms: float) -> float:
        """Return the ``uptime`` at which the clock of Redis showed this, or an earlier one."""
        return (server_ms - self._high) / 1000
