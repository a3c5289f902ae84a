"""Which batch runs next: in a thread (``TurnQueue``), in the event loop (``FairQueue``), and among suspects (``Suspects``).

A suspect is a message whose last delivery timed out or ran for too long: it may kill its process. Redis delivers it alone
(``lua/slot/_choice.lua``). What is fetched next is decided by ``fetch_planner``, and which messages of a batch may begin by
``batch_run``.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from django_rmq.core.consumer.batch import Batch
from django_rmq.core.consumer.slots import ConsumedSlot


class TurnQueue:
    """The batches that wait for one executor thread: topics take turns, and of priority slots the highest head is first."""

    def __init__(self) -> None:
        self._waiting: list[Batch] = []
        self._turn = 0
        self._served: dict[str, int] = {}
        """Topic -> the turn in which it was last served."""

    def add(self, batch: Batch) -> None:
        """Add a batch that waits."""
        self._waiting.append(batch)

    def remove(self, batch: Batch) -> bool:
        """Remove a batch that waits; return whether it did."""
        if batch not in self._waiting:
            return False
        self._waiting.remove(batch)
        return True

    def take(self) -> Batch | None:
        """Return the batch that runs next, or None if none waits."""
        if not self._waiting:
            return None
        batch = self._waiting[0] if len(self._waiting) == 1 else self._choose()
        self._waiting.remove(batch)
        self._turn += 1
        self._served[batch.topic.name] = self._turn
        return batch

    def _choose(self) -> Batch:
        topic = min((batch.topic for batch in self._waiting), key=lambda t: self._served.get(t.name, 0))
        batches = [batch for batch in self._waiting if batch.topic.name == topic.name]
        if not topic.is_priority:
            return batches[0]
        best = max(batches, key=lambda batch: batch.head)
        # The receipts of a serial slot rise, so its older batch runs before its newer one, whatever their heads.
        # rule: overtakes_receipts
        return next(batch for batch in batches if batch.slot is best.slot) if topic.serial else best


class FairQueue:
    """The batches of one event loop. ``concurrency``: topic -> the number of batches that may run at the same time."""

    def __init__(self, concurrency: Mapping[str, int]) -> None:
        self._concurrency = concurrency
        self._active: Counter[str] = Counter()
        """Topic -> the number of batches that run."""
        self._ready: defaultdict[str, list[Batch]] = defaultdict(list)
        """Topic -> batches that wait until fewer batches run, at most one of each serial slot."""
        self._behind: dict[ConsumedSlot, deque[Batch]] = {}
        """Serial slot -> batches that wait for the one that runs or is ready; a slot without such a batch has no entry."""

    def __bool__(self) -> bool:
        """Return whether any batch waits."""
        return any(self._ready.values()) or any(self._behind.values())

    def add(self, batch: Batch) -> None:
        """Add a batch that waits."""
        if batch.topic.serial:
            behind = self._behind.get(batch.slot)
            if behind is not None:  # rule: slots_overlap
                behind.append(batch)
                return
            self._behind[batch.slot] = deque()
        self._ready[batch.topic.name].append(batch)

    def take(self) -> list[Batch]:
        """Return the batches that may run now: the highest priority first, else the first to come."""
        taken: list[Batch] = []
        for topic, ready in self._ready.items():
            capacity = self._concurrency[topic] - self._active[topic]  # rule: runs_all_at_once
            if not ready or capacity <= 0:
                continue
            if ready[0].topic.is_priority:
                ready.sort(key=lambda batch: -batch.head)
            taken += ready[:capacity]
            self._active[topic] += len(ready[:capacity])
            del ready[:capacity]
        return taken

    def ended(self, batch: Batch) -> None:
        """Let the next batch have the turn of one that ran."""
        self._active[batch.topic.name] -= 1
        self._next_of_slot(batch)

    def remove(self, batch: Batch) -> bool:
        """Remove a batch that waits; return whether it did."""
        ready, behind = self._ready[batch.topic.name], self._behind.get(batch.slot, ())
        if batch in ready:
            ready.remove(batch)
            self._next_of_slot(batch)
            return True
        if batch in behind:
            self._behind[batch.slot].remove(batch)
            return True
        return False

    def _next_of_slot(self, batch: Batch) -> None:
        if not batch.topic.serial:
            return
        if behind := self._behind[batch.slot]:
            self._ready[batch.topic.name].append(behind.popleft())
        else:
            del self._behind[batch.slot]


REPEATED = 2
"""The number of failures from which suspects run one at a time."""


class _Kind(NamedTuple):
    is_last: bool
    """Whether one more failure is its end; then it runs beside no other suspect."""
    is_repeated: bool


class Suspects:
    """The suspects in flight, in the order in which they came; each is a batch of one message."""

    def __init__(self) -> None:
        self._kinds: dict[Batch, _Kind] = {}
        self._waiting: set[Batch] = set()

    def __len__(self) -> int:
        return len(self._kinds)

    def __contains__(self, batch: Batch) -> bool:
        return batch in self._kinds

    def add(self, batch: Batch) -> bool:
        """Add a suspect; return whether it may run now. If not, a later ``remove`` returns it."""
        left = batch.messages[0].retries_left
        # If a process dies, all messages that it ran are charged, because it is unknown which one killed it. A message on
        # its last try would be dead by the fault of another.
        # rule: the_last_try_has_company
        kind = _Kind(left == 0, batch.messages[0].max_retries - left >= REPEATED)
        waits = kind.is_last and bool(self._kinds)
        # Two messages that have failed repeatedly might use up each other's retries.
        # rule: repeated_suspects_run_together
        waits = waits or any(
            one.is_last or (one.is_repeated and kind.is_repeated) for one in self._kinds.values()
        )
        self._kinds[batch] = kind
        if waits:
            self._waiting.add(batch)
        return not waits

    def remove(self, batch: Batch) -> list[Batch]:
        """Remove a batch that has ended; return the suspects that waited for it and may run now."""
        self._waiting.discard(batch)
        if self._kinds.pop(batch, None) is None or not self._waiting:
            return []
        idle = [other for other in self._free() if other in self._waiting]
        self._waiting.difference_update(idle)
        return idle

    def _free(self) -> Iterator[Batch]:
        """Yield the suspects that no earlier one keeps waiting. Later ones do not count, so that none waits without end."""
        last = repeated = False
        for position, (batch, kind) in enumerate(self._kinds.items()):
            if not (last or (kind.is_last and position) or (kind.is_repeated and repeated)):
                yield batch
            last, repeated = last or kind.is_last, repeated or kind.is_repeated
