"""Garbage collection in a worker's process."""

from __future__ import annotations

import gc

THRESHOLD = 10_000
"""How many more objects than at the last collection begin the next one. A worker has thousands of messages in hand,
and the 700 of Python 3.11 would have it look at each of them several times."""


def collect_less() -> None:
    """Keep what is loaded by now out of collections, and make these rarer, unless the project wants them rarer still."""
    gc.collect()
    gc.freeze()
    first, *others = gc.get_threshold()
    if first:  # 0: the project has switched collections off
        gc.set_threshold(max(first, THRESHOLD), *others)


__all__ = ["THRESHOLD", "collect_less"]
