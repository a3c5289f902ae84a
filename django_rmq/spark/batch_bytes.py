"""Bounds a batch by bytes, about: by the mean size of a few messages that are due."""

from __future__ import annotations

import random

from django_rmq.core.commands import inspect
from django_rmq.core.model.topic import Topic
from django_rmq.spark.claims import Claims

SLOTS = 16
"""The largest number of slots that are sampled."""

SAMPLE = 16
"""The largest number of messages that are sampled in one slot."""


class BatchBytes:
    """How many messages make ``most`` bytes. None: there is no such bound, and nothing is sampled."""

    def __init__(self, claims: Claims, topic: Topic, most: int | None) -> None:
        self._claims = claims
        self._topic = topic
        self._most = most

    def within(self, budget: int) -> int:
        """Return the number of messages to claim, at most ``budget``, and at least one."""
        if self._most is None:
            return budget
        slots = list(self._claims.due_slots())
        chosen = random.sample(slots, min(len(slots), SLOTS))
        pages = self._claims.each(inspect.peek(self._topic, slot, "store", limit=SAMPLE) for slot in chosen)
        sizes = [len(one.member) + len(one.envelope or b"") for page in pages for one in page.entries]
        return min(budget, max(1, self._most * len(sizes) // sum(sizes))) if sizes else budget
