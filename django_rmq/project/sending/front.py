"""Sending from Django: the one way that every message takes, be it from a view, the admin, REST or a command.

A message is validated at the call. Inside a database transaction it then waits for the commit (unless
``on_commit=False``, or ``RMQ["ON_COMMIT"]`` is False), and so does what is removed; ``commit`` has the rest.
Outside, it goes at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from asgiref.sync import sync_to_async
from django.db import transaction

from django_rmq.core.producer.sending import ROUND_TRIP, Outgoing, Producer, batched, check_durability
from django_rmq.core.words.messages import STORED, Durability, SendResult, SendResults, Topic
from django_rmq.exceptions import CallerError, SlotMoved
from django_rmq.project import connections
from django_rmq.project.sending.commit import defer, defer_removal, went_nowhere
from django_rmq.project.sending.failures import explained, too_full
from django_rmq.project.sending.results import RemoveResult
from django_rmq.project.settings.config import get_config
from django_rmq.project.watching import announcing, tracing


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
        raise too_full(topic, result)
    return result


def remove_message(
    topic: str,
    body: Any = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
    on_commit: bool | None = None,
    using: str | None = None,
) -> RemoveResult:
    """Take a message back: it is named by its body, or by its ``key`` where the topic is keyed.

    Returns a word, what the message was found as: ``waiting`` and ``retry`` are gone; ``in_flight`` ends with the
    delivery that runs and is not tried again; ``in_flight_and_waiting`` both; ``not_found``. What is dead stays there.

    Inside a transaction it returns ``pending``, and the message is removed at the commit, in order with what the
    transaction sends; the ``status`` of the result then says what it was found as. ``on_commit`` and ``using`` are
    those of ``send_message``.

    Raises ``InvalidMessage`` or ``UnknownTopic`` always at the call. What is removed at once also raises
    ``ServerTrouble``; what fails after a commit is logged and raised as the signal ``remove_failed``, and the result's
    ``status`` is ``failed``.
    """
    declared = get_config().topic(topic)
    producer = connections.get_producer()
    out = producer.outgoing(declared, body, 0, key=key, slot_basis=slot_basis)._replace(act="remove")
    connection = _transaction(on_commit, using)
    delivers = all(observer.delivers for observer in observers)
    if connection is not None:
        return defer_removal(producer if delivers else None, declared, out, connection)
    if not delivers:
        return RemoveResult(went_nowhere(out).status, topic, out.member)
    connections.agree(declared)
    (found,), errors = producer.attempt([out], removes=True)
    for error in errors.values():
        raise explained(declared, error)
    return RemoveResult(found.status, topic, out.member)


async def asend_message(topic: str, body: Any, **options: Any) -> SendResult:
    """Send as ``send_message`` does, from a coroutine, in the thread that has its database connections."""
    return await sync_to_async(send_message)(topic, body, **options)


async def asend_messages(topic: str, bodies: Iterable[Any], **options: Any) -> SendResults:
    """Send as ``send_messages`` does, from a coroutine."""
    return await sync_to_async(send_messages)(topic, bodies, **options)


async def aensure_message(topic: str, body: Any, **options: Any) -> SendResult:
    """Send as ``ensure_message`` does, from a coroutine."""
    return await sync_to_async(ensure_message)(topic, body, **options)


async def aremove_message(topic: str, body: Any = None, **options: Any) -> RemoveResult:
    """Remove as ``remove_message`` does, from a coroutine."""
    return await sync_to_async(remove_message)(topic, body, **options)


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
            outgoing = outgoing._replace(act="ensure")
        seen = []
        if observers:
            seen = [(body, {name: value for name, value in options.items() if value is not None})]
        connection = _transaction(on_commit, using)
        (result,) = results = _dispatch(producer, topic, [outgoing], seen, wanted, connection)
        span.note(results)
        if connection is None and result.status == "refused":
            raise too_full(topic, result)
    return result


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
    delivers = not watching or all(observer.delivers for observer in watching)
    if connection is not None:
        to = producer if delivers else None
        results: list[SendResult] = [*defer(to, topic, built, wanted, connection)]
    elif not delivers:
        results = [went_nowhere(out, wanted) for out in built]
    else:
        connections.agree(topic)
        results, errors = producer.attempt(built, wanted)
        for error in errors.values():
            raise explained(topic, error)
        announcing.sent(topic.name, results)
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
        raise explained(topic, error) from error
    if announcing.are_sends_watched():
        announcing.sent(topic.name, results[before:])


def _so_far(results: SendResults) -> str:
    return f"; the {len(results)} before it have been sent" if results else ""
