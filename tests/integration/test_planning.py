"""`rmqplan`: its arithmetic, and its estimate of memory beside what a real server takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command

from django_rmq.core.producer.sending import Producer
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.core.words.topics import Topic, TopicType
from django_rmq.exceptions import ConfigurationError
from django_rmq.operations.planning import CONNECTIONS, Load, plan
from example_project.embedded_redis import redis_server_binaries
from tests.servers import RedisServer, absent
from tests.workers import client_of

FAR = 4_000_000_000_000
"""A due time (ms) that no test reaches."""


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


@pytest.mark.parametrize(
    ("kind", "load"),
    [
        pytest.param(TopicType.FIXED_TIME, Load(20_000, 40, slots=16), id="plain"),
        pytest.param(TopicType.FIXED_TIME, Load(20_000, 40, slots=1_024), id="plain-in-small-slots"),
        pytest.param(TopicType.PRIORITY, Load(10_000, 500, slots=64), id="priorities-of-larger-bodies"),
        pytest.param(TopicType.FIXED_TIME, Load(2_000, 4_096, slots=16), id="plain-of-large-bodies"),
        pytest.param(TopicType.FIXED_TIME, Load(20_000, 200, key_bytes=36, slots=16), id="keyed"),
        pytest.param(
            TopicType.FIXED_TIME, Load(20_000, 40, key_bytes=20, slots=1_024), id="keyed-in-small-slots"
        ),
        pytest.param(TopicType.RANGE_MERGE, Load(20_000, 60, slots=64), id="merging"),
    ],
)
def test_the_estimate_of_memory_is_near_what_a_server_takes(
    server: RedisServer, kind: TopicType, load: Load
) -> None:
    estimated, grown = plan(load).waiting_bytes, measured(server, load, kind)
    print(f"{kind.value} {load}: estimated {estimated}, measured {grown}, {estimated / grown:.2f}")
    assert grown * 0.75 < estimated < grown * 1.25


@pytest.mark.parametrize(
    ("load", "slots", "busy", "processes"),
    [
        (Load(1_000, 100), 32, 1, 1),
        (Load(1_000, 100, rate=7, seconds=0.1), 32, 1, 1),
        (Load(1_000, 100, rate=700, seconds=0.1), 512, 100, 13),
        (Load(1_000, 100, rate=700, seconds=0.1, utilisation=1.0), 512, 70, 9),
        (Load(1_000, 100, rate=700, seconds=0.1, threads=100), 512, 100, 1),
        (Load(1_000, 100, rate=700, seconds=0.002, cpu_seconds=0.002), 64, 2, 2),
        (Load(1_000, 100, threads=1), 16, 1, 1),
        (Load(1_000, 100, slots=4), 4, 1, 1),
    ],
)
def test_slots_and_processes_follow_from_rate_and_time(
    load: Load, slots: int, busy: int, processes: int
) -> None:
    found = plan(load)
    assert (found.slots, found.busy_threads, found.processes) == (slots, busy, processes)
    assert found.database_connections == processes * (load.threads + 1)
    assert found.redis_connections == processes * (CONNECTIONS + load.threads)
    assert found.maxmemory > found.waiting_bytes > load.messages * load.body_bytes


def test_more_and_larger_messages_need_more_memory() -> None:
    sizes = [plan(Load(100_000, size)).waiting_bytes for size in range(0, 2_000, 50)]
    assert sizes == sorted(sizes)
    counts = [plan(Load(count, 100)).waiting_bytes for count in (0, 1, 1_000, 100_000, 10_000_000)]
    assert counts == sorted(set(counts))
    assert plan(Load(1_000, 100, key_bytes=36)).waiting_bytes > plan(Load(1_000, 100)).waiting_bytes


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (Load(1, 1, utilisation=0), "utilisation"),
        (Load(1, 1, utilisation=1.5), "utilisation"),
        (Load(1, 1, slots=3), "power of two"),
        (Load(1, 1, rate=1e6, seconds=10), "use several topics"),
    ],
)
def test_what_no_topic_can_carry_is_refused(load: Load, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        plan(load)


def test_the_command_prints_what_was_computed(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--messages", "1000000", "--bytes", "200", "--rate", "300", "--seconds", "0.2"]
    call_command("rmqplan", *asked, "--json")
    found = json.loads(capsys.readouterr().out)
    computed = plan(Load(1_000_000, 200, rate=300, seconds=0.2))
    assert found["slots"] == computed.slots and found["waiting_bytes"] == computed.waiting_bytes
    call_command("rmqplan", *asked)
    told = capsys.readouterr().out
    assert f"{computed.slots:,}" in told and f"{computed.message_bytes} bytes" in told and "MiB" in told
    # The page shows this very output.
    page = (Path(__file__).parents[2] / "docs" / "deploy" / "sizing.md").read_text()
    assert f"$ manage.py rmqplan {' '.join(asked)}\n{told}```" in page


def test_the_command_says_what_is_wrong_in_one_line() -> None:
    with pytest.raises(CommandError, match="use several topics") as raised:
        call_command("rmqplan", "--messages", "1", "--bytes", "1", "--rate", "1e6", "--seconds", "10")
    assert raised.value.returncode == 2
