"""Polling: asks sleeping slots for their next due times, so that foreign sends and lost wake-ups are found."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

from django_rmq.core.commands import ack, inspect
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.consumer.acquisition import SlotAcquirer
from django_rmq.core.consumer.slot_errors import SlotErrors, concerns_all
from django_rmq.core.consumer.slot_schedule import SlotSchedule
from django_rmq.core.consumer.slots import SlotState, SlotTable
from django_rmq.exceptions import RmqError, ServerTrouble

POLL_SECONDS = 1.0
"""Seconds between two slow polls: the delay after a foreign ZADD or a lost wake-up."""

HEADS = 1024
"""The number of slots asked for by one slow-poll script."""

POLLED = 4 * HEADS
"""The maximum number of slots asked by one slow poll. A worker with more of them asks for all within several
polls."""

Sleeping = tuple[int, SlotState | None]
"""A slot, and its object if it has one."""


class DuePoll:
    """The slow poll of one worker."""

    def __init__(
        self,
        broker: Broker,
        places: SlotTable,
        schedule: SlotSchedule,
        troubles: SlotErrors,
        acquiring: SlotAcquirer,
        poll_seconds: float,
    ) -> None:
        self.due = 0.0
        """Monotonic time of the next poll."""
        self._broker = broker
        self._places = places
        self._schedule = schedule
        self._troubles = troubles
        self._acquiring = acquiring
        self._poll_seconds = poll_seconds
        self._round: Iterator[tuple[str, int, SlotState | None]] | None = None
        """The slots that the slow poll has not yet asked in this round."""
        self._hurries = False
        """Whether wake-ups may have been lost; then the slow poll goes through all slots without a pause."""

    def hurry(self) -> None:
        """Ask all slots soon, because wake-ups may have been lost."""
        self.due, self._hurries, self._round = 0.0, True, None

    def poll(self) -> None:
        """Ask for the next due times of sleeping slots. Raises trouble that concerns the whole server."""
        before = time.monotonic()
        server = self._broker.now_ms()
        self._schedule.clock.note(before, server, time.monotonic())
        blocked = list(self._places.blocked)
        pipeline = self._broker.pipeline()
        asked = self._parts(server)
        answers = [
            pipeline.add(inspect.heads(self._places.topics[name], [slot for slot, _ in part]))
            for name, part in asked
        ]
        # Nothing is prepared in these until a listener returns, so nothing else would time out their
        # messages.
        expired = [pipeline.add(ack.expire(place.topic, place.slot)) for place in blocked]
        pipeline.execute()
        untaken: list[SlotState] = []
        trouble: ServerTrouble | None = None
        for (name, part), answer in zip(asked, answers, strict=True):
            heads = answer.result()
            if isinstance(heads, RmqError):
                self._troubles.complain("heads", "The slow poll failed: %s", heads)
                trouble = heads if isinstance(heads, ServerTrouble) and concerns_all(heads) else trouble
                continue
            untaken += self._wake(name, part, heads, server)
        for place, ended in zip(blocked, expired, strict=True):
            error = ended.result()
            if isinstance(error, RmqError):
                trouble = self._troubles.of(place, error) or trouble
        if untaken:
            for place in self._acquiring.fences.left_alone(untaken):
                self._acquiring.acquire_fenced(place)
        if trouble is not None:
            raise trouble
        self._hurries &= self._round is not None
        self.due = 0.0 if self._hurries else time.monotonic() + self._poll_seconds

    def _parts(self, server: float) -> list[tuple[str, list[Sleeping]]]:
        """Return the slots to ask, in groups of the size of one script."""
        by_topic: defaultdict[str, list[Sleeping]] = defaultdict(list)
        for name, slot, place in self._next(server):
            by_topic[name].append((slot, place))
        return [
            (name, found[start : start + HEADS])
            for name, found in by_topic.items()
            for start in range(0, len(found), HEADS)
        ]

    def _wake(
        self, name: str, part: list[Sleeping], heads: Sequence[float | None], server: float
    ) -> list[SlotState]:
        """Make those slots ready in which something is due earlier than known; return the fenced ones that are due."""
        untaken: list[SlotState] = []
        for (slot, known), due in zip(part, heads, strict=True):
            place = known
            if place is None:
                place = self._places.get(name, slot) if due is not None else None
            if place is None:
                continue
            if place.fenced_at:
                if due is not None and due <= server:
                    untaken.append(place)
                else:
                    place.untaken_since = None
            elif due is not None and due < place.due:
                # Even if that is later than now: prepare stores in Redis again until when this worker sleeps.
                self._schedule.ready(place)
        return untaken

    def _next(self, server: float) -> list[tuple[str, int, SlotState | None]]:
        """Return the next sleeping slots; all of them come in turn."""
        if self._round is None or len(self._places) <= POLLED:
            self._round = self._places.round()
        sleeping = (
            (topic, slot, place)
            for topic, slot, place in self._round
            if place is None
            or (place.blocked_by is None and (place.fenced_at or (place.acquired and place.due > server)))
        )
        found = list(islice(sleeping, POLLED))
        if len(found) < POLLED or len(self._places) <= POLLED:
            self._round = None
        return found


__all__ = ["POLL_SECONDS", "DuePoll"]
