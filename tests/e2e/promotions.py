"""Primaries that are cut off from their replica and killed, and whose replica is promoted.

What had been confirmed is there, and no receipt is given twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from redis.crc import key_slot

from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.send_results import Durability
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.producer import Producer
from tests.support.brokers import Broker, ClusterBroker
from tests.support.servers import RedisCluster, ReplicaPair, ask, wait_for_link, wait_until
from tests.support.workers import client_of, cluster_of

TOPIC = Topic("work", TopicType.RANGE_MERGE, slots=16, time_range_ms=60_000)
TAKEN = Topic("taken", TopicType.RANGE_MERGE, slots=1, time_range_ms=0, timeout=3600)
"""The topic whose messages are delivered before and after a promotion."""

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
    deliveries_lost: int = 0
    """Whose receipts the promoted replica has never heard of."""
    receipts_twice: int = 0
    """Those that both gave, or that are not above all before them."""


def deliver(broker: Broker | ClusterBroker) -> int:
    """Send a message, take it and commit it; return the receipt."""
    # One of its own: the last one is still in flight, where only its commit was lost.
    broker.send_merge(TAKEN, 0, 0, [b"%d" % time.time_ns()])
    taken = broker.prepare(TAKEN, 0, "test", None, 10)
    assert taken.status == "ok"
    broker.commit(TAKEN, 0, taken.receipt, [each.member for each in taken.deliveries])
    return taken.receipt


def promotions(runs: int, progress: Callable[[int], None] = lambda done: None) -> Outcome:
    """Send with ``replicas=1``, cut the link in the midst of it, go on, kill the primary, promote the replica, and look."""
    outcome = Outcome()
    for run in range(runs):
        with ReplicaPair() as pair:
            broker = Broker(client_of(pair.primary.url))
            producer = Producer(Broker(client_of(pair.primary.url, PATIENCE)))
            receipts: list[int] = []
            confirmed: set[bytes] = set()
            stored: set[bytes] = set()
            for trip in range(TRIPS):
                if trip == TRIPS - 8 + run % 5:
                    pair.link.cut()
                receipts.append(deliver(broker))
                messages = [producer.build(TOPIC, {"name": f"{run}-{trip}-{n}"}) for n in range(20)]
                found, _ = producer.attempt(messages, Durability(replicas=1))
                stored |= {each.member for each in found if each.ok}
                confirmed |= {each.member for each in found if each.durable}
            pair.primary.kill()
            kept = Broker(client_of(pair.promote().url))
            here = {
                entry.member
                for slot in range(TOPIC.slots)
                for entry in kept.list_messages(TOPIC, slot, "store", limit=1000).entries
            }
            known = kept.reslot_progress(TAKEN, 0).deliveries
            again = [deliver(kept) for _ in range(TRIPS)]
            for each in (kept, broker, producer.broker):
                each.close()
        outcome.runs += 1
        outcome.confirmed += len(confirmed)
        outcome.confirmed_and_lost += len(confirmed - here)
        outcome.others_lost += len(stored - confirmed - here)
        outcome.deliveries_lost += sum(receipt > known for receipt in receipts)
        outcome.receipts_twice += sum(receipt <= max(receipts) for receipt in again)
        progress(outcome.runs)
    return outcome


def cluster_promotions(runs: int, progress: Callable[[int], None] = lambda done: None) -> Outcome:
    """Take messages, cut the replica off, take more, kill the primary, and take more from the replica that takes over."""
    outcome = Outcome()
    with RedisCluster() as server:
        broker = ClusterBroker(cluster_of(server, patience=30.0))
        place = key_slot(slot_keys(broker.prefix, TAKEN.name, 0).control)
        primary = server.owner(place)
        replica = server.replicas[server.primaries.index(primary)]
        for _ in range(runs):
            receipts = [deliver(broker) for _ in range(TRIPS // 2)]
            wait_until(lambda: ask(primary.port, "WAIT", 1, 1000) == 1, "the replica having all of it")  # noqa: B023
            # The replica comes again at once, and is refused: with the older command too.
            ask(primary.port, "ACL", "SETUSER", "default", "-psync", "-sync")
            ask(primary.port, "CLIENT", "KILL", "TYPE", "REPLICA")
            receipts += [deliver(broker) for _ in range(TRIPS // 2)]
            primary.kill()
            server.wait_for_promotion(replica)
            known = broker.reslot_progress(TAKEN, 0).deliveries
            again = [deliver(broker) for _ in range(TRIPS // 2)]
            primary.start()
            wait_for_link(primary)
            primary, replica = replica, primary
            outcome.runs += 1
            outcome.deliveries_lost += sum(receipt > known for receipt in receipts)
            outcome.receipts_twice += sum(receipt <= max(receipts) for receipt in again)
            progress(outcome.runs)
        broker.close()
    return outcome
