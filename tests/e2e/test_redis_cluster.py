"""Worker processes on a Redis Cluster whose slots move and whose nodes die, and behind sentinels that fail over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest
from redis.crc import key_slot

from django_rmq.conf import RedisServer as Address
from django_rmq.connections.brokers import build_client
from django_rmq.core.model.keys import slot_keys, worker_keys
from django_rmq.core.model.send_results import Durability
from django_rmq.core.producer.producer import Producer
from tests.e2e.ledger import Findings, examine, read
from tests.e2e.load import CHAOS, Load, shares
from tests.e2e.processes import Start, WorkerProcess
from tests.e2e.promotions import cluster_promotions
from tests.support.brokers import Broker, ClusterBroker
from tests.support.servers import RedisCluster, SentinelGuard, ask, wait_for_link, wait_until
from tests.support.workers import cluster_of, eventually, live, total


@contextmanager
def broker_on(server: RedisCluster, prefix: str) -> Iterator[ClusterBroker]:
    client = cluster_of(server, patience=10.0)
    yield ClusterBroker(client, prefix)
    client.close()


def urls(server: RedisCluster) -> str:
    return ",".join(f"redis://127.0.0.1:{node.port}" for node in server.nodes)


def workers(start: Start, broker: Broker | ClusterBroker, **environment: str) -> list[WorkerProcess]:
    """Two commands of two processes, once they share the slots."""
    started = [start("chaos", "-p", "2", "-t", "2", **environment) for _ in range(2)]
    for worker in started:
        worker.ready()
    eventually(lambda: sorted(shares(broker, "chaos").values()) == [16] * 4, "sharing the slots", 30)
    return started


def end(started: list[WorkerProcess]) -> None:
    for worker in started:
        worker.signal()
    for worker in started:
        assert worker.wait() == 0, worker.output


class Confirmed:
    """Sends on and on, and remembers what a replica has confirmed, and what nobody knows of."""

    def __init__(self, load: Load, producer: Producer) -> None:
        self.load = load
        self.producer = producer
        self.unknown: set[str] = set()
        self.longest = 0.0
        """Seconds without any confirmed send."""
        self._sent = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def goes_on(self) -> None:
        """Return when more is confirmed than before."""
        before = len(self.load.due)
        eventually(lambda: len(self.load.due) > before + 200, "sends being confirmed again", 60)

    def _send(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(0.005):
            names = [f"c{self._sent + n}" for n in range(16)]
            self._sent += len(names)
            due = int(time.time() * 1000)
            messages = [self.producer.build(CHAOS, {"name": name, "ms": 1, "do": ""}) for name in names]
            results, _ = self.producer.attempt(messages, Durability(replicas=1))
            for name, result in zip(names, results, strict=True):
                if result.durable:
                    self.load.due[name] = due
                else:
                    self.unknown.add(name)
            if any(result.durable for result in results):
                self.longest = max(self.longest, time.monotonic() - last)
                last = time.monotonic()

    def wait(self) -> Findings:
        """Return what the ledger says once all that was confirmed has run."""
        eventually(lambda: self.load.ended() >= set(self.load.due), "everything confirmed having run", 60)
        eventually(lambda: live(self.load.broker, CHAOS) == 0, "finishing", 60)
        found = examine(read(self.load.path), self.load.due)
        print(
            f"{len(self.load.due)} confirmed, {len(self.unknown)} unknown, {len(found.doubled)} run twice, "
            f"no send for {self.longest:.2f} s"
        )
        assert not found.lost
        assert not found.overlapping
        assert found.unexpected <= self.unknown
        return found


@pytest.mark.slow
def test_moving_busy_slots_loses_and_doubles_nothing(start: Start, tmp_path: Path, prefix: str) -> None:
    with RedisCluster(replicas=False, node_timeout_ms=60_000) as server, broker_on(server, prefix) as broker:
        load = Load(broker, tmp_path, CHAOS)
        started = workers(start, broker, RMQ_TEST_CLUSTER=urls(server))
        moving = [key_slot(slot_keys(prefix, CHAOS.name, slot).store) for slot in range(0, 64, 8)]
        moving.append(key_slot(worker_keys(prefix).sessions))
        stop, moves = threading.Event(), 0

        def move() -> None:
            nonlocal moves
            while not stop.is_set():
                slot = moving[moves % len(moving)]
                source = server.owner(slot)
                target = next(node for node in server.primaries if node is not source)
                server.begin_move(slot, target)
                server.move_keys(slot, source, target, 2)
                stop.wait(0.01)
                server.end_move(slot, source, target)
                moves += 1

        mover = threading.Thread(target=move)
        mover.start()
        try:
            while moves <= len(moving):
                load.send(50, ms=2)
                load.wait_for(len(load.due) - 100)
            load.wait()
        finally:
            stop.set()
            mover.join(20)
        end(started)
        found = load.examine()
        print(f"{moves} moves, {len(load.due)} messages")
        assert not found.doubled
        assert load.charged() == 0
        assert total(broker, CHAOS, "committed") == len(load.due)


@pytest.mark.slow
def test_a_primary_that_is_killed_and_comes_back_with_its_data_loses_nothing(
    start: Start, tmp_path: Path, prefix: str
) -> None:
    with (
        RedisCluster(replicas=False, appendonly=True, appendfsync="always") as server,
        broker_on(server, prefix) as broker,
    ):
        load = Load(broker, tmp_path, CHAOS)
        started = workers(start, broker, RMQ_TEST_CLUSTER=urls(server))
        for round_, node in enumerate(server.primaries):
            load.send(500, ms=2)
            load.wait_for(500 * round_ + 100)
            node.kill()
            node.start()
        load.wait()
        end(started)
        found = load.examine()
        print(f"{len(found.doubled)} of {len(load.due)} run twice, {load.charged()} charged")
        assert total(broker, CHAOS, "died") == 0


@pytest.mark.slow
def test_a_replica_takes_over_and_nothing_it_confirmed_is_lost(
    start: Start, tmp_path: Path, prefix: str
) -> None:
    with RedisCluster() as server, broker_on(server, prefix) as broker:
        load = Load(broker, tmp_path, CHAOS)
        started = workers(start, broker, RMQ_TEST_CLUSTER=urls(server), WORKER_TIMEOUT="2")
        web = ClusterBroker(cluster_of(server, socket_timeout=1.0), prefix)
        with Confirmed(load, Producer(web)) as sender:
            load.wait_for(200)
            gone = server.primaries.index(server.owner(key_slot(worker_keys(prefix).sessions)))
            server.primaries[gone].kill()
            server.wait_for_promotion(server.replicas[gone])
            server.primaries[gone].start()
            wait_for_link(server.primaries[gone])
            sender.goes_on()
        sender.wait()
        end(started)
        web.close()


@pytest.mark.slow
def test_no_receipt_is_given_twice_when_replicas_that_lack_deliveries_take_over() -> None:
    outcome = cluster_promotions(3)
    print(outcome)
    assert outcome.receipts_twice == 0
    assert outcome.deliveries_lost >= 20, "what was taken after the cut is gone, or the test cuts nothing"


@pytest.mark.slow
def test_sentinels_fail_over_under_load_and_nothing_confirmed_is_lost(
    start: Start, tmp_path: Path, prefix: str
) -> None:
    with SentinelGuard() as guard:
        address = Address("redis://rmq/0", sentinels=tuple(guard.addresses))
        broker, web = (Broker(build_client(address, seconds), prefix) for seconds in (5.0, 1.0))
        load = Load(broker, tmp_path, CHAOS)
        sentinels = ",".join(f"{host}:{port}" for host, port in guard.addresses)
        started = workers(start, broker, RMQ_TEST_SENTINELS=sentinels, WORKER_TIMEOUT="2")
        with Confirmed(load, Producer(web)) as sender:
            load.wait_for(200)
            guard.primary.kill()
            guard.wait_for_promotion()
            # It comes back as what the sentinels make of it: a replica.
            guard.primary.start()
            wait_until(
                lambda: ask(guard.primary.port, "ROLE")[0] == b"slave", "the old primary following", 120
            )
            wait_for_link(guard.primary)
            sender.goes_on()
        sender.wait()
        end(started)
        web.close()
        broker.close()
