"""One message with all its copies and its status, also after its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from django_rmq.core.calls import looking
from django_rmq.core.words.status import MessageStatus, read
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import OperationRefused
from django_rmq.operations.actors import Permission
from django_rmq.operations.copies import Copy, from_look
from django_rmq.operations.desk import Desk
from django_rmq.operations.reading import find, gone, identified, not_found
from django_rmq.operations.redaction import as_shown, is_withheld
from django_rmq.operations.wait_reasons import Hold, holds_of
from django_rmq.project import tracking
from django_rmq.project.ids import Identity


class Followed(NamedTuple):
    """A message: its copies, and what is known about it."""

    copies: list[Copy]
    """Waiting, in flight, resting, claimed or dead, in this order. Empty: it has ended."""
    status: MessageStatus
    held_by: list[Hold]
    """What keeps it from being delivered now, the worst first. Empty: nothing does, or it does not wait."""


def follow(desk: Desk, name: str, message_id: str) -> Followed:
    """Return all copies of a message, and its status. Their id is the one that was given.

    Raises the errors of ``get``; ``MessageGone`` only if nothing is known about the message.
    """
    desk.actor.require(Permission.VIEW)
    topic = desk.present(name)
    identity = identified(desk, topic, message_id)
    found = find(desk, topic, [identity])
    member = found.members.get(identity)
    hidden = not desk.actor.may(Permission.VIEW_BODIES)
    copies, status = _asked(desk, topic, identity, member, hidden=hidden)
    if not copies and (status is None or status.state == "unknown"):
        raise OperationRefused(not_found(message_id)) if identity in found.unseen else gone(topic, message_id)
    assert status is not None
    copies, status = [replace(copy, id=message_id) for copy in copies], replace(status, id=message_id)
    if hidden or is_withheld(desk.actor, topic):
        # A listener may quote the body.
        status = replace(status, progress_text="")
    held_by: list[Hold] = []
    if member is not None and status.state in ("waiting", "retry"):
        held_by = holds_of(desk, topic, identity.slot, member)
    return Followed(as_shown(desk.actor, topic, copies), status, held_by)


def _asked(
    desk: Desk, topic: Topic, identity: Identity, member: bytes | None, *, hidden: bool
) -> tuple[list[Copy], MessageStatus | None]:
    """Return the copies and the status of a message in one round trip. Without its member: how it ended, by its digest."""
    slot, pipeline = identity.slot, desk.broker.pipeline()
    if member is None:
        if not (identity.digest and topic.keep_done_ms):
            return [], None
        ended = desk.broker.run(looking.status(topic, slot, None, identity.digest))
        return [], read(topic, slot, b"", ended)
    asked = pipeline.add(looking.status(topic, slot, member))
    looks = pipeline.add(looking.look(topic, slot, [member]))
    pipeline.execute()
    (looked,) = looks.get()
    copies = list(from_look(topic, slot, member, looked, hidden=hidden))
    return copies, read(topic, slot, member, asked.get())


def status(desk: Desk, name: str, body: Any = None, **named: Any) -> MessageStatus:
    """Return the status of a message that is named like for ``django_rmq.status``."""
    desk.actor.require(Permission.VIEW, Permission.VIEW_BODIES)
    return tracking.status(name, body, **named)


__all__ = ["Followed", "follow", "status"]
