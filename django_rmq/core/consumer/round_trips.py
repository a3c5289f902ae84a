"""Trips: each round trip sends what was settled and asks for what is due; one is under way while the next is packed."""

from __future__ import annotations

from typing import NamedTuple

from django_rmq.core.commands.broker_interface import Broker, BrokerPipeline
from django_rmq.core.consumer.acks import AckCall, AckQueue, Settlements
from django_rmq.core.consumer.fetch import FetchPlan, FetchPlanner
from django_rmq.core.consumer.fetch_replies import FetchReplies
from django_rmq.core.consumer.memory_budget import MemoryBudget
from django_rmq.core.consumer.server_clock import uptime
from django_rmq.exceptions import ServerTrouble


class RoundTrip(NamedTuple):
    """A round trip that is under way."""

    pipeline: BrokerPipeline
    told: Settlements
    """The settlements that it sends; they are sent again if its answer is lost."""
    parts: list[AckCall]
    """The calls that send them."""
    asked: FetchPlan
    at: float
    """``uptime`` when it was sent."""


class RoundTrips:
    """Makes the round trips of one worker."""

    def __init__(
        self,
        broker: Broker,
        settling: AckQueue,
        asking: FetchPlanner,
        answering: FetchReplies,
        granted: MemoryBudget,
    ) -> None:
        self.under_way: RoundTrip | None = None
        """The trip that Redis works on while the answer to the previous one is read, and the next one packed."""
        self._broker = broker
        self._settling = settling
        self._asking = asking
        self._answering = answering
        self._granted = granted

    def make(self) -> bool:
        """Make a round trip if there is anything to send or to ask; return whether there was."""
        sent = self.send()
        trip, self.under_way = self.under_way, sent
        if trip is None:
            if sent is None:
                return self._asking.ask_limits()
            if self._asking.has_more:
                return True
            trip, self.under_way = sent, None
        self.receive(trip)
        # Not earlier: a message that has ended is in flight for all others until Redis has received that.
        self._asking.ask_limits()
        return True

    def send(self, *, takes: bool = True) -> RoundTrip | None:
        """Send what is to be settled and, if it ``takes``, what is asked. None: nothing."""
        pipeline = self._broker.pipeline()
        told, parts = self._settling.queue(pipeline)
        coming, told_before = (self.under_way.asked, self.under_way.told) if self.under_way else (None, ())
        # This trip may overtake the one under way, and a strict slot would answer that it is busy.
        held = {place for place, _ in told_before if place.topic.is_strict}  # rule: asks_beside_a_commit
        asked = self._asking.queue(pipeline, coming, held) if takes else self._asking.nothing()
        if not len(pipeline):
            return None
        trip = RoundTrip(pipeline, told, parts, asked, uptime())
        for place in asked.places:
            place.asked = True
        try:
            pipeline.send()
        except ServerTrouble:
            self.lost(trip)
            raise
        return trip

    def receive(self, trip: RoundTrip) -> None:
        """Wait for the answer to a trip, and process it. Raises trouble that concerns more than one slot."""
        try:
            trip.pipeline.receive()
        except ServerTrouble:
            self.lost(trip)
            raise
        self._granted.answered(trip.asked.bytes)
        trouble = self._settling.settled(trip.told, trip.parts)
        for place, answer in trip.asked.places.items():
            trouble = self._answering.prepared(place, answer.result(), trip.at) or trouble
        if trouble is not None:
            raise trouble

    def receive_rest(self) -> None:
        """Wait for the trip that is under way."""
        trip, self.under_way = self.under_way, None
        if trip is not None:
            self.receive(trip)

    def lost(self, trip: RoundTrip) -> None:
        """Send again what was sent, and ask what was handed out, because the answer to a trip was lost."""
        self._granted.answered(trip.asked.bytes)
        for place in trip.asked.places:
            self._answering.lost(place)
        self._settling.lost(trip.told)


__all__ = ["RoundTrip", "RoundTrips"]
