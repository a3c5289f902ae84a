"""Metrics of the outbox, which is in the databases of the project and readable without Redis."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from django_rmq.operations import Operations, Waiting

logger = logging.getLogger("django_rmq.metrics")

STATES = ("waiting", "refused")
"""The states of messages in the outbox: for the relay or their sender, and left out by the relay."""

SECONDS = 2.0
"""Maximum seconds for which a scrape waits for the databases."""


def waiting(operations: Operations) -> list[Waiting]:
    """Return what is in the outbox of each topic that has one, or had. Empty also if a database does not answer.

    What only some of the databases have is not reported: too small a number would end an alert.
    """
    kept = [name for name, topic in operations.config.topics.items() if topic.outbox]
    if not kept:
        return []
    waits, problems = operations.outbox_as_known(seconds=SECONDS)
    if problems:
        logger.warning("Metrics of the outbox are missing: %s", "; ".join(problems))
        return []
    found = {one.topic: one for one in waits}
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


__all__ = ["STATES", "families", "waiting"]
