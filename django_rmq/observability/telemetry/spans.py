"""Spans: the tracer, how messages are named in them, and the links to where messages come from."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from django_rmq.core.model import redaction
from django_rmq.core.model.message import Message
from django_rmq.core.model.message_content import key_of
from django_rmq.core.model.topic import Topic
from django_rmq.observability.telemetry import semantic_conventions
from django_rmq.observability.telemetry.switches import is_traced

if TYPE_CHECKING:
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Tracer

logger = logging.getLogger("django_rmq.tracing")

MOST_LINKS = 128
"""The number of links that an SDK keeps for a span by default."""


def tracer() -> Tracer:
    """Return the tracer of this package."""
    from opentelemetry import trace

    from django_rmq import __version__

    return trace.get_tracer("django_rmq", __version__, schema_url=semantic_conventions.SCHEMA_URL)


def span_around(
    name: str, kind: SpanKind, attributes: Mapping[str, Any], links: Sequence[Link] = (), *, hidden: bool
) -> AbstractContextManager[Span]:
    """Make a span current, if spans are switched on. ``hidden``: of an error only its class is recorded."""
    from opentelemetry.trace import INVALID_SPAN

    return _recorded(name, kind, attributes, links, hidden) if is_traced() else nullcontext(INVALID_SPAN)


@contextmanager
def _recorded(
    name: str, kind: SpanKind, attributes: Mapping[str, Any], links: Sequence[Link], hidden: bool
) -> Iterator[Span]:
    from opentelemetry.trace import Status, StatusCode

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
            span.set_attribute(semantic_conventions.ERROR_TYPE, semantic_conventions.error_type(error))
            if hidden:
                span.set_status(Status(StatusCode.ERROR, type(error).__qualname__))
            raise


def message_name(topic: Topic, slot: int, member: bytes) -> str:
    """Return how a span names a message of a keyed topic: by its key, if it has one that may be revealed."""
    key = None if redaction.hides(topic.name) else key_of(topic, member)
    return redaction.name(topic.name, slot, member) if key is None else key


def creator(headers: Mapping[str, str]) -> SpanContext | None:
    """Return the context that a sender wrote into headers. None: no tracer wrote them."""
    from opentelemetry import context, propagate, trace

    found = trace.get_current_span(propagate.extract(headers, context.Context())).get_span_context()
    return found if found.is_valid else None


def links_to(messages: Sequence[Message]) -> list[Link]:
    """Return a link for each message whose sender was traced. In a batch it says which message it is."""
    if not messages[0].topic.keyed:
        return []
    from opentelemetry import trace

    links = []
    for message in messages[:MOST_LINKS]:
        try:
            headers = message.headers
            sender = creator(headers) if headers else None
        except Exception:
            logger.exception("The headers of a message cannot be read")
            continue
        if sender is not None:
            links.append(trace.Link(sender, of_message(message) if len(messages) > 1 else None))
    return links


def of_message(message: Message) -> dict[str, str | int]:
    """Return the attributes of one message."""
    attributes: dict[str, str | int] = {semantic_conventions.RETRIES_LEFT: message.retries_left}
    if message.topic.keyed:
        # An id of another topic contains its body.
        attributes[semantic_conventions.MESSAGE_ID] = message_name(
            message.topic, message.slot, message.delivery.member
        )
    return attributes


__all__ = ["creator", "links_to", "message_name", "of_message", "span_around", "tracer"]
