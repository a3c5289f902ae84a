"""Decides which slots each worker gets, so that it keeps as many of its own as possible."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

Piece = tuple[int, int, int]
"""Start, stop, and the index of the owner: a run during the calculation."""


def lay_out(slots: int, kept: Sequence[Piece], held: Counter[int], share: Mapping[int, int]) -> list[Piece]:
    """Return runs that give every worker its share. Each keeps ``min(held, share)`` slots of its own.

    A worker with too many slots gives its smallest runs first, and a worker with too few takes slots next to
    its own if it can. So repeated joins and leaves do not fragment the runs.
    """
    staying = _shrink(kept, {w: held[w] - share[w] for w in held if held[w] > share[w]})
    lacking = {w: count - held[w] for w, count in share.items() if count > held[w]}
    free = _gaps(slots, staying)
    grown: list[Piece] = []
    left: list[tuple[int, int]] = []
    before = {stop: owner for _, stop, owner in staying}
    after = {start: owner for start, _, owner in staying}
    for start, stop in free:
        owner = before.get(start, -1)
        take = min(lacking.get(owner, 0), stop - start)
        if take:
            lacking[owner] -= take
            grown.append((start, start + take, owner))
            start += take
        owner = after.get(stop, -1)
        take = min(lacking.get(owner, 0), stop - start)
        if take:
            lacking[owner] -= take
            grown.append((stop - take, stop, owner))
            stop -= take
        if start < stop:
            left.append((start, stop))
    takers = deque((w, lack) for w, lack in sorted(lacking.items()) if lack)
    for start, stop in left:
        while start < stop:
            w, lack = takers.popleft()
            take = min(lack, stop - start)
            grown.append((start, start + take, w))
            start += take
            if lack > take:
                takers.appendleft((w, lack - take))
    return _joined(sorted([*staying, *grown]))


def _shrink(kept: Sequence[Piece], surplus: dict[int, int]) -> list[Piece]:
    """Take the surplus from each worker: its smallest runs, then the end of the next one."""
    staying: list[Piece] = []
    for start, stop, owner in sorted(kept, key=lambda piece: (piece[1] - piece[0], piece[0])):
        give = min(surplus.get(owner, 0), stop - start)
        if give:
            surplus[owner] -= give
        if give < stop - start:
            staying.append((start, stop - give, owner))
    return sorted(staying)


def _gaps(slots: int, pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    gaps: list[tuple[int, int]] = []
    at = 0
    for start, stop, _ in pieces:
        if at < start:
            gaps.append((at, start))
        at = stop
    if at < slots:
        gaps.append((at, slots))
    return gaps


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    runs: list[Piece] = []
    for start, stop, owner in pieces:
        if runs and runs[-1][1] == start and runs[-1][2] == owner:
            runs[-1] = (runs[-1][0], stop, owner)
        else:
            runs.append((start, stop, owner))
    return runs
