"""What waiting messages take of a real server, beside the table in docs/deploy/sizing.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis

from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.core.redis.broker import RedisBroker
from example_project.demo.redis_server import redis_server_binaries
from tests.support.servers import RedisServer, absent
from tests.support.workers import client_of

PAGE = Path(__file__).parents[2] / "docs" / "deploy" / "sizing.md"
FAR = 4_000_000_000_000
"""A due time (ms) that no test reaches."""


class Load(NamedTuple):
    messages: int
    body_bytes: int
    slots: int
    key_bytes: int = 0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A Redis with jemalloc, as distributions build it, whose whole memory is measured."""
    for binary in redis_server_binaries():
        with RedisServer(binary=binary) as found, client_of(found.url) as client:
            told = client.info()
            if told.get("server_name", "redis") == "redis" and told["mem_allocator"].startswith("jemalloc"):
                yield found
                return
    absent("no redis-server with jemalloc is installed: apt-get install redis-server")


def measured(server: RedisServer, load: Load, kind: TopicType) -> int:
    """Return by how much the memory of a server grows with the messages of ``load``."""
    client = client_of(server.url)
    client.execute_command("FLUSHALL", "SYNC")
    producer = Producer(RedisBroker(client))
    topic = Topic(
        "planned", kind, slots=load.slots, body="bytes", identity="key" if load.key_bytes else "body"
    )
    if kind is TopicType.RANGE_MERGE:
        topic = Topic("planned", kind, slots=load.slots, body="bytes", time_range_ms=3_600_000)
    # The scripts are loaded before, and stay.
    producer.send([sent(producer, topic, load, 0)])
    client.delete(*client.keys("*"))
    before = used(client)
    for start in range(0, load.messages, 1_000):
        numbers = range(start, min(start + 1_000, load.messages))
        producer.send([sent(producer, topic, load, number) for number in numbers])
        if kind is TopicType.RANGE_MERGE:
            producer.send([sent(producer, topic, load, number) for number in numbers])
    assert sum(client.zcard(f"planned_{slot}") for slot in range(load.slots)) == load.messages
    grown = used(client) - before
    client.close()
    return grown


def used(client: redis.Redis) -> int:
    """Return what keys and values take: newer servers also count scripts, and the garbage of Lua, as used."""
    found = client.memory_stats()
    return int(found["dataset.bytes"]) + sum(found.get("db.0", {}).values())


def sent(producer: Producer, topic: Topic, load: Load, number: int) -> Any:
    body = b"%0*d" % (load.body_bytes, number) if not load.key_bytes else b"x" * load.body_bytes
    options: dict[str, Any] = {"key": f"{number:0{load.key_bytes}}"} if load.key_bytes else {}
    if topic.type is TopicType.FIXED_TIME:
        options["fixed_time"] = FAR + number
    if topic.type is TopicType.PRIORITY:
        options["priority"] = 500
    return producer.build(topic, body, **options)


ROWS = {
    "20,000 of 40 bytes in 16 slots": (TopicType.FIXED_TIME, Load(20_000, 40, 16)),
    "20,000 of 40 bytes in 1,024 slots": (TopicType.FIXED_TIME, Load(20_000, 40, 1_024)),
    "20,000 of 60 bytes, each sent twice and merged, 64 slots": (TopicType.RANGE_MERGE, Load(20_000, 60, 64)),
    "10,000 of 500 bytes with priorities, 64 slots": (TopicType.PRIORITY, Load(10_000, 500, 64)),
    "4,000 of 4,096 bytes in 16 slots": (TopicType.FIXED_TIME, Load(4_000, 4_096, 16)),
    "20,000 of 200 bytes with keys of 36, 16 slots": (TopicType.FIXED_TIME, Load(20_000, 200, 16, 36)),
    "20,000 of 40 bytes with keys of 20, 1,024 slots": (TopicType.FIXED_TIME, Load(20_000, 40, 1_024, 20)),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_waiting_message_takes_about_what_the_page_says(server: RedisServer, row: str) -> None:
    kind, load = ROWS[row]
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {row} |")]
    said = int(re.findall(r"[\d,]+", line.removeprefix(f"| {row} |"))[0].replace(",", ""))
    taken = measured(server, load, kind) / load.messages
    assert taken * 0.75 < said < taken * 1.25, taken
