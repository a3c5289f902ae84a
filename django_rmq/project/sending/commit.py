"""What waits for the commit of a database: the sends and removals of a transaction, in one pipeline and in order.

Each call registers one ``transaction.on_commit`` callback, and that callback alone keeps what the call sends. Django
forgets the callbacks of a transaction or savepoint that is rolled back, and with them goes everything that waited:
no body stays in memory, and the results, which know their call by a weak reference, say ``discarded`` from then on.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

from django.db import transaction

from django_rmq.core.logs.complaints import Complaints, counted
from django_rmq.core.producer.producer import Outgoing, Producer
from django_rmq.core.words.messages import STORED, Durability, SendResult, Topic
from django_rmq.exceptions import RmqError, ServerTrouble, SlotMoved, TopicFull
from django_rmq.project import connections
from django_rmq.project.watching import announcing

logger = logging.getLogger("django_rmq.sending")
_repeated = Complaints(logger)

failed_sends: Counter[str] = Counter()
"""Per topic, how many messages of this process were lost because Redis was unavailable when a commit sent them.

The ledger in Redis cannot know of them. Read it, do not write it.
"""
_counting = threading.Lock()


class DeferredResult(SendResult):
    """The result of a send that waits for a commit; its status is up to date whenever it is asked for."""

    __slots__ = ("_call",)

    def __init__(self, out: Outgoing, wanted: Durability, call: ref[_Call]) -> None:
        self.topic = out.topic.name
        self.slot = out.slot
        self.member = out.member
        self.score = math.nan
        self.replicas = self.fsynced = None
        self.wanted = wanted
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return _status_by_now(self, name, self._call)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process learns nothing more.
        told = (self.topic, self.slot, self.member, self.status, self.score, self.replicas, self.fsynced)
        return SendResult, (*told, self.wanted)


class RemoveResult(str):
    """What ``remove_message`` returns: the word that it returned, whose ``status`` goes on to say what became of it.

    ``waiting``, ``retry``, ``in_flight``, ``in_flight_and_waiting`` or ``not_found``: what the message was found as.
    In a transaction the word is ``pending``, and ``status`` is that until the commit; after it one of the above, or
    ``failed`` (the server was unavailable). After a rollback ``status`` is ``discarded``: nothing was removed.
    """

    __slots__ = ("_call", "member", "status", "topic")

    topic: str
    member: bytes
    """What Redis holds: the encoded body, or the key."""
    status: str
    _call: ref[_Call] | None

    def __new__(cls, word: str, topic: str, member: bytes, call: ref[_Call] | None = None) -> Self:
        """Return ``word`` as the result of removing ``member``, which waits for ``call`` if there is one."""
        result = super().__new__(cls, word)
        result.topic, result.member, result._call = topic, member, call
        if call is None:
            result.status = word
        return result

    def __getattr__(self, name: str) -> Any:
        return _status_by_now(self, name, self._call)

    def __reduce__(self) -> tuple[Any, ...]:
        # As above.
        return RemoveResult, (self.status, self.topic, self.member)


def _status_by_now(result: object, name: str, call: ref[_Call] | None) -> str:
    """Return the status of a result that has none yet: it is set as soon as it cannot change any more."""
    if name != "status":
        raise AttributeError(f"{type(result).__name__!r} object has no attribute {name!r}")
    return "discarded" if call is None or call() is None else "pending"


class _Call:
    """The messages of one call that waits for a commit; ``flush`` is its callback."""

    __slots__ = (
        "__weakref__",
        "connection",
        "is_done",
        "messages",
        "others",
        "producer",
        "results",
        "topic",
        "wanted",
    )

    connection: Any
    others: list[ref[_Call]]
    """All calls of the connection that may wait, in order, this one among them."""
    results: Sequence[DeferredResult | RemoveResult]

    def __init__(
        self,
        producer: Producer | None,
        topic: Topic,
        messages: Sequence[Outgoing],
        wanted: Durability = STORED,
    ) -> None:
        self.producer = producer
        self.topic = topic
        self.messages = messages
        self.wanted = wanted
        self.is_done = False

    def flush(self) -> None:
        """Send, unless an earlier callback has done so; the first of a commit takes along all that come after it."""
        if self.is_done:
            return
        together = [self]
        # In an atomic block this is no commit: a test runs some of the callbacks, and only it knows which.
        if not self.connection.in_atomic_block:
            later = [other() for other in self.others[self.others.index(ref(self)) + 1 :]]
            together += [call for call in later if call is not None and not call.is_done]
        for call in together:
            call.is_done = True
        try:
            _flush(together)
        except BaseException:
            for result in (result for call in together for result in call.results):
                if result.status == "pending":
                    result.status = "failed"
            raise
        finally:
            for call in together:
                call.messages = call.results = ()


_waiting: WeakKeyDictionary[Any, list[ref[_Call]]] = WeakKeyDictionary()
"""Per connection the calls whose callbacks Django may have, in order."""


def defer(
    producer: Producer | None, topic: Topic, messages: Sequence[Outgoing], wanted: Durability, connection: Any
) -> list[DeferredResult]:
    """Let ``messages`` go to Redis when ``connection`` commits; return their results, which are completed then.

    Without a producer they go nowhere, and the results say what they would of an empty queue.
    """
    call, here = _register(_Call(producer, topic, messages, wanted), connection)
    call.results = results = [DeferredResult(out, wanted, here) for out in messages]
    return results


def defer_removal(producer: Producer | None, topic: Topic, out: Outgoing, connection: Any) -> RemoveResult:
    """Let ``out`` be removed when ``connection`` commits, in order with what is sent; see ``defer``."""
    call, here = _register(_Call(producer, topic, [out]), connection)
    result = RemoveResult("pending", topic.name, out.member, here)
    call.results = [result]
    return result


def _register(call: _Call, connection: Any) -> tuple[_Call, ref[_Call]]:
    if call.producer is not None and not connections.is_agreed(call.topic):
        try:
            connections.agree(call.topic)
        except ServerTrouble:
            pass  # Redis has until the commit to come back
    transaction.on_commit(call.flush, using=connection.alias, robust=True)
    others = _waiting.get(connection)
    if others is None:
        others = _waiting[connection] = []
    # What a rollback has ended is the end of the list.
    while others and others[-1]() is None:
        others.pop()
    here = ref(call)
    others.append(here)
    call.others, call.connection = others, connection
    return call, here


def _flush(together: Iterable[_Call]) -> None:
    """Do what waited for a commit, in one go; whatever fails is reported, never raised."""
    sendable: list[_Call] = []
    producer: Producer | None = None
    for call in together:
        if call.producer is None:
            for out, result in zip(call.messages, call.results, strict=True):
                _complete(result, went_nowhere(out, call.wanted))
            continue
        try:
            connections.agree(call.topic)
        except RmqError as error:
            _fail(call.topic.name, call.results, error)
        else:
            producer = call.producer
            sendable.append(call)
    if producer is None:
        return
    messages = [out for call in sendable for out in call.messages]
    wanted = Durability(
        max(call.wanted.replicas for call in sendable), any(call.wanted.fsync for call in sendable)
    )
    removes = any(call.messages and call.messages[0].act == "remove" for call in sendable)
    outcomes, errors = producer.attempt(messages, wanted, removes=removes)
    numbered = enumerate(outcomes)
    topics = {call.topic.name: call.topic for call in sendable}
    sent: dict[str, list[SendResult]] = {name: [] for name in topics}
    failed: dict[str, list[tuple[DeferredResult | RemoveResult, RmqError]]] = {}
    for call in sendable:
        name = call.topic.name
        for result, (index, outcome) in zip(call.results, numbered):  # noqa: B905 - the latter goes on with the next call
            _complete(result, outcome)
            failure = errors.get(index)
            if isinstance(result, DeferredResult):
                if outcome.status == "refused":
                    failure = too_full(call.topic, result)
                if failure is None:
                    sent[name].append(result)
            if failure is not None:
                failed.setdefault(name, []).append((result, failure))
    for name, topic in topics.items():
        announcing.sent(name, sent[name])
        if name in failed:
            _fail(name, [result for result, _ in failed[name]], explained(topic, failed[name][0][1]))


def _complete(result: DeferredResult | RemoveResult, outcome: SendResult) -> None:
    result.status = outcome.status
    if isinstance(result, DeferredResult):
        result.slot, result.score = outcome.slot, outcome.score
        result.replicas = outcome.replicas if result.wanted.replicas else None
        result.fsynced = outcome.fsynced if result.wanted.fsync else None


def _fail(topic: str, results: Sequence[DeferredResult | RemoveResult], error: RmqError) -> None:
    for result in results:
        if result.status != "refused":
            result.status = "failed"
    sends = [result for result in results if isinstance(result, DeferredResult)]
    removals = [result for result in results if isinstance(result, RemoveResult)]
    if sends:
        with _counting:
            failed_sends[topic] += len(sends)
        if (left_out := _repeated.admit(("send", topic, type(error)))) is not None:
            logger.error(
                "%d message(s) of topic %s could not be sent after the database commit: %s%s",
                len(sends),
                topic,
                error,
                counted(left_out, "such commits"),
                exc_info=None if left_out else error,
                extra={"rmq_event": "send_failed", "rmq_topic": topic, "rmq_count": len(sends)},
            )
        announcing.send_failed(topic, sends, error)
    if removals:
        if (left_out := _repeated.admit(("remove", topic, type(error)))) is not None:
            logger.error(
                "%d message(s) of topic %s could not be removed after the database commit: %s%s",
                len(removals),
                topic,
                error,
                counted(left_out, "such commits"),
                exc_info=None if left_out else error,
                extra={"rmq_event": "remove_failed", "rmq_topic": topic, "rmq_count": len(removals)},
            )
        announcing.remove_failed(topic, removals, error)


def went_nowhere(out: Outgoing, wanted: Durability = STORED) -> SendResult:
    """Return what became of a message that was sent to nobody, or of its removal."""
    status = "not_found" if out.act == "remove" else "stored"
    reached = wanted.replicas or None, wanted.fsync or None
    return SendResult(out.topic.name, out.slot, out.member, status, math.nan, *reached, wanted)


# --- why something was not sent ---------------------------------------------------------------------


def too_full(topic: Topic, result: SendResult) -> TopicFull:
    """Return the error that says why the slot of ``result`` has refused its message."""
    return TopicFull(
        f"slot {result.slot} of topic {topic.name} holds {topic.slot_backlog} messages, its share of "
        f"MAX_BACKLOG = {topic.max_backlog}"
    )


def explained(topic: Topic, error: RmqError) -> RmqError:
    """Return ``error``; where the topic was re-slotted, with both counts and what to do."""
    if not isinstance(error, SlotMoved):
        return error
    connections.forget(topic)
    try:
        registered = connections.get_broker().definitions().get(topic.name, {}).get("slots")
    except ServerTrouble:
        registered = None
    now = f"{registered} slots" if registered not in (None, topic.slots) else "another number of slots"
    explanation = SlotMoved(
        f"topic {topic.name} has {now} by now and {topic.slots} in the settings of this process: nothing was "
        "sent. Correct SLOTS and restart the process"
    )
    explanation.__cause__ = error
    return explanation


__all__ = [
    "DeferredResult",
    "RemoveResult",
    "defer",
    "defer_removal",
    "explained",
    "failed_sends",
    "too_full",
    "went_nowhere",
]
