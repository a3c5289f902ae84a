"""A worker of 65,536 slots: it starts, takes messages at once, and costs little when nothing is there."""

from __future__ import annotations

import time

import pytest
import redis

from django_rmq.core.model.topic import Topic, TopicType
from tests.support.brokers import Broker
from tests.support.workers import Heard, Worker, client_of, eventually, send

SLOTS = 65_536
MANY = Topic("many", TopicType.RANGE_MERGE, slots=SLOTS, time_range_ms=1)


@pytest.mark.proof
def test_sixty_five_thousand_slots_are_owned_and_cost_little(redis_url: str, prefix: str) -> None:
    client: redis.Redis = client_of(redis_url)
    broker, heard = Broker(client, prefix), Heard()
    send(broker, MANY, range(100))
    began = time.monotonic()
    with Worker(broker, MANY, heard) as worker:
        heard.wait(100, 120)
        print(f"100 messages of before were taken after {time.monotonic() - began:.1f} s")
        dispatcher = worker.dispatcher
        eventually(
            lambda: len(dispatcher._table) == SLOTS and not dispatcher._acquirer.unacquired,
            "acquiring every slot",
            60,
        )
        print(f"all slots were acquired after {time.monotonic() - began:.1f} s")
        eventually(lambda: not dispatcher._table.awake, "sleeping", 60)
        send(broker, MANY, range(100, 200))
        heard.wait(200, 60)
        eventually(lambda: not dispatcher._table.awake, "sleeping again", 60)
        before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        asked = time.monotonic()
        eventually(lambda: time.monotonic() - asked > 3, "being idle")
        calls = client.info("commandstats")["cmdstat_evalsha"]["calls"] - before
        assert calls / (time.monotonic() - asked) <= 25, "goal: 5 scripts per second"
        # A program that knows nothing of us: found by the slow poll, which goes through all slots in turn.
        client.zadd(f"{prefix}many_{SLOTS - 1}", {b'"foreign"': time.time() * 1000})
        heard.wait(201, 16 * 5)
    client.close()
