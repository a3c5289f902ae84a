"""Trouble with one slot: that slot is left alone for a while, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable

from django_rmq.core.consumer.shutdown import ShutdownState
from django_rmq.core.consumer.slot_schedule import SlotSchedule
from django_rmq.core.consumer.slots import SlotState
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.exceptions import NodeUnavailable, RmqError, ServerRefused, ServerTrouble

REST_SECONDS = 5.0
"""Seconds for which a slot is left alone if Redis refuses to access its keys."""

NODE_REST_SECONDS = 0.25
"""Seconds for which a slot is left alone if its node of a Redis Cluster does not answer; the others go on."""

RENEWAL_SECONDS = 5.0
"""Seconds between two new subscriptions while nodes do not answer."""


def concerns_all(error: RmqError) -> bool:
    """Return whether an error concerns the whole server, rather than a slot or a node."""
    return isinstance(error, ServerTrouble) and not isinstance(error, (ServerRefused, NodeUnavailable))


class SlotErrors:
    """Handles errors of slots. ``renew`` makes a new subscription to wake-ups, whose node may be the one that fails."""

    def __init__(
        self, schedule: SlotSchedule, ending: ShutdownState, complain: LogThrottle, renew: Callable[[], None]
    ) -> None:
        self.complain = complain
        self._schedule = schedule
        self._ending = ending
        self._renew = renew
        self._next_renewal = 0.0

    def of(self, place: SlotState, error: RmqError) -> ServerTrouble | None:
        """Return an error that concerns the whole server; for any other, leave the slot alone for a while."""
        if isinstance(error, NodeUnavailable) and not self._ending.begun:
            self._leave_node_alone(place, error)
            return None
        if isinstance(error, ServerTrouble) and not isinstance(error, ServerRefused):
            return error
        self.complain(
            f"{place.topic.name}/{type(error).__name__}",
            f"Cannot process topic {place.topic.name} slot {place.slot}: %s",
            error,
        )
        self._schedule.shut(place, REST_SECONDS)
        return None

    def _leave_node_alone(self, place: SlotState, error: NodeUnavailable) -> None:
        """Ask a slot later whose node does not answer, while the slots of other nodes go on."""
        self.complain("node", "Some slots are unavailable (%s); trying again", error)
        self._schedule.shut(place, NODE_REST_SECONDS)
        place.away = True
        now = time.monotonic()
        if now >= self._next_renewal:
            self._next_renewal = now + RENEWAL_SECONDS
            self._renew()


__all__ = ["NODE_REST_SECONDS", "SlotErrors", "concerns_all"]
