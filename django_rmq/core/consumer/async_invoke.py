"""Awaiting: what ``invoke`` does, for listeners that are coroutine functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from django_rmq.core.consumer import fork_guard
from django_rmq.core.consumer.batch import Outcome
from django_rmq.core.consumer.failures import failure_of, judged
from django_rmq.core.consumer.invoke import CallGroup, returned_from_one, undecodable
from django_rmq.core.model.failure_records import Failure
from django_rmq.core.model.message import Message
from django_rmq.exceptions import Cancelled

Coroutine = Callable[[Any], Awaitable[Any]]
"""A listener that is a coroutine function."""


async def await_one(function: Coroutine, message: Message, argument: Any) -> Failure | None:
    """Await a listener with ``argument``, which is ``message`` or a list that contains only it."""
    try:
        if message.stopped:  # rule: begins_what_was_cancelled
            raise Cancelled
        try:
            message.body  # noqa: B018 - decoded here, so that an undecodable body has a kind of its own
        except Exception as error:  # noqa: BLE001 - whatever a decoder raises
            raise undecodable(message, error) from None
        try:
            returned = await function(argument)
        finally:
            if fork_guard.forking is not None:
                fork_guard.end_copy()
        if returned is not None:
            return returned_from_one(message, returned)
    except BaseException as error:  # noqa: BLE001 - whatever a listener raises, and CancelledError
        return failure_of(message, error)
    return None if message.outcome is None else judged(message, message.outcome)


async def await_group(function: Coroutine, messages: list[Message]) -> list[Outcome] | None:
    """Await a batch listener. None: it failed as a whole, and it is unknown which message caused that."""
    if len(messages) == 1:
        return [(messages[0], await await_one(function, messages[0], list(messages)))]
    group = CallGroup(messages)
    if not group.readable:
        return group.rest()
    try:
        try:
            # A list of its own: the listener may change it.
            returned = await function(list(group.readable))
        finally:
            if fork_guard.forking is not None:
                fork_guard.end_copy()
        return group.returned(returned)
    except BaseException as error:  # noqa: BLE001 - whatever a listener raises, and CancelledError
        group.raised(error)
        return None


__all__ = ["Coroutine", "await_group", "await_one"]
