"""How far the scripts look, and where they begin. This is not part of the protocol.

Any choice among equals would do. It is copied from the Lua files so that whole keyspaces can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from django_rmq.core.model.limits import BATCH, CLAIM_STEP
from tests.oracle.bounds import CLAIM_LARGE, CLAIM_LARGE_STEP_BYTES, CLAIM_STEP_BYTES
from tests.oracle.slot import Slot


def look_further(slot: Slot) -> int:
    """Return how much farther a prepare looks, once, if everything it sees is already in flight."""
    return min(len(slot.prepare) + len(slot.claim), 1000)


def turned(
    slot: Slot, free: list[tuple[bytes, float]], score: float, limit: int, receipt: int
) -> list[tuple[bytes, float]]:
    """Take a part of the group of ``score``, which exceeds the limit, from a start that changes with every prepare."""
    above = [row for row in free if row[1] > score]
    group = [row for row in slot.store.rows(descending=True) if row[1] == score]
    start = (slot.micros * 16_807 + receipt % 1_000_003 * 69_621) % 2_147_483_647 % len(group)
    want = min(len(group), limit - len(above) + look_further(slot))
    return above + [row for row in (group[start:] + group[:start])[:want] if not slot.runs(row[0])]


def free_to_claim(
    slot: Slot, due: Sequence[tuple[bytes, float]], limit: int, max_bytes: int, *, ours: bool
) -> tuple[list[tuple[bytes, float]], bool]:
    """Return what a claim may take of the ``due`` messages, and whether there may be more.

    Members in flight are left out: their newer copy waits until they end. ``ours``: the claim already holds
    something.
    """
    waiting = _in_order(slot)
    limit = fit(waiting, slot.body, min(limit, BATCH), max_bytes)
    for scan in (limit, limit + fit(waiting, slot.body, BATCH, max_bytes)):
        rows = due[:scan]
        free = [row for row in rows if row[0] not in slot.prepare and not (ours and row[0] in slot.claim)]
        if free or len(rows) < scan:
            break
    return free[:limit], len(rows) == scan or len(free) > limit


def as_they_are(slot: Slot, due: Sequence[tuple[bytes, float]], limit: int, max_bytes: int) -> int | None:
    """Return how many ``due`` messages a claim takes without Lua examining each. None: each has to be examined.

    All of them if few of those that wait have to be carried back, otherwise one step.
    """
    if slot.prepare or slot.claim or slot.retry or slot.body:
        return None
    n = min(len(due), limit)
    rest = len(slot.store) - n
    waiting = _in_order(slot)
    if rest <= CLAIM_STEP and rest < n:
        longest = _longest(waiting, slot.body, n)
        if rest * longest <= _step_bytes(longest) and n * longest <= max_bytes:
            return n
    return fit(waiting, slot.body, min(n, CLAIM_STEP), max_bytes) if n else 0


def _in_order(slot: Slot) -> Sequence[tuple[bytes, float]]:
    return slot.store.rows(descending=slot.topic.is_priority)


def fit(rows: Sequence[tuple[bytes, float]], bodies: Mapping[bytes, bytes], n: int, max_bytes: int) -> int:
    """Return how many of the ``n`` first messages one step moves."""
    longest = _longest(rows, bodies, n)
    return max(1, min(n, min(max_bytes, _step_bytes(longest)) // longest))


def _step_bytes(longest: int) -> int:
    return CLAIM_LARGE_STEP_BYTES if longest > CLAIM_LARGE else CLAIM_STEP_BYTES


def _longest(rows: Sequence[tuple[bytes, float]], bodies: Mapping[bytes, bytes], n: int) -> int:
    """Return the size of the longest of a hundred of the first ``n`` messages, evenly spaced; of fewer if they are large."""
    longest, read = 1, 0
    for member, _ in rows[: n : max(1, math.ceil(n / 100))]:
        if read >= 262_144:
            break
        size = len(member) + len(bodies.get(member, b""))
        longest, read = max(longest, size), read + size
    return longest
