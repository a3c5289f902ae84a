"""Sending: from a body and its options to members in slots, validated before anything is written.

Django, transactions and settings are none of its business (``sending`` has those).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple
from uuid import uuid4

from django_rmq.broker import BATCH, Broker
from django_rmq.exceptions import InvalidMessage, RmqError
from django_rmq.keys import slot_of
from django_rmq.messages import (
    MAX_KEY_BYTES,
    MAX_PRIORITY,
    Envelope,
    SendResult,
    Topic,
    TopicType,
    encode_body,
    encode_envelope,
    encode_json,
)

MAX_RANGE_MS = 31_622_400_000
"""The longest time_range: 366 days."""

MAX_FIXED_MS = 4_102_444_800_000
"""The latest fixed_time: 2100-01-01."""

ROUND_TRIP = 6_000
"""Messages per round trip of a bulk send."""


class Outgoing(NamedTuple):
    """A validated message, ready for its slot."""

    topic: Topic
    slot: int
    member: bytes
    score: int
    """range_merge: ms to wait; priority: the priority; fixed_time: the due time in ms."""
    envelope: bytes | None = None


def _milliseconds(name: str, value: object) -> int:
    """Return a duration in ms given as a timedelta or an integral number of ms."""
    if isinstance(value, timedelta):
        return round(value / timedelta(milliseconds=1))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidMessage(f"{name} must be a timedelta or a number of ms, got {value!r}")
    if not math.isfinite(value) or value != int(value):
        raise InvalidMessage(f"{name} must be a whole number of ms, got {value!r}")
    return int(value)


def check_time_range(value: object) -> int:
    """Return ``time_range`` in ms, or raise ``InvalidMessage``."""
    range_ms = _milliseconds("time_range", value)
    if not 0 < range_ms <= MAX_RANGE_MS:
        raise InvalidMessage(f"time_range must be from 1 to {MAX_RANGE_MS} ms, got {range_ms}")
    return range_ms


def check_priority(topic: Topic, value: object) -> int:
    """Return ``priority``, or raise ``InvalidMessage``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidMessage(f"priority must be an integer, got {value!r}")
    if not topic.min_priority <= value <= MAX_PRIORITY:
        raise InvalidMessage(
            f"priority must be from {topic.min_priority} (lower scores read as retries) "
            f"to {MAX_PRIORITY}, got {value}"
        )
    return value


def check_fixed_time(value: object, *, past: bool = False) -> int:
    """Return ``fixed_time`` in ms since the epoch, or raise ``InvalidMessage``. ``past`` allows past times."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidMessage(f"fixed_time {value!r} is naive; give it a time zone (django.utils.timezone.now)")
        at = math.ceil(value.timestamp() * 1000)
    elif isinstance(value, bool) or not isinstance(value, int):
        raise InvalidMessage(f"fixed_time must be an aware datetime or an integer of ms, got {value!r}")
    else:
        at = value
    now = time.time() * 1000
    if at <= now and not past:
        hint = ""
        if now / 1000 < at * 10 < now:
            hint = "; is it in seconds? It must be in milliseconds"
        raise InvalidMessage(f"fixed_time {_instant(at)} is not in the future{hint}")
    if at > MAX_FIXED_MS:
        raise InvalidMessage(f"fixed_time {at} ms is after {_instant(MAX_FIXED_MS)}; is it in microseconds?")
    if at <= 999:
        raise InvalidMessage(f"fixed_time {at} ms would read as a retry")
    return at


def _instant(ms: int) -> str:
    try:
        return f"{datetime.fromtimestamp(ms / 1000).astimezone().isoformat()} ({ms} ms)"
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def basis_bytes(value: object) -> bytes:
    """Return the bytes of a slot basis: text as UTF-8, bytes as they are, anything else as canonical JSON."""
    if isinstance(value, bytes):
        return value
    try:
        return value.encode() if isinstance(value, str) else encode_json(value)
    except UnicodeEncodeError:
        raise InvalidMessage(f"slot_basis {value!r} is not valid Unicode") from None


class Producer:
    """Validates messages and sends them to their slots.

    Safe to share between threads: it keeps nothing but which topics it noted a slot basis for.
    """

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
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
        """Return ``body`` as a validated message of ``topic``, or raise ``InvalidMessage``.

        ``slot_basis`` chooses the slot instead of the topic's SLOT_BASIS field, the key or the body:
        equal bodies with different bases do not merge. ``headers`` and ``expires`` need a keyed topic.
        """
        if topic.type is TopicType.RANGE_MERGE:
            if priority is not None or fixed_time is not None:
                raise _misplaced(topic, "time_range", priority=priority, fixed_time=fixed_time)
            if time_range is None:
                if topic.time_range_ms is None:
                    raise InvalidMessage(
                        f"topic {topic.name} has no TIME_RANGE: give time_range= (ms or a timedelta)"
                    )
                score = topic.time_range_ms
            else:
                score = check_time_range(time_range)
        elif topic.type is TopicType.PRIORITY:
            if time_range is not None or fixed_time is not None:
                raise _misplaced(topic, "priority", time_range=time_range, fixed_time=fixed_time)
            score = check_priority(topic, priority)
        else:
            if priority is not None or time_range is not None:
                raise _misplaced(topic, "fixed_time", priority=priority, time_range=time_range)
            score = check_fixed_time(fixed_time)

        raw = encode_body(topic, body)
        if slot_basis is not None:
            basis: bytes | None = basis_bytes(slot_basis)
        elif topic.slot_basis is not None:
            basis = basis_bytes(self._basis_field(topic, body))
        else:
            basis = None
        if topic.identity == "body":
            if key is not None or headers or expires is not None:
                raise InvalidMessage(
                    f"topic {topic.name} has IDENTITY 'body': key, headers and expires need IDENTITY 'key'"
                )
            if slot_basis is not None and topic.name not in self._noted:
                self.broker.note_slot_basis(topic)
                self._noted.add(topic.name)
            return Outgoing(topic, slot_of(raw if basis is None else basis, topic.slots), raw, score)
        member = self._member(key)
        envelope = Envelope(
            raw,
            0 if expires is None else check_fixed_time(expires),
            None if basis is None else basis.decode("utf-8", "surrogateescape"),
            self._headers(headers),
        )
        return Outgoing(
            topic,
            slot_of(member if basis is None else basis, topic.slots),
            member,
            score,
            encode_envelope(envelope),
        )

    @staticmethod
    def _member(key: object) -> bytes:
        if key is None:
            return uuid4().hex.encode()
        if not isinstance(key, str) or not key:
            raise InvalidMessage(f"key must be text that is not empty, got {key!r}")
        try:
            member = key.encode()
        except UnicodeEncodeError:
            raise InvalidMessage(f"key {key!r} is not valid Unicode") from None
        if len(member) > MAX_KEY_BYTES:
            raise InvalidMessage(f"key has {len(member)} bytes, more than {MAX_KEY_BYTES}")
        return member

    @staticmethod
    def _headers(headers: Mapping[str, str] | None) -> dict[str, str] | None:
        if not headers:
            return None
        for name, value in headers.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise InvalidMessage(f"headers must be text, got {name!r}: {value!r}")
        return dict(headers)

    @staticmethod
    def _basis_field(topic: Topic, body: object) -> object:
        name = topic.slot_basis
        if not isinstance(body, Mapping) or name not in body:
            raise InvalidMessage(
                f"topic {topic.name} has SLOT_BASIS {name!r}: the body must be an object with that field"
            )
        return body[name]

    def send(self, messages: Sequence[Outgoing], *, ensure: bool = False) -> list[SendResult]:
        """Send validated messages, of any topics, in as few round trips as there are thousands.

        Returns a result for each, in order. What a lost connection left unknown raises
        ``ServerTrouble``: whatever was sent merges when it is sent again while it still waits.
        """
        results = [SendResult(out.topic.name, out.slot, out.member) for out in messages]
        in_flight: deque[tuple[Any, list[list[int]]]] = deque()
        trouble: RmqError | None = None
        try:
            for groups in self._round_trips(messages):
                pipeline = self.broker.pipeline()
                for indexes in groups:
                    self._queue(pipeline, [messages[i] for i in indexes], ensure)
                in_flight.append((pipeline.send(), groups))
                # Redis works on this trip while the next one is packed.
                if len(in_flight) > 1:
                    trouble = self._collect(*in_flight.popleft(), results) or trouble
        finally:
            while in_flight:
                trouble = self._collect(*in_flight.popleft(), results) or trouble
        if trouble is not None:
            raise trouble
        return results

    @staticmethod
    def _round_trips(messages: Sequence[Outgoing]) -> Iterator[list[list[int]]]:
        """Yield, per round trip, groups of indexes that one script takes: same slot, same range."""
        for start in range(0, len(messages), ROUND_TRIP):
            groups: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
            for i in range(start, min(start + ROUND_TRIP, len(messages))):
                topic, slot, _, score, _ = messages[i]
                groups[topic.name, slot, score if topic.type is TopicType.RANGE_MERGE else 0].append(i)
            yield [
                indexes[at : at + BATCH] for indexes in groups.values() for at in range(0, len(indexes), BATCH)
            ]

    @staticmethod
    def _queue(pipeline: Any, batch: Sequence[Outgoing], ensure: bool) -> None:
        topic, slot, _, score, _ = batch[0]
        members = [out.member for out in batch]
        envelopes = [out.envelope or b"" for out in batch] if topic.keyed else ()
        if ensure:
            pipeline.ensure(topic, slot, [out.score for out in batch], members, envelopes)
        elif topic.type is TopicType.RANGE_MERGE:
            pipeline.send_merge(topic, slot, score, members, envelopes)
        else:
            pipeline.send_replace(topic, slot, [out.score for out in batch], members, envelopes)

    @staticmethod
    def _collect(pipeline: Any, groups: list[list[int]], results: list[SendResult]) -> RmqError | None:
        trouble: RmqError | None = None
        try:
            replies = pipeline.receive()
        except RmqError as error:
            return error
        for indexes, reply in zip(groups, replies, strict=True):
            if isinstance(reply, RmqError):
                trouble = reply
                continue
            for i, sent in zip(indexes, reply, strict=True):
                results[i].status, results[i].score = sent
        return trouble


def _misplaced(topic: Topic, wanted: str, **given: object) -> InvalidMessage:
    names = " and ".join(f"{name}=" for name, value in given.items() if value is not None)
    return InvalidMessage(f"topic {topic.name} is {topic.type.value}: it takes {wanted}=, not {names}")


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of up to ``size`` items."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
