"""Sends that ask for more than being stored: replicas that confirm, and the primary's disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Connection

from django_rmq.core.cluster import cluster_broker
from django_rmq.core.model.send_results import Durability, SendResult
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.producer import Producer, check_durability
from django_rmq.core.redis import broker as pipeline
from django_rmq.core.redis.broker import durability_commands
from django_rmq.exceptions import InvalidMessage
from tests.e2e.promotions import promotions
from tests.support.brokers import Broker, ClusterBroker, OracleBroker
from tests.support.servers import RedisCluster, RedisServer, ReplicaPair, ask
from tests.support.workers import LONG, client_of, cluster_of, eventually

WORK = Topic("work", TopicType.RANGE_MERGE, slots=16, time_range_ms=60_000)
ONE = Durability(replicas=1)


@pytest.fixture
def pair() -> Iterator[ReplicaPair]:
    with ReplicaPair() as servers:
        yield servers


def producer_of(url: str) -> Producer:
    return Producer(Broker(client_of(url)))


def send(producer: Producer, names: list[str], wanted: Durability) -> list[SendResult]:
    return producer.send([producer.build(WORK, {"name": name}) for name in names], wanted=wanted)


def half_a_second(wanted: Durability, connection: Any) -> list[tuple[Any, ...]]:
    """Wait no longer, in place of ``durability_commands``."""
    return [("WAIT", wanted.replicas, 500)]


def test_who_waits_for_a_confirmation_waits_for_less_than_the_socket_time_out() -> None:
    commands = durability_commands(Durability(replicas=1, fsync=True), Connection(socket_timeout=5))
    assert commands == [("WAIT", 1, 2000), ("WAITAOF", 1, 0, 2000)]


def test_a_replica_that_follows_confirms(pair: ReplicaPair) -> None:
    producer = producer_of(pair.primary.url)
    (one,) = send(producer, ["a"], ONE)
    assert (one.status, one.replicas, one.fsynced, one.durable) == ("stored", 1, None, True)
    many = send(producer, [f"m{n}" for n in range(10_000)], ONE)
    assert {(each.replicas, each.durable) for each in many} == {(1, True)}
    (again,) = send(producer, ["a"], ONE)
    assert (again.status, again.durable) == ("merged", True)
    (plain,) = producer.send([producer.build(WORK, {"name": "b"})])
    assert (plain.replicas, plain.fsynced, plain.durable) == (None, None, True)
    producer.broker.close()


@pytest.mark.slow
def test_a_replica_that_is_cut_off_confirms_nothing_and_nothing_is_raised(
    pair: ReplicaPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "durability_commands", half_a_second)
    producer = producer_of(pair.primary.url)

    def confirmed(replicas: int) -> tuple[int | None, bool]:
        (one,) = send(producer, ["b"], Durability(replicas))
        return one.replicas, one.durable

    send(producer, ["a"], ONE)
    pair.link.cut()
    (cut,) = send(producer, ["b"], ONE)
    assert (cut.status, cut.replicas, cut.ok, cut.durable) == ("stored", 0, True, False)
    (merged,) = send(producer, ["b"], ONE)
    assert (merged.status, merged.durable) == ("merged", False), "it is no safer for being sent twice"
    pair.link.mend()
    eventually(lambda: confirmed(1) == (1, True), "following again")
    eventually(lambda: confirmed(2) == (1, False), "confirming alone")
    producer.broker.close()


@pytest.mark.parametrize(
    ("options", "synced"),
    [({}, False), ({"appendonly": True}, False), ({"appendonly": True, "appendfsync": "always"}, True)],
)
def test_fsync_is_known_where_the_server_syncs_before_it_answers(
    options: dict[str, object], synced: bool
) -> None:
    with RedisServer(**options) as server:  # type: ignore[arg-type]
        told = re.search(rb"redis_version:(\d+)\.(\d+)", ask(server.port, "INFO", "server"))
        assert told
        has_waitaof = (int(told[1]), int(told[2])) >= (7, 2)
        producer = producer_of(server.url)
        (one,) = send(producer, ["a"], Durability(fsync=True))
        if not has_waitaof or not options:
            assert (one.fsynced, one.durable) == (synced, synced)
        else:
            assert one.durable, "WAITAOF waits for it"
        assert one.replicas is None
        producer.broker.close()


def test_after_its_scripts_are_gone_a_server_confirms_nothing_that_ran_later(pair: ReplicaPair) -> None:
    producer = producer_of(pair.primary.url)
    send(producer, ["a"], ONE)
    ask(pair.primary.port, "SCRIPT", "FLUSH")
    (one,) = send(producer, ["b"], ONE)
    assert (one.status, one.replicas, one.durable) == ("stored", None, False)
    assert send(producer, ["b"], ONE)[0].durable
    producer.broker.close()


@pytest.mark.slow
def test_each_node_of_a_cluster_confirms_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisCluster(node_timeout_ms=60_000) as server:
        client = cluster_of(server, patience=LONG)
        producer = Producer(ClusterBroker(client))
        names = [f"m{n}" for n in range(200)]
        assert all(each.durable for each in send(producer, names, ONE))
        ask(server.primaries[0].port, "SCRIPT", "FLUSH")
        assert all(each.durable for each in send(producer, names, ONE)), (
            "what is repeated is waited for as well"
        )
        server.replicas[1].pause()
        monkeypatch.setattr(cluster_broker, "durability_commands", half_a_second)
        found = send(producer, names, ONE)
        assert {each.status for each in found} == {"merged"}
        assert not any(each.durable for each in found), "the least of all nodes counts for all"
        server.replicas[1].resume()
        client.close()


def test_in_memory_everything_asked_for_is_reached() -> None:
    producer = Producer(OracleBroker())
    (one,) = send(producer, ["a"], Durability(2, True))
    assert (one.replicas, one.fsynced, one.durable) == (2, True, True)


@pytest.mark.parametrize("replicas", [-1, 101, True, 1.0, "1", None])
def test_a_number_of_replicas_that_is_none_is_refused(replicas: object) -> None:
    with pytest.raises(InvalidMessage, match="replicas"):
        check_durability(replicas, False)


def test_fsync_is_yes_or_no() -> None:
    with pytest.raises(InvalidMessage, match="fsync"):
        check_durability(1, 1)


@pytest.mark.slow
def test_nothing_confirmed_is_lost_and_no_receipt_given_twice_when_a_replica_is_promoted_after_a_cut() -> (
    None
):
    outcome = promotions(10)
    print(outcome)
    assert outcome.confirmed > 10 * 100
    assert outcome.confirmed_and_lost == 0
    assert outcome.others_lost, "what was stored after the cut is gone, or the test cuts nothing"
    assert outcome.receipts_twice == 0
    assert outcome.deliveries_lost > 10, "what was taken after the cut is gone, or the test cuts nothing"
