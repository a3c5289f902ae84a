"""The order in which messages are taken, and which of them are free."""

from __future__ import annotations

from typing import NamedTuple

from tests.oracle.choosing import look_further, turned
from tests.oracle.scores import is_due
from tests.oracle.slot import Slot

Entry = tuple[bytes, float]
"""A member and its score."""
Cursor = tuple[str, bytes]
"""The score of an entry as a text, and its member."""


def cursor(score: str, member: bytes) -> Cursor | None:
    """Return the entry after which to continue. None: from the beginning."""
    return None if score == "" else (score, member)


class Candidates(NamedTuple):
    """The messages that a prepare may take."""

    free: list[Entry]
    """The free entries, in the order in which they are taken."""
    complete: bool
    """Whether there are no others."""
    last: Entry | None
    """The last entry seen, including busy ones."""


def is_behind(member: bytes, score: float, after: Cursor | None, descending: bool) -> bool:
    """Whether an entry comes after ``after`` in its order."""
    if after is None:
        return True
    at = (float(after[0]), after[1])
    return (score, member) < at if descending else (score, member) > at


def due_entries(slot: Slot) -> list[Entry]:
    """Return the due entries in the order in which they are taken; on time topics, those whose time has come."""
    rows = slot.store.rows(descending=slot.topic.is_priority)
    return rows if slot.topic.is_priority else [row for row in rows if is_due(slot, row[1])]


def retries_apart(slot: Slot, after: Cursor | None) -> tuple[list[Entry], list[Entry]]:
    """Return what is due after ``after``. From the head of a time topic on, retries are separate from fresh messages."""
    priority = slot.topic.is_priority
    waiting = [row for row in slot.store.rows(descending=priority) if is_behind(*row, after, priority)]
    if priority:
        return waiting, []
    apart = after is None and not slot.topic.is_fifo
    resting = [row for row in waiting if row[1] <= 999] if apart else []
    return [row for row in waiting[len(resting) :] if is_due(slot, row[1])], resting


def candidates(slot: Slot, limit: int, receipt: int, after: Cursor | None) -> Candidates:
    """Return what prepare may take. Members in flight are left out: their newer copy waits until they end."""
    waiting, resting = retries_apart(slot, after)
    for scan in (limit, limit + look_further(slot)):
        rows, late = waiting[:scan], resting[:scan]
        complete = len(late) < scan and len(rows) < scan
        free = [row for row in rows if not slot.runs(row[0])]
        rested = [row for row in late if not slot.runs(row[0])]
        if free or rested or complete:
            break
    seen = rows or late
    last = seen[-1] if seen else None
    if rested:
        share = share_of_retries(limit, receipt, len(rested), len(free))
        complete = complete and share == len(rested)
        free = rested[:share] + free
    if slot.topic.is_priority and after is None and last and (len(free) > limit or not complete):
        score = free[limit - 1][1] if len(free) >= limit else last[1]
        complete = complete and len(free) <= limit
        free = turned(slot, free, score, limit, receipt)
    return Candidates(free, complete, last)


def share_of_retries(limit: int, receipt: int, rested: int, fresh: int) -> int:
    """Return how many retries a prepare takes: at most half of the limit while fresh messages are due.

    If the limit is odd, the extra one alternates.
    """
    return min(rested, max(limit // 2 + limit % 2 * (receipt % 2), limit - fresh))
