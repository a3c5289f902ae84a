"""OpenTelemetry (extra ``otel``): spans, if ``RMQ["TRACING"]`` is on, and metrics, if ``RMQ["METRICS"]["OPENTELEMETRY"]`` is.

Only the API is used: without an SDK set up by the project, nothing is recorded. Names and attributes are those
of the semantic conventions for messaging, version 1.44.0 (in development).

=============  ========  =======================================================================================
span           kind      when
=============  ========  =======================================================================================
``send T``     producer  a call that sends, outside a transaction
``create T``   producer  a call that sends, inside a transaction
``send T``     client    the messages of a transaction at its commit, with links to their ``create`` spans
``process T``  consumer  a call of a listener
``commit T``   client    confirmed ends of deliveries of one slot, and ``rollback T``: those that failed
=============  ========  =======================================================================================

On topics with IDENTITY "key" the context of the first or second of these travels in the message's headers, as
written by the propagators of the process (``traceparent``), and later spans link to it. They are not its
children, because a message may be merged, wait for days, and be tried again. A topic whose body is the
identity carries only bodies, and a trace in them would keep equal messages from merging, so its spans have no
links.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from django_rmq.conf import Config, get_config
from django_rmq.core.model import redis_url
from django_rmq.core.model.delivered_message import ListenerArgument, ListenerFunction, Message
from django_rmq.core.model.envelope import key_of
from django_rmq.core.model.send_results import SendResult
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import MAX_HEADER_BYTES, SendOptions
from django_rmq.core.redaction import hides_contents, opaque_name
from django_rmq.exceptions import CallerError, RmqError, TopicFull
from django_rmq.observability import CommitObservation, Created, SendObservation, count_sent

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, Histogram
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Tracer

    from django_rmq.core.consumer.batch_run import Coroutine

    Attributes = dict[str, str | int]

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

SYSTEM = "messaging.system"
TOPIC = "messaging.destination.name"
SLOT = "messaging.destination.partition.id"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
COUNT = "messaging.batch.message_count"
MESSAGE_ID = "messaging.message.id"
ERROR_TYPE = "error.type"
SERVER = "server.address"
PORT = "server.port"

OUTCOME = "messaging.rmq.message.outcome"
"""Outcome of a send, such as stored or merged."""
RETRIES_LEFT = "messaging.rmq.message.retries_left"
FAILED = "messaging.rmq.batch.failed_message_count"
"""The number of messages of a batch that the listener failed."""

SENT_MESSAGES = "messaging.client.sent.messages"
CONSUMED_MESSAGES = "messaging.client.consumed.messages"
OPERATION_DURATION = "messaging.client.operation.duration"
PROCESS_DURATION = "messaging.process.duration"
PROCESSED_BEFORE = "messaging.rmq.processed_before.messages"

TYPES = {"commit": "settle", "rollback": "settle"}
"""Operations whose type has another name."""

_server: tuple[Config, dict[str, str | int]] | None = None


def attributes_of(topic: str | None, operation: str) -> dict[str, str | int]:
    """Return the attributes of all spans and metrics of an operation; ``topic`` is None if it concerns several topics."""
    destination: SendOptions = {} if topic is None else {TOPIC: topic}
    kind = TYPES.get(operation, operation)
    return {SYSTEM: "rmq", OPERATION: operation, OPERATION_TYPE: kind, **destination, **_server_attributes()}


def error_type(error: BaseException) -> str:
    """Return the class of an error: ``ValueError``, ``shop.errors.NoSuchOrder``."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _server_attributes() -> dict[str, str | int]:
    """Return the address of Redis in the settings. Behind Sentinels it has none, because the primary may change."""
    global _server  # noqa: PLW0603 - read once per configuration
    config, server = get_config(), _server
    if server is None or server[0] is not config:
        server = _server = config, _read_server(config)
    return server[1]


def _read_server(config: Config) -> dict[str, str | int]:
    server = config.redis
    if config.broker == "memory" or server is None or server.sentinels:
        return {}
    parts = redis_url.parse(server.cluster[0] if server.cluster else server.url)
    if parts.scheme == "unix":
        return {SERVER: unquote(parts.path)}
    return {SERVER: parts.hostname or "localhost", PORT: parts.port or 6379}


EDGES = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Bounds of the histograms in seconds, as the conventions advise."""


class Instruments(NamedTuple):
    """The instruments of this process."""

    sent: Counter
    consumed: Counter
    operation: Histogram
    process: Histogram
    processed_before: Counter


@cache
def instruments() -> Instruments:
    """Return the instruments. They find the project's SDK, whenever it is set up."""
    from opentelemetry import metrics

    from django_rmq import __version__

    meter = metrics.get_meter("django_rmq", __version__, schema_url=SCHEMA_URL)
    return Instruments(
        meter.create_counter(
            SENT_MESSAGES, "{message}", "Number of messages producer attempted to send to the broker."
        ),
        meter.create_counter(
            CONSUMED_MESSAGES, "{message}", "Number of messages that were delivered to the application."
        ),
        meter.create_histogram(
            OPERATION_DURATION,
            "s",
            "Duration of messaging operation initiated by a producer or consumer client.",
            explicit_bucket_boundaries_advisory=EDGES,
        ),
        meter.create_histogram(
            PROCESS_DURATION,
            "s",
            "Duration of processing operation.",
            explicit_bucket_boundaries_advisory=EDGES,
        ),
        meter.create_counter(
            PROCESSED_BEFORE,
            "{message}",
            "Number of messages for which a listener with once was not called, because they were processed before.",
        ),
    )


def with_error(attributes: Attributes, error: str | None) -> Attributes:
    """Return ``attributes``, with the type of the error if there is one."""
    return attributes if error is None else {**attributes, ERROR_TYPE: error}


def _counted(attributes: Attributes) -> Attributes:
    """Return the attributes of a counter, which has no type of operation."""
    return {name: value for name, value in attributes.items() if name != OPERATION_TYPE}


def add_sent(topic: str, messages: int, error: BaseException | None = None) -> None:
    failure = None if error is None else error_type(error)
    attributes = with_error(_counted(attributes_of(topic, "send")), failure)
    instruments().sent.add(messages, attributes)


def count_processed(topic: str, messages: int) -> None:
    """Count messages that a listener with ``once`` had processed before."""
    if get_config().metrics.opentelemetry:
        instruments().processed_before.add(messages, _counted(attributes_of(topic, "process")))


def record_operation(attributes: Attributes, seconds: float, error: str | None) -> None:
    """Record how long a send, a commit or a rollback took."""
    instruments().operation.record(seconds, with_error(attributes, error))


logger = logging.getLogger("django_rmq.tracing")

MOST_LINKS = 128
"""The number of links that an SDK keeps for a span by default."""


def tracer() -> Tracer:
    from opentelemetry import trace

    from django_rmq import __version__

    return trace.get_tracer("django_rmq", __version__, schema_url=SCHEMA_URL)


@contextmanager
def span_around(
    name: str, kind: SpanKind, attributes: Mapping[str, Any], links: Sequence[Link] = (), *, hidden: bool
) -> Iterator[Span]:
    """Make a span current, if spans are switched on. ``hidden``: only the class of an error is recorded."""
    from opentelemetry.trace import INVALID_SPAN, Status, StatusCode

    if not get_config().tracing:
        yield INVALID_SPAN
        return
    with tracer().start_as_current_span(
        name,
        kind=kind,
        attributes=attributes,
        links=links,
        record_exception=not hidden,
        set_status_on_exception=not hidden,
    ) as span:
        try:
            yield span
        except BaseException as error:
            span.set_attribute(ERROR_TYPE, error_type(error))
            if hidden:
                span.set_status(Status(StatusCode.ERROR, type(error).__qualname__))
            raise


def message_name(topic: Topic, slot: int, member: bytes) -> str:
    """Return how a span names a message of a keyed topic: by its key, if it has one that may be revealed."""
    key = None if hides_contents(topic.name) else key_of(topic, member)
    return opaque_name(topic.name, slot, member) if key is None else key


def creator(headers: Mapping[str, str]) -> SpanContext | None:
    """Return the context that a sender wrote into headers, or None if no tracer wrote one."""
    from opentelemetry import context, propagate, trace

    # Headers without a trace leave the given context as it is. The present one would then pass for that of the
    # sender.
    span_context = trace.get_current_span(propagate.extract(headers, context.Context())).get_span_context()
    return span_context if span_context.is_valid else None


def links_to(messages: Sequence[Message]) -> list[Link]:
    """Return a link for each message whose sender was traced. In a batch the link says which message it is."""
    if not messages[0].topic.keyed:
        return []
    from opentelemetry import trace

    links = []
    for message in messages[:MOST_LINKS]:
        try:
            headers = message.headers
            sender = creator(headers) if headers else None
        except Exception:
            # Another program may have stored headers in any form. They must not keep the listener from its message.
            logger.exception("The headers of a message cannot be read")
            continue
        if sender is not None:
            links.append(trace.Link(sender, of_message(message) if len(messages) > 1 else None))
    return links


def of_message(message: Message) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {RETRIES_LEFT: message.retries_left}
    if message.topic.keyed:
        # The id of a message without a key contains its body.
        attributes[MESSAGE_ID] = message_name(message.topic, message.slot, message.delivery.member)
    return attributes


def settled(operation: str, messages: Sequence[Message], began_ns: int, ended_ns: int) -> None:
    """Record that deliveries of one slot have ended with ``operation``: ``commit`` or ``rollback``.

    ``began_ns`` and ``ended_ns``: the times of the round trip to Redis, in ns since the epoch. It may have carried more.
    """
    topic = messages[0].topic.name
    attributes = attributes_of(topic, operation)
    if get_config().tracing:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        more = {COUNT: len(messages)} if len(messages) > 1 else of_message(messages[0])
        # In an empty context the span has no parent. It has links to the spans that sent its messages.
        span = tracer().start_span(
            f"{operation} {topic}",
            Context(),
            SpanKind.CLIENT,
            {**attributes, **more, SLOT: str(messages[0].slot)},
            links_to(messages),
            start_time=began_ns,
        )
        span.end(ended_ns)
    if get_config().metrics.opentelemetry:
        # The clock may have been set back in between.
        record_operation(attributes, max(0, ended_ns - began_ns) / 1e9, None)


class _ObservedCommit(CommitObservation):
    error: RmqError | None = None
    """The first error."""

    def fail(self, error: RmqError) -> None:
        self.error = self.error or error


def current_context() -> SpanContext | None:
    """Return the context of the running span, or None if there is none."""
    from opentelemetry import trace

    span_context = trace.get_current_span().get_span_context()
    return span_context if span_context.is_valid else None


@contextmanager
def observed_commit(created: Sequence[Created]) -> Iterator[CommitObservation]:
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode

    topics = {topic for topic, _, _ in created}
    topic = next(iter(topics)) if len(topics) == 1 else None
    attributes = attributes_of(topic, "send")
    messages = sum(count for _, count, _ in created)
    links = [
        Link(context, {TOPIC: name} if topic is None else None)
        for name, _, context in created[:MOST_LINKS]
        if context is not None
    ]
    of_span = attributes if messages == 1 else {**attributes, COUNT: messages}
    name = "send" if topic is None else f"send {topic}"
    # Only errors of a server come here, and they contain nothing of a message.
    began = time.perf_counter()
    with span_around(name, SpanKind.CLIENT, of_span, links, hidden=False) as span:
        commit = _ObservedCommit()
        yield commit
        failure = None if commit.error is None else error_type(commit.error)
        if failure is not None:
            span.set_attribute(ERROR_TYPE, failure)
            span.set_status(Status(StatusCode.ERROR, str(commit.error)))
        if get_config().metrics.opentelemetry:
            record_operation(attributes, time.perf_counter() - began, failure)


class _ObservedSend(SendObservation):
    def __init__(self, topic: Topic, span: Span) -> None:
        self.results: Sequence[SendResult] = ()
        self.failed = 1
        """The number of messages that Redis was asked to store when the call failed."""
        self._topic = topic
        self._span = span
        self._carrier: dict[str, str] = {}
        if topic.keyed and span.is_recording():
            from opentelemetry import propagate

            propagate.inject(self._carrier)

    def options(self, options: SendOptions) -> SendOptions:
        given_headers = options.get("headers") or {}
        # The producer reports headers that are not a mapping.
        if not self._carrier or not isinstance(given_headers, Mapping):
            return options
        headers = {**self._carrier, **given_headers}
        try:
            fits = len(json.dumps(headers).encode()) <= MAX_HEADER_BYTES
        except (TypeError, ValueError):
            # The producer reports headers that JSON cannot hold.
            return options
        # The caller's own trace stays in the headers, and this span gets a link to it.
        if not self._carrier.keys().isdisjoint(given_headers) and (own := creator(given_headers)) is not None:
            self._span.add_link(own)
        # Tracing must not make a message too large. Its processing then has no link to this call.
        return {**options, "headers": headers} if fits else options

    def note(self, results: Sequence[SendResult], failed: int = 0) -> None:
        self.results, self.failed = results, failed
        if not self._span.is_recording():
            return
        if len(results) == 1:
            (result,) = results
            self._span.set_attribute(OUTCOME, result.status)
            self._span.set_attribute(SLOT, str(result.slot))
            if self._topic.keyed:
                # The id of a message without a key contains its body.
                name = message_name(self._topic, result.slot, result.member)
                self._span.set_attribute(MESSAGE_ID, name)
        else:
            self._span.set_attribute(COUNT, len(results) + failed)


@contextmanager
def observed_send(topic: Topic, waits: bool) -> Iterator[SendObservation]:
    from opentelemetry.trace import SpanKind

    operation = "create" if waits else "send"
    attributes = attributes_of(topic.name, operation)
    hidden = hides_contents(topic.name)
    began = time.perf_counter()
    error: Exception | None = None
    with span_around(f"{operation} {topic.name}", SpanKind.PRODUCER, attributes, hidden=hidden) as span:
        call = _ObservedSend(topic, span)
        try:
            yield call
        except Exception as raised:
            error = raised
            raise
        finally:
            if not waits and get_config().metrics.opentelemetry:
                _measure(topic.name, call, error)
                failure = None if error is None else error_type(error)
                record_operation(attributes, time.perf_counter() - began, failure)


def _measure(topic: str, call: _ObservedSend, error: Exception | None) -> None:
    """Count the messages that Redis was asked to store. A call with an error of its caller has asked for nothing."""
    refused = sum(result.status == "refused" for result in call.results)
    count_sent(topic, len(call.results) - refused)
    count_sent(topic, refused, TopicFull())
    if error is not None and not isinstance(error, (CallerError, TopicFull)):
        count_sent(topic, call.failed, error)


def around(topic: Topic, function: ListenerFunction) -> ListenerFunction:
    """Return a function that a worker calls in place of ``function``, a listener of ``topic``; it observes each call."""
    return _ObservedCall(topic, function) if get_config().uses_telemetry else function


def around_async(topic: Topic, function: Coroutine) -> Coroutine:
    """Return a coroutine function that the event loop awaits in place of ``function``, an async listener of ``topic``."""
    return _ObservedAsync(topic, function) if get_config().uses_telemetry else function


class _ObservedCall:
    def __init__(self, topic: Topic, function: Callable[[Any], Any]) -> None:
        self._topic, self._function = topic, function
        self._is_traced, self._is_measured = get_config().tracing, get_config().metrics.opentelemetry
        self._is_hidden = hides_contents(topic.name)
        self._attributes = attributes_of(topic.name, "process")

    def __call__(self, argument: ListenerArgument) -> object:
        with self._call(argument) as call:
            call.returned = returned = self._function(argument)
        return returned

    @contextmanager
    def _call(self, argument: ListenerArgument) -> Iterator[_Call]:
        """Observe a call, which notes what the listener returned."""
        messages: list[Message] = argument if isinstance(argument, list) else [argument]
        began, failure, call = time.perf_counter(), None, _Call()
        try:
            with self._span(messages, is_batch=isinstance(argument, list)) as span:
                yield call
                failure = _decision(call.returned, messages)
                _record_failures(span, messages, failure)
        except BaseException as error:
            failure = error_type(error)
            raise
        finally:
            if self._is_measured:
                seconds, attributes = time.perf_counter() - began, with_error(self._attributes, failure)
                instruments().consumed.add(len(messages), _counted(attributes))
                instruments().process.record(seconds, attributes)

    def _span(self, messages: list[Message], *, is_batch: bool) -> AbstractContextManager[Span]:
        from opentelemetry.trace import SpanKind

        more: dict[str, str | int] = {COUNT: len(messages)} if is_batch else of_message(messages[0])
        return span_around(
            f"process {self._topic.name}",
            SpanKind.CONSUMER,
            {**self._attributes, **more, SLOT: str(messages[0].slot)},
            links_to(messages) if self._is_traced else (),
            hidden=self._is_hidden,
        )


class _ObservedAsync(_ObservedCall):
    async def __call__(self, argument: ListenerArgument) -> object:
        with self._call(argument) as call:
            call.returned = returned = await self._function(argument)
        return returned


class _Call:
    returned: object = None


def _record_failures(span: Span, messages: Sequence[Message], failure: str | None) -> None:
    """Record in a span that the listener has failed messages without raising anything."""
    from opentelemetry.trace import Status, StatusCode

    failed = sum(message.outcome is not None for message in messages)
    if failed:
        span.set_attribute(FAILED, failed)
    if failure is not None:
        span.set_attribute(ERROR_TYPE, failure)
        span.set_status(Status(StatusCode.ERROR, "the listener failed its messages"))


def _decision(returned: object, messages: Sequence[Message]) -> str | None:
    """Return how a listener that raised nothing failed all its messages, or None if it did not."""
    if returned is False:
        return "returned_false"
    outcomes = [message.outcome for message in messages]
    if None in outcomes:
        return None
    are_rejected = all(outcome.kind == "rejected" for outcome in outcomes if outcome is not None)
    return "rejected" if are_rejected else "retry"
