"""The ids by which people and programs name messages, and how the message of an id is found.

Everything that takes an id reads it here: the operations, and with them commands, REST and the admin; ``status``,
``remove_message`` and ``cancel_message``.

A **plain** id, ``<slot>.<base64url(member)>``, contains the member, which is the body or the key. A
**sealed** id, ``<slot>~<sealed digest>``, contains nothing of it; lists put the place before the tilde:
``<slot>.<state>.<score>.<rank>~<sealed digest>``, where the rank is that among messages of the same score. A
message with a sealed id is searched at its place first, then among the last of every state of its slot.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from django_rmq.core.calls import looking
from django_rmq.core.calls.broker import Broker
from django_rmq.core.calls.walk import walk
from django_rmq.core.words.answers import Area, Sought
from django_rmq.core.words.bounds import shown
from django_rmq.core.words.keys import slot_of
from django_rmq.core.words.messages import from_base64url, message_id
from django_rmq.core.words.topics import Topic, former_slot_counts, slot_counts
from django_rmq.exceptions import InvalidMessage, InvalidRequest
from django_rmq.project import connections
from django_rmq.project.sealing import LONGEST_PLAIN, sealed_id, unsealed_digest

STATES = ("store", "prepare", "retry", "dead", "claim")
ROUNDS = 2
"""How often a message is searched, with one script each time; reading the message afterwards makes three."""

ALL_ROUNDS = 1_000
"""The same for a command: the search goes through the whole slot, up to two million entries."""

SOUGHT_AT_ONCE = 12
"""The number of messages that one script searches; with the longest bodies they are about what it may read."""

MOST_SLOTS = 256
"""The number of slots in which a message is sought whose id names a slot from before a re-slotting."""

_NUMBER = re.compile(r"0|[1-9]\d{0,6}", re.ASCII)
_PLACE = re.compile(r"(store|prepare|retry|dead|claim)\.(.+)\.(\d{0,15})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Identity:
    """The content of an id: the slot, and the member, or its digest and where to search for it."""

    slot: int
    member: bytes | None
    digest: bytes = b""
    """The digest of an unknown member. Empty: this actor may not know whether the message is there."""
    place: Area | None = None


def id_of(
    topic: Topic,
    slot: int,
    member: bytes,
    state: str = "",
    score: float = math.nan,
    rank: int | None = None,
    *,
    sealed: bool,
) -> str:
    """Return the id of a message: plain, unless the member is long or ``sealed`` forbids it in the id.

    ``state``, ``score`` and ``rank``: where a search for a sealed id begins, if known.
    """
    if len(member) <= LONGEST_PLAIN and not sealed:
        return message_id(slot, member)
    plain, tilde, digest = sealed_id(topic.name, slot, member).partition("~")
    place = "" if math.isnan(score) else f".{state}.{score:.17g}.{'' if rank is None else rank}"
    return f"{plain}{place}{tilde}{digest}"


def identify(topic: Topic, text: str, most_slots: Callable[[], int] | None = None) -> Identity:
    """Return the content of an id. Raises ``InvalidRequest`` for text that is not an id of ``topic``.

    ``most_slots``: returns the largest number of slots that the topic has had, for ids from that time.
    """
    head, tilde, sealed = text.partition("~")
    number, dot, rest = head.partition(".")
    if not ((dot or tilde) and _NUMBER.fullmatch(number)):
        raise InvalidRequest(
            f"{_shown(text)} is not a message id: it must be <slot>.<message>, as a send returns it, or "
            "<slot>~<digest>, as the log shows it"
        )
    slot = int(number)
    if slot >= topic.slots and (most_slots is None or slot >= most_slots()):
        raise InvalidRequest(
            f"{_shown(text)} is not a message id of topic {topic.name}, which has {topic.slots} slots"
        )
    if tilde:
        digest = unsealed_digest(topic.name, sealed)
        if digest is None:
            raise InvalidRequest(
                f"{_shown(text)} is not a message id of topic {topic.name}: it was changed, or sealed "
                "with another key"
            )
        return Identity(slot, None, digest, _place(text, rest) if dot else None)
    member = from_base64url(rest)
    if member is None:
        raise InvalidRequest(
            f"{_shown(text)} is not a message id: the part after the slot is not base64url. The id that the log shows "
            "has a tilde after the slot"
        )
    return Identity(slot, member)


def identify_for_program(topic: Topic, text: object) -> Identity:
    """Return the content of an id that the project's own code gives, also of one from before a re-slotting.

    Raises ``InvalidMessage`` for anything that is not an id of ``topic``.
    """
    if not isinstance(text, str):
        raise InvalidMessage(f"an id must be a text, got {shown(text)}")

    def most_slots() -> int:
        definition = connections.get_broker().definitions().get(topic.name)
        return max((*slot_counts(definition), *former_slot_counts(definition))) if definition else topic.slots

    try:
        return identify(topic, text, most_slots)
    except InvalidRequest as error:
        raise InvalidMessage(str(error)) from None


def places_of(topic: Topic, identity: Identity) -> Iterator[list[int]]:
    """Yield the slots in which the message of an id may be: its own, and then those to which re-slottings move it."""
    yield [identity.slot]
    definition = connections.get_broker().definitions().get(topic.name, {})
    if "reslot" not in definition:
        return
    counts = slot_counts(definition)
    others = _later_slots(identity.slot, counts, former_slot_counts(definition))
    if identity.member is not None:
        # Most messages are where their member places them; others have a basis that the id does not tell.
        own = dict.fromkeys(slot_of(identity.member, count) for count in counts)
        yield list(own)
        others -= own.keys()
    if others:
        yield sorted(others)[:MOST_SLOTS]


def _later_slots(slot: int, counts: Sequence[int], former: Sequence[int]) -> set[int]:
    """Return where re-slottings may have moved a message of ``slot``: the last bits of its CRC stay the same."""
    known = min((count for count in (*counts, *former) if count > slot), default=None)
    if known is None:
        return set()
    return {one for count in counts for one in range(slot % count, count, known)}


def find_member(
    broker: Broker, topic: Topic, identity: Identity, slots: Sequence[int]
) -> tuple[int, bytes] | None:
    """Return the slot and the member of an id, if one of ``slots`` holds it. By a sealed id each is searched wholly."""
    if identity.member is not None:
        member = identity.member
        looks = walk(broker, [looking.look(topic, slot, [member]) for slot in slots])
        holding = (
            slot for slot, (look,) in zip(slots, looks, strict=True) if any(s is not None for s in look[:5])
        )
        return next(((slot, member) for slot in holding), None)
    sought = [replace(identity, slot=slot) for slot in slots]
    found = find_members(broker, topic, sought, rounds=ALL_ROUNDS).members
    return next(((one.slot, found[one]) for one in sought if one in found), None)


def _place(text: str, place: str) -> Area:
    match = _PLACE.fullmatch(place)
    try:
        score = float(match[2]) if match else math.nan
    except ValueError:
        score = math.nan
    if match is None or math.isnan(score):
        raise InvalidRequest(
            f"{_shown(text)} is not a message id: {place[:40]!r} is not a state, score and rank"
        )
    return Area(match[1], score, int(match[3])) if match[3] else Area(match[1], score)


@dataclass(slots=True)
class Found:
    """The members of ids."""

    members: dict[Identity, bytes] = field(default_factory=dict)
    unseen: set[Identity] = field(default_factory=set)
    """Not found, although not everything was searched where they should be."""


def find_members(
    broker: Broker,
    topic: Topic,
    identities: Iterable[Identity],
    *,
    rounds: int = ROUNDS,
    states: Sequence[str] = STATES,
) -> Found:
    """Find the members of ids, in up to ``rounds`` round trips with a script for every 12 sealed ids of a slot."""
    found = Found()
    sealed: defaultdict[int, list[Identity]] = defaultdict(list)
    for one in identities:
        if one.member is not None:
            found.members[one] = one.member
        elif one.digest:
            sealed[one.slot].append(one)
    searches = [
        _Search(slot, named[first : first + SOUGHT_AT_ONCE], states)
        for slot, named in sealed.items()
        for first in range(0, len(named), SOUGHT_AT_ONCE)
    ]
    for _ in range(rounds):
        going = [search for search in searches if search.goes_on]
        if not going:
            break
        calls = [looking.seek(topic, search.slot, search.digests, search.areas) for search in going]
        for search, answer in zip(going, walk(broker, calls), strict=True):
            found.members |= search.take(answer)
    for search in searches:
        found.unseen.update(search.unseen)
    return found


class _Search:
    """The search for a few members in one slot: at their places first, then in whole states."""

    def __init__(self, slot: int, named: Sequence[Identity], states: Sequence[str]) -> None:
        self.slot = slot
        self._states = [Area(state) for state in states]
        self._wanted: defaultdict[bytes, list[Identity]] = defaultdict(list)
        self._left: dict[Area, Area | None] = {}
        """Each area, and the part of it that was not searched."""
        for one in named:
            self._wanted[one.digest].append(one)
            areas = self._areas_of(one)
            self._left |= dict(zip(areas, areas, strict=True))

    @property
    def digests(self) -> list[bytes]:
        """The digests not found yet."""
        return list(self._wanted)

    @property
    def areas(self) -> list[Area]:
        """The areas still to be searched."""
        return [area for area in self._left.values() if area is not None]

    @property
    def goes_on(self) -> bool:
        """Whether there is something to find, and somewhere to search."""
        return bool(self._wanted and self.areas)

    @property
    def unseen(self) -> list[Identity]:
        """The ids that were not found, but may be where nothing was searched."""
        return [
            one
            for named in self._wanted.values()
            for one in named
            if any(self._left[area] is not None for area in self._areas_of(one))
        ]

    def take(self, sought: Sought) -> dict[Identity, bytes]:
        """Record what a script has found, and search for the others in all states from now on."""
        found: dict[Identity, bytes] = {}
        for digest, member in zip(self.digests, sought.members, strict=True):
            if member is not None:
                found |= dict.fromkeys(self._wanted.pop(digest), member)
        asked = [area for area, left in self._left.items() if left is not None]
        self._left |= dict(zip(asked, sought.left, strict=True))
        for area in self._states:
            self._left.setdefault(area, area)
        return found

    def _areas_of(self, one: Identity) -> list[Area]:
        """Return the areas in which a message should be."""
        return [one.place] if one.place is not None else self._states


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


__all__ = [
    "STATES",
    "Found",
    "Identity",
    "find_member",
    "find_members",
    "id_of",
    "identify",
    "identify_for_program",
    "places_of",
]
