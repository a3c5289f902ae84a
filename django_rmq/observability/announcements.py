"""Announcements: what happens to messages, for the receivers of Django's signals and for the stream of events.

The start of a listener's call is announced in its thread. An end that Redis has confirmed is announced in a separate
thread, so that no receiver delays the worker. An announcement never raises, and costs nothing without receivers.

``around`` and ``ended`` also begin and end what ``telemetry`` records of a call, so that receivers see its span.
"""

from __future__ import annotations

import threading
import time
from asyncio import CancelledError
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from django.db import close_old_connections, reset_queries
from django.db import connections as databases

from django_rmq import open_transactions, signals
from django_rmq.conf import get_config
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.delivered_message import ListenerArgument, ListenerFunction, Message
from django_rmq.core.model.replies import Failure, error_class
from django_rmq.core.model.send_results import SendResult
from django_rmq.core.model.topic import Topic
from django_rmq.core.redaction import hides_contents
from django_rmq.core.threads import start_daemon
from django_rmq.observability import stream, telemetry

if TYPE_CHECKING:
    from django_rmq.core.consumer.batch_run import Coroutine

logger = safe_logger("django_rmq.events")
_complaints = LogThrottle(logger)

WAITING = 20_000
"""The maximum number of ended messages that wait to be announced in a worker; further ones are not announced."""


def _send(signal: signals.TopicSignal, topic: str, **what: object) -> None:
    if not signal.has_listeners(topic):
        return
    try:
        signal.send_robust(sender=topic, topic=topic, **what)
    except BaseException:
        # A SystemExit of a receiver would count as one of the listener.
        if _complaints.admit(signal) is not None:
            logger.exception("A receiver of a signal failed")


def sent(topic: str, results: Sequence[SendResult]) -> None:
    arrived = [result for result in results if result.ok]
    merged = [result for result in arrived if result.status in ("merged", "replaced")]
    for event, signal, some in (
        ("sent", signals.message_sent, arrived),
        ("merged", signals.message_merged, merged),
    ):
        if some:
            _send(signal, topic, results=some)
            _publish(event, topic, some)


def send_failed(topic: str, results: Sequence[SendResult], error: Exception) -> None:
    """Announce sends that failed at a commit."""
    _send(signals.send_failed, topic, results=results, error=error)
    _publish("send_failed", topic, results)


def remove_failed(topic: str, results: Sequence[str], error: Exception) -> None:
    """Announce removals that failed at a commit."""
    _send(signals.remove_failed, topic, results=results, error=error)


def around(topic: Topic, function: ListenerFunction) -> ListenerFunction:
    """Return a function that a worker calls in place of ``function``; it announces and traces the start of each call."""
    if not signals.message_started.has_listeners(topic.name) and stream() is None:
        return telemetry.around(topic, function)

    def announced(argument: ListenerArgument) -> object:
        messages = argument if isinstance(argument, list) else [argument]
        _send(signals.message_started, topic.name, messages=messages)
        _publish("started", topic.name, messages)
        return function(argument)

    # Receivers can read the current span.
    return telemetry.around(topic, announced)


def around_async(topic: Topic, function: Coroutine) -> Coroutine:
    """Return a coroutine function that the event loop awaits in place of ``function``, an async listener of ``topic``."""
    if not signals.message_started.has_listeners(topic.name) and stream() is None:
        return telemetry.around_async(topic, function)

    async def announced(argument: ListenerArgument) -> object:
        messages = argument if isinstance(argument, list) else [argument]
        if signals.message_started.has_listeners(topic.name):
            await _asend_started(topic.name, messages)
        _publish("started", topic.name, messages)
        return await function(argument)

    return telemetry.around_async(topic, announced)


async def _asend_started(topic: str, messages: list[Message]) -> None:
    try:
        await signals.message_started.asend_robust(sender=topic, topic=topic, messages=messages)
    except CancelledError:
        # The task of the listener was cancelled while receivers ran. The error is not that of a receiver.
        raise
    except BaseException:
        if _complaints.admit(signals.message_started) is not None:
            logger.exception("A receiver of a signal failed")


def ended(committed: list[Message], failed: list[tuple[Message, Failure]]) -> None:
    """Announce deliveries of one topic whose end Redis has confirmed."""
    if committed:
        topic = committed[0].topic.name
        _send(signals.message_committed, topic, messages=committed)
        _publish("committed", topic, committed)
    if cancelled := [message for message, failure in failed if failure.kind == "cancelled"]:
        _publish("cancelled", cancelled[0].topic.name, cancelled)
        failed = [one for one in failed if one[1].kind != "cancelled"]
    dead = [
        (message, failure)
        for message, failure in failed
        if failure.kind == "rejected" or message.retries_left <= 0
    ]
    for event, signal, some in (
        ("failed", signals.message_failed, failed),
        ("dead", signals.message_dead, dead),
    ):
        if some:
            topic = some[0][0].topic.name
            _send(signal, topic, failures=some)
            errors = [failure.error.partition("\n")[0][:200] for _, failure in some]
            if hides_contents(topic):
                # The text of an error may quote the body.
                errors = [error_class(error) for error in errors]
            _publish(event, topic, [message for message, _ in some], errors=errors)


class Reporter:
    """A worker's ``Watcher``: it announces ended deliveries from a separate thread, until ``stop``."""

    def __init__(self) -> None:
        self._ended: deque[tuple[list[Message], list[tuple[Message, Failure]], int, int]] = deque()
        self._waiting = 0
        self._left_out = 0
        self._log_throttled = LogThrottle(logger)
        self._changed = threading.Condition()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def wants(self, topic: str) -> bool:
        """Return whether ends of deliveries of ``topic`` have a receiver."""
        return (
            signals.message_committed.has_listeners(topic)
            or signals.message_failed.has_listeners(topic)
            or signals.message_dead.has_listeners(topic)
            or stream() is not None
            or get_config().uses_telemetry
        )

    def ended(
        self, committed: list[Message], failed: list[tuple[Message, Failure]], began_ns: int = 0
    ) -> None:
        """Queue ended deliveries for announcement; drop them if too many are waiting."""
        ended_ns = time.time_ns()
        weight = len(committed) + len(failed)
        with self._changed:
            # A single report that is larger than the bound is announced all the same.
            if self._waiting and self._waiting + weight > WAITING:
                self._left_out += weight
                self._log_left_out()
                return
            self._waiting += weight
            self._ended.append((committed, failed, began_ns or ended_ns, ended_ns))
            self._thread = self._thread or start_daemon(self._run, "rmq-reporter")
            self._changed.notify()

    def stop(self, seconds: float) -> None:
        """Announce the ends that still wait, within this many seconds, and end the thread."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._ended or self._is_stopped)
                    if not self._ended:
                        return
                    committed, failed, began_ns, ended_ns = self._ended.popleft()
                    self._waiting -= len(committed) + len(failed)
                try:
                    reset_queries()  # With DEBUG, Django keeps all queries of a thread until they are reset.
                    close_old_connections()
                    ended(committed, failed)
                    _observe("commit", committed, began_ns, ended_ns)
                    _observe("rollback", [message for message, _ in failed], began_ns, ended_ns)
                    # A receiver may have left a transaction open, which would keep its locks until the next
                    # announcement.
                    open_transactions.roll_back_open()
                    close_old_connections()
                except Exception as error:  # noqa: BLE001 - logged, not raised
                    self._log_throttled(
                        "told", "Cannot call the receivers of signals: %s", error, exc_info=True
                    )
        finally:
            # The thread ends, and Django closes only the connections of requests.
            databases.close_all()

    def _log_left_out(self) -> None:
        if self._log_throttled.admit("slow") is not None:
            logger.warning(
                "Receivers of signals are too slow: they were not called for the end of %d messages",
                self._left_out,
            )
            self._left_out = 0


def _observe(operation: str, messages: list[Message], began_ns: int, ended_ns: int) -> None:
    if messages and get_config().uses_telemetry:
        telemetry.settled(operation, messages, began_ns, ended_ns)


def replayed(topic: str, outcomes: Mapping[str, int], actor: str) -> None:
    _send(signals.message_replayed, topic, outcomes=dict(outcomes), actor=actor)
    _publish("replayed", topic, count=sum(outcomes.values()), outcomes=dict(outcomes), actor=actor)


def _publish(event: str, topic: str, messages: Sequence[Message | SendResult] = (), **more: object) -> None:
    if (events := stream()) is not None:
        events.note(event, topic, [_place(message) for message in messages], **more)


def _place(message: Message | SendResult) -> tuple[int, bytes]:
    return message.slot, message.delivery.member if isinstance(message, Message) else message.member
