"""Groups of the messages of a state by their error, their slot, or the hour of their time, and the causes of all deaths.

Which errors are one cause is decided by ``core.model.replies``.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest
from typing import NamedTuple

from django.utils.translation import gettext as _

from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import CALLS_PER_TRIP, Broker, run_all
from django_rmq.core.model.bounds import LARGEST, abbreviated, is_whole
from django_rmq.core.model.error_causes import cause_of_pattern, error_pattern
from django_rmq.core.model.replies import DeadGroup, error_class
from django_rmq.core.model.status import queue_of
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, OperationRefused, RmqError
from django_rmq.message_ids import id_of, sealed_id
from django_rmq.operations import bulk, shared_reads
from django_rmq.operations.authorization import (
    OperationContext,
    Permission,
    sees_content,
    sees_formatted,
    sees_stored,
)
from django_rmq.operations.filters import Filter
from django_rmq.operations.message_view import MessageCopy, error_in, error_view, time_of
from django_rmq.operations.messages import LONGEST_PAGE, checked, pages, ranks_of
from django_rmq.operations.shared_reads import shared_survey

KINDS = ("error", "slot", "hour")

READ_SECONDS = 0.15
"""Seconds after which one request of a page, or over REST, reads no further page of messages; those that are left out then
are not in the groups."""

GROUPED = 10_000
"""The number of messages that are grouped unless another limit is given."""

SAMPLES = 3
"""The number of messages that a group names."""

COUNTED_AT_ONCE = 2_000
"""The number of dead messages from which a round trip counts no further slot: Redis does nothing else meanwhile."""

RUN = 16
"""The number of neighbouring dead messages that are counted together, because short reads would take longer."""

SCANNED_AT_ONCE = 62 * RUN
"""The number of dead messages of a slot that one script counts: whole runs, of the 1,000 messages that it may read."""

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
"""Multiples of it, without their whole part, are spread evenly between 0 and 1, however many there are."""

_HOUR_MS = 3_600_000


class GroupSample(NamedTuple):
    """A message of a group."""

    id: str
    log_id: str
    """The id by which the log names it; see ``MessageCopy.log_id``."""


@dataclass(frozen=True, slots=True)
class MessageGroup:
    """Messages that have something in common. The fields of other groupings are empty or None."""

    count: int
    share: float
    """The fraction of the messages of its topic that were looked at. The admin shows that of all topics on the page."""
    first_ms: int | None
    """The earliest time of a message (``MessageCopy.at_ms``), or None if none of them has one."""
    last_ms: int | None
    samples: tuple[GroupSample, ...]
    """Up to three of the messages, the first ones of a list."""
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
    """The number of messages that were grouped."""
    is_complete: bool
    """Whether these are all that are selected."""
    total: int
    """The number of messages in the state; with ages, a slot or a priority, of those that have these. Texts,
    errors, and the ages of running messages are not compared."""
    problems: list[str] = field(default_factory=list)
    """Slots that cannot be read, and the reasons."""


@dataclass(slots=True)
class _Members:
    """The messages of a group so far."""

    count: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    hours: Counter[int] = field(default_factory=Counter)
    samples: list[GroupSample] = field(default_factory=list)

    def add(self, copy: MessageCopy) -> None:
        self.count += 1
        self.add_times(copy.at_ms, copy.at_ms)
        if copy.at_ms is not None:
            self.hours[_hour_of(copy.at_ms)] += 1
        if len(self.samples) < SAMPLES:
            self.samples.append(GroupSample(copy.id, copy.log_id))

    def add_times(self, *times: int | None) -> None:
        known = [time for time in (self.first_ms, self.last_ms, *times) if time is not None]
        if known:
            self.first_ms, self.last_ms = min(known), max(known)


def _check_grouping(by: str, queue: str, limit: int) -> None:
    if by not in KINDS:
        raise InvalidRequest(
            _("messages can be grouped by %(kinds)s, got %(kind)r") % {"kinds": ", ".join(KINDS), "kind": by}
        )
    if not (is_whole(limit) and 1 <= limit <= LARGEST):
        raise InvalidRequest(
            _("the limit must be a number of messages from 1, got %(value)s") % {"value": abbreviated(limit)}
        )
    if by == "error" and queue == "prepare":
        raise OperationRefused(
            _("running messages cannot be grouped by error, because their delivery has not ended")
        )


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

    It reads up to ``limit`` messages, and ends after ``seconds``. By error, the dead messages that it reads are evenly spread
    over slots and time; others are read in the order of ``listing``, as are all of a topic with a formatter.
    Permissions, redaction and errors are those of ``listing``.
    """
    queue = queue_of(state)
    _check_grouping(by, queue, limit)
    topic = context.permitted(name)
    wanted = checked(context, topic, queue, wanted)
    if by == "error" and queue == "dead" and not wanted.compares and _is_counted(context, topic):
        return _by_cause(context, topic, _count_deaths(context.broker, topic, wanted, limit, seconds))
    end = None if seconds is None else time.monotonic() + seconds
    members_of: dict[tuple[str, str] | int | None, _Members] = {}
    problems: dict[str, None] = {}
    looked_at, is_complete = 0, False
    # A shell sees what is stored, but its causes are those that everybody else sees.
    is_formatted = error_view(context.actor, topic) == "redacted" and not sees_formatted(
        context.actor, topic.name
    )
    for page in pages(context, name, queue, wanted, limit=limit):
        for copy in page.copies:
            error = error_in(copy, "redacted") if is_formatted else copy.error
            members_of.setdefault(_key(by, copy, error), _Members()).add(copy)
        looked_at += len(page.copies)
        problems |= dict.fromkeys(page.problems)
        is_complete = not page.cursor
        if end is not None and time.monotonic() >= end:
            break
    broker = context.broker
    total = sum(bulk.count(broker, bulk.Selection.at(topic, queue, wanted, broker.now_ms())).values())
    return MessageGroups(
        by, _ordered(by, members_of, looked_at), looked_at, is_complete, max(total, looked_at), list(problems)
    )


def _key(by: str, copy: MessageCopy, error: str) -> tuple[str, str] | int | None:
    if by == "error":
        return copy.error_class, error_pattern(error, copy.error_class)
    if by == "slot":
        return copy.slot
    return None if copy.at_ms is None else _hour_of(copy.at_ms)


def _hour_of(ms: int) -> int:
    return ms // _HOUR_MS * _HOUR_MS


def _is_counted(context: OperationContext, topic: Topic) -> bool:
    """Return whether Redis may count the causes: a formatter decides by whole errors what is shown of them."""
    return error_view(context.actor, topic) != "redacted"


class _Deaths(NamedTuple):
    """Dead messages of a topic as Redis counted them, for every actor."""

    rows: list[tuple[int, DeadGroup]]
    """The slot of each group, and the group."""
    looked_at: int
    is_complete: bool
    total: int
    problems: list[str]


class _Pass(NamedTuple):
    """Dead messages of a slot that are evenly spread over it: the first ``RUN`` of each ``stride``, after ``skip``."""

    slot: int
    skip: int
    stride: int
    samples: int

    def count(self, size: int) -> int:
        """Return how many messages it reads of a slot of ``size``."""
        strides, rest = divmod(size - self.skip, self.stride)
        return strides * RUN + min(rest, RUN)


def _passes(slots: Mapping[int, int]) -> Iterator[_Pass]:
    """Yield passes over slots (slot -> its number of dead messages) that together read each message once.

    The first ones read about as many messages as one round trip counts. Each time that all slots have had their turn, the
    next passes read what is in the middle between the messages that were read, so the messages read are evenly spread at any
    time.
    """
    halvings = max(0, math.ceil(math.log2(max(1, sum(slots.values())) / COUNTED_AT_ONCE)))
    for halving in range(halvings + 1):
        runs = 2 ** (halvings - max(0, halving - 1))
        for number, (slot, size) in enumerate(slots.items()):
            # Otherwise all slots would be read at the same few places.
            first = round(number * GOLDEN_RATIO * 2**halvings) + (runs // 2 if halving else 0)
            skip = first % runs * RUN
            if skip < size:
                # Later passes name messages mostly of causes of which there are samples enough.
                yield _Pass(slot, skip, runs * RUN, 1 if halving else SAMPLES)


def _take_passes(waiting: deque[_Pass], slots: Mapping[int, int], most: int) -> list[tuple[_Pass, int]]:
    """Take the passes of a round trip, each with the number of messages that it may read, in sum up to ``most``."""
    some: list[tuple[_Pass, int]] = []
    expected = 0
    while waiting and expected < min(COUNTED_AT_ONCE, most) and len(some) < CALLS_PER_TRIP:
        one = waiting.popleft()
        some.append((one, min(one.count(slots[one.slot]), SCANNED_AT_ONCE, most - expected)))
        expected += some[-1][1]
    return some


def _count_deaths(broker: Broker, topic: Topic, wanted: Filter, limit: int, seconds: float | None) -> _Deaths:
    """Count up to ``limit`` dead messages: all of them, or some that are evenly spread over slots and time."""
    end = math.inf if seconds is None else time.monotonic() + seconds
    meant = bulk.Selection.at(topic, "dead", wanted, broker.now_ms())
    slots = bulk.count(broker, meant)
    rows: list[tuple[int, DeadGroup]] = []
    problems: dict[str, None] = {}
    looked_at, waiting = 0, deque(_passes(slots))
    while waiting and looked_at < limit:
        some = _take_passes(waiting, slots, limit - looked_at)
        calls = [
            inspect.group_deaths(
                topic,
                one.slot,
                skip=one.skip,
                stride=one.stride,
                run=RUN,
                scan=scan,
                min_score=meant.low,
                max_score=meant.high,
                samples=one.samples,
            )
            for one, scan in some
        ]
        for (one, _scan), answer in zip(some, run_all(broker, calls), strict=True):
            if isinstance(answer, RmqError):
                problems[f"slot {one.slot}: {answer}"] = None
                continue
            rows += [(one.slot, group) for group in answer.groups]
            looked_at += sum(group.deaths for group in answer.groups)
            if answer.skip:
                waiting.appendleft(one._replace(skip=answer.skip))
        if time.monotonic() >= end:
            break
    # Messages that were counted may have gone before they were grouped.
    total = max(sum(slots.values()), looked_at)
    return _Deaths(
        rows, looked_at, looked_at == total or not (waiting or looked_at >= limit), total, [*problems]
    )


def _by_cause(context: OperationContext, topic: Topic, deaths: _Deaths) -> MessageGroups:
    """Return the causes of deaths as the actor may see them."""
    is_hidden = error_view(context.actor, topic) == "hidden"
    keys: dict[bytes, tuple[str, str]] = {}
    members_of: dict[tuple[str, str] | int | None, _Members] = {}
    last: dict[tuple[str, str], list[tuple[float, int, bytes]]] = defaultdict(list)
    for slot, group in deaths.rows:
        key = keys.get(group.line)
        if key is None:
            line = group.line.decode("utf-8", "replace")
            name = error_class(line)
            key = keys[group.line] = name, error_pattern("" if is_hidden else line, name)
        first_ms = time_of(topic, "dead", group.first)
        last_ms = time_of(topic, "dead", group.samples[0][1])
        members = members_of.setdefault(key, _Members())
        members.count += group.deaths
        members.add_times(first_ms, last_ms)
        for hour, count in group.hours:
            members.hours[hour * _HOUR_MS] += count
        last[key] += ((score, slot, member) for member, score in group.samples)
    chosen = {key: nlargest(SAMPLES, some) for key, some in last.items()}
    sealed = not sees_stored(context.actor, topic.name)
    named = [(slot, member) for some in chosen.values() for _score, slot, member in some]
    ranks = ranks_of(context.broker, topic, "dead", named)
    for key, some in chosen.items():
        for score, slot, member in some:
            rank = ranks.get((slot, member))
            name = id_of(topic, slot, member, "dead", score, rank, sealed=sealed)
            log_id = sealed_id(topic.name, slot, member) if sees_content(context.actor, topic.name) else name
            members_of[key].samples.append(GroupSample(name, log_id))
    rows = _ordered("error", members_of, deaths.looked_at)
    return MessageGroups(
        "error", rows, deaths.looked_at, deaths.is_complete, deaths.total, list(deaths.problems)
    )


def _ordered(
    by: str, members_of: dict[tuple[str, str] | int | None, _Members], looked_at: int
) -> list[MessageGroup]:
    ordered = sorted(members_of.items(), key=lambda pair: (-pair[1].count, str(pair[0])))
    return [_group(by, key, members, looked_at) for key, members in ordered]


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

    @property
    def looked_at(self) -> int:
        """The number of messages that were grouped."""
        return sum(grouped.looked_at for _name, grouped in self.topics)

    @property
    def total(self) -> int:
        """The number of dead messages of the topics that were looked at."""
        return sum(grouped.total for _name, grouped in self.topics)

    @property
    def is_complete(self) -> bool:
        """Whether all dead messages were grouped."""
        return not self.unread and all(grouped.is_complete for _name, grouped in self.topics)

    @property
    def problems(self) -> list[str]:
        """The slots that cannot be read, up to five of each topic, and the reasons."""
        return [f"{name}: {problem}" for name, grouped in self.topics for problem in grouped.problems[:5]]


def groups_of(causes: Causes) -> list[tuple[str, MessageGroup]]:
    """Return the groups of all topics with the names of these, the largest group first."""
    groups = [(name, group) for name, grouped in causes.topics for group in grouped.rows]
    return sorted(groups, key=lambda pair: -pair[1].count)


def causes(
    context: OperationContext,
    names: Iterable[str] | None = None,
    *,
    limit: int = GROUPED,
    seconds: float = 1.0,
) -> Causes:
    """Group the dead messages of all topics (or those named) by their errors, the topic with the most of them first.

    It reads up to ``limit`` messages, of each topic an equal part of them, evenly spread, and ends after ``seconds``. Of each
    topic it reads at least a page (1,000) or ``limit``, so of very many topics it may read more.
    Each topic takes up to half of the time that is left, and the last one all of it.
    The counts of topics without a formatter are up to two seconds old: all who ask share them.
    """
    context.actor.require(Permission.VIEW)
    end = time.monotonic() + seconds
    chosen = None if names is None else set(names)
    if chosen is not None and len(chosen) == 1:
        order = [*chosen]
    else:
        stats = sorted(shared_survey(context).topics, key=lambda one: -one.dead)
        order = [one.topic.name for one in stats if one.dead and (chosen is None or one.topic.name in chosen)]
    share = max(min(limit, LONGEST_PAGE), limit // max(1, len(order)))
    grouped: list[tuple[str, MessageGroups]] = []
    for one in order:
        left = end - time.monotonic()
        if grouped and left <= 0:
            break
        topic = context.permitted(one)
        # A topic with very many dead messages leaves time for the causes of the others.
        is_last = len(grouped) == len(order) - 1
        part = max(0.0, left if is_last else left / 2)
        if _is_counted(context, topic):
            count = partial(_count_deaths, context.broker, topic, Filter(), share, part)
            deaths = shared_reads.shared_deaths(context.broker, topic, share, count)
            grouped.append((one, _by_cause(context, topic, deaths)))
        else:
            grouped.append((one, groups(context, one, "dead", "error", limit=share, seconds=part)))
    return Causes(grouped, len(order) - len(grouped))
