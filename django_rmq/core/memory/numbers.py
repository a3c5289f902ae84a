"""Numbers as Redis and Lua write, round and bound them."""

from __future__ import annotations

import math


def score_text(score: float) -> str:
    """Write a score as Redis and Lua's ``%.17g`` do: no digit is lost."""
    return f"{score:.17g}"


def floor(value: float) -> float:
    """Round down; what is not finite stays as it is."""
    return math.floor(value) if math.isfinite(value) else value


def ceil(value: float) -> float:
    """Round up; what is not finite stays as it is."""
    return math.ceil(value) if math.isfinite(value) else value


def bounded(value: float, low: float, high: float) -> int:
    """Return ``value`` as an integer in its bounds; what is no number is ``low``."""
    return int(low if math.isnan(value) else max(low, min(high, value)))
