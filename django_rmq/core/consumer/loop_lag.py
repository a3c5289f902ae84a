"""The pulse of an event loop: its signs of life, and for how long calls have kept it from all others."""

from __future__ import annotations

import asyncio
from typing import Any

from django_rmq.core.consumer.server_clock import uptime

TICK_SECONDS = 0.25
"""Seconds between two signs of life of the loop."""


class LoopLag:
    """Beats in a loop. Other threads may ask it anything."""

    def __init__(self) -> None:
        self.ticked = uptime()
        """When the loop gave its last sign of life."""
        self.calls: set[asyncio.Task[Any]] = set()
        """The tasks of the calls that run."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.blocked = 0.0
        """Seconds so far in which the loop was blocked, up to the last sign of life."""
        self._blocks: tuple[float, asyncio.Task[Any] | None] = (0.0, None)
        """The last sign of life before a block, and the task that was first seen to block the loop since."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to beat in ``loop``."""
        self._loop = loop
        loop.call_soon(self._tick, loop)

    def silent(self) -> float:
        """Return the seconds since the last sign of life."""
        return uptime() - self.ticked

    def blocked_for(self, task: asyncio.Task[Any] | None) -> float:
        """Return the seconds so far in which the loop was blocked for a call.

        A block that goes on counts only if another call is the cause. A task that a listener has started may be anybody's.
        """
        blocked, late, ticked = self.blocked, self.silent() - TICK_SECONDS, self.ticked
        if late <= 0 or self._loop is None:
            return blocked
        if self._blocks[0] != ticked:
            self._blocks = (ticked, asyncio.current_task(self._loop))
        cause = self._blocks[1]
        return blocked + late if cause in self.calls and cause is not task else blocked

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self.blocked += max(0.0, self.silent() - TICK_SECONDS)
        self.ticked = uptime()
        loop.call_later(TICK_SECONDS, self._tick, loop)


__all__ = ["LoopLag"]
