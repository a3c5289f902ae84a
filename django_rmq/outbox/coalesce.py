"""What the relay sends of the rows of one message, and what becomes of them. Pure: no database, no server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple
from uuid import UUID

from django_rmq.core.model.limits import MAX_PRIORITY
from django_rmq.core.model.message_content import envelope_of
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.placement import Outgoing
from django_rmq.exceptions import CallerError, InvalidMessage, MessageTooLarge

REFUSALS = 5
"""How often a message that cannot be sent as it is, is tried before the relay leaves it out. Other processes may
have other settings while a new version is deployed."""

LONGEST_REST_MS = 600_000
"""The longest time between two attempts at one message."""


_ACTS: dict[str, Literal["send", "ensure", "remove", "cancel"]] = {
    "send": "send",
    "ensure": "ensure",
    "remove": "remove",
    "cancel": "cancel",
}

_REMOVALS = ("remove", "cancel")


class Stored(NamedTuple):
    """A row of the outbox. The fields are those of ``OutboxMessage``."""

    id: int
    topic: str
    type: str
    act: str
    identity: UUID
    crc: int
    member: bytes
    envelope: bytes | None
    score: int
    replicas: int
    fsync: bool
    sent_ms: int
    due_ms: int | None
    attempts: int


LIGHT = tuple(name for name in Stored._fields if name not in ("member", "envelope"))
"""The fields of a row without its contents, which may be large."""


def folded(rows: Sequence[Stored], *, debounces: bool = False, keeps: bool = False) -> list[Stored]:
    """Return what has to be done for the ``rows`` of one message, in order: a removal, a send, both or one of them.

    It leaves what all rows one after the other would leave. A removal ends everything before it, and
    what was cancelled stays cancelled. Of sends, the
    last one counts, but a range_merge message keeps the time of the first, unless its topic ``debounces``, and a fifo
    message keeps its place, and its body if its topic ``keeps`` it (ON_DUPLICATE). An ``ensure`` after a send finds the
    message present.
    """
    removal: Stored | None = None
    last: Stored | None = None
    for row in rows:
        if row.act in _REMOVALS:
            cancels = removal is not None and removal.act == "cancel"
            removal, last = row._replace(act="cancel") if cancels else row, None
        elif last is None:
            last = row
        elif row.act == "send" and keeps:
            last = last._replace(act="send")
        elif row.act == "send":
            merges = row.type == TopicType.FIFO or (row.type == TopicType.RANGE_MERGE and not debounces)
            has_time = merges and row.type == last.type
            last = row._replace(sent_ms=last.sent_ms, score=last.score) if has_time else row
    return [row for row in (removal, last) if row is not None]


def outgoing(row: Stored, topic: Topic, now_ms: int) -> Outgoing:
    """Return the message of a row, not yet placed, as its sender would have sent it.

    A message that waits for a time from its send is due when it would have been, and at once if that time has passed. Raises
    ``InvalidMessage`` if it is none of ``topic`` any more.
    """
    _check(row, topic)
    score = row.score
    if topic.type in (TopicType.RANGE_MERGE, TopicType.FIFO) and row.act not in _REMOVALS:
        score = min(max(0, row.sent_ms + row.score - now_ms), row.score)
    return Outgoing(topic, 0, row.member, score, row.envelope, _ACTS[row.act], row.crc)


def envelope_in(row: Stored) -> bytes | None:
    """Return the envelope of a message, which a member of a fifo topic may hold. None: it has none."""
    if row.type != TopicType.FIFO:
        return row.envelope
    return envelope_of(Topic(row.topic, TopicType.FIFO, identity="key"), row.member, row.envelope)


def _check(row: Stored, topic: Topic) -> None:
    if row.type != topic.type.value:
        raise InvalidMessage(f"topic {topic.name} had the type {row.type}, and now it is {topic.type.value}")
    if row.act in _REMOVALS:
        return
    envelope = envelope_in(row)
    if topic.keyed != (envelope is not None):
        before = "body" if envelope is None else "key"
        raise InvalidMessage(
            f"topic {topic.name} had IDENTITY {before!r} when this message was sent, and now {topic.identity!r}"
        )
    size = len(row.member if envelope is None else envelope.partition(b"\n")[2])
    if size > topic.max_body:
        raise MessageTooLarge(f"the body has {size} bytes, more than MAX_BODY = {topic.max_body}")
    if topic.is_priority and not topic.min_priority <= row.score <= MAX_PRIORITY:
        raise InvalidMessage(f"priority must be from {topic.min_priority} to {MAX_PRIORITY}, got {row.score}")


def next_attempt(error: Exception, attempts: int, now_ms: int, grace_ms: int) -> int | None:
    """Return when to try again after ``attempts`` attempts failed. None: the relay leaves the message out."""
    if isinstance(error, CallerError) and attempts >= REFUSALS:
        return None
    return now_ms + min(grace_ms << min(attempts, 20), LONGEST_REST_MS)


__all__ = ["LONGEST_REST_MS", "REFUSALS", "Stored", "envelope_in", "folded", "next_attempt", "outgoing"]
