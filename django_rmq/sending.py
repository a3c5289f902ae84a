"""Sending from Django: the one way that every message takes, be it from a view, the admin, REST or a command.

A message is validated at the call. Inside a database transaction it then waits for the commit (unless
``on_commit=False``, or ``RMQ["ON_COMMIT"]`` is False), and all that the transaction sent goes to Redis in
one pipeline. Outside, it goes at once.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from asgiref.sync import sync_to_async
from django.db import transaction

from django_rmq import announcing, connections, tracing
from django_rmq.conf import get_config
from django_rmq.exceptions import CallerError, RmqError, ServerTrouble, SlotMoved, TopicFull
from django_rmq.messages import STORED, Durability, SendResult, SendResults, Topic
from django_rmq.producer import ROUND_TRIP, Outgoing, Producer, batched, check_durability

logger = logging.getLogger("django_rmq.sending")

failed_sends: Counter[str] = Counter()
"""Per topic, how many messages of this process were lost because Redis was away when a commit sent them.

The ledger in Redis cannot know of them. Read it, do not write it.
"""
_counting = threading.Lock()


@dataclass(frozen=True, slots=True)
class Send:
    """One message of ``send_messages`` with options of its own; those given here win over the shared ones."""

    body: Any
    key: str | None = None
    priority: int | None = None
    time_range: int | timedelta | None = None
    fixed_time: datetime | int | None = None
    slot_basis: object = None
    headers: Mapping[str, str] | None = field(default=None, hash=False)
    expires: datetime | int | None = None

    def options(self) -> dict[str, Any]:
        """Return what was given beside the body."""
        given = ((name, getattr(self, name)) for name in _OPTIONS)
        return {name: value for name, value in given if value is not None}


_OPTIONS = ("key", "priority", "time_range", "fixed_time", "slot_basis", "headers", "expires")


class Observer(Protocol):
    """Sees what is sent, for tests; ``delivers`` False: nothing goes further."""

    delivers: bool

    def see(self, outgoing: Outgoing, body: Any, options: Mapping[str, Any], result: SendResult) -> None:
        """Take note of a validated message; ``result`` is completed later if it waits for a commit."""


observers: list[Observer] = []
"""For ``testing``: who sees every send of this process, from any thread."""


def send_message(
    topic: str,
    body: Any,
    *,
    key: str | None = None,
    priority: int | None = None,
    time_range: int | timedelta | None = None,
    fixed_time: datetime | int | None = None,
    slot_basis: object = None,
    headers: Mapping[str, str] | None = None,
    expires: datetime | int | None = None,
    replicas: int = 0,
    fsync: bool = False,
    on_commit: bool | None = None,
    using: str | None = None,
) -> SendResult:
    """Send ``body`` to ``topic`` and return what became of it, or ``pending`` inside a transaction.

    ``time_range`` in ms or as timedelta, ``fixed_time`` and ``expires`` as aware datetimes or ms since the
    epoch. ``key``, ``headers`` and ``expires`` need IDENTITY "key". ``slot_basis`` chooses the slot: messages
    of equal basis are consumed one after the other. ``using`` names the database whose commit is waited for.
    ``replicas``: wait until so many replicas of Redis have it; ``fsync``: until it is on the primary's disk. Each
    waits for two fifths of the socket time-out at most (0.4 s in a web process) and raises nothing: ``replicas``,
    ``fsynced`` and ``durable`` of the result say what was reached.

    Raises ``InvalidMessage`` or ``UnknownTopic`` for what cannot be sent, always at the call. What is sent
    at once also raises ``TopicFull``, ``SlotMoved`` and ``ServerTrouble``; what fails after a commit is
    logged and raised as the signal ``send_failed``, and its result says ``failed``.
    """
    options = {
        "key": key,
        "priority": priority,
        "time_range": time_range,
        "fixed_time": fixed_time,
        "slot_basis": slot_basis,
        "headers": headers,
        "expires": expires,
    }
    return _send_one(topic, body, options, False, check_durability(replicas, fsync), on_commit, using)


def ensure_message(
    topic: str,
    body: Any,
    *,
    key: str | None = None,
    priority: int | None = None,
    time_range: int | timedelta | None = None,
    fixed_time: datetime | int | None = None,
    slot_basis: object = None,
    headers: Mapping[str, str] | None = None,
    expires: datetime | int | None = None,
    replicas: int = 0,
    fsync: bool = False,
    on_commit: bool | None = None,
    using: str | None = None,
) -> SendResult:
    """Send as ``send_message`` does, unless the message already waits, rests or runs (``present``)."""
    options = {
        "key": key,
        "priority": priority,
        "time_range": time_range,
        "fixed_time": fixed_time,
        "slot_basis": slot_basis,
        "headers": headers,
        "expires": expires,
    }
    return _send_one(topic, body, options, True, check_durability(replicas, fsync), on_commit, using)


def send_messages(
    topic: str,
    bodies: Iterable[Any],
    *,
    priority: int | None = None,
    time_range: int | timedelta | None = None,
    fixed_time: datetime | int | None = None,
    slot_basis: object = None,
    headers: Mapping[str, str] | None = None,
    expires: datetime | int | None = None,
    replicas: int = 0,
    fsync: bool = False,
    on_commit: bool | None = None,
    using: str | None = None,
) -> SendResults:
    """Send many messages to one topic and return what became of each, in order.

    ``bodies`` are bodies, or ``Send(body, priority=…)`` where one has options of its own. A list or tuple is
    validated whole before anything is written. Any other iterable is consumed in chunks of some thousands,
    each validated before it is written (inside a transaction: all of it, at the call). ``InvalidMessage``
    names the index of the item that cannot be sent.

    A full slot raises nothing here: the results of its messages say ``refused``.
    """
    options = {
        "priority": priority,
        "time_range": time_range,
        "fixed_time": fixed_time,
        "slot_basis": slot_basis,
        "headers": headers,
        "expires": expires,
    }
    if isinstance(bodies, (str, bytes, bytearray, Mapping)):
        raise TypeError(f"send_messages takes an iterable of bodies, got one {type(bodies).__name__}")
    declared, wanted = get_config().topic(topic), check_durability(replicas, fsync)
    producer = connections.get_producer()
    shared = {name: value for name, value in options.items() if value is not None}
    connection = _transaction(on_commit, using)
    chunks: Iterable[Sequence[Any]]
    if isinstance(bodies, (list, tuple)):
        chunks = [bodies]
    elif connection is not None:
        chunks = [list(bodies)]
    else:
        chunks = batched(bodies, ROUND_TRIP)
    results = SendResults(topic)
    plain = (
        connection is None
        and not declared.keyed
        and not {"slot_basis", "headers", "expires"} & set(shared)
        and wanted == STORED
    )
    with tracing.sending(declared) as span:
        for chunk in chunks:
            if plain and not observers and Send not in set(map(type, chunk)):
                _send_plain(producer, declared, chunk, shared, results)
                continue
            built, seen = [], []
            for index, item in enumerate(chunk, len(results)):
                body, own = (
                    (item.body, {**shared, **item.options()}) if isinstance(item, Send) else (item, shared)
                )
                try:
                    built.append(producer.build(declared, body, **span.options(own)))
                except CallerError as error:
                    raise type(error)(f"item {index}: {error}{_so_far(results)}") from None
                if observers:
                    seen.append((body, own))
            results.extend(_dispatch(producer, declared, built, seen, wanted, connection))
        span.note(results)
    return results


def send_outgoing(outgoing: Outgoing, body: Any) -> SendResult:
    """Send a message that was validated and placed already, at once; ``body`` is what observers are shown.

    For operations, which know a slot and a score that no option could say. Raises as ``send_message`` does.
    """
    topic = outgoing.topic
    (result,) = _dispatch(connections.get_producer(), topic, [outgoing], [(body, {})], STORED, None)
    if result.status == "refused":
        raise _full(topic, result)
    return result


def remove_message(topic: str, body: Any = None, *, key: str | None = None, slot_basis: object = None) -> str:
    """Take a message back, at once: it is named by its body, or by its ``key`` where the topic is keyed.

    Returns what it was found as: ``waiting`` and ``retry`` are gone; ``in_flight`` ends with the delivery that
    runs and is not tried again; ``in_flight_and_waiting`` both; ``not_found``. What is dead stays there. In a
    transaction, call it by ``transaction.on_commit``. Raises ``ServerTrouble`` where Redis is away.
    """
    declared = get_config().topic(topic)
    producer = connections.get_producer()
    # What is wrong with the call is told before a server is asked.
    producer.address(declared, body, key=key, slot_basis=slot_basis)
    connections.agree(declared)
    found = "not_found"
    out = producer.outgoing(declared, body, 0, key=key, slot_basis=slot_basis)
    for slot in producer.slots(out):
        (word,) = producer.broker.remove(declared, slot, [out.member], "live")
        found = found if word == "not_found" else word
    return found


async def asend_message(topic: str, body: Any, **options: Any) -> SendResult:
    """Send as ``send_message`` does, from a coroutine, in the thread that has its database connections."""
    return await sync_to_async(send_message)(topic, body, **options)


async def asend_messages(topic: str, bodies: Iterable[Any], **options: Any) -> SendResults:
    """Send as ``send_messages`` does, from a coroutine."""
    return await sync_to_async(send_messages)(topic, bodies, **options)


async def aensure_message(topic: str, body: Any, **options: Any) -> SendResult:
    """Send as ``ensure_message`` does, from a coroutine."""
    return await sync_to_async(ensure_message)(topic, body, **options)


# --- at once, or after the commit -------------------------------------------------------------------


def _send_one(
    name: str,
    body: Any,
    options: dict[str, Any],
    ensure: bool,
    wanted: Durability,
    on_commit: bool | None,
    using: str | None,
) -> SendResult:
    topic = get_config().topic(name)
    producer = connections.get_producer()
    with tracing.sending(topic) as span:
        outgoing = producer.build(topic, body, **span.options(options))
        if ensure:
            outgoing = outgoing._replace(ensure=True)
        seen = []
        if observers:
            seen = [(body, {name: value for name, value in options.items() if value is not None})]
        connection = _transaction(on_commit, using)
        (result,) = results = _dispatch(producer, topic, [outgoing], seen, wanted, connection)
        span.note(results)
        if result.status == "refused":
            raise _full(topic, result)
    return result


def _full(topic: Topic, result: SendResult) -> TopicFull:
    return TopicFull(
        f"slot {result.slot} of topic {topic.name} holds {topic.slot_backlog} messages, its share of "
        f"MAX_BACKLOG = {topic.max_backlog}"
    )


def _transaction(on_commit: bool | None, using: str | None) -> Any:
    """Return the database connection whose commit is to be waited for; None: send at once."""
    if on_commit is None:
        on_commit = get_config().on_commit
    if not on_commit:
        return None
    connection = transaction.get_connection(using)
    if connection.in_atomic_block:
        return connection
    # With autocommit off by hand Django knows of no commit: its own error says so.
    return connection if connection.connection is not None and not connection.autocommit else None


def _dispatch(
    producer: Producer,
    topic: Topic,
    built: list[Outgoing],
    seen: list[tuple[Any, dict[str, Any]]],
    wanted: Durability,
    connection: Any,
) -> list[SendResult]:
    watching = list(observers)
    if watching and not all(observer.delivers for observer in watching):
        status = "stored" if connection is None else "pending"
        results = [SendResult(out.topic.name, out.slot, out.member, status, wanted=wanted) for out in built]
        for result in results:
            result.replicas, result.fsynced = wanted.replicas or None, wanted.fsync or None
    elif connection is None:
        connections.agree(topic)
        results, errors = producer.attempt(built, wanted)
        for error in errors.values():
            raise _explained(topic, error)
        announcing.sent(topic.name, results)
    else:
        results = [SendResult(out.topic.name, out.slot, out.member, wanted=wanted) for out in built]
        _defer(producer, topic, built, results, connection)
    for observer in watching:
        for out, (body, options), result in zip(built, seen, results, strict=True):
            observer.see(out, body, options, result)
    return results


def _send_plain(
    producer: Producer, topic: Topic, bodies: Sequence[Any], options: dict[str, Any], results: SendResults
) -> None:
    """Send bodies that share all options, at once, and add what became of them to ``results``."""
    connections.agree(topic)
    before = len(results)
    try:
        producer.send_bodies(topic, bodies, results=results, **options)
    except CallerError as error:
        raise type(error)(f"{error}{_so_far(results)}") from None
    except SlotMoved as error:
        raise _explained(topic, error) from error
    if announcing.are_sends_watched():
        announcing.sent(topic.name, results[before:])


def _so_far(results: SendResults) -> str:
    return f"; the {len(results)} before it have been sent" if results else ""


def _explained(topic: Topic, error: RmqError) -> RmqError:
    """Return ``error``; where the topic was re-slotted, with both counts and what to do."""
    if not isinstance(error, SlotMoved):
        return error
    connections.forget(topic)
    try:
        registered = connections.get_broker().definitions().get(topic.name, {}).get("slots")
    except ServerTrouble:
        registered = None
    now = f"{registered} slots" if registered not in (None, topic.slots) else "another number of slots"
    explained = SlotMoved(
        f"topic {topic.name} has {now} by now and {topic.slots} in the settings of this process: nothing was "
        "sent. Correct SLOTS and restart the process"
    )
    explained.__cause__ = error
    return explained


class _Waiting:
    """The messages of one call; ``flush`` is their on_commit callback. The first to run takes along those after it."""

    __slots__ = ("built", "connection", "done", "hooks", "producer", "results", "topic")

    def __init__(
        self,
        producer: Producer,
        topic: Topic,
        built: list[Outgoing],
        results: list[SendResult],
        connection: Any,
    ) -> None:
        self.producer = producer
        self.topic = topic
        self.built = built
        self.results = results
        self.connection = connection
        self.hooks: list[Any] = []
        self.done = False

    def flush(self) -> None:
        """Send, unless an earlier callback has done so."""
        if self.done:
            return
        together = [self, *self._later()]
        for waiting in together:
            waiting.done = True
        _flush(together)

    def _later(self) -> list[_Waiting]:
        """Return those of our callbacks that Django will certainly run after this one.

        Django pops each callback off its list before it calls it. If this one is gone from the list it was
        put on, what is left there are the callbacks still to come. If not, a savepoint's rollback has
        replaced the list since, and nobody can tell: each then sends for itself.
        """
        hooks = self.connection.run_on_commit if self.connection.in_atomic_block else self.hooks
        callbacks = [self._owner(hook) for hook in hooks]
        if self.connection.in_atomic_block:
            # Run by captureOnCommitCallbacks(execute=True), in order and from a list that stays.
            if self not in callbacks:
                return []
            callbacks = callbacks[callbacks.index(self) + 1 :]
        elif self in callbacks:
            return []
        return [later for later in callbacks if later is not None and not later.done]

    @staticmethod
    def _owner(hook: tuple[Any, ...]) -> _Waiting | None:
        """Return what a hook of Django's belongs to; the callback is somewhere in the tuple."""
        owners = (getattr(part, "__self__", None) for part in hook)
        return next((owner for owner in owners if isinstance(owner, _Waiting)), None)

    def __del__(self) -> None:
        # Django forgets the callbacks of what is rolled back; so this is noticed as soon as Python does.
        if not self.done:
            for result in self.results:
                if result.status == "pending":
                    result.status = "discarded"


def _defer(
    producer: Producer, topic: Topic, built: list[Outgoing], results: list[SendResult], connection: Any
) -> None:
    if not connections.is_agreed(topic):
        try:
            connections.agree(topic)
        except ServerTrouble:
            pass  # Redis has until the commit to come back
    waiting = _Waiting(producer, topic, built, results, connection)
    transaction.on_commit(waiting.flush, using=connection.alias, robust=True)
    waiting.hooks = connection.run_on_commit


def _flush(together: list[_Waiting]) -> None:
    """Send what waited for a commit, in one go; whatever fails is told, never raised."""
    by_topic: dict[str, list[tuple[SendResult, RmqError | None]]] = {}
    sendable: list[_Waiting] = []
    for waiting in together:
        try:
            connections.agree(waiting.topic)
        except RmqError as error:
            _fail(waiting.topic.name, waiting.results, error)
        else:
            sendable.append(waiting)
    if not sendable:
        return
    built = [out for waiting in sendable for out in waiting.built]
    results = [result for waiting in sendable for result in waiting.results]
    wanted = Durability(
        max(result.wanted.replicas for result in results), any(result.wanted.fsync for result in results)
    )
    found, errors = sendable[0].producer.attempt(built, wanted)
    topics = {waiting.topic.name: waiting.topic for waiting in sendable}
    for index, (result, outcome) in enumerate(zip(results, found, strict=True)):
        result.slot, result.status, result.score = outcome.slot, outcome.status, outcome.score
        result.replicas = outcome.replicas if result.wanted.replicas else None
        result.fsynced = outcome.fsynced if result.wanted.fsync else None
        failure = errors.get(index)
        if result.status == "refused":
            failure = _full(topics[result.topic], result)
        by_topic.setdefault(result.topic, []).append((result, failure))
    for name, outcomes in by_topic.items():
        announcing.sent(name, [result for result, failure in outcomes if failure is None])
        failures = [failure for _, failure in outcomes if failure is not None]
        if failures:
            lost = [result for result, failure in outcomes if failure is not None]
            _fail(name, lost, _explained(topics[name], failures[0]))


def _fail(topic: str, results: list[SendResult], error: RmqError) -> None:
    for result in results:
        if result.status != "refused":
            result.status = "failed"
    with _counting:
        failed_sends[topic] += len(results)
    logger.error(
        "%d message(s) of topic %s could not be sent after the database commit: %s",
        len(results),
        topic,
        error,
        exc_info=error,
        extra={"rmq_event": "send_failed", "rmq_topic": topic, "rmq_count": len(results)},
    )
    announcing.send_failed(topic, results, error)
