"""The placement of a message: its body and its options, which are checked, become its slot and its score.

Here times become milliseconds. ``identity`` says which sends are one message.

The rule by which a message has its slot is ``slot_crc`` and ``slot_of_crc``. It is written again only where it is computed for
many messages at once: in ``bulk_send`` and ``spark.bulk_write``. Here nothing contacts a server: ``producer`` sends.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias
from zlib import crc32

from django_rmq.core.model.body_codec import encode_body
from django_rmq.core.model.bounds import (
    LONGEST_WAIT,
    MAX_DURATION_MS,
    MAX_INSTANT_MS,
    MAX_KEY_BYTES,
    MAX_PRIORITY,
    MAX_TIMEOUT,
    SHORTEST_WAIT,
    abbreviated,
    is_number,
    is_whole,
)
from django_rmq.core.model.envelope import (
    LARGEST_HELD,
    Envelope,
    basis_bytes,
    encode_envelope,
    new_origin,
)
from django_rmq.core.model.scores import LAST_RETRY
from django_rmq.core.model.topic import SCORE_OPTIONS, Definition, Topic, TopicType, slot_counts
from django_rmq.core.producer.identity import member_of_send
from django_rmq.durations import AmbiguousDuration, Duration, InvalidDuration, milliseconds, parse_duration
from django_rmq.exceptions import InvalidBody, InvalidMessage

TIMES = frozenset({"time_range", "delay", "fixed_time", "expires", "timeout"})
"""The options of a message that are durations or instants."""


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_SECONDS, _FIRST_MS, _LAST_MS = 1_000_000_000, 100_000_000_000, 100_000_000_000_000
"""The bounds of numbers that probably mean seconds since the epoch (from 2001 on), and of those that mean milliseconds."""


SendOptions: TypeAlias = dict[str, Any]
"""What a caller says of a send or of a removal: keyword arguments by their names."""


def in_milliseconds(
    topic: Topic, options: Mapping[str, object], zone: tzinfo | None = None
) -> dict[str, object]:
    """Return the options of a message of ``topic`` with their times in the units of the producer.

    Those are whole milliseconds, since the epoch for instants; ``timeout`` is in seconds. ``zone`` is the time zone of naive
    datetimes; without one they are refused.

    Raises ``InvalidMessage`` for a value that is not a duration or an instant.
    """
    in_ms = dict(options)
    if TIMES.isdisjoint(in_ms):
        return in_ms
    get = in_ms.get
    check_option_of_type(topic, get("priority"), get("time_range"), get("fixed_time"), get("delay"))
    for name in TIMES & in_ms.keys():
        value = in_ms[name]
        if value is None:
            continue
        if name in ("fixed_time", "expires"):
            in_ms[name] = instant_ms(name, value, zone)
        elif name == "timeout":
            in_ms[name] = _duration(
                name, value, timedelta(seconds=1), timedelta(seconds=MAX_TIMEOUT)
            ).total_seconds()
        else:
            least = SHORTEST_WAIT if name == "time_range" else timedelta()
            in_ms[name] = milliseconds(_duration(name, value, least, LONGEST_WAIT, is_short=True))
    return in_ms


def instant_ms(name: str, value: object, zone: tzinfo | None = None) -> int:
    """Return an aware datetime in ms since the epoch, rounded up. Raises ``InvalidMessage`` about ``name`` for others."""
    if not isinstance(value, datetime):
        raise InvalidMessage(f"{name} must be an aware datetime, got {abbreviated(value)}{_call_for(value)}")
    if value.tzinfo is None:
        if zone is None:
            raise InvalidMessage(
                f"{name} {value!r} is naive; it needs a time zone: say timezone.make_aware(...), or begin with "
                "timezone.now()"
            )
        value = value.replace(tzinfo=zone)
    # Rounded down, a message would be delivered up to a millisecond before its time.
    return -((_EPOCH - value) // timedelta(milliseconds=1))


def _call_for(value: object) -> str:
    """Return the end of an error's sentence: the call that makes the datetime that ``value`` probably means."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if _FIRST_SECONDS <= value < _FIRST_MS:
            return f": say datetime.fromtimestamp({value}, timezone.utc)"
        if _FIRST_MS <= value < _LAST_MS:
            return f": say datetime.fromtimestamp({value} / 1000, timezone.utc)"
        return (
            f": say timezone.now() + timedelta(seconds={abbreviated(value)})"
            if 0 <= value < _FIRST_SECONDS
            else ""
        )
    if isinstance(value, timedelta):
        return ": say timezone.now() + that timedelta"
    if isinstance(value, date):
        return ": say timezone.make_aware(datetime.combine(that date, time()))"
    return ": say datetime.fromisoformat(that text)" if isinstance(value, str) else ""


def _duration(
    name: str, value: object, least: timedelta, most: timedelta, *, is_short: bool = False
) -> timedelta:
    try:
        return parse_duration(value, least, most, is_short=is_short)
    except AmbiguousDuration as error:
        raise InvalidMessage(f"{name} is {error.given}: it must be {error}. {error.hint}") from None
    except InvalidDuration as error:
        raise InvalidMessage(f"{name} must be {error}, got {error.given}") from None


@dataclass(frozen=True, slots=True)
class Send:
    """A message as its sender gives it. In ``send_messages``, options given here override the shared ones."""

    body: object
    key: str | None = None
    priority: int | None = None
    time_range: Duration | None = None
    fixed_time: datetime | None = None
    delay: Duration | None = None
    slot_basis: object = None
    headers: Mapping[str, str] | None = field(default=None, hash=False)
    expires: datetime | None = None
    max_retries: int | None = None
    timeout: Duration | None = None

    def options(self) -> SendOptions:
        """Return the options given beside the body."""
        return {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}


OPTIONS = dict.fromkeys(one.name for one in fields(Send) if one.name != "body")
"""The names of the options of a message, in order."""


def slot_of(basis: bytes, slots: int) -> int:
    """Return the slot of a message: CRC-32 of its slot basis (or member), modulo the slot count.

    The CRC is that of ``java.util.zip.CRC32`` (article, section Producer).
    """
    return slot_of_crc(crc32(basis), slots)


def slot_crc(basis: bytes | None, member: bytes) -> int:
    """Return the CRC that decides the slot of a message: of its slot basis, or of its member if it has no basis."""
    return crc32(member if basis is None else basis)


def slot_of_crc(crc: int, slots: int) -> int:
    """Return the slot for the CRC of a slot basis. A slot count is a power of two."""
    return crc & (slots - 1)


class Outgoing(NamedTuple):
    """A validated message, ready for its slot."""

    topic: Topic
    slot: int
    member: bytes
    score: int
    """range_merge, fifo: ms to wait. priority: the priority. fixed_time: the due time in ms."""
    envelope: bytes | None = None
    act: Literal["send", "ensure", "remove", "cancel"] = "send"
    """``ensure``: do nothing if the message already waits, rests or is in flight. ``remove``: take it back.
    ``cancel``: take it back, and notify its listener if it runs."""
    crc: int | None = None
    """CRC of the slot basis, from which the slot follows for any slot count. None if it is unknown."""

    @property
    def removes(self) -> bool:
        """Whether it takes a message back instead of sending one."""
        return self.act in ("remove", "cancel")

    def placed(self, topic: Topic) -> Outgoing:
        """Return the message as ``topic`` places it; the topic may have another slot count."""
        crc = self.slot if self.crc is None else self.crc
        return self._replace(topic=topic, slot=slot_of_crc(crc, topic.slots))


def score_of(
    topic: Topic,
    priority: int | None = None,
    time_range: int | None = None,
    fixed_time: int | None = None,
    delay: int | None = None,
) -> int:
    """Return the score given by the options of a message (times in ms), which must be those of its topic's type."""
    kind = topic.type
    check_option_of_type(topic, priority, time_range, fixed_time, delay)
    if kind is TopicType.FIFO:
        return 0 if delay is None else check_ms("delay", delay, 0)
    if kind is TopicType.RANGE_MERGE:
        if time_range is not None:
            return check_ms("time_range", time_range, 1)
        if topic.time_range_ms is None:
            raise InvalidMessage(
                f'topic {topic.name} has no TIME_RANGE: pass time_range= (such as 5 or "250ms")'
            )
        return topic.time_range_ms
    if kind is TopicType.PRIORITY:
        if priority is not None:
            return check_priority(topic, priority)
        if topic.default_priority is None:
            raise InvalidMessage(
                f"topic {topic.name} has the type priority: pass priority= (an integer), or set DEFAULT_PRIORITY"
            )
        return topic.default_priority
    if fixed_time is None:
        raise InvalidMessage(
            f"topic {topic.name} has the type fixed_time: pass fixed_time= (an aware datetime)"
        )
    return check_fixed_time(fixed_time)


def check_option_of_type(
    topic: Topic, priority: object, time_range: object, fixed_time: object, delay: object
) -> None:
    """Raise ``InvalidMessage`` if one of the options is that of another type than the topic's."""
    kind = topic.type
    if (
        (priority is not None and kind is not TopicType.PRIORITY)
        or (time_range is not None and kind is not TopicType.RANGE_MERGE)
        or (fixed_time is not None and kind is not TopicType.FIXED_TIME)
        or (delay is not None and kind is not TopicType.FIFO)
    ):
        given = {"priority": priority, "time_range": time_range, "fixed_time": fixed_time, "delay": delay}
        option = SCORE_OPTIONS[kind]
        others = [f"{name}=" for name, value in given.items() if value is not None and name != option]
        raise InvalidMessage(
            f"topic {topic.name} has the type {kind.value}: pass {option}=, not {' and '.join(others)}"
        )


_VALUES = {
    TopicType.RANGE_MERGE: "how long it waits for others to merge with",
    TopicType.PRIORITY: "an integer",
    TopicType.FIXED_TIME: "an aware datetime",
    TopicType.FIFO: "how long it waits at least",
}
"""Type of a topic -> the values of the option in ``SCORE_OPTIONS``."""


def option_of(topic: Topic) -> str:
    """Return the option of a send that gives the due time or the priority of a message of ``topic``, and the values it takes."""
    return f"{SCORE_OPTIONS[topic.type]}= ({_VALUES[topic.type]})"


def score_at_once(topic: Topic, scored: float | None, now_ms: int) -> int:
    """Return the score that makes a replayed message due at once, or restores its priority (``scored``).

    For a message that is replayed by a send, to another topic or slot. In its own slot, the script ``replay`` computes it
    (``lua/slot/operate.lua``).
    """
    if topic.type in (TopicType.RANGE_MERGE, TopicType.FIFO):
        return 0
    if topic.type is TopicType.FIXED_TIME:
        return now_ms
    had = scored if scored is not None and math.isfinite(scored) else 0
    return int(min(max(had, topic.min_priority), MAX_PRIORITY))


@lru_cache(1024)
def _with_fields(topic: Topic, fields: tuple[tuple[str, Any], ...]) -> Topic:
    """Return the same object each time, because what goes over the wire is cached per object."""
    return replace(topic, **dict(fields))


class Placement:
    """Decides where messages are placed: by the slot count of their topic, or by the counts learned from a re-slotting.

    ``counts``: for topics that were re-slotted, the slot counts in the order in which to try them. ``followed``: the
    fields in which Redis differs from the settings for topics in ``counts``.
    """

    def __init__(self, counts: dict[str, tuple[int, ...]], followed: Mapping[str, Definition]) -> None:
        self._counts = counts
        self._followed = followed

    def outgoing(
        self, topic: Topic, basis: bytes | None, member: bytes, score: int, envelope: bytes | None = None
    ) -> Outgoing:
        """Return a message in the slot of its basis; without a basis, in the slot of its member."""
        present = self.present(topic)
        crc = slot_crc(basis, member)
        return Outgoing(present, slot_of_crc(crc, present.slots), member, score, envelope, "send", crc)

    def present(self, topic: Topic, attempt: int = 0) -> Topic:
        """Return ``topic`` with the slot count to try: the first, or the next one if a slot refused it."""
        counts = self._counts.get(topic.name)
        if counts is None:
            return topic
        # The first priority in a slot settles which scores are retries there, so it must have the MAX_RETRIES of the definition.
        # rule: senders_keep_their_retries
        fields = {"slots": counts[attempt % len(counts)], **self._followed.get(topic.name, {})}
        if all(getattr(topic, name) == value for name, value in fields.items()):
            return topic
        return _with_fields(topic, tuple(fields.items()))

    def slots(self, out: Outgoing) -> list[int]:
        """Return the slots that may hold a message.

        While its topic is being re-slotted there are two, the old one first.
        """
        return [out.placed(replace(out.topic, slots=slots)).slot for slots in self.counts(out.topic)]

    def counts(self, topic: Topic) -> tuple[int, ...]:
        """Return the slot counts by which this process places the messages of ``topic``."""
        return self._counts.get(topic.name, (topic.slots,))

    def learn(self, looked: dict[str, set[int]], definitions: Mapping[str, dict[str, object]]) -> set[str]:
        """Learn from ``definitions`` how topics were re-slotted; return the topics with counts that were not ``looked`` at."""
        new: set[str] = set()
        for name, known in looked.items():
            if "reslot" not in definitions.get(name, {}):
                continue
            counts = self._counts[name] = slot_counts(definitions[name])
            if not known.issuperset(counts):
                new.add(name)
                known.update(counts)
        return new

    def renewed(self, messages: Sequence[Outgoing]) -> list[Outgoing]:
        """Return messages with their current first placement; they may have been built long ago."""
        if not self._counts:
            return list(messages)
        present = [self.present(out.topic) for out in messages]
        return [
            out if topic is out.topic else out.placed(topic)
            for out, topic in zip(messages, present, strict=True)
        ]

    def moved(
        self, messages: Mapping[int, Outgoing], definitions: Mapping[str, Definition]
    ) -> dict[int, Outgoing]:
        """Return messages that a slot refused as ``definitions`` place them, without those whose refusal they do not explain."""
        # The definition may be lost, as after a fail-over, or may have the count that the slot refuses: the refusal then stands.
        present: dict[tuple[str, int], Topic] = {}
        for topic in {(out.topic.name, out.topic.slots): out.topic for out in messages.values()}.values():
            if "slots" not in definitions.get(topic.name, {}):
                continue
            counts = self._counts[topic.name] = slot_counts(definitions[topic.name])
            if counts != (topic.slots,):
                # A slot that refuses the old count has been given the new one.
                attempt = counts.index(topic.slots) + 1 if topic.slots in counts else 0
                present[topic.name, topic.slots] = self.present(topic, attempt)
        return {
            index: out.placed(present[place])
            for index, out in messages.items()
            if (place := (out.topic.name, out.topic.slots)) in present
        }


def built(places: Placement, topic: Topic, body: object, options: SendOptions) -> Outgoing:
    """Return ``body`` as a validated message of ``topic``, or raise ``InvalidMessage``. Times are in ms, timeout in s."""
    topic = places.present(topic)
    get = options.get
    score = score_of(topic, get("priority"), get("time_range"), get("fixed_time"), get("delay"))
    raw = encode_body(topic, body)
    basis = basis_of(topic, body, get("slot_basis"))
    key, headers, expires = get("key"), get("headers"), get("expires")
    retries, timeout = get("max_retries"), get("timeout")
    if (is_alone := topic.is_fifo and key is None) and basis is None:
        basis = line_basis(topic)
    if topic.identity == "body":
        if key is not None or headers or expires is not None or retries is not None or timeout is not None:
            raise InvalidMessage(
                f"topic {topic.name} has IDENTITY 'body': key, headers, expires, max_retries and timeout require "
                "IDENTITY 'key', because equal bodies merge into one message"
            )
        return places.outgoing(topic, basis, member_of_send(topic, raw, key), score)
    content = Envelope(
        raw,
        0 if expires is None else check_fixed_time(expires, name="expires"),
        None if basis is None or (is_alone and topic.slot_basis) else check_stored_basis(basis),
        check_headers(headers),
        new_origin() if topic.origin else None,
        (raw,) if topic.accumulate else None,
        None if retries is None else check_max_retries(topic, retries),
        None if timeout is None else check_timeout(topic, timeout),
    )
    member = member_of_send(topic, raw, key)
    envelope = encode_envelope(content)
    # Scripts look for expiries and limits beside the member only.
    if is_alone and expires is retries is timeout is None and len(envelope) <= LARGEST_HELD:
        return places.outgoing(topic, basis, member + envelope, score)
    return places.outgoing(topic, basis, member, score, envelope)


def basis_of(topic: Topic, body: object, slot_basis: object, *, names: bool = False) -> bytes | None:
    """Return the slot basis of a message, or None if its member decides the slot.

    ``names``: the body only identifies a message that exists already.
    """
    if slot_basis is not None:
        if topic.slot_basis is not None:
            raise InvalidMessage(
                f"topic {topic.name} has SLOT_BASIS {topic.slot_basis!r}, which decides the slot: remove "
                f"slot_basis={abbreviated(slot_basis)}"
            )
        return basis_bytes(slot_basis)
    return None if topic.slot_basis is None else basis_of_field(topic, body, names=names)


def basis_of_field(topic: Topic, body: object, *, names: bool = False) -> bytes:
    """Return the slot basis of a message from the field that the SLOT_BASIS of its topic names.

    ``names``: on a keyed topic the body needs only this field, in its stored form.
    """
    name = topic.slot_basis
    if topic.typed is not None:
        try:
            body = topic.typed.plain(body)
        except InvalidBody:
            if not (names and topic.keyed and isinstance(body, Mapping) and name in body):
                raise
    # The first test is quick, and most bodies pass it.
    if not (type(body) is dict or isinstance(body, Mapping)) or name not in body:
        raise InvalidMessage(
            f"topic {topic.name} has SLOT_BASIS {name!r}: the body must be an object with that field"
        )
    return basis_bytes(body[name])


def line_basis(topic: Topic) -> bytes | None:
    """Return the slot basis of fifo messages without a key, or None if their body (SLOT_BASIS) or their member decides.

    On a strict topic they stand in one line; their drawn members would scatter them.
    """
    return topic.name.encode() if topic.is_strict and topic.slot_basis is None else None


MAX_HEADER_BYTES = 8_192
"""The maximum size of all headers of a message, as JSON, in bytes."""

LONGEST_GUESSED = 10_000_000_000
"""An instant before this number of ms, in April 1970, is probably meant as something else."""

JUST_NOW_MS = 60_000
"""For how many ms an instant that has passed counts as now: ``fixed_time=timezone.now()`` is not a mistake."""


def check_ms(name: str, value: int, least: int) -> int:
    """Return the option ``name``, a duration in ms, or raise ``InvalidMessage``."""
    if not is_whole(value) or not least <= value <= MAX_DURATION_MS:
        raise InvalidMessage(f"{name} must be from {least} to {MAX_DURATION_MS} ms, got {abbreviated(value)}")
    return value


def check_priority(topic: Topic, value: object) -> int:
    """Return ``priority``, or raise ``InvalidMessage``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidMessage(f"priority must be an integer, got {abbreviated(value)}")
    if not topic.min_priority <= value <= MAX_PRIORITY:
        raise InvalidMessage(
            f"priority must be from {topic.min_priority} (lower numbers are reserved for retries) to "
            f"{MAX_PRIORITY}, got {abbreviated(value)}"
        )
    return value


def check_fixed_time(at: int, *, name: str = "fixed_time", past: bool = False) -> int:
    """Return an instant, which is in ms since the epoch, or raise ``InvalidMessage`` about ``name``.

    A ``fixed_time`` of the last minute counts as now. ``past`` allows all past times.
    """
    if not is_whole(at):
        raise InvalidMessage(f"{name} must be whole ms since the epoch, got {abbreviated(at)}")
    now = time.time() * 1000
    if at <= now - (JUST_NOW_MS if name == "fixed_time" else 0) and not past:
        if 0 < at < LONGEST_GUESSED:
            hint = "; is it a duration, or in seconds where ms are taken?"
        else:
            hint = "; to have it delivered at once, give the present time" if name == "fixed_time" else ""
        raise InvalidMessage(f"{name} {_instant(at)} is not in the future{hint}")
    if at > MAX_INSTANT_MS:
        raise InvalidMessage(f"{name} {_instant(at)} is after {_instant(MAX_INSTANT_MS)}")
    if at <= LAST_RETRY:
        raise InvalidMessage(
            f"{name} {at} ms is too small: it must be above {LAST_RETRY}, smaller numbers are reserved for retries"
        )
    return at


def _instant(ms: int) -> str:
    try:
        return f"{datetime.fromtimestamp(ms / 1000).astimezone().isoformat()} ({ms} ms)"
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def check_headers(headers: object) -> dict[str, str] | None:
    """Return headers in their stored form, or None if there are none."""
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise InvalidMessage(f"headers must be a mapping from str to str, got {abbreviated(headers)}")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidMessage(
                f"headers must be pairs of str, got {abbreviated(name)}: {abbreviated(value)}"
            )
    copied = dict(headers)
    try:
        size = len(json.dumps(copied, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise InvalidMessage("headers contain text that is not valid Unicode") from None
    if size > MAX_HEADER_BYTES:
        raise InvalidMessage(f"headers have {size} bytes, more than {MAX_HEADER_BYTES}")
    return copied or None


def check_max_retries(topic: Topic, value: object) -> int:
    """Return how often a message may be tried again, or raise ``InvalidMessage``."""
    if not is_whole(value) or not 0 <= value <= topic.max_retries:
        raise InvalidMessage(
            f"max_retries must be a whole number from 0 to {topic.max_retries}, the MAX_RETRIES of topic {topic.name}, "
            f"got {abbreviated(value)}"
        )
    return value


def check_timeout(topic: Topic, value: float) -> int:
    """Return the time-out of a message in seconds, or raise ``InvalidMessage``."""
    if not is_number(value) or value != int(value) or not 1 <= value <= topic.timeout:
        raise InvalidMessage(
            f"timeout must be whole seconds from 1 to {topic.timeout}, the TIMEOUT of topic {topic.name}, "
            f"got {abbreviated(value)}"
        )
    return int(value)


def check_stored_basis(basis: bytes) -> str:
    """Return a slot basis in the form in which the envelope of a keyed message holds it."""
    # It is stored beside the body, so that the slot can be found again when the slot count changes.
    if len(basis) > MAX_KEY_BYTES:
        raise InvalidMessage(f"slot_basis has {len(basis)} bytes, more than {MAX_KEY_BYTES}")
    try:
        return basis.decode()
    except UnicodeDecodeError:
        raise InvalidMessage(f"slot_basis {basis!r} is not UTF-8, which keyed topics require") from None
