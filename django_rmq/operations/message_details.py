"""One message with all its copies and its status, also after its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from django_rmq import message_tracking
from django_rmq.core.commands import inspect
from django_rmq.core.model.status import MessageStatus, read
from django_rmq.core.model.topic import Topic
from django_rmq.operations.authorization import Permission
from django_rmq.operations.context import OperationContext
from django_rmq.operations.message_view import MessageCopy, as_shown, from_look, is_withheld, require_search
from django_rmq.operations.messages import gone, identified, require_seen, whereabouts
from django_rmq.operations.wait_reasons import Hold, holds_of


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
    topic = context.present(name, Permission.VIEW)
    hidden = not context.actor.may(Permission.VIEW_BODIES)
    identity = identified(context, topic, message_id)
    places = whereabouts(context, topic, identity)
    held_by: list[Hold] = []
    copies: list[MessageCopy] = []
    status: MessageStatus | None = None
    for at in places:
        copies, status = _asked(context, topic, at.slot, at.member or b"", message_id, hidden=hidden)
        if status.state in ("waiting", "resting"):
            held_by = holds_of(context, topic, at.slot, at.member or b"")
        if status.state != "unknown":
            break
    else:
        status = message_tracking.status_of_ended(context.broker, topic, identity, message_id)
    if status is None:
        require_seen(places, message_id)
        raise gone(topic, message_id)
    if hidden or is_withheld(context.actor, topic):
        # The progress text is written by a listener, which may quote the body.
        status = replace(status, progress_text="")
    return Followed(as_shown(context.actor, topic, copies), status, held_by)


def _asked(
    context: OperationContext, topic: Topic, slot: int, member: bytes, name: str, *, hidden: bool
) -> tuple[list[MessageCopy], MessageStatus]:
    """Return the copies and the status of a message in one round trip, with ``name`` as its id."""
    pipeline = context.broker.pipeline()
    asked = pipeline.add(inspect.status(topic, slot, member))
    looks = pipeline.add(inspect.look(topic, slot, [member]))
    pipeline.execute()
    (looked,) = looks.get()
    copies = list(from_look(topic, slot, member, looked, name, hidden=hidden))
    return copies, replace(read(topic, slot, member, asked.get()), id=name)


def status(context: OperationContext, name: str, body: Any = None, **named: Any) -> MessageStatus:
    """Return the status of a message that is named like for ``django_rmq.message_status``."""
    require_search(context.actor, context.declared(name, Permission.VIEW))
    return message_tracking.message_status(name, body, **named)


__all__ = ["Followed", "follow", "status"]
