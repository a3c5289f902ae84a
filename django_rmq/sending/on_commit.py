"""Sends and removals that wait for the commit of a database: those of a transaction run in one pipeline, in order.

``commit_to_wait_for`` decides whether a call waits. Each call that does registers one ``transaction.on_commit``
callback, and only that callback holds the call's messages. Django drops the callbacks of a transaction or savepoint that is
rolled back, and with them the messages: no body stays in memory.

The results that the callers have show a rollback, too (``core.model.send_results``).

After a commit the module reports the messages that were not sent or not removed: in the log, and by signal.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_rmq import connections, observability, outbox
from django_rmq.conf import get_config
from django_rmq.conf.settings_reader import Config
from django_rmq.core.log import LogThrottle, counted
from django_rmq.core.model.send_results import (
    OUTDATED,
    STORED,
    DeferredResult,
    Durability,
    RemoveResult,
    SendResult,
    SendStatus,
    too_full,
)
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import Outgoing
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import ConfigurationError, RmqError, ServerTrouble, SlotMoved
from django_rmq.observability import announcements
from django_rmq.outbox import StoredSend

logger = logging.getLogger("django_rmq.sending")
_repeated = LogThrottle(logger)

failed_sends: Counter[str] = Counter()
"""For each topic, how many messages of this process a commit did not send, and no outbox keeps: Redis was unavailable, a slot
was full, or the topic has other slots or another definition there.

The ledger in Redis cannot count them. Read it, do not write it.
"""
_counting = threading.Lock()


def commit_to_wait_for(on_commit: bool | None, using: str | None) -> BaseDatabaseWrapper | None:
    """Return the database connection whose commit a message waits for, or None if it is sent at once.

    Raises ``ConfigurationError`` if autocommit was switched off by hand and no block is open.
    """
    if on_commit is None:
        on_commit = get_config().on_commit
    if not on_commit:
        return None
    connection: BaseDatabaseWrapper = transaction.get_connection(using)
    if connection.in_atomic_block:
        return connection
    # Where autocommit was switched off by hand, Django sees no commit, and refuses ``on_commit`` callbacks.
    if connection.connection is not None and not connection.autocommit:
        raise ConfigurationError(
            f"autocommit is off on the database {connection.alias!r} and no atomic block is open, so Django calls "
            "nothing at the commit. Send within transaction.atomic(), or with on_commit=False"
        )
    return None


def report(topic: str, results: Sequence[DeferredResult | RemoveResult], error: RmqError) -> None:
    """Report that a commit did not do what ``results`` waited for: in the results, in the log and by signal."""
    for result in results:
        # A full slot has refused this message: its result keeps that status, and only the error is reported.
        if result.status != "refused":
            result.status = "failed"
    sends = [result for result in results if isinstance(result, DeferredResult)]
    removals = [result for result in results if isinstance(result, RemoveResult)]
    if sends:
        # Threads that commit at the same time add to the same counter, and ``+=`` is not atomic.
        with _counting:
            failed_sends[topic] += len(sends)
        _log("sent", error, extra={"rmq_event": "send_failed", "rmq_topic": topic, "rmq_count": len(sends)})
        announcements.send_failed(topic, sends, error)
    if removals:
        _log(
            "removed",
            error,
            extra={"rmq_event": "remove_failed", "rmq_topic": topic, "rmq_count": len(removals)},
        )
        announcements.remove_failed(topic, removals, error)


def report_waiting(topic: str, results: Sequence[DeferredResult | RemoveResult], error: RmqError) -> None:
    """Report that ``results`` wait in the outbox, from where the relay sends them."""
    for result in results:
        result.status = "in_outbox"
    if (left_out := _repeated.admit(("kept", topic, type(error)))) is not None:
        logger.warning(
            "%d message(s) of topic %s wait in the outbox, because they could not be sent after the database "
            "commit: %s%s",
            len(results),
            topic,
            error,
            counted(left_out, "such commits"),
            extra={"rmq_event": "in_outbox", "rmq_topic": topic, "rmq_count": len(results)},
        )


def _log(done: str, error: RmqError, *, extra: dict[str, object]) -> None:
    topic = extra["rmq_topic"]
    if (left_out := _repeated.admit((done, topic, type(error)))) is not None:
        logger.error(
            "%d message(s) of topic %s could not be %s after the database commit: %s%s",
            extra["rmq_count"],
            topic,
            done,
            error,
            counted(left_out, "such commits"),
            exc_info=None if left_out else error,
            extra=extra,
        )


@dataclass(slots=True, weakref_slot=True, eq=False)
class DeferredSend:
    """The messages of one call that waits for a commit; ``flush`` is its callback."""

    producer: Producer | None
    """The producer, or None in a test whose observers deliver nothing."""
    topic: Topic
    messages: Sequence[Outgoing]
    wanted: Durability
    connection: BaseDatabaseWrapper
    number: int
    others: MutableMapping[int, DeferredSend]
    """All waiting calls of the connection, in order, including this one until it is flushed."""
    results: Sequence[DeferredResult | RemoveResult] = ()
    context: object = None
    """The context of its span, if sends are traced."""
    rows: Sequence[StoredSend] = ()
    """The row of each message in the outbox, if the topic has one."""

    def flush(self) -> None:
        """Send, unless an earlier callback has done so; the first callback of a commit sends everything that follows it."""
        # An earlier callback of the same commit has sent the messages of this call.
        if self.others.pop(self.number, None) is None:
            return
        together = [self]
        # In an atomic block this is no commit: a test runs some of the callbacks, and only the test knows
        # which.
        if not self.connection.in_atomic_block:
            later = [number for number in self.others if number > self.number]
            # A rollback of a savepoint drops calls, and the garbage collector may remove one between these two lines.
            together += [call for number in later if (call := self.others.pop(number, None)) is not None]
        try:
            _flush(together)
        except BaseException:
            # A thread may be interrupted here, by a time-out or Ctrl-C. After a commit no result may stay
            # ``pending``.
            for call in together:
                for result in call.results:
                    if result.status == "pending":
                        # Rows are committed, so the relay sends their messages. Without a row the message is lost.
                        result.status = "in_outbox" if call.rows else "failed"
            raise
        finally:
            for call in together:
                # Django holds the later callbacks until it has run them. The bodies that they would keep are freed
                # now.
                call.messages = call.results = call.rows = ()


_waiting: WeakKeyDictionary[BaseDatabaseWrapper, WeakValueDictionary[int, DeferredSend]] = WeakKeyDictionary()
"""For each connection the waiting calls, in order. Only Django holds a call, by its callback."""

# Threads need no lock for it: ``next`` of it is one step.
_numbers = count()

WAITED_SECONDS = 0.1
"""Seconds from which on a failure counts as a time-out. A sooner failure hardly delays a commit."""

OUTAGE_SECONDS = 1.0
"""Seconds for which a time-out of one topic answers for all topics."""


class _Outage(NamedTuple):
    """A server that did not answer in time."""

    config: Config
    until: float
    """The time (monotonic) from which the server is asked again."""
    error: ServerTrouble


_outage: _Outage | None = None
"""The last outage that any thread saw. So a commit with many topics, or a process of many threads, waits once."""


def defer(
    producer: Producer | None,
    topic: Topic,
    messages: Sequence[Outgoing],
    wanted: Durability,
    connection: BaseDatabaseWrapper,
) -> list[DeferredResult]:
    """Send ``messages`` to Redis when ``connection`` commits; return their results, which are completed then.

    Without a producer nothing is sent, and the results are those that an empty queue would give.
    """
    call = _register(producer, topic, messages, wanted, connection)
    # A result must not keep its call alive: its dead reference is how it detects a rollback.
    here = ref(call)
    call.context = observability.creation_context()
    call.results = results = [
        DeferredResult(topic.name, out.slot, out.member, wanted, here) for out in messages
    ]
    return results


def defer_removal(
    producer: Producer | None, topic: Topic, out: Outgoing, connection: BaseDatabaseWrapper
) -> RemoveResult:
    """Remove ``out`` when ``connection`` commits, in order with the sends of the transaction; see ``defer``."""
    call = _register(producer, topic, [out], STORED, connection)
    result = RemoveResult("pending", topic.name, out.member, ref(call))
    call.results = [result]
    return result


def rows_waiting(using: str | None) -> set[int]:
    """Return the ids of the rows of the outbox that the running transaction has written, and that wait for its commit."""
    connection = transaction.get_connection(using)
    calls = _waiting.get(connection) if connection.in_atomic_block else None
    return {row.id for call in (calls or {}).values() for row in call.rows}


def _register(
    producer: Producer | None,
    topic: Topic,
    messages: Sequence[Outgoing],
    wanted: Durability,
    connection: BaseDatabaseWrapper,
) -> DeferredSend:
    # If Redis has another definition, the caller gets the error at the call. After the commit it could only be reported.
    if producer is not None and not connections.is_agreed(topic):
        try:
            _agree(topic)
        except ServerTrouble:
            pass  # Redis may be available again at the commit.
    others = _waiting.setdefault(connection, WeakValueDictionary())
    call = DeferredSend(producer, topic, messages, wanted, connection, next(_numbers), others)
    # Without a block, which autocommit switched off by hand does not open, Django refuses the callback.
    if topic.outbox and producer is not None and connection.in_atomic_block:
        call.rows = outbox.write(connection, messages, wanted)
    # An error in this callback must not keep Django from running the callbacks of the project, so it is ``robust``.
    transaction.on_commit(call.flush, using=connection.alias, robust=True)
    # Django may have refused the callback. Only a call that it accepted is listed, because only that one is flushed.
    others[call.number] = call
    return call


def _agree(topic: Topic) -> None:
    """Check the definition of ``topic`` like ``connections.agree``, but do not wait again for a server that hangs."""
    global _outage  # noqa: PLW0603
    if connections.is_agreed(topic):
        return
    began, config = time.monotonic(), get_config()
    # Other settings, as in a test, may name another server, which has not failed.
    if _outage is not None and _outage.config is config and began < _outage.until:
        # One exception that several threads raise would collect the tracebacks of all of them, and keep their frames
        # alive.
        raise type(_outage.error)(*_outage.error.args)
    try:
        connections.agree(topic)
    except ServerTrouble as error:
        now = time.monotonic()
        # A refused connection fails at once, so the next topic may try again. After a time-out the next one would
        # wait, too.
        if now - began >= WAITED_SECONDS:
            _outage = _Outage(config, now + OUTAGE_SECONDS, error)
        raise


def _flush(together: Sequence[DeferredSend]) -> None:
    """Send what waited for a commit, in one step; errors are reported, never raised."""
    with observability.observe_commit(_created(together)) as commit:
        sendable = [call for call in together if _is_sendable(call, commit)]
        if not sendable:
            return
        producer = sendable[-1].producer
        assert producer is not None
        messages = [out for call in sendable for out in call.messages]
        needed = [call.wanted for call in sendable]
        stored: outbox.OutboxSend | None = None
        if any(call.rows for call in sendable):
            # The older rows are read before the send: a row that becomes visible later may belong to a later commit.
            stored = outbox.OutboxSend(
                sendable[-1].connection.alias, [row for call in sendable for row in _rows(call)]
            )
            needed.append(stored.wanted)
        durability = Durability(max(one.replicas for one in needed), any(one.fsync for one in needed))
        attempt = partial(producer.attempt, wanted=durability, removes=any(map(_removes, sendable)))
        outcomes, errors = attempt(messages) if stored is None else stored.attempt(messages, attempt)
        for error in errors.values():
            commit.fail(error)
    if stored is not None:
        stored.conclude(messages, outcomes)
    _complete(sendable, outcomes, errors)


def _rows(call: DeferredSend) -> Sequence[StoredSend | None]:
    return call.rows or [None] * len(call.messages)


def _removes(call: DeferredSend) -> bool:
    return bool(call.messages) and call.messages[0].removes


def _created(together: Sequence[DeferredSend]) -> list[observability.Created]:
    """Return the topics and numbers of the calls' messages, for the span of the commit."""
    return [
        (call.topic.name, len(call.messages), call.context)
        for call in together
        if call.producer is not None and not _removes(call)
    ]


def _is_sendable(call: DeferredSend, commit: observability.CommitObservation) -> bool:
    """Return whether to send to Redis; if not, complete the results of ``call``."""
    if call.producer is None:
        for out, result in zip(call.messages, call.results, strict=True):
            result.complete(went_nowhere(out, call.wanted))
        return False
    try:
        _agree(call.topic)
    except RmqError as error:
        commit.fail(error)
        # The rows are committed, so the relay sends the messages as soon as Redis answers.
        if call.rows:
            report_waiting(call.topic.name, call.results, error)
            return False
        if not _removes(call):
            observability.count_sent(call.topic.name, len(call.messages), error)
        report(call.topic.name, call.results, error)
        return False
    return True


def _complete(
    calls: Sequence[DeferredSend], outcomes: Sequence[SendResult], errors: dict[int, RmqError]
) -> None:
    """Complete the results of ``calls``, and announce topic by topic the sends and the failures."""
    sent: defaultdict[str, list[SendResult]] = defaultdict(list)
    failed: defaultdict[str, list[tuple[DeferredResult | RemoveResult, RmqError]]] = defaultdict(list)
    waiting: defaultdict[str, list[tuple[DeferredResult | RemoveResult, RmqError]]] = defaultdict(list)
    completed = [(call, result) for call in calls for result in call.results]
    for index, ((call, result), outcome) in enumerate(zip(completed, outcomes, strict=True)):
        topic = call.topic
        result.complete(outcome)
        failure = errors.get(index)
        if isinstance(result, DeferredResult):
            if outcome.status == "refused":
                failure = too_full(topic, result)
            # An outdated message was not sent: the relay or a newer send has dealt with its row.
            if failure is None and outcome.status != OUTDATED:
                sent[topic.name].append(result)
        if failure is not None and call.rows:
            waiting[topic.name].append((result, failure))
        elif failure is not None:
            failed[topic.name].append((result, failure))
            observability.count_sent(topic.name, int(isinstance(result, DeferredResult)), failure)
    for name, topic in {call.topic.name: call.topic for call in calls}.items():
        observability.announce_sent(name, sent[name])
        observability.count_sent(name, len(sent[name]))
        if failed[name]:
            report(name, [result for result, _ in failed[name]], explained(topic, failed[name][0][1]))
        if waiting[name]:
            report_waiting(
                name, [result for result, _ in waiting[name]], explained(topic, waiting[name][0][1])
            )


def explained(topic: Topic, error: RmqError) -> RmqError:
    """Return ``error``; if the topic was re-slotted, with both counts and what to do."""
    if not isinstance(error, SlotMoved):
        return error
    # The next send compares the definition again, because a process may have registered another one meanwhile.
    connections.forget(topic)
    try:
        registered = connections.get_broker().definitions().get(topic.name, {}).get("slots")
    except ServerTrouble:
        # Redis became unavailable after it refused the send: the text then lacks the registered count.
        registered = None
    now = f"{registered} slots" if registered not in (None, topic.slots) else "a different number of slots"
    explanation = SlotMoved(
        f"topic {topic.name} now has {now}, but {topic.slots} in the settings of this process. It refused "
        "what was sent with them. Correct SLOTS and restart the process"
    )
    explanation.__cause__ = error
    return explanation


def went_nowhere(out: Outgoing, wanted: Durability = STORED) -> SendResult:
    """Return the result of a message that an observer kept from being sent, or of its removal."""
    status = cast("SendStatus", "not_found" if out.removes else "stored")
    reached = wanted.replicas or None, wanted.fsync or None
    return SendResult(out.topic.name, out.slot, out.member, status, math.nan, *reached, wanted)
