"""Reads the contents of a slot, as a whole and of single members; changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from django_rmq.core.commands.script_call import AtSlots
from django_rmq.core.model import keys as stored_hashes
from django_rmq.core.model.keys import SlotKeys, slot_keys
from django_rmq.core.model.ledger import Ledger
from django_rmq.core.model.replies import RECORDS, Counts, Death, DescribeReply, FoundReply, Pauses
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ServerRefused, WrongType
from tests.oracle.bounds import GATE
from tests.oracle.holding import newest_claim
from tests.oracle.keyspace import Hash, Memory, SortedSet
from tests.oracle.listing import on_state
from tests.oracle.numbers import ceil, floor
from tests.oracle.outcomes import find_outcome
from tests.oracle.slot import Slot, on

_LIVES = ("store", "prepare", "retry", "dead", "claim")


@on("store", "prepare", "retry", "dead", "control", "claim", "inflight", "claimants", "claims")
def count(slot: Slot) -> Counts:
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
    return Counts(
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


def count_slots(memory: Memory, topics: Sequence[AtSlots]) -> list[Counts | None]:
    """Return the count of each slot, or None if one of its keys is of the wrong type."""
    found = list[Counts | None]()
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


@on(*_LIVES, *RECORDS)
def describe_messages(slot: Slot, *members: bytes) -> list[DescribeReply]:
    if len(members) > 100:
        raise ServerRefused("ERR too many members")
    names = (*_LIVES, *RECORDS)
    return [DescribeReply(*(getattr(slot, name).get(member) for name in names)) for member in members]


@on(*_LIVES, "inflight", "deaths", "failures", "control", "outcomes", "outcome_times", "delivery_outcomes")
def status(slot: Slot, found: bytes, *members: bytes) -> FoundReply:
    outcome = find_outcome(slot, found)
    if not members:
        return FoundReply(None, None, None, None, None, None, None, None, "", outcome)
    (member,) = members
    death = slot.deaths.get(member)
    return FoundReply(
        slot.store.get(member),
        slot.prepare.get(member),
        slot.retry.get(member),
        slot.dead.get(member),
        slot.claim.get(member),
        slot.inflight.get(member),
        None if death is None else Death.parse(death)._replace(envelope=None).encode(),
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


def find_paused(memory: Memory, topics: Sequence[AtSlots]) -> Pauses:
    """Return the places of the paused slots, and of those whose control has the wrong type."""
    slots = _each_slot(topics, 1024)
    with memory.lock:
        controls = [
            memory.keyspace.get(slot_keys(memory.prefix, topic.name, slot).control) for topic, slot in slots
        ]
    foreign = tuple(at for at, control in enumerate(controls) if isinstance(control, SortedSet))
    return Pauses(tuple(at for at, each in enumerate(controls) if each and b"paused" in each), foreign)


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
