"""Ends of deliveries that Redis has confirmed."""

from __future__ import annotations

from collections.abc import Sequence

from django_rmq.core.model.message import Message
from django_rmq.observability.telemetry import semantic_conventions
from django_rmq.observability.telemetry.instruments import note_operation
from django_rmq.observability.telemetry.spans import links_to, of_message, tracer
from django_rmq.observability.telemetry.switches import is_measured, is_traced


def settled(operation: str, messages: Sequence[Message], began_ns: int, ended_ns: int) -> None:
    """Record that deliveries of one slot have ended with ``operation``: ``commit`` or ``rollback``.

    ``began_ns`` and ``ended_ns``: when the round trip to Redis did, in ns since the epoch. It may have carried more.
    """
    topic = messages[0].topic.name
    attributes = semantic_conventions.attributes(topic, operation)
    if is_traced():
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        more = {semantic_conventions.COUNT: len(messages)} if len(messages) > 1 else of_message(messages[0])
        span = tracer().start_span(
            f"{operation} {topic}",
            Context(),
            SpanKind.CLIENT,
            {**attributes, **more, semantic_conventions.SLOT: str(messages[0].slot)},
            links_to(messages),
            start_time=began_ns,
        )
        span.end(ended_ns)
    if is_measured():
        note_operation(attributes, max(0, ended_ns - began_ns) / 1e9, None)


__all__ = ["settled"]
