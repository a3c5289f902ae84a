"""Read-only operations on messages: lists, one message with all its copies, a body as it is stored."""

from __future__ import annotations

from dataclasses import replace

from django_rmq.core.commands import inspect
from django_rmq.core.model.limits import is_whole, shown
from django_rmq.core.model.replies import DescribeReply
from django_rmq.core.model.send_results import SendResult
from django_rmq.core.model.status import queue_of
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, MessageGone, NotPermitted, OperationRefused
from django_rmq.message_ids import (
    ALL_ROUNDS,
    ROUNDS,
    MessageIdentity,
    Whereabouts,
    id_of,
    identify,
)
from django_rmq.operations.actors import Permission
from django_rmq.operations.body_redaction import (
    as_shown,
    is_withheld,
    may_search,
    require_search,
)
from django_rmq.operations.context import OperationContext
from django_rmq.operations.cursors import Order
from django_rmq.operations.filters import Filter
from django_rmq.operations.message_list import (
    LONGEST_PAGE,
    Listing,
    Shown,
    first_page_order,
    read_page,
)
from django_rmq.operations.message_view import MessageCopy, from_look


def listing(
    desk: OperationContext,
    name: str,
    state: str,
    *,
    cursor: str = "",
    wanted: Filter | None = None,
    limit: int | None = None,
    descending: bool | None = None,
) -> Listing:
    """Return one page of the messages of a state. ``cursor``: the one returned with the previous page.

    By default, Dead begins with the last that died, Store with the message that is taken first. A page may be
    short, or even empty, and have a cursor if the entries examined held no more. Raises ``InvalidRequest``
    for a cursor of another list, and the errors of ``Filter.check``. An actor who may not see bodies gets
    copies without content, and cannot filter by text.
    """
    desk.actor.require(Permission.VIEW)
    topic, queue = desk.present(name), queue_of(state)
    wanted = checked(desk, topic, queue, wanted)
    limit = desk.config.admin.page_size if limit is None else limit
    if not (is_whole(limit) and 1 <= limit <= LONGEST_PAGE):
        raise InvalidRequest(
            f"the limit of a page must be from 1 to {LONGEST_PAGE} messages, got {shown(limit)}"
        )
    if descending is None:
        descending = first_page_order(topic, queue)
    order = Order(topic, queue, descending, wanted)
    broker, form = desk.broker, Shown(_hides(desk), not may_search(desk.actor, topic))
    found = read_page(broker, order, cursor=cursor, limit=limit, now_ms=broker.now_ms(), shown=form)
    return replace(found, copies=as_shown(desk.actor, topic, found.copies))


def checked(desk: OperationContext, topic: Topic, queue: str, wanted: Filter | None) -> Filter:
    """Return a filter of a queue that the actor may use. Raises the errors of ``Filter.check`` and ``require_search``."""
    wanted = wanted or Filter()
    wanted.check(topic, queue)
    if wanted.text:
        require_search(desk.actor, topic)
    return wanted


def get(desk: OperationContext, name: str, message_id: str) -> list[MessageCopy]:
    """Return all copies of a message: waiting, in flight, resting, claimed or dead, in this order.

    Their id is the one that was given. Raises ``MessageGone`` if there is none, ``OperationRefused`` if it
    was not found although it may be there, and ``InvalidRequest`` for text that is not an id.
    """
    desk.actor.require(Permission.VIEW)
    return copies_of(desk, desk.present(name), message_id)


def body(desk: OperationContext, name: str, message_id: str, state: str) -> bytes:
    """Return a body as it is stored: that of the copy in ``state``, or of the first one. Raises the errors of ``get``."""
    desk.actor.require(Permission.VIEW, Permission.VIEW_BODIES)
    if is_withheld(desk.actor, desk.config.topic(name)):
        raise NotPermitted(f"the bodies of topic {name} are redacted")
    copies = get(desk, name, message_id)
    wanted = [copy for copy in copies if state in (copy.state, copy.queue)] or copies
    return wanted[0].raw or b""


def copies_of(desk: OperationContext, topic: Topic, message_id: str) -> list[MessageCopy]:
    """Return the same as ``get``, whatever the actor may see."""
    at, looked = look_at(desk, topic, message_id)
    if at is None or looked is None:
        raise gone(topic, message_id)
    copies = list(from_look(topic, at.slot, at.member or b"", looked, message_id, hidden=_hides(desk)))
    return as_shown(desk.actor, topic, copies)


def look_at(
    desk: OperationContext, topic: Topic, message_id: str
) -> tuple[MessageIdentity | None, DescribeReply | None]:
    """Return the slot and the member of an id, as far as they are known, and what the slot has of it. None: nothing.

    Raises ``OperationRefused`` if the message was not found, although it may be there.
    """
    at: MessageIdentity | None = None
    places = whereabouts(desk, topic, identified(desk, topic, message_id))
    for at in places:
        (looked,) = desk.broker.run(inspect.look(topic, at.slot, [at.member or b""]))
        if looked.is_held:
            return at, looked
    require_seen(places, message_id)
    return at, None


def gone(topic: Topic, message_id: str) -> MessageGone:
    """Return the error for a message that is not there."""
    return MessageGone(
        f"topic {topic.name} does not hold the message {message_id[:80]}. It may have been processed or deleted"
    )


def sent_id(desk: OperationContext, result: SendResult) -> str:
    """Return the id of a message that the actor has sent, in a form that ``get`` and the operations accept from it."""
    desk.actor.require(Permission.SEND)
    topic = desk.config.topic(result.topic)
    sealed = not may_search(desk.actor, topic)
    return id_of(topic, result.slot, result.member, "store", result.score, sealed=sealed)


def identified(desk: OperationContext, topic: Topic, text: str) -> MessageIdentity:
    """Return the content of an id. For an actor who may not see what is stored, a plain id names nothing."""
    identity = identify(topic, text, desk.broker)
    if identity.member is not None and not may_search(desk.actor, topic):
        # Otherwise a guessed body could be made an id, and the answer would show whether the guess is right.
        return MessageIdentity(identity.slot, None)
    return identity


def rounds_of(desk: OperationContext) -> int:
    """Return how often a message is searched; for a command, until it is found."""
    return ALL_ROUNDS if desk.actor.permits is None else ROUNDS


def whereabouts(desk: OperationContext, topic: Topic, identity: MessageIdentity) -> Whereabouts:
    """Return where the message of an id may be."""
    return Whereabouts(desk.broker, topic, identity, rounds=rounds_of(desk))


def require_seen(places: Whereabouts, message_id: str) -> None:
    """Raise ``OperationRefused`` if a message, which was not found, may be where nothing was searched."""
    if places.is_unseen:
        raise OperationRefused(not_found(message_id))


def not_found(message_id: str) -> str:
    """Return the error for a message that was not found, although it may be there."""
    return (
        f"the message {message_id[:80]} was not found near its place, nor among the last of each state of "
        "its slot. It may have moved; load the list again"
    )


def _hides(desk: OperationContext) -> bool:
    return not desk.actor.may(Permission.VIEW_BODIES)
