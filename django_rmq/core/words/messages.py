"""The words of the system: topics, messages, deliveries, and what scripts answer.

Stdlib only: Spark executors and producers outside Django import this module.
Redis, settings and listeners are none of its business.
"""

from __future__ import annotations

import json
import math
import re
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any, NamedTuple, overload
from uuid import UUID

from django_rmq.core.words import discretion
from django_rmq.core.words.bounds import delay_ms, shown
from django_rmq.exceptions import InvalidMessage, MessageTooLarge

MAX_PRIORITY = 1 << 43
"""The largest priority: with ten bits for retries below it, a double still holds it exactly."""

MAX_RETRIES_LIMIT = 999
"""The largest MAX_RETRIES: the Prepare score keeps it in three decimal digits."""

MAX_KEY_BYTES = 512
"""The largest key of a keyed message, in bytes of UTF-8."""

MAX_ERROR_BYTES = 1024
"""What is kept of an error's text per message, in bytes of UTF-8."""

BATCH = 1_000
"""The most messages one script takes: it bounds what blocks Redis, and unpack takes 7,000 values."""

CLAIM_STEP = 2_500
CLAIM_STEP_BYTES = 16_777_216
"""What one script of a claim moves at most, by Redis itself; a whole Store that changes its name is not moved."""

NEVER = (1 << 53) - 1
"""A time in ms that does not come: the caller sleeps until it is woken."""

GATE = 1 << 53
"""``sleeping_until`` of a caller that was answered busy: it waits for the gate to open."""


class TopicType(StrEnum):
    """How a topic's Store is ordered (article, section "three kinds of messages")."""

    RANGE_MERGE = "range_merge"
    """Due ``time_range`` after the first send; sends until then merge and keep that time."""
    PRIORITY = "priority"
    """Highest priority first; the last send's priority counts."""
    FIXED_TIME = "fixed_time"
    """Due at a given instant; the last send's instant counts."""


@dataclass(frozen=True, slots=True)
class BackOff:
    """How long a failed message rests: ``base_ms`` doubling to ``cap_ms``, jittered by up to half.

    Equal base and cap mean that constant time without jitter; 0 means at once, as in the article.
    ``function`` (failures so far, from 1 → seconds) takes precedence after a listener's failure;
    time-outs always use the numbers.
    """

    base_ms: int = 1_000
    cap_ms: int = 600_000
    function: Callable[[int], float] | None = None


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic as its settings declare it. Every value has been validated by whoever built it."""

    name: str
    type: TopicType
    slots: int = 16
    time_range_ms: int | None = None
    """range_merge: how long a message waits unless the send says otherwise."""
    body: str = "json"
    """How bodies become bytes: json, text or bytes."""
    identity: str = "body"
    """What makes two messages the same: body or key."""
    slot_basis: str | None = None
    """The body's field whose value chooses the slot, so that equal values are consumed serially."""
    serial: bool = True
    """Whether at most one consumer at a time takes from a slot."""
    timeout: int = 30
    """Seconds from prepare or extend until a delivery counts as timed out."""
    max_retries: int = 16
    backoff: BackOff = field(default_factory=BackOff)
    retry_priority: str = "original"
    """priority topics: ``original`` retries at its own priority, ``lowest`` below all (the article's)."""
    max_runtime: float = 3600.0
    """Seconds a listener may run before its heartbeat stops."""
    prefetch: int = 512
    """Messages prepared at once for one slot."""
    max_body: int = 262_144
    max_backlog: int | None = None
    max_rate: float | None = None
    max_in_flight: int | None = None
    max_prepared: int = 1_000
    """``serial=False``: messages in flight per slot."""
    flow: str | None = None
    dead_retention: float | None = None
    """Seconds after which Dead is trimmed; None keeps it."""
    listener: bool = True
    """False: consumed by REST or Spark only."""

    @property
    def is_priority(self) -> bool:
        return self.type is TopicType.PRIORITY

    @property
    def keyed(self) -> bool:
        return self.identity == "key"

    @property
    def min_priority(self) -> int:
        """The smallest priority a send may use: below it a score reads as a retry."""
        return max(16, self.max_retries) + 1

    @property
    def slot_backlog(self) -> int:
        """How many waiting messages one slot may hold; 0 means no limit. No script crosses slots."""
        return math.ceil(self.max_backlog / self.slots) if self.max_backlog else 0

    def definition(self) -> dict[str, Any]:
        """Return what is registered in Redis: all that decides a message's treatment once it is there."""
        return {
            "slots": self.slots,
            "type": self.type.value,
            "body": self.body,
            "identity": self.identity,
            "slot_basis": self.slot_basis,
            "serial": self.serial,
            "timeout": self.timeout,
            "max_retries": self.max_retries,
            "backoff": [self.backoff.base_ms, self.backoff.cap_ms],
            "retry_priority": self.retry_priority,
            "max_prepared": self.max_prepared,
        }

    @classmethod
    def registered(cls, name: str, definition: Mapping[str, Any], slots: int) -> Topic:
        """Return a topic as its ``definition`` in Redis says, and with so many slots. Raises ``ValueError`` for none."""
        try:
            base_ms, cap_ms = definition["backoff"]
            return cls(
                name,
                TopicType(definition["type"]),
                slots=slots,
                body=definition["body"],
                identity=definition["identity"],
                slot_basis=definition["slot_basis"],
                serial=definition["serial"],
                timeout=definition["timeout"],
                max_retries=definition["max_retries"],
                backoff=BackOff(base_ms, cap_ms),
                retry_priority=definition["retry_priority"],
                max_prepared=definition["max_prepared"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"the definition of topic {name} is incomplete: {error}") from None


def slot_counts(definition: Mapping[str, Any]) -> tuple[int, ...]:
    """Return by which slot counts the messages of a registered topic are placed, in the order to be tried.

    While a topic is re-slotted there are two: a slot that refuses the old one has been given the new one,
    and whatever slot the new one leads to takes it.
    """
    coming = definition.get("reslot", {}).get("to")
    return (definition["slots"],) if coming is None else (definition["slots"], coming)


def former_slot_counts(definition: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the slot counts that a registered topic had before."""
    return tuple(definition.get("reslot", {}).get("former", ()))


def redefined(topic: Topic, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition of ``topic`` with what is ``known`` of its re-slottings."""
    noted = {"reslot": known["reslot"]} if "reslot" in known else {}
    return {**topic.definition(), **noted}


# --- errors -------------------------------------------------------------------------------------

_ERROR_CLASS = re.compile(r"[^\S\n]*([A-Za-z_][\w.<>]{0,199})[^\S\n]*:", re.ASCII)


def error_class(error: str) -> str:
    """Return the class of an error from its text, ``package.Error: what happened``; empty: it names none.

    A single word without a colon is what somebody said, not a class.
    """
    found = _ERROR_CLASS.match(error)
    return found[1] if found else ""


# --- bodies -------------------------------------------------------------------------------------


def _json_default(value: object) -> str:
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (UUID, Decimal)):
        return str(value)
    if isinstance(value, timedelta):
        return f"P{value.days}DT{value.seconds}.{value.microseconds:06d}S"
    if type(value).__module__ == "django.utils.functional":  # a lazy translation: text when asked
        return str(value)
    raise InvalidMessage(f"body holds {value!r} of type {type(value).__name__}, which JSON cannot carry")


def _json_encoder() -> Callable[[object], str]:
    """Return ``json``'s encoder of our form, made once: a ``JSONEncoder`` makes it anew for each body."""
    encoder = json.JSONEncoder(
        sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_json_default
    )
    make = json.encoder.c_make_encoder  # type: ignore[attr-defined]
    if make is None:
        return encoder.encode
    # No look for cycles: whoever walks one ends with RecursionError.
    escaped = json.encoder.encode_basestring
    chunks: Callable[[object, int], tuple[str, ...]] = make(
        None, encoder.default, escaped, None, ":", ",", True, False, False
    )
    return lambda body: "".join(chunks(body, 0))


_encode_json = _json_encoder()


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str and not isinstance(key, str):
                raise InvalidMessage(
                    f"body has the key {key!r} of type {type(key).__name__}; JSON keys are text, "
                    "so it would come back as another key"
                )
            if isinstance(item, (dict, list, tuple)):
                _check_keys(item)
    else:
        for item in value:
            if isinstance(item, (dict, list, tuple)):
                _check_keys(item)


def encode_json(body: object) -> bytes:
    """Return the canonical JSON of ``body``: sorted keys, no spaces, UTF-8, so that equal bodies merge.

    Dates, times, UUIDs and Decimals become text. NaN, infinities, lone surrogates, cycles and keys
    that are not text raise ``InvalidMessage``.
    """
    try:
        if isinstance(body, (dict, list, tuple)):
            _check_keys(body)
        return _encode_json(body).encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"body holds text that is not valid Unicode: {error.reason}") from None
    except ValueError as error:
        reason = "NaN or an infinity" if "range" in str(error) or "compliant" in str(error) else str(error)
        raise InvalidMessage(f"body holds {reason}, which JSON cannot carry") from None
    except RecursionError:
        raise InvalidMessage("body is nested too deeply (or contains itself)") from None
    except TypeError as error:
        raise InvalidMessage(f"body cannot be written as JSON: {error}") from None


def encode_body(topic: Topic, body: object) -> bytes:
    """Return ``body`` as the bytes ``topic`` stores, or raise ``InvalidMessage``/``MessageTooLarge``."""
    if topic.body == "json":
        raw = encode_json(body)
    elif topic.body == "text":
        if not isinstance(body, str):
            raise InvalidMessage(f"topic {topic.name} has BODY 'text': body must be str, got {shown(body)}")
        try:
            raw = body.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"body holds text that is not valid Unicode: {error.reason}") from None
    else:
        if not isinstance(body, (bytes, bytearray, memoryview)):
            raise InvalidMessage(
                f"topic {topic.name} has BODY 'bytes': body must be bytes, got {shown(body)}"
            )
        raw = bytes(body)
    if not raw:
        raise InvalidMessage(f"body is empty; topic {topic.name} has BODY {topic.body!r}")
    if len(raw) > topic.max_body:
        raise MessageTooLarge(
            f"body has {len(raw)} bytes; topic {topic.name} allows MAX_BODY = {topic.max_body}"
        )
    return raw


_scan_json: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def decode_body(topic: Topic, raw: bytes) -> Any:
    """Return the body a listener sees; raises ``ValueError`` for bytes that are not what BODY says."""
    if topic.body == "json":
        # Our own encoder leaves no space around a body: one scan reads it, without json.loads' preparations.
        text = raw.decode()
        try:
            body, end = _scan_json(text, 0)
        except StopIteration:
            return json.loads(text)
        return body if end == len(text) else json.loads(text)
    if topic.body == "text":
        return raw.decode()
    return raw


def cut_error(text: str, limit: int = MAX_ERROR_BYTES) -> bytes:
    """Return at most ``limit`` bytes of ``text``, never half a character."""
    raw = text.encode("utf-8", "backslashreplace")
    return raw if len(raw) <= limit else raw[:limit].decode("utf-8", "ignore").encode()


# --- envelopes: bodies of keyed messages ----------------------------------------------------------


class Envelope(NamedTuple):
    """What ``body_{K}`` holds of a keyed message."""

    body: bytes
    expires_ms: int = 0
    """Not delivered after this instant (ms); 0: never lapses."""
    slot_basis: str | None = None
    headers: dict[str, str] | None = None


def encode_envelope(envelope: Envelope) -> bytes:
    """Return ``expires_ms SP meta-JSON LF body``; scripts read no more than the leading number."""
    meta: dict[str, Any] = {}
    if envelope.slot_basis is not None:
        meta["basis"] = envelope.slot_basis
    if envelope.headers:
        meta["headers"] = envelope.headers
    return b"%d %s\n%s" % (envelope.expires_ms, encode_json(meta), envelope.body)


def decode_envelope(raw: bytes) -> Envelope:
    """Return the parts of ``raw``; whatever is not an envelope is a body, so that nothing is lost."""
    head, newline, body = raw.partition(b"\n")
    expires, space, meta_text = head.partition(b" ")
    if not (newline and space and expires.isdigit()):
        return Envelope(raw)
    try:
        meta = json.loads(meta_text)
        return Envelope(body, int(expires), meta.get("basis"), meta.get("headers"))
    except (ValueError, AttributeError):
        return Envelope(raw)


# --- slots --------------------------------------------------------------------------------------


def basis_bytes(value: object) -> bytes:
    """Return the bytes of a slot basis: text as UTF-8, bytes as they are, anything else as canonical JSON.

    What JSON carries as text (a UUID, a date) counts as that text: the slot found from the value and the
    slot found later from the stored body are the same.
    """
    if isinstance(value, bytes):
        return value
    try:
        if isinstance(value, str):
            return value.encode()
        raw = encode_json(value)
    except UnicodeEncodeError:
        raise InvalidMessage(f"slot_basis {shown(value)} is not valid Unicode") from None
    return str(json.loads(raw)).encode() if raw.startswith(b'"') else raw


def stored_basis(topic: Topic, member: bytes, envelope: bytes | None) -> bytes | None:
    """Return the slot basis of a stored message; None: it has none that could be found again."""
    if topic.keyed:
        basis = None if envelope is None else decode_envelope(envelope).slot_basis
        return member if basis is None else basis.encode()
    if topic.slot_basis is None:
        return member
    try:
        return basis_bytes(decode_body(topic, member)[topic.slot_basis])
    except (ValueError, TypeError, LookupError, RecursionError, InvalidMessage):
        return None


def message_id(slot: int, member: bytes) -> str:
    """Return the id by which people and programs name a message: its slot and its member."""
    return f"{slot}.{urlsafe_b64encode(member).rstrip(b'=').decode()}"


_UNREAD = object()


class Message:
    """What a listener gets: one delivery, decoded when asked.

    In a batch, ``retry`` and ``reject`` decide the fate of one message; without them it shares the
    fate of the batch.
    """

    __slots__ = ("_body", "_envelope", "_extend", "delivery", "outcome", "receipt", "slot", "topic")

    def __init__(
        self,
        topic: Topic,
        slot: int,
        receipt: int,
        delivery: Delivery,
        extend: Callable[[Message], bool] | None = None,
    ) -> None:
        self.topic = topic
        self.slot = slot
        self.receipt = receipt
        """Rises with every delivery of a slot: a fencing token for what the listener writes to."""
        self.delivery = delivery
        self.outcome: Failure | None = None
        """What ``retry`` or ``reject`` decided; None: success."""
        self._extend = extend
        self._body: Any = _UNREAD
        self._envelope: Envelope | None = None

    def __repr__(self) -> str:
        return f"<Message {self.topic.name} {self.name} receipt={self.receipt}>"

    @property
    def id(self) -> str:
        """The message's id: its slot and its member."""
        return message_id(self.slot, self.delivery.member)

    @property
    def name(self) -> str:
        """An id for log lines: it holds nothing of the message, and leads to it in the admin."""
        return discretion.name(self.topic.name, self.slot, self.delivery.member)

    @property
    def envelope(self) -> Envelope:
        """The body and what travels with it (unkeyed messages: the body alone)."""
        if self._envelope is None:
            raw = self.delivery.envelope
            self._envelope = Envelope(self.delivery.member) if raw is None else decode_envelope(raw)
        return self._envelope

    @property
    def raw(self) -> bytes:
        """The body as it was stored."""
        delivery = self.delivery
        return delivery.member if delivery.envelope is None else self.envelope.body

    @property
    def body(self) -> Any:
        """The decoded body. Raises ``ValueError`` for bytes that are not what the topic's BODY says."""
        if self._body is _UNREAD:
            self._body = decode_body(self.topic, self.raw)
        return self._body

    @property
    def key(self) -> str | None:
        """The key of a keyed message; None on other topics."""
        return self.delivery.member.decode("utf-8", "replace") if self.topic.keyed else None

    @property
    def headers(self) -> dict[str, str]:
        """What the sender gave along (keyed topics only)."""
        return self.envelope.headers or {}

    @property
    def retries_left(self) -> int:
        """How often the message may still be tried after this delivery."""
        return self.delivery.retries_left

    @property
    def score(self) -> float:
        """The Store score it was taken with: due ms, priority, or a retry score."""
        return self.delivery.score

    def extend(self) -> bool:
        """Begin the time-out anew; False: the delivery is no longer ours, whatever we still do is in vain."""
        return self._extend is None or self._extend(self)

    def retry(self, reason: str = "retry", *, delay: float | None = None) -> None:
        """In a batch: try this message again, after ``delay`` seconds or the topic's back-off."""
        rest_ms = None if delay is None else delay_ms(delay)
        self.outcome = Failure(self.delivery.member, "failed", rest_ms, reason)

    def reject(self, reason: str = "rejected") -> None:
        """In a batch: put this message into Dead at once."""
        self.outcome = Failure(self.delivery.member, "rejected", None, reason)


# --- what scripts answer --------------------------------------------------------------------------


class Sent(NamedTuple):
    """What became of one message in its slot."""

    status: str
    """stored, merged, replaced, superseded, present, or refused (the slot is full)."""
    score: float
    """The Store score it waits with: due time in ms, or priority. NaN where refused or in flight."""


class Durability(NamedTuple):
    """What is asked of a send beyond being stored."""

    replicas: int = 0
    """How many replicas shall confirm that they have it."""
    fsync: bool = False
    """Whether it shall be on the primary's disk."""


STORED = Durability()
"""Nothing beyond being stored."""


class Confirmed(NamedTuple):
    """What has been reached of a ``Durability``; None where it was not asked for, or is not known."""

    replicas: int | None = None
    fsynced: bool | None = None

    def least(self, other: Confirmed) -> Confirmed:
        """Return what holds for both."""
        replicas = (
            None if self.replicas is None or other.replicas is None else min(self.replicas, other.replicas)
        )
        fsynced = None if self.fsynced is None or other.fsynced is None else self.fsynced and other.fsynced
        return Confirmed(replicas, fsynced)


@dataclass(slots=True)
class SendResult:
    """What a send did. Inside a database transaction it says ``pending`` until the commit completes it.

    It says ``discarded`` as soon as the transaction, or the savepoint that the send belongs to, is rolled back.
    """

    topic: str
    slot: int
    member: bytes
    status: str = "pending"
    """pending, stored, merged, replaced, superseded, present, refused (the slot is full), failed
    (the server was unavailable at the commit) or discarded (rolled back, or a callback that ran earlier in the commit
    raised: Django then runs no more of them)."""
    score: float = math.nan
    """The Store score: due time in ms, or priority. NaN while pending, and where nothing was stored."""
    replicas: int | None = None
    """How many replicas have confirmed that they have it, where ``replicas=`` asked. None: not asked, or nobody knows."""
    fsynced: bool | None = None
    """Whether it is known to be on the primary's disk, where ``fsync=`` asked; None: not asked."""
    wanted: Durability = STORED

    @property
    def id(self) -> str:
        """The message's id: its slot and its member."""
        return message_id(self.slot, self.member)

    @property
    def ok(self) -> bool:
        """Whether the message is (or was already) in the queue."""
        return self.status in ("stored", "merged", "replaced", "superseded", "present")

    @property
    def durable(self) -> bool:
        """Whether the message is in the queue and as safe as ``replicas=`` and ``fsync=`` asked for."""
        enough = (self.replicas or 0) >= self.wanted.replicas
        return self.ok and enough and (bool(self.fsynced) or not self.wanted.fsync)


class SendResults(Sequence[SendResult]):
    """What became of a bulk send, in the order of its messages.

    A result is made when it is first looked at: a million messages that were all stored cost nothing.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._made: list[SendResult] = []
        self._trips: list[tuple[Sequence[int], Sequence[bytes], Mapping[int, Sequence[Sent]]]] = []

    def add(self, slots: Sequence[int], members: Sequence[bytes], sent: Mapping[int, Sequence[Sent]]) -> None:
        """Add one round trip: the slot of each member, and what each slot answered in that order."""
        self._trips.append((slots, members, sent))

    def extend(self, results: Iterable[SendResult]) -> None:
        """Add results that are made already."""
        self._make().extend(results)

    def counts(self) -> Counter[str]:
        """Return how many messages have which status."""
        found = Counter(result.status for result in self._made)
        for _, _, sent in self._trips:
            for answers in sent.values():
                found.update(status for status, _ in answers)
        return found

    def _make(self) -> list[SendResult]:
        for slots, members, sent in self._trips:
            answers = {slot: iter(found) for slot, found in sent.items()}
            for slot, member in zip(slots, members, strict=True):
                status, score = next(answers[slot])
                self._made.append(SendResult(self._topic, slot, member, status, score))
        self._trips.clear()
        return self._made

    def __len__(self) -> int:
        return len(self._made) + sum(len(slots) for slots, _, _ in self._trips)

    @overload
    def __getitem__(self, index: int) -> SendResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[SendResult]: ...
    def __getitem__(self, index: int | slice) -> SendResult | list[SendResult]:
        return self._make()[index]

    def __iter__(self) -> Iterator[SendResult]:
        return iter(self._make())

    def __repr__(self) -> str:
        return f"<SendResults of {len(self)} messages of {self._topic}: {dict(self.counts())}>"


class Delivery(NamedTuple):
    """One message as handed out by prepare or held."""

    member: bytes
    score: float
    """The Store score it had: due ms, priority, or a retry score."""
    retries_left: int
    envelope: bytes | None = None
    """Keyed topics: the stored envelope; None: the member is its own body."""


class Prepared(NamedTuple):
    """The answer of prepare."""

    status: str
    """ok, empty, busy, fenced, paused, moved, or more (only busy members seen: go on at ``cursor``)."""
    next_due: int | None = None
    """When to ask again, in ms; None: nothing is waiting."""
    receipt: int = 0
    deliveries: Sequence[Delivery] = ()
    cursor: tuple[str, bytes] | None = None
    """Where to go on after ``more``: (score, member)."""
    slots: int | None = None
    """After ``moved``: the slot count that the slot has by now."""
    is_suspect: bool = False
    """It is one message, and its last end was a time-out: it may be what killed its process."""


class Acquired(NamedTuple):
    """The answer of acquire_all for one slot."""

    epoch: int | None
    """None: its control key is of a foreign type, and nobody owns it."""
    is_asleep: bool
    """Nothing waits there, and senders know to wake who owns it."""


class Held(NamedTuple):
    """The answer of held: one thing in Prepare and the receipt it was handed out with."""

    delivery: Delivery
    receipt: int
    marked: bool
    """A person has removed or buried it; whatever ends the delivery ends it for good."""


class Failure(NamedTuple):
    """One failed delivery, as rollback takes it."""

    member: bytes
    kind: str = "failed"
    """failed, undecodable, timed_out (its process died), or rejected (Dead at once)."""
    delay_ms: int | None = None
    """Rest before the next delivery; None: the topic's exponential back-off."""
    error: str = ""
    """At most ``MAX_ERROR_BYTES`` are kept."""


class Claimed(NamedTuple):
    """The answer of claim."""

    status: str
    """ok, busy, paused, stale (the number is no longer open), unfinished (an earlier claim is not over), moved or full."""
    taken: int = 0
    size: int = 0
    """What the claim holds in all."""
    more: bool = False
    """Something may be left that can be taken."""


class ClaimRead(NamedTuple):
    """The answer of read_claim."""

    state: str
    """open, sealed, acked, lost, returned or none."""
    number: int
    """The consumer's newest claim; 0: there was none."""
    size: int
    rows: Sequence[bytes] = ()
    """member, score, member, score, ... as Redis tells them."""
    envelopes: Sequence[bytes | None] = ()
    """Empty: each member is its own body."""


class Entry(NamedTuple):
    """One message as peek and find list it."""

    member: bytes
    score: float
    envelope: bytes | None = None
    record: bytes | None = None
    """prepare: the in-flight record; dead: the death; store and retry: the last failure."""


class Page(NamedTuple):
    """Some entries and where to go on; ``cursor`` None: the end was reached."""

    entries: Sequence[Entry]
    cursor: tuple[str, bytes] | None


class Area(NamedTuple):
    """Where ``seek`` looks in a state of a slot: from one place on, in both directions."""

    state: str
    score: float | None = None
    """Only among entries of this score; None: all of them."""
    rank: int = 1 << 53
    """The place among these; without one, from the last on."""
    looked: int = 0
    """How far from the place was looked before."""


class Sought(NamedTuple):
    """What ``seek`` has found."""

    members: list[bytes | None]
    """One for each digest; None: it was not found."""
    left: list[Area | None]
    """Each area as it is to be asked for to go on; None: nothing of it is left."""


class Row(NamedTuple):
    """One message on its way from slot to slot."""

    state: str
    """store, retry or dead."""
    member: bytes
    score: str
    """As the slot had it: no digit is lost."""
    failure: bytes = b""
    """The last failure of a live message; empty: none."""
    rest: bytes = b""
    """The envelope of a live message, or the death of a dead one; empty: none."""


class Handover(NamedTuple):
    """The answer of move_out."""

    status: str
    """moved, staged (an earlier one has to arrive first), nothing, busy (something is in flight), or stale."""
    ticket: int = 0
    target: int = 0
    """The slot that the rows go to."""
    rows: Sequence[Row] = ()


class Survey(NamedTuple):
    """How far a re-slotting is with one slot."""

    slots: int | None
    """The slot count that its callers must have; None: any, nobody was here yet."""
    reslot: int
    """The number of the last re-slotting that was here; 0: none."""
    is_shut: bool
    is_paused: bool
    deliveries: int
    """The highest receipt."""
    in_flight: int
    claims: int
    """Spark consumers that hold something of it."""
    rescheduled: int
    revived: int
    ticket: int
    """Of what has left and is not known to have arrived; 0: nothing."""


class Counts(NamedTuple):
    """How many messages a slot holds, by state."""

    store: int
    due: int
    """Of ``store``: takeable now."""
    prepare: int
    retry: int
    dead: int
    claimed: int
    oldest_due_ms: int | None
    """Time topics: the earliest due time in Store that has passed."""
    owner: str = ""
    """Who took from the slot last."""
    paused: bool = False
    undrained_since_ms: int | None = None
    """Priority topics: since when Store has not been empty; None: it is, or only strangers have sent."""


class Looked(NamedTuple):
    """All that a slot knows of one member; None: nothing of that kind."""

    store: float | None
    prepare: float | None
    retry: float | None
    dead: float | None
    claim: float | None = None
    in_flight: bytes | None = None
    death: bytes | None = None
    failure: bytes | None = None
    envelope: bytes | None = None
    claimed_envelope: bytes | None = None
    delivered_envelope: bytes | None = None
    """Of the copy in flight."""


RECORDS = ("inflight", "deaths", "failures", "body", "claim_body", "prepare_body")
"""The hashes of a slot that say something of its messages."""


class Loose(NamedTuple):
    """Records that belong to no message, of those that were looked at."""

    cursor: str
    """Where to go on; "0": all were looked at."""
    scanned: int
    members: Sequence[bytes]


class FailureRecord(NamedTuple):
    """The diagnosis kept of a live message that failed."""

    kind: str
    times: int
    first_ms: int
    last_ms: int
    score: str
    error: bytes

    @classmethod
    def parse(cls, raw: bytes) -> FailureRecord:
        head, _, error = raw.partition(b"\n")
        kind, times, first, last, score = head.decode().split(" ")
        return cls(kind, int(times), int(first), int(last), score, error)


class Death(NamedTuple):
    """What is kept of a dead message."""

    reason: str
    """failed, timed_out, undecodable, rejected, buried or lapsed."""
    times: int
    first_ms: int
    last_ms: int
    score: str
    """The score it was first prepared with, as far as it is known."""
    error: bytes
    envelope: bytes | None

    @classmethod
    def parse(cls, raw: bytes) -> Death:
        head, _, rest = raw.partition(b"\n")
        reason, times, first, last, score, length, has_body = head.decode().split(" ")
        error, body = rest[: int(length)], rest[int(length) :]
        return cls(reason, int(times), int(first), int(last), score, error, body if has_body == "1" else None)


@dataclass(frozen=True, slots=True)
class Ledger:
    """All counters of one slot and the depths read in the same instant."""

    counters: dict[str, int]
    store: int
    prepare: int
    retry: int
    dead: int
    claimed: int = 0

    def __getitem__(self, name: str) -> int:
        return self.counters.get(name, 0)

    @property
    def live_drift(self) -> int:
        """Messages here minus messages accounted for; above 0: foreign ZADDs, below 0: loss."""
        came = self["stored"] + self["foreign"] + self["revived"] + self["moved_in"]
        went = sum(
            self[name]
            for name in ("committed", "acked", "removed", "purged", "lapsed", "dropped", "died", "moved_out")
        )
        return went + self.store + self.prepare + self.retry + self.claimed - came

    @property
    def dead_drift(self) -> int:
        went = sum(
            self[name]
            for name in (
                "dead_merged",
                "revived",
                "replay_merged",
                "removed_dead",
                "purged_dead",
                "moved_dead_out",
            )
        )
        return went + self.dead - self["died"] - self["lapsed"] - self["moved_dead_in"]

    @property
    def delivery_drift(self) -> int:
        ended = sum(
            self[name] for name in ("committed", "failed", "expired", "released", "rejected", "ended_marked")
        )
        return ended + self.prepare - self["prepared"]

    @property
    def claim_drift(self) -> int:
        return self["acked"] + self["claim_returned"] + self.claimed - self["claimed"]

    @property
    def send_drift(self) -> int:
        return self["stored"] + self["merged"] + self["replaced"] - self["sent"]

    @property
    def balanced(self) -> bool:
        return not (
            self.live_drift or self.dead_drift or self.delivery_drift or self.claim_drift or self.send_drift
        )

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.counters.items())


class Allowance(NamedTuple):
    """What one worker may do of what its topic's limits leave."""

    tokens: int
    """Deliveries that may begin; what is not used is given back. As many as asked for where no rate is limited."""
    wait_us: int
    """Fewer than asked for: until there is another."""
    permits: int
    """While as many messages are in use, nothing more may be taken."""
    others_wait: bool
    """Another worker could use more than it has."""


class Sample(NamedTuple):
    """What some slots of a topic hold and have counted, in sums."""

    slots: int
    """Of those asked for: could be read."""
    store: int
    due: int
    """Of ``store``: takeable now."""
    prepare: int
    retry: int
    dead: int
    oldest_due_ms: int | None
    """Time topics: the earliest due time in Store that has passed."""
    counters: dict[str, int]
    """Those of ``SAMPLED``."""
    undrained_since_ms: int | None = None
    """Priority topics: since when the Store has not been empty that was so for the longest."""

    def plus(self, other: Sample) -> Sample:
        """Return the sums of both."""
        oldest = [one.oldest_due_ms for one in (self, other) if one.oldest_due_ms is not None]
        undrained = [one.undrained_since_ms for one in (self, other) if one.undrained_since_ms is not None]
        return Sample(
            self.slots + other.slots,
            self.store + other.store,
            self.due + other.due,
            self.prepare + other.prepare,
            self.retry + other.retry,
            self.dead + other.dead,
            min(oldest, default=None),
            {name: value + other.counters[name] for name, value in self.counters.items()},
            min(undrained, default=None),
        )


SAMPLED = (
    "sent", "merged", "replaced", "prepared", "committed", "acked", "failed", "expired", "rejected", "died", "lapsed",
    "claimed", "claim_returned", "released", "stale", "fenced", "revived", "replay_merged",
)  # fmt: skip
"""The counters of the ledger that the history and the metrics are made of."""

LATENESS_BUCKETS = 24
"""How many classes of lateness, and of time in listeners, are counted."""


class Times(NamedTuple):
    """Durations, counted by the classes of ``history.EDGES_MS``; never reset."""

    late: tuple[int, ...]
    """How late messages were handed out."""
    late_ms: int
    """Their sum."""
    took: tuple[int, ...]
    """How long calls of the listener took."""
    took_us: int
    """Their sum, in microseconds."""

    @classmethod
    def of(cls, counted: Mapping[str, int]) -> Times:
        """Return what the fields ``TIMES`` count."""
        late, took = (
            tuple(counted[f"{name}{bucket}"] for bucket in range(LATENESS_BUCKETS))
            for name in ("late", "took")
        )
        return cls(late, counted["late"], took, counted["took"])


TIMES = tuple(
    name.encode()
    for kind in ("late", "took")
    for name in (kind, *(f"{kind}{bucket}" for bucket in range(LATENESS_BUCKETS)))
)
"""The fields that count durations."""


class Beat(NamedTuple):
    """What a worker hears when it renews its session."""

    status: str
    """ok, expired, duplicate or full."""
    members: str = ""
    """The version of the membership."""
    number: str = ""
    """The number of the assignment; empty: there is none."""
    first_end_ms: int = 0
    """ms until the first session ends, if nobody renews it."""
    basis: str = ""
    """Only with ``plan``: the version of the membership that it was made for."""
    plan: bytes | None = None
    """None: the one that the worker knows."""
    workers: dict[str, bytes] | None = None
    """Worker -> record. None: those that the worker knows."""
    rival: bytes = b""
    """duplicate: the record of the worker that has this id."""


class Session(NamedTuple):
    """One worker as Redis knows it."""

    worker: str
    ends_ms: float
    record: bytes


class Roster(NamedTuple):
    """Everything about workers and assignment, read in one instant."""

    now_ms: int
    members: str
    number: str
    basis: str
    plan: bytes
    sessions: list[Session]
