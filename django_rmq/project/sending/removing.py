"""Taking messages back: waiting messages are removed, and the listeners of running ones can be notified."""

from __future__ import annotations

from typing import Any, Literal

from asgiref.sync import sync_to_async

from django_rmq.project import connections, outbox
from django_rmq.project.sending.commit import defer_removal, went_nowhere
from django_rmq.project.sending.dispatching import commit_to_wait_for, observers
from django_rmq.project.sending.failures import explained
from django_rmq.project.sending.results import RemoveResult
from django_rmq.project.settings import get_config


def remove_message(
    topic: str,
    body: Any = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
    on_commit: bool | None = None,
    using: str | None = None,
) -> RemoveResult:
    """Take a message back. It is named by its body, or by its ``key`` on a keyed topic.

    Returns a word for the state in which the message was. ``waiting`` and ``retry``: it is removed.
    ``in_flight``: it ends with the current delivery, and is not tried again. ``in_flight_and_waiting``: both.
    ``not_found``: there was none; a dead message stays.

    Inside a transaction it returns ``pending``, and the message is removed at the commit, in order with what
    the transaction sends; the ``status`` of the result then says where it was. ``on_commit`` and ``using``
    are those of ``send_message``.

    Raises ``InvalidMessage`` or ``UnknownTopic``, always at the call. A removal that is done at once also
    raises ``ServerTrouble``. A failure after a commit is logged and sent as the signal ``remove_failed``, and
    the result's ``status`` is ``failed``.
    """
    return _take_back("remove", topic, body, key, slot_basis, on_commit, using)


def cancel_message(
    topic: str,
    body: Any = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
    on_commit: bool | None = None,
    using: str | None = None,
) -> RemoveResult:
    """Take a message back like ``remove_message``, and notify its listener if it runs.

    ``message.cancelled`` becomes true, and ``asyncio.CancelledError`` is raised in an async listener. If it
    returns, the message is done; if it fails, it ends as cancelled and is not tried again.

    Returns the words of ``remove_message``, where ``in_flight`` means that the worker is notified. ``claimed``: a
    Spark consumer has it, and cannot be notified. Only the delivery that runs now is cancelled, no later one.
    """
    return _take_back("cancel", topic, body, key, slot_basis, on_commit, using)


async def aremove_message(topic: str, body: Any = None, **options: Any) -> RemoveResult:
    """Remove like ``remove_message``, from a coroutine."""
    return await sync_to_async(remove_message)(topic, body, **options)


async def acancel_message(topic: str, body: Any = None, **options: Any) -> RemoveResult:
    """Cancel like ``cancel_message``, from a coroutine."""
    return await sync_to_async(cancel_message)(topic, body, **options)


def _take_back(
    act: Literal["remove", "cancel"],
    topic: str,
    body: Any,
    key: str | None,
    slot_basis: object,
    on_commit: bool | None,
    using: str | None,
) -> RemoveResult:
    declared = get_config().topic(topic)
    producer = connections.get_producer()
    out = producer.outgoing(declared, body, 0, key=key, slot_basis=slot_basis)._replace(act=act)
    connection = commit_to_wait_for(on_commit, using)
    delivers = all(observer.delivers for observer in observers)
    if connection is not None:
        return defer_removal(producer if delivers else None, declared, out, connection)
    if not delivers:
        return RemoveResult(went_nowhere(out).status, topic, out.member)
    connections.agree(declared)
    connections.present(declared)
    kept = outbox.Direct(declared, [out], using)
    (found,), errors = producer.attempt([out], removes=True)
    kept.conclude([found])
    for error in errors.values():
        raise explained(declared, error)
    return RemoveResult(found.status, topic, out.member)


__all__ = ["acancel_message", "aremove_message", "cancel_message", "remove_message"]
