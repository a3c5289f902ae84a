"""Taking messages back: waiting messages are removed, and the listeners of running ones can be notified."""

from __future__ import annotations

from typing import Any, Literal
from zlib import crc32

from django_rmq import connections, outbox
from django_rmq.conf import get_config
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import Outgoing
from django_rmq.core.producer.repeated_removals import found_nothing
from django_rmq.exceptions import InvalidMessage
from django_rmq.message_ids import (
    ALL_ROUNDS,
    ID_IS_WHOLE,
    MessageIdentity,
    find_held,
    find_moved,
    identify_for_program,
)
from django_rmq.sending.coroutines import coroutine_of
from django_rmq.sending.deferred_results import RemoveResult
from django_rmq.sending.dispatch import commit_to_wait_for, observers
from django_rmq.sending.on_commit import defer_removal, rows_waiting, went_nowhere
from django_rmq.sending.send_failures import explained


def remove_message(
    topic: str,
    body: Any = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
    id: str | None = None,  # noqa: A002 - as results of sends name it
    on_commit: bool | None = None,
    using: str | None = None,
) -> RemoveResult:
    """Take a message back. It is named by its body, by its ``key`` on a keyed topic, or by its ``id``.

    ``id`` is that of a ``SendResult`` or ``Message``, or one that the log shows (``3~...``), which is searched at the
    call.

    Returns a word for the state in which the message was. ``waiting`` and ``resting``: it is removed.
    ``running``: it ends with the current delivery, and is not tried again. ``running_and_waiting``: both.
    ``not_found``: there was none; a dead message stays.

    Inside a transaction it returns ``pending``, and the message is removed at the commit, in order with what the
    transaction sends; ``status`` then says where it was. ``on_commit`` and ``using`` are those of ``send_message``.

    Raises ``InvalidMessage`` or ``UnknownTopic`` at the call; if it is done at once, also ``ServerTrouble``.
    """
    named = {"body": body, "key": key, "slot_basis": slot_basis, "id": id}
    return _take_back("remove", topic, named, on_commit, using)


def cancel_message(
    topic: str,
    body: Any = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
    id: str | None = None,  # noqa: A002 - as results of sends name it
    on_commit: bool | None = None,
    using: str | None = None,
) -> RemoveResult:
    """Take a message back like ``remove_message``, and notify its listener if it runs.

    ``message.cancelled`` becomes true, and ``asyncio.CancelledError`` is raised in an async listener. If it
    returns, the message is done; if it fails, it ends as cancelled and is not tried again.

    Returns the words of ``remove_message``, or ``claimed``: a Spark consumer has it, and cannot be notified. Only the
    delivery that runs now is cancelled, no later one.
    """
    named = {"body": body, "key": key, "slot_basis": slot_basis, "id": id}
    return _take_back("cancel", topic, named, on_commit, using)


aremove_message = coroutine_of(remove_message)
acancel_message = coroutine_of(cancel_message)


def _take_back(
    act: Literal["remove", "cancel"],
    topic: str,
    named: dict[str, Any],
    on_commit: bool | None,
    using: str | None,
) -> RemoveResult:
    declared = get_config().topic(topic)
    producer = connections.get_producer()
    named_by_id, body = named.pop("id"), named.pop("body")
    identity: MessageIdentity | None = None
    if named_by_id is None:
        out = producer.outgoing(declared, body, 0, **named)
    elif body is not None or any(value is not None for value in named.values()):
        raise InvalidMessage(ID_IS_WHOLE)
    else:
        identity = identify_for_program(connections.present(declared), named_by_id)
        found = _outgoing_of_id(connections.present(declared), identity)
        if found is None:
            return RemoveResult("not_found", topic, b"")
        out = found
    out = out._replace(act=act)
    connection = commit_to_wait_for(on_commit, using)
    delivers = all(observer.delivers for observer in observers)
    if connection is not None:
        return defer_removal(producer if delivers else None, declared, out, connection)
    if not delivers:
        return RemoveResult(went_nowhere(out).status, topic, out.member)
    connections.agree(declared)
    connections.present(declared)
    kept = outbox.DirectSend(declared, [out], using, rows_waiting(using))
    (found_at,), errors = producer.attempt([out], removes=True)
    if found_nothing(found_at) and identity is not None:
        # The message is not where its member places it. It may have a basis of its own, and have been moved.
        moved = find_moved(connections.get_broker(), declared, [identity], rounds=ALL_ROUNDS).messages
        if identity in moved:
            out = _outgoing_at(connections.present(declared), moved[identity])._replace(act=act)
            (found_at,), errors = producer.attempt([out], removes=True)
    kept.conclude([found_at])
    for error in errors.values():
        raise explained(declared, error)
    return RemoveResult(found_at.status, topic, out.member)


def _outgoing_of_id(topic: Topic, identity: MessageIdentity) -> Outgoing | None:
    """Return what takes the message with this id back. None: a sealed id of a message that is not there."""
    at: MessageIdentity | None = identity
    if identity.member is None or not _is_placed_by_member(topic, identity):
        # The id does not contain the basis that has placed the message, and a re-slotting may have moved it.
        at = find_held(connections.get_broker(), topic, identity)
        if at is None and identity.member is not None:
            # A message that only its transaction knows yet will be in the slot of its id.
            at = identity
    return None if at is None else _outgoing_at(topic, at)


def _outgoing_at(topic: Topic, at: MessageIdentity) -> Outgoing:
    """Return what takes a message back that is in a known slot."""
    member = at.member or b""
    crc = crc32(member) if _is_placed_by_member(topic, at) else at.slot
    return Outgoing(topic, at.slot, member, 0, crc=crc).placed(topic)


def _is_placed_by_member(topic: Topic, at: MessageIdentity) -> bool:
    return crc32(at.member or b"") & (topic.slots - 1) == at.slot


__all__ = ["acancel_message", "aremove_message", "cancel_message", "remove_message"]
