"""Ends of deliveries that Redis has confirmed, and the end of a worker."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from django_rmq.core.words.messages import Message
from django_rmq.project.watching.telemetry import names
from django_rmq.project.watching.telemetry.instruments import note_operation
from django_rmq.project.watching.telemetry.spans import links_to, of_message, tracer
from django_rmq.project.watching.telemetry.switches import is_measured, is_on, is_traced

logger = logging.getLogger("django_rmq.tracing")


def settled(operation: str, messages: Sequence[Message], began_ns: int, ended_ns: int) -> None:
    """Record that deliveries of one slot have ended with ``operation``: ``commit`` or ``rollback``.

    ``began_ns`` and ``ended_ns``: when the round trip to Redis did, in ns since the epoch. It may have carried more.
    """
    topic = messages[0].topic.name
    attributes = names.attributes(topic, operation)
    if is_traced():
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        more = {names.COUNT: len(messages)} if len(messages) > 1 else of_message(messages[0])
        span = tracer().start_span(
            f"{operation} {topic}",
            Context(),
            SpanKind.CLIENT,
            {**attributes, **more, names.SLOT: str(messages[0].slot)},
            links_to(messages),
            start_time=began_ns,
        )
        span.end(ended_ns)
    if is_measured():
        note_operation(attributes, max(0, ended_ns - began_ns) / 1e9, None)


def flush(seconds: float) -> None:
    """Let the project's SDK export what it has, within about ``seconds``: a worker ends without its ``atexit``."""
    if not is_on():
        return
    from opentelemetry import metrics, trace

    for provider in (trace.get_tracer_provider(), metrics.get_meter_provider()):
        force_flush = getattr(provider, "force_flush", None)
        if force_flush is not None:
            try:
                force_flush(int(seconds * 1000))
            except Exception:
                logger.exception("The last spans or metrics of this worker could not be exported")


__all__ = ["flush", "settled"]
