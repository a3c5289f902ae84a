"""Lists of messages, page by page over all slots of a topic, and one search over all topics.

A page merges the slots in the order of their scores. A cursor is sealed, because it contains a member. The search finds an id
and a key at their places, which it looks at in one round trip for all topics. A text may be anywhere: the lists of the topics
are searched, the dead messages first, until enough was found or the time is over. ``authorization`` decides what an actor may
see of a message, and ``message_view`` leaves out the rest.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from django.utils.translation import gettext as _

from django_rmq import message_ids
from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.model.bounds import abbreviated, is_whole
from django_rmq.core.model.replies import Area, Entry
from django_rmq.core.model.status import queue_of
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import slot_of
from django_rmq.exceptions import CallerError, InvalidRequest, MessageGone, RmqError
from django_rmq.message_ids import ROUNDS, MessageIdentity, find_messages, id_of, identify
from django_rmq.operations.authorization import (
    OperationContext,
    Permission,
    require_search,
    sees_content,
    sees_stored,
)
from django_rmq.operations.filters import Filter, call_for_page, selects
from django_rmq.operations.message_details import get
from django_rmq.operations.message_view import MessageCopy, as_shown, error_view, from_entry, from_reply
from django_rmq.operations.shared_reads import shared_survey
from django_rmq.operations.stats import TopicStats

LONGEST_CURSOR = 512
"""Maximum number of characters of a cursor."""

LONGEST_IN_CURSOR = 256
"""Maximum size in bytes of a member in a cursor; of a longer one it contains the beginning and the digest."""


class ListPosition(NamedTuple):
    """A place in a list: after ``member`` at ``score`` in ``slot``; scores are negated if the list descends."""

    block: int
    score: float
    slot: int
    member: bytes


class Order(NamedTuple):
    """The identity of a list; a cursor is valid only for the same list."""

    topic: Topic
    queue: str
    descending: bool
    wanted: Filter

    @property
    def context(self) -> bytes:
        return json.dumps(
            [
                self.topic.name,
                # A re-slotting changes the order of the list, so its cursors end with it.
                self.topic.slots,
                self.queue,
                self.descending,
                self.wanted.text,
                self.wanted.error,
                self.wanted.cause,
                self.wanted.slot,
                self.wanted.priority,
            ]
        ).encode()


class _Mark(NamedTuple):
    """The content of a cursor."""

    place: ListPosition
    """The place, with the member, or its beginning if it is long."""
    digest: bytes = b""
    """The digest of a long member."""
    rank: int | None = None
    """Its rank among members of the same score."""


def seal(order: Order, place: ListPosition, rank: int | None = None) -> str:
    """Return ``place`` as text within ``LONGEST_CURSOR`` that only this deployment can read, for the same list only."""
    member, digest = place.member, b""
    if len(member) > LONGEST_IN_CURSOR:
        member, digest = member[:LONGEST_IN_CURSOR], message_ids.digest(member)
    head = f"{place.block} {place.score:.17g} {place.slot} {'-' if rank is None else rank} {len(digest)}\n"
    return message_ids.seal("cursor", order.context, head.encode() + digest + member)


def unseal(order: Order, cursor: str) -> _Mark:
    """Return the content of a cursor. Raises ``InvalidRequest`` for text that ``seal`` did not return for this list."""
    text = message_ids.unseal("cursor", order.context, cursor)
    if text is None:
        raise InvalidRequest(_("the cursor does not belong to this list: start with the first page"))
    head, _newline, rest = text.partition(b"\n")
    block, score, slot, rank, length = head.decode().split(" ")
    digest, member = rest[: int(length)], rest[int(length) :]
    place = ListPosition(int(block), float(score), int(slot), member)
    return _Mark(place, digest, None if rank == "-" else int(rank))


def resume(broker: Broker, order: Order, mark: _Mark) -> ListPosition:
    """Return the place of a cursor, with its whole member.

    If a long member is gone, the list continues with the first one that begins like it. Members with the same
    score and the same first 256 bytes may be listed again; none is left out.
    """
    place = mark.place
    if not mark.digest:
        return place
    score = -place.score if order.descending else place.score
    area = Area(order.queue, score) if mark.rank is None else Area(order.queue, score, mark.rank)
    identity = MessageIdentity(place.slot, None, mark.digest, area)
    search = find_messages(broker, order.topic, [identity], rounds=ROUNDS, queues=())
    at = search.messages.get(identity)
    if at is not None:
        return place._replace(member=at.member)
    return place._replace(member=_behind(place.member)) if order.descending else place


def _behind(beginning: bytes) -> bytes:
    """Return the first text after all that begin like this."""
    # The byte 0xFF has no successor, so the last byte before it is raised.
    cut = beginning.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else beginning + b"\xff" * LONGEST_IN_CURSOR


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
        """The place up to which everything has been fetched, or None if the slot has no more entries."""

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
        self.now_ms = now_ms
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
        """Return entries in order with their slots, and the place after which to continue, or None if the block is done."""
        self._fetch(self.feeds, limit, budget)
        rows: list[tuple[int, Entry]] = []
        last: ListPosition | None = None
        while True:
            behind = [(feed.frontier, feed) for feed in self.feeds if feed.frontier is not None]
            safe = min((frontier for frontier, _slot in behind), default=None)
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

    def _fetch(self, feeds: Sequence[_Feed], missing: int, budget: int) -> None:
        """Fetch more entries of slots, all in one round trip."""
        topic, queue, wanted = self.order.topic, self.order.queue, self.order.wanted
        scan = max(20, min(1_000, (budget - self.scanned) // len(feeds)))
        room = max(1_024, (PAGE_BYTES - self.bytes) // len(feeds))
        look = call_for_page(wanted, scan)
        calls = [
            look(
                topic,
                feed.slot,
                queue,
                after=feed.after,
                descending=self.order.descending,
                min_score=feed.bounds[0],
                max_score=feed.bounds[1],
                limit=min(500, 2 * missing // len(feeds) + 2),
                max_bytes=room,
            )
            for feed in feeds
        ]
        for feed, answer in zip(feeds, run_all(self.broker, calls), strict=True):
            if isinstance(answer, RmqError):
                # A slot that cannot be read is reported, and the list continues without it.
                feed.frontier = None
                self.problems.append(f"slot {feed.slot}: {answer}")
                continue
            entries = [
                entry
                for entry in answer.entries
                if selects(wanted, topic, feed.slot, queue, entry, self.now_ms)
            ]
            self._waiting += [((self.sign * entry.score, feed.slot), entry) for entry in entries]
            self.bytes += sum(map(_size, answer.entries))
            if wanted.search:
                # A search that reached the end does not report how many entries it examined.
                self.scanned += scan if answer.cursor is not None else scan // 4
            else:
                self.scanned += len(answer.entries)
            feed.take(answer.cursor, self.sign)


def _size(entry: Entry) -> int:
    return len(entry.member) + len(entry.envelope or b"") + len(entry.record or b"")


BLOCK = 1_024
"""The number of slots that are listed in one order."""

BLOCKS_PER_PAGE = 8
"""The number of blocks that one page reads; with 2^20 nearly empty slots a page may be short."""

SCANNED_PER_PAGE = 50_000
"""The number of entries that one page of a filtered list examines."""

LONGEST_PAGE = 1_000

MOST_EXAMINED = 1_000_000
"""The number of entries that a search over pages examines at most."""

RANKS_AT_ONCE = 500
"""The number of members that one script ranks."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One page."""

    copies: list[MessageCopy]
    cursor: str
    """The place where the next page begins; empty if this is the last one."""
    scanned: int
    """The number of entries examined."""
    problems: list[str] = field(default_factory=list)
    """Slots that cannot be read, and the reasons."""


def _read_page(context: OperationContext, order: Order, cursor: str, limit: int) -> Listing:
    """Return up to ``limit`` copies after ``cursor``. Raises ``InvalidRequest`` for a cursor of another list."""
    actor, broker, topic = context.actor, context.broker, order.topic
    hidden, sealed = not sees_content(actor, topic.name), not sees_stored(actor, topic.name)
    after = resume(broker, order, unseal(order, cursor)) if cursor else None
    rows, place, scanned, problems = _read_rows(broker, order, after, limit, broker.now_ms())
    named = [
        (slot, entry.member)
        for slot, entry in rows
        if sealed or len(entry.member) > message_ids.LONGEST_PLAIN
    ]
    # The cursor holds only the beginning of a long member, so its rank leads the next page to it.
    if place is not None and len(place.member) > LONGEST_IN_CURSOR:
        named.append((place.slot, place.member))
    ranks = ranks_of(broker, topic, order.queue, named)
    copies = []
    for slot, entry in rows:
        rank = ranks.get((slot, entry.member))
        name = id_of(topic, slot, entry.member, order.queue, entry.score, rank, sealed=sealed)
        copies.append(from_entry(topic, slot, order.queue, entry, name, hidden=hidden))
    following = "" if place is None else seal(order, place, ranks.get((place.slot, place.member)))
    return Listing(as_shown(actor, topic, copies), following, scanned, problems)


def ranks_of(
    broker: Broker, topic: Topic, queue: str, named: Iterable[tuple[int, bytes]]
) -> dict[tuple[int, bytes], int]:
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
    calls = [inspect.ranks(topic, slot, queue, members) for slot, members in asked]
    rank_of: dict[tuple[int, bytes], int] = {}
    for (slot, members), ranks in zip(asked, run_all(broker, calls), strict=True):
        if not isinstance(ranks, RmqError):
            # A message that can no longer be ranked is listed without a rank.
            pairs = zip(members, ranks, strict=True)
            rank_of |= {(slot, member): rank for member, rank in pairs if rank is not None}
    return rank_of


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
    for _turn in range(BLOCKS_PER_PAGE):
        slots: Iterable[int] = range(block * BLOCK, min((block + 1) * BLOCK, topic.slots))
        if wanted.slot is not None:
            slots = [wanted.slot]
        reader = Block(broker, order, block, slots, after, now_ms)
        more, after = reader.read(limit - len(rows), SCANNED_PER_PAGE - scanned)
        rows += more
        problems += reader.problems
        scanned += reader.scanned
        if after is None:
            block += 1
            if wanted.slot is not None or block >= blocks:
                return rows, None, scanned, problems
            # The slot -1 stands for the beginning of a block.
            after = ListPosition(block, -math.inf, -1, b"")
        if len(rows) >= limit or scanned >= SCANNED_PER_PAGE or reader.bytes >= PAGE_BYTES:
            break
    return rows, after, scanned, problems


def listing(
    context: OperationContext,
    name: str,
    state: str,
    *,
    cursor: str = "",
    wanted: Filter | None = None,
    limit: int | None = None,
    descending: bool | None = None,
) -> Listing:
    """Return one page of the messages of a state. ``cursor``: the one returned with the previous page.

    By default, Dead begins with the last that died, Store with the message that is taken first. A page may be
    short, or even empty, and have a cursor if the entries examined held no more. Raises ``InvalidRequest``
    for a cursor of another list, and the errors of ``Filter.check``. An actor who may not see bodies gets
    copies without content, and cannot filter by text.
    """
    topic, queue = context.permitted(name, Permission.VIEW), queue_of(state)
    wanted = checked(context, topic, queue, wanted)
    limit = context.config.admin.page_size if limit is None else limit
    if not (is_whole(limit) and 1 <= limit <= LONGEST_PAGE):
        raise InvalidRequest(
            _("the limit of a page must be from 1 to %(most)s messages, got %(value)s")
            % {"most": LONGEST_PAGE, "value": abbreviated(limit)}
        )
    if descending is None:
        descending = queue == "dead" or (queue == "store" and topic.is_priority)
    return _read_page(context, Order(topic, queue, descending, wanted), cursor, limit)


def pages(
    context: OperationContext,
    name: str,
    state: str,
    wanted: Filter | None = None,
    *,
    limit: int,
    most_examined: int = MOST_EXAMINED,
    page_size: int = LONGEST_PAGE,
) -> Iterator[Listing]:
    """Yield the pages of a list until ``limit`` messages are listed, or ``most_examined`` entries were examined."""
    cursor, listed, examined = "", 0, 0
    while listed < limit and examined < most_examined:
        size = min(page_size, limit - listed)
        page = listing(context, name, state, cursor=cursor, wanted=wanted, limit=size)
        yield page
        cursor, listed, examined = page.cursor, listed + len(page.copies), examined + page.scanned
        if not cursor:
            return


def checked(context: OperationContext, topic: Topic, queue: str, wanted: Filter | None) -> Filter:
    """Return a filter of a queue that the actor may use. Raises the errors of ``Filter.check`` and ``require_search``."""
    wanted = wanted or Filter()
    wanted.check(topic, queue)
    if wanted.text:
        require_search(context.actor, topic.name)
    if wanted.cause:
        # What is compared is what the actor is shown: otherwise a filter would reveal what is hidden.
        wanted = replace(wanted, error_view=error_view(context.actor, topic))
    return wanted


SEARCH_SECONDS = 1.0
"""Seconds after which a search begins with no further list. A list is searched in at most a third of a second."""

MOST_FOUND = 50

LONGEST_NEEDLE = 200
"""Maximum size of a searched text in bytes; a longer one can only be an id or a key."""

_SEARCHED = ("dead", "retry", "prepare", "store")
"""The states in the order in which their lists are searched: failed messages first. Figures have their depths by these names."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The messages that a search found, and how far it looked."""

    copies: list[MessageCopy]
    """Those that the text names as their id or key; then the dead, resting, running and waiting ones of the lists."""
    named: int
    """How many of the first are named by the text."""
    looked_at: int
    """The number of entries of lists that were examined."""
    is_complete: bool
    """Whether all lists that the actor may search were searched to their ends."""
    unread: int
    """The number of topics of which no list was searched, because the time was over."""
    problems: list[str]


def search_messages(
    context: OperationContext, text: str, *, seconds: float = SEARCH_SECONDS, limit: int = MOST_FOUND
) -> SearchResult:
    """Search all topics for the message with this id or key, and for messages that contain the text.

    Of a topic whose bodies the actor may not search, only sealed ids and whole classes of errors are found.
    """
    context.actor.require(Permission.VIEW)
    if not text:
        return SearchResult([], 0, 0, True, 0, [])
    end = time.monotonic() + seconds
    figures = shared_survey(context).topics
    named = _named(context, [one.topic for one in figures], text)
    copies = {_place(one): one for one in named}
    looked_at, is_complete, problems, searched = 0, True, dict[str, None](), set[str]()
    # An id names the message that was looked for, so a search of all lists would only take time.
    is_id = any(_identity(one.topic, text) for one in named[:1])
    lists = [] if is_id or len(_bytes(text)) > LONGEST_NEEDLE else list(_lists(figures))
    for topic, state, depth in lists:
        if len(copies) >= limit or time.monotonic() >= end:
            is_complete = False
            break
        searched.add(topic.name)
        wanted = Filter(text=text) if sees_stored(context.actor, topic.name) else Filter(error=text)
        if wanted.error and state in ("prepare", "store"):
            continue  # Their error is that of an earlier delivery, which their lists do not show.
        try:
            page = listing(context, topic.name, state, wanted=wanted, limit=limit)
        except CallerError as error:
            problems[str(error)] = None
            continue
        # A list that was searched to its end does not report how many entries it has.
        looked_at += depth if not page.cursor else min(depth, page.scanned)
        is_complete = is_complete and not page.cursor
        problems |= dict.fromkeys(f"{topic.name}: {problem}" for problem in page.problems)
        for copy in page.copies:
            copies.setdefault(_place(copy), copy)
    unread = len({topic.name for topic, _state, _depth in lists} - searched)
    return SearchResult(
        list(copies.values())[: max(limit, len(named))],
        len(named),
        looked_at,
        is_complete,
        unread,
        list(problems),
    )


def _place(copy: MessageCopy) -> tuple[object, ...]:
    return copy.topic.name, copy.slot, copy.queue, copy.member or copy.id


def _lists(figures: Sequence[TopicStats]) -> Iterator[tuple[Topic, str, int]]:
    """Yield the lists that hold anything, with their lengths: state by state, and of each state the longest first."""
    for state in _SEARCHED:
        depth_of = attrgetter(state)
        held = sorted(figures, key=depth_of, reverse=True)
        yield from ((one.topic, state, depth_of(one)) for one in held if depth_of(one))


def _named(context: OperationContext, topics: Sequence[Topic], text: str) -> list[MessageCopy]:
    """Return the messages whose id or key the text is."""
    asked: list[tuple[Topic, int, bytes]] = []
    copies: list[MessageCopy] = []
    for topic in topics:
        identity = _identity(topic, text)
        if identity is not None and identity.member is None:
            try:
                copies += get(context, topic.name, text)
            except (CallerError, MessageGone):
                continue  # It has ended, or is not found near its place.
        if not sees_stored(context.actor, topic.name):
            continue
        if identity is not None and identity.member is not None:
            asked.append((topic, identity.slot, identity.member))
        if topic.keyed and not topic.slot_basis:
            asked.append((topic, slot_of(_bytes(text), topic.slots), _bytes(text)))
    answers = run_all(
        context.broker, [inspect.describe_messages(topic, slot, [member]) for topic, slot, member in asked]
    )
    for (topic, slot, member), answer in zip(asked, answers, strict=True):
        if not isinstance(answer, RmqError):
            (reply,) = answer
            name = id_of(topic, slot, member, sealed=False)
            copies += as_shown(context.actor, topic, list(from_reply(topic, slot, member, reply, name)))
    return copies


def _identity(topic: Topic, text: str) -> MessageIdentity | None:
    try:
        return identify(topic, text)
    except InvalidRequest:
        return None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
