"""The rows of one message as the messages to send: merged as Redis would have merged their sends, one after the other.

So the rules of ``_duplicates`` and ``_debounce`` in ``core/lua/slot`` are repeated here, for rows that wait in a database.
Nothing here needs a database or Redis.
"""

from __future__ import annotations

from collections.abc import Sequence

from django_rmq.core.model.body_codec import check_size
from django_rmq.core.model.bounds import MAX_PRIORITY
from django_rmq.core.model.envelope import envelope_of
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.placement import Outgoing
from django_rmq.exceptions import InvalidMessage
from django_rmq.outbox.rows import StoredRow

_REMOVALS = ("remove", "cancel")


def merge_rows(rows: Sequence[StoredRow], *, max_wait_ms: int = 0, keeps: bool = False) -> list[StoredRow]:
    """Return the rows to send in place of all ``rows`` of one message: a removal, a send, or both in this order.

    They have the effect that all rows would have one after the other. A removal ends everything before it, and a
    cancelled message stays cancelled. Of sends, the last one counts, but a range_merge message keeps the time of the
    first, and a fifo message keeps its place, and its body if its topic ``keeps`` it (ON_DUPLICATE). An ``ensure``
    after a send finds the message present.

    ``max_wait_ms``: that of a topic with DEBOUNCE, else 0. A range_merge message then has the time of its last send, but
    waits at most so long after its first. For sends that follow in Redis, MAX_WAIT runs from the send of the relay.
    """
    removal: StoredRow | None = None
    last: StoredRow | None = None
    first_ms = 0
    for row in rows:
        if row.act in _REMOVALS:
            # A removal after a cancel does not undo it: the listener of the running message must still be notified.
            cancels = removal is not None and removal.act == "cancel"
            removal, last = row._replace(act="cancel") if cancels else row, None
        elif last is None:
            last, first_ms = row, row.sent_ms
        elif row.act == "send" and keeps:
            # The message keeps its first body. A send queues a message that rests or is in flight, an ensure does
            # not.
            last = last._replace(act="send")
        elif row.act == "send":
            merges = row.type == TopicType.FIFO or (row.type == TopicType.RANGE_MERGE and not max_wait_ms)
            # If the topic had another type at the first row, the score of that row means something else.
            has_time = merges and row.type == last.type
            last = row._replace(sent_ms=last.sent_ms, score=last.score) if has_time else row
    if last is not None and max_wait_ms and last.type == TopicType.RANGE_MERGE:
        longest_ms = first_ms + max_wait_ms - last.sent_ms
        last = last._replace(score=max(0, min(last.score, longest_ms)))
    return [row for row in (removal, last) if row is not None]


def outgoing(row: StoredRow, topic: Topic, now_ms: int) -> Outgoing:
    """Return the message of a row, not yet placed, as its sender would have sent it.

    A message that waits for a time from its send is due when it would have been, and at once if that time has passed.
    Raises ``InvalidMessage`` if ``topic`` no longer takes such messages.
    """
    _check(row, topic)
    score = row.score
    if topic.type in (TopicType.RANGE_MERGE, TopicType.FIFO) and row.act not in _REMOVALS:
        score = min(max(0, row.sent_ms + row.score - now_ms), row.score)
    return Outgoing(topic, 0, row.member, score, row.envelope, row.act, row.crc)


def envelope_in(row: StoredRow) -> bytes | None:
    """Return the envelope of a message, which a member of a fifo topic may hold, or None if it has none."""
    if row.type != TopicType.FIFO:
        return row.envelope
    return envelope_of(Topic(row.topic, TopicType.FIFO, identity="key"), row.member, row.envelope)


def _check(row: StoredRow, topic: Topic) -> None:
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
    check_size(topic, len(row.member if envelope is None else envelope.partition(b"\n")[2]))
    if topic.is_priority and not topic.min_priority <= row.score <= MAX_PRIORITY:
        raise InvalidMessage(f"priority must be from {topic.min_priority} to {MAX_PRIORITY}, got {row.score}")
