"""The schedule: decides when each slot is asked.

A slot that is due now waits for room, a slot of a topic whose limits leave no room is parked, and every other
slot is in a heap, ordered by the server's time at which something in it is due.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import count

from django_rmq.core.consumer.server_clock import ServerClock
from django_rmq.core.consumer.slots import SlotState, SlotTable

ENDING_MS = 100
"""A slot whose busy time ended up to this many ms ago is asked again at once, because clocks are read in
milliseconds."""


class SlotSchedule:
    """The schedule of one worker. ``depth`` returns how many batches of a slot may be in hand."""

    def __init__(self, places: SlotTable, depth: Callable[[SlotState], int], poll_seconds: float) -> None:
        self.clock = ServerClock()
        self.waiting: dict[SlotState, None] = {}
        """Due slots, to be prepared as soon as their thread has room."""
        self.parked: defaultdict[str, dict[SlotState, None]] = defaultdict(dict)
        """Topic -> its due slots that wait until the topic's limits leave room."""
        self._places = places
        self._depth = depth
        self._poll_seconds = poll_seconds
        self._heap: list[tuple[float, int, SlotState]] = []
        self._entries = count(1)

    def ready(self, place: SlotState) -> None:
        """Prepare ``place`` as soon as possible.

        A slot that will become ready by itself is left out: when it is acquired, or when one of its batches
        ends.
        """
        place.due = 0.0
        place.entry = 0
        if place.asked:
            place.again = True
            return
        if not (place.owned and place.acquired) or place.blocked_by or place.batches >= self._depth(place):
            return
        rest = max(place.not_before, place.shut_until)
        if rest and rest > (now := time.monotonic()):
            self.waiting.pop(place, None)
            self.look_at(place, self.clock.ms() + (rest - now) * 1000)
        else:
            self.waiting[place] = None

    def look_at(self, place: SlotState, due: float | None) -> None:
        """Check ``place`` when the server's clock shows ``due`` (None: nothing is waiting)."""
        if due is None or not place.owned:
            place.due, place.entry = float("inf"), 0
            return
        place.due, place.entry = due, next(self._entries)
        heapq.heappush(self._heap, (due, place.entry, place))
        if len(self._heap) > 2 * len(self._places.awake) + 64:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].entry]
            heapq.heapify(self._heap)

    def collect_due(self) -> None:
        """Make those slots ready whose time has come."""
        now = self.clock.ms()
        while self._heap and self._heap[0][0] <= now:
            _, entry, place = heapq.heappop(self._heap)
            if entry == place.entry:
                self.ready(place)

    def due(self, now: float) -> float:
        """Return the monotonic time at which the first slot of the heap is due."""
        while self._heap and self._heap[0][1] != self._heap[0][2].entry:
            heapq.heappop(self._heap)
        return now + (self._heap[0][0] - self.clock.ms()) / 1000 if self._heap else float("inf")

    # --- slots that must not be asked now

    def pause(self, place: SlotState, due: float | None, *, is_paused: bool) -> None:
        """Ask a busy or paused slot later.

        A wake-up or a time-out ends the wait; if they are lost, the slow poll asks again.
        """
        if is_paused:
            place.not_before = time.monotonic() + 10 * self._poll_seconds
        elif due is None or due <= (now := self.clock.ms()):
            # What ends just now has ended by the local clock, but not yet by the server's.
            is_ending = due is not None and due > now - ENDING_MS
            place.not_before = time.monotonic() + (0.01 if is_ending else self._poll_seconds)
        self.look_at(place, due)

    def shut(self, place: SlotState, seconds: float) -> None:
        """Leave a slot alone for a while."""
        place.shut_until = time.monotonic() + seconds
        self.waiting.pop(place, None)
        self.look_at(place, self.clock.ms() + seconds * 1000)

    def park(self, place: SlotState) -> None:
        """Set a waiting slot aside until its topic's limits leave room."""
        del self.waiting[place]
        self.parked[place.topic.name][place] = None

    def drop(self, place: SlotState) -> None:
        """Stop asking a slot."""
        place.entry = 0
        self.waiting.pop(place, None)
        self.parked[place.topic.name].pop(place, None)


__all__ = ["SlotSchedule"]
