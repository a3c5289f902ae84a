"""Lists of messages, page by page, over all slots of a topic: filtered, in the order of their scores.

Slots are taken in blocks: within a block the order is that of the scores over all of its slots, and a topic of up
to ``BLOCK`` slots is one block. Each page asks each slot for a little and merges. A cursor is a place in that order,
not an entry, so it stays good while entries come and go: what is there throughout all pages is listed exactly once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from django_rmq.core.redis.broker import Broker
from django_rmq.core.words.bounds import MAX_AGE, is_number, is_whole, shown
from django_rmq.core.words.messages import Area, Entry, Topic, TopicType
from django_rmq.exceptions import InvalidRequest, OperationRefused, RmqError
from django_rmq.operations.copies import Copy, from_entry
from django_rmq.operations.ids import ROUNDS, STATES, Identity, find_members, id_of
from django_rmq.project import sealing

BLOCK = 1_024
"""Slots that are listed in one order."""

BLOCKS_PER_PAGE = 8
"""Blocks that one page looks into: in 2^20 slots that are nearly empty a page may come back short."""

SCANNED_PER_PAGE = 50_000
"""Entries that one page of a filtered list looks at."""

PAGE_BYTES = 8_388_608
"""What one page reads, about."""

LONGEST_PAGE = 1_000

LONGEST_IN_CURSOR = 256
"""Bytes of the longest member that a cursor holds; of a longer one it holds the beginning and the digest."""

RANKS_AT_ONCE = 500
"""Members that one script ranks."""


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
    def search(self) -> dict[str, Any]:
        """What Redis is to look for, as arguments of ``find``: a superset of what is meant; empty: there is no search.

        A class of errors is compared with that of the last error alone: who may look for one may not search bodies.
        """
        if self.text:
            return {"text": self.text.encode("utf-8", "surrogateescape")}
        return {"text": self.error.encode("utf-8", "surrogateescape"), "where": "error"} if self.error else {}

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


class Shown(NamedTuple):
    """What the reader of a list may see."""

    hidden: bool
    """Nothing of the content."""
    sealed: bool
    """Ids that do not hold it."""


def read_page(broker: Broker, order: Order, *, cursor: str, limit: int, now_ms: int, shown: Shown) -> Listing:
    """Return up to ``limit`` copies behind ``cursor``. Raises ``InvalidRequest`` for one of another list."""
    after = resume(broker, order, unseal(order, cursor)) if cursor else None
    rows, place, scanned, problems = _read_rows(broker, order, after, limit, now_ms)
    named = [
        (slot, entry.member)
        for slot, entry in rows
        if shown.sealed or len(entry.member) > sealing.LONGEST_PLAIN
    ]
    if place is not None and len(place.member) > LONGEST_IN_CURSOR:
        named.append((place.slot, place.member))
    ranks = _ranks(broker, order, named)
    copies = []
    for slot, entry in rows:
        rank = ranks.get((slot, entry.member))
        name = id_of(order.topic, slot, entry.member, order.state, entry.score, rank, sealed=shown.sealed)
        copies.append(from_entry(order.topic, slot, order.state, entry, name, hidden=shown.hidden))
    following = "" if place is None else seal(order, place, ranks.get((place.slot, place.member)))
    return Listing(copies, following, scanned, problems)


def _ranks(broker: Broker, order: Order, named: Iterable[tuple[int, bytes]]) -> dict[tuple[int, bytes], int]:
    """Return where messages stand among those of the same score, by slot and member, as far as they are still there."""
    by_slot: dict[int, list[bytes]] = {}
    for slot, member in dict.fromkeys(named):
        by_slot.setdefault(slot, []).append(member)
    if not by_slot:
        return {}
    pipeline = broker.pipeline()
    asked = [
        (slot, members[first : first + RANKS_AT_ONCE])
        for slot, members in by_slot.items()
        for first in range(0, len(members), RANKS_AT_ONCE)
    ]
    for slot, members in asked:
        pipeline.ranks(order.topic, slot, order.state, members)
    found: dict[tuple[int, bytes], int] = {}
    for (slot, members), ranks in zip(asked, pipeline.execute(), strict=True):
        if not isinstance(ranks, RmqError):
            # What cannot be ranked any more is listed without a rank.
            pairs = zip(members, ranks, strict=True)
            found |= {(slot, member): rank for member, rank in pairs if rank is not None}
    return found


def _read_rows(
    broker: Broker, order: Order, after: Place | None, limit: int, now_ms: int
) -> tuple[list[tuple[int, Entry]], Place | None, int, list[str]]:
    """Return up to ``limit`` entries with their slots, where the next page begins, what was scanned, and problems."""
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
        reader = _Block(broker, order, block, slots, after, now_ms)
        found, after = reader.read(limit - len(rows), SCANNED_PER_PAGE - scanned)
        rows += found
        problems += reader.problems
        scanned += reader.scanned
        if after is None:
            block += 1
            if wanted.slot is not None or block >= blocks:
                return rows, None, scanned, problems
            after = Place(block, -math.inf, -1, b"")
        if len(rows) >= limit or scanned >= SCANNED_PER_PAGE or reader.bytes >= PAGE_BYTES:
            break
    return rows, after, scanned, problems


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
    ) -> None:
        self.broker = broker
        self.order = order
        self.block = block
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

    def read(self, limit: int, budget: int) -> tuple[list[tuple[int, Entry]], Place | None]:
        """Return entries in order with their slots, and the place behind which to go on; None: the block is done."""
        self._fetch(self.feeds, limit, budget)
        rows: list[tuple[int, Entry]] = []
        last: Place | None = None
        while True:
            behind = [(feed.frontier, feed) for feed in self.feeds if feed.frontier is not None]
            safe = min((frontier for frontier, _ in behind), default=None)
            # The sort is stable: entries of one slot and score stay as Redis has them.
            self._waiting.sort(key=lambda row: row[0])
            taken = 0
            for key, entry in self._waiting:
                if len(rows) >= limit or (safe is not None and key > safe):
                    break
                taken += 1
                rows.append((key[1], entry))
                last = Place(self.block, *key, entry.member)
            del self._waiting[:taken]
            if safe is None and not self._waiting:
                return rows, None
            if len(rows) >= limit:
                return rows, last
            if self.scanned >= budget or self.bytes >= PAGE_BYTES:
                feed = next(feed for frontier, feed in behind if frontier == safe)
                assert safe is not None
                assert feed.after is not None
                # Nothing before the frontier is left out, and all behind it comes with the next page.
                return rows, Place(self.block, *safe, feed.after[1])
            nearest = sorted(behind, key=lambda pair: pair[0])[: 2 * (limit - len(rows))]
            self._fetch([feed for _, feed in nearest], limit - len(rows), budget)

    def _fetch(self, asked: Sequence[_Feed], missing: int, budget: int) -> None:
        """Ask slots for more, all in one round trip."""
        topic, state, search = self.order.topic, self.order.state, self.order.wanted.search
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
            if search:
                pipeline.find(topic, feed.slot, state, scan=scan, **search, **options)
            else:
                pipeline.peek(topic, feed.slot, state, **options)
        for feed, answer in zip(asked, pipeline.execute(), strict=True):
            if isinstance(answer, RmqError):
                feed.frontier = None
                self.problems.append(f"slot {feed.slot}: {answer}")
                continue
            entries = [entry for entry in answer.entries if not search or self._is_meant(feed, entry)]
            self._waiting += [((self.sign * entry.score, feed.slot), entry) for entry in entries]
            self.bytes += sum(map(_size, answer.entries))
            if search:
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


# --- cursors: sealed, for they hold the beginning of a member, which may be a body that the reader may not see


class _Mark(NamedTuple):
    """What a cursor says of the place behind which a list goes on."""

    place: Place
    """With the member, or its beginning where it is long."""
    digest: bytes = b""
    """Of a long member."""
    rank: int | None = None
    """That it had among those of the same score."""


def seal(order: Order, place: Place, rank: int | None = None) -> str:
    """Return ``place`` as text of less than 512 characters that only this deployment can read, for the same list only."""
    member, digest = place.member, b""
    if len(member) > LONGEST_IN_CURSOR:
        member, digest = member[:LONGEST_IN_CURSOR], sealing.digest(member)
    head = f"{place.block} {place.score:.17g} {place.slot} {'-' if rank is None else rank} {len(digest)}\n"
    return sealing.seal("cursor", order.context, head.encode() + digest + member)


def unseal(order: Order, cursor: str) -> _Mark:
    """Return what ``seal`` wrote. Raises ``InvalidRequest`` for anything else."""
    text = sealing.unseal("cursor", order.context, cursor)
    if text is None:
        raise InvalidRequest("the cursor is not one of this list: begin with the first page")
    head, _, rest = text.partition(b"\n")
    block, score, slot, rank, length = head.decode().split(" ")
    digest, member = rest[: int(length)], rest[int(length) :]
    place = Place(int(block), float(score), int(slot), member)
    return _Mark(place, digest, None if rank == "-" else int(rank))


def resume(broker: Broker, order: Order, mark: _Mark) -> Place:
    """Return the place of a cursor, with its whole member.

    Where a long member is gone, the list goes on with the first that begins as it did: what is alike in its first 256
    bytes, and of the same score, may be listed again, and nothing is left out.
    """
    place = mark.place
    if not mark.digest:
        return place
    score = -place.score if order.descending else place.score
    area = Area(order.state, score) if mark.rank is None else Area(order.state, score, mark.rank)
    identity = Identity(place.slot, None, mark.digest, area)
    found = find_members(broker, order.topic, [identity], rounds=ROUNDS, states=())
    member = found.members.get(identity)
    if member is not None:
        return place._replace(member=member)
    return place._replace(member=_behind(place.member)) if order.descending else place


def _behind(beginning: bytes) -> bytes:
    """Return the first text behind all that begin so."""
    cut = beginning.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else beginning + b"\xff" * LONGEST_IN_CURSOR


__all__ = [
    "Filter",
    "Listing",
    "Order",
    "Place",
    "Shown",
    "check_age",
    "first_page_order",
    "read_page",
    "seal",
    "unseal",
]
