"""Primaries that are cut off from their replica and killed, and whose replica is promoted: what had been confirmed is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from django_rmq.core.producer.sending import Producer
from django_rmq.core.words.results import Durability
from django_rmq.core.words.topics import Topic, TopicType
from tests.brokers import Broker
from tests.servers import ReplicaPair
from tests.workers import client_of

TOPIC = Topic("work", TopicType.RANGE_MERGE, slots=16, time_range_ms=60_000)
TRIPS = 20
"""Bulk sends in a run, of 20 messages each."""

PATIENCE = 0.3
"""Seconds a send may take. WAIT has 0.4 of them, and an idle Redis notices its end at the next tenth of a second."""


@dataclass
class Outcome:
    """What some runs have come to, in messages."""

    runs: int = 0
    confirmed: int = 0
    confirmed_and_lost: int = 0
    others_lost: int = 0
    """Stored, not confirmed, and gone with the primary."""


def promotions(runs: int, progress: Callable[[int], None] = lambda done: None) -> Outcome:
    """Send with ``replicas=1``, cut the link in the midst of it, go on, kill the primary, promote the replica, and look."""
    outcome = Outcome()
    for run in range(runs):
        with ReplicaPair() as pair:
            producer = Producer(Broker(client_of(pair.primary.url, PATIENCE)))
            confirmed: set[bytes] = set()
            stored: set[bytes] = set()
            for trip in range(TRIPS):
                if trip == TRIPS - 8 + run % 5:
                    pair.link.cut()
                messages = [producer.build(TOPIC, {"name": f"{run}-{trip}-{n}"}) for n in range(20)]
                found, _ = producer.attempt(messages, Durability(replicas=1))
                stored |= {each.member for each in found if each.ok}
                confirmed |= {each.member for each in found if each.durable}
            pair.primary.kill()
            kept = Broker(client_of(pair.promote().url))
            here = {
                entry.member
                for slot in range(TOPIC.slots)
                for entry in kept.peek(TOPIC, slot, "store", limit=1000).entries
            }
            kept.close()
            producer.broker.close()
        outcome.runs += 1
        outcome.confirmed += len(confirmed)
        outcome.confirmed_and_lost += len(confirmed - here)
        outcome.others_lost += len(stored - confirmed - here)
        progress(outcome.runs)
    return outcome
