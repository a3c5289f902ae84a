"""Reads the contents of a slot, as a whole, page by page, and of single members; changes nothing."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from hashlib import sha1
from typing import Any, Concatenate, ParamSpec, TypeVar

from django_rmq.core.commands.script_call import AtSlots
from django_rmq.core.model import keys as stored_hashes
from django_rmq.core.model import replies
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.keys import SlotKeys, slot_keys
from django_rmq.core.model.ledger import Ledger
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ServerRefused, WrongType
from tests.oracle.ack import find_outcome
from tests.oracle.fetch import cursor, is_behind
from tests.oracle.keyspace import Hash, Memory, SortedSet, ceil, floor, score_text
from tests.oracle.slot import GATE, OUTCOMES, Slot, Transition, grouped, on, opened
from tests.oracle.upkeep import newest_claim

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
def list_messages(slot: Slot, state: str, *rest: Any) -> replies.Page:
    *stretch, limit, max_bytes = rest
    limit = min(limit, BATCH)
    rows = entries(slot, state, *stretch)
    size = 0
    for i, entry in enumerate(rows[:limit], 1):
        size += size_of(entry)
        if (size >= max_bytes or i == limit) and i < len(rows):
            return replies.Page(rows[:i], (score_text(entry.score), entry.member))
    return replies.Page(rows, None)


@on_state(3)
def search_messages(slot: Slot, state: str, *rest: Any) -> replies.Page:
    *stretch, limit, max_bytes, scan, text, where = rest
    scan = min(scan, BATCH)
    rows = entries(slot, state, *stretch)
    found: list[replies.Entry] = []
    size = 0
    for i, entry in enumerate(rows[:scan], 1):
        places = (entry.member, entry.envelope or b"", entry.record or b"")
        if any(text in place for place in places) if where == "anywhere" else is_of_class(entry, text):
            found.append(entry)
        size += size_of(entry)
        if i < len(rows) and (len(found) >= limit or size >= max_bytes or i == scan):
            return replies.Page(found, (score_text(entry.score), entry.member))
    return replies.Page(found, None)


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
) -> replies.DeadGroups:
    scan, run = max(min(scan, BATCH), 1), max(run, 1)
    stride = max(stride, run)
    records = slot.records("deaths")
    rows = [
        replies.Entry(member, score, None, records.get(member))
        for member, score in slot.members("dead").rows(descending=True)
        if float(lowest) <= score <= float(highest)
    ]
    found: dict[bytes, list[replies.Entry]] = {}
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
        replies.DeadGroup(
            line,
            len(some),
            some[-1].score,
            hours_of(some),
            [(one.member, one.score) for one in some[:samples]],
        )
        for line, some in found.items()
    ]
    return replies.DeadGroups(groups, end)


def hours_of(entries: list[replies.Entry]) -> list[tuple[int, int]]:
    """Return the hours of scores that are times, and how many entries each has, in the order of the entries."""
    times = [one.score for one in entries if abs(one.score) <= 1e15]
    return list(Counter(math.floor(time / 3_600_000) for time in times).items())


def grouped_line(entry: replies.Entry) -> bytes:
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
    slot: Slot, state: str, order: str, lowest: str, highest: str, after_score: str, after_member: bytes
) -> list[replies.Entry]:
    """Return all entries of a state behind a cursor, with scores in bounds, in order."""
    descending, after = order == "descending", cursor(after_score, after_member)
    members, records, bodies = STATES[state]
    details, kept = slot.records(records), slot.records(bodies)
    return [
        replies.Entry(member, score, kept.get(member), details.get(member))
        for member, score in slot.members(members).rows(descending=descending)
        if float(lowest) <= score <= float(highest) and is_behind(member, score, after, descending)
    ]


def is_of_class(entry: replies.Entry, name: bytes) -> bool:
    """Return whether the last error of an entry has a class, given as its whole name or its last part."""
    match = _RECORD.match(entry.record or b"")
    if not match:
        return False
    length = _DEATH_HEAD.fullmatch(match[0])
    error = (entry.record or b"")[match.end() :][: int(length[1]) if length else 1024]
    head, colon, _ = error.partition(b"\n")[0].partition(b":")
    found = _CLASS.fullmatch(head) if colon else None
    return found is not None and len(found[1]) <= 200 and (found[1] == name or found[1].endswith(b"." + name))


def size_of(entry: replies.Entry) -> int:
    return len(entry.member) + len(entry.envelope or b"") + len(entry.record or b"")


@on_state(1)
def count_between(slot: Slot, state: str, lowest: str, highest: str) -> int:
    return sum(float(lowest) <= score <= float(highest) for score in slot.members(state).values())


_LIVES = ("store", "prepare", "retry", "dead", "claim")


@on("store", "prepare", "retry", "dead", "control", "claim", "inflight", "claimants", "claims")
def count(slot: Slot) -> replies.Counts:
    rested = [math.floor(score) for score in slot.retry.values() if score < slot.now_ms + 1]
    first_stamp = (slot.now_s - slot.timeout) * 1000
    late = [
        (score // 1000 + slot.timeout + 1) * 1000 for score in slot.prepare.values() if score < first_stamp
    ]
    unleased = _unleased_claim(slot)
    others = [max(0, int(at)) for at in (*rested, *late, *unleased)]
    due, oldest = len(slot.store), None
    if not slot.topic.is_priority:
        due = sum(score <= slot.now_ms for score in slot.store.values())
        times = (int(score) for score in slot.store.values() if 999 < score <= slot.now_ms)
        oldest = min([*times, *others], default=None)
    runs = (member for member, score in slot.prepare.items() if score >= first_stamp)
    running = [receipt // 1000 for member in runs if (receipt := slot.flight(member).receipt)]
    owner = slot.control.get(b"owner", b"").decode(errors="backslashreplace")
    noted = slot.control.get(b"undrained_since") if slot.topic.is_priority and slot.store else None
    undrained = [int(noted)] if noted is not None else []
    if slot.topic.is_priority:
        undrained += others
    return replies.Counts(
        len(slot.store),
        due + len(others),
        len(slot.prepare),
        len(slot.retry),
        len(slot.dead),
        len(slot.claim),
        oldest,
        owner,
        b"paused" in slot.control,
        min(undrained, default=None),
        min(running, default=None),
        len(unleased),
    )


def _each_slot(topics: Sequence[AtSlots], most: int) -> list[tuple[Topic, int]]:
    found = [(each.topic, slot) for each in topics for slot in each.slots]
    if len(found) > most:
        raise ServerRefused("ERR too many slots")
    return found


def count_slots(memory: Memory, topics: Sequence[AtSlots]) -> list[replies.Counts | None]:
    """Return the count of each slot, or None if one of its keys is of the wrong type."""
    found = list[replies.Counts | None]()
    for topic, slot in _each_slot(topics, 64):
        try:
            found.append(count(memory, topic, slot))
        except WrongType:
            found.append(None)
    return found


def _unleased_claim(slot: Slot) -> list[float]:
    """Return for each message that comes back from a claim when its lease ended."""
    over = [(name, ends) for name, ends in slot.claimants.rows()[:1] if ends <= slot.now_ms]
    if not over or newest_claim(slot, over[0][0].decode())[1] == "acked":
        return []
    return [ceil(over[0][1])] * len(slot.claim)


@on(*_LIVES, "stats")
def audit_ledger(slot: Slot) -> Ledger:
    counters = stored_hashes.counters(slot.keys.stats, slot.stats.items())
    return Ledger(
        counters, len(slot.store), len(slot.prepare), len(slot.retry), len(slot.dead), len(slot.claim)
    )


@on(*_LIVES, *replies.RECORDS)
def describe_messages(slot: Slot, *members: bytes) -> list[replies.DescribeReply]:
    if len(members) > 100:
        raise ServerRefused("ERR too many members")
    names = (*_LIVES, *replies.RECORDS)
    return [replies.DescribeReply(*(getattr(slot, name).get(member) for name in names)) for member in members]


def _without_envelope(death: replies.Death) -> bytes:
    return f"{' '.join(map(str, death[:5]))} {len(death.error)} 0\n".encode() + death.error


@on(*_LIVES, "inflight", "deaths", "failures", "control", *OUTCOMES)
def status(slot: Slot, found: bytes, *members: bytes) -> replies.FoundReply:
    outcome = find_outcome(slot, found)
    if not members:
        return replies.FoundReply(None, None, None, None, None, None, None, None, "", outcome)
    (member,) = members
    death = slot.deaths.get(member)
    return replies.FoundReply(
        slot.store.get(member),
        slot.prepare.get(member),
        slot.retry.get(member),
        slot.dead.get(member),
        slot.claim.get(member),
        slot.inflight.get(member),
        None if death is None else _without_envelope(replies.Death.parse(death)),
        slot.failures.get(member),
        slot.control.get(b"owner", b"").decode(errors="backslashreplace"),
        outcome,
    )


@on_state(1)
def ranks(slot: Slot, state: str, *members: bytes) -> list[int | None]:
    if len(members) > 1000:
        raise ServerRefused("ERR too many members")
    scores = slot.members(state)
    alike = {
        member: sorted(m for m in scores if scores[m] == scores[member]) for member in {*members} & {*scores}
    }
    return [alike[member].index(member) if member in alike else None for member in members]


def find_occupied(memory: Memory, topics: Sequence[AtSlots]) -> list[bool | None]:
    """Return for each slot whether it holds messages."""
    slots = _each_slot(topics, 1024)
    with memory.lock:
        keys = (slot_keys(memory.prefix, topic.name, slot) for topic, slot in slots)
        return [any(getattr(each, state) in memory.keyspace for state in _LIVES) for each in keys]


def find_paused(memory: Memory, topics: Sequence[AtSlots]) -> replies.Pauses:
    """Return the places of the paused slots, and of those whose control has the wrong type."""
    slots = _each_slot(topics, 1024)
    with memory.lock:
        controls = [
            memory.keyspace.get(slot_keys(memory.prefix, topic.name, slot).control) for topic, slot in slots
        ]
    foreign = tuple(at for at, control in enumerate(controls) if isinstance(control, SortedSet))
    return replies.Pauses(
        tuple(at for at, each in enumerate(controls) if each and b"paused" in each), foreign
    )


def heads(memory: Memory, topic: Topic, slots: Sequence[int], upkeep: int) -> list[int | None]:
    if len(slots) > 1024:
        raise ServerRefused("ERR too many slots")
    with memory.lock:
        return [
            _head(memory, topic, slot_keys(memory.prefix, topic.name, slot), bool(upkeep)) for slot in slots
        ]


def _head(memory: Memory, topic: Topic, keys: SlotKeys, upkeep: bool) -> int | None:
    """Return when a slot can next be taken from.

    0 for a slot with a key of the wrong type, because its prepare names the key.
    """
    named = (keys.store, keys.retry, keys.prepare, keys.claimants)
    found = [memory.keyspace.get(key) for key in named]
    control = memory.keyspace.get(keys.control)
    if all(key is None for key in found):
        return None
    if any(isinstance(key, Hash) for key in found) or isinstance(control, SortedSet):
        return 0
    store, retry, prepare, claimants = (
        [*key.values()] if isinstance(key, SortedSet) else [] for key in found
    )
    dues: list[float] = []
    if store and not upkeep:
        dues.append(0 if topic.is_priority else (floor if topic.is_fifo else ceil)(min(store)))
    if retry and not upkeep:
        dues.append(floor(min(retry)))
    if prepare:
        own = control.get(b"timeout") if isinstance(control, Hash) else None
        timeout = topic.timeout if own is None else int(own)
        dues.append((floor(min(prepare) / 1000) + timeout + 1) * 1000)
    if claimants:
        dues.append(ceil(min(claimants)))
    due = min(dues, default=math.inf)
    return max(0, int(due)) if due < GATE and due > -math.inf else None if due > 0 else 0


class Grown:
    """An area that ``find_by_digest`` searches, from its place on."""

    def __init__(self, asked: replies.Area, scores: SortedSet) -> None:
        self.asked, self.looked = asked, asked.looked
        self._members = [
            member for member, score in scores.rows() if asked.score is None or score == asked.score
        ]
        self._place = max(0, min(asked.rank, len(self._members) - 1))

    @property
    def is_left(self) -> bool:
        """Return whether part of it was not searched."""
        place, looked, count = self._place, self.looked, len(self._members)
        return count > 0 and (place - looked >= 0 or place + looked < count)

    def grow(self, step: int) -> list[bytes]:
        """Search farther in both directions by ``step``, and return what is there."""
        place, near, far = self._place, self.looked, self.looked + step
        self.looked = far
        below = self._members[max(0, place - far + 1) : max(0, place - max(near, 1) + 1)]
        return self._members[place + near : place + far] + below


@on("store", "prepare", "retry", "dead", "claim")
def find_by_digest(
    slot: Slot, scan: int, max_bytes: int, digests_hex: str, *rest: Any
) -> replies.LocateReply:
    raw = bytes.fromhex(digests_hex)
    digests = [raw[i : i + 20] for i in range(0, len(raw), 20)]
    areas = [
        replies.Area(state, None if score == "" else float(score), rank, looked)
        for state, score, rank, looked in grouped(rest, len(replies.Area._fields))
    ]
    if len(areas) > 100:
        raise ServerRefused("ERR too many areas")
    scan = min(scan, 2_000)
    found: dict[bytes, bytes] = {}
    entries = size = 0
    grown = [Grown(area, slot.members(area.state)) for area in areas]
    step = 1
    while True:
        went_on = False
        for area in grown:
            if len(found) < len(digests) and entries < scan and size < max_bytes and area.is_left:
                for member in area.grow(step):
                    entries, size = entries + 1, size + len(member)
                    digest = sha1(member, usedforsecurity=False).digest()
                    if digest in digests:
                        found[digest] = member
                went_on = True
        if not went_on:
            break
        room = (max_bytes - size) * entries // max(size, 1) // 2
        step = max(1, min(step * 2, 64, room))
    left = [area.asked._replace(looked=area.looked) if area.is_left else None for area in grown]
    return replies.LocateReply([found.get(digest) for digest in digests], left)
