"""Lists one state of a slot, page by page; changes nothing."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.replies import DeadGroup, DeadGroups, Entry, Page
from django_rmq.core.model.topic import Topic
from tests.oracle.keyspace import Memory
from tests.oracle.numbers import score_text
from tests.oracle.ordering import cursor, is_behind
from tests.oracle.slot import Slot, Transition, on, opened

STATES = {
    "store": ("store", "failures", "body"),
    "prepare": ("prepare", "inflight", "prepare_body"),
    "retry": ("retry", "failures", "body"),
    "dead": ("dead", "deaths", "body"),
    "claim": ("claim", "failures", "claim_body"),
}
"""The keys of a state: its members, their records, their bodies."""

_RECORD = re.compile(rb"[^\s]+ \d+ \d+ \d+ [^\s]+[^\n]*\n")
_DEATH_HEAD = re.compile(rb"[^\s]+ \d+ \d+ \d+ [^\s]+ (\d+) [01]\n")
_CLASS = re.compile(rb"\s*([A-Za-z_][A-Za-z0-9_.<>]*)\s*")
_P = ParamSpec("_P")
_T = TypeVar("_T")
_Rule = Callable[Concatenate[Slot, str, _P], _T]


def on_state(keys: int) -> Callable[[_Rule[_P, _T]], Transition[Concatenate[str, _P], _T]]:
    """Turn a rule into a transition, like ``slot.on``, that opens the first ``keys`` of the requested state."""

    def transition(rule: _Rule[_P, _T]) -> Transition[Concatenate[str, _P], _T]:
        @wraps(rule)
        def run(
            memory: Memory, topic: Topic, slot: int, state: str, /, *args: _P.args, **kwargs: _P.kwargs
        ) -> _T:
            with opened(memory, topic, slot, STATES[state][:keys]) as s:
                return rule(s, state, *args, **kwargs)

        return run

    return transition


@on_state(3)
def list_messages(slot: Slot, state: str, *rest: Any) -> Page:
    *stretch, limit, max_bytes = rest
    limit = min(limit, BATCH)
    rows = entries(slot, state, *stretch)
    size = 0
    for i, entry in enumerate(rows[:limit], 1):
        size += size_of(entry)
        if (size >= max_bytes or i == limit) and i < len(rows):
            return Page(rows[:i], (score_text(entry.score), entry.member))
    return Page(rows, None)


@on_state(3)
def search_messages(slot: Slot, state: str, *rest: Any) -> Page:
    *stretch, limit, max_bytes, scan, text, where = rest
    scan = min(scan, BATCH)
    rows = entries(slot, state, *stretch)
    found: list[Entry] = []
    size = 0
    for i, entry in enumerate(rows[:scan], 1):
        places = (entry.member, entry.envelope or b"", entry.record or b"")
        if any(text in place for place in places) if where == "anywhere" else is_of_class(entry, text):
            found.append(entry)
        size += size_of(entry)
        if i < len(rows) and (len(found) >= limit or size >= max_bytes or i == scan):
            return Page(found, (score_text(entry.score), entry.member))
    return Page(found, None)


@on("dead", "deaths")
def group_deaths(
    slot: Slot,
    lowest: str,
    highest: str,
    skip: int,
    stride: int,
    run: int,
    scan: int,
    max_bytes: int,
    samples: int,
) -> DeadGroups:
    scan, run = max(min(scan, BATCH), 1), max(run, 1)
    stride = max(stride, run)
    records = slot.records("deaths")
    rows = [
        Entry(member, score, None, records.get(member))
        for member, score in slot.members("dead").rows(descending=True)
        if float(lowest) <= score <= float(highest)
    ]
    found: dict[bytes, list[Entry]] = {}
    size, end = 0, 0
    for start in range(skip, len(rows), stride):
        some = rows[start : start + min(run, scan)]
        for entry in some:
            found.setdefault(grouped_line(entry), []).append(entry)
            size += len(entry.member) + len(entry.record or b"")
        scan -= len(some)
        if (scan < 1 or size >= max_bytes) and start + stride < len(rows):
            end = start + stride
            break
    groups = [
        DeadGroup(
            line,
            len(some),
            some[-1].score,
            hours_of(some),
            [(one.member, one.score) for one in some[:samples]],
        )
        for line, some in found.items()
    ]
    return DeadGroups(groups, end)


def hours_of(entries: list[Entry]) -> list[tuple[int, int]]:
    """Return the hours of scores that are times, and how many entries each has, in the order of the entries."""
    times = [one.score for one in entries if abs(one.score) <= 1e15]
    return list(Counter(math.floor(time / 3_600_000) for time in times).items())


def grouped_line(entry: Entry) -> bytes:
    """Return the first line of a dead message's error, with 0 for each number behind its first colon."""
    match = _DEATH_HEAD.match(entry.record or b"")
    if not match:
        return b""
    line = (entry.record or b"")[match.end() :][: int(match[1])].partition(b"\n")[0]
    if len(line) > 1_000:
        return line
    head, colon, text = line.partition(b":") if b":" in line else (b"", b"", line)
    return head + colon + re.sub(rb"[0-9]+", b"0", text)


def entries(
    slot: Slot,
    state: str,
    order: str,
    lowest: str,
    highest: str,
    after_score: str,
    after_member: bytes,
) -> list[Entry]:
    """Return all entries of a state behind a cursor, with scores in bounds, in order."""
    descending, after = order == "descending", cursor(after_score, after_member)
    members, records, bodies = STATES[state]
    details, kept = slot.records(records), slot.records(bodies)
    return [
        Entry(member, score, kept.get(member), details.get(member))
        for member, score in slot.members(members).rows(descending=descending)
        if float(lowest) <= score <= float(highest) and is_behind(member, score, after, descending)
    ]


def is_of_class(entry: Entry, name: bytes) -> bool:
    """Return whether the last error of an entry has a class, given as its whole name or its last part."""
    match = _RECORD.match(entry.record or b"")
    if not match:
        return False
    length = _DEATH_HEAD.fullmatch(match[0])
    error = (entry.record or b"")[match.end() :][: int(length[1]) if length else 1024]
    head, colon, _ = error.partition(b"\n")[0].partition(b":")
    found = _CLASS.fullmatch(head) if colon else None
    return found is not None and len(found[1]) <= 200 and (found[1] == name or found[1].endswith(b"." + name))


def size_of(entry: Entry) -> int:
    """Return the size of the entry in an answer."""
    return len(entry.member) + len(entry.envelope or b"") + len(entry.record or b"")


@on_state(1)
def count_between(slot: Slot, state: str, lowest: str, highest: str) -> int:
    return sum(float(lowest) <= score <= float(highest) for score in slot.members(state).values())
