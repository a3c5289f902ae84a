"""What a worker has in hand: the batches that are not yet settled, and the amount of work in them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from django_rmq.core.consumer.batch import Batch
from django_rmq.core.consumer.server_clock import uptime
from django_rmq.core.consumer.slots import SlotState

TAKEN_SECONDS = 1.0
"""Seconds after which nobody knows when a call ends: its thread gets nothing more, and other threads work on its slots."""

LONG_CALL_SECONDS = 0.1
"""Seconds from which a call that runs changes the estimated work of its thread."""


class InFlight:
    """The batches of one worker. Other threads may copy ``batches``; only the dispatcher's thread changes them."""

    def __init__(self, threads: int) -> None:
        self.batches: dict[int, Batch] = {}
        """The batches by their ``id``."""
        self.messages = 0
        """The number of messages in the batches."""
        self.load = [0.0] * threads
        """The estimated seconds of work in hand of each thread."""
        self._ran = [0.0] * threads
        """For how many seconds the present call of each thread has run, or has blocked the event loop."""
        self.last_work = time.monotonic()
        """When the worker last took or finished something."""

    def __contains__(self, batch: Batch) -> bool:
        return id(batch) in self.batches

    def of(self, place: SlotState) -> list[Batch]:
        """Return the batches of a slot."""
        return [batch for batch in self.batches.values() if batch.place is place] if place.batches else []

    def add(self, batch: Batch) -> None:
        """Add a batch that Redis has handed out."""
        self.batches[id(batch)] = batch
        self.messages += len(batch.messages)
        self.last_work = time.monotonic()
        batch.place.batches += 1

    def is_taken(self, thread: int) -> bool:
        """Return whether a thread's call has run for so long that nobody knows when it ends."""
        return self._ran[thread] >= TAKEN_SECONDS

    def estimate(self, running: Iterable[Batch], blocked_seconds: float) -> None:
        """Correct the estimates of threads whose call takes longer than expected.

        ``running`` has the batch that each thread runs; ``blocked_seconds`` is how long something has blocked the event loop.
        """
        now = uptime()
        self._ran = [0.0] * len(self.load)
        self._ran[-1] = blocked_seconds
        for batch in running:
            # The thread writes it, and may end the call at any time.
            since, thread = batch.running_since, batch.thread
            if since is None or thread is None or (ran := now - since) < LONG_CALL_SECONDS:
                continue
            if batch in self:
                self._ran[thread.index] = ran
                self.load[thread.index] += max(0.0, ran - batch.cost)
                batch.cost = max(batch.cost, ran)

    def ran(self, thread: int) -> float:
        """Return for how many seconds the present call of a thread, or a block of the event loop, has lasted."""
        return self._ran[thread]

    def slow(self, seconds: float | None = None) -> list[Batch]:
        """Return the batches whose present call has run for so long that nobody knows when it ends, or for ``seconds``."""
        before = uptime() - (TAKEN_SECONDS if seconds is None else seconds)
        return [batch for batch in self.batches.values() if (since := batch.running_since) and since < before]

    def remove(self, batch: Batch) -> bool:
        """Remove a batch that has ended; return whether it was there."""
        if self.batches.pop(id(batch), None) is None:
            return False
        batch.place.batches -= 1
        self.messages -= len(batch.messages)
        if batch.thread is not None:
            self.load[batch.thread.index] -= batch.cost
        return True


__all__ = ["InFlight"]
