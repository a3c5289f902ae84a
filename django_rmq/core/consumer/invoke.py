"""Calls a listener for messages, one by one or in lists, in a thread or in the event loop, and determines their outcomes.

Which messages of a batch may begin, and when their outcomes are reported, is decided by ``batch_run``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from inspect import isasyncgen, isawaitable, isgenerator
from typing import Any

from django_rmq.core import forked_copies
from django_rmq.core.consumer import failures
from django_rmq.core.consumer.batch import (
    ListenerLike,
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
from django_rmq.exceptions import Cancelled, InvalidBody

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


def holds(failure: Failure | None) -> bool:
    """Return whether an outcome holds the slot of a strict fifo topic: the message failed, and is tried again."""
    return failure is not None and failure.kind not in ("rejected", "cancelled")


def in_line(group: Sequence[Message], outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcomes of a list in the order of the line, up to the first one that holds the slot.

    The messages behind it are given back without using a retry, even if the listener was called with them: no later
    message may succeed before that one. Such messages may have no outcome at all.
    """
    of = {id(message): (message, failure) for message, failure in outcomes}
    ended: list[Outcome] = []
    for message in group:
        if id(message) not in of:
            break
        ended.append(of[id(message)])
        if holds(ended[-1][1]):
            break
    return ended


def groups(messages: Sequence[Message], size: int) -> list[list[Message]]:
    """Split messages for a batch listener: retries alone, the others in lists of up to ``size``.

    Retries come last, but on fifo topics in their place.
    """
    if messages and messages[0].topic.is_fifo:  # rule: lists_retries_last
        return _groups_in_line(messages, size)
    together: list[list[Message]] = []
    fresh: list[Message] = []
    for message in messages:
        if _has_failed(message):
            together.append([message])
        else:
            fresh.append(message)
    return [fresh[at : at + size] for at in range(0, len(fresh), size)] + together


def _has_failed(message: Message) -> bool:
    # The envelope is read only if the message has fewer retries than its topic.
    left = message.retries_left
    return left < message.topic.max_retries and left < message.max_retries


def _groups_in_line(messages: Sequence[Message], size: int) -> list[list[Message]]:
    groups: list[list[Message]] = []
    has_room = False
    for message in messages:
        is_fresh = not _has_failed(message)
        if is_fresh and has_room and len(groups[-1]) < size:
            groups[-1].append(message)
        else:
            groups.append([message])
        has_room = is_fresh
    return groups


def run(listener: ListenerLike, messages: Sequence[Message]) -> list[Failure | None]:
    """Call ``listener`` for ``messages``; return None (commit) or a ``Failure`` for each, in order.

    On a strict fifo topic the outcomes end with the first message that holds the slot.
    """
    outcomes: dict[int, Failure | None] = {}
    size = listener.batch_size
    lists = deque(groups(messages, size) if size else [[message] for message in messages])
    while lists:
        group = lists.popleft()
        ended = (
            call_group(listener.function, group)
            if size
            else [(group[0], outcome_of(group[0], call_one(listener.function, group[0], group[0])))]
        )
        if ended is None:
            lists.extendleft([message] for message in reversed(group))
            continue
        if group[0].topic.is_strict:
            ended = in_line(group, ended)
            if len(ended) < len(group) or holds(ended[-1][1]):
                lists.clear()
        outcomes.update((id(message), outcome) for message, outcome in ended)
    return [outcomes[id(message)] for message in messages if id(message) in outcomes]


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
