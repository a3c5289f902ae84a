"""Sends of an actor: the permission and the record around ``django_rmq.sending``, and the limits on them.

An actor may send so much in a time, and a request with an Idempotency-Key runs only once. Redis keeps the rates of actors, and
the answers of these requests. So both apply to all web processes together, and expire by themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from django_rmq.conf.parsers import count_and_seconds
from django_rmq.core.commands import limits, stored_results
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.body_codec import dumps
from django_rmq.core.model.send_results import SendResult, SendResults, too_full
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import (
    ConfigurationError,
    InvalidRequest,
    OperationRefused,
    RmqError,
    TooManySends,
)
from django_rmq.message_ids import sealed_id
from django_rmq.operations.audit_trail import record
from django_rmq.operations.authorization import Actor, OperationContext, Permission, require_search
from django_rmq.sending import Send, ensure_message, send_message, send_messages


def send(context: OperationContext, name: str, body: object, **options: Any) -> SendResult:
    """Send one message at once; ``options`` are those of ``send_message``. Raises its errors."""
    context.declared(name, Permission.SEND)
    result = send_message(name, body, on_commit=False, **options)
    record(context.actor, "send", name, {result.status: 1}, sealed_id(name, result.slot, result.member))
    return result


def ensure(
    context: OperationContext, name: str, one: Send, *, message_id: str | None = None, entry: bool = True
) -> SendResult:
    """Send one message at once, unless it already waits, rests or runs (``present``).

    ``message_id``: that of an earlier send, in place of a key. ``entry``: whether the admin's history shows it. Raises
    the errors of ``ensure_message``, and with an id those of ``require_search``.
    """
    topic = context.declared(name, Permission.SEND)
    if message_id is not None:
        # The answer shows whether the message of the id has this body.
        require_search(context.actor, topic.name)
    result = ensure_message(name, one.body, id=message_id, on_commit=False, **one.options())
    sealed = sealed_id(name, result.slot, result.member)
    record(context.actor, "send", name, {result.status: 1}, sealed, entry=entry)
    return result


def send_many(
    context: OperationContext, name: str, bodies: Sequence[object], **options: Any
) -> dict[str, int]:
    """Send many messages at once; return the number of each status. Nothing is sent if one is invalid."""
    context.declared(name, Permission.SEND)
    results = send_messages(name, bodies, on_commit=False, **options)
    outcomes = dict(results.counts())
    record(context.actor, "send", name, outcomes)
    return outcomes


def send_each(context: OperationContext, name: str, sends: Sequence[Send]) -> SendResults:
    """Send messages with their own options at once, for a program; return the result of each.

    Like ``send_many``, but without a LogEntry. Raises ``TopicFull`` if all of them were refused.
    """
    topic = context.declared(name, Permission.SEND)
    results = send_messages(name, list(sends), on_commit=False)
    outcomes = results.counts()
    record(context.actor, "send", name, dict(outcomes), entry=False)
    if 0 < outcomes["refused"] == len(results):
        raise too_full(topic, results[0])
    return results


def body_schema(topic: Topic) -> dict[str, Any] | None:
    """Return the JSON schema of what may be sent to ``topic``.

    Return None if the topic takes any body, or its type has no schema, or cannot be used. A system check reports an
    unusable type, and everything else about the topic is shown all the same.
    """
    try:
        return None if topic.typed is None else topic.typed.schema()
    except ConfigurationError:
        return None


ATTEMPT_MS = 30_000
"""Milliseconds for which a repeated request waits for a silent attempt; then the attempt counts as dead, and
runs again."""

KEPT_MS = 86_400_000
"""Milliseconds for which an answer is kept: a day. The schema of REST says "once a day"."""


class SendCharge(NamedTuple):
    """The part of a sender's rate that a send uses: ``size`` in ``seconds``, at once or evenly."""

    what: str
    """The unit that is counted. Each has its own bucket."""
    wanted: int
    size: int
    seconds: float

    def spend(self, broker: Broker, actor: Actor, wanted: int) -> int:
        """Spend this much, or nothing; return the time in µs until there is enough, or 0 if it is spent.

        Below 0 gives back.
        """
        return broker.run(
            limits.spend(_name(actor, self.what), self.seconds * 1e6 / self.size, self.size, wanted)
        )


def spend(broker: Broker, actor: Actor, charges: Sequence[SendCharge]) -> None:
    """Charge ``actor`` with all ``charges``, or with none of them.

    Raises ``TooManySends``, and ``InvalidRequest`` for more than the limit ever permits.
    """
    for one in charges:
        if one.wanted > one.size:
            raise InvalidRequest(
                f"{one.wanted} {one.what} in one request exceed the limit of {one.size} in {one.seconds:g} s"
            )
    for index, one in enumerate(charges):
        wait_us = one.spend(broker, actor, one.wanted)
        # A request that another limit refuses costs nothing, so the charges before it are given back.
        if wait_us:
            _give_back(broker, actor, charges[:index])
            raise TooManySends(
                f"the limit of {one.size} {one.what} in {one.seconds:g} s is reached: send {one.wanted} "
                f"more in {wait_us / 1e6:.1f} s",
                wait_us / 1e6,
            )


def _give_back(broker: Broker, actor: Actor, charges: Sequence[SendCharge]) -> None:
    for one in charges:
        one.spend(broker, actor, -one.wanted)


def spend_sends(context: OperationContext, messages: int, size: int) -> None:
    """Charge the actor with this many messages, of ``size`` bytes in all, under the limits of ``RMQ["API"]``.

    Raises ``TooManySends``, and ``InvalidRequest`` for more than the limit ever permits.
    """
    context.actor.require(Permission.SEND)
    charge(context, messages, size)


def charge(context: OperationContext, messages: int, size: int) -> None:
    """Do what ``spend_sends`` does, for other actions that send. Their permissions are their own."""
    api = context.config.api
    charges = _charges({"messages": (messages, api.send_rate), "bytes": (size, api.send_bytes)})
    spend(context.broker, context.actor, charges)


def _charges(rates: Mapping[str, tuple[int, str | None]]) -> list[SendCharge]:
    """Return the charges for which there is a rate and an amount."""
    return [
        SendCharge(what, wanted, *count_and_seconds(rate))
        for what, (wanted, rate) in rates.items()
        if rate and wanted
    ]


class RequestRunning(OperationRefused):
    """The same request is running now."""


class OtherContent(OperationRefused):
    """The key was used for a request with other content."""


@dataclass(slots=True)
class RequestAttempt:
    """One attempt at a request that must run only once."""

    answer: object = None
    """The answer of an earlier attempt, or None if this is the first one, which must call ``done``."""
    kept: bytes = b""

    def done(self, answer: object) -> None:
        """Store the answer, as JSON takes it."""
        self.answer = answer
        self.kept = json.dumps(answer, separators=(",", ":")).encode()


@contextmanager
def once(context: OperationContext, key: str, content: object, messages: int) -> Iterator[RequestAttempt]:
    """Run a send of N messages, which the actor names by ``key``, only once: a repeated one gets the same answer.

    A failed attempt is forgotten, so that it can be repeated. An attempt whose process dies counts as dead
    after half a minute. A rate limits the number of kept answers of one actor. Only a first attempt is
    charged, so a request that was answered once always gets that answer. Raises ``OtherContent``,
    ``RequestRunning`` and the errors of ``spend``.
    """
    broker, actor = context.broker, context.actor
    actor.require(Permission.SEND)
    name, token = _name(actor, key), uuid4().hex
    # A client that repeats a request may write the names of an object in another order.
    fingerprint = hashlib.sha256(dumps(content, sort_keys=True).encode()).hexdigest()
    word, answer = broker.run(stored_results.begin_request(name, fingerprint, token, ATTEMPT_MS))
    if word == "other":
        raise OtherContent("this Idempotency-Key was used for a different request")
    if word == "running":
        raise RequestRunning("this request is being processed now: repeat it in a moment")
    if word == "done":
        yield RequestAttempt(json.loads(answer))
        return
    attempt, charged = RequestAttempt(), False
    charges = _charges({"messages with an Idempotency-Key": (messages, context.config.api.idempotent_rate)})
    try:
        spend(broker, actor, charges)
        charged = True
        yield attempt
    finally:
        try:
            broker.run(stored_results.store_answer(name, token, attempt.kept, KEPT_MS))
            # The attempt has failed. Redis forgets it, so it may be repeated, and its charge would count twice.
            if charged and not attempt.kept:
                _give_back(broker, actor, charges)
        except RmqError:
            # The request has been done, and losing its stored answer is better than reporting an error.
            pass


def _name(actor: Actor, key: str = "") -> str:
    # Names of actors and keys of clients may hold any character, and the key in Redis only letters and digits.
    who = actor.user or actor.name
    return hashlib.sha256(f"{actor.via}\n{who}\n{key}".encode()).hexdigest()[:32]
