"""Tracing by OpenTelemetry (extra ``otel``), if ``RMQ["TRACING"]`` is on: the names and attributes of spans.

A send is a span ``send <topic>``, a call of a listener a span ``process <topic>``. On topics with IDENTITY
"key" the sender's context travels in the message's headers, as written by the propagators of the process
(``traceparent``), and the call is linked to it. It is linked rather than a child, because a message may be
merged, wait for days, and be tried again. A topic whose body is the identity carries only bodies, and a trace
in them would keep equal messages from merging, so its spans have no links.

Only the API is used: without an SDK set up by the project, spans do nothing. The attributes are those of the
semantic conventions for messaging as of 1.38 (still in development); they are written only here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from django_rmq.core.producer.checks import MAX_HEADER_BYTES
from django_rmq.core.words import discretion
from django_rmq.core.words.messages import Message
from django_rmq.core.words.results import SendResult
from django_rmq.core.words.topics import Topic
from django_rmq.project.settings import get_config

if TYPE_CHECKING:
    from opentelemetry.trace import Link, Span, Tracer

logger = logging.getLogger("django_rmq.tracing")

SYSTEM = "messaging.system"
TOPIC = "messaging.destination.name"
SLOT = "messaging.destination.partition.id"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
COUNT = "messaging.batch.message_count"
MESSAGE_ID = "messaging.message.id"
OUTCOME = "rmq.outcome"
"""Attribute of a send: its outcome, such as stored or merged."""
RETRIES_LEFT = "rmq.retries_left"
FAILED = "rmq.failed"
"""Attribute of a batch: how many messages the listener failed."""

MOST_LINKS = 128
"""The number of links that an SDK keeps for a span by default."""


def is_on() -> bool:
    """Return whether spans are switched on in the settings."""
    return get_config().tracing


def _tracer() -> Tracer:
    from opentelemetry import trace

    from django_rmq import __version__

    return trace.get_tracer("django_rmq", __version__)


# --- sending


class Sending:
    """One call that sends, without a span."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a message, with the headers that link its processing to this call."""
        return options

    def note(self, results: Sequence[SendResult]) -> None:
        """Record the outcomes of the messages."""


class _TracedSending(Sending):
    def __init__(self, topic: Topic, span: Span) -> None:
        self._topic = topic
        self._span = span
        self._carrier: dict[str, str] = {}
        if topic.keyed:
            from opentelemetry import propagate

            propagate.inject(self._carrier)

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        given = options.get("headers") or {}
        # The producer reports headers that are not a mapping.
        if not self._carrier or not isinstance(given, Mapping):
            return options
        headers = {**self._carrier, **given}
        try:
            fits = len(json.dumps(headers).encode()) <= MAX_HEADER_BYTES
        except (TypeError, ValueError):
            return options
        return {**options, "headers": headers} if fits else options

    def note(self, results: Sequence[SendResult]) -> None:
        if not self._span.is_recording():
            return
        if len(results) == 1:
            (result,) = results
            self._span.set_attribute(OUTCOME, result.status)
            self._span.set_attribute(SLOT, str(result.slot))
            if self._topic.keyed:
                # An id of another topic contains its body.
                self._span.set_attribute(MESSAGE_ID, _named(self._topic, result.slot, result.member))
        else:
            self._span.set_attribute(COUNT, len(results))


_UNTRACED = nullcontext(Sending())


def sending(topic: Topic) -> AbstractContextManager[Sending]:
    """Return the span of a call that sends to ``topic``; messages that wait for a commit are written after it."""
    return _traced_sending(topic) if is_on() else _UNTRACED


@contextmanager
def _traced_sending(topic: Topic) -> Iterator[Sending]:
    from opentelemetry.trace import SpanKind

    attributes = {SYSTEM: "rmq", TOPIC: topic.name, OPERATION: "send", OPERATION_TYPE: "send"}
    with _tracer().start_as_current_span(
        f"send {topic.name}",
        kind=SpanKind.PRODUCER,
        attributes=attributes,
        record_exception=not discretion.hides(topic.name),
        set_status_on_exception=not discretion.hides(topic.name),
    ) as span:
        yield _TracedSending(topic, span)


# --- processing


def around(topic: Topic, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what a worker calls in place of ``function``, a listener of ``topic``: it makes a span around each call."""
    if not is_on():
        return function
    from opentelemetry.trace import SpanKind, Status, StatusCode

    tracer, hidden = _tracer(), discretion.hides(topic.name)

    def traced(argument: Any) -> Any:
        messages: list[Message] = argument if isinstance(argument, list) else [argument]
        with tracer.start_as_current_span(
            f"process {topic.name}",
            kind=SpanKind.CONSUMER,
            attributes=_attributes(topic, messages, isinstance(argument, list)),
            links=_links(messages),
            record_exception=not hidden,
            set_status_on_exception=not hidden,
        ) as span:
            try:
                returned = function(argument)
            except BaseException as error:
                if hidden:
                    span.set_status(Status(StatusCode.ERROR, type(error).__qualname__))
                raise
            failed = sum(message.outcome is not None for message in messages)
            if failed:
                span.set_attribute(FAILED, failed)
            if returned is False or failed == len(messages):
                span.set_status(Status(StatusCode.ERROR, "the listener decided so"))
            return returned

    return traced


def _named(topic: Topic, slot: int, member: bytes) -> str:
    """Return how a span names a message of a keyed topic: by its key, if that may be revealed."""
    if discretion.hides(topic.name):
        return discretion.name(topic.name, slot, member)
    return member.decode("utf-8", "replace")


def _attributes(topic: Topic, messages: list[Message], is_batch: bool) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        SYSTEM: "rmq",
        TOPIC: topic.name,
        SLOT: str(messages[0].slot),
        OPERATION: "process",
        OPERATION_TYPE: "process",
    }
    if is_batch:
        attributes[COUNT] = len(messages)
    else:
        attributes[RETRIES_LEFT] = messages[0].retries_left
        if topic.keyed:
            attributes[MESSAGE_ID] = _named(topic, messages[0].slot, messages[0].delivery.member)
    return attributes


def _links(messages: list[Message]) -> list[Link]:
    """Return links to the senders of ``messages``; headers that no tracer wrote give no link."""
    if not messages[0].topic.keyed:
        return []
    from opentelemetry import context, propagate, trace

    links, seen = [], set()
    for message in messages[:MOST_LINKS]:
        try:
            headers = message.headers
            found = propagate.extract(headers, context.Context()) if headers else None
        except Exception:
            logger.exception("The headers of a message cannot be read")
            continue
        sender = trace.get_current_span(found).get_span_context() if found is not None else None
        if sender is not None and sender.is_valid and sender.span_id not in seen:
            seen.add(sender.span_id)
            links.append(trace.Link(sender))
    return links


__all__ = ["Sending", "around", "is_on", "sending"]
