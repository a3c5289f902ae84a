"""Numbers as Redis and Lua write, round and limit them."""

from __future__ import annotations

import math


def score_text(score: float) -> str:
    """Write a score like Redis and Lua's ``%.17g``, with all digits."""
    return f"{score:.17g}"


def floor(value: float) -> float:
    """Round down; infinities and NaN stay as they are."""
    return math.floor(value) if math.isfinite(value) else value


def ceil(value: float) -> float:
    """Round up; infinities and NaN stay as they are."""
    return math.ceil(value) if math.isfinite(value) else value


def bounded(value: float, low: float, high: float) -> int:
    """Return ``value`` as an integer within its bounds; a value that is not a number becomes ``low``."""
    return int(low if math.isnan(value) else max(low, min(high, value)))
