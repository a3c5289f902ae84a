"""Lists of messages, page by page, over all slots of a topic: filtered, in the order of their scores.

Slots are taken in blocks: within a block the order is that of the scores over all of its slots, and a topic of up
to ``BLOCK`` slots is one block. Each page asks each slot for a little and merges. A cursor is a place in that order,
not an entry, so it stays good while entries come and go: what is there throughout all pages is listed exactly once.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from django.utils.crypto import salted_hmac

from django_rmq.bounds import MAX_AGE, is_number, is_whole, shown
from django_rmq.broker import Broker
from django_rmq.exceptions import InvalidRequest, OperationRefused, RmqError
from django_rmq.messages import Entry, Topic, TopicType
from django_rmq.operations.copies import STATES, Copy, from_entry

BLOCK = 1_024
"""Slots that are listed in one order."""

BLOCKS_PER_PAGE = 8
"""Blocks that one page looks into: in 2^20 slots that are nearly empty a page may come back short."""

SCANNED_PER_PAGE = 50_000
"""Entries that one page of a filtered list looks at."""

PAGE_BYTES = 8_388_608
"""What one page reads, about."""

LONGEST_PAGE = 1_000


@dataclass(frozen=True, slots=True)
class Filter:
    """Which messages of a state are meant; all conditions must hold. Ages in seconds.

    The age of what waits is how long it has been due, of what is in flight since it was handed out or extended, of
    what is dead since it died. What rests, and what waits by priority, has none.
    """

    text: str = ""
    """Part of the body, the key, the headers or the error."""
    error: str = ""
    """The class of the last error, whole, or its last part (``Boom`` for ``shop.errors.Boom``)."""
    older_than: float | None = None
    newer_than: float | None = None
    slot: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether everything is meant."""
        return self == Filter()

    @property
    def needle(self) -> bytes:
        """What to look for in Redis: a superset of what is meant."""
        return (self.text or self.error).encode("utf-8", "surrogateescape")

    def as_of(self, state: str, seconds: float) -> Filter:
        """Return what a sweep that began so many seconds ago still means of a state.

        What has died since is not part of it: else what fails again would be replayed for ever.
        """
        if state != "dead":
            return self
        return replace(self, older_than=max(self.older_than or 0.0, seconds))

    def check(self, topic: Topic, state: str) -> None:
        """Raise ``InvalidRequest`` or ``OperationRefused`` where ``topic`` cannot be filtered so."""
        if state not in STATES:
            raise InvalidRequest(f"{state!r} is no state: it must be one of {', '.join(STATES)}")
        if self.slot is not None and not (is_whole(self.slot) and 0 <= self.slot < topic.slots):
            raise InvalidRequest(f"topic {topic.name} has no slot {shown(self.slot)}: it has {topic.slots}")
        for age in (self.older_than, self.newer_than):
            if age is None:
                continue
            if not is_number(age) or not 0 <= age <= MAX_AGE:
                raise InvalidRequest(f"an age must be seconds from 0 to {MAX_AGE}, got {shown(age)}")
            check_age(topic, state)
        if self.error and state == "prepare":
            raise OperationRefused(
                "what is in flight cannot be filtered by its error: its delivery is not over"
            )

    def scores(self, state: str, now_ms: int) -> tuple[float, float]:
        """Return the bounds of the scores that are meant."""
        if self.older_than is None and self.newer_than is None:
            return -math.inf, math.inf
        # 999 and less on time topics are retries: they have no time.
        low = 1000.0 if self.newer_than is None else math.ceil(now_ms - self.newer_than * 1000)
        high = now_ms if self.older_than is None else math.floor(now_ms - self.older_than * 1000)
        # In flight, the three last digits are the retries left.
        return max(low, 1000.0), high + 999 if state == "prepare" else high

    def matches(self, copy: Copy, entry: Entry) -> bool:
        """Return whether an entry that Redis found is meant indeed."""
        if self.error:
            name = copy.error_class
            if self.error != name and not name.endswith(f".{self.error}"):
                return False
        if self.text:
            needle = self.text.encode("utf-8", "surrogateescape")
            headers = " ".join(part for pair in copy.headers.items() for part in pair)
            places = (entry.member, copy.raw or b"", copy.error.encode(), headers.encode())
            return any(needle in place for place in places)
        return True


def check_age(topic: Topic, state: str) -> None:
    """Raise ``OperationRefused`` where the messages of a state have no age."""
    if state == "retry":
        raise OperationRefused("what rests has no age: its time is that of its next delivery")
    if state == "claim":
        raise OperationRefused("what Spark has claimed has no age of its own: its lease decides")
    if state == "store" and topic.type is TopicType.PRIORITY:
        raise OperationRefused(
            f"topic {topic.name} orders by priority: what waits in it holds no time, so nothing there has an age"
        )


class Place(NamedTuple):
    """A place in a list: behind ``member`` at ``score`` in ``slot``; scores negated where the list descends."""

    block: int
    score: float
    slot: int
    member: bytes


@dataclass(frozen=True, slots=True)
class Listing:
    """One page."""

    copies: list[Copy]
    cursor: str
    """Where the next page begins; empty: this is the last."""
    scanned: int
    """Entries that were looked at."""
    problems: list[str] = field(default_factory=list)
    """Slots that cannot be read, and why."""


class Order(NamedTuple):
    """What a list is a list of; a cursor is good for the same only."""

    topic: Topic
    state: str
    descending: bool
    wanted: Filter

    @property
    def context(self) -> bytes:
        return json.dumps(
            [
                self.topic.name,
                self.topic.slots,
                self.state,
                self.descending,
                self.wanted.text,
                self.wanted.error,
                self.wanted.slot,
            ]
        ).encode()


def first_page_order(topic: Topic, state: str) -> bool:
    """Return whether a state is listed from its highest score down: what is interesting comes first."""
    return state == "dead" or (state == "store" and topic.is_priority)


_Key = tuple[float, int]
"""The order within a block: (score, slot), and within these as Redis has it. Negated where the list descends."""


class _Feed:
    """The entries of one slot, fetched a few at a time, as far as the order is known."""

    def __init__(self, slot: int, bounds: tuple[float, float]) -> None:
        self.slot = slot
        self.bounds = bounds
        self.after: tuple[str, bytes] | None = None
        self.frontier: _Key | None = (-math.inf, slot)
        """What comes before it has been fetched; None: everything has."""

    def take(self, cursor: tuple[str, bytes] | None, sign: int) -> None:
        """Note where the next fetch goes on."""
        if cursor is None:
            self.frontier = None
        else:
            self.after = cursor
            self.frontier = (sign * float(cursor[0]), self.slot)


def read_page(
    broker: Broker, order: Order, *, after: Place | None, limit: int, now_ms: int, hidden: bool
) -> tuple[list[Copy], Place | None, int, list[str]]:
    """Return up to ``limit`` copies behind ``after``, where the next page begins, what was scanned, and problems."""
    topic, wanted = order.topic, order.wanted
    block = after.block if after is not None else 0 if wanted.slot is None else wanted.slot // BLOCK
    blocks = math.ceil(topic.slots / BLOCK)
    copies: list[Copy] = []
    problems: list[str] = []
    scanned = 0
    for _ in range(BLOCKS_PER_PAGE):
        slots: Iterable[int] = range(block * BLOCK, min((block + 1) * BLOCK, topic.slots))
        if wanted.slot is not None:
            slots = [wanted.slot]
        reader = _Block(broker, order, block, slots, after, now_ms, hidden)
        found, after = reader.read(limit - len(copies), SCANNED_PER_PAGE - scanned)
        copies += found
        problems += reader.problems
        scanned += reader.scanned
        if after is None:
            block += 1
            if wanted.slot is not None or block >= blocks:
                return copies, None, scanned, problems
            after = Place(block, -math.inf, -1, b"")
        if len(copies) >= limit or scanned >= SCANNED_PER_PAGE or reader.bytes >= PAGE_BYTES:
            break
    return copies, after, scanned, problems


class _Block:
    """Merges the slots of one block for one page."""

    def __init__(
        self,
        broker: Broker,
        order: Order,
        block: int,
        slots: Iterable[int],
        after: Place | None,
        now_ms: int,
        hidden: bool,
    ) -> None:
        self.broker = broker
        self.order = order
        self.block = block
        self.hidden = hidden
        self.sign = -1 if order.descending else 1
        self.scanned = 0
        self.bytes = 0
        self.problems: list[str] = []
        bounds = order.wanted.scores(order.state, now_ms)
        self.feeds = [_Feed(slot, bounds) for slot in slots]
        self._waiting: list[tuple[_Key, Entry]] = []
        if after is not None and after.slot >= 0:
            for feed in self.feeds:
                self._begin(feed, after)

    def _begin(self, feed: _Feed, after: Place) -> None:
        """Let a slot begin behind a place: among equal scores the slots follow each other."""
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

    def read(self, limit: int, budget: int) -> tuple[list[Copy], Place | None]:
        """Return copies in order, and the place behind which to go on; None: the block is done."""
        self._fetch(self.feeds, limit, budget)
        copies: list[Copy] = []
        last: Place | None = None
        while True:
            behind = [(feed.frontier, feed) for feed in self.feeds if feed.frontier is not None]
            safe = min((frontier for frontier, _ in behind), default=None)
            # The sort is stable: entries of one slot and score stay as Redis has them.
            self._waiting.sort(key=lambda row: row[0])
            taken = 0
            for key, entry in self._waiting:
                if len(copies) >= limit or (safe is not None and key > safe):
                    break
                taken += 1
                copies.append(
                    from_entry(self.order.topic, key[1], self.order.state, entry, hidden=self.hidden)
                )
                last = Place(self.block, *key, entry.member)
            del self._waiting[:taken]
            if safe is None and not self._waiting:
                return copies, None
            if len(copies) >= limit:
                return copies, last
            if self.scanned >= budget or self.bytes >= PAGE_BYTES:
                feed = next(feed for frontier, feed in behind if frontier == safe)
                assert safe is not None
                assert feed.after is not None
                # Nothing before the frontier is left out, and all behind it comes with the next page.
                return copies, Place(self.block, *safe, feed.after[1])
            nearest = sorted(behind, key=lambda pair: pair[0])[: 2 * (limit - len(copies))]
            self._fetch([feed for _, feed in nearest], limit - len(copies), budget)

    def _fetch(self, asked: Sequence[_Feed], missing: int, budget: int) -> None:
        """Ask slots for more, all in one round trip."""
        topic, state, wanted = self.order.topic, self.order.state, self.order.wanted
        scan = max(20, min(1_000, (budget - self.scanned) // len(asked)))
        room = max(1_024, (PAGE_BYTES - self.bytes) // len(asked))
        pipeline = self.broker.pipeline()
        for feed in asked:
            options: dict[str, Any] = {
                "after": feed.after,
                "descending": self.order.descending,
                "min_score": feed.bounds[0],
                "max_score": feed.bounds[1],
                "limit": min(500, 2 * missing // len(asked) + 2),
                "max_bytes": room,
            }
            if wanted.needle:
                pipeline.find(topic, feed.slot, state, wanted.needle, scan=scan, **options)
            else:
                pipeline.peek(topic, feed.slot, state, **options)
        for feed, answer in zip(asked, pipeline.execute(), strict=True):
            if isinstance(answer, RmqError):
                feed.frontier = None
                self.problems.append(f"slot {feed.slot}: {answer}")
                continue
            entries = [entry for entry in answer.entries if not wanted.needle or self._is_meant(feed, entry)]
            self._waiting += [((self.sign * entry.score, feed.slot), entry) for entry in entries]
            self.bytes += sum(map(_size, answer.entries))
            if wanted.needle:
                # How many entries a search that reached the end has looked at is not said.
                self.scanned += scan if answer.cursor is not None else scan // 4
            else:
                self.scanned += len(answer.entries)
            feed.take(answer.cursor, self.sign)

    def _is_meant(self, feed: _Feed, entry: Entry) -> bool:
        copy = from_entry(self.order.topic, feed.slot, self.order.state, entry)
        return self.order.wanted.matches(copy, entry)


def _size(entry: Entry) -> int:
    return len(entry.member) + len(entry.envelope or b"") + len(entry.record or b"")


# --- cursors: sealed, for they hold a member, which may be a body that the reader may not see ---------


def seal(order: Order, place: Place) -> str:
    """Return ``place`` as text that only this project can read, and only for the same list."""
    text = f"{place.block} {place.score:.17g} {place.slot}\n".encode() + place.member
    nonce = secrets.token_bytes(12)
    hidden = bytes(a ^ b for a, b in zip(text, _stream(nonce, len(text)), strict=True))
    return urlsafe_b64encode(nonce + _mark(order, nonce + hidden) + hidden).rstrip(b"=").decode()


def unseal(order: Order, cursor: str) -> Place:
    """Return the place that ``seal`` wrote. Raises ``InvalidRequest`` for anything else."""
    try:
        raw = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
    except ValueError:
        raw = b""
    nonce, mark, hidden = raw[:12], raw[12:28], raw[28:]
    if not hmac.compare_digest(mark, _mark(order, nonce + hidden)):
        raise InvalidRequest("the cursor is not one of this list: begin with the first page")
    text = bytes(a ^ b for a, b in zip(hidden, _stream(nonce, len(hidden)), strict=True))
    head, _, member = text.partition(b"\n")
    block, score, slot = head.split(b" ")
    return Place(int(block), float(score), int(slot), member)


def _secret(purpose: str) -> bytes:
    return salted_hmac("django_rmq.operations.listing", purpose, algorithm="sha256").digest()


def _mark(order: Order, sealed: bytes) -> bytes:
    return hmac.digest(_secret("mark"), len(order.context).to_bytes(4) + order.context + sealed, "sha256")[
        :16
    ]


def _stream(nonce: bytes, length: int) -> bytes:
    """Return bytes that nobody without the secret can tell from random ones (a keyed hash of a counter)."""
    key, blocks = _secret("stream"), range(math.ceil(length / 64))
    return b"".join(hashlib.blake2b(nonce + counter.to_bytes(8), key=key).digest() for counter in blocks)[
        :length
    ]


__all__ = [
    "Filter",
    "Listing",
    "Order",
    "Place",
    "check_age",
    "first_page_order",
    "read_page",
    "seal",
    "unseal",
]
