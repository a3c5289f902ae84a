"""Whether a worker has to end, and why."""

from __future__ import annotations

from collections.abc import Iterable

from django_rmq.core.consumer.batch import Batch
from django_rmq.exceptions import SlotMoved


class ShutdownState:
    """Flags that any part of the worker may set and read."""

    def __init__(self) -> None:
        self.begun = False
        """Whether the worker has stopped taking messages."""
        self.forced = False
        """Whether the shutdown time-out cut a listener short, or something could not be settled."""
        self.overran: list[Batch] = []
        """The batches whose listener exceeded HARD_TIMEOUT; nothing waits for them, and the process ends."""
        self.moved: SlotMoved | None = None
        """The error to raise at the end, if a slot was given another slot count."""

    def is_over(self, batches: Iterable[Batch]) -> bool:
        """Return whether nothing is left to wait for among the ``batches`` in hand."""
        return all(batch in self.overran for batch in batches)


__all__ = ["ShutdownState"]
