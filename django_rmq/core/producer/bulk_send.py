"""Bulk sends: the round trips of many messages, of which two are under way, and many bodies encoded and placed together.

``send_trips`` carries messages of any kind. The bodies of a ``BulkSend`` have one topic and the same options. Its results are
collected by slot, and each becomes an object only when it is read.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import add
from typing import Any, NamedTuple, Protocol, TypeVar, cast
from zlib import crc32

from django_rmq.core.commands import send
from django_rmq.core.commands.broker_interface import Broker, BrokerPipeline, batched
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.body_codec import encode_body
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.envelope import LARGEST_HELD, Envelope, basis_bytes, encode_envelope
from django_rmq.core.model.replies import Sent
from django_rmq.core.model.send_results import STORED, Durability, SendResult, SendResults, SendStatus
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.identity import draw_members
from django_rmq.core.producer.placement import Outgoing, Placement, basis_of_field, line_basis
from django_rmq.exceptions import InvalidMessage, RmqError, SlotMoved

ROUND_TRIP = 6_000
"""The maximum number of messages per round trip of a bulk send."""

TRIP_BYTES = 2_097_152
"""The maximum number of bytes per round trip; a larger message has a round trip of its own. Two trips can be under way, and
both have to pass within the time-out of a socket: 1 s in a web process."""

Trip = TypeVar("Trip")


class SendPlan(Protocol[Trip]):
    """A series of round trips and the destination of their answers."""

    @property
    def has_stopped(self) -> bool:
        """Whether an error prevents the following round trips from being sent."""

    def trips(self) -> Iterator[Trip]:
        """Yield the content of each round trip."""

    def calls(self, trip: Trip) -> Iterable[Call[object]]:
        """Return the calls of a round trip."""

    def receive(
        self, trip: Trip, replies: Sequence[object], confirmed: tuple[int | None, bool | None] | None
    ) -> None:
        """Take the answer of each call, which may be an error, and the confirmed durability of all of them."""

    def fail(self, trip: Trip, error: RmqError) -> None:
        """Record that the answer was lost."""


def send_trips(
    broker: Broker, plan: SendPlan[Trip], wanted: Durability = STORED, *, in_order: bool
) -> RmqError | None:
    """Send the trips of ``plan`` until it has stopped; return the error that prevented some from being sent, or None.

    Two trips may overtake each other, unless ``in_order``: then the next one is packed, but not sent before the answer.
    """
    in_flight: deque[tuple[BrokerPipeline, Trip]] = deque()
    try:
        for trip in plan.trips():
            pipeline = broker.pipeline()
            for call in plan.calls(trip):
                pipeline.add(call)
            if wanted != STORED:
                pipeline.confirm(wanted)
            if in_order:
                # After NOSCRIPT or MOVED a call is repeated, which would put it behind the calls that follow it.
                pipeline.keep_order()
                while in_flight:
                    _receive(plan, *in_flight.popleft())
            if plan.has_stopped:
                return None
            in_flight.append((pipeline.send(), trip))
            if len(in_flight) > 1:
                _receive(plan, *in_flight.popleft())
    except RmqError as error:
        return error
    finally:
        # Redis has the trips that were sent, so their answers count although a later trip could not be sent.
        while in_flight:
            _receive(plan, *in_flight.popleft())
    return None


def _receive(plan: SendPlan[Trip], pipeline: BrokerPipeline, trip: Trip) -> None:
    try:
        replies = pipeline.receive()
    except RmqError as error:
        plan.fail(trip, error)
    else:
        plan.receive(trip, replies, pipeline.confirmed)


def trip_spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where each round trip begins and ends among messages of these sizes in bytes."""
    for start in range(0, len(sizes), ROUND_TRIP):
        part = sizes[start : start + ROUND_TRIP]
        if sum(part) > TRIP_BYTES:
            carried = 0
            for index, size in enumerate(part, start):
                if carried and carried + size > TRIP_BYTES:
                    yield start, index
                    start, carried = index, 0
                carried += size
        # ``start`` may have moved on within its part, so the end is that of the part.
        yield start, min(start - start % ROUND_TRIP + ROUND_TRIP, len(sizes))


Follow = Callable[[Sequence[Outgoing]], tuple[list[SendResult], dict[int, RmqError]]]
"""A function that sends messages which slots refused as moved to the new slots of their topic."""


class BulkTrip(NamedTuple):
    """The content of one round trip of a bulk send."""

    topic: Topic
    """The topic, with the slot count by which the messages were placed."""
    scattered: list[tuple[Sequence[int], Sequence[bytes]]]
    """The slots and members of each call that sends one message to each of many slots."""
    groups: list[tuple[int, Sequence[bytes], Sequence[bytes]]]
    """The slot, the members and the envelopes (none if the topic is not keyed) of each other call."""
    slots: list[int]
    """The slot of each member."""
    crcs: list[int]
    members: Sequence[bytes]
    envelopes: Sequence[bytes]


class BulkSend:
    """A plan of round trips that collects its ``results`` as they arrive, and keeps the last ``error``."""

    def __init__(
        self,
        topic: Topic,
        bodies: Sequence[object],
        score: int,
        places: Placement,
        results: SendResults,
        follow: Follow,
    ) -> None:
        self._topic = topic
        self._score = score
        self._places = places
        self._results = results
        self._follow = follow
        self._raws = _members(topic, bodies, len(results))
        self._bases = None if topic.slot_basis is None else _bases(topic, bodies, len(results))
        self.error: RmqError | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether an error keeps messages of a fifo topic from being sent out of order."""
        return self._topic.is_fifo and self.error is not None

    def trips(self) -> Iterator[BulkTrip]:
        """Yield the messages of each round trip, by slot."""
        for start, end in trip_spans(list(map(len, self._raws))):
            present = self._places.present(self._topic)
            mask = present.slots - 1
            members = self._raws[start:end]
            envelopes: Sequence[bytes] = ()
            if present.is_fifo:
                members, envelopes = _lined_up(present, members)
            bases = members
            if self._bases is not None:
                bases = self._bases[start:end]
            elif (line := line_basis(present)) is not None:
                bases = [line] * len(members)
            # The same as ``slot_of``, without a call for each message.
            crcs = [crc32(basis) for basis in bases]
            slots = [crc & mask for crc in crcs]
            for part in _calls_in_line(slots) if present.is_fifo else (slice(None),):
                yield _trip_of(present, slots[part], crcs[part], members[part], envelopes[part])

    def calls(self, trip: BulkTrip) -> Iterator[Call[Sequence[Sent]]]:
        """Yield a call for each group."""
        for slots, members in trip.scattered:
            yield send.scatter(trip.topic, slots, self._score, members)
        for slot, members, envelopes in trip.groups:
            if trip.topic.is_fifo:
                yield send.send_fifo(trip.topic, slot, self._score, members, envelopes)
            elif trip.topic.type is TopicType.RANGE_MERGE:
                yield send.send_merge(trip.topic, slot, self._score, members)
            else:
                yield send.send_replace(trip.topic, slot, [self._score] * len(members), members)

    def receive(self, trip: BulkTrip, replies: Sequence[Any], _: object) -> None:
        """Add the results; send again the messages that slots refused, as their slot count changed, or left to ``send_merge``."""
        # The results say how many messages were sent before the first error.
        if self.error is not None:  # rule: counts_what_was_sent_behind_an_error
            return
        sent: dict[int, Sequence[Sent]] = {}
        has_left = False
        answered = len(trip.scattered)
        for (slots, _), reply in zip(trip.scattered, replies[:answered], strict=True):
            answers = [reply] * len(slots) if isinstance(reply, RmqError) else reply
            for slot, answer in zip(slots, answers, strict=True):
                if isinstance(answer, RmqError):
                    self.error = answer
                    return
                if answer is None:
                    has_left = True
                else:
                    sent[slot] = answer
        for (slot, *_), reply in zip(trip.groups, replies[answered:], strict=True):
            # The topic was re-slotted after these messages were placed.
            if isinstance(reply, SlotMoved):
                has_left = True
            elif isinstance(reply, RmqError):
                self.error = reply
                return
            else:
                sent[slot] = [*sent[slot], *reply] if slot in sent else reply
        if has_left:
            self._send_again(trip, sent)
        else:
            self._results.add(trip.slots, trip.members, sent)

    def fail(self, trip: BulkTrip, error: RmqError) -> None:
        """Record that the answer was lost, so that it is unknown whether these messages arrived."""
        self.error = error

    def _send_again(self, trip: BulkTrip, found: Mapping[int, Sequence[Sent]]) -> None:
        """Send the messages without an answer again; add the results of the whole trip."""
        answers = {slot: iter(sent) for slot, sent in found.items()}
        results: list[SendResult] = []
        refused: list[int] = []
        again: list[Outgoing] = []
        envelopes: Sequence[bytes | None] = trip.envelopes or [None] * len(trip.members)
        for slot, member, crc, envelope in zip(trip.slots, trip.members, trip.crcs, envelopes, strict=True):
            sent = next(answers[slot], None) if slot in answers else None
            if sent is None:
                refused.append(len(results))
                again.append(Outgoing(trip.topic, slot, member, self._score, envelope, crc=crc))
                sent = Sent("failed", math.nan)
            results.append(
                SendResult(trip.topic.name, slot, member, cast("SendStatus", sent.status), sent.score)
            )
        followed, errors = self._follow(again)
        for index, result in zip(refused, followed, strict=True):
            results[index] = result
        first = min(errors, default=None)
        if first is not None:
            self.error = errors[first]
            del results[refused[first] :]
        self._results.extend(results)


def _trip_of(
    topic: Topic, slots: list[int], crcs: list[int], members: Sequence[bytes], envelopes: Sequence[bytes]
) -> BulkTrip:
    groups = list(_by_slot(slots, members, envelopes))
    scattered: list[tuple[Sequence[int], Sequence[bytes]]] = []
    if send.takes_scattered(topic):
        singles: Iterator[object] = ((slot, group[0]) for slot, group, _ in groups if len(group) == 1)
        scattered = [tuple(zip(*part, strict=True)) for part in batched(singles, send.SCATTERED)]
        groups = [group for group in groups if len(group[1]) > 1]
    return BulkTrip(topic, scattered, groups, slots, crcs, members, envelopes)


def _calls_in_line(slots: Sequence[int]) -> Iterator[slice]:
    """Yield parts of a trip in which each slot needs one call.

    Redis may refuse one call and accept the next one, whose messages would then be ahead in the line.
    """
    start, counts = 0, Counter(slots)
    if max(counts.values()) > BATCH:
        counts.clear()
        for at, slot in enumerate(slots):
            if counts[slot] == BATCH:  # rule: sends_to_a_line_twice_in_a_bulk_trip
                yield slice(start, at)
                start = at
                counts.clear()
            counts[slot] += 1
    yield slice(start, None)


def _by_slot(
    slots: Sequence[int], members: Sequence[bytes], envelopes: Sequence[bytes]
) -> Iterator[tuple[int, Sequence[bytes], Sequence[bytes]]]:
    """Yield each slot with its members and envelopes, in order, as often as one call cannot take all of them."""
    groups: defaultdict[int, list[bytes]] = defaultdict(list)
    for slot, member in zip(slots, members, strict=True):
        groups[slot].append(member)
    envelopes_of: defaultdict[int, list[bytes]] = defaultdict(list)
    if envelopes:
        for slot, envelope in zip(slots, envelopes, strict=True):
            envelopes_of[slot].append(envelope)
    for slot, group in groups.items():
        texts: Sequence[bytes] = envelopes_of[slot] if envelopes else ()
        if len(group) <= BATCH:
            yield slot, group, texts
            continue
        for at in range(0, len(group), BATCH):
            yield slot, group[at : at + BATCH], texts[at : at + BATCH]


def _members(topic: Topic, bodies: Sequence[Any], first: int) -> Sequence[bytes]:
    all_bytes = topic.body == "bytes" and set(map(type, bodies)) == {bytes}
    if all_bytes and all(bodies) and max(map(len, bodies)) <= topic.max_body:
        return bodies
    return _each(encode_body, topic, bodies, first)


def _bases(topic: Topic, bodies: Sequence[Any], first: int) -> list[bytes]:
    """Return the slot basis of each body; that of each entity is made once."""
    if topic.typed is None and set(map(type, bodies)) == {dict}:
        values = [body.get(topic.slot_basis) for body in bodies]
        # Equal values of one of these types have one basis; 1 and True are equal, and have two.
        if set(map(type, values)) in ({int}, {str}):
            basis_by_value = {value: basis_bytes(value) for value in set(values)}
            return [basis_by_value[value] for value in values]
    return _each(basis_of_field, topic, bodies, first)


def _each(
    read: Callable[[Topic, object], bytes], topic: Topic, bodies: Sequence[object], first: int
) -> list[bytes]:
    """Encode each body; an error names the index of the bad one, counted from ``first``."""
    encoded: list[bytes] = []
    try:
        encoded.extend(read(topic, body) for body in bodies)
    except InvalidMessage as error:
        raise error.reworded(f"item {first + len(encoded)}: {error}") from None
    return encoded


def takes_bodies(topic: Topic) -> bool:
    """Return whether ``send_bodies`` can send to ``topic``: its messages have no key, or only generated ones."""
    return not topic.keyed or (topic.is_fifo and not topic.origin)


def _lined_up(topic: Topic, raws: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Return the members of messages with these bodies, and their envelopes, or none if the members hold them."""
    line = line_basis(topic)
    head = encode_envelope(Envelope(b"", slot_basis=None if line is None else line.decode()))
    members, envelopes = draw_members(len(raws)), [head + raw for raw in raws]
    # One call has an envelope for each of its members, or for none.
    if max(map(len, envelopes)) > LARGEST_HELD:
        return members, envelopes
    return list(map(add, members, envelopes)), []
