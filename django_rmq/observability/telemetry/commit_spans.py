"""The messages of a transaction when its commit sends them: one span, linked to the calls that created them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from django_rmq.exceptions import RmqError
from django_rmq.observability.telemetry import semantic_conventions
from django_rmq.observability.telemetry.instruments import note_operation
from django_rmq.observability.telemetry.spans import MOST_LINKS, span_around
from django_rmq.observability.telemetry.switches import is_measured, is_on, is_traced

Created = tuple[str, int, Any]
"""A topic, a number of messages, and the context in which they were created."""


class Commit:
    """What a commit sends, while nothing is observed."""

    def fail(self, error: RmqError) -> None:
        """Record that messages could not be sent."""


class _ObservedCommit(Commit):
    error: RmqError | None = None
    """The first error."""

    def fail(self, error: RmqError) -> None:
        self.error = self.error or error


_UNOBSERVED = nullcontext(Commit())


def creation_context() -> Any:
    """Return the context of the call that creates messages. None: it is not traced."""
    if not is_traced():
        return None
    from opentelemetry import trace

    found = trace.get_current_span().get_span_context()
    return found if found.is_valid else None


def committing(created: Sequence[Created]) -> AbstractContextManager[Commit]:
    """Observe how a commit sends what was created in its transaction."""
    return _observed(created) if created and is_on() else _UNOBSERVED


@contextmanager
def _observed(created: Sequence[Created]) -> Iterator[Commit]:
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode

    topics = {topic for topic, _, _ in created}
    topic = next(iter(topics)) if len(topics) == 1 else None
    attributes = semantic_conventions.attributes(topic, "send")
    messages = sum(count for _, count, _ in created)
    links = [
        Link(context, {semantic_conventions.TOPIC: name} if topic is None else None)
        for name, _, context in created[:MOST_LINKS]
        if context is not None
    ]
    of_span = attributes if messages == 1 else {**attributes, semantic_conventions.COUNT: messages}
    name = "send" if topic is None else f"send {topic}"
    # Errors of a server, which are all there is here, contain nothing of a message.
    began = time.perf_counter()
    with span_around(name, SpanKind.CLIENT, of_span, links, hidden=False) as span:
        commit = _ObservedCommit()
        yield commit
        failure = None if commit.error is None else semantic_conventions.error_type(commit.error)
        if failure is not None:
            span.set_attribute(semantic_conventions.ERROR_TYPE, failure)
            span.set_status(Status(StatusCode.ERROR, str(commit.error)))
        if is_measured():
            note_operation(attributes, time.perf_counter() - began, failure)


__all__ = ["Commit", "Created", "committing", "creation_context"]
