"""Metrics of the outbox, which is in the databases of the project and readable without Redis."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from django.db import connections as databases
from prometheus_client.core import GaugeMetricFamily, Metric

from django_rmq.exceptions import RmqError
from django_rmq.operations import Operations, Waiting
from django_rmq.operations.outbox import needs_this_thread

logger = logging.getLogger("django_rmq.metrics")

STATES = ("waiting", "refused")
"""The states of messages in the outbox: for the relay or their sender, and left out by the relay."""


SECONDS = 2.0
"""Maximum seconds for which a scrape waits for the databases."""


class Reader:
    """Reads the outbox in a thread of its own, so that a database that hangs leaves the other metrics as they are."""

    def __init__(self) -> None:
        self._thread: _Reading | None = None

    def read(self, operations: Operations) -> list[Waiting]:
        """Return what is in the outbox of each topic that has one, or had. Empty also if a database does not answer."""
        if not any(topic.outbox for topic in operations.config.topics.values()):
            return []
        if needs_this_thread():
            return waiting(operations)
        # While a database hangs, one thread waits for it, not one for each scrape.
        if self._thread is None or not self._thread.is_alive():
            self._thread = _Reading(operations)
            self._thread.start()
        self._thread.join(SECONDS)
        if self._thread.is_alive():
            logger.warning(
                "Metrics of the outbox are missing: a database does not answer within %g s", SECONDS
            )
            return []
        return self._thread.found


class _Reading(threading.Thread):
    """Reads the outbox once."""

    def __init__(self, operations: Operations) -> None:
        super().__init__(name="rmq-metrics-outbox", daemon=True)
        self._operations = operations
        self.found: list[Waiting] = []

    def run(self) -> None:
        try:
            self.found = waiting(self._operations)
        finally:
            databases.close_all()  # those of this thread, which nobody uses again


def waiting(operations: Operations) -> list[Waiting]:
    """Return what is in the outbox of each topic that has one, or had."""
    kept = [name for name, topic in operations.config.topics.items() if topic.outbox]
    try:
        found = {one.topic: one for one in operations.outbox()}
    except RmqError as error:
        logger.warning("Metrics of the outbox cannot be read: %s", error)
        return []
    return [found.get(name) or Waiting(name) for name in dict.fromkeys([*kept, *found])]


def families(found: list[Waiting]) -> Iterable[Metric]:
    """Return the metrics of what is in the outbox."""
    messages = GaugeMetricFamily(
        "rmq_outbox_messages",
        "Messages in the outbox by state: waiting (for the relay or their sender), refused (left out by the relay).",
        labels=("topic", "state"),
    )
    oldest = GaugeMetricFamily(
        "rmq_outbox_oldest_seconds",
        "Time since the oldest message that waits in the outbox was sent; 0 if none waits.",
        labels=("topic",),
    )
    for one in found:
        for state, count in zip(STATES, (one.messages, one.refused), strict=True):
            messages.add_metric((one.topic, state), count)
        oldest.add_metric((one.topic,), (one.oldest_ms or 0) / 1000)
    yield messages
    yield oldest


__all__ = ["STATES", "Reader", "families"]
