"""Filters that select messages of a state by text, error, age, slot and priority.

``search`` and ``scores`` make Redis select a superset; ``matches`` decides about each message that Redis found.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from django.utils.translation import gettext as _

from django_rmq.core.commands import inspect
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.bounds import (
    MAX_AGE,
    MAX_PRIORITY,
    MAX_RETRIES_LIMIT,
    abbreviated,
    is_number,
    is_whole,
)
from django_rmq.core.model.error_causes import cause_of
from django_rmq.core.model.replies import Entry, Page
from django_rmq.core.model.scores import LAST_RETRY
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import InvalidRequest, OperationRefused
from django_rmq.operations.message_view import ErrorView, MessageCopy, error_in, from_entry

_CLASS = re.compile(r"[A-Za-z_][\w.]{0,99}", re.ASCII)
"""Matches text that may be the name of a class. Other text by which errors are filtered may be part of a message."""

_CAUSE = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Filter:
    """A selection of messages of a state; all conditions must hold. Ages in seconds.

    The age of a waiting message counts from its due time, that of a message in flight from when it was delivered or last
    extended, that of a dead message from its death. Resting messages, and those that wait by priority, have none.
    """

    text: str = ""
    """Part of the body, the key, the headers or the error."""
    error: str = ""
    """The class of the last error: its whole name, or the last part (``Boom`` for ``shop.errors.Boom``)."""
    cause: str = ""
    """The id of a cause: the last error has this class and pattern, as ``groups`` shows them to the actor."""
    older_than: float | None = None
    newer_than: float | None = None
    slot: int | None = None
    priority: int | None = None
    """Priority topics: the priority with which they wait."""
    begun: float = field(default=0.0, compare=False)
    """Dead: messages that have died in this many last seconds are left out; see ``as_of``."""
    error_view: ErrorView = field(default="stored", compare=False)
    """The error by which ``cause`` is compared; see ``messages.checked``."""

    @property
    def description(self) -> str:
        """The selection, for the audit trail; empty for all messages. Text that may quote messages is left out."""
        parts = []
        if self.error:
            parts.append(f"error {self.error}" if _CLASS.fullmatch(self.error) else "an error (left out)")
        if self.cause:
            parts.append(f"cause {self.cause}")
        if self.text:
            parts.append("a text (left out)")
        ages = {"older than": self.older_than, "newer than": self.newer_than}
        parts += [f"{name} {age:g} s" for name, age in ages.items() if age is not None]
        numbers = {"slot": self.slot, "priority": self.priority}
        parts += [f"{name} {number}" for name, number in numbers.items() if number is not None]
        return ", ".join(parts)

    @property
    def is_empty(self) -> bool:
        """Whether every message is selected."""
        return self == Filter()

    @property
    def search(self) -> dict[str, Any]:
        """The arguments of ``search_messages``, which selects a superset in Redis; empty without a search.

        A class of errors is compared only with that of the last error: users who may filter by it need not be
        permitted to search bodies.
        """
        if self.text:
            return {"text": self.text.encode("utf-8", "surrogateescape")}
        return {"text": self.error.encode("utf-8", "surrogateescape"), "where": "error"} if self.error else {}

    @property
    def compares(self) -> bool:
        """Whether ``matches`` has to decide about each message, because the scores alone do not."""
        return bool(self.cause or self.search)

    def as_of(self, queue: str, seconds: float) -> Filter:
        """Return the filter for a queue that a sweep which began this many seconds ago still applies.

        Messages that have died since are excluded, because a message that fails again would be replayed
        without end.
        """
        if queue != "dead":
            return self
        return replace(self, begun=seconds)

    def check(self, topic: Topic, queue: str) -> None:
        """Raise ``InvalidRequest`` or ``OperationRefused`` if the filter does not apply to ``topic``."""
        if self.slot is not None and not (is_whole(self.slot) and 0 <= self.slot < topic.slots):
            raise InvalidRequest(
                _("topic %(topic)s has no slot %(slot)s: it has %(slots)s slots")
                % {"topic": topic.name, "slot": abbreviated(self.slot), "slots": topic.slots}
            )
        for age in (self.older_than, self.newer_than, self.begun or None):
            if age is None:
                continue
            if not is_number(age) or not 0 <= age <= MAX_AGE:
                raise InvalidRequest(
                    _("an age must be from 0 to %(most)s seconds, got %(value)s")
                    % {"most": MAX_AGE, "value": abbreviated(age)}
                )
            check_age(topic, queue)
        if self.priority is not None:
            self._check_priority(topic, queue)
        if (self.error or self.cause) and queue == "prepare":
            raise OperationRefused(
                _("running messages cannot be filtered by error, because their delivery has not ended")
            )
        if self.cause and not _CAUSE.fullmatch(self.cause):
            raise InvalidRequest(
                _("a cause has an id of 12 characters, got %(value)s") % {"value": abbreviated(self.cause)}
            )

    def _check_priority(self, topic: Topic, queue: str) -> None:
        if not (is_whole(self.priority) and 1 <= self.priority <= MAX_PRIORITY):
            raise InvalidRequest(
                _("a priority must be from 1 to %(most)s, got %(value)s")
                % {"most": MAX_PRIORITY, "value": abbreviated(self.priority)}
            )
        if not topic.is_priority:
            raise OperationRefused(
                _("topic %(topic)s is ordered by time, so its messages have no priority")
                % {"topic": topic.name}
            )
        if queue not in ("store", "claim"):
            raise OperationRefused(_("only messages that wait can be filtered by priority"))

    def scores(self, queue: str, now_ms: int) -> tuple[float, float]:
        """Return the bounds of the selected scores."""
        if self.priority is not None:
            # A message that failed and keeps its priority has its retries in the fraction.
            return float(self.priority), math.nextafter(self.priority + 1, -math.inf)
        if self.older_than is None and self.newer_than is None and not self.begun:
            return -math.inf, math.inf
        # On time topics, lower scores are those of retries, which have no time.
        low, (earliest, latest) = float(LAST_RETRY + 1), _times(self, now_ms)
        if queue == "prepare":
            # The last three digits are the retries left, and a delivery with a time-out of its own has a lower score.
            return low, latest + MAX_RETRIES_LIMIT
        return max(low, earliest), latest

    def matches(self, copy: MessageCopy, entry: Entry) -> bool:
        """Return whether an entry that Redis found is really selected."""
        if self.error:
            name = copy.error_class
            if self.error != name and not name.endswith(f".{self.error}"):
                return False
        if self.cause and cause_of(error_in(copy, self.error_view), copy.error_class) != self.cause:
            return False
        if self.text:
            needle = self.text.encode("utf-8", "surrogateescape")
            headers = " ".join(part for pair in copy.headers.items() for part in pair)
            places = (entry.member, copy.raw or b"", copy.error.encode(), headers.encode())
            return any(needle in place for place in places)
        return True


def filter_of(values: Mapping[str, Any]) -> Filter:
    """Return the filter with those of ``values`` that are conditions by their names, and not None."""
    names = [one.name for one in fields(Filter) if one.compare]
    return Filter(**{name: values[name] for name in names if values.get(name) is not None})


def is_for_purge(wanted: Filter) -> bool:
    """Return whether ``wanted`` selects by slot and age alone, as a purge does, which examines no message."""
    return wanted == Filter(older_than=wanted.older_than, slot=wanted.slot)


def compares(wanted: Filter, queue: str) -> bool:
    """Return whether ``selects`` has to decide about each message of a queue, because the scores alone do not."""
    return wanted.compares or _compares_times(wanted, queue)


def _compares_times(wanted: Filter, queue: str) -> bool:
    return queue == "prepare" and (wanted.older_than is not None or wanted.newer_than is not None)


def _times(wanted: Filter, now_ms: int) -> tuple[float, float]:
    """Return the first and the last ms of the ages that ``wanted`` selects."""
    earliest = -math.inf if wanted.newer_than is None else math.ceil(now_ms - wanted.newer_than * 1000)
    return earliest, math.floor(now_ms - max(wanted.older_than or 0.0, wanted.begun) * 1000)


def selects(wanted: Filter, topic: Topic, slot: int, queue: str, entry: Entry, now_ms: int) -> bool:
    """Return whether ``wanted`` selects an entry of a queue that Redis found for it at ``now_ms``."""
    if not compares(wanted, queue):
        return True
    copy = from_entry(topic, slot, queue, entry)
    if _compares_times(wanted, queue):
        earliest, latest = _times(wanted, now_ms)
        if copy.at_ms is None or not earliest <= copy.at_ms <= latest:
            return False
    return wanted.matches(copy, entry)


def call_for_page(wanted: Filter, scan: int) -> Callable[..., Call[Page]]:
    """Return the call that finds entries for ``wanted``: a list, or a search that examines ``scan`` entries."""
    search = wanted.search
    return partial(inspect.search_messages, scan=scan, **search) if search else inspect.list_messages


def check_age(topic: Topic, queue: str) -> None:
    """Raise ``OperationRefused`` if the messages of a queue have no age."""
    if queue == "retry":
        raise OperationRefused(
            _("resting messages cannot be filtered by age: their time is that of the next delivery")
        )
    if queue == "claim":
        raise OperationRefused(_("messages claimed by Spark cannot be filtered by age: they share one lease"))
    if queue == "store" and topic.type is TopicType.PRIORITY:
        raise OperationRefused(
            _("topic %(topic)s is ordered by priority, so its waiting messages cannot be filtered by age")
            % {"topic": topic.name}
        )
