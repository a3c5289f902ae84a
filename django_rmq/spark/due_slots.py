"""The poll of a query: in which slots something is due."""

from __future__ import annotations

from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.topic import Topic

HEADS = 1_024
"""The number of slots asked in one round trip."""


class DueSlots:
    """``due_slots()`` returns the slots of a topic in which something is due, and since when (ms).

    Most of many slots are empty, and stay so. Parts that were empty at the last poll are only asked whether
    they still are.
    """

    def __init__(self, broker: Broker, topic: Topic) -> None:
        self._broker = broker
        self._topic = topic
        self._empty: set[int] = set()
        """The first slots of parts that were empty at the last poll."""

    def __call__(self) -> dict[int, int]:
        """Return slot -> ms."""
        slots, now = range(self._topic.slots), self._broker.now_ms()
        found: dict[int, int] = {}
        for first in slots[::HEADS]:
            part = slots[first : first + HEADS]
            if first in self._empty and not self._broker.run(inspect.any_in_use(self._topic, part)):
                continue
            heads = self._broker.run(inspect.heads(self._topic, part))
            found.update(
                (slot, at) for slot, at in zip(part, heads, strict=True) if at is not None and at <= now
            )
            is_empty = not any(at is not None for at in heads)
            (self._empty.add if is_empty else self._empty.discard)(first)
        return found
