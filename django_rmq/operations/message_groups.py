"""Groups of the messages of a state by their error, their slot, or the hour of their time, with the size of each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from django_rmq.core.model.limits import LARGEST, abbreviated, is_whole
from django_rmq.core.model.status import queue_of
from django_rmq.exceptions import InvalidRequest, OperationRefused
from django_rmq.operations import bulk
from django_rmq.operations.authorization import Permission
from django_rmq.operations.context import OperationContext
from django_rmq.operations.filters import Filter
from django_rmq.operations.message_view import (
    MessageCopy,
    cause_of_pattern,
    error_in,
    error_pattern,
    error_view,
    is_withheld,
)
from django_rmq.operations.messages import LONGEST_PAGE, checked, listing
from django_rmq.operations.reports import shared_survey

KINDS = ("error", "slot", "hour")

GROUPED = 10_000
"""The number of messages that are grouped unless another limit is given."""

MOST_EXAMINED = 1_000_000
"""The number of entries that a search examines at most."""

SAMPLES = 3
"""The number of messages that a group names."""

_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class MessageGroup:
    """Messages that have something in common. The fields of other groupings are empty or None."""

    count: int
    share: float
    """The fraction of the messages that were looked at."""
    first_ms: int | None
    """The earliest time of a message (``MessageCopy.at_ms``), or None if none of them has one."""
    last_ms: int | None
    samples: tuple[MessageCopy, ...]
    """Up to three of the messages."""
    hours: tuple[tuple[int, int], ...] = ()
    """The beginning of each hour in which messages have their time, in ms, and how many there are; the earliest first."""
    cause: str = ""
    """By error: its id, which ``Filter.cause`` takes."""
    error_class: str = ""
    """By error: the class of the last error; empty if there is no error, or its text names no class."""
    error: str = ""
    """By error: its first line without the class; ``#`` stands for each number and id, ``'…'`` for quoted text."""
    slot: int | None = None
    hour_ms: int | None = None
    """By hour: its beginning, or None if the messages have no time."""


@dataclass(frozen=True, slots=True)
class MessageGroups:
    """The groups of a state, the most frequent first."""

    by: str
    rows: list[MessageGroup]
    looked_at: int
    """The number of messages that were grouped: those that a list shows first."""
    is_complete: bool
    """Whether these are all that are selected."""
    total: int
    """The number of messages in the state; with ages, a slot or a priority, of those that have these. Texts and
    errors are not compared."""
    problems: list[str] = field(default_factory=list)
    """Slots that cannot be read, and the reasons."""


@dataclass(slots=True)
class _Members:
    """The messages of a group so far."""

    count: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    hours: Counter[int] = field(default_factory=Counter)
    samples: list[MessageCopy] = field(default_factory=list)

    def add(self, copy: MessageCopy) -> None:
        self.count += 1
        if len(self.samples) < SAMPLES:
            self.samples.append(copy)
        if copy.at_ms is not None:
            self.first_ms = copy.at_ms if self.first_ms is None else min(self.first_ms, copy.at_ms)
            self.last_ms = copy.at_ms if self.last_ms is None else max(self.last_ms, copy.at_ms)
            self.hours[_hour_of(copy.at_ms)] += 1


def groups(
    context: OperationContext,
    name: str,
    state: str,
    by: str,
    wanted: Filter | None = None,
    *,
    limit: int = GROUPED,
    seconds: float | None = None,
) -> MessageGroups:
    """Group the messages of a state by their last ``error``, their ``slot``, or the ``hour`` of their time.

    It reads up to ``limit`` messages, in the order of ``listing`` (of Dead, the last that died), and ends after
    ``seconds``. Permissions, redaction and errors are those of ``listing``.
    """
    if by not in KINDS:
        raise InvalidRequest(f"messages can be grouped by {', '.join(KINDS)}, got {by!r}")
    if not (is_whole(limit) and 1 <= limit <= LARGEST):
        raise InvalidRequest(f"the limit must be a number of messages from 1, got {abbreviated(limit)}")
    queue = queue_of(state)
    if by == "error" and queue == "prepare":
        raise OperationRefused(
            "running messages cannot be grouped by error, because their delivery has not ended"
        )
    topic = context.present(name)
    wanted = checked(context, topic, queue, wanted)
    end = None if seconds is None else time.monotonic() + seconds
    found: dict[tuple[str, str] | int | None, _Members] = {}
    problems: dict[str, None] = {}
    looked_at, is_complete = 0, False
    # A shell sees what is stored, but its causes are those that everybody else sees.
    is_formatted = error_view(context.actor, topic) == "redacted" and not is_withheld(context.actor, topic)
    for copies, is_last, troubles in _pages(context, name, queue, wanted, limit):
        for copy in copies:
            error = error_in(copy, "redacted") if is_formatted else copy.error
            found.setdefault(_key(by, copy, error), _Members()).add(copy)
        looked_at += len(copies)
        problems |= dict.fromkeys(troubles)
        is_complete = is_last
        if end is not None and time.monotonic() >= end:
            break
    broker = context.broker
    total = sum(bulk.count(broker, bulk.Selection.at(topic, queue, wanted, broker.now_ms())).values())
    ordered = sorted(found.items(), key=lambda pair: (-pair[1].count, str(pair[0])))
    rows = [_group(by, key, members, looked_at) for key, members in ordered]
    # Messages that were grouped may have gone before the state was counted.
    return MessageGroups(by, rows, looked_at, is_complete, max(total, looked_at), list(problems))


def _pages(
    context: OperationContext, name: str, queue: str, wanted: Filter, limit: int
) -> Iterator[tuple[list[MessageCopy], bool, list[str]]]:
    """Yield the messages page by page, whether a page is the last one, and the slots that could not be read."""
    left, cursor, examined = limit, "", 0
    while left > 0 and examined < MOST_EXAMINED:
        page = listing(context, name, queue, cursor=cursor, wanted=wanted, limit=min(left, LONGEST_PAGE))
        yield page.copies, not page.cursor, page.problems
        left, cursor, examined = left - len(page.copies), page.cursor, examined + page.scanned
        if not cursor:
            return


def _key(by: str, copy: MessageCopy, error: str) -> tuple[str, str] | int | None:
    if by == "error":
        return copy.error_class, error_pattern(error, copy.error_class)
    if by == "slot":
        return copy.slot
    return None if copy.at_ms is None else _hour_of(copy.at_ms)


def _hour_of(ms: int) -> int:
    return ms // _HOUR_MS * _HOUR_MS


def _group(by: str, key: tuple[str, str] | int | None, members: _Members, looked_at: int) -> MessageGroup:
    error_class, error = key if isinstance(key, tuple) else ("", "")
    number = None if isinstance(key, tuple) else key
    return MessageGroup(
        members.count,
        members.count / looked_at,
        members.first_ms,
        members.last_ms,
        tuple(members.samples),
        hours=tuple(sorted(members.hours.items())),
        cause=cause_of_pattern(error, error_class) if by == "error" else "",
        error_class=error_class,
        error=error,
        slot=number if by == "slot" else None,
        hour_ms=number if by == "hour" else None,
    )


@dataclass(frozen=True, slots=True)
class Causes:
    """Why messages are dead, over topics: for each topic its groups by error."""

    topics: list[tuple[str, MessageGroups]]
    unread: int
    """The number of topics with dead messages that were not looked at, because the time was over."""


def causes(
    context: OperationContext, name: str = "", *, limit: int = GROUPED, seconds: float = 1.0
) -> Causes:
    """Group the dead messages of a topic by their errors, or those of all topics, the topic with the most of them first.

    It reads up to ``limit`` messages, of each topic an equal part of them, and ends after ``seconds``.
    """
    context.actor.require(Permission.VIEW)
    end = time.monotonic() + seconds
    names = [name]
    if not name:
        stats = sorted(shared_survey(context).topics, key=lambda one: -one.dead)
        names = [one.topic.name for one in stats if one.dead]
    share = max(LONGEST_PAGE, limit // max(1, len(names)))
    found: list[tuple[str, MessageGroups]] = []
    for one in names:
        left = end - time.monotonic()
        if found and left <= 0:
            break
        found.append((one, groups(context, one, "dead", "error", limit=share, seconds=max(0.0, left))))
    return Causes(found, len(names) - len(found))


__all__ = ["GROUPED", "KINDS", "MOST_EXAMINED", "Causes", "MessageGroup", "MessageGroups", "causes", "groups"]
