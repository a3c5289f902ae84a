"""Sends of an actor: the permission and the record around ``django_rmq.sending``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django_rmq.core.model.send_results import SendResult, SendResults
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError, TopicFull
from django_rmq.opaque_ids import sealed_id
from django_rmq.operations.actions import CANCEL
from django_rmq.operations.audit_trail import record
from django_rmq.operations.authorization import PERMISSION_OF, Permission, require_search
from django_rmq.operations.context import OperationContext
from django_rmq.sending import Send, cancel_message, ensure_message, send_message, send_messages


def send(context: OperationContext, name: str, body: object, **options: Any) -> SendResult:
    """Send one message at once; ``options`` are those of ``send_message``. Raises its errors."""
    context.declared(name, Permission.SEND)
    result = send_message(name, body, on_commit=False, **options)
    record(context.actor, "send", name, {result.status: 1}, sealed_id(name, result.slot, result.member))
    return result


def ensure(
    context: OperationContext, name: str, one: Send, *, message_id: str | None = None, entry: bool = True
) -> SendResult:
    """Send one message at once, unless it already waits, rests or runs (``present``).

    ``message_id``: that of an earlier send, in place of a key. ``entry``: whether the admin's history shows it. Raises
    the errors of ``ensure_message``, and with an id those of ``require_search``.
    """
    topic = context.declared(name, Permission.SEND)
    if message_id is not None:
        # The answer shows whether the message of the id has this body.
        require_search(context.actor, topic.name)
    result = ensure_message(name, one.body, id=message_id, on_commit=False, **one.options())
    sealed = sealed_id(name, result.slot, result.member)
    record(context.actor, "send", name, {result.status: 1}, sealed, entry=entry)
    return result


def send_many(
    context: OperationContext, name: str, bodies: Sequence[object], **options: Any
) -> dict[str, int]:
    """Send many messages at once; return the number of each status. Nothing is sent if one is invalid."""
    context.declared(name, Permission.SEND)
    results = send_messages(name, bodies, on_commit=False, **options)
    outcomes = dict(results.counts())
    record(context.actor, "send", name, outcomes)
    return outcomes


def send_each(context: OperationContext, name: str, sends: Sequence[Send]) -> SendResults:
    """Send messages with their own options at once, for a program; return the result of each.

    Like ``send_many``, but without a LogEntry. Raises ``TopicFull`` if all of them were refused.
    """
    context.declared(name, Permission.SEND)
    results = send_messages(name, list(sends), on_commit=False)
    outcomes = results.counts()
    record(context.actor, "send", name, dict(outcomes), entry=False)
    if 0 < outcomes["refused"] == len(results):
        raise TopicFull(
            f"topic {name} is full: the slot of this message has reached its share of MAX_BACKLOG"
        )
    return results


def cancel_sent(
    context: OperationContext,
    name: str,
    body: object = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
) -> str:
    """Cancel the message with this body or key; return an outcome of ``cancel``.

    Raises ``InvalidMessage``, and the errors of ``require_search``.
    """
    require_search(context.actor, context.declared(name, PERMISSION_OF["cancel"]).name)
    word = cancel_message(name, body, key=key, slot_basis=slot_basis, on_commit=False)
    outcome = CANCEL.outcomes.get(word, str(word))
    record(context.actor, "cancel", name, {outcome: 1})
    return outcome


def body_schema(topic: Topic) -> dict[str, Any] | None:
    """Return the JSON schema of what may be sent to ``topic``.

    Return None if the topic takes any body, or its type has no schema, or cannot be used. A system check reports an
    unusable type, and everything else about the topic is shown all the same.
    """
    try:
        return None if topic.typed is None else topic.typed.schema()
    except ConfigurationError:
        return None
