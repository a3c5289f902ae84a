"""Sending many messages of one topic, chunk by chunk: the part of ``send_messages`` that is the same for each chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings
from django.utils.timezone import get_default_timezone

from django_rmq import connections
from django_rmq.core.model.send_results import STORED, Durability, SendResults
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.delivery_times import in_milliseconds
from django_rmq.core.producer.placement import Send
from django_rmq.core.producer.producer import takes_bodies
from django_rmq.exceptions import CallerError, RmqError, SlotMoved
from django_rmq.observability import announcements, telemetry
from django_rmq.sending.dispatch import dispatch, observers
from django_rmq.sending.send_failures import explained

_NOT_SHARED = {"slot_basis", "headers", "expires", "max_retries", "timeout"}
"""Options that need a look at each message."""


class ChunkedSend:
    """The messages of one call of ``send_messages``, chunk by chunk."""

    def __init__(
        self, topic: Topic, shared: dict[str, Any], wanted: Durability, connection: Any, using: str | None
    ) -> None:
        self.results = SendResults(topic.name)
        self.under_way = 0
        """The number of messages of which it is not known whether they have been sent."""
        self._topic = topic
        self._producer = connections.get_producer()
        self._shared = shared
        self._times = options_in_ms(topic, shared)
        """The shared options as the producer takes them."""
        self._wanted = wanted
        self._connection = connection
        self._using = using
        self._is_plain = (
            connection is None
            and not topic.outbox
            and takes_bodies(topic)
            and not _NOT_SHARED & set(shared)
            and wanted == STORED
        )

    def send(self, chunk: Sequence[Any], call: telemetry.SendObservation) -> None:
        """Send bodies and ``Send``s, at once or at the commit; add their results to ``results``."""
        self.under_way = len(chunk)
        self._send(chunk, call)
        self.under_way = 0

    def count_in(self, error: Exception) -> None:
        """Let an exception say how many messages were sent before it."""
        if self._connection is not None or not self.results:
            return
        if isinstance(error, RmqError):
            error.sent = len(self.results)
        if not isinstance(error, CallerError):
            error.add_note(f"send_messages had sent {len(self.results)} messages before")

    def _send(self, chunk: Sequence[Any], call: telemetry.SendObservation) -> None:
        if self._is_plain and not observers and Send not in set(map(type, chunk)):
            self._send_plain(chunk)
            return
        built, seen = [], []
        for index, item in enumerate(chunk, len(self.results)):
            body, options, times = item, self._shared, self._times
            try:
                if isinstance(item, Send):
                    body, options = item.body, {**self._shared, **item.options()}
                    times = options_in_ms(self._topic, options)
                built.append(self._producer.build(self._topic, body, **call.options(times)))
            except CallerError as error:
                raise error.reworded(f"item {index}: {error}{self._so_far()}") from None
            seen.append((body, options))
        self.results.extend(
            dispatch(self._producer, self._topic, built, seen, self._wanted, self._connection, self._using)
        )

    def _send_plain(self, bodies: Sequence[Any]) -> None:
        """Send bodies that share all options, at once."""
        connections.agree(self._topic)
        before = len(self.results)
        try:
            self._producer.send_bodies(self._topic, bodies, results=self.results, **self._times)
        except CallerError as error:
            raise error.reworded(f"{error}{self._so_far()}") from None
        except SlotMoved as error:
            raise explained(self._topic, error) from error
        if announcements.are_sends_watched(self._topic.name):
            announcements.sent(self._topic.name, self.results[before:])

    def _so_far(self) -> str:
        return f"; the {len(self.results)} messages before it were sent" if self.results else ""


def options_in_ms(topic: Topic, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a message as the producer takes them; see ``in_milliseconds``.

    Naive datetimes in them are times of ``TIME_ZONE`` if ``USE_TZ`` is False.
    """
    return in_milliseconds(topic, options, None if settings.USE_TZ else get_default_timezone())


__all__ = ["ChunkedSend", "options_in_ms"]
