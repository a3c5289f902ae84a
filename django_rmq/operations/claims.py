"""Claims of Spark queries on a topic: a list, and the return of a claim whose query will not end it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from django.utils.translation import gettext as _

from django_rmq.core.commands import claims as calls
from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import Broker, walk
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, OperationRefused, RmqError
from django_rmq.operations.audit_trail import recorded
from django_rmq.operations.authorization import PERMISSION_OF, OperationContext, Permission
from django_rmq.operations.bulk import BulkProgress, BulkRun, BulkTally


@dataclass(frozen=True, slots=True)
class ClaimStats:
    """One claim of a Spark query."""

    topic: str
    consumer: str
    """The query's name in Redis, which is also in the offsets of its checkpoint."""
    number: int
    state: str
    """open (being claimed), sealed (its batch can be read), acked, lost or returned (these are being ended)."""
    slots: tuple[int, ...]
    messages: int
    lease_ms: int
    """When the first of its leases ends (ms) unless it is renewed."""
    driver: str = ""
    """Where the query runs or ran, and since when; empty if it is not known."""


def claims(context: OperationContext, name: str) -> list[ClaimStats]:
    """Return the claims that hold something of a topic, in the order of their consumers."""
    topic = context.permitted(name, Permission.VIEW)
    return _found(_broker(context), topic)


def _broker(context: OperationContext) -> Broker:
    if context.config.broker == "memory":
        raise OperationRefused(
            _('there are no claims where RMQ["BROKER"] is "memory", which Spark cannot use')
        )
    return context.broker


def _found(broker: Broker, topic: Topic) -> list[ClaimStats]:
    slots = range(topic.slots)
    claimants = walk(broker, (inspect.rows(topic, slot, "claimants", 0, -1) for slot in slots))
    held = [
        (slot, consumer.decode(errors="replace"), int(float(ends)))
        for slot, rows in zip(slots, claimants, strict=True)
        for consumer, ends in zip(rows[::2], rows[1::2], strict=True)
    ]
    reads = walk(broker, (calls.read_claim(topic, slot, consumer) for slot, consumer, _ in held))
    counts = walk(broker, (_size_call(topic, slot) for slot, *_ in held))
    parts_of: defaultdict[tuple[str, int, str], list[tuple[int, int, int]]] = defaultdict(list)
    for (slot, consumer, ends), read, size in zip(held, reads, counts, strict=True):
        # The read of a claim that is being ended says that it is empty.
        parts_of[consumer, read.number, read.state].append((slot, size, ends))
    names = sorted({consumer for _, consumer, _ in held})
    asked = walk(broker, (calls.driver_of_consumer(topic, consumer) for consumer in names))
    drivers = {
        consumer: "" if driver is None else driver.where
        for consumer, driver in zip(names, asked, strict=True)
    }
    stats = []
    for (consumer, number, state), parts in sorted(parts_of.items()):
        in_slots, sizes, leases = zip(*parts, strict=True)
        driver = drivers[consumer]
        stats.append(
            ClaimStats(topic.name, consumer, number, state, in_slots, sum(sizes), min(leases), driver)
        )
    return stats


def return_claims(
    context: OperationContext, name: str, consumer: str | None = None, *, spent: bool = False
) -> BulkRun:
    """Give the messages of claims back to their slots: of ``consumer``, or of the only one that has any.

    ``spent``: each message uses a retry, as after a time-out, and one without retries left goes to Dead.
    Outcomes, of messages: ``returned``. Their query reads its batch as empty from now on, so it must be stopped
    first. Another query may use the name of the consumer from then on. Raises ``InvalidRequest`` if there are
    several consumers and none is named.
    """
    topic = context.permitted(name, PERMISSION_OF["return claims"])
    broker = _broker(context)
    claims = _found(broker, topic)
    holders = {one.consumer for one in claims}
    if consumer is None and len(holders) > 1:
        raise InvalidRequest(
            _("several consumers hold claims of %(topic)s: %(consumers)s")
            % {"topic": name, "consumers": ", ".join(sorted(holders))}
        )
    chosen = [one for one in claims if consumer in (None, one.consumer)]
    names = {one.consumer for one in chosen} | ({consumer} if consumer else set())
    steps = _returning(broker, topic, chosen, names, spent=spent)
    note = f"of {', '.join(sorted({one.consumer for one in chosen}))}" if chosen else ""
    if spent:
        note = f"{note}, with a retry used".removeprefix(", ")
    return recorded(context, "return claims", topic, note, steps)


def _returning(
    broker: Broker, topic: Topic, claims: list[ClaimStats], names: Iterable[str], *, spent: bool
) -> Iterator[BulkProgress]:
    tally = BulkTally(sum(one.messages for one in claims))
    yield tally.progress()
    for name in names:
        # Another query may use the name of the consumer from now on.
        broker.run(calls.leave_consumer(topic, name))
    for one in claims:
        for slot in one.slots:
            left: int | None = None
            try:
                before = _size(broker, topic, slot, one.consumer)
                while left is None or left:
                    # One script returns a bounded part of a claim, so it does not block Redis for long.
                    call = calls.return_claim(topic, slot, one.consumer, one.number, spent=spent)
                    word, left = broker.run(call)
                    if word == "ok":
                        tally.done += before - left
                        tally.outcomes["returned"] += before - left
                    before = left
            except RmqError as error:
                # The other slots are returned all the same.
                tally.failed(slot, error)
            yield from tally.report()
    yield tally.progress(is_complete=True)


def _size_call(topic: Topic, slot: int) -> Call[int]:
    """Return the call that counts the messages of the claim in a slot, which holds one claim at a time."""
    return inspect.count_between(topic, slot, "claim", -math.inf, math.inf)


def _size(broker: Broker, topic: Topic, slot: int, consumer: str) -> int:
    """Return how many messages of a slot a consumer has claimed."""
    claimants = broker.run(inspect.rows(topic, slot, "claimants", 0, -1))
    return broker.run(_size_call(topic, slot)) if consumer.encode() in claimants[::2] else 0
