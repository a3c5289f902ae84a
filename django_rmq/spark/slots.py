"""Slots of a topic: which have something due, and lists of slots as text."""

from __future__ import annotations

from collections.abc import Iterable

from django_rmq.core.calls import looking
from django_rmq.core.calls.broker import Broker
from django_rmq.core.words.topics import Topic

HEADS = 1_024
"""The number of slots asked in one round trip."""

MOST_RANGES = 2_000
"""Maximum number of characters of a list of slots. A longer one is left out; then all slots are asked."""


def ranges(slots: Iterable[int]) -> str | None:
    """Return slots as text, like ``0-15,18``; None if that would be long."""
    parts: list[list[int]] = []
    for slot in sorted(slots):
        if parts and parts[-1][1] == slot - 1:
            parts[-1][1] = slot
        else:
            parts.append([slot, slot])
        if len(parts) > MOST_RANGES // 2:
            return None
    text = ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)
    return text if len(text) <= MOST_RANGES else None


def slots_in(text: str | None, count: int) -> list[int]:
    """Return the slots in the output of ``ranges``; all ``count`` of them for None."""
    if text is None:
        return list(range(count))
    bounds = [part.partition("-") for part in text.split(",") if part]
    return [slot for first, _, last in bounds for slot in range(int(first), int(last or first) + 1)]


class DueSlots:
    """Asks which slots have something due; parts that were empty the last time are asked by one command."""

    def __init__(self, broker: Broker, topic: Topic) -> None:
        self._broker = broker
        self._topic = topic
        self._empty: set[int] = set()
        """The first slots of parts that were empty the last time: most of many slots are, and stay so."""

    def __call__(self) -> dict[int, int]:
        """Return the slots in which something is due, and since when."""
        slots, now = range(self._topic.slots), self._broker.now_ms()
        found: dict[int, int] = {}
        for first in range(0, len(slots), HEADS):
            part = slots[first : first + HEADS]
            if first in self._empty and not self._broker.run(looking.any_in_use(self._topic, part)):
                continue
            heads = self._broker.run(looking.heads(self._topic, part))
            found.update(
                (slot, at) for slot, at in zip(part, heads, strict=True) if at is not None and at <= now
            )
            is_empty = not any(at is not None for at in heads)
            (self._empty.add if is_empty else self._empty.discard)(first)
        return found
