"""Requests of this process that wait for something: how many at a time, in all and of one user.

Each holds a thread of its web server, and threads are what everybody else needs, probes included. Nothing is kept in Redis:
who gets no seat is answered at once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from django_rmq.operations.actors import Actor


class Seats:
    """Counts who waits. One for each process; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @contextmanager
    def seat(self, actor: Actor, most: int, each: int) -> Iterator[bool]:
        """Say whether ``actor`` may wait, while up to ``most`` wait in all and up to ``each`` of one user."""
        who = f"{actor.via}:{getattr(actor.user, 'pk', None) or actor.name}"
        with self._lock:
            is_free = self._taken.total() < most and self._taken[who] < each
            if is_free:
                self._taken[who] += 1
        try:
            yield is_free
        finally:
            if is_free:
                with self._lock:
                    self._taken[who] -= 1
                    if not self._taken[who]:
                        del self._taken[who]


seats = Seats()


__all__ = ["Seats", "seats"]
