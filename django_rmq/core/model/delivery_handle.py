"""What the listener of a message can say and learn about its delivery while it has it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from django_rmq.core.model.failure_records import cut_error
from django_rmq.core.model.limits import is_number, shown
from django_rmq.core.model.outcome import MAX_TEXT
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ServerTrouble

PROGRESS_SECONDS = 1.0
"""Seconds between two reports of a message's progress that are written; those between are left out."""


class DeliveryControl(Protocol):
    """The holder of deliveries, which reports about them to Redis."""

    def extend(self, message: Any) -> bool:
        """Restart the time-out. False: the delivery has ended."""

    def report(self, message: Any, thousandths: int, text: bytes) -> bool:
        """Note the progress. False: the delivery has ended."""


class DeliveryHandle:
    """A delivery, as far as its listener speaks about it."""

    __slots__ = ("_holder", "_reported_at", "stopped")

    topic: Topic
    _holder: DeliveryControl | None
    """None: nobody hears it."""
    _reported_at: float
    """When the progress was last reported (monotonic)."""
    stopped: str
    """Why its listener has to stop: ``cancelled`` or ``overran``. Empty: it may go on."""

    @property
    def cancelled(self) -> bool:
        """Whether somebody has cancelled this delivery (``cancel_message``). Reading it costs no round trip."""
        return self.stopped == "cancelled"

    def extend(self) -> bool:
        """Restart the time-out. False: the delivery has ended, and another consumer may have the message."""
        return self._holder is None or self._holder.extend(self)

    async def aextend(self) -> bool:
        """Do what ``extend`` does, from a coroutine, whose event loop goes on meanwhile."""
        return await asyncio.to_thread(self.extend)

    def progress(self, fraction: float, text: str = "") -> bool:
        """Report that ``fraction`` (from 0 to 1) of the work is done, for its status (topics with OUTCOME_RETENTION).

        ``text``: what to say about it, of which 200 bytes are kept. At most one report per second is written;
        the others are left out, except one with 1. Returns whether it was written: False also if the delivery
        has ended, if Redis is unavailable, and on topics without OUTCOME_RETENTION.
        """
        return self._is_to_report(fraction) and self._report(fraction, text)

    async def aprogress(self, fraction: float, text: str = "") -> bool:
        """Do what ``progress`` does, from a coroutine, whose event loop goes on meanwhile."""
        return self._is_to_report(fraction) and await asyncio.to_thread(self._report, fraction, text)

    def _is_to_report(self, fraction: float) -> bool:
        if not (is_number(fraction) and 0 <= fraction <= 1):
            raise ValueError(f"the progress of a message must be from 0 to 1, got {shown(fraction)}")
        now = time.monotonic()
        is_soon = now - self._reported_at < PROGRESS_SECONDS
        if not self.topic.outcome_retention_ms or (is_soon and fraction < 1):
            return False
        self._reported_at = now
        return True

    def _report(self, fraction: float, text: str) -> bool:
        thousandths, said = round(fraction * 1000), cut_error(text, MAX_TEXT)
        try:
            return self._holder is not None and self._holder.report(self, thousandths, said)
        except ServerTrouble:
            return False
