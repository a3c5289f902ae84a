"""Calls of listeners: their spans and their metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from django_rmq.core.consumer.async_invoke import Coroutine
from django_rmq.core.model import redaction
from django_rmq.core.model.message import Message
from django_rmq.core.model.topic import Topic
from django_rmq.observability.telemetry import semantic_conventions
from django_rmq.observability.telemetry.instruments import note_processing
from django_rmq.observability.telemetry.spans import links_to, of_message, span_around
from django_rmq.observability.telemetry.switches import is_measured, is_on, is_traced

if TYPE_CHECKING:
    from opentelemetry.trace import Span


def around(topic: Topic, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what a worker calls in place of ``function``, a listener of ``topic``: it observes each call."""
    return _ObservedCall(topic, function) if is_on() else function


def around_async(topic: Topic, function: Coroutine) -> Coroutine:
    """Return what the event loop awaits in place of ``function``, an async listener of ``topic``."""
    return _ObservedAsync(topic, function) if is_on() else function


class _ObservedCall:
    """A listener whose calls are observed."""

    def __init__(self, topic: Topic, function: Callable[[Any], Any]) -> None:
        self._topic, self._function = topic, function
        self._is_traced, self._is_measured = is_traced(), is_measured()
        self._is_hidden = redaction.hides(topic.name)
        self._attributes = semantic_conventions.attributes(topic.name, "process")

    def __call__(self, argument: Any) -> Any:
        with self._call(argument) as call:
            call.returned = returned = self._function(argument)
        return returned

    @contextmanager
    def _call(self, argument: Any) -> Iterator[_Call]:
        """Observe a call, which notes what the listener returned."""
        messages: list[Message] = argument if isinstance(argument, list) else [argument]
        began, failure, call = time.perf_counter(), None, _Call()
        try:
            with self._span(messages, is_batch=isinstance(argument, list)) as span:
                yield call
                failure = _decision(call.returned, messages)
                _note_failures(span, messages, failure)
        except BaseException as error:
            failure = semantic_conventions.error_type(error)
            raise
        finally:
            if self._is_measured:
                note_processing(self._attributes, len(messages), time.perf_counter() - began, failure)

    def _span(self, messages: list[Message], *, is_batch: bool) -> AbstractContextManager[Span]:
        from opentelemetry.trace import SpanKind

        more: dict[str, str | int] = (
            {semantic_conventions.COUNT: len(messages)} if is_batch else of_message(messages[0])
        )
        return span_around(
            f"process {self._topic.name}",
            SpanKind.CONSUMER,
            {**self._attributes, **more, semantic_conventions.SLOT: str(messages[0].slot)},
            links_to(messages) if self._is_traced else (),
            hidden=self._is_hidden,
        )


class _ObservedAsync(_ObservedCall):
    """An async listener whose calls are observed."""

    async def __call__(self, argument: Any) -> Any:
        with self._call(argument) as call:
            call.returned = returned = await self._function(argument)
        return returned


class _Call:
    """One call of a listener."""

    returned: Any = None


def _note_failures(span: Span, messages: Sequence[Message], failure: str | None) -> None:
    """Record in a span that the listener has failed messages without raising anything."""
    from opentelemetry.trace import Status, StatusCode

    failed = sum(message.outcome is not None for message in messages)
    if failed:
        span.set_attribute(semantic_conventions.FAILED, failed)
    if failure is not None:
        span.set_attribute(semantic_conventions.ERROR_TYPE, failure)
        span.set_status(Status(StatusCode.ERROR, "the listener failed its messages"))


def _decision(returned: Any, messages: Sequence[Message]) -> str | None:
    """Return how a listener that raised nothing failed all its messages. None: it did not."""
    if returned is False:
        return "returned_false"
    outcomes = [message.outcome for message in messages]
    if None in outcomes:
        return None
    are_rejected = all(outcome.kind == "rejected" for outcome in outcomes if outcome is not None)
    return "rejected" if are_rejected else "retry"


__all__ = ["around", "around_async"]
