"""One search over all topics that the actor may know of: for an id or a key at once, for a text or an error within a bound.

An id and a key name a place, which is looked at in one round trip for all topics. A text may be anywhere: the lists of the
topics are searched, the dead messages first, until enough was found or the time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import run_all
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import slot_of
from django_rmq.exceptions import CallerError, InvalidRequest, MessageGone, RmqError
from django_rmq.message_ids import MessageIdentity, id_of, identify
from django_rmq.operations.authorization import OperationContext, Permission, sees_stored
from django_rmq.operations.filters import Filter
from django_rmq.operations.message_view import MessageCopy, as_shown, from_reply
from django_rmq.operations.messages import get, listing
from django_rmq.operations.shared_reads import shared_survey
from django_rmq.operations.stats import TopicStats

SEARCH_SECONDS = 1.0
"""Seconds after which a search begins with no further list. A list is searched in at most a third of a second."""

MOST_FOUND = 50

LONGEST_NEEDLE = 200
"""Maximum size of a searched text in bytes; a longer one can only be an id or a key."""

_DEPTHS: Mapping[str, Callable[[TopicStats], int]] = {
    "dead": lambda one: one.dead,
    "retry": lambda one: one.retry,
    "prepare": lambda one: one.prepare,
    "store": lambda one: one.store,
}
"""State → how many messages of a topic are in it, in the order in which they are searched: failed messages first."""


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
    for state, depth in _DEPTHS.items():
        held = sorted(figures, key=depth, reverse=True)
        yield from ((one.topic, state, depth(one)) for one in held if depth(one))


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
