"""Calls that send: their spans, their metrics, and the context that travels with keyed messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from django_rmq.core.model import redaction
from django_rmq.core.model.send_results import SendResult
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.validation import MAX_HEADER_BYTES
from django_rmq.exceptions import CallerError, TopicFull
from django_rmq.observability.telemetry import semantic_conventions
from django_rmq.observability.telemetry.instruments import count_sent, note_operation
from django_rmq.observability.telemetry.spans import creator, message_name, span_around
from django_rmq.observability.telemetry.switches import is_measured, is_on

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class SendObservation:
    """One call that sends, while nothing is observed."""

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a message, with the headers that link its processing to this call."""
        return options

    def note(self, results: Sequence[SendResult], failed: int = 0) -> None:
        """Record the outcomes of the messages; of ``failed`` more it is not known."""


class _ObservedSend(SendObservation):
    def __init__(self, topic: Topic, span: Span) -> None:
        self.results: Sequence[SendResult] = ()
        self.failed = 1
        """How many messages Redis was asked to store when the call failed."""
        self._topic = topic
        self._span = span
        self._carrier: dict[str, str] = {}
        if topic.keyed and span.is_recording():
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
        if not self._carrier.keys().isdisjoint(given) and (own := creator(given)) is not None:
            self._span.add_link(own)
        return {**options, "headers": headers} if fits else options

    def note(self, results: Sequence[SendResult], failed: int = 0) -> None:
        self.results, self.failed = results, failed
        if not self._span.is_recording():
            return
        if len(results) == 1:
            (result,) = results
            self._span.set_attribute(semantic_conventions.OUTCOME, result.status)
            self._span.set_attribute(semantic_conventions.SLOT, str(result.slot))
            if self._topic.keyed:
                # An id of another topic contains its body.
                name = message_name(self._topic, result.slot, result.member)
                self._span.set_attribute(semantic_conventions.MESSAGE_ID, name)
        else:
            self._span.set_attribute(semantic_conventions.COUNT, len(results) + failed)


_UNOBSERVED = nullcontext(SendObservation())


def sending(topic: Topic, *, waits: bool) -> AbstractContextManager[SendObservation]:
    """Observe a call that sends to ``topic``. ``waits``: its messages wait for a commit, and are written after it."""
    return _observed(topic, waits) if is_on() else _UNOBSERVED


@contextmanager
def _observed(topic: Topic, waits: bool) -> Iterator[SendObservation]:
    from opentelemetry.trace import SpanKind

    operation = "create" if waits else "send"
    attributes = semantic_conventions.attributes(topic.name, operation)
    hidden = redaction.hides(topic.name)
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
            if not waits and is_measured():
                _measure(topic.name, call, error)
                failure = None if error is None else semantic_conventions.error_type(error)
                note_operation(attributes, time.perf_counter() - began, failure)


def _measure(topic: str, call: _ObservedSend, error: Exception | None) -> None:
    """Count the messages that Redis was asked to store; a call that was wrong has not asked."""
    refused = sum(result.status == "refused" for result in call.results)
    count_sent(topic, len(call.results) - refused)
    count_sent(topic, refused, TopicFull())
    if error is not None and not isinstance(error, (CallerError, TopicFull)):
        count_sent(topic, call.failed, error)


__all__ = ["SendObservation", "sending"]
