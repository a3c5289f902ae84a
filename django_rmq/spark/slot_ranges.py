"""Lists of slots as short text, for the offsets of a query."""

from __future__ import annotations

from collections.abc import Iterable

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
