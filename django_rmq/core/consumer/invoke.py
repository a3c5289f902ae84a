"""Calls a listener for messages, one by one or in lists, in a thread or in the event loop, and determines their outcomes.

Which messages of a batch may begin, and when their outcomes are reported, is decided by ``batch_run``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from inspect import isasyncgen, isawaitable, isgenerator
from typing import Any, NamedTuple

from django_rmq.core import forked_copies
from django_rmq.core.consumer import failures
from django_rmq.core.consumer.batch import (
    Outcome,
    PendingEnd,
)
from django_rmq.core.consumer.failures import (
    Undecodable,
    Unfit,
    complete_failure,
    failure_of,
    name_of,
    text_of,
)
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import Cancelled, InvalidBody


class Hooks(NamedTuple):
    """Hooks around listeners; the Django layer closes database connections here."""

    before: Callable[[], None] = lambda: None
    """Called before a thread begins a batch."""
    after: Callable[[], None] = lambda: None
    """Called after a batch, and after each failure in it."""
    end: Callable[[], None] = lambda: None
    """Called when a thread ends."""
    around: Callable[[Topic, Callable[[Any], Any]], Callable[[Any], object]] = lambda topic, function: (
        function
    )
    """Called once per batch; returns the function that is called in the listener's place with its argument,
    and calls it."""
    overlapping: Callable[[Topic, Callable[[Any], Awaitable[Any]]], Callable[[Any], Awaitable[Any]]] = (
        lambda topic, function: function
    )
    """The same for a listener that is a coroutine function. The function that it returns is awaited in the event loop."""
    loop_end: Callable[[], None] = lambda: None
    """Called when the event loop has ended."""


NO_HOOKS = Hooks()

CallEnd = Failure | PendingEnd | None
"""How a call of a listener for one message has ended. None: the message is to be committed."""

HELD_BACK = Failure(b"", "held back")
"""The ``outcome`` of a message of a strict fifo topic that is given back, because one before it holds the slot."""


def check_returned(returned: object) -> None:
    """Raise ``TypeError`` for a coroutine or generator: it has not run yet, and a commit would lose the message."""
    if isawaitable(returned) or isgenerator(returned) or isasyncgen(returned):
        if hasattr(returned, "close"):
            returned.close()
        raise TypeError(
            f"the listener returned a {type(returned).__name__}, which is not run: it must do its work before it returns"
        )


def undecodable(message: Message, error: BaseException) -> Undecodable:
    """Return the error of a message whose body cannot be decoded, because of ``error``."""
    if isinstance(error, InvalidBody):
        return Unfit(f"{name_of(error)}: {text_of(error)}")
    return Undecodable(f"body is not {message.topic.body}: {text_of(error)}")


def returned_from_one(message: Message, returned: object) -> Failure | None:
    """Return the outcome of a message whose listener returned something other than None. May raise ``TypeError``."""
    if returned is False:
        return complete_failure(
            message, Failure(message.delivery.member, "failed", None, "the listener returned False")
        )
    check_returned(returned)
    return decided(message)


def decided(message: Message) -> Failure | None:
    """Return the failure that ``retry`` or ``reject`` has decided, or None."""
    return None if message.outcome is None else complete_failure(message, message.outcome)


def outcome_of(message: Message, end: CallEnd) -> Failure | None:
    """Return the failure of a message, or None. Waits for an end that is pending."""
    if not isinstance(end, PendingEnd):
        return end
    try:
        end.wait()  # rule: acknowledges_before_the_end_is_recorded
    except BaseException as error:  # noqa: BLE001 - the message has to end, whatever the error
        return failure_of(message, error)
    return None


def call_one(function: Callable[[Any], object], message: Message, argument: object) -> CallEnd:
    """Call a listener with ``argument``, which is ``message`` or a list that contains only it.

    SystemExit and KeyboardInterrupt are failures like any other: scripts and commands that a listener calls raise them.
    """
    try:
        # The message was cancelled after its delivery and before its call.
        if message.stopped:
            raise Cancelled
        try:
            message.body  # noqa: B018 - decoded here, so that an undecodable body has a kind of its own
        except Exception as error:  # noqa: BLE001 - whatever a decoder raises
            raise undecodable(message, error) from None
        try:
            returned = function(argument)
        finally:
            # If the listener has forked, the child returns here as well, and must not continue with the batch.
            if forked_copies.forking is not None:
                forked_copies.end_copy()
        if returned is not None:
            return returned if isinstance(returned, PendingEnd) else returned_from_one(message, returned)
    except BaseException as error:  # noqa: BLE001 - whatever a listener raises
        return failure_of(message, error)
    return None if message.outcome is None else complete_failure(message, message.outcome)


class CallGroup:
    """A list of messages that a batch listener is called with once."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.readable: list[Message] = []
        """The messages with which the listener is called."""
        self._unreadable: list[tuple[Message, BaseException]] = []
        for message in messages:
            # The message was cancelled before the call, so the listener does not get it.
            if message.stopped:
                self._unreadable.append((message, Cancelled()))
                continue
            try:
                message.body  # noqa: B018
                self.readable.append(message)
            except BaseException as error:  # noqa: BLE001 - whatever a decoder, a type or UPCAST raises
                self._unreadable.append((message, undecodable(message, error)))
                # An unreadable message that is tried again holds the slot of a strict fifo topic. The messages
                # behind it are not called before it has ended.
                if message.topic.is_strict and not isinstance(self._unreadable[-1][1], Unfit):
                    break

    def rest(self) -> list[Outcome]:
        """Return the outcomes of the messages that the listener does not get."""
        return [(message, failure_of(message, error)) for message, error in self._unreadable]

    def returned(self, returned: object) -> list[Outcome] | None:
        """Return the outcomes, or None if the list failed as a whole. May raise ``TypeError``."""
        if returned is False:
            self._failed("returned False")
            return None
        if returned is not None:
            check_returned(returned)
        ended = [message for message in self.readable if message.outcome is not HELD_BACK]
        return [(message, decided(message)) for message in ended] + self.rest()

    def raised(self, error: BaseException) -> None:
        """Record that the list failed as a whole."""
        self._failed(name_of(error))

    def _failed(self, why: str) -> None:
        failures.log_batch_failure(self.readable[0].topic, len(self.readable), why)
        for message in self.readable:
            # The listener may have called ``retry`` or ``reject`` before it failed. Each message gets its outcome in a call of
            # its own.
            message.outcome = None


def call_group(function: Callable[[Any], object], messages: list[Message]) -> list[Outcome] | None:
    """Call a batch listener. Return None if it failed as a whole, because it is unknown which message caused that."""
    if len(messages) == 1:
        return [(messages[0], outcome_of(messages[0], call_one(function, messages[0], list(messages))))]
    group = CallGroup(messages)
    if not group.readable:
        return group.rest()
    try:
        try:
            # A list of its own: the listener may change it.
            returned = function(list(group.readable))
        finally:
            # The child of a listener that has forked returns here as well.
            if forked_copies.forking is not None:
                forked_copies.end_copy()
        return group.returned(returned)
    except BaseException as error:  # noqa: BLE001 - whatever a listener raises
        group.raised(error)
        return None


Coroutine = Callable[[Any], Awaitable[Any]]
"""A listener that is a coroutine function."""


async def await_one(function: Coroutine, message: Message, argument: object) -> Failure | None:
    """Await a listener with ``argument``, which is ``message`` or a list that contains only it."""
    try:
        # The message was cancelled while it waited for its turn in the loop.
        if message.stopped:  # rule: begins_what_was_cancelled
            raise Cancelled
        try:
            message.body  # noqa: B018 - decoded here, so that an undecodable body has a kind of its own
        except Exception as error:  # noqa: BLE001 - whatever a decoder raises
            raise undecodable(message, error) from None
        try:
            returned = await function(argument)
        finally:
            # The child of a listener that has forked returns here as well.
            if forked_copies.forking is not None:
                forked_copies.end_copy()
        if returned is not None:
            return returned_from_one(message, returned)
    except BaseException as error:  # noqa: BLE001 - whatever a listener raises, and CancelledError
        return failure_of(message, error)
    return None if message.outcome is None else complete_failure(message, message.outcome)


async def await_group(function: Coroutine, messages: list[Message]) -> list[Outcome] | None:
    """Await a batch listener. Return None if it failed as a whole, because it is unknown which message caused that."""
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
            # The child of a listener that has forked returns here as well.
            if forked_copies.forking is not None:
                forked_copies.end_copy()
        return group.returned(returned)
    except BaseException as error:  # noqa: BLE001 - whatever a listener raises, and CancelledError
        group.raised(error)
        return None
