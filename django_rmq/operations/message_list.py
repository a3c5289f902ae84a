"""Lists of messages, page by page, over all slots of a topic: filtered, in the order of their scores.

Slots are read in blocks. Within a block the order is that of the scores over all of its slots, and a topic of
up to ``BLOCK`` slots is one block. Each page reads a few entries of each slot and merges them. A cursor is a
place in that order, not an entry, so it stays valid while entries come and go: an entry present throughout
all pages is listed exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from django_rmq import opaque_ids
from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.model.replies import Entry
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError
from django_rmq.message_ids import id_of
from django_rmq.operations.cursors import (
    LONGEST_IN_CURSOR,
    ListPosition,
    Order,
    resume,
    seal,
    unseal,
)
from django_rmq.operations.message_view import MessageCopy, from_entry
from django_rmq.operations.slot_merge import PAGE_BYTES, Block

BLOCK = 1_024
"""The number of slots that are listed in one order."""

BLOCKS_PER_PAGE = 8
"""The number of blocks that one page reads; with 2^20 nearly empty slots a page may be short."""

SCANNED_PER_PAGE = 50_000
"""The number of entries that one page of a filtered list examines."""

LONGEST_PAGE = 1_000

RANKS_AT_ONCE = 500
"""The number of members that one script ranks."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One page."""

    copies: list[MessageCopy]
    cursor: str
    """Where the next page begins. Empty: this is the last one."""
    scanned: int
    """The number of entries examined."""
    problems: list[str] = field(default_factory=list)
    """Slots that cannot be read, and the reasons."""


def first_page_order(topic: Topic, queue: str) -> bool:
    """Return whether the first page lists a state from its highest score down."""
    return queue == "dead" or (queue == "store" and topic.is_priority)


class Shown(NamedTuple):
    """What the reader of a list may see."""

    hidden: bool
    """Whether all content is hidden."""
    sealed: bool
    """Whether ids are sealed."""


def read_page(broker: Broker, order: Order, *, cursor: str, limit: int, now_ms: int, shown: Shown) -> Listing:
    """Return up to ``limit`` copies after ``cursor``. Raises ``InvalidRequest`` for a cursor of another list."""
    after = resume(broker, order, unseal(order, cursor)) if cursor else None
    rows, place, scanned, problems = _read_rows(broker, order, after, limit, now_ms)
    named = [
        (slot, entry.member)
        for slot, entry in rows
        if shown.sealed or len(entry.member) > opaque_ids.LONGEST_PLAIN
    ]
    if place is not None and len(place.member) > LONGEST_IN_CURSOR:
        named.append((place.slot, place.member))
    ranks = _ranks(broker, order, named)
    copies = []
    for slot, entry in rows:
        rank = ranks.get((slot, entry.member))
        name = id_of(order.topic, slot, entry.member, order.queue, entry.score, rank, sealed=shown.sealed)
        copies.append(from_entry(order.topic, slot, order.queue, entry, name, hidden=shown.hidden))
    following = "" if place is None else seal(order, place, ranks.get((place.slot, place.member)))
    return Listing(copies, following, scanned, problems)


def _ranks(broker: Broker, order: Order, named: Iterable[tuple[int, bytes]]) -> dict[tuple[int, bytes], int]:
    """Return the ranks of messages among those of the same score, by slot and member, if they are still there."""
    by_slot: dict[int, list[bytes]] = {}
    for slot, member in dict.fromkeys(named):
        by_slot.setdefault(slot, []).append(member)
    if not by_slot:
        return {}
    asked = [
        (slot, members[first : first + RANKS_AT_ONCE])
        for slot, members in by_slot.items()
        for first in range(0, len(members), RANKS_AT_ONCE)
    ]
    calls = [inspect.ranks(order.topic, slot, order.queue, members) for slot, members in asked]
    found: dict[tuple[int, bytes], int] = {}
    for (slot, members), ranks in zip(asked, run_all(broker, calls), strict=True):
        if not isinstance(ranks, RmqError):
            # A message that can no longer be ranked is listed without a rank.
            pairs = zip(members, ranks, strict=True)
            found |= {(slot, member): rank for member, rank in pairs if rank is not None}
    return found


def _read_rows(
    broker: Broker, order: Order, after: ListPosition | None, limit: int, now_ms: int
) -> tuple[list[tuple[int, Entry]], ListPosition | None, int, list[str]]:
    """Return up to ``limit`` entries with their slots, where the next page begins, the number examined, and problems."""
    topic, wanted = order.topic, order.wanted
    block = after.block if after is not None else 0 if wanted.slot is None else wanted.slot // BLOCK
    blocks = math.ceil(topic.slots / BLOCK)
    rows: list[tuple[int, Entry]] = []
    problems: list[str] = []
    scanned = 0
    for _ in range(BLOCKS_PER_PAGE):
        slots: Iterable[int] = range(block * BLOCK, min((block + 1) * BLOCK, topic.slots))
        if wanted.slot is not None:
            slots = [wanted.slot]
        reader = Block(broker, order, block, slots, after, now_ms)
        found, after = reader.read(limit - len(rows), SCANNED_PER_PAGE - scanned)
        rows += found
        problems += reader.problems
        scanned += reader.scanned
        if after is None:
            block += 1
            if wanted.slot is not None or block >= blocks:
                return rows, None, scanned, problems
            after = ListPosition(block, -math.inf, -1, b"")
        if len(rows) >= limit or scanned >= SCANNED_PER_PAGE or reader.bytes >= PAGE_BYTES:
            break
    return rows, after, scanned, problems


__all__ = ["LONGEST_PAGE", "Listing", "Shown", "first_page_order", "read_page"]
