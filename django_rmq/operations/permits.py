"""The limits of a topic, MAX_RATE and MAX_IN_FLIGHT, for consumption by requests.

Each delivery of a slot has permits under its own name, so that they end with it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

from django_rmq.core.commands import limit_shares
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.message import Message
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ServerTrouble

logger = logging.getLogger("django_rmq.operations")

WISH_MS = 2_000
"""Milliseconds for which a consumer's unmet request under its topic's MAX_IN_FLIGHT is remembered."""


class Permits:
    """The limits of one topic. Without limits nothing is requested."""

    def __init__(self, broker: Broker, topic: Topic) -> None:
        self._broker = broker
        self._topic = topic

    def ask(self, request: str, most: int) -> tuple[int, int]:
        """Return how many messages may be taken now, and how many deliveries of MAX_RATE were used for that."""
        topic = self._topic
        if not (topic.max_rate or topic.max_in_flight):
            return most, 0
        tokens = most if topic.max_rate else 0
        wanted = most if topic.max_in_flight else 0
        allowed = self._broker.run(
            limit_shares.allow(
                topic, request, tokens=tokens, in_use=0, wanted=wanted, lease_ms=_lease_ms(topic)
            )
        )
        by_rate = allowed.tokens if topic.max_rate else most
        by_flight = allowed.permits if topic.max_in_flight else most
        return min(most, by_rate, by_flight), by_rate if topic.max_rate else 0

    def tell(self, request: str, wish: int, tokens: int, taken: Sequence[Message]) -> None:
        """Report what is in flight now, and give back what was not needed.

        ``wish``: for a moment it is remembered that this many are wanted, so that others leave a share.
        """
        topic = self._topic
        if not (topic.max_rate or topic.max_in_flight):
            return
        try:
            for (slot, receipt), count in _counted(taken if topic.max_in_flight else ()).items():
                name, lease_ms = _holding(slot, receipt), _lease_ms(topic)
                self._broker.run(
                    limit_shares.allow(topic, name, tokens=0, in_use=count, wanted=0, lease_ms=lease_ms)
                )
            unused = len(taken) - tokens if topic.max_rate else 0
            wanted = wish if topic.max_in_flight else 0
            self._broker.run(
                limit_shares.allow(topic, request, tokens=unused, in_use=0, wanted=wanted, lease_ms=WISH_MS)
            )
        except ServerTrouble:
            # The permits stay counted for as long as the taken messages may be in flight.
            logger.warning("Cannot count the taken messages in the limits of topic %s", topic.name)

    def note_end(self, slot: int, receipt: int, ended: int) -> None:
        """Stop counting this many messages of a delivery as in flight; with none, its permits last longer."""
        topic = self._topic
        lease_ms = 0 if ended else _lease_ms(topic)
        try:
            self._broker.run(limit_shares.end_permits(topic, _holding(slot, receipt), ended, lease_ms))
        except ServerTrouble:
            logger.warning("Cannot count the ended messages in the limits of topic %s", topic.name)


def _counted(messages: Iterable[Message]) -> dict[tuple[int, int], int]:
    counted: defaultdict[tuple[int, int], int] = defaultdict(int)
    for message in messages:
        counted[message.slot, message.receipt] += 1
    return counted


def _holding(slot: int, receipt: int) -> str:
    """Return the name under which one delivery of one slot has its permits."""
    return f"delivery:{slot}:{receipt}"


def _lease_ms(topic: Topic) -> int:
    """Return how long a silent delivery counts as in flight: until it has timed out."""
    return topic.timeout * 1000 + 1000


__all__ = ["Permits"]
