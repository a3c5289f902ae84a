"""What a worker has in hand: the batches that are not settled yet, and the work they are for its threads."""

from __future__ import annotations

import time

from django_rmq.core.consumer.batches import Batch
from django_rmq.core.consumer.slots import Place


class Hand:
    """The batches of one worker. Other threads may copy ``batches``; only the dispatcher's changes them."""

    def __init__(self, threads: int) -> None:
        self.batches: dict[int, Batch] = {}
        """By their ``id``."""
        self.messages = 0
        """How many messages these are."""
        self.load = [0.0] * threads
        """Seconds of work in hand of each thread, as reckoned."""
        self.last_work = time.monotonic()
        """When something was taken or done last."""

    def __contains__(self, batch: Batch) -> bool:
        return id(batch) in self.batches

    def of(self, place: Place) -> list[Batch]:
        """Return the batches of a slot."""
        return [batch for batch in self.batches.values() if batch.place is place] if place.batches else []

    def add(self, batch: Batch) -> None:
        """Note a batch that Redis has handed out."""
        self.batches[id(batch)] = batch
        self.messages += len(batch.messages)
        self.last_work = time.monotonic()
        batch.place.batches += 1

    def remove(self, batch: Batch) -> bool:
        """Forget a batch that has ended; return whether it was there."""
        if self.batches.pop(id(batch), None) is None:
            return False
        batch.place.batches -= 1
        self.messages -= len(batch.messages)
        if batch.thread is not None:
            self.load[batch.thread.index] -= batch.cost
        return True


__all__ = ["Hand"]
