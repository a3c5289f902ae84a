"""The slots of one block of a list, merged by score: a few entries of each are fetched, and more when they run out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.replies import Entry, Page
from django_rmq.exceptions import RmqError
from django_rmq.operations.cursors import ListPosition, Order
from django_rmq.operations.message_view import from_entry

PAGE_BYTES = 8_388_608
"""The approximate number of bytes that one page reads."""

_Key = tuple[float, int]
"""The order within a block: (score, slot), and within these as Redis has it. Negated if the list descends."""


class _Feed:
    """The entries of one slot, fetched a few at a time, as far as the order is known."""

    def __init__(self, slot: int, bounds: tuple[float, float]) -> None:
        self.slot = slot
        self.bounds = bounds
        self.after: tuple[str, bytes] | None = None
        self.frontier: _Key | None = (-math.inf, slot)
        """Everything before it has been fetched. None: everything has."""

    def take(self, cursor: tuple[str, bytes] | None, sign: int) -> None:
        """Record where the next fetch continues."""
        if cursor is None:
            self.frontier = None
        else:
            self.after = cursor
            self.frontier = (sign * float(cursor[0]), self.slot)


class Block:
    """Merges the slots of one block for one page."""

    def __init__(
        self,
        broker: Broker,
        order: Order,
        block: int,
        slots: Iterable[int],
        after: ListPosition | None,
        now_ms: int,
    ) -> None:
        self.broker = broker
        self.order = order
        self.block = block
        self.sign = -1 if order.descending else 1
        self.scanned = 0
        self.bytes = 0
        self.problems: list[str] = []
        bounds = order.wanted.scores(order.queue, now_ms)
        self.feeds = [_Feed(slot, bounds) for slot in slots]
        self._waiting: list[tuple[_Key, Entry]] = []
        if after is not None and after.slot >= 0:
            for feed in self.feeds:
                self._begin(feed, after)

    def _begin(self, feed: _Feed, after: ListPosition) -> None:
        """Start a slot after a place; entries with equal scores are ordered by slot."""
        score = self.sign * after.score
        low, high = feed.bounds
        if feed.slot == after.slot:
            feed.after = (f"{score:.17g}", after.member)
        elif self.order.descending:
            feed.bounds = (
                low,
                min(high, math.nextafter(score, -math.inf) if feed.slot < after.slot else score),
            )
        else:
            feed.bounds = max(low, math.nextafter(score, math.inf) if feed.slot < after.slot else score), high

    def read(self, limit: int, budget: int) -> tuple[list[tuple[int, Entry]], ListPosition | None]:
        """Return entries in order with their slots, and the place after which to continue. None: the block is done."""
        self._fetch(self.feeds, limit, budget)
        rows: list[tuple[int, Entry]] = []
        last: ListPosition | None = None
        while True:
            behind = [(feed.frontier, feed) for feed in self.feeds if feed.frontier is not None]
            safe = min((frontier for frontier, _ in behind), default=None)
            # The sort is stable, so entries of one slot and score keep the order of Redis.
            self._waiting.sort(key=lambda row: row[0])
            taken = 0
            for key, entry in self._waiting:
                if len(rows) >= limit or (safe is not None and key > safe):
                    break
                taken += 1
                rows.append((key[1], entry))
                last = ListPosition(self.block, *key, entry.member)
            del self._waiting[:taken]
            if safe is None and not self._waiting:
                return rows, None
            if len(rows) >= limit:
                return rows, last
            if self.scanned >= budget or self.bytes >= PAGE_BYTES:
                feed = next(feed for frontier, feed in behind if frontier == safe)
                assert safe is not None
                assert feed.after is not None
                # Nothing before the frontier is left out, and everything after it comes with the next page.
                return rows, ListPosition(self.block, *safe, feed.after[1])
            nearest = sorted(behind, key=lambda pair: pair[0])[: 2 * (limit - len(rows))]
            self._fetch([feed for _, feed in nearest], limit - len(rows), budget)

    def _fetch(self, asked: Sequence[_Feed], missing: int, budget: int) -> None:
        """Fetch more entries of slots, all in one round trip."""
        topic, queue, search = self.order.topic, self.order.queue, self.order.wanted.search
        scan = max(20, min(1_000, (budget - self.scanned) // len(asked)))
        room = max(1_024, (PAGE_BYTES - self.bytes) // len(asked))
        look: Callable[..., Call[Page]] = (
            partial(inspect.find, scan=scan, **search) if search else inspect.peek
        )
        calls = [
            look(
                topic,
                feed.slot,
                queue,
                after=feed.after,
                descending=self.order.descending,
                min_score=feed.bounds[0],
                max_score=feed.bounds[1],
                limit=min(500, 2 * missing // len(asked) + 2),
                max_bytes=room,
            )
            for feed in asked
        ]
        for feed, answer in zip(asked, run_all(self.broker, calls), strict=True):
            if isinstance(answer, RmqError):
                feed.frontier = None
                self.problems.append(f"slot {feed.slot}: {answer}")
                continue
            entries = [entry for entry in answer.entries if not search or self._is_meant(feed, entry)]
            self._waiting += [((self.sign * entry.score, feed.slot), entry) for entry in entries]
            self.bytes += sum(map(_size, answer.entries))
            if search:
                # A search that reached the end does not report how many entries it examined.
                self.scanned += scan if answer.cursor is not None else scan // 4
            else:
                self.scanned += len(answer.entries)
            feed.take(answer.cursor, self.sign)

    def _is_meant(self, feed: _Feed, entry: Entry) -> bool:
        copy = from_entry(self.order.topic, feed.slot, self.order.queue, entry)
        return self.order.wanted.matches(copy, entry)


def _size(entry: Entry) -> int:
    return len(entry.member) + len(entry.envelope or b"") + len(entry.record or b"")


__all__ = ["PAGE_BYTES", "Block"]
