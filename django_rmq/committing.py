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
from itertools import count
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from django.db import transaction

from django_rmq import announcing, connections
from django_rmq.exceptions import RmqError, ServerTrouble, SlotMoved, TopicFull
from django_rmq.messages import STORED, Durability, SendResult, Topic
from django_rmq.producer import Outgoing, Producer

logger = logging.getLogger("django_rmq.sending")

failed_sends: Counter[str] = Counter()
"""Per topic, how many messages of this process were lost because Redis was unavailable when a commit sent them.

The ledger in Redis cannot know of them. Read it, do not write it.
"""
_counting = threading.Lock()


class _Awaiting:
    """The status of a result that may wait for a commit."""

    __slots__ = ()

    _told: str
    _call: ref[_Call] | None

    @property
    def status(self) -> str:
        """What became of it by now."""
        if self._told == "pending" and self._call is not None and self._call() is None:
            return "discarded"
        return self._told

    @status.setter
    def status(self, status: str) -> None:
        self._told = status  # type: ignore[misc] # whoever derives from this has the slot: two bases cannot


class DeferredResult(_Awaiting, SendResult):
    """The result of a send that waits for a commit; its status is up to date whenever it is asked for."""

    __slots__ = ("_call", "_told")

    def __init__(self, topic: str, slot: int, member: bytes, wanted: Durability) -> None:
        self._call = None
        super().__init__(topic, slot, member, wanted=wanted)

    def complete(self, outcome: SendResult) -> None:
        """Take over what became of the send."""
        self.slot, self.score, self.status = outcome.slot, outcome.score, outcome.status
        self.replicas = outcome.replicas if self.wanted.replicas else None
        self.fsynced = outcome.fsynced if self.wanted.fsync else None

    def __reduce__(self) -> tuple[Any, ...]:
        # What is copied to another process can learn nothing more.
        told = (self.topic, self.slot, self.member, self.status, self.score, self.replicas, self.fsynced)
        return SendResult, (*told, self.wanted)


class RemoveResult(_Awaiting, str):
    """What ``remove_message`` returns: the word that it returned, whose ``status`` goes on to say what became of it.

    ``waiting``, ``retry``, ``in_flight``, ``in_flight_and_waiting`` or ``not_found``: what the message was found as.
    In a transaction the word is ``pending``, and ``status`` is that until the commit; after it one of the above, or
    ``failed`` (the server was unavailable). After a rollback ``status`` is ``discarded``: nothing was removed.
    """

    __slots__ = ("_call", "_told", "member", "topic")

    topic: str
    member: bytes
    """What Redis holds: the encoded body, or the key."""

    def __new__(cls, word: str, topic: str, member: bytes) -> Self:
        """Return ``word`` as the result of removing ``member``."""
        result = super().__new__(cls, word)
        result.topic, result.member = topic, member
        result._told, result._call = word, None
        return result

    def complete(self, outcome: SendResult) -> None:
        """Take over what the message was found as."""
        self.status = outcome.status

    def __reduce__(self) -> tuple[Any, ...]:
        # As above.
        return RemoveResult, (self.status, self.topic, self.member)


class _Call:
    """The messages of one call that waits for a commit; ``flush`` is its callback."""

    __slots__ = (
        "__weakref__",
        "_connection",
        "_number",
        "_others",
        "is_done",
        "messages",
        "producer",
        "results",
        "topic",
    )

    def __init__(
        self,
        producer: Producer | None,
        topic: Topic,
        messages: Sequence[Outgoing],
        results: Sequence[DeferredResult | RemoveResult],
        connection: Any,
    ) -> None:
        self.producer = producer
        self.topic = topic
        self.messages = messages
        self.results = results
        self.is_done = False
        # Weak: the connection keeps the callback, which keeps this.
        self._connection = ref(connection)
        self._number = next(_numbers)
        others = _waiting.get(connection)
        if others is None:
            others = _waiting[connection] = WeakValueDictionary()
        self._others = others
        others[self._number] = self

    def flush(self) -> None:
        """Send, unless an earlier callback has done so; the first of a commit takes along all that come after it."""
        if self.is_done:
            return
        together = [self]
        connection = self._connection()
        # In an atomic block this is no commit: a test runs some of the callbacks, and only it knows which.
        if connection is not None and not connection.in_atomic_block:
            together += [
                call for number, call in self._others.items() if number > self._number and not call.is_done
            ]
        try:
            for call in together:
                call.is_done = True
            _flush(together)
        finally:
            for call in together:
                for result in call.results:
                    if result.status == "pending":
                        result.status = "failed"
                call.messages = call.results = ()


_numbers = count()
_waiting: WeakKeyDictionary[Any, WeakValueDictionary[int, _Call]] = WeakKeyDictionary()
"""Per connection the calls whose callbacks Django has by now, in order."""


def defer(
    producer: Producer | None,
    topic: Topic,
    messages: Sequence[Outgoing],
    results: Sequence[DeferredResult | RemoveResult],
    connection: Any,
) -> None:
    """Let ``messages`` go to Redis when ``connection`` commits; ``results`` are completed then.

    Without a producer they go nowhere, and the results say what they would of an empty queue.
    """
    if producer is not None and not connections.is_agreed(topic):
        try:
            connections.agree(topic)
        except ServerTrouble:
            pass  # Redis has until the commit to come back
    call = _Call(producer, topic, messages, results, connection)
    transaction.on_commit(call.flush, using=connection.alias, robust=True)
    here = ref(call)
    for result in results:
        result._call = here  # noqa: SLF001 - a result and its call know each other


def _flush(together: Iterable[_Call]) -> None:
    """Do what waited for a commit, in one go; whatever fails is reported, never raised."""
    sendable: list[_Call] = []
    producer: Producer | None = None
    for call in together:
        if call.producer is None:
            for out, result in zip(call.messages, call.results, strict=True):
                wanted = result.wanted if isinstance(result, DeferredResult) else STORED
                result.complete(went_nowhere(out, wanted))
            continue
        producer = call.producer
        try:
            connections.agree(call.topic)
        except RmqError as error:
            _fail(call.topic.name, call.results, error)
        else:
            sendable.append(call)
    if producer is None or not sendable:
        return
    messages = [out for call in sendable for out in call.messages]
    results = [result for call in sendable for result in call.results]
    asked = [result.wanted for result in results if isinstance(result, DeferredResult)]
    wanted = Durability(max((each.replicas for each in asked), default=0), any(each.fsync for each in asked))
    removes = len(asked) < len(results)
    found, errors = producer.attempt(messages, wanted, removes=removes)
    topics = {call.topic.name: call.topic for call in sendable}
    sent: dict[str, list[SendResult]] = {}
    failed: dict[str, list[tuple[DeferredResult | RemoveResult, RmqError]]] = {}
    for index, (result, outcome) in enumerate(zip(results, found, strict=True)):
        result.complete(outcome)
        failure = errors.get(index)
        if isinstance(result, DeferredResult):
            sent.setdefault(result.topic, [])
            if result.status == "refused":
                failure = too_full(topics[result.topic], result)
            if failure is None:
                sent[result.topic].append(result)
        if failure is not None:
            failed.setdefault(result.topic, []).append((result, failure))
    for name, topic in topics.items():
        announcing.sent(name, sent.get(name, ()))
        if name in failed:
            _fail(name, [result for result, _ in failed[name]], explained(topic, failed[name][0][1]))


def _fail(topic: str, results: Sequence[DeferredResult | RemoveResult], error: RmqError) -> None:
    for result in results:
        if result.status != "refused":
            result.status = "failed"
    sends = [result for result in results if isinstance(result, DeferredResult)]
    removals = [result for result in results if isinstance(result, RemoveResult)]
    if sends:
        with _counting:
            failed_sends[topic] += len(sends)
        logger.error(
            "%d message(s) of topic %s could not be sent after the database commit: %s",
            len(sends),
            topic,
            error,
            exc_info=error,
            extra={"rmq_event": "send_failed", "rmq_topic": topic, "rmq_count": len(sends)},
        )
        announcing.send_failed(topic, sends, error)
    if removals:
        logger.error(
            "%d message(s) of topic %s could not be removed after the database commit: %s",
            len(removals),
            topic,
            error,
            exc_info=error,
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
    "explained",
    "failed_sends",
    "too_full",
    "went_nowhere",
]
