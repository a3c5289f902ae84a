"""What waits in a topic, for the progress records of a query."""

from __future__ import annotations

import time
from typing import Any

from django_rmq.exceptions import RmqError
from django_rmq.spark.claims import Claims

COUNT_SECONDS = 5.0
"""Seconds between two counts."""

MOST_SLOTS = 4_096
"""The largest number of slots that is counted: each is one call."""


class Backlog:
    """Counts a topic from time to time. Spark asks with every trigger, also when nothing is due."""

    def __init__(self, claims: Claims, slots: int) -> None:
        self._claims = claims
        self._slots = slots
        self._told: dict[str, Any] | None = None
        self._next_count = float("-inf")

    def told(self) -> dict[str, Any] | None:
        """Return the last count. None: there is none, because the topic has too many slots or Redis was unavailable."""
        now = time.monotonic()
        if now >= self._next_count and self._slots <= MOST_SLOTS:
            self._next_count = now + COUNT_SECONDS
            try:
                self._told = self._count()
            except RmqError:
                # The query's own requests report it.
                self._told = None
        return self._told

    def _count(self) -> dict[str, Any]:
        counts = self._claims.counts(range(self._slots))
        oldest = [found.oldest_due_ms for found in counts if found.oldest_due_ms is not None]
        age = (self._claims.now_ms() - min(oldest)) / 1000 if oldest else 0.0
        return {
            "due": sum(found.due for found in counts),
            "waiting": sum(found.store + found.retry for found in counts),
            "oldestDueSeconds": round(max(0.0, age), 3),
            "claimed": sum(found.claimed for found in counts),
            "lostClaims": self._claims.lease.lost,
        }
