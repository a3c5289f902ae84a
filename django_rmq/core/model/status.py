"""The status of one message: its state, its attempts, its progress and its end, from the answer of its slot.

Here are also the plain words for states beside the names of the queues that hold them. The records themselves are read in
``replies``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import floor, isfinite
from types import MappingProxyType
from typing import Literal, TypedDict, cast

from django_rmq.core.model.bounds import abbreviated
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.replies import (
    Death,
    FailureRecord,
    FoundReply,
    Outcome,
    Progress,
    error_class,
    parse,
    read_record,
)
from django_rmq.core.model.scores import LAST_INSTANT_MS, due_of, is_retry
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest

MessageState = Literal[
    "waiting", "running", "running_and_waiting", "resting", "dead", "done", "removed", "cancelled", "unknown"
]
"""The state of a message; ``MessageStatus.state`` says what each means."""

ENDS: tuple[MessageState, ...] = ("dead", "done", "removed", "cancelled")
"""The states of messages that have ended."""

STATES: tuple[MessageState, ...] = ("waiting", "running", "running_and_waiting", "resting", *ENDS)
"""The states of messages of which something is known."""

QUEUES: Mapping[str, str] = MappingProxyType(
    {"waiting": "store", "running": "prepare", "resting": "retry", "dead": "dead", "claimed": "claim"}
)
"""The state of a copy of a message → the queue of its slot that holds it, by the name that the article gave it."""

STATE_OF: Mapping[str, str] = MappingProxyType({queue: state for state, queue in QUEUES.items()})
"""The same, the other way round."""


def queue_of(state: str) -> str:
    """Return the queue of a state; the name of a queue is taken, too. Raises ``InvalidRequest`` for another word."""
    queue = QUEUES.get(state, state)
    if queue not in STATE_OF:
        raise InvalidRequest(f"unknown state {abbreviated(state)}: it must be one of {', '.join(QUEUES)}")
    return queue


@dataclass(frozen=True, slots=True)
class MessageStatus:
    """The status of one message. All times are aware datetimes in UTC, or None if there is none or it is not known."""

    topic: str
    id: str = field(repr=False)
    """The message's id: its slot and its member. It contains what is stored."""
    state: MessageState
    """``waiting``, ``running``, ``running_and_waiting``, ``resting`` or ``dead``; on topics with OUTCOME_RETENTION
    also ``done``, ``removed`` and ``cancelled``. ``unknown``: it was never sent, or its end is not kept."""
    due: datetime | None = None
    """When it can be delivered next. Not known on priority topics, and for a retry that can be delivered at once."""
    priority: int | None = None
    """Its priority, if it waits on a priority topic and has not failed."""
    attempts: int = 0
    """How many deliveries there were since the message last ended, with the one that is in flight."""
    worker: str = ""
    """The worker that has the message, or had it when it ended; empty if there is none, or if it is unknown (claims, topics
    that are not SERIAL)."""
    delivered: datetime | None = None
    """When the delivery began that is in flight, or in which it ended."""
    ended: datetime | None = None
    """When it ended: ``done``, ``removed``, ``cancelled`` or ``dead``."""
    progress: float | None = None
    """The fraction from 0 to 1 that its listener reported (OUTCOME_RETENTION). 1 once it is done."""
    progress_text: str = ""
    """What the listener said about its progress."""
    progress_at: datetime | None = None
    """When the listener reported it."""
    reason: str = ""
    """Why it is dead: failed, timed_out, overran, undecodable, rejected, buried or lapsed."""
    error_class: str = ""
    """The class of its last error."""
    first_failed: datetime | None = None
    last_failed: datetime | None = None

    @property
    def took(self) -> float | None:
        """Seconds from its delivery to its end. In a batch this includes the wait for the messages before it."""
        if self.delivered is None or self.ended is None:
            return None
        return max(0.0, (self.ended - self.delivered).total_seconds())


def status_of(topic: Topic, slot: int, member: bytes, reply: FoundReply) -> MessageStatus:
    """Return the status of a message. A record that RMQ did not write counts as none."""
    name = message_id(slot, member)
    outcome = read_record(parse, reply.outcome)
    failure, death = read_record(FailureRecord.parse, reply.failure), read_record(Death.parse, reply.death)
    if reply.prepare is not None or reply.claim is not None:
        return _in_flight(topic, name, reply, failure, outcome)
    if reply.store is not None or reply.retry is not None:
        return MessageStatus(
            topic.name,
            name,
            "resting" if reply.store is None else "waiting",
            **_next(topic, reply),
            attempts=failure.times if failure else 0,
            **_failed(failure),
        )
    ended = outcome if isinstance(outcome, Outcome) else None
    if reply.dead is not None and (ended is None or ended.state == "dead" or ended.ended_ms < reply.dead):
        # The outcome may be that of another death: notes expire and are limited in number, the dead stay.
        same = ended if ended is not None and ended.ended_ms == reply.dead else None
        return MessageStatus(
            topic.name,
            name,
            "dead",
            attempts=same.attempts if same else death.times if death else 0,
            worker=_worker(topic, same),
            delivered=_instant(same.delivered_ms) if same else None,
            ended=_instant(reply.dead),
            reason=death.reason if death else "",
            **_failed(death),
        )
    if ended is None or ended.state == "dead":
        # A message that is no longer in Dead was deleted, or was replayed and ended by a Spark query, which leaves no outcome.
        return MessageStatus(topic.name, name, "unknown")
    return from_outcome(topic, name, ended)


def from_outcome(topic: Topic, name: str, ended: Outcome) -> MessageStatus:
    """Return the status of a message of which only the note of its end is left. ``name`` is its id."""
    return MessageStatus(
        topic.name,
        name,
        cast("MessageState", ended.state),
        attempts=ended.attempts,
        worker=_worker(topic, ended),
        delivered=_instant(ended.delivered_ms),
        ended=_instant(ended.ended_ms),
        progress=1.0 if ended.state == "done" else None,
        reason=ended.reason,
        error_class=ended.error_class,
    )


def _in_flight(
    topic: Topic,
    name: str,
    reply: FoundReply,
    failure: FailureRecord | None,
    outcome: Progress | Outcome | None,
) -> MessageStatus:
    receipt = (reply.in_flight or b"").partition(b" ")[0]
    number = int(receipt) if receipt.isdigit() else 0
    # Progress with another receipt was reported by an earlier delivery of the message.
    reported = outcome if isinstance(outcome, Progress) and outcome.receipt == number else None
    waits = reply.store is not None or reply.retry is not None
    return MessageStatus(
        topic.name,
        name,
        "running_and_waiting" if waits else "running",
        **(_next(topic, reply) if waits else {}),
        attempts=(failure.times if failure else 0) + 1,
        worker=reply.owner if topic.serial and reply.prepare is not None else "",
        # A receipt is the time of the delivery in us.
        delivered=_instant(number / 1000) if number else None,
        progress=reported.fraction if reported else None,
        progress_text=reported.text if reported else "",
        progress_at=_instant(reported.reported_ms) if reported else None,
        **_failed(failure),
    )


class _NextDelivery(TypedDict, total=False):
    due: datetime | None
    priority: int


class _LastFailure(TypedDict, total=False):
    error_class: str
    first_failed: datetime | None
    last_failed: datetime | None


def _next(topic: Topic, reply: FoundReply) -> _NextDelivery:
    """Return when the copy that waits or rests can be delivered, or its priority."""
    if reply.store is None:
        return {"due": _instant(reply.retry, whole=True)}
    if topic.is_priority:
        is_fresh = isfinite(reply.store) and not is_retry(topic, reply.store)
        return {"priority": int(reply.store)} if is_fresh else {}
    return {"due": due_of(topic, reply.store)}


def _worker(topic: Topic, ended: Outcome | None) -> str:
    # The slot notes only its last consumer. Without SERIAL several take from it, and another one may have had the
    # message.
    return ended.worker if ended is not None and topic.serial else ""


def _failed(record: FailureRecord | Death | None) -> _LastFailure:
    if record is None or not record.times:
        return {}
    return {
        "error_class": error_class(record.error.decode("utf-8", "replace")),
        "first_failed": _instant(record.first_ms),
        "last_failed": _instant(record.last_ms),
    }


def _instant(ms: float | None, *, whole: bool = False) -> datetime | None:
    """Return an instant, or None for a number that is not a time. ``whole``: the number is a score, whose fraction is no time."""
    if ms is None or not 0 < ms < LAST_INSTANT_MS:
        return None
    return datetime.fromtimestamp((floor(ms) if whole else ms) / 1000, UTC)
