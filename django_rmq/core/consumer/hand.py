"""What a worker has in hand: the batches that are not yet settled, and the amount of work in them."""

from __future__ import annotations

import time

from django_rmq.core.consumer.batches import Batch
from django_rmq.core.consumer.slots import Place


class Hand:
    """The batches of one worker. Other threads may copy ``batches``; only the dispatcher's thread changes them."""

    def __init__(self, threads: int) -> None:
        self.batches: dict[int, Batch] = {}
        """The batches by their ``id``."""
        self.messages = 0
        """The number of messages in the batches."""
        self.load = [0.0] * threads
        """The estimated seconds of work in hand of each thread."""
        self.last_work = time.monotonic()
        """When the worker last took or finished something."""

    def __contains__(self, batch: Batch) -> bool:
        return id(batch) in self.batches

    def of(self, place: Place) -> list[Batch]:
        """Return the batches of a slot."""
        return [batch for batch in self.batches.values() if batch.place is place] if place.batches else []

    def add(self, batch: Batch) -> None:
        """Add a batch that Redis has handed out."""
        self.batches[id(batch)] = batch
        self.messages += len(batch.messages)
        self.last_work = time.monotonic()
        batch.place.batches += 1

    def remove(self, batch: Batch) -> bool:
        """Remove a batch that has ended; return whether it was there."""
        if self.batches.pop(id(batch), None) is None:
            return False
        batch.place.batches -= 1
        self.messages -= len(batch.messages)
        if batch.thread is not None:
            self.load[batch.thread.index] -= batch.cost
        return True


__all__ = ["Hand"]
