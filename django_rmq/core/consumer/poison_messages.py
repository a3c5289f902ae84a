"""Suspects: messages whose last delivery timed out. One may have killed its process, and must not take others with it.

See decision 0013. The dispatcher asks here which of their batches may run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from django_rmq.core.consumer.batch import Batch

GRAVE = 2  # rule: every_suspect_waits
"""The number of failures from which suspects run one at a time."""


class _Kind(NamedTuple):
    is_last: bool
    """Whether one more failure is its end; then it runs beside no other suspect."""
    is_grave: bool


class PoisonMessages:
    """The suspects in hand, in the order in which they came; each is a batch of one message."""

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
        # rule: the_last_try_has_company
        kind = _Kind(left == 0, batch.messages[0].max_retries - left >= GRAVE)
        waits = kind.is_last and bool(self._kinds)
        # rule: repeated_suspects_run_together
        waits = waits or any(one.is_last or (one.is_grave and kind.is_grave) for one in self._kinds.values())
        self._kinds[batch] = kind
        if waits:
            self._waiting.add(batch)
        return not waits

    def remove(self, batch: Batch) -> list[Batch]:
        """Remove a batch that has ended; return the suspects that waited for it and may run now."""
        self._waiting.discard(batch)
        if self._kinds.pop(batch, None) is None or not self._waiting:
            return []
        found = [other for other in self._free() if other in self._waiting]
        self._waiting.difference_update(found)
        return found

    def _free(self) -> Iterator[Batch]:
        """Yield those that no earlier one keeps waiting. Later ones do not count, so that none waits without end."""
        last = grave = False
        for place, (batch, kind) in enumerate(self._kinds.items()):
            if not (last or (kind.is_last and place) or (kind.is_grave and grave)):
                yield batch
            last, grave = last or kind.is_last, grave or kind.is_grave
