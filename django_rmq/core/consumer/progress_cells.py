"""Cells: the marks of an event loop, whose batches end in any order.

An executor thread writes its marks into a ring. Here a batch that runs for long would find others in its place, and
what it writes would be taken for theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from django_rmq.core.consumer.progress import MARKS, ThreadProgress


class Taken:
    """The cells of one batch, in the order of its members."""

    __slots__ = ("_cells", "_places")

    def __init__(self, cells: ProgressCells, places: list[int]) -> None:
        self._cells = cells
        self._places = places

    def note(self, start: int, states: bytes) -> None:
        """Record the states of some members, from the one at ``start``."""
        recorded = self._cells.states
        for place, state in zip(self._places[start : start + len(states)], states, strict=False):
            recorded[place] = state

    def end(self) -> None:
        """Let others have the cells. What they hold stays until all other cells were used."""
        self._cells.free(self._places)


class ProgressCells:
    """The cells of one event loop. Without ``marks`` nothing is recorded."""

    def __init__(self, marks: ThreadProgress | None) -> None:
        self._marks = marks
        self.states = marks.states if marks is not None else memoryview(b"")
        # The one that was freed first is used first: it is the likeliest to be settled.
        self._free = deque(range(MARKS if marks is not None else 0))

    def take(self, topic: str, slot: int, receipt: int, members: Sequence[bytes]) -> Taken:
        """Record which messages are next, and return their cells: none if there are too few."""
        if self._marks is None or len(self._free) < len(members):
            return Taken(self, [])
        places = [self._free.popleft() for _ in members]  # rule: shares_cells
        for place, member in zip(places, members, strict=True):
            self._marks.put(place, topic, slot, receipt, member)
        return Taken(self, places)

    def free(self, places: list[int]) -> None:
        """Let others have these cells."""
        self._free.extend(places)


__all__ = ["ProgressCells", "Taken"]
