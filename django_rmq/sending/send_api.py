"""Sending from Django: the single path of every message, whether from a view, the admin, REST or a command.

A message is validated at the call. Inside a database transaction it then waits for the commit (unless
``on_commit=False``, or ``RMQ["ON_COMMIT"]`` is False); ``on_commit`` has the rest. Outside a transaction it is sent at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from inspect import signature
from typing import Any, TypedDict, Unpack

from django_rmq import connections
from django_rmq.conf import did_you_mean, get_config
from django_rmq.core.model.body_codec import encode_body
from django_rmq.core.model.message_content import key_of
from django_rmq.core.model.send_results import (
    STORED,
    Durability,
    SendResult,
    SendResults,
)
from django_rmq.core.model.topic import Topic, former_slot_counts, slot_counts
from django_rmq.core.producer.placement import Outgoing
from django_rmq.core.producer.send_trips import ROUND_TRIP, batched
from django_rmq.core.producer.validation import check_durability, option_of
from django_rmq.durations import Duration
from django_rmq.exceptions import InvalidMessage
from django_rmq.message_ids import MessageIdentity, find_held, identify_for_program
from django_rmq.observability import telemetry
from django_rmq.sending.bulk import ChunkedSend, options_in_ms
from django_rmq.sending.coroutines import coroutine_of
from django_rmq.sending.dispatch import commit_to_wait_for, dispatch
from django_rmq.sending.send_failures import too_full


class _NoOthers(TypedDict):
    """Options that no send has, so that a type checker refuses them. At run time their error names the right one."""


def send_message(
    topic: str,
    body: Any,
    *,
    key: str | None = None,
    priority: int | None = None,
    time_range: Duration | None = None,
    fixed_time: datetime | None = None,
    delay: Duration | None = None,
    slot_basis: object = None,
    headers: Mapping[str, str] | None = None,
    expires: datetime | None = None,
    max_retries: int | None = None,
    timeout: Duration | None = None,
    replicas: int = 0,
    fsync: bool = False,
    on_commit: bool | None = None,
    using: str | None = None,
    **unknown: Unpack[_NoOthers],
) -> SendResult:
    """Send ``body`` to ``topic`` and return its result, which is ``pending`` inside a transaction.

    ``time_range``, ``delay`` and ``timeout`` are seconds, a timedelta, or text such as "250ms" or "15m".
    ``fixed_time`` and ``expires`` are aware datetimes (naive ones with USE_TZ = False). ``key``, ``headers``,
    ``expires``, ``max_retries`` and ``timeout`` need IDENTITY "key". ``max_retries`` and ``timeout`` are at most
    those of the topic. ``slot_basis`` chooses the slot:
    messages of equal basis run one after the other. ``using`` names the database whose commit to wait for.
    ``replicas``: wait until this many replicas of Redis have it; ``fsync``: until it is on the primary's disk. Each
    waits for at most 0.4 s in a web process; the result says what was reached.

    Raises ``InvalidMessage`` or ``UnknownTopic`` at the call; if it is sent at once, also ``TopicFull``,
    ``SlotMoved`` and ``ServerTrouble``.
    """
    if unknown:
        raise _unknown_option(send_message, topic, unknown)
    options = _given(
        key=key,
        priority=priority,
        time_range=time_range,
        fixed_time=fixed_time,
        delay=delay,
        slot_basis=slot_basis,
        headers=headers,
        expires=expires,
        max_retries=max_retries,
        timeout=timeout,
    )
    return _send_one(topic, body, options, False, check_durability(replicas, fsync), on_commit, using)


def ensure_message(
    topic: str,
    body: Any,
    *,
    key: str | None = None,
    priority: int | None = None,
    time_range: Duration | None = None,
    fixed_time: datetime | None = None,
    delay: Duration | None = None,
    slot_basis: object = None,
    headers: Mapping[str, str] | None = None,
    expires: datetime | None = None,
    max_retries: int | None = None,
    timeout: Duration | None = None,
    id: str | None = None,  # noqa: A002 - as results of sends name it
    replicas: int = 0,
    fsync: bool = False,
    on_commit: bool | None = None,
    using: str | None = None,
    **unknown: Unpack[_NoOthers],
) -> SendResult:
    """Send like ``send_message``, unless the message already waits, rests or is in flight (``present``).

    ``id``, in place of ``key``: that of an earlier send of the same message, with the same ``slot_basis``.
    """
    if unknown:
        raise _unknown_option(ensure_message, topic, unknown)
    options = _given(
        key=key,
        priority=priority,
        time_range=time_range,
        fixed_time=fixed_time,
        delay=delay,
        slot_basis=slot_basis,
        headers=headers,
        expires=expires,
        max_retries=max_retries,
        timeout=timeout,
    )
    durability = check_durability(replicas, fsync)
    if id is None:
        return _send_one(topic, body, options, True, durability, on_commit, using)
    identity, options = _named_by(get_config().topic(topic), body, options, id)
    return _send_one(topic, body, options, True, durability, on_commit, using, identity)


def send_messages(
    topic: str,
    bodies: Iterable[Any],
    *,
    priority: int | None = None,
    time_range: Duration | None = None,
    fixed_time: datetime | None = None,
    delay: Duration | None = None,
    slot_basis: object = None,
    headers: Mapping[str, str] | None = None,
    expires: datetime | None = None,
    max_retries: int | None = None,
    timeout: Duration | None = None,
    replicas: int = 0,
    fsync: bool = False,
    on_commit: bool | None = None,
    using: str | None = None,
    **unknown: Unpack[_NoOthers],
) -> SendResults:
    """Send many messages to one topic and return the result of each, in order.

    ``bodies`` are bodies, or ``Send(body, priority=…)`` for a message with options of its own. A list or tuple is
    validated before anything is written; any other iterable in chunks of some thousands (inside a transaction: all of
    it, at the call). ``InvalidMessage`` names the index of the item. If a later chunk fails, those before it stay
    sent: ``sent`` of the error, or a note of it, says how many.

    A full slot raises nothing here: the results of its messages say ``refused``.
    """
    if unknown:
        raise _unknown_option(send_messages, topic, unknown)
    shared = _given(
        priority=priority,
        time_range=time_range,
        fixed_time=fixed_time,
        delay=delay,
        slot_basis=slot_basis,
        headers=headers,
        expires=expires,
        max_retries=max_retries,
        timeout=timeout,
    )
    if isinstance(bodies, (str, bytes, bytearray, Mapping)):
        raise TypeError(f"send_messages takes an iterable of bodies, got one {type(bodies).__name__}")
    declared, wanted = get_config().topic(topic), check_durability(replicas, fsync)
    connection = commit_to_wait_for(on_commit, using)
    chunks: Iterable[Sequence[Any]]
    if isinstance(bodies, (list, tuple)):
        chunks = [bodies]
    elif connection is not None:
        chunks = [list(bodies)]
    else:
        chunks = batched(bodies, ROUND_TRIP)
    bulk = ChunkedSend(declared, shared, wanted, connection, using)
    with telemetry.sending(declared, waits=connection is not None) as call:
        try:
            for chunk in chunks:
                bulk.send(chunk, call)
        except Exception as error:
            bulk.count_in(error)
            raise
        finally:
            call.note(bulk.results, bulk.under_way)
    return bulk.results


def send_outgoing(outgoing: Outgoing, body: Any) -> SendResult:
    """Send at once a message that was already validated and placed; ``body`` is what observers are shown.

    For operations, which use a slot and a score that no option can express. Raises the errors of
    ``send_message``.
    """
    topic = outgoing.topic
    (result,) = dispatch(connections.get_producer(), topic, [outgoing], [(body, {})], STORED, None)
    if result.status == "refused":
        raise too_full(topic, result)
    return result


asend_message = coroutine_of(send_message)
asend_messages = coroutine_of(send_messages)
aensure_message = coroutine_of(ensure_message)


def _unknown_option(function: Callable[..., Any], name: object, unknown: Iterable[str]) -> TypeError:
    """Return the error about an option that ``function`` does not have; it says which one the topic takes."""
    option, known = next(iter(unknown)), list(signature(function).parameters)[:-1]
    text = f"{function.__name__}() has no option {option!r}{did_you_mean(option, known)}"
    declared = get_config().topics.get(name) if isinstance(name, str) else None
    if declared is None:
        return TypeError(text.removesuffix("."))
    return TypeError(
        f"{text} Topic {name} has the type {declared.type.value} and takes {option_of(declared)}"
    )


def _given(**options: Any) -> dict[str, Any]:
    """Return those options of a message that the caller has given."""
    return {name: value for name, value in options.items() if value is not None}


def _send_one(
    name: str,
    body: Any,
    options: dict[str, Any],
    ensure: bool,
    wanted: Durability,
    on_commit: bool | None,
    using: str | None,
    identity: MessageIdentity | None = None,
) -> SendResult:
    topic = get_config().topic(name)
    producer = connections.get_producer()
    connection = commit_to_wait_for(on_commit, using)
    with telemetry.sending(topic, waits=connection is not None) as call:
        times = options_in_ms(topic, options)
        outgoing = producer.build(topic, body, **call.options(times))
        if identity is not None:
            _check_slot(outgoing, identity)
        if ensure:
            outgoing = outgoing._replace(act="ensure")
        (result,) = results = dispatch(
            producer, topic, [outgoing], [(body, options)], wanted, connection, using
        )
        call.note(results)
        if connection is None and result.status == "refused":
            raise too_full(topic, result)
    return result


def _named_by(
    topic: Topic, body: Any, options: dict[str, Any], name: str
) -> tuple[MessageIdentity, dict[str, Any]]:
    """Return the slot and the member of an id, and the options with which its message is sent again."""
    if "key" in options:
        raise InvalidMessage("give key= or id=, not both")
    identity = identify_for_program(connections.present(topic), name)
    if identity.member is None:
        held = find_held(connections.get_broker(), topic, identity)
        if held is None or held.member is None:
            raise InvalidMessage(
                f"topic {topic.name} holds no message with the id {name}: give its key, or only its body"
            )
        identity = held
    member = identity.member or b""
    if not topic.keyed:
        if encode_body(topic, body) != member:
            raise InvalidMessage("the id is not that of a message with this body")
        return identity, options
    key = key_of(topic, member)
    if key is None:
        raise InvalidMessage("the message of this id was sent without a key, so each send is another message")
    return identity, {**options, "key": key}


def _check_slot(outgoing: Outgoing, identity: MessageIdentity) -> None:
    """Raise ``InvalidMessage`` if a message would not be sent to the slot of its id, whatever slots its topic had."""
    crc, topic = outgoing.crc or 0, outgoing.topic
    if crc & (topic.slots - 1) == identity.slot:
        return
    definition = connections.get_broker().definitions().get(topic.name)
    counts = (*slot_counts(definition), *former_slot_counts(definition)) if definition else (topic.slots,)
    if not any(crc & (count - 1) == identity.slot for count in counts):
        raise InvalidMessage(
            f"the message of this id is in slot {identity.slot}, and this one belongs into slot {outgoing.slot}: pass the "
            "slot_basis= of its send"
        )
