"""Two-phase consumption for programs that are not workers: what a consumer takes, and how each delivery ends.

A consumer is a UUID that a program generates once; its user's name precedes it, so that it cannot be mistaken
for another consumer or a worker. It has the gate, the retries and the time-outs of a worker, and counts
against MAX_RATE and MAX_IN_FLIGHT like one. It owns no slots: it tries those in which something is due, in
turn, and skips those that others hold.

A **receipt** stands for one delivery of one slot. Its holder may settle the messages of the delivery. It
cannot be guessed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from django_rmq.core.commands import fetch
from django_rmq.core.commands.batching import walk
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.limits import (
    BATCH,
    MAX_DURATION_MS,
    is_whole,
    shown,
)
from django_rmq.core.model.message import Message
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, OperationRefused
from django_rmq.message_ids import id_of
from django_rmq.operations.actors import Actor, Permission
from django_rmq.operations.context import OperationContext
from django_rmq.operations.long_poll import LONGEST_WAIT, ROUND_SECONDS, LongPoll
from django_rmq.operations.permits import Permits
from django_rmq.operations.receipts import sealed
from django_rmq.operations.settlement import SettledDelivery, SettlementOutcome, Settlements

HELD_AT_ONCE = 512
"""The number of slots asked in one round trip for what a consumer holds there."""


class HeldDelivery(NamedTuple):
    """A part of what a consumer holds."""

    messages: list[Message]
    next_slot: int | None
    """The slot at which to continue. None: that was all."""


class Deliveries:
    """Operations of one actor's consumers on one topic. Every method raises ``ServerTrouble``."""

    def __init__(self, actor: Actor, topic: Topic, broker: Broker) -> None:
        self._topic = topic
        self._broker = broker
        self._who = f"{actor.via}:{getattr(actor.user, 'pk', None) or actor.name}"
        permits = Permits(broker, topic)
        self._taking = LongPoll(broker, topic, permits)
        self._settling = Settlements(broker, topic, permits)

    def owner(self, consumer: UUID) -> str:
        """Return the name under which this actor's ``consumer`` holds the gate of a slot."""
        return f"{self._who}:{consumer.hex}"

    # --- the first phase

    def take(self, consumer: UUID, most: int, wait: float = 0.0) -> list[Message]:
        """Return up to ``most`` messages that are due now, or the first ones within ``wait`` seconds.

        Messages of one slot are returned in the order in which to process them, one after the other.
        """
        return self._taking.take(self.owner(consumer), most, wait)

    def held(self, consumer: UUID, first: int = 0) -> HeldDelivery:
        """Return what ``consumer`` holds, from slot ``first`` on; used to continue after a lost answer.

        Raises ``OperationRefused`` for a topic without a gate, for which it is unknown who holds what.
        """
        topic = self._topic
        if not topic.serial:
            raise OperationRefused(
                f"topic {topic.name} is not SERIAL, so the messages that a consumer holds are unknown. "
                "They are delivered again after their time-out"
            )
        owner, found = self.owner(consumer), list[Message]()
        end = time.monotonic() + ROUND_SECONDS
        for start in range(first, topic.slots, HELD_AT_ONCE):
            slots = range(start, min(start + HELD_AT_ONCE, topic.slots))
            calls = [fetch.held(topic, slot, owner, 0, BATCH) for slot in slots]
            for slot, page in zip(slots, walk(self._broker, calls), strict=True):
                found += [Message(topic, slot, one.receipt, one.delivery) for one in page or ()]
            if slots.stop < topic.slots and (len(found) >= BATCH or time.monotonic() > end):
                return HeldDelivery(found, slots.stop)
        return HeldDelivery(found, None)

    # --- the second phase

    def receipt(self, message: Message) -> str:
        """Return the receipt of a message that was taken."""
        return sealed(message.topic.name, message.slot, message.receipt)

    def id(self, message: Message) -> str:
        """Return the id with which a taken message is settled; a consumer may know what it holds."""
        return id_of(message.topic, message.slot, message.delivery.member, sealed=False)

    def commit(self, settled: Sequence[SettledDelivery]) -> list[str]:
        """End deliveries successfully. Answers ok or stale (the delivery has ended already) for each."""
        return self._settling.settle("commit", settled)

    def release(self, settled: Sequence[SettledDelivery]) -> list[str]:
        """Give deliveries back; no retry is used. Answers ok or stale for each."""
        return self._settling.settle("release", settled)

    def extend(self, settled: Sequence[SettledDelivery]) -> list[str]:
        """Restart the time-out of deliveries. Answers ok or stale for each."""
        return self._settling.settle("extend", settled)

    def rollback(
        self, settled: Sequence[SettledDelivery], outcomes: Sequence[SettlementOutcome]
    ) -> list[str]:
        """End deliveries as failed. Answers ok, stale or cancelled (it was, and ended so) for each."""
        for how in outcomes:
            if how.delay_ms is not None and not (
                is_whole(how.delay_ms) and 0 <= how.delay_ms <= MAX_DURATION_MS
            ):
                raise InvalidRequest(
                    f"the delay must be from 0 to {MAX_DURATION_MS} ms, got {shown(how.delay_ms)}"
                )
        return self._settling.settle("rollback", settled, outcomes)


def deliveries_of(desk: OperationContext, name: str) -> Deliveries:
    """Return the deliveries of a topic. Raises ``TopicMismatch`` under the same conditions as a worker."""
    desk.actor.require(Permission.CONSUME)
    return Deliveries(desk.actor, desk.agreed(name), desk.broker)


__all__ = [
    "LONGEST_WAIT",
    "Deliveries",
    "HeldDelivery",
    "SettledDelivery",
    "SettlementOutcome",
    "deliveries_of",
]
