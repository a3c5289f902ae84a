"""Round trips of sends: Redis executes one while the next one is packed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar, cast

from django_rmq.core.commands import operate, send
from django_rmq.core.commands.broker_interface import Broker, BrokerPipeline
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.replies import Sent
from django_rmq.core.model.send_results import (
    STORED,
    Durability,
    SendResult,
    SendStatus,
)
from django_rmq.core.model.topic import TopicType
from django_rmq.core.producer.placement import Outgoing
from django_rmq.exceptions import RmqError, SlotMoved

ROUND_TRIP = 6_000
"""The number of messages per round trip of a bulk send, at most."""

TRIP_BYTES = 2_097_152
"""The number of bytes per round trip, at most; a larger message has one of its own. Two trips can be under way, and
both have to pass within the time-out of a socket: 1 s in a web process."""

Trip = TypeVar("Trip")


class SendPlan(Protocol[Trip]):
    """A series of round trips and the destination of their answers."""

    @property
    def has_stopped(self) -> bool:
        """Whether an error keeps the round trips behind it from being sent."""

    def trips(self) -> Iterator[Trip]:
        """Yield the content of each round trip."""

    def calls(self, trip: Trip) -> Iterable[Call[Any]]:
        """Return the calls of a round trip."""

    def land(
        self, trip: Trip, replies: Sequence[Any], confirmed: tuple[int | None, bool | None] | None
    ) -> None:
        """Take the answer of each call, which may be an error, and the confirmed durability of all of them."""

    def lose(self, trip: Trip, error: RmqError) -> None:
        """Record that no answer came."""


def fly(
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
                pipeline.keep_order()
                while in_flight:
                    _land(plan, *in_flight.popleft())
            if plan.has_stopped:
                return None
            in_flight.append((pipeline.send(), trip))
            if len(in_flight) > 1:
                _land(plan, *in_flight.popleft())
    except RmqError as error:
        return error
    finally:
        while in_flight:
            _land(plan, *in_flight.popleft())
    return None


def _land(plan: SendPlan[Trip], pipeline: BrokerPipeline, trip: Trip) -> None:
    try:
        replies = pipeline.receive()
    except RmqError as error:
        plan.lose(trip, error)
    else:
        plan.land(trip, replies, pipeline.confirmed)


class Mixed:
    """Messages of any topics, each with its own result. The content of one call is a list of indexes."""

    def __init__(self, messages: Sequence[Outgoing], wanted: Durability) -> None:
        self._messages = messages
        self.is_in_line = any(out.topic.is_fifo for out in messages)
        """Whether some of them have an order: what comes behind an error is then not sent."""
        self._spans = list(spans([len(out.member) + len(out.envelope or b"") for out in messages]))
        self.repeats = len(self._spans) > 1 and len({(out[0].name, *out[1:3]) for out in messages}) < len(
            messages
        )
        """Whether two round trips may carry the same message: the second one must not overtake the first."""
        self.results = [SendResult(out.topic.name, out.slot, out.member, wanted=wanted) for out in messages]
        self.errors: dict[int, RmqError] = {}

    @property
    def has_stopped(self) -> bool:
        """Whether an error keeps messages of a fifo topic from being sent out of order."""
        # rule: sends_on_behind_an_error
        return self.is_in_line and any(not isinstance(error, SlotMoved) for error in self.errors.values())

    def trips(self) -> Iterator[list[list[int]]]:
        """Yield, per round trip, groups of indexes that one script takes: same slot, range, kind and form.

        Within a slot they keep their order, because the first of two sends of a member decides its time.
        """
        for start, end in self._spans:
            groups: list[list[int]] = []
            latest: dict[tuple[str, int], tuple[tuple[int, str, bool], list[int]]] = {}
            for i in range(start, end):
                topic, slot, _, score, envelope, act, _ = self._messages[i]
                shares = topic.is_fifo or (topic.type is TopicType.RANGE_MERGE and act == "send")
                manner = (score if shares else 0, act, envelope is None)
                found = latest.get((topic.name, slot))
                if found is not None and found[0] == manner and len(found[1]) < BATCH:
                    found[1].append(i)
                else:
                    group = [i]
                    groups.append(group)
                    latest[topic.name, slot] = (manner, group)
            yield groups

    def calls(self, trip: list[list[int]]) -> Iterable[Call[Any]]:
        """Return a call for each group."""
        return (call_of([self._messages[i] for i in indexes]) for indexes in trip)

    def land(
        self,
        trip: list[list[int]],
        replies: Sequence[Any],
        confirmed: tuple[int | None, bool | None] | None,
    ) -> None:
        """Complete the results."""
        for indexes, reply in zip(trip, replies, strict=True):
            if isinstance(reply, RmqError):
                self.errors.update(dict.fromkeys(indexes, reply))
                continue
            for i, answer in zip(indexes, reply, strict=True):
                complete(self.results[i], answer)
                if confirmed is not None and self.results[i].status != "refused":
                    self.results[i].replicas, self.results[i].fsynced = confirmed

    def lose(self, trip: list[list[int]], error: RmqError) -> None:
        """Record that it is unknown whether these messages arrived."""
        for indexes in trip:
            self.errors.update(dict.fromkeys(indexes, error))

    def give_up(self, trouble: RmqError | None) -> None:
        """Mark everything without an outcome as failed, with ``trouble`` as the reason if no other is known."""
        trouble = trouble or next(iter(self.errors.values()), None)
        for i, result in enumerate(self.results):
            if result.status == "pending":
                result.status = "failed"
                if trouble is not None:
                    self.errors.setdefault(i, trouble)


def spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
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


def call_of(batch: Sequence[Outgoing]) -> Call[Any]:
    """Return the call that sends or removes ``batch``, whose messages share topic, slot and kind."""
    topic, slot, _, score, _, act, _ = batch[0]
    _, _, members, scores, envelopes, _, _ = zip(*batch, strict=True)
    if act == "remove":
        return operate.remove(topic, slot, members, "live")
    if act == "cancel":
        return operate.cancel(topic, slot, members)
    bodies = [envelope for envelope in envelopes if envelope is not None]
    if topic.is_fifo:
        return send.send_fifo(topic, slot, score, members, bodies, ensure=act == "ensure")
    if act == "ensure":
        return send.ensure(topic, slot, scores, members, bodies)
    if topic.type is TopicType.RANGE_MERGE:
        return send.send_merge(topic, slot, score, members, bodies)
    return send.send_replace(topic, slot, scores, members, bodies)


def complete(result: SendResult, answer: str | Sent) -> None:
    """Set a result from a transition's answer: a status and a score, or a word about a removal."""
    word, result.score = (answer, result.score) if isinstance(answer, str) else answer
    result.status = cast("SendStatus", word)


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of up to ``size`` items."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
