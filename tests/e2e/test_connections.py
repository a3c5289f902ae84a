"""How many connections workers have to Redis: what docs/deploy/sizing.md says."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from django_rmq.core.model.topic import Topic, TopicType
from tests.e2e.processes import Happened, Start, named
from tests.support.brokers import Broker
from tests.support.servers import RedisServer, ask
from tests.support.workers import client_of, eventually, live, send

SHARED = Topic("shared", TopicType.RANGE_MERGE, slots=4, time_range_ms=1, serial=False)
PROCESSES, THREADS = 2, 4
CONNECTIONS = 9
"""The most connections of a worker process to Redis: 2 of the dispatcher, 2 of the coordinator, and 1 each for wake-ups, for
the heartbeat, for duties, for the relay of the outbox, and for what is asked at the start. Each thread whose listener sends
has one more at most."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server that only the worker of the test uses."""
    with RedisServer() as found:
        yield found


def clients(server: RedisServer) -> int:
    """Return how many others than this question and the test's own client are connected."""
    lines = ask(server.port, "CLIENT", "LIST").splitlines()
    return len([line for line in lines if b"cmd=client" not in line]) - 1


def most(server: RedisServer, seconds: float) -> int:
    """Return the largest number of connections within so many seconds."""
    end, found = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        found = max(found, clients(server))
        time.sleep(0.02)
    return found


def test_a_process_has_at_most_its_number_of_connections_and_one_for_each_thread_that_sends(
    start: Start, server: RedisServer, prefix: str, happened: Happened
) -> None:
    client = client_of(server.url)
    broker = Broker(client, prefix)
    broker.ping()
    worker = start("--processes", str(PROCESSES), "--threads", str(THREADS), "shared", url=server.url)
    worker.ready()
    eventually(lambda: clients(server) > PROCESSES, "the processes being connected")
    idle = most(server, 6)
    send(broker, SHARED, named(*range(200)))
    happened.wait("done", 200)
    busy = max(clients(server), idle)
    send(broker, SHARED, named(*range(200, 600), do="send"))
    eventually(lambda: clients(server) > busy, "connections that send")
    sending = most(server, 1)
    happened.wait("done", 600)
    assert live(broker, SHARED) == 0 or most(server, 1)
    print(f"idle {idle}, busy {busy}, sending {sending}")
    assert idle <= busy <= PROCESSES * CONNECTIONS
    assert sending <= PROCESSES * (CONNECTIONS + THREADS)
    client.close()
