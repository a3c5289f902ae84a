"""Sending: from a body and its options to members in slots, validated before anything is written.

Django, transactions and settings are none of its business (``sending`` has those).
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Literal, NamedTuple
from uuid import uuid4
from zlib import crc32

from django_rmq.core.redis.broker import Broker
from django_rmq.core.words.bounds import MAX_DURATION_MS, MAX_INSTANT_MS, is_number, is_whole, shown
from django_rmq.core.words.messages import (
    BATCH,
    MAX_KEY_BYTES,
    MAX_PRIORITY,
    STORED,
    Durability,
    Envelope,
    SendResult,
    SendResults,
    Sent,
    Topic,
    TopicType,
    basis_bytes,
    encode_body,
    encode_envelope,
    slot_counts,
)
from django_rmq.exceptions import InvalidMessage, RmqError, SlotMoved

MAX_HEADER_BYTES = 8_192
"""The most that all headers of a message may take, as JSON."""

MAX_REPLICAS = 100
"""The most replicas that a send may ask to confirm."""

ROUND_TRIP = 6_000
"""Messages per round trip of a bulk send."""


REDIRECTS = 6
"""How often a send follows a topic that is re-slotted, at most: each time there is a definition to be read."""


class Outgoing(NamedTuple):
    """A validated message, ready for its slot."""

    topic: Topic
    slot: int
    member: bytes
    score: int
    """range_merge: ms to wait; priority: the priority; fixed_time: the due time in ms."""
    envelope: bytes | None = None
    act: Literal["send", "ensure", "remove"] = "send"
    """``ensure``: leave the message alone where it already waits, rests or runs. ``remove``: take it back."""
    crc: int | None = None
    """Of its slot basis: with another slot count it has another slot. None: nobody knows it."""

    def placed(self, topic: Topic) -> Outgoing:
        """Return the message as ``topic`` places it, which may have another slot count."""
        crc = self.slot if self.crc is None else self.crc
        return self._replace(topic=topic, slot=crc & (topic.slots - 1))


def score_at_once(topic: Topic, scored: float | None, now_ms: int) -> int:
    """Return what lets a message that was given up be taken at once, or with the priority that it had (``scored``)."""
    if topic.type is TopicType.RANGE_MERGE:
        return 0
    if topic.type is TopicType.FIXED_TIME:
        return now_ms
    had = scored if scored is not None and math.isfinite(scored) else 0
    return int(min(max(had, topic.min_priority), MAX_PRIORITY))


def _milliseconds(name: str, value: object) -> int:
    """Return a duration in ms given as a timedelta or an integral number of ms."""
    if isinstance(value, timedelta):
        return round(value / timedelta(milliseconds=1))
    if not is_number(value) or value != int(value):
        raise InvalidMessage(f"{name} must be a timedelta or a whole number of ms, got {shown(value)}")
    return int(value)


def check_time_range(value: object) -> int:
    """Return ``time_range`` in ms, or raise ``InvalidMessage``."""
    range_ms = _milliseconds("time_range", value)
    if not 0 < range_ms <= MAX_DURATION_MS:
        raise InvalidMessage(f"time_range must be from 1 to {MAX_DURATION_MS} ms, got {range_ms}")
    return range_ms


def check_priority(topic: Topic, value: object) -> int:
    """Return ``priority``, or raise ``InvalidMessage``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidMessage(f"priority must be an integer, got {shown(value)}")
    if not topic.min_priority <= value <= MAX_PRIORITY:
        raise InvalidMessage(
            f"priority must be from {topic.min_priority} (lower scores read as retries) "
            f"to {MAX_PRIORITY}, got {shown(value)}"
        )
    return value


def check_fixed_time(value: object, *, name: str = "fixed_time", past: bool = False) -> int:
    """Return an instant in ms since the epoch, or raise ``InvalidMessage`` about ``name``.

    ``past`` allows past times.
    """
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidMessage(
                f"{name} {value!r} is naive; give it a time zone (django.utils.timezone.now)"
            )
        at = math.ceil(value.timestamp() * 1000)
    elif not is_whole(value):
        raise InvalidMessage(f"{name} must be an aware datetime or an integer of ms, got {shown(value)}")
    else:
        at = value
    now = time.time() * 1000
    if at <= now and not past:
        hint = ""
        if now / 1000 < at * 10 < now:
            hint = "; is it in seconds? It must be in milliseconds"
        raise InvalidMessage(f"{name} {_instant(at)} is not in the future{hint}")
    if at > MAX_INSTANT_MS:
        raise InvalidMessage(f"{name} {at} ms is after {_instant(MAX_INSTANT_MS)}; is it in microseconds?")
    if at <= 999:
        raise InvalidMessage(f"{name} {at} ms would read as a retry")
    return at


def check_durability(replicas: object, fsync: object) -> Durability:
    """Return what is asked of a send beyond being stored, or raise ``InvalidMessage``."""
    if type(replicas) is int and not replicas and fsync is False:
        return STORED
    if isinstance(replicas, bool) or not isinstance(replicas, int) or not 0 <= replicas <= MAX_REPLICAS:
        raise InvalidMessage(
            f"replicas must be a whole number from 0 to {MAX_REPLICAS}, got {shown(replicas)}"
        )
    if not isinstance(fsync, bool):
        raise InvalidMessage(f"fsync must be True or False, got {shown(fsync)}")
    return Durability(replicas, fsync)


def _instant(ms: int) -> str:
    try:
        return f"{datetime.fromtimestamp(ms / 1000).astimezone().isoformat()} ({ms} ms)"
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


class _Trip(NamedTuple):
    """What one round trip of a bulk send carries."""

    topic: Topic
    """With the slot count by which it was placed."""
    score: int
    called: list[int]
    """The slot of each call."""
    slots: list[int]
    """The slot of each member."""
    crcs: list[int]
    members: Sequence[bytes]


class Producer:
    """Validates messages and sends them to their slots.

    Safe to share between threads: it keeps nothing but which topics have messages with a slot basis of
    their own, which the first ``send`` after the first such message notes in Redis, and the slot counts of topics
    that were re-slotted (``counts``, which several producers may share: topic -> counts in the order to be tried).
    """

    def __init__(self, broker: Broker, counts: dict[str, tuple[int, ...]] | None = None) -> None:
        self.broker = broker
        self._counts = {} if counts is None else counts
        self._to_note: dict[str, Topic] = {}
        self._noted: set[str] = set()

    def build(
        self,
        topic: Topic,
        body: object,
        *,
        key: str | None = None,
        priority: int | None = None,
        time_range: int | timedelta | None = None,
        fixed_time: datetime | int | None = None,
        slot_basis: object = None,
        headers: Mapping[str, str] | None = None,
        expires: datetime | int | None = None,
    ) -> Outgoing:
        """Return ``body`` as a validated message of ``topic``, or raise ``InvalidMessage``; asks no server.

        ``slot_basis`` chooses the slot instead of the topic's SLOT_BASIS field, the key or the body:
        equal bodies with different bases do not merge. ``headers`` and ``expires`` need a keyed topic.
        """
        score = self._score(topic, priority, time_range, fixed_time)
        raw = encode_body(topic, body)
        basis = self._basis(topic, body, slot_basis)
        if topic.identity == "body":
            if key is not None or headers or expires is not None:
                raise InvalidMessage(
                    f"topic {topic.name} has IDENTITY 'body': key, headers and expires need IDENTITY 'key'"
                )
            if slot_basis is not None and topic.name not in self._noted:
                self._to_note[topic.name] = topic
            return self._outgoing(topic, raw if basis is None else basis, raw, score)
        member = self._member(key)
        envelope = Envelope(
            raw,
            0 if expires is None else check_fixed_time(expires, name="expires"),
            None if basis is None else self._stored_basis(basis),
            self._headers(headers),
        )
        basis_or_member = member if basis is None else basis
        return self._outgoing(topic, basis_or_member, member, score, encode_envelope(envelope))

    def _outgoing(
        self, topic: Topic, basis: bytes, member: bytes, score: int, envelope: bytes | None = None
    ) -> Outgoing:
        present = self._present(topic)
        crc = crc32(basis)
        return Outgoing(present, crc & (present.slots - 1), member, score, envelope, "send", crc)

    def _present(self, topic: Topic, attempt: int = 0) -> Topic:
        """Return ``topic`` with the slot count to be tried: the first, or the next one where a slot refused that."""
        counts = self._counts.get(topic.name)
        if counts is None:
            return topic
        slots = counts[attempt % len(counts)]
        return topic if slots == topic.slots else replace(topic, slots=slots)

    def address(
        self, topic: Topic, body: object = None, *, key: str | None = None, slot_basis: object = None
    ) -> tuple[int, bytes]:
        """Return the slot and the member of a message: of ``body``, or of ``key`` on a keyed topic.

        A keyed message whose slot follows from its body (SLOT_BASIS) needs that body, or ``slot_basis``.
        """
        out = self.outgoing(topic, body, 0, key=key, slot_basis=slot_basis)
        return out.slot, out.member

    def outgoing(
        self,
        topic: Topic,
        body: object,
        score: int,
        envelope: bytes | None = None,
        *,
        key: str | None = None,
        slot_basis: object = None,
    ) -> Outgoing:
        """Return a message with the slot and the member that ``address`` tells, and this score and envelope."""
        if topic.keyed:
            if key is None:
                raise InvalidMessage(f"topic {topic.name} has IDENTITY 'key': give key=")
            member = self._member(key)
        elif key is not None:
            raise InvalidMessage(f"topic {topic.name} has IDENTITY 'body': give the body, not key=")
        else:
            member = encode_body(topic, body)
        basis = self._basis(topic, body, slot_basis)
        return self._outgoing(topic, member if basis is None else basis, member, score, envelope)

    def slots(self, out: Outgoing) -> list[int]:
        """Return the slots that may hold a message: two, the old one first, while its topic is re-slotted."""
        counts = self._counts.get(out.topic.name, (out.topic.slots,))
        return [out.placed(replace(out.topic, slots=slots)).slot for slots in counts]

    def _basis(self, topic: Topic, body: object, slot_basis: object) -> bytes | None:
        if slot_basis is not None:
            if topic.slot_basis is not None:
                raise InvalidMessage(
                    f"topic {topic.name} has SLOT_BASIS {topic.slot_basis!r}, which chooses the slot: "
                    f"slot_basis={shown(slot_basis)} would put messages of one {topic.slot_basis} into several slots"
                )
            return basis_bytes(slot_basis)
        return None if topic.slot_basis is None else basis_bytes(self._basis_field(topic, body))

    @staticmethod
    def _score(
        topic: Topic,
        priority: int | None,
        time_range: int | timedelta | None,
        fixed_time: datetime | int | None,
    ) -> int:
        if topic.type is TopicType.RANGE_MERGE:
            if priority is not None or fixed_time is not None:
                raise _misplaced(topic, "time_range", priority=priority, fixed_time=fixed_time)
            if time_range is None:
                if topic.time_range_ms is None:
                    raise InvalidMessage(
                        f"topic {topic.name} has no TIME_RANGE: give time_range= (ms or a timedelta)"
                    )
                return topic.time_range_ms
            return check_time_range(time_range)
        if topic.type is TopicType.PRIORITY:
            if time_range is not None or fixed_time is not None:
                raise _misplaced(topic, "priority", time_range=time_range, fixed_time=fixed_time)
            if priority is None:
                raise InvalidMessage(f"topic {topic.name} is priority: give priority= (an integer)")
            return check_priority(topic, priority)
        if priority is not None or time_range is not None:
            raise _misplaced(topic, "fixed_time", priority=priority, time_range=time_range)
        if fixed_time is None:
            raise InvalidMessage(f"topic {topic.name} is fixed_time: give fixed_time= (an aware datetime)")
        return check_fixed_time(fixed_time)

    @staticmethod
    def _member(key: object) -> bytes:
        if key is None:
            return uuid4().hex.encode()
        if not isinstance(key, str) or not key:
            raise InvalidMessage(f"key must be text that is not empty, got {shown(key)}")
        try:
            member = key.encode()
        except UnicodeEncodeError:
            raise InvalidMessage(f"key {key!r} is not valid Unicode") from None
        if len(member) > MAX_KEY_BYTES:
            raise InvalidMessage(f"key has {len(member)} bytes, more than {MAX_KEY_BYTES}")
        return member

    @staticmethod
    def _headers(headers: object) -> dict[str, str] | None:
        if headers is None:
            return None
        if not isinstance(headers, Mapping):
            raise InvalidMessage(f"headers must be a mapping from text to text, got {shown(headers)}")
        for name, value in headers.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise InvalidMessage(f"headers must be text, got {shown(name)}: {shown(value)}")
        found = dict(headers)
        try:
            size = len(json.dumps(found, ensure_ascii=False).encode())
        except UnicodeEncodeError:
            raise InvalidMessage("headers hold text that is not valid Unicode") from None
        if size > MAX_HEADER_BYTES:
            raise InvalidMessage(f"headers have {size} bytes, more than {MAX_HEADER_BYTES}")
        return found or None

    @staticmethod
    def _stored_basis(basis: bytes) -> str:
        # It is kept beside the body, so that the slot can be found again when the slot count changes.
        if len(basis) > MAX_KEY_BYTES:
            raise InvalidMessage(f"slot_basis has {len(basis)} bytes, more than {MAX_KEY_BYTES}")
        try:
            return basis.decode()
        except UnicodeDecodeError:
            raise InvalidMessage(f"slot_basis {basis!r} is not UTF-8, as keyed topics need it") from None

    @staticmethod
    def _basis_field(topic: Topic, body: object) -> object:
        name = topic.slot_basis
        if not isinstance(body, Mapping) or name not in body:
            raise InvalidMessage(
                f"topic {topic.name} has SLOT_BASIS {name!r}: the body must be an object with that field"
            )
        return body[name]

    def send(
        self,
        messages: Sequence[Outgoing],
        *,
        ensure: bool = False,
        wanted: Durability = STORED,
    ) -> list[SendResult]:
        """Send validated messages, of any topics, in as few round trips as there are thousands.

        Returns a result for each, in order. What a lost connection left unknown raises
        ``ServerTrouble``: whatever was sent merges when it is sent again while it still waits. What is
        ``wanted`` beyond being stored is waited for; the results say what was reached, and nothing is raised for it.
        """
        if ensure:
            messages = [out._replace(act="ensure") for out in messages]
        results, errors = self.attempt(messages, wanted)
        for error in errors.values():
            raise error
        return results

    def attempt(
        self, messages: Sequence[Outgoing], wanted: Durability = STORED, *, removes: bool = False
    ) -> tuple[list[SendResult], dict[int, RmqError]]:
        """Send as ``send`` does, but return errors: by index, for the messages that have no outcome.

        The results of those have the status ``failed``; whether a message whose reply was lost arrived is
        not known. A message whose topic is re-slotted follows it.

        ``removes``: some of ``messages`` are to be removed. What is done to one message is then done in order, and
        the status of a removal says what it found.
        """
        latest = [self._renewed(out) for out in messages] if self._counts else list(messages)
        attempt = self._attempt_removing if removes else self._attempt
        results, errors = attempt(latest, wanted)
        for _ in range(REDIRECTS if errors else 0):
            moved = [index for index, error in errors.items() if isinstance(error, SlotMoved)]
            if not moved:
                break
            if removes:
                moved = self._with_removals(latest, moved)
            again = self._replaced([latest[index] for index in moved])
            if again is None:
                break
            found, failed = attempt(again, wanted)
            for at, index in enumerate(moved):
                results[index], latest[index] = found[at], again[at]
                errors.pop(index, None)
                if at in failed:
                    errors[index] = failed[at]
        return results, errors

    @staticmethod
    def _with_removals(messages: Sequence[Outgoing], moved: Iterable[int]) -> list[int]:
        """Return the indexes of sends that a slot refused, and of the removals that have to come after them."""
        refused, late, again = set(moved), set(), []
        for index, out in enumerate(messages):
            if index in refused:
                late.add((out.topic.name, out.member))
            elif out.act != "remove" or (out.topic.name, out.member) not in late:
                continue
            again.append(index)
        return again

    def _renewed(self, out: Outgoing) -> Outgoing:
        """Return a message as it is placed first by what is known now: it may have been built long ago."""
        present = self._present(out.topic)
        return out if present is out.topic else out.placed(present)

    def _replaced(self, messages: Sequence[Outgoing]) -> list[Outgoing] | None:
        """Return messages that a slot refused as they are placed by now; None: nobody can tell."""
        try:
            definitions = self.broker.definitions()
        except RmqError:
            return None
        present: dict[tuple[str, int], Topic] = {}
        for name, slots in {(out.topic.name, out.topic.slots) for out in messages}:
            if "slots" not in definitions.get(name, {}):
                return None
            counts = self._counts[name] = slot_counts(definitions[name])
            if counts == (slots,):
                return None  # the definition says what the slot refuses
            # What refuses the old count has been given the new one.
            attempt = counts.index(slots) + 1 if slots in counts else 0
            topic = next(out.topic for out in messages if out.topic.name == name)
            present[name, slots] = self._present(topic, attempt)
        return [out.placed(present[out.topic.name, out.topic.slots]) for out in messages]

    def _attempt_removing(
        self, messages: Sequence[Outgoing], wanted: Durability
    ) -> tuple[list[SendResult], dict[int, RmqError]]:
        """Attempt as ``_attempt`` does, in order, and remove from every slot that may hold the message."""
        placed: list[Outgoing] = []
        owners: list[int] = []
        for index, out in enumerate(messages):
            slots = self.slots(out) if out.act == "remove" else (out.slot,)
            placed += [out._replace(slot=slot) for slot in slots]
            owners += [index] * len(slots)
        found, failed = self._attempt(placed, wanted, in_order=True)
        results: list[SendResult] = []
        errors: dict[int, RmqError] = {}
        for at, (index, result) in enumerate(zip(owners, found, strict=True)):
            if index == len(results):
                results.append(result)
            elif result.status != "not_found":
                results[index] = result
            if at in failed:
                errors[index] = failed[at]
        return results, errors

    def _attempt(
        self, messages: Sequence[Outgoing], wanted: Durability, *, in_order: bool = False
    ) -> tuple[list[SendResult], dict[int, RmqError]]:
        if len(messages) == 1 and wanted == STORED:
            return self._attempt_one(messages)
        results = [SendResult(out.topic.name, out.slot, out.member, wanted=wanted) for out in messages]
        errors: dict[int, RmqError] = {}
        in_flight: deque[tuple[Any, list[list[int]]]] = deque()
        try:
            self._note_slot_bases()
            for groups in self._round_trips(messages):
                pipeline = self.broker.pipeline()
                for indexes in groups:
                    self._queue(pipeline, [messages[i] for i in indexes])
                if wanted != STORED:
                    pipeline.confirm(wanted)
                if in_order:
                    pipeline.keep_order()
                in_flight.append((pipeline.send(), groups))
                # Redis works on this trip while the next one is packed; two trips may overtake each other.
                if in_order or len(in_flight) > 1:
                    self._collect(*in_flight.popleft(), results, errors)
        except RmqError as error:
            trouble: RmqError | None = error
        else:
            trouble = None
        finally:
            while in_flight:
                self._collect(*in_flight.popleft(), results, errors)
        for i, result in enumerate(results):
            if result.status == "pending":
                result.status = "failed"
                if trouble is not None:
                    errors.setdefault(i, trouble)
        return results, errors

    def _attempt_one(self, messages: Sequence[Outgoing]) -> tuple[list[SendResult], dict[int, RmqError]]:
        """Send one message without the cost of a pipeline."""
        (out,) = messages
        result = SendResult(out.topic.name, out.slot, out.member)
        try:
            self._note_slot_bases()
            (sent,) = self._queue(self.broker, messages)
        except RmqError as error:
            result.status = "failed"
            return [result], {0: error}
        if out.act == "remove":
            result.status = sent
        else:
            result.status, result.score = sent
        return [result], {}

    def send_bodies(
        self,
        topic: Topic,
        bodies: Sequence[Any],
        *,
        priority: int | None = None,
        time_range: int | timedelta | None = None,
        fixed_time: datetime | int | None = None,
        results: SendResults | None = None,
    ) -> SendResults:
        """Send many bodies of an unkeyed topic with the same options: the fast way to send in bulk.

        All are validated before anything is written: ``InvalidMessage`` names the index of a bad one. The
        results are made when they are looked at; given some of earlier calls, they are added to those, and
        indexes go on. Errors as in ``send``.
        """
        if topic.keyed:
            raise InvalidMessage(f"topic {topic.name} has IDENTITY 'key': its messages are sent with send")
        score = self._score(topic, priority, time_range, fixed_time)
        results = SendResults(topic.name) if results is None else results
        members = self._members(topic, bodies, len(results))
        bases = members if topic.slot_basis is None else self._bases(topic, bodies, len(results))
        in_flight: deque[tuple[Any, _Trip]] = deque()
        error: RmqError | None = None
        try:
            for start in range(0, len(members), ROUND_TRIP):
                present = self._present(topic)
                mask = present.slots - 1
                part = members[start : start + ROUND_TRIP]
                # keys.slot_of, without a call for each message: a slot count is a power of two.
                crcs = [crc32(basis) for basis in bases[start : start + ROUND_TRIP]]
                slots = [crc & mask for crc in crcs]
                groups: defaultdict[int, list[bytes]] = defaultdict(list)
                for slot, member in zip(slots, part, strict=True):
                    groups[slot].append(member)
                pipeline, called = self.broker.pipeline(), []
                for slot, group in groups.items():
                    for at in range(0, len(group), BATCH):
                        batch = group[at : at + BATCH]
                        called.append(slot)
                        if topic.type is TopicType.RANGE_MERGE:
                            pipeline.send_merge(present, slot, score, batch)
                        else:
                            pipeline.send_replace(present, slot, [score] * len(batch), batch)
                in_flight.append((pipeline.send(), _Trip(present, score, called, slots, crcs, part)))
                # Redis works on this trip while the next one is packed.
                if len(in_flight) > 1:
                    error = self._gather(*in_flight.popleft(), results) or error
        finally:
            while in_flight:
                error = self._gather(*in_flight.popleft(), results) or error
        if error is not None:
            raise error
        return results

    @staticmethod
    def _members(topic: Topic, bodies: Sequence[Any], first: int = 0) -> Sequence[bytes]:
        all_bytes = topic.body == "bytes" and set(map(type, bodies)) == {bytes}
        if all_bytes and all(bodies) and max(map(len, bodies)) <= topic.max_body:
            return bodies
        members: list[bytes] = []
        try:
            members.extend(encode_body(topic, body) for body in bodies)
        except InvalidMessage as error:
            raise type(error)(f"item {first + len(members)}: {error}") from None
        return members

    def _bases(self, topic: Topic, bodies: Sequence[Any], first: int) -> Sequence[bytes]:
        bases: list[bytes] = []
        try:
            bases.extend(basis_bytes(self._basis_field(topic, body)) for body in bodies)
        except InvalidMessage as error:
            raise type(error)(f"item {first + len(bases)}: {error}") from None
        return bases

    def _gather(self, pipeline: Any, trip: _Trip, results: SendResults) -> RmqError | None:
        try:
            replies = pipeline.receive()
        except RmqError as error:
            return error
        found: defaultdict[int, list[Sent]] = defaultdict(list)
        moved = False
        for slot, reply in zip(trip.called, replies, strict=True):
            if isinstance(reply, SlotMoved):
                moved = True
            elif isinstance(reply, RmqError):
                return reply
            else:
                found[slot] += reply
        if not moved:
            results.add(trip.slots, trip.members, found)
            return None
        return self._follow(trip, found, results)

    def _follow(self, trip: _Trip, found: Mapping[int, list[Sent]], results: SendResults) -> RmqError | None:
        """Send what slots refused that were given another slot count; add what became of all of the trip."""
        answers = {slot: iter(sent) for slot, sent in found.items()}
        made: list[SendResult] = []
        refused: list[int] = []
        again: list[Outgoing] = []
        for slot, member, crc in zip(trip.slots, trip.members, trip.crcs, strict=True):
            sent = next(answers[slot], None) if slot in answers else None
            if sent is None:
                refused.append(len(made))
                again.append(Outgoing(trip.topic, slot, member, trip.score, crc=crc))
                sent = Sent("failed", math.nan)
            made.append(SendResult(trip.topic.name, slot, member, *sent))
        followed, errors = self.attempt(again)
        for index, result in zip(refused, followed, strict=True):
            made[index] = result
        results.extend(made)
        return next(iter(errors.values()), None)

    def _note_slot_bases(self) -> None:
        while self._to_note:
            name, topic = next(iter(self._to_note.items()))
            self.broker.note_slot_basis(topic)
            self._noted.add(name)
            self._to_note.pop(name, None)

    @staticmethod
    def _round_trips(messages: Sequence[Outgoing]) -> Iterator[list[list[int]]]:
        """Yield, per round trip, groups of indexes that one script takes: same slot, range and manner.

        Within a slot they keep their order: which of two sends of a member was first decides its time.
        """
        for start in range(0, len(messages), ROUND_TRIP):
            groups: list[list[int]] = []
            latest: dict[tuple[str, int], tuple[tuple[int, str], list[int]]] = {}
            for i in range(start, min(start + ROUND_TRIP, len(messages))):
                topic, slot, _, score, _, act, _ = messages[i]
                manner = (score if topic.type is TopicType.RANGE_MERGE and act == "send" else 0, act)
                found = latest.get((topic.name, slot))
                if found is not None and found[0] == manner and len(found[1]) < BATCH:
                    found[1].append(i)
                else:
                    group = [i]
                    groups.append(group)
                    latest[topic.name, slot] = (manner, group)
            yield groups

    @staticmethod
    def _queue(broker: Any, batch: Sequence[Outgoing]) -> Any:
        """Call the transition that sends or removes ``batch`` on a broker (which answers) or a pipeline."""
        topic, slot, _, score, _, act, _ = batch[0]
        members = [out.member for out in batch]
        if act == "remove":
            return broker.remove(topic, slot, members, "live")
        envelopes = [out.envelope or b"" for out in batch] if topic.keyed else ()
        if act == "ensure":
            return broker.ensure(topic, slot, [out.score for out in batch], members, envelopes)
        if topic.type is TopicType.RANGE_MERGE:
            return broker.send_merge(topic, slot, score, members, envelopes)
        return broker.send_replace(topic, slot, [out.score for out in batch], members, envelopes)

    @staticmethod
    def _collect(
        pipeline: Any, groups: list[list[int]], results: list[SendResult], errors: dict[int, RmqError]
    ) -> None:
        try:
            replies = pipeline.receive()
        except RmqError as error:
            replies = [error] * len(groups)
        for indexes, reply in zip(groups, replies, strict=True):
            if isinstance(reply, RmqError):
                errors.update(dict.fromkeys(indexes, reply))
            elif isinstance(reply[0], str):
                for i, word in zip(indexes, reply, strict=True):
                    results[i].status = word
            else:
                for i, sent in zip(indexes, reply, strict=True):
                    results[i].status, results[i].score = sent
                    if pipeline.confirmed is not None and results[i].ok:
                        results[i].replicas, results[i].fsynced = pipeline.confirmed


def _misplaced(topic: Topic, wanted: str, **given: object) -> InvalidMessage:
    names = " and ".join(f"{name}=" for name, value in given.items() if value is not None)
    return InvalidMessage(f"topic {topic.name} is {topic.type.value}: it takes {wanted}=, not {names}")


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of up to ``size`` items."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
