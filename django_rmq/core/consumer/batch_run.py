"""One run of a batch: which of its messages may begin, the call of the listener, the outcomes, and when these are reported.

A thread (``executor_pool``) and the event loop (``async_executor``) run batches by the same rules. A listener is called for
messages one by one or in lists. What its error means for a message is decided by ``failures``. On strict fifo topics a message
that failed holds back those behind it (``holds``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from inspect import isasyncgen, isawaitable, isgenerator
from typing import Any, NamedTuple

from django_rmq.core import forked_copies
from django_rmq.core.clock import uptime
from django_rmq.core.consumer import failures
from django_rmq.core.consumer.batch import (
    Batch,
    BatchReport,
    ListenerLike,
    Outcome,
    PendingEnd,
    ReportQueue,
)
from django_rmq.core.consumer.failures import (
    Undecodable,
    Unfit,
    complete_failure,
    failure_of,
    name_of,
    text_of,
)
from django_rmq.core.consumer.shared_notes import BEGUN, DONE, BatchCells, ProgressCells, ThreadNotes
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


def refusal_of(message: Message) -> Cancelled | Undecodable | None:
    """Return the error of a message that its listener must not get, or None."""
    # The message was cancelled after its delivery, for example while it waited for its turn in the event loop.
    if message.stopped:  # rule: begins_what_was_cancelled
        return Cancelled()
    try:
        message.body  # noqa: B018 - decoded here, so that an undecodable body has a kind of its own
    except InvalidBody as error:
        return Unfit(f"{name_of(error)}: {text_of(error)}")
    except BaseException as error:  # noqa: BLE001 - whatever a decoder, a type or UPCAST raises
        return Undecodable(f"body is not {message.topic.body}: {text_of(error)}")
    return None


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
        if (refusal := refusal_of(message)) is not None:
            return failure_of(message, refusal)
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
        self._refused: list[tuple[Message, Cancelled | Undecodable]] = []
        for message in messages:
            refusal = refusal_of(message)
            if refusal is None:
                self.readable.append(message)
                continue
            self._refused.append((message, refusal))
            # An undecodable message that is tried again holds the slot of a strict fifo topic. The messages
            # behind it are not called before it has ended.
            if message.topic.is_strict and not isinstance(refusal, (Cancelled, Unfit)):
                break

    def rest(self) -> list[Outcome]:
        """Return the outcomes of the messages that the listener does not get."""
        return [(message, failure_of(message, error)) for message, error in self._refused]

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
        if (refusal := refusal_of(message)) is not None:
            return failure_of(message, refusal)
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


FLUSH_SECONDS = 0.1
"""Seconds that results of a running batch may wait before they are reported."""

PATIENCE_SECONDS = 0.2
"""Seconds for which an executor keeps the rest of a batch when something better may turn up: a higher priority,
or another executor that is free."""


ProgressStates = bytearray | memoryview | BatchCells
"""The bytes in which an executor records which messages of a batch are begun and done, one for each message."""


class BatchResults:
    """The outcomes of a running batch that its executor has not reported yet."""

    __slots__ = ("batch", "begun", "committed", "failures", "times")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.clear()

    def clear(self) -> None:
        """Start over after a report."""
        self.committed: list[bytes] = []
        self.failures: list[Failure] = []
        self.times: list[float] = []
        """Seconds that each call of the listener took."""
        self.begun = time.monotonic()

    def add(self, outcomes: list[Outcome]) -> bool:
        """Add the outcomes of the messages of one call; return whether any has failed."""
        has_failed = False
        for message, failure in outcomes:
            if failure is None:
                self.committed.append(message.delivery.member)
            else:
                self.failures.append(failure)
                has_failed = True
        return has_failed

    def slice(self, rest: list[Message] | None) -> BatchReport:
        """Return the report. ``rest`` are the messages that will not begin; None if the batch continues."""
        released = [message.delivery.member for message in rest or ()]
        seconds = time.monotonic() - self.begun
        return BatchReport(
            self.batch, self.committed, self.failures, released, seconds, rest is not None, self.times
        )


class BatchRun:
    """One run of a batch: which of its messages may begin, and what becomes of their outcomes.

    The executor makes the calls that it is asked for: a thread calls the listener, the event loop awaits it. Results wait
    for up to ``flush_seconds`` until they are reported to ``mailbox``. ``after_failure`` is called after each call that
    has failed.
    """

    # Single calls and lists have a loop each: with one for both, a drain of single messages took 30 % more CPU.

    def __init__(
        self,
        batch: Batch,
        notes: ThreadNotes | ProgressCells | None,
        mailbox: ReportQueue,
        flush_seconds: float,
        after_failure: Callable[[], None] = lambda: None,
    ) -> None:
        if batch.listener.batch_size:
            self._lists = deque(groups(batch.messages, batch.listener.batch_size))
            batch.messages = [message for group in self._lists for message in group]
        self._batch = batch
        members = [message.delivery.member for message in batch.messages]
        self.states: ProgressStates = bytearray(len(members))
        if notes is not None:
            self.states = notes.take(batch.topic.name, batch.slot.number, batch.receipt, members)
        self._mailbox = mailbox
        self._flush_seconds = flush_seconds
        self._after_failure = after_failure
        self._results = BatchResults(batch)
        self._pending: list[tuple[int, Message, PendingEnd]] = []
        """The messages whose end is pending, with their positions."""

    def single_calls(self) -> Generator[Message | None, CallEnd, None]:
        """Yield each message with which the listener is to be called, and take how the call has ended.

        None instead of a message says that the batch has ended, and all of it is reported.
        """
        batch, states, results, may_begin = self._batch, self.states, self._results, self._begin_check()
        at, now = 0, uptime()
        for message in batch.messages:
            if not may_begin(at, at + 1, now):
                break
            if batch.stale and message.delivery.member in batch.stale:
                at += 1
                continue
            # The state is recorded before the call, because the listener may kill the process.
            states[at] = BEGUN
            batch.call_began_at = now
            failure = yield message
            # The end of one call is the beginning of the next, so one reading of the clock serves both.
            began, now = now, uptime()
            results.times.append(now - began)
            batch.call_began_at = None
            if failure is None:
                results.committed.append(message.delivery.member)
                # If the process dies before this commit reaches Redis, the parent commits the message.
                states[at] = DONE
                at += 1
                continue
            if isinstance(failure, PendingEnd):
                self._pending.append((at, message, failure))
                at += 1
                continue
            results.failures.append(failure)
            self._after_failure()
            at += 1
            if batch.topic.is_strict and holds(failure):  # rule: goes_on_behind_a_failure
                break
        self._report(batch.messages[at:])
        yield None

    def list_calls(self) -> Generator[list[Message], list[Outcome] | None, None]:
        """Yield each list with which a batch listener is to be called, and take the outcomes of its messages.

        The outcomes are None if the list failed as a whole; then its messages are called one by one. An empty list says
        that the batch has ended, and all of it is reported.
        """
        batch, lists, states, results = self._batch, self._lists, self.states, self._results
        may_begin, at, now = self._begin_check(), 0, uptime()
        while lists:
            group = lists.popleft()
            end = at + len(group)
            if not may_begin(at, end, now):
                break
            batch.group = ours = [message for message in group if message.delivery.member not in batch.stale]
            if not ours:
                at = end
                continue
            for position in range(at, end):
                states[position] = BEGUN
            batch.call_began_at = now
            outcomes = yield ours
            began, now = now, uptime()
            results.times.append(now - began)
            batch.call_began_at = None
            if outcomes is None:
                self._after_failure()
                for message in group:
                    # Each has the time of a call of its own.
                    # rule: ends_a_list_that_ran_too_long_as_a_whole
                    message.stopped = "" if message.stopped == "overran" else message.stopped
                lists.extendleft([message] for message in reversed(group))
                continue
            if batch.topic.is_strict:  # rule: commits_behind_a_failure
                outcomes = in_line(ours, outcomes)
                end -= len(ours) - len(outcomes)
                if len(outcomes) < len(ours) or holds(outcomes[-1][1]):
                    lists.clear()
            if results.add(outcomes):
                self._after_failure()
            done = {id(message) for message, failure in outcomes if failure is None}
            for position, message in zip(range(at, end), group, strict=False):
                if id(message) in done:
                    states[position] = DONE
            at = end
        self._report(batch.messages[at:])
        yield []

    def _begin_check(self) -> Callable[[int, int, float], bool]:
        """Return the function that records that the messages from ``at`` to ``end`` begin, and returns whether they may.

        It is a closure, because it is called once per message.
        """
        batch, half, is_strict = self._batch, self._batch.timeout / 2, self._batch.topic.is_strict
        flush_seconds, flushed = self._flush_seconds, uptime()
        waits_for_better = batch.topic.is_priority or not batch.topic.serial
        patience = flushed + PATIENCE_SECONDS if waits_for_better else float("inf")

        def may_begin(at: int, end: int, now: float) -> bool:
            nonlocal flushed
            # Messages of a list that failed have begun: they are settled one by one, however long that takes.
            # Otherwise the good messages would run in another list with the bad one.
            is_again = at < batch.begun
            if not is_again:
                # ``begun`` is written before ``halted`` is read, and the dispatcher does the reverse. So no message is both
                # given back and begun.
                batch.begun = end
            # If the process was paused, the loop blocked or Redis unavailable, the time-out is soon over, and another worker
            # may get the message.
            # rule: begins_without_half_a_time_out_left
            if now > batch.confirmed + half or batch.abandoned:
                return False
            # A message timed out or was given back. It comes again before those behind it, so none of these may begin.
            if is_strict and batch.stale:  # rule: goes_on_behind_what_it_lost
                return False
            # rule: lists_lose_patience
            # rule: begins_after_the_stop
            is_over = batch.dropped if is_again else batch.halted or (now > patience and at > 0)
            if is_over:
                return False
            if now - flushed > flush_seconds and at > batch.reported:
                # Slow work is committed as it goes.
                self._report(None)
                batch.reported, flushed = at, now
            return True

        return may_begin

    def _report(self, rest: list[Message] | None) -> None:
        """Report to the dispatcher. ``rest`` are the messages that will not begin; None if the batch continues."""
        if self._pending:
            self._await_ends()
        batch, committed = self._batch, self._results.committed
        self._mailbox.put(self._results.slice(rest))
        self._results.clear()
        failures.log_done(batch.topic, batch.slot.number, committed)

    def _await_ends(self) -> None:
        """Wait for the ends that are pending, because only then the messages may be acknowledged."""
        for at, message, end in self._pending:
            failure = outcome_of(message, end)
            if failure is None:
                self._results.committed.append(message.delivery.member)
                self.states[at] = DONE
            else:
                self._results.failures.append(failure)
                self._after_failure()
        self._pending.clear()


def report_failed_run(batch: Batch, mailbox: ReportQueue) -> None:
    """Report that a batch failed outside its listener.

    At least one message counts as begun, so that one that fails again and again uses its retries in the end.
    """
    rest = [message.delivery.member for message in batch.messages[max(1, batch.begun) :]]
    mailbox.put(BatchReport(batch, [], [], rest, 0.0, True))


def holds(failure: Failure | None) -> bool:
    """Return whether an outcome holds back the later messages of its batch, on a strict fifo topic: the message failed.

    Redis decides whether it is tried again or dies. If it dies, the later ones are delivered again at once. From one delivery to
    the next, the slot is held by ``lua/slot/_strict_order.lua``.
    """
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


def call_all(listener: ListenerLike, messages: Sequence[Message]) -> list[Failure | None]:
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
