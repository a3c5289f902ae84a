"""The ids by which people and programs name messages, the search for the message of an id, and text that is sealed.

``core.producer.identity`` decides which sends are one message. The operations, and with them commands, REST and the admin,
read every id here, and so do ``message_status``, ``remove_message`` and ``cancel_message``.

A **plain** id, ``<slot>.<base64url(member)>``, contains the member, which is the body or the key. A
**sealed** id, ``<slot>~<sealed digest>``, contains nothing of it; lists put the place before the tilde:
``<slot>.<queue>.<score>.<rank>~<sealed digest>``, where the rank is that among messages of the same score. A
message with a sealed id is searched at its place first, then among the last of every queue of its slot.

An id names its message also after the topic was re-slotted: ``Whereabouts`` yields the places where it may be.

Only this deployment can read or make sealed text, such as sealed ids and cursors. Its keys are derived from SECRET_KEY, as in
``django.core.signing``, and text that was sealed with a key in ``SECRET_KEY_FALLBACKS`` stays valid. The same text sealed for
the same purpose and context gives the same result, so a sealed id names the same message in a log, in an event and in the admin.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from django.core.signing import Signer
from django.utils.crypto import salted_hmac
from django.utils.http import urlsafe_base64_decode, urlsafe_base64_encode
from django.utils.translation import gettext as _

from django_rmq.core.commands.broker_interface import Broker, walk
from django_rmq.core.model.bounds import abbreviated
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.replies import Area, LocateReply
from django_rmq.core.model.status import QUEUES
from django_rmq.core.model.topic import Topic, former_slot_counts, slot_counts
from django_rmq.core.producer.placement import slot_of
from django_rmq.exceptions import InvalidMessage, InvalidRequest

ID_IS_WHOLE = "id= is the whole name of a message: give no body, key or slot_basis"

ROUNDS = 2
"""The number of times that a message is searched, with one script each; reading the message makes one more."""

ALL_ROUNDS = 1_000
"""The same for a command: the search goes through the whole slot, up to two million entries."""

LOOKED_AT_ONCE = 100
"""The number of messages about which one script answers."""

SOUGHT_AT_ONCE = 12
"""The number of messages that one script searches; with the longest bodies they are about what it may read."""

MOST_SLOTS = 256
"""The number of slots in which a message is searched that a re-slotting has moved from the slot of its id."""

MOST_SLOTS_OF_REQUEST = 16
"""The same for a sealed id in ``ROUNDS`` rounds: each slot is a search, for which a request has to wait."""

# The largest slot, below 2 ** 20, has seven digits.
_NUMBER = re.compile(r"0|[1-9]\d{0,6}", re.ASCII)
_PLACE = re.compile(r"(store|prepare|retry|dead|claim)\.(.+)\.(\d{0,15})", re.ASCII)


@dataclass(frozen=True, slots=True)
class MessageIdentity:
    """The content of an id: the slot, and the member, or its digest and where to search for it."""

    slot: int
    member: bytes | None
    digest: bytes = b""
    """The digest of an unknown member; empty if this actor may not know whether the message exists."""
    place: Area | None = None


@dataclass(frozen=True, slots=True)
class LocatedMessage(MessageIdentity):
    """A slot and a member: the content of a plain id, or where the message of a sealed id was found."""

    member: bytes


def id_of(
    topic: Topic,
    slot: int,
    member: bytes,
    queue: str = "",
    score: float = math.nan,
    rank: int | None = None,
    *,
    sealed: bool,
) -> str:
    """Return the id of a message: plain, unless the member is long or ``sealed`` forbids it in the id.

    ``queue``, ``score`` and ``rank``: where a search for a sealed id begins, if known.
    """
    if len(member) <= LONGEST_PLAIN and not sealed:
        return message_id(slot, member)
    plain, tilde, digest = sealed_id(topic.name, slot, member).partition("~")
    # Seventeen digits give back every double exactly.
    place = "" if math.isnan(score) else f".{queue}.{score:.17g}.{'' if rank is None else rank}"
    return f"{plain}{place}{tilde}{digest}"


def identify(topic: Topic, text: str, broker: Broker | None = None) -> MessageIdentity:
    """Return the content of an id. Raises ``InvalidRequest`` for text that is not an id of ``topic``.

    ``broker``: has the slot counts that the topic had before; their ids are taken, too.
    """
    head, tilde, sealed = text.partition("~")
    number, dot, rest = head.partition(".")
    if not ((dot or tilde) and _NUMBER.fullmatch(number)):
        raise InvalidRequest(
            _(
                "%(id)s is not a message id: it must be <slot>.<message>, as a send returns it, or "
                "<slot>~<digest>, as the log shows it"
            )
            % {"id": _abbreviated(text)}
        )
    slot = int(number)
    if slot >= topic.slots and (broker is None or slot >= _most_slots(topic, broker)):
        raise InvalidRequest(
            _("%(id)s is not a message id of topic %(topic)s, which has %(slots)s slots")
            % {"id": _abbreviated(text), "topic": topic.name, "slots": topic.slots}
        )
    if tilde:
        digest = unsealed_digest(topic.name, sealed)
        if digest is None:
            raise InvalidRequest(
                _("%(id)s is not a message id of topic %(topic)s: it was changed, or sealed with another key")
                % {"id": _abbreviated(text), "topic": topic.name}
            )
        return MessageIdentity(slot, None, digest, _place(text, rest) if dot else None)
    member = from_base64url(rest)
    if member is None:
        raise InvalidRequest(
            _(
                "%(id)s is not a message id: the part after the slot is not base64url. The id that the log shows "
                "has a tilde after the slot"
            )
            % {"id": _abbreviated(text)}
        )
    return LocatedMessage(slot, member)


def identify_for_program(topic: Topic, text: object, broker: Broker) -> MessageIdentity:
    """Return the content of an id that the project's own code gives.

    Raises ``InvalidMessage`` for anything that is not an id of ``topic``.
    """
    if not isinstance(text, str):
        raise InvalidMessage(f"an id must be a text, got {abbreviated(text)}")
    try:
        return identify(topic, text, broker)
    except InvalidRequest as error:
        raise InvalidMessage(str(error)) from None


def _most_slots(topic: Topic, broker: Broker) -> int:
    """Return the largest number of slots that ``topic`` has or had."""
    definition = broker.definitions().get(topic.name)
    return max((*slot_counts(definition), *former_slot_counts(definition))) if definition else topic.slots


def _place(text: str, place: str) -> Area:
    match = _PLACE.fullmatch(place)
    try:
        score = float(match[2]) if match else math.nan
    except ValueError:
        score = math.nan
    # ``float`` also reads 'nan', which is not a score.
    if match is None or math.isnan(score):
        raise InvalidRequest(
            _("%(id)s is not a message id: %(place)r is not a queue, score and rank")
            % {"id": _abbreviated(text), "place": place[:40]}
        )
    return Area(match[1], score, int(match[3])) if match[3] else Area(match[1], score)


@dataclass(slots=True)
class FoundMessages:
    """The messages of ids."""

    messages: dict[MessageIdentity, LocatedMessage] = field(default_factory=dict)
    """Id -> slot and member of its message."""
    unseen: set[MessageIdentity] = field(default_factory=set)
    """The ids that were not found, although not everything was searched where their messages should be."""


def find_messages(
    broker: Broker,
    topic: Topic,
    identities: Iterable[MessageIdentity],
    *,
    rounds: int = ROUNDS,
    queues: Sequence[str] = tuple(QUEUES.values()),
) -> FoundMessages:
    """Find the messages of sealed ids in the slots of these, in up to ``rounds`` round trips.

    There is a script for every 12 messages of a slot. A plain id contains its message, which is not searched.
    """
    search_result = FoundMessages()
    sealed: defaultdict[int, list[MessageIdentity]] = defaultdict(list)
    for one in identities:
        if isinstance(one, LocatedMessage):
            search_result.messages[one] = one
        # An id without a digest is one whose message this actor may not know of, so it is not searched.
        elif one.digest:
            sealed[one.slot].append(one)
    searches = [
        _Search(slot, named[first : first + SOUGHT_AT_ONCE], queues)
        for slot, named in sealed.items()
        for first in range(0, len(named), SOUGHT_AT_ONCE)
    ]
    for _round in range(rounds):
        going = [search for search in searches if search.goes_on]
        if not going:
            break
        from django_rmq.core.commands import inspect

        calls = [inspect.find_by_digest(topic, search.slot, search.digests, search.areas) for search in going]
        for search, answer in zip(going, walk(broker, calls), strict=True):
            for one, member in search.take(answer).items():
                search_result.messages[one] = LocatedMessage(one.slot, member)
    for search in searches:
        search_result.unseen.update(search.unseen)
    return search_result


def find_moved(
    broker: Broker, topic: Topic, identities: Iterable[MessageIdentity], *, rounds: int = ROUNDS
) -> FoundMessages:
    """Find messages that are no longer in the slots of their ids, because the topic was re-slotted since.

    While the topic is being re-slotted, a message may be on its way between two slots: an id that is not found is ``unseen``.
    """
    search_result = FoundMessages()
    definition = broker.definitions().get(topic.name, {})
    if "reslot" not in definition:
        return search_result
    searchable = [one for one in dict.fromkeys(identities) if isinstance(one, LocatedMessage) or one.digest]
    # A message that is in the slot of its id, in whatever state, has not moved. A message with the same key may be elsewhere.
    staying = set(_held(broker, topic, [one for one in searchable if isinstance(one, LocatedMessage)]))
    is_under_way = len(slot_counts(definition)) > 1
    candidates: defaultdict[MessageIdentity, list[MessageIdentity]] = defaultdict(list)
    """The id in another slot -> the ids that were given for it."""
    for one in searchable:
        if one in staying:
            continue
        slots = _later_slots(one, definition)
        # A request waits for every search of a sealed id, so it searches fewer slots than a command.
        most = MOST_SLOTS_OF_REQUEST if one.member is None and rounds <= ROUNDS else MOST_SLOTS
        if len(slots) > most or is_under_way:
            search_result.unseen.add(one)
        for slot in slots[:most]:
            candidates[replace(one, slot=slot, place=None)].append(one)
    sought = find_messages(broker, topic, [one for one in candidates if one.member is None], rounds=rounds)
    for one in sought.unseen:
        search_result.unseen.update(candidates[one])
    found_members = _held(broker, topic, [one for one in candidates if isinstance(one, LocatedMessage)])
    for one, at in (*sought.messages.items(), *((one, one) for one in found_members)):
        for id_given in candidates[one]:
            # ``_later_slots`` lists the likely slots first, so the first find counts.
            search_result.messages.setdefault(id_given, at)
    search_result.unseen -= search_result.messages.keys()
    return search_result


def _held(broker: Broker, topic: Topic, identities: Iterable[LocatedMessage]) -> Iterator[LocatedMessage]:
    """Yield those whose slots hold their members."""
    by_slot: defaultdict[int, list[LocatedMessage]] = defaultdict(list)
    for one in identities:
        by_slot[one.slot].append(one)
    pages = [
        (slot, named[first : first + LOOKED_AT_ONCE])
        for slot, named in by_slot.items()
        for first in range(0, len(named), LOOKED_AT_ONCE)
    ]
    from django_rmq.core.commands import inspect

    calls = [inspect.describe_messages(topic, slot, [one.member for one in page]) for slot, page in pages]
    for (_slot, page), answer in zip(pages, walk(broker, calls), strict=True):
        yield from (one for one, reply in zip(page, answer, strict=True) if reply.is_held)


def slots_of(broker: Broker, topic: Topic, identity: MessageIdentity) -> list[int]:
    """Return the slots that may hold the outcome of a message: that of its id, and those to which re-slottings move it."""
    definition = broker.definitions().get(topic.name, {})
    others = _later_slots(identity, definition) if "reslot" in definition else []
    return [identity.slot, *others[:MOST_SLOTS]]


def _later_slots(identity: MessageIdentity, definition: Mapping[str, object]) -> list[int]:
    """Return the slots to which re-slottings may have moved a message, the likely ones first."""
    counts = slot_counts(definition)
    # The id does not say for which slot count it was made. The smallest count that has its slot assumes the least.
    nearest = min((n for n in (*counts, *former_slot_counts(definition)) if n > identity.slot), default=None)
    if nearest is None:
        return []
    # The last bits of a message's CRC stay the same for every number of slots.
    others = {one for count in counts for one in range(identity.slot % count, count, nearest)}
    own: dict[int, None] = {}
    if identity.member is not None:
        # Most messages are where their member places them. Others have a slot basis that the id does not contain.
        own = dict.fromkeys(slot_of(identity.member, count) for count in counts)
    return [one for one in (*own, *sorted(others - own.keys())) if one != identity.slot]


class Whereabouts:
    """The places where the message of an id may be: the slot of the id, then those to which re-slottings have moved it.

    The second search begins only if the iteration continues after the first one.
    """

    def __init__(
        self, broker: Broker, topic: Topic, identity: MessageIdentity, *, rounds: int = ROUNDS
    ) -> None:
        self._broker = broker
        self._topic = topic
        self._identity = identity
        self._rounds = rounds
        self.is_unseen = False
        """Whether the message may be where nothing has been searched."""

    def __iter__(self) -> Iterator[LocatedMessage]:
        for find in (find_messages, find_moved):
            result = find(self._broker, self._topic, [self._identity], rounds=self._rounds)
            self.is_unseen |= self._identity in result.unseen
            yield from result.messages.values()


def find_held(broker: Broker, topic: Topic, identity: MessageIdentity) -> LocatedMessage | None:
    """Return the slot and the member of a message that some slot holds, or None; every slot is searched wholly."""
    places = Whereabouts(broker, topic, identity, rounds=ALL_ROUNDS)
    return next((at for at in places if any(_held(broker, topic, [at]))), None)


class _Search:
    """The search for a few members in one slot: at their places first, then in whole queues."""

    def __init__(self, slot: int, named: Sequence[MessageIdentity], queues: Sequence[str]) -> None:
        self.slot = slot
        self._queues = [Area(queue) for queue in queues]
        self._wanted: defaultdict[bytes, list[MessageIdentity]] = defaultdict(list)
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
    def unseen(self) -> list[MessageIdentity]:
        """The ids that were not found, but may be where nothing was searched."""
        return [
            one
            for named in self._wanted.values()
            for one in named
            if any(self._left[area] is not None for area in self._areas_of(one))
        ]

    def take(self, sought: LocateReply) -> dict[MessageIdentity, bytes]:
        """Record what a script has found, and search for the others in all queues from now on."""
        members: dict[MessageIdentity, bytes] = {}
        for digest, member in zip(self.digests, sought.members, strict=True):
            if member is not None:
                members |= dict.fromkeys(self._wanted.pop(digest), member)
        areas = [area for area, left in self._left.items() if left is not None]
        self._left |= dict(zip(areas, sought.left, strict=True))
        for area in self._queues:
            self._left.setdefault(area, area)
        return members

    def _areas_of(self, one: MessageIdentity) -> list[Area]:
        """Return the areas in which a message should be."""
        return [one.place] if one.place is not None else self._queues


def _abbreviated(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


LONGEST_PLAIN = 512
"""Maximum size in bytes of a message that a plain id contains; the id of a longer one is always sealed."""

_MARK_BYTES = 16
_BLOCK_BYTES = 64


def seal(purpose: str, context: bytes, text: bytes) -> str:
    """Return ``text`` encrypted and signed, as URL-safe characters; reading it requires the same ``context``."""
    mark_key, stream_key = _keys(Signer().key, purpose)
    mark = _mark(mark_key, context, text)
    return urlsafe_base64_encode(mark + _masked(stream_key, mark, text))


def unseal(purpose: str, context: bytes, sealed: str) -> bytes | None:
    """Return the text given to ``seal``, or None if this deployment did not seal it for this purpose and context.

    Only the characters that ``seal`` returned are accepted, not others that base64 decodes to the same bytes.
    """
    raw = from_base64url(sealed)
    if raw is None:
        return None
    mark, masked = raw[:_MARK_BYTES], raw[_MARK_BYTES:]
    signer = Signer()
    for secret in (signer.key, *signer.fallback_keys):
        mark_key, stream_key = _keys(secret, purpose)
        text = _masked(stream_key, mark, masked)
        # The comparison takes the same time for every wrong mark, so a mark cannot be guessed byte by byte.
        if hmac.compare_digest(mark, _mark(mark_key, context, text)):
            return text
    return None


def from_base64url(text: str) -> bytes | None:
    """Return the bytes whose form in base64url, without padding, is exactly ``text``, or None if there are none."""
    try:
        raw = urlsafe_base64_decode(text)
    except ValueError:
        return None
    return raw if urlsafe_base64_encode(raw) == text else None


def digest(member: bytes) -> bytes:
    """Return the SHA-1 of a member, a digest that a script can compute too. It is never shown unsealed."""
    # Python refuses SHA-1 in a FIPS mode, unless it is said that no security depends on it.
    return hashlib.sha1(member, usedforsecurity=False).digest()


def sealed_id(topic: str, slot: int, member: bytes) -> str:
    """Return an id that contains nothing of the message: for logs, and for people who may not read the message.

    It is ``<slot>~<sealed digest>``. Without the secret key, a guess of the message cannot be checked against
    it.
    """
    return f"{slot}~{seal('id', topic.encode(), digest(member))}"


def unsealed_digest(topic: str, sealed: str) -> bytes | None:
    """Return the digest in a sealed id, from the text after its tilde, or None if it is not an id of this topic."""
    return unseal("id", topic.encode(), sealed)


@lru_cache(maxsize=32)
def _keys(secret: str | bytes, purpose: str) -> tuple[bytes, bytes]:
    """Return the signing key and the stream key that one secret gives for one purpose."""
    salt = f"django_rmq.sealing.{purpose}"
    mark, stream = (
        salted_hmac(salt, use, secret=secret, algorithm="sha256").digest() for use in ("mark", "stream")
    )
    return mark, stream


def _mark(key: bytes, context: bytes, text: bytes) -> bytes:
    # Without its length, another split of the same bytes into context and text would have the same mark.
    return hmac.digest(key, len(context).to_bytes(4) + context + text, "sha256")[:_MARK_BYTES]


def _masked(key: bytes, mark: bytes, text: bytes) -> bytes:
    """Encrypt or decrypt. The mark is unique to context and text, so no stream is ever used for two texts."""
    stream = b"".join(_blocks(key, mark, len(text)))
    # The last block may be longer than the rest of the text.
    return bytes(a ^ b for a, b in zip(text, stream, strict=False))


def _blocks(key: bytes, mark: bytes, length: int) -> Iterator[bytes]:
    for number in range(math.ceil(length / _BLOCK_BYTES)):
        yield hashlib.blake2b(mark + number.to_bytes(8), key=key).digest()
