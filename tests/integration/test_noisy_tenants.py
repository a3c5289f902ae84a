"""A tenant who floods a topic with messages delays those who share its slot, and nobody else.

It is a matter of order, not of milliseconds: the flood waits before the others send.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.producer import Producer
from tests.support.brokers import OracleBroker
from tests.support.workers import LONG, Heard, Worker, send

FLOOD = 5_000
NOISY = "tenant 0"
OTHERS = [f"tenant {n}" for n in range(1, 21)]
TOPIC = Topic("jobs", TopicType.FIFO, slots=16, identity="key", slot_basis="tenant")


def shares(tenant: str) -> bool:
    """Return whether a tenant has the slot of the noisy one."""
    producer = Producer(OracleBroker())
    noisy, other = (producer.build(TOPIC, {"tenant": name}).slot for name in (NOISY, tenant))
    return noisy == other


def flood(broker: Any) -> None:
    """Send the messages of the noisy tenant, and then one of each other tenant."""
    send(broker, TOPIC, [{"tenant": NOISY, "n": n} for n in range(FLOOD)])
    send(broker, TOPIC, [{"tenant": tenant, "n": 0} for tenant in OTHERS])


def test_one_tenant_shares_the_slot_of_the_noisy_one() -> None:
    assert sum(map(shares, OTHERS)) == 1


def test_while_a_message_of_the_flood_runs_all_are_served_who_do_not_share_its_slot(broker: Any) -> None:
    served = Heard()
    free = threading.Event()

    def work(message: Message) -> None:
        if message.body["tenant"] == NOISY:
            assert free.wait(LONG), "the others were not served beside the flood"
        served.note(message.body["tenant"])

    flood(broker)
    quiet = [tenant for tenant in OTHERS if not shares(tenant)]
    with Worker(broker, TOPIC, work, threads=2):
        try:
            assert sorted(served.wait(len(quiet))) == sorted(quiet)
        finally:
            free.set()
        order = served.wait(FLOOD + len(OTHERS), 5 * LONG)
    # Those who share the slot come where they sent: behind all of the flood.
    assert sorted(order[-sum(map(shares, OTHERS)) :]) == sorted(filter(shares, OTHERS))


@pytest.mark.parametrize("threads", [1, 4])
def test_all_who_do_not_share_its_slot_are_served_long_before_a_flood_ends(broker: Any, threads: int) -> None:
    served = Heard()
    flood(broker)
    with Worker(broker, TOPIC, lambda message: served.note(message.body["tenant"]), threads=threads):
        order = served.wait(FLOOD + len(OTHERS), 5 * LONG)
    for tenant in OTHERS:
        place = order.index(tenant)
        assert place > FLOOD if shares(tenant) else place < FLOOD / 4, tenant
