"""Limits how many requests of this process wait for something at the same time, in all and of one user.

Each holds a thread of its web server, which other requests need, including probes. Nothing is kept in Redis:
a request without a seat is answered at once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from django_rmq.operations.actors import Actor


class LongPollLimiter:
    """Counts waiting requests. One for each process; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @contextmanager
    def seat(self, actor: Actor, most: int, each: int) -> Iterator[bool]:
        """Yield whether ``actor`` may wait, while up to ``most`` wait in all and up to ``each`` of one user."""
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


seats = LongPollLimiter()


__all__ = ["LongPollLimiter", "seats"]
