"""One message: its copies, its status, also after its end, and its holds, which keep it from being delivered now.

``message_ids`` finds the message of an id. Holds are read from its slot, the workers and the limits at one instant. Nothing is
changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from django.utils.translation import gettext as _

from django_rmq import message_tracking
from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.changed_limits import limited
from django_rmq.core.model.replies import Counts, DescribeReply, Entry
from django_rmq.core.model.scores import LAST_INSTANT_MS, is_retry
from django_rmq.core.model.send_results import SendResult
from django_rmq.core.model.status import MessageStatus, status_of
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import MessageGone, NotPermitted, OperationRefused
from django_rmq.message_ids import LocatedMessage, MessageIdentity, Whereabouts, id_of, sealed_id
from django_rmq.operations.authorization import (
    OperationContext,
    Permission,
    identified,
    require_search,
    search_rounds,
    sees_content,
    sees_formatted,
    sees_stored,
)
from django_rmq.operations.message_view import MessageCopy, as_shown, from_reply
from django_rmq.operations.stats import WorkerList, roster_call, survey_topics, worker_list
from django_rmq.operations.topics import changed_limits


def get(context: OperationContext, name: str, message_id: str) -> list[MessageCopy]:
    """Return all copies of a message: waiting, in flight, resting, claimed or dead, in this order.

    Their id is the one that was given. Raises ``MessageGone`` if there is none, ``OperationRefused`` if it
    was not found although it may be there, and ``InvalidRequest`` for text that is not an id.
    """
    return copies_of(context, context.permitted(name, Permission.VIEW), message_id)


def body(context: OperationContext, name: str, message_id: str, state: str) -> bytes:
    """Return a body as it is stored: that of the copy in ``state``, or of the first one. Raises the errors of ``get``."""
    if sees_formatted(context.actor, context.declared(name, Permission.VIEW, Permission.VIEW_BODIES).name):
        raise NotPermitted(f"the bodies of topic {name} are redacted")
    copies = get(context, name, message_id)
    wanted = [copy for copy in copies if state in (copy.state, copy.queue)] or copies
    return wanted[0].raw or b""


def copies_of(context: OperationContext, topic: Topic, message_id: str) -> list[MessageCopy]:
    """Return the same as ``get``, whatever the actor may see."""
    at, reply = locate_message(context, topic, message_id)
    if at is None or reply is None:
        raise _gone(topic, message_id)
    hidden = not sees_content(context.actor, topic.name)
    copies = list(from_reply(topic, at.slot, at.member, reply, message_id, hidden=hidden))
    return as_shown(context.actor, topic, copies)


def locate_message(
    context: OperationContext, topic: Topic, message_id: str
) -> tuple[LocatedMessage | None, DescribeReply | None]:
    """Return the slot and the member of an id, as far as they are known, and the slot's description of it, or None.

    Raises ``OperationRefused`` if the message was not found, although it may be there.
    """
    at: LocatedMessage | None = None
    places = _whereabouts(context, topic, identified(context, topic, message_id))
    for at in places:
        (reply,) = context.broker.run(inspect.describe_messages(topic, at.slot, [at.member]))
        if reply.is_held:
            return at, reply
    _require_seen(places, message_id)
    return at, None


def _gone(topic: Topic, message_id: str) -> MessageGone:
    """Return the error for a message that no slot holds."""
    return MessageGone(
        f"topic {topic.name} does not hold the message {message_id[:80]}. It may have been processed or deleted"
    )


def sent_id(context: OperationContext, result: SendResult) -> str:
    """Return the id of a message that the actor has sent, in a form that ``get`` and the operations accept from it."""
    topic = context.declared(result.topic, Permission.SEND)
    sealed = not sees_stored(context.actor, topic.name)
    return id_of(topic, result.slot, result.member, "store", result.score, sealed=sealed)


def _whereabouts(context: OperationContext, topic: Topic, identity: MessageIdentity) -> Whereabouts:
    """Return the places where the message of an id may be."""
    return Whereabouts(context.broker, topic, identity, rounds=search_rounds(context))


def _require_seen(places: Whereabouts, message_id: str) -> None:
    """Raise ``OperationRefused`` if a message that was not found may be where nothing was searched."""
    if places.is_unseen:
        raise OperationRefused(not_found(message_id))


def not_found(message_id: str) -> str:
    """Return the error for a message that was not found, although it may be there."""
    return _(
        "the message %(id)s was not found near its place, nor among the last of each state of its slot. "
        "It may have moved; load the list again"
    ) % {"id": message_id[:80]}


REASONS = (
    "paused",
    "no_worker",
    "slot_unowned",
    "behind_failed",
    "slot_busy",
    "claimed",
    "in_flight_limit",
    "behind",
    "rate",
    "not_due",
)
"""The reasons that can hold a message, the worst first."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Something that keeps a message from being delivered now."""

    reason: str
    """One of ``REASONS``."""
    since_ms: int | None = None
    """``slot_busy``: when the delivery began that has run longest. ``not_due``: when the message is due."""
    count: float | None = None
    """``slot_busy``, ``claimed``: the number of these messages. ``behind``: how many come first. ``rate``, ``in_flight_limit``:
    the limit."""
    message_id: str = ""
    """``behind``: the message that comes first. ``behind_failed``: the one that failed. ``slot_busy``: the one that runs."""


class Followed(NamedTuple):
    """A message: its copies, its status and its holds."""

    copies: list[MessageCopy]
    """The copies: waiting, in flight, resting, claimed or dead, in this order; empty if the message has ended."""
    status: MessageStatus
    held_by: list[Hold]
    """What keeps it from being delivered now, the worst first; empty if nothing does, or it does not wait."""


def follow(context: OperationContext, name: str, message_id: str) -> Followed:
    """Return all copies of a message, and its status. Their id is the one that was given.

    Raises the errors of ``get``; ``MessageGone`` only if nothing is known about the message.
    """
    topic = context.permitted(name, Permission.VIEW)
    hidden = not sees_content(context.actor, topic.name)
    identity = identified(context, topic, message_id)
    places = _whereabouts(context, topic, identity)
    held_by: list[Hold] = []
    copies: list[MessageCopy] = []
    status: MessageStatus | None = None
    for at in places:
        copies, status = _copies_and_status(context, topic, at.slot, at.member, message_id, hidden=hidden)
        if status.state in ("waiting", "resting"):
            seen = _see(context.broker, topic, at.slot, at.member)
            held_by = _sorted_holds(context, topic, at.slot, seen)
        if status.state != "unknown":
            break
    else:
        status = message_tracking.status_of_ended(context.broker, topic, identity, message_id)
    if status is None:
        _require_seen(places, message_id)
        raise _gone(topic, message_id)
    if not sees_stored(context.actor, topic.name):
        # The progress text is written by a listener, which may quote the body.
        status = replace(status, progress_text="")
    return Followed(as_shown(context.actor, topic, copies), status, held_by)


def _copies_and_status(
    context: OperationContext, topic: Topic, slot: int, member: bytes, name: str, *, hidden: bool
) -> tuple[list[MessageCopy], MessageStatus]:
    """Return the copies and the status of a message in one round trip, with ``name`` as its id."""
    pipeline = context.broker.pipeline()
    asked = pipeline.add(inspect.status(topic, slot, member))
    looks = pipeline.add(inspect.describe_messages(topic, slot, [member]))
    pipeline.execute()
    (reply,) = looks.get()
    copies = list(from_reply(topic, slot, member, reply, name, hidden=hidden))
    return copies, replace(status_of(topic, slot, member, asked.get()), id=name)


def status(context: OperationContext, name: str, body: object = None, **named: Any) -> MessageStatus:
    """Return the status of a message that is named like for ``django_rmq.message_status``."""
    require_search(context.actor, context.declared(name, Permission.VIEW).name)
    return message_tracking.message_status(name, body, **named)


class _Seen(NamedTuple):
    """The state of a message and its slot at one instant."""

    looked: DescribeReply
    counts: Counts
    live_workers: WorkerList
    running: Sequence[Entry]
    """Up to one message that is in flight."""
    failed: Sequence[Entry]
    """Up to one message in Retry."""
    now_ms: int


def holds(context: OperationContext, name: str, message_id: str) -> list[Hold]:
    """Return what keeps a message from being delivered now, the worst first; nothing for one that does not wait.

    Permissions and errors are those of ``get``, but a message that is not there has no holds.
    """
    topic = context.permitted(name, Permission.VIEW)
    places = _whereabouts(context, topic, identified(context, topic, message_id))
    for at in places:
        seen = _see(context.broker, topic, at.slot, at.member)
        if seen.looked.is_held:
            return _sorted_holds(context, topic, at.slot, seen)
    _require_seen(places, message_id)
    return []


def _sorted_holds(context: OperationContext, topic: Topic, slot: int, seen: _Seen) -> list[Hold]:
    if seen.looked.store is None and seen.looked.retry is None:
        return []
    holds = list(_holds(context, topic, slot, seen))
    return sorted(holds, key=lambda hold: REASONS.index(hold.reason))


def _see(broker: Broker, topic: Topic, slot: int, member: bytes) -> _Seen:
    pipeline = broker.pipeline()
    reply = pipeline.add(inspect.describe_messages(topic, slot, [member]))
    counts = pipeline.add(inspect.count(topic, slot))
    roster = pipeline.add(roster_call(broker))
    running = pipeline.add(inspect.list_messages(topic, slot, "prepare", limit=1))
    failed = pipeline.add(inspect.list_messages(topic, slot, "retry", limit=1))
    pipeline.execute()
    live_workers = worker_list(broker, roster.result())
    return _Seen(
        reply.get()[0],
        counts.get(),
        live_workers,
        running.get().entries,
        failed.get().entries,
        broker.now_ms(),
    )


def _holds(context: OperationContext, topic: Topic, slot: int, seen: _Seen) -> Iterator[Hold]:
    if seen.counts.paused:
        yield Hold("paused")
    # If the workers are unknown, none of them counts as missing.
    if topic.listener and not seen.live_workers.problem:
        if not seen.live_workers.serving(topic).workers:
            yield Hold("no_worker")
        elif topic.serial and seen.live_workers.span_of(topic, slot) is None:
            yield Hold("slot_unowned")
    due_ms = _due_ms(topic, seen.looked)
    if due_ms is not None and due_ms > seen.now_ms:
        # Until its time nothing in the slot delays the message. What another program has stored may have no time.
        yield Hold("not_due", since_ms=math.floor(due_ms) if due_ms < LAST_INSTANT_MS else None)
        return

    def named(state: str, entry: Entry) -> str:
        if context.actor.permits is None:
            # A shell shows the id that stands in the log.
            return sealed_id(topic.name, slot, entry.member)
        sealed = not sees_stored(context.actor, topic.name)
        return id_of(topic, slot, entry.member, state, entry.score, sealed=sealed)

    # The gate of a serial slot is shut while a message of it is in flight.
    if topic.serial and seen.running:
        receipt = (seen.running[0].record or b"").partition(b" ")[0]
        yield Hold(
            "slot_busy",
            # A receipt is the time of its delivery in microseconds.
            since_ms=int(receipt) // 1000 if receipt.isdigit() else None,
            count=seen.counts.prepare,
            message_id=named("prepare", seen.running[0]),
        )
    if topic.serial and seen.counts.claimed:
        yield Hold("claimed", count=seen.counts.claimed)
    # A strict slot delivers a message that failed before those behind it.
    if topic.is_strict and seen.failed and seen.looked.retry is None:
        yield Hold("behind_failed", message_id=named("retry", seen.failed[0]))
    if seen.looked.store is not None:
        yield from _behind(context.broker, topic, slot, seen.looked.store, named)
    topic = limited(topic, changed_limits(context.broker).get(topic.name))
    if topic.max_in_flight:
        (figures,) = survey_topics(context.broker, [topic]).topics
        if figures.prepare >= topic.max_in_flight:
            yield Hold("in_flight_limit", count=topic.max_in_flight)
    rate = 1_000_000 / topic.slot_each_us if topic.slot_each_us else topic.max_rate
    if rate:
        yield Hold("rate", count=rate)


def _behind(
    broker: Broker, topic: Topic, slot: int, score: float, named: Callable[[str, Entry], str]
) -> Iterator[Hold]:
    """Yield a hold if other messages of the slot are delivered before one with this score."""
    low, high = (math.nextafter(score, math.inf), math.inf), (-math.inf, math.nextafter(score, -math.inf))
    before = low if topic.is_priority else high
    pipeline = broker.pipeline()
    count = pipeline.add(inspect.count_between(topic, slot, "store", *before))
    first = pipeline.add(inspect.list_messages(topic, slot, "store", limit=1, descending=topic.is_priority))
    pipeline.execute()
    if count.get() and first.get().entries:
        yield Hold("behind", count=count.get(), message_id=named("store", first.get().entries[0]))


def _due_ms(topic: Topic, looked: DescribeReply) -> float | None:
    """Return when the message can be delivered next, or None if its turn depends on others only."""
    if looked.store is None:
        return looked.retry
    return None if topic.is_priority or is_retry(topic, looked.store) else looked.store
