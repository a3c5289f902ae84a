"""Sending from Django: the path of each message of a view, the admin, REST or a command.

The functions validate a message at the call. Inside a database transaction the message then waits for the commit
(unless ``on_commit=False``, or ``RMQ["ON_COMMIT"]`` is False): ``sending.on_commit`` has that part. Outside a
transaction the producer sends it at once. ``remove_message`` and ``cancel_message`` take the same path.

A transaction belongs to a thread, so a send from a coroutine has to run in the thread of Django's ORM. A send that neither a
transaction nor a receiver of signals concerns needs no thread: it may go over the connection that its event loop shares.

Score and slot come from ``producer.placement``, as do the checks of options and times; which sends are one message is decided in
``producer.identity``.

Tests see every send through ``observers``. This module ends at the producer, which talks to Redis: ``attempt``,
``attempt_shared`` and ``send_bodies``. The relay begins there, and so does Spark. Ticks of schedules are sent in
``core/schedules``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial, wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import DEFAULT_DB_ALIAS
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.timezone import get_default_timezone

from django_rmq import connections, observability, open_transactions, outbox
from django_rmq.conf import did_you_mean, get_config
from django_rmq.core.commands.broker_interface import batched
from django_rmq.core.model.body_codec import encode_body
from django_rmq.core.model.envelope import key_of
from django_rmq.core.model.send_results import (
    STORED,
    Durability,
    RemoveResult,
    SendResult,
    SendResults,
    too_full,
)
from django_rmq.core.model.topic import Topic, former_slot_counts, slot_counts
from django_rmq.core.producer.bulk_send import ROUND_TRIP, takes_bodies
from django_rmq.core.producer.placement import (
    OPTIONS,
    Outgoing,
    Send,
    SendOptions,
    in_milliseconds,
    option_of,
    slot_crc,
    slot_of,
    slot_of_crc,
)
from django_rmq.core.producer.producer import Producer, check_durability, found_nothing
from django_rmq.durations import Duration
from django_rmq.exceptions import CallerError, InvalidMessage, RmqError, SlotMoved
from django_rmq.message_ids import (
    ALL_ROUNDS,
    ID_IS_WHOLE,
    LocatedMessage,
    MessageIdentity,
    find_held,
    find_moved,
    identify_for_program,
)
from django_rmq.sending.on_commit import (
    commit_to_wait_for,
    defer,
    defer_removal,
    explained,
    rows_waiting,
    went_nowhere,
)

P = ParamSpec("P")
R = TypeVar("R")


Shortcut = Callable[[tuple[object, ...], Mapping[str, object]], Coroutine[object, object, R | None]]
"""A function that does a call without a thread, or returns None if it cannot; it takes the arguments of the call."""


def coroutine_of(
    function: Callable[P, R], shortcut: Shortcut[R] | None = None
) -> Callable[P, Coroutine[object, object, R]]:
    """Return a coroutine function that does the same as ``function``, by ``shortcut`` where that is possible.

    It has the signature of ``function``. So each parameter is declared once, and type checkers and editors know them all.
    """
    called = sync_to_async(function)

    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if shortcut is not None:
            result = await shortcut(args, kwargs)
            if result is not None:
                return result
        return await called(*args, **kwargs)

    call.__name__ = call.__qualname__ = f"a{function.__name__}"
    shared = "" if shortcut is None else " or over the connection that its event loop shares"
    call.__doc__ = f"Do the same as ``{function.__name__}`` from a coroutine, in the thread of its database connections{shared}."
    return call


class Observer(Protocol):
    """Sees every send, for tests. If ``delivers`` is False, nothing is sent."""

    delivers: bool

    def see(self, outgoing: Outgoing, body: object, options: SendOptions, result: SendResult) -> None:
        """Record a validated message; ``result`` is completed later if it waits for a commit."""


observers: list[Observer] = []
"""For ``testing``: the observers of every send of this process, from any thread."""


def dispatch(
    producer: Producer,
    topic: Topic,
    built: list[Outgoing],
    seen: list[tuple[object, SendOptions]],
    wanted: Durability,
    connection: BaseDatabaseWrapper | None,
    using: str | None = None,
) -> tuple[list[SendResult], RmqError | None]:
    """Send validated messages of ``topic``, or defer them to the commit of ``connection``.

    Return a result for each, and the error of the first one that has no outcome: its ``sent`` is the index of that one.

    ``seen``: the body and the options of each message, for observers. ``using``: the database whose outbox may have
    older states of the messages that are sent at once.
    """
    # A test may add an observer in another thread meanwhile. One list decides for the whole call.
    watching = list(observers)
    delivers = all(observer.delivers for observer in watching)
    errors: dict[int, RmqError] = {}
    if connection is not None:
        to = producer if delivers else None
        results: list[SendResult] = [*defer(to, topic, built, wanted, connection)]
    elif not delivers:
        results = [went_nowhere(out, wanted) for out in built]
    else:
        connections.agree(topic)
        older = outbox.DirectSend(built, using, rows_waiting(using)) if topic.outbox else None
        results, errors = producer.attempt(built, wanted)
        if older is not None:
            older.conclude(results)
        observability.announce_sent(topic.name, results)
    for observer in watching:
        for index, (out, (body, options), result) in enumerate(zip(built, seen, results, strict=True)):
            if index not in errors:
                observer.see(out, body, options, result)
    if not errors:
        return results, None
    error = explained(topic, errors[min(errors)])
    error.sent = min(errors)
    return results, error


_NOT_SHARED = {"slot_basis", "headers", "expires", "max_retries", "timeout"}
"""Options for which each message is checked, so the fast path for equal options does not take them."""


class ChunkedSend:
    """The messages of one call of ``send_messages``, chunk by chunk."""

    def __init__(
        self,
        topic: Topic,
        shared: SendOptions,
        wanted: Durability,
        connection: BaseDatabaseWrapper | None,
        using: str | None,
    ) -> None:
        self.results = SendResults(topic.name)
        self.under_way = 0
        """The number of messages of which it is not known whether they have been sent."""
        self._topic = topic
        self._producer = connections.get_producer()
        self._shared = shared
        self._times = options_in_ms(topic, shared)
        """The shared options as the producer takes them."""
        self._wanted = wanted
        self._connection = connection
        self._using = using
        self._is_plain = (
            connection is None
            and not topic.outbox
            and takes_bodies(topic)
            and not _NOT_SHARED & set(shared)
            and wanted == STORED
        )

    def send(self, chunk: Sequence[object], call: observability.SendObservation) -> None:
        """Send bodies and ``Send``s, at once or at the commit; add their results to ``results``."""
        self.under_way = len(chunk)
        self._send(chunk, call)
        self.under_way = 0

    def count_in(self, error: Exception) -> None:
        """Let an exception say how many messages were sent before it."""
        # The messages of a transaction have not been sent yet, so none was sent before the error.
        if self._connection is not None or not self.results:
            return
        if isinstance(error, RmqError):
            error.sent = len(self.results)
        if not isinstance(error, CallerError):
            error.add_note(f"send_messages had sent {len(self.results)} messages before")

    def _send(self, chunk: Sequence[object], call: observability.SendObservation) -> None:
        # Observers see each message, and a ``Send`` has options of its own, so both need the slower path.
        if self._is_plain and not observers and Send not in set(map(type, chunk)):
            self._send_plain(chunk)
            return
        built, seen = [], []
        for index, item in enumerate(chunk, len(self.results)):
            body, options, times = item, self._shared, self._times
            try:
                if isinstance(item, Send):
                    body, options = item.body, {**self._shared, **item.options()}
                    times = options_in_ms(self._topic, options)
                built.append(self._producer.build(self._topic, body, **call.options(times)))
            except CallerError as error:
                raise error.reworded(f"item {index}: {error}{self._so_far()}") from None
            seen.append((body, options))
        results, failure = dispatch(
            self._producer, self._topic, built, seen, self._wanted, self._connection, self._using
        )
        if failure is not None:
            self.results.extend(results[: failure.sent])
            self.under_way -= failure.sent
            raise failure
        self.results.extend(results)

    def _send_plain(self, bodies: Sequence[object]) -> None:
        """Send bodies that share all options, at once."""
        connections.agree(self._topic)
        before = len(self.results)
        try:
            self._producer.send_bodies(self._topic, bodies, results=self.results, **self._times)
        except CallerError as error:
            # Earlier chunks have been sent, and the error says how many messages that were.
            raise error.reworded(f"{error}{self._so_far()}") from None
        except SlotMoved as error:
            # The slots refuse the slot count of this process. The explanation names both counts.
            raise explained(self._topic, error) from error
        finally:
            self.under_way -= len(self.results) - before
            if observability.are_sends_watched(self._topic.name):
                observability.announce_sent(self._topic.name, self.results[before:])

    def _so_far(self) -> str:
        return f"; the {len(self.results)} messages before it were sent" if self.results else ""


def options_in_ms(topic: Topic, options: SendOptions) -> SendOptions:
    """Return the options of a message as the producer takes them; see ``in_milliseconds``.

    Naive datetimes in them are times of ``TIME_ZONE`` if ``USE_TZ`` is False.
    """
    return in_milliseconds(topic, options, None if settings.USE_TZ else get_default_timezone())


def remove_message(
    topic: str,
    body: object = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
    id: str | None = None,  # noqa: A002 - as results of sends name it
    on_commit: bool | None = None,
    using: str | None = None,
) -> RemoveResult:
    """Take a message back. It is named by its body, by its ``key`` on a keyed topic, or by its ``id``.

    ``id`` is that of a ``SendResult`` or ``Message``, or one that the log shows (``3~...``), which is searched at the
    call.

    Returns a word for the state in which the message was. ``waiting`` and ``resting``: it is removed.
    ``running``: it ends with the current delivery, and is not tried again. ``running_and_waiting``: both.
    ``not_found``: there was none; a dead message stays.

    Inside a transaction it returns ``pending``, and the message is removed at the commit, in order with what the
    transaction sends; ``status`` then says where it was. ``on_commit`` and ``using`` are those of ``send_message``.

    Raises ``InvalidMessage`` or ``UnknownTopic`` at the call; if it is done at once, also ``ServerTrouble``.
    """
    identity = {"body": body, "key": key, "slot_basis": slot_basis, "id": id}
    return _take_back("remove", topic, identity, on_commit, using)


def cancel_message(
    topic: str,
    body: object = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
    id: str | None = None,  # noqa: A002 - as results of sends name it
    on_commit: bool | None = None,
    using: str | None = None,
) -> RemoveResult:
    """Take a message back like ``remove_message``, and notify its listener if it runs.

    ``message.cancelled`` becomes true, and ``asyncio.CancelledError`` is raised in an async listener. If it
    returns, the message is done; if it fails, it ends as cancelled and is not tried again.

    Returns the words of ``remove_message``, or ``claimed``: a Spark consumer has it, and cannot be notified. Only the
    delivery that runs now is cancelled, no later one.
    """
    identity = {"body": body, "key": key, "slot_basis": slot_basis, "id": id}
    return _take_back("cancel", topic, identity, on_commit, using)


aremove_message = coroutine_of(remove_message)
acancel_message = coroutine_of(cancel_message)


def _take_back(
    act: Literal["remove", "cancel"],
    topic: str,
    named: SendOptions,
    on_commit: bool | None,
    using: str | None,
) -> RemoveResult:
    declared = get_config().topic(topic)
    producer = connections.get_producer()
    named_by_id, body = named.pop("id"), named.pop("body")
    identity: MessageIdentity | None = None
    if named_by_id is None:
        out = producer.outgoing(declared, body, 0, **named)
    elif body is not None or any(value is not None for value in named.values()):
        raise InvalidMessage(ID_IS_WHOLE)
    else:
        identity = identify_for_program(
            connections.with_present_slots(declared), named_by_id, connections.get_broker()
        )
        outgoing = _outgoing_of_id(connections.with_present_slots(declared), identity)
        if outgoing is None:
            return RemoveResult("not_found", topic, b"")
        out = outgoing
    out = out._replace(act=act)
    connection = commit_to_wait_for(on_commit, using)
    delivers = all(observer.delivers for observer in observers)
    if connection is not None:
        return defer_removal(producer if delivers else None, declared, out, connection)
    if not delivers:
        return RemoveResult(went_nowhere(out).status, topic, out.member)
    connections.agree(declared)
    # This reads the slot counts of a re-slotting that has begun; the producer places the removal by them.
    connections.refresh_definitions()
    older = outbox.DirectSend([out], using, rows_waiting(using)) if declared.outbox else None
    (found_at,), errors = producer.attempt([out], removes=True)
    if found_nothing(found_at) and identity is not None:
        # The message is not where its member places it. The send may have named a basis, and a re-slotting moved it.
        moved = find_moved(connections.get_broker(), declared, [identity], rounds=ALL_ROUNDS).messages
        if identity in moved:
            out = _outgoing_at(connections.with_present_slots(declared), moved[identity])._replace(act=act)
            (found_at,), errors = producer.attempt([out], removes=True)
    if older is not None:
        older.conclude([found_at])
    for error in errors.values():
        raise explained(declared, error)
    return RemoveResult(found_at.status, topic, out.member)


def _outgoing_of_id(topic: Topic, identity: MessageIdentity) -> Outgoing | None:
    """Return what takes the message with this id back, or None if no slot holds the message of a sealed id."""
    at = identity if isinstance(identity, LocatedMessage) else None
    if at is None or not _is_placed_by_member(topic, at):
        # The id does not contain the basis that has placed the message, and a re-slotting may have moved it.
        # If none is held, a plain id names a message whose transaction has not committed yet; it will be in the slot of its id.
        at = find_held(connections.get_broker(), topic, identity) or at
    return None if at is None else _outgoing_at(topic, at)


def _outgoing_at(topic: Topic, at: LocatedMessage) -> Outgoing:
    """Return what takes a message back that is in a known slot."""
    crc = slot_crc(None, at.member) if _is_placed_by_member(topic, at) else at.slot
    return Outgoing(topic, at.slot, at.member, 0, crc=crc).placed(topic)


def _is_placed_by_member(topic: Topic, at: LocatedMessage) -> bool:
    return slot_of(at.member, topic.slots) == at.slot


class _NoOthers(TypedDict):
    """Options that no send has. A type checker refuses them, and at run time the error names the right option."""


def send_message(
    topic: str,
    body: object,
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
    body: object,
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

    ``id``, in place of ``key``: that of an earlier send of the same message, with the same ``slot_basis``. A topic with
    ``IDENTITY: "key"``, as one without ``TYPE`` is, needs one of them, because without a key each send is another message.
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
    bodies: Iterable[object],
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
    # Each of its characters, bytes or keys would become a message.
    if isinstance(bodies, (str, bytes, bytearray, Mapping)):
        raise TypeError(f"send_messages takes an iterable of bodies, got one {type(bodies).__name__}")
    declared, durability = get_config().topic(topic), check_durability(replicas, fsync)
    connection = commit_to_wait_for(on_commit, using)
    chunks: Iterable[Sequence[object]]
    if isinstance(bodies, (list, tuple)):
        chunks = [bodies]
    elif connection is not None:
        chunks = [list(bodies)]
    else:
        chunks = batched(bodies, ROUND_TRIP)
    bulk = ChunkedSend(declared, shared, durability, connection, using)
    with observability.observe_send(declared, waits=connection is not None) as call:
        try:
            for chunk in chunks:
                bulk.send(chunk, call)
        except Exception as error:
            bulk.count_in(error)
            raise
        finally:
            call.note(bulk.results, bulk.under_way)
    return bulk.results


def send_outgoing(outgoing: Outgoing, body: object) -> SendResult:
    """Send at once a message that was already validated and placed; ``body`` is what observers are shown.

    For operations, which use a slot and a score that no option can express. Raises the errors of
    ``send_message``.
    """
    topic = outgoing.topic
    (result,), error = dispatch(connections.get_producer(), topic, [outgoing], [(body, {})], STORED, None)
    if error is not None:
        raise error
    if result.status == "refused":
        raise too_full(topic, result)
    return result


_SHAREABLE = OPTIONS.keys() | {"on_commit"}
"""The arguments of a send that does not need the thread of its database connections."""


async def _send_shared(
    act: Literal["send", "ensure"], args: tuple[Any, ...], given: SendOptions
) -> SendResult | None:
    """Send one message over the connection that the event loop shares, or return None if its thread has to send it.

    The thread has the transactions, and the code of others that may block: observers, typed bodies and receivers of signals.
    """
    # A call of any other form goes the longer way, whose function reports its mistakes.
    if len(args) != 2 or not given.keys() <= _SHAREABLE or observers or not isinstance(args[0], str):
        return None
    config, (name, body) = get_config(), args
    topic = config.topics.get(name)
    if topic is None or topic.outbox or topic.typed is not None or not connections.is_agreed(topic):
        return None
    options = _given(**given)
    # The longer way refuses a message without a name.
    if act == "ensure" and topic.keyed and "key" not in options:
        return None
    # ``commit_to_wait_for`` decides on the longer way. The transaction may be one of another thread; then that way is as correct.
    if options.pop("on_commit", config.on_commit) and open_transactions.is_any_open(DEFAULT_DB_ALIAS):
        return None
    connection = connections.get_shared_connection()
    if connection is None:
        return None
    producer = connections.get_producer()
    with observability.observe_send(topic, waits=False) as call:
        outgoing = producer.build(topic, body, **call.options(options_in_ms(topic, options)))
        if producer.has_bases_to_note:
            await sync_to_async(producer.note_slot_bases)()
        if act == "ensure":
            outgoing = outgoing._replace(act="ensure")
        try:
            result = await producer.attempt_shared(outgoing, connection)
        except SlotMoved:
            # The slot has refused the message, and the thread follows the topic to its present slots.
            (result,), errors = await sync_to_async(producer.attempt)([outgoing])
            for error in errors.values():
                raise await sync_to_async(explained)(topic, error) from None
        call.note([result])
        if observability.are_sends_watched(topic.name):
            await sync_to_async(observability.announce_sent)(topic.name, [result])
        if result.status == "refused":
            raise too_full(topic, result)
    return result


asend_message = coroutine_of(send_message, partial(_send_shared, "send"))
asend_messages = coroutine_of(send_messages)
aensure_message = coroutine_of(ensure_message, partial(_send_shared, "ensure"))


def _unknown_option(function: Callable[..., object], name: object, unknown: Iterable[str]) -> TypeError:
    """Return the error about an option that ``function`` does not have; it says which one the topic takes."""
    # The last parameter is ``unknown`` itself.
    option, options = next(iter(unknown)), list(signature(function).parameters)[:-1]
    text = f"{function.__name__}() has no option {option!r}{did_you_mean(option, options)}"
    declared = get_config().topics.get(name) if isinstance(name, str) else None
    if declared is None:
        return TypeError(text.removesuffix("."))
    return TypeError(
        f"{text} Topic {name} has the type {declared.type.value} and takes {option_of(declared)}"
    )


def _given(**options: object) -> SendOptions:
    """Return those options of a message that the caller has given."""
    return {name: value for name, value in options.items() if value is not None}


def _send_one(
    name: str,
    body: object,
    options: SendOptions,
    ensure: bool,
    wanted: Durability,
    on_commit: bool | None,
    using: str | None,
    identity: MessageIdentity | None = None,
) -> SendResult:
    topic = get_config().topic(name)
    if ensure and topic.keyed and "key" not in options:
        raise InvalidMessage(
            f"topic {name} has IDENTITY 'key', so without a key each send is another message: pass key= or id="
        )
    producer = connections.get_producer()
    connection = commit_to_wait_for(on_commit, using)
    with observability.observe_send(topic, waits=connection is not None) as call:
        times = options_in_ms(topic, options)
        outgoing = producer.build(topic, body, **call.options(times))
        if identity is not None:
            _check_slot(outgoing, identity)
        if ensure:
            outgoing = outgoing._replace(act="ensure")
        (result,), error = dispatch(producer, topic, [outgoing], [(body, options)], wanted, connection, using)
        if error is not None:
            raise error
        call.note([result])
        if connection is None and result.status == "refused":
            raise too_full(topic, result)
    return result


def _named_by(
    topic: Topic, body: object, options: SendOptions, name: str
) -> tuple[MessageIdentity, SendOptions]:
    """Return the slot and the member of an id, and the options with which its message is sent again."""
    if "key" in options:
        raise InvalidMessage("give key= or id=, not both")
    identity = identify_for_program(connections.with_present_slots(topic), name, connections.get_broker())
    # A sealed id has a digest in place of the member, so the slot has to be searched for the message.
    at = identity if isinstance(identity, LocatedMessage) else None
    at = at or find_held(connections.get_broker(), topic, identity)
    if at is None:
        raise InvalidMessage(
            f"topic {topic.name} holds no message with the id {name}: give its key, or only its body"
        )
    if not topic.keyed:
        if encode_body(topic, body) != at.member:
            raise InvalidMessage("the id is not that of a message with this body")
        return at, options
    key = key_of(topic, at.member)
    if key is None:
        raise InvalidMessage("the message of this id was sent without a key, so each send is another message")
    return at, {**options, "key": key}


def _check_slot(outgoing: Outgoing, identity: MessageIdentity) -> None:
    """Raise ``InvalidMessage`` if a message would not be sent to the slot of its id, whatever slots its topic had."""
    crc, topic = outgoing.crc or 0, outgoing.topic
    if slot_of_crc(crc, topic.slots) == identity.slot:
        return
    # The id may be older than a re-slotting, so every slot count that the topic has had is tried.
    definition = connections.get_broker().definitions().get(topic.name)
    counts = (*slot_counts(definition), *former_slot_counts(definition)) if definition else (topic.slots,)
    if not any(slot_of_crc(crc, count) == identity.slot for count in counts):
        raise InvalidMessage(
            f"the message of this id is in slot {identity.slot}, and this one belongs into slot {outgoing.slot}: pass the "
            "slot_basis= of its send"
        )
