"""What observes messages: receivers of signals and the stream of events (``announcements``), and OpenTelemetry (``telemetry``).

Here is what senders call. It checks whether anything observes, and loads the rest only then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from django_rmq import connections, signals
from django_rmq.conf import get_config
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.send_results import SendResult
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import SendOptions
from django_rmq.exceptions import RmqError

if TYPE_CHECKING:
    from django_rmq.core.monitoring.events import EventStream

_log_throttled = LogThrottle(safe_logger("django_rmq.events"))

Created = tuple[str, int, Any]
"""A topic, a number of messages, and the context in which they were created."""


class SendObservation:
    """One call that sends, while nothing is observed."""

    def options(self, options: SendOptions) -> SendOptions:
        """Return the options of a message, with the headers that link its processing to this call."""
        return options

    def note(self, results: Sequence[SendResult], failed: int = 0) -> None:
        """Record the outcomes of the messages; the outcomes of ``failed`` more are not known."""


class CommitObservation:
    """The sends of a commit, while nothing is observed."""

    def fail(self, error: RmqError) -> None:
        """Record that messages could not be sent."""


_UNOBSERVED_SEND = nullcontext(SendObservation())
_UNOBSERVED_COMMIT = nullcontext(CommitObservation())


def observe_send(topic: Topic, *, waits: bool) -> AbstractContextManager[SendObservation]:
    """Observe a call that sends to ``topic``. ``waits``: its messages wait for a commit, and are written after it."""
    if not get_config().uses_telemetry:
        return _UNOBSERVED_SEND
    from django_rmq.observability import telemetry

    return telemetry.observed_send(topic, waits)


def observe_commit(created: Sequence[Created]) -> AbstractContextManager[CommitObservation]:
    """Observe how a commit sends the messages of its transaction."""
    if not created or not get_config().uses_telemetry:
        return _UNOBSERVED_COMMIT
    from django_rmq.observability import telemetry

    return telemetry.observed_commit(created)


def creation_context() -> object:
    """Return the context of the call that creates messages, or None if it is not traced."""
    if not get_config().tracing:
        return None
    from django_rmq.observability import telemetry

    return telemetry.current_context()


def count_sent(topic: str, messages: int, error: BaseException | None = None) -> None:
    """Count messages that were written to Redis, or could not be because of ``error``."""
    if messages and get_config().metrics.opentelemetry:
        from django_rmq.observability import telemetry

        telemetry.add_sent(topic, messages, error)


def announce_sent(topic: str, results: Sequence[SendResult]) -> None:
    """Announce the results of sends that Redis has answered."""
    if are_sends_watched(topic):
        from django_rmq.observability import announcements

        announcements.sent(topic, results)


def are_sends_watched(topic: str) -> bool:
    """Return whether sends to ``topic`` have a receiver."""
    return _is_watched(topic, signals.message_sent, signals.message_merged)


def announce_replayed(topic: str, outcomes: Mapping[str, int], actor: str) -> None:
    """Announce that an actor or a program has replayed dead messages."""
    if _is_watched(topic, signals.message_replayed):
        from django_rmq.observability import announcements

        announcements.replayed(topic, outcomes, actor)


def _is_watched(topic: str, *watching: signals.TopicSignal) -> bool:
    # Most projects connect none, so the receivers of each topic are searched only where there is one.
    return (
        any(signal.receivers and signal.has_listeners(topic) for signal in watching) or stream() is not None
    )


def stream() -> EventStream | None:
    """Return the stream of events, or None if EVENTS is off or it cannot be opened."""
    try:
        return connections.events()
    except Exception as error:  # noqa: BLE001 - logged, not raised
        _log_throttled("stream", "Cannot open the stream of events: %s", error, exc_info=True)
        return None
