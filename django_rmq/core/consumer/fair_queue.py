"""Turns: which batches of async listeners may run now, and which wait for a turn.

The event loop holds a lock around each call, because the dispatcher adds batches and takes them back.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any

from django_rmq.core.consumer.batch import Batch


class FairQueue:
    """The batches of one event loop. ``concurrency``: topic -> the number of batches that may run at the same time."""

    def __init__(self, concurrency: Mapping[str, int]) -> None:
        self._concurrency = concurrency
        self._running: Counter[str] = Counter()
        """Topic -> the number of batches that run."""
        self._ready: defaultdict[str, list[Batch]] = defaultdict(list)
        """Topic -> batches that wait until fewer run, at most one of each serial slot."""
        self._behind: dict[Any, deque[Batch]] = {}
        """Serial slot -> batches that wait for the one that runs or is ready. No entry: there is none."""

    def __bool__(self) -> bool:
        """Return whether any batch waits."""
        return any(self._ready.values()) or any(self._behind.values())

    def add(self, batch: Batch) -> None:
        """Add a batch that waits."""
        if batch.topic.serial:
            behind = self._behind.get(batch.place)
            if behind is not None:  # rule: slots_overlap
                behind.append(batch)
                return
            self._behind[batch.place] = deque()
        self._ready[batch.topic.name].append(batch)

    def take(self) -> list[Batch]:
        """Return the batches that may run now: the highest priority first, else the first to come."""
        taken: list[Batch] = []
        for topic, ready in self._ready.items():
            room = self._concurrency[topic] - self._running[topic]  # rule: runs_all_at_once
            if not ready or room <= 0:
                continue
            if ready[0].topic.is_priority:
                ready.sort(key=lambda batch: -batch.head)
            taken += ready[:room]
            self._running[topic] += len(ready[:room])
            del ready[:room]
        return taken

    def ended(self, batch: Batch) -> None:
        """Let the next batch have the turn of one that ran."""
        self._running[batch.topic.name] -= 1
        self._next_of_slot(batch)

    def remove(self, batch: Batch) -> bool:
        """Remove a batch that waits. False: it does not."""
        ready, behind = self._ready[batch.topic.name], self._behind.get(batch.place, ())
        if batch in ready:
            ready.remove(batch)
            self._next_of_slot(batch)
            return True
        if batch in behind:
            self._behind[batch.place].remove(batch)
            return True
        return False

    def _next_of_slot(self, batch: Batch) -> None:
        if not batch.topic.serial:
            return
        if behind := self._behind[batch.place]:
            self._ready[batch.topic.name].append(behind.popleft())
        else:
            del self._behind[batch.place]


__all__ = ["FairQueue"]
