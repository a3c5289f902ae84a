"""A message for people: its states and times, and its body, unless it is redacted for them.

``authorization`` decides what an actor may see. ``format_body`` and ``redacted`` apply the FORMATTER of a topic. Where messages
are found is the part of ``messages``.
"""

from __future__ import annotations

import logging
import math
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from django.utils.module_loading import import_string

from django_rmq.conf import get_config
from django_rmq.core.consumer.failures import name_of
from django_rmq.core.model.body_codec import decode_body, encode_json, exact_body
from django_rmq.core.model.envelope import Envelope, content_of, key_of
from django_rmq.core.model.replies import Death, DescribeReply, Entry, FailureRecord, error_class, read_record
from django_rmq.core.model.scores import LAST_INSTANT_MS, is_retry, priority_of, retries_left
from django_rmq.core.model.status import STATE_OF
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidMessage
from django_rmq.message_ids import sealed_id
from django_rmq.operations.authorization import Actor, is_redacted, sees_content, sees_formatted

logger = logging.getLogger("django_rmq.operations")

Formatter = Callable[[str, object], object]
"""A function that returns what is shown in place of a body, from a topic's name and the decoded body (bytes if it cannot
be decoded)."""


def formatter_of(topic: Topic) -> Formatter | None:
    """Return the configured formatter of ``topic``. Raises ``ImportError`` if there is none."""
    path = get_config().admin.formatter_of(topic.name)
    return None if path is None else import_string(path)


def as_shown(actor: Actor, topic: Topic, copies: list[MessageCopy]) -> list[MessageCopy]:
    """Return copies as ``actor`` may see them."""
    return [redacted(copy) for copy in copies] if sees_formatted(actor, topic.name) else copies


def format_body(topic: Topic, raw: bytes) -> object:
    """Return the formatter's output for the body ``raw`` of ``topic``; its errors are raised."""
    formatter = formatter_of(topic)
    assert formatter is not None
    try:
        body = decode_body(topic, raw)
    except (ValueError, RecursionError):
        body = raw
    return formatter(topic.name, body)


def shown_body(copy: MessageCopy) -> tuple[object, str]:
    """Return a copy's body as it may be shown, in a form that JSON can carry, and its kind.

    ``json``, ``text``, or ``base64`` for anything else; ``hidden`` without the permission to see it, and ``withheld``
    if the formatter failed. The formatter's output replaces the body of a redacted topic.
    """
    if copy.raw is None:
        return None, "hidden"
    return (
        _formatted(copy.topic, copy.raw)
        if is_redacted(copy.topic.name)
        else readable_body(copy.topic, copy.raw)
    )


def body_columns(copy: MessageCopy, paths: Sequence[str]) -> dict[str, object]:
    """Return the values at paths such as ``customer.city`` in the body as ``shown_body`` has it; None if there is none."""
    body, kind = shown_body(copy) if paths else (None, "")
    return {path: _value_at(body, path) if kind == "json" else None for path in paths}


def _value_at(value: object, path: str) -> object:
    for step in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(step)
        # ``int`` raises an error for thousands of digits, and no list has an index of more than nine.
        elif isinstance(value, list) and step.isdecimal() and int(step[:9]) < len(value):
            value = value[int(step[:9])]
        else:
            return None
    return value


def readable_body(topic: Topic, raw: bytes) -> tuple[object, str]:
    """Return a body in a form that JSON can carry, and its kind: json, text, or base64 for anything else."""
    if topic.body != "bytes":
        try:
            body = exact_body(topic, raw)
            # Another program may have sent a value that Python reads and JSON does not have.
            encode_json(body)
            return body, topic.body
        except (ValueError, RecursionError, InvalidMessage):
            pass
    return b64encode(raw).decode(), "base64"


def _formatted(topic: Topic, raw: bytes) -> tuple[object, str]:
    """Return the formatter's output for a body; if the formatter fails, the body is withheld."""
    try:
        shown = format_body(topic, raw)
        if isinstance(shown, bytes):
            return b64encode(shown).decode(), "base64"
        encode_json(shown)
        return shown, "text" if isinstance(shown, str) else "json"
    except Exception as error:  # noqa: BLE001 - whatever a function of the project raises
        log_failed_formatter(topic.name, "body", error)
        return None, "withheld"


def log_failed_formatter(topic: str, part: str, error: Exception) -> None:
    """Log that a formatter failed: the class of its error, and where it was raised.

    The text of the error may quote the message, and error reporters collect the variables of its frames.
    """
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error(
        "The formatter of topic %s failed (%s); the %s is withheld.\n%s", topic, name_of(error), part, frames
    )


def copy_as_json(copy: MessageCopy) -> dict[str, object]:
    """Return a message of a list for JSON, as far as it may be seen."""
    left_out = ("topic", "queue", "member", "raw", "scored")
    values = {one.name: getattr(copy, one.name) for one in fields(copy) if one.name not in left_out}
    values["state"] = copy.state
    values["body"], values["encoding"] = shown_body(copy)
    return {**values, "log_id": copy.log_id, "redacted": is_redacted(copy.topic.name)}


ErrorView = Literal["stored", "redacted", "hidden"]
"""What stands for the error of a message: the stored text, the formatter's output, or nothing."""


def error_view(actor: Actor, topic: Topic) -> ErrorView:
    """Return by which text ``actor`` distinguishes causes of failures; that of a redacted topic is the same for all."""
    if not sees_content(actor, topic.name):
        return "hidden"
    return "redacted" if is_redacted(topic.name) else "stored"


def error_in(copy: MessageCopy, view: ErrorView) -> str:
    """Return the error of a whole copy in a view."""
    if view == "hidden":
        return ""
    return redacted(copy).error if view == "redacted" else copy.error


def redacted(copy: MessageCopy) -> MessageCopy:
    """Return a copy of a redacted topic with the formatter's output for key, headers, slot basis and error.

    A formatter that is an object may have a method for each: ``key``, ``headers``, ``slot_basis``, ``error``,
    called with the topic's name and the stored value. A part without a method, or whose method fails, is
    withheld. The body is not changed: the caller uses ``format_body``.
    """
    name = copy.topic.name
    try:
        formatter = formatter_of(copy.topic)
    except Exception:
        logger.exception("The formatter of topic %s cannot be imported; nothing is shown.", name)
        formatter = None
    shown: dict[str, Any] = {}
    for part, (kind, nothing) in _PARTS.items():
        shown[part], stored, method = nothing, getattr(copy, part), getattr(formatter, part, None)
        if not stored or method is None:
            continue
        try:
            shown[part] = kind(method(name, stored))
        except Exception as error:  # noqa: BLE001 - whatever a function of the project raises
            log_failed_formatter(name, part, error)
    return replace(copy, **shown)


_PARTS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "key": (str, None),
    "headers": (lambda headers: {str(name): str(value) for name, value in headers.items()}, {}),
    "slot_basis": (str, None),
    "error": (str, ""),
}
"""Part of a copy → its type, and the replacement if it is withheld."""


@dataclass(frozen=True, slots=True)
class MessageCopy:
    """One copy of a message in one state. Times in ms since the epoch by the clock of Redis."""

    topic: Topic
    id: str
    slot: int
    queue: str
    """The queue of the slot that holds it: store, prepare, retry, dead or claim."""
    score: float
    at_ms: int | None
    """For store and claim: the due time. retry: the end of the back-off. prepare: when it was delivered or last extended.
    dead: the time of death. None if it has no time."""
    priority: int | None
    """For store and claim of priority topics."""
    retries_left: int | None
    """The retries left after the next delivery (prepare: after this one), or None for all retries, and in Dead."""
    size: int
    """The size of the body in bytes."""
    member: bytes | None
    """The member, or None if it is hidden from the actor."""
    raw: bytes | None
    """The body as it was stored, or None if it is hidden from the actor."""
    key: str | None
    headers: dict[str, str]
    expires_ms: int
    max_retries: int | None
    """The message's own number of retries, or None for that of its topic."""
    timeout: int | None
    """The message's own time-out in seconds, or None for that of its topic."""
    slot_basis: str | None
    failed: str
    """failed, timed_out, overran, undecodable; for dead also rejected, buried or lapsed. Empty if it never failed."""
    failures: int
    first_failed_ms: int | None
    last_failed_ms: int | None
    error_class: str
    error: str
    """The last error with the end of its traceback; empty if there is none, or it is hidden."""
    receipt: int | None
    """For prepare: the number of the delivery."""
    mark: str
    """For prepare: ``removed`` or ``buried`` if a person has decided so; the message ends with its delivery.
    For claim: ``failed`` or ``rejected`` if its Spark query has decided so; the message ends so with the claim."""
    scored: float | None = None
    """For dead: the score with which it was first taken, if known."""

    def body(self) -> Any:
        """Return the decoded body, with each number as it is stored (``exact_json``).

        Raises ``ValueError`` for bytes that do not match the topic's BODY.
        """
        if self.raw is None:
            raise ValueError("permission to see the body is missing")
        return exact_body(self.topic, self.raw)

    @property
    def log_id(self) -> str:
        """The id by which the log names the message; the id of the copy if its content is hidden."""
        return self.id if self.member is None else sealed_id(self.topic.name, self.slot, self.member)

    @property
    def state(self) -> str:
        """``waiting``, ``running``, ``resting``, ``dead`` or ``claimed``."""
        return STATE_OF[self.queue]

    @property
    def delivered_ms(self) -> int | None:
        """For prepare: when it was delivered, however often the delivery was extended."""
        # A receipt is the time of its delivery in microseconds.
        return None if self.receipt is None else self.receipt // 1000

    @property
    def extended_ms(self) -> int | None:
        """For prepare: when its delivery was last extended; None if it was not, or within a second."""
        began_ms = self.delivered_ms
        is_extended = began_ms is not None and self.at_ms is not None and self.at_ms >= began_ms + 1000
        return self.at_ms if is_extended else None

    @property
    def is_retry(self) -> bool:
        """Whether it waits as a retry."""
        return self.queue == "store" and is_retry(self.topic, self.score)


def from_entry(
    topic: Topic, slot: int, queue: str, entry: Entry, name: str = "", *, hidden: bool = False
) -> MessageCopy:
    """Return the copy of a listed entry, with ``name`` as its id. ``hidden``: without its content."""
    member, score, _, record = entry
    death = read_record(Death.parse, record) if queue == "dead" else None
    failure = read_record(FailureRecord.parse, record) if queue in ("store", "retry", "claim") else None
    receipt, mark = _delivery(record) if queue == "prepare" else (None, "")
    content = _content(topic, queue, entry, death)
    shown, headers = _whole(topic, content), content.headers or {}
    known = death or failure
    error = known.error.decode("utf-8", "replace") if known else ""
    return MessageCopy(
        topic=topic,
        id=name,
        slot=slot,
        queue=queue,
        score=score,
        at_ms=time_of(topic, queue, score, content.timeout),
        priority=priority_of(topic, score) if queue in ("store", "claim") else None,
        retries_left=retries_left(topic, queue, score, known.times if known else 0, content.max_retries),
        size=len(shown),
        member=None if hidden else member,
        raw=None if hidden else shown,
        key=None if hidden else key_of(topic, member),
        headers={} if hidden or not isinstance(headers, dict) else headers,
        expires_ms=content.expires_ms,
        max_retries=content.max_retries,
        timeout=content.timeout,
        slot_basis=None if hidden else content.slot_basis,
        failed=death.reason if death else failure.kind if failure else "",
        failures=known.times if known else 0,
        first_failed_ms=known.first_ms if known else None,
        last_failed_ms=known.last_ms if known else None,
        error_class=error_class(error),
        error="" if hidden else error,
        receipt=receipt,
        mark=mark,
        scored=death.first_score if death else None,
    )


def _content(topic: Topic, queue: str, entry: Entry, death: Death | None) -> Envelope:
    envelope = entry.envelope
    if queue == "dead":
        # A live copy with the same key has a body of its own.
        envelope = None if death is None else death.envelope
    return content_of(topic, entry.member, envelope)


def _whole(topic: Topic, content: Envelope) -> bytes:
    """Return the body, or what a topic with ACCUMULATE has collected: a JSON array, or lines of text or bytes."""
    if content.bodies is None:
        return content.body
    return b"[" + b",".join(content.bodies) + b"]" if topic.body == "json" else b"\n".join(content.bodies)


def from_reply(
    topic: Topic, slot: int, member: bytes, looked: DescribeReply, name: str = "", *, hidden: bool = False
) -> Iterator[MessageCopy]:
    """Yield the existing copies of a member, with ``name`` as their id."""
    records = {
        "store": looked.failure,
        "prepare": looked.in_flight,
        "retry": looked.failure,
        "claim": looked.failure,
        "dead": looked.death,
    }
    for queue, record in records.items():
        score = getattr(looked, queue)
        if score is not None:
            envelopes = {"claim": looked.claimed_envelope, "prepare": looked.delivered_envelope}
            entry = Entry(member, score, envelopes.get(queue, looked.envelope), record)
            copy = from_entry(topic, slot, queue, entry, name, hidden=hidden)
            yield _as_its_query_says(copy, looked.claim_failure, hidden) if queue == "claim" else copy


def _as_its_query_says(copy: MessageCopy, note: bytes | None, hidden: bool) -> MessageCopy:
    if note is None:
        return copy
    kind, _, error = note.decode("utf-8", "replace").partition("\n")
    return replace(copy, mark=kind, error_class=error_class(error), error="" if hidden else error)


def _delivery(record: bytes | None) -> tuple[int | None, str]:
    parts = (record or b"").split(b" ")
    if not parts[0].isdigit():
        return None, ""
    return int(parts[0]), parts[2].decode("ascii", "replace") if len(parts) > 2 else ""


def time_of(topic: Topic, queue: str, score: float, timeout: int | None = None) -> int | None:
    """Return the time of a message with this score in ms; see ``MessageCopy.at_ms``."""
    # Another program may have stored the message under a score that is not a time.
    if not 0 <= score < LAST_INSTANT_MS:
        return None
    if queue in ("store", "claim") and (topic.is_priority or is_retry(topic, score)):
        return None
    if queue == "prepare":
        # With a shorter time-out than its topic's, a delivery looks older than it is.
        early = 0 if timeout is None else max(0, topic.timeout - timeout)
        return (math.floor(score / 1000) + early) * 1000
    return math.floor(score)
