"""Slots that another worker has acquired after this one, and when to acquire them again.

Usually the coordinator soon takes such a slot away from this worker. If it does not, the slot has come back
meanwhile, and no other worker will ask for its messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from django_rmq.core.commands import fetch
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.consumer.server_clock import uptime
from django_rmq.core.consumer.slots import SlotState

LOOK_SECONDS = 0.25
"""Seconds between two checks whether the coordinator has confirmed that a fenced slot belongs to this worker."""


class FencedSlots:
    """The fenced slots of the worker ``owner``.

    ``confirmed`` returns the ``uptime`` at which the coordinator last asked for the assignment whose result
    this worker has received; minus infinity if unknown. The worker that fenced this one acted on an earlier
    assignment. So a slot that the answer to a later question still assigns to this worker belongs to it
    again.
    """

    def __init__(self, broker: Broker, owner: str, confirmed: Callable[[], float]) -> None:
        self.confirmed = confirmed
        self._broker = broker
        self._owner = owner
        self._places: set[SlotState] = set()

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, place: SlotState) -> None:
        """Record that a prepare of a slot was just answered ``fenced``."""
        place.fenced_at, place.untaken_since = uptime(), None
        self._places.add(place)

    def remove(self, place: SlotState) -> None:
        """Record that a slot is no longer this worker's, or is to be acquired again."""
        place.fenced_at = 0.0
        self._places.discard(place)

    def ours_at(self, confirmed: float) -> list[SlotState]:
        """Return the slots that are still this worker's by an answer to a question asked at ``confirmed``."""
        # rule: stays_away_from_its_own
        return [place for place in self._places if place.fenced_at < confirmed]

    def left_alone(self, untaken: Sequence[SlotState]) -> Iterator[SlotState]:
        """Yield the slots of ``untaken``, in which messages are due, from which nobody has taken for the
        length of a time-out.

        It is used while the coordinator cannot say who owns what.
        """
        calls = [fetch.held(place.topic, place.slot, self._owner, 0, 1) for place in untaken]
        now = time.monotonic()
        for place, held in zip(untaken, run_all(self._broker, calls), strict=True):
            if held != []:
                place.untaken_since = None
            elif place.untaken_since is None:
                place.untaken_since = now
            elif now - place.untaken_since > place.topic.timeout:
                yield place
