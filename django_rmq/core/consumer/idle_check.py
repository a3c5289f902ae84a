"""Rest: decides whether nothing is left to do, so that a burst or MAX_IDLE_TIME ends the worker."""

from __future__ import annotations

import time
from collections.abc import Callable

from django_rmq.core.consumer.acks import AckQueue
from django_rmq.core.consumer.in_flight import InFlight
from django_rmq.core.consumer.mailbox import Mailbox
from django_rmq.core.consumer.options import WorkerOptions
from django_rmq.core.consumer.slot_schedule import SlotSchedule
from django_rmq.core.consumer.slots import SlotTable

SETTLING_SECONDS = 0.05
"""Seconds between two checks of a burst worker whether its set of slots is final."""


class IdleCheck:
    """Knows when a worker is done. ``owns_all`` returns whether all slots assigned to this worker have been
    put into ``inbox``."""

    def __init__(
        self,
        terms: WorkerOptions,
        hand: InFlight,
        settling: AckQueue,
        places: SlotTable,
        schedule: SlotSchedule,
        owns_all: Callable[[], bool],
        inbox: Mailbox,
    ) -> None:
        self._terms = terms
        self._hand = hand
        self._settling = settling
        self._places = places
        self._schedule = schedule
        self._owns_all = owns_all
        self._inbox = inbox

    def is_over(self) -> bool:
        """Return whether the worker has nothing more to do."""
        return self._is_idle() and ((self._terms.burst and self._burst_is_over()) or self._idle_too_long())

    def due(self, now: float) -> float:
        """Return the monotonic time at which to ask ``is_over`` again."""
        if self._hand.messages:
            return float("inf")
        due = now + SETTLING_SECONDS if self._terms.burst else float("inf")
        idle = self._terms.max_idle_time
        return due if idle is None else min(due, self._hand.last_work + idle)

    def _is_idle(self) -> bool:
        """Whether nothing is in hand, except what Redis refuses to settle."""
        return not self._hand.messages and all(
            place.shut_until and not place.away for place, _ in self._settling.pending
        )

    def _idle_too_long(self) -> bool:
        idle = self._terms.max_idle_time
        if idle is None or any(self._schedule.parked.values()):
            return False
        return time.monotonic() - self._hand.last_work >= idle

    def _burst_is_over(self) -> bool:
        if not self._owns_all():
            return False
        # Items that were put into the inbox until then may not have been read yet.
        self._inbox.hear()
        return self._is_idle() and self._drained()

    def _drained(self) -> bool:
        now = self._schedule.clock.ms()
        return not self._places.is_told_more and all(
            place.due > now or place.blocked_by or place.fenced_at or not place.owned
            for place in self._places.awake.values()
        )


__all__ = ["IdleCheck"]
