"""Slots that another worker has acquired since we did, and when we acquire them again.

Usually the coordinator takes such a slot away from us soon. If it does not, the slot has come back to us meanwhile,
and nobody else will ask for its messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from django_rmq.core.calls import taking
from django_rmq.core.calls.broker import Broker, run_all
from django_rmq.core.consumer.clocks import uptime
from django_rmq.core.consumer.slots import Place

LOOK_SECONDS = 0.25
"""Between two looks whether the coordinator has confirmed that a fenced slot is ours."""


class Fences:
    """The fenced slots of the worker ``owner``.

    ``confirmed`` returns when (by ``uptime``) the coordinator last asked who owns what, and was told what it has told
    us since; minus infinity if it cannot say. Whoever fenced us acted on an assignment that was made before. So a
    slot that an answer to a later question still gives to us is ours again.
    """

    def __init__(self, broker: Broker, owner: str, confirmed: Callable[[], float]) -> None:
        self.confirmed = confirmed
        self._broker = broker
        self._owner = owner
        self._places: set[Place] = set()

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, place: Place) -> None:
        """Note that a prepare of a slot was answered ``fenced`` just now."""
        place.fenced_at, place.untaken_since = uptime(), None
        self._places.add(place)

    def remove(self, place: Place) -> None:
        """Note that a slot is no longer ours, or is to be acquired again."""
        place.fenced_at = 0.0
        self._places.discard(place)

    def ours_at(self, confirmed: float) -> list[Place]:
        """Return the slots that are still ours by an answer to a question asked at ``confirmed``."""
        return [place for place in self._places if place.fenced_at < confirmed]

    def left_alone(self, untaken: Sequence[Place]) -> Iterator[Place]:
        """Yield those of ``untaken``, in which messages are due, that nobody has taken from for a time-out.

        This is for the time in which the coordinator cannot say who owns what.
        """
        calls = [taking.held(place.topic, place.slot, self._owner, 0, 1) for place in untaken]
        now = time.monotonic()
        for place, held in zip(untaken, run_all(self._broker, calls), strict=True):
            if held != []:
                place.untaken_since = None
            elif place.untaken_since is None:
                place.untaken_since = now
            elif now - place.untaken_since > place.topic.timeout:
                yield place
