"""Sends in round trips: how many messages one carries, and how two can be under way at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from django_rmq.core.commands.broker_interface import Broker, BrokerPipeline
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.send_results import STORED, Durability
from django_rmq.exceptions import RmqError

ROUND_TRIP = 6_000
"""The maximum number of messages per round trip of a bulk send."""

TRIP_BYTES = 2_097_152
"""The maximum number of bytes per round trip; a larger message has a round trip of its own. Two trips can be under way, and
both have to pass within the time-out of a socket: 1 s in a web process."""

Trip = TypeVar("Trip")


class SendPlan(Protocol[Trip]):
    """A series of round trips and the destination of their answers."""

    @property
    def has_stopped(self) -> bool:
        """Whether an error prevents the following round trips from being sent."""

    def trips(self) -> Iterator[Trip]:
        """Yield the content of each round trip."""

    def calls(self, trip: Trip) -> Iterable[Call[object]]:
        """Return the calls of a round trip."""

    def receive(
        self, trip: Trip, replies: Sequence[object], confirmed: tuple[int | None, bool | None] | None
    ) -> None:
        """Take the answer of each call, which may be an error, and the confirmed durability of all of them."""

    def fail(self, trip: Trip, error: RmqError) -> None:
        """Record that the answer was lost."""


def send_trips(
    broker: Broker, plan: SendPlan[Trip], wanted: Durability = STORED, *, in_order: bool = False
) -> RmqError | None:
    """Send the trips of ``plan`` until it has stopped; return the error that prevented some from being sent, or None.

    Two trips may overtake each other, unless ``in_order``: then the next one is packed, but not sent before the answer.
    """
    in_flight: deque[tuple[BrokerPipeline, Trip]] = deque()
    try:
        for trip in plan.trips():
            pipeline = broker.pipeline()
            for call in plan.calls(trip):
                pipeline.add(call)
            if wanted != STORED:
                pipeline.confirm(wanted)
            if in_order:
                # After NOSCRIPT or MOVED a call is repeated, which would put it behind the calls that follow it.
                pipeline.keep_order()
                while in_flight:
                    _receive(plan, *in_flight.popleft())
            if plan.has_stopped:
                return None
            in_flight.append((pipeline.send(), trip))
            if len(in_flight) > 1:
                _receive(plan, *in_flight.popleft())
    except RmqError as error:
        return error
    finally:
        # Redis has the trips that were sent, so their answers count although a later trip could not be sent.
        while in_flight:
            _receive(plan, *in_flight.popleft())
    return None


def _receive(plan: SendPlan[Trip], pipeline: BrokerPipeline, trip: Trip) -> None:
    try:
        replies = pipeline.receive()
    except RmqError as error:
        plan.fail(trip, error)
    else:
        plan.receive(trip, replies, pipeline.confirmed)


def trip_spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where each round trip begins and ends among messages of these sizes in bytes."""
    for start in range(0, len(sizes), ROUND_TRIP):
        part = sizes[start : start + ROUND_TRIP]
        if sum(part) > TRIP_BYTES:
            carried = 0
            for index, size in enumerate(part, start):
                if carried and carried + size > TRIP_BYTES:
                    yield start, index
                    start, carried = index, 0
                carried += size
        yield start, min(start - start % ROUND_TRIP + ROUND_TRIP, len(sizes))


def batched(items: Iterable[object], size: int) -> Iterator[list[object]]:
    """Yield lists of up to ``size`` items."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
