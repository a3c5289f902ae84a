"""A broker on a Redis Cluster while slots move and nodes die."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import NoScriptError
from redis.retry import Retry

from django_rmq.core import lua
from django_rmq.core.cluster import cluster_broker
from django_rmq.core.cluster.cluster_broker import Cluster, NodeTrip, RoutedCommand
from django_rmq.core.cluster.nodes import Node
from django_rmq.core.commands.script_call import RedisCommand, Single
from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.send_results import Durability
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.redis.clients import translate
from django_rmq.exceptions import NodeUnavailable, RmqError, ServerRefused, ServerUnavailable
from tests.support.brokers import Broker, ClusterBroker
from tests.support.embedded_server import free_port
from tests.support.servers import RedisCluster, RedisServer, TcpProxy, ask, wait_until
from tests.support.workers import LONG, Heard, Worker, audit, cluster_of, eventually, live, send, total

WORK = Topic("work", TopicType.RANGE_MERGE, slots=16, time_range_ms=1)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisCluster]:
    """A cluster of this file's own; each test leaves all slots served, and three primaries."""
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
def broker(server: RedisCluster, prefix: str) -> Iterator[ClusterBroker]:
    client = cluster_of(server, patience=60.0)
    yield ClusterBroker(client, prefix)
    client.close()


@contextmanager
def hasty(server: RedisCluster, prefix: str, patience: float = 0.02) -> Iterator[ClusterBroker]:
    """A broker that gives up soon, as a worker's does."""
    client = cluster_of(server, patience=patience)
    yield ClusterBroker(client, prefix)
    client.close()


def hash_slot(broker: ClusterBroker, slot: int) -> int:
    return key_slot(slot_keys(broker.prefix, WORK.name, slot).store)


def another(server: RedisCluster, node: RedisServer) -> RedisServer:
    """Any other primary."""
    return next(each for each in server.nodes if each is not node and ask(each.port, "ROLE")[0] == b"master")


def test_calls_follow_a_slot_that_has_moved(server: RedisCluster, broker: ClusterBroker) -> None:
    broker.send_merge(WORK, 3, 0, [b"a"])
    source = server.owner(hash_slot(broker, 3))
    target = another(server, source)
    server.end_move(hash_slot(broker, 3), server.begin_move(hash_slot(broker, 3), target), target)
    assert broker.send_merge(WORK, 3, 0, [b"a"])[0].status == "merged"
    pipeline = broker.pipeline()
    for slot in range(16):
        pipeline.count(WORK, slot)
    assert [counts.store for counts in pipeline.execute()] == [0, 0, 0, 1] + [0] * 12


def test_a_slot_half_moved_keeps_its_callers_waiting_and_no_others(
    server: RedisCluster, broker: ClusterBroker
) -> None:
    # Of ten, whose names differ in one digit, no two have the same hash slot.
    for slot in range(10):
        broker.send_merge(WORK, slot, 0, [b"a"])
    moving = hash_slot(broker, 5)
    target = another(server, server.owner(moving))
    source = server.begin_move(moving, target)
    assert server.move_keys(moving, source, target, 1) == 1
    with hasty(server, broker.prefix) as other:
        pipeline = other.pipeline()
        for slot in range(10):
            pipeline.send_merge(WORK, slot, 0, [b"b"])
        replies = pipeline.execute()
    failed = [slot for slot, reply in enumerate(replies) if isinstance(reply, RmqError)]
    assert failed == [5]
    assert isinstance(replies[5], NodeUnavailable)
    sent: list[str] = []
    sender = threading.Thread(
        target=lambda: sent.extend(each.status for each in broker.send_merge(WORK, 5, 0, [b"a", b"b"]))
    )
    sender.start()
    sender.join(0.2)
    assert sender.is_alive()
    server.end_move(moving, source, target)
    sender.join(LONG)
    assert sent == ["merged", "stored"]
    audit(broker, WORK)


def test_a_user_who_may_not_follow_a_moving_slot_gets_the_refusal_and_no_reply_of_another_call(
    server: RedisCluster, broker: ClusterBroker
) -> None:
    moving = hash_slot(broker, 5)
    target = another(server, server.owner(moving))
    broker.send_merge(WORK, 5, 0, [b"before"])
    broker.remove(WORK, 5, [b"before"], "live")
    source = server.begin_move(moving, target)
    server.move_keys(moving, source, target)
    ask(target.port, "ACL", "SETUSER", "default", "-asking")
    try:
        pipeline = broker.pipeline()
        for member in (b"a", b"b", b"c"):
            pipeline.send_merge(WORK, 5, 0, [member])
        errors = pipeline.execute()
        pool: Any = broker.client.node("127.0.0.1", target.port).client.connection_pool
        unread = [connection.can_read(0.1) for connection in pool._resting]
    finally:
        ask(target.port, "ACL", "SETUSER", "default", "+asking")
        server.end_move(moving, source, target)
    assert ["asking" in str(error).lower() for error in errors] == [True] * 3, errors
    assert {type(error) for error in errors} == {ServerRefused}
    assert unread == [False]
    assert broker.send_merge(WORK, 5, 0, [b"a"])[0].status == "stored"


@pytest.mark.parametrize("kind", ["cluster", "single"])
def test_what_is_read_behind_a_call_that_did_not_run_is_read_after_it(
    kind: str, server: RedisCluster, redis_client: Any, prefix: str
) -> None:
    broker = ClusterBroker(cluster_of(server), prefix) if kind == "cluster" else Broker(redis_client, prefix)
    (before,) = broker.send_merge(WORK, 0, 0, [b"a"])
    assert before.status == "stored"
    assert broker.count(WORK, 0).store == 1
    if isinstance(broker, ClusterBroker):
        node = broker.client.serving(hash_slot(broker, 0))
        node.ask("SCRIPT", "FLUSH")
        node.ask("SCRIPT", "LOAD", lua.load("count").text)
    else:
        broker.load_scripts()
        redis_client.script_flush()
        redis_client.script_load(lua.load("count").text)
    pipeline = broker.pipeline()
    pipeline.send_merge(WORK, 0, 0, [b"b"])
    pipeline.count(WORK, 0)
    counter = Single(lambda prefix: b"{" + slot_keys(prefix, WORK.name, 0).store + b"}_counter")
    pipeline.add(RedisCommand("HINCRBY", counter, ("field", 5), int))
    (sent,), counts, added = pipeline.execute()
    assert (sent.status, counts.store) == ("stored", 2)
    # A plain command that writes has run, so it is not repeated.
    assert added == 5
    if isinstance(broker, ClusterBroker):
        broker.close()


def test_a_node_that_could_not_be_reached_is_left_alone_for_a_while() -> None:
    node = Node("127.0.0.1", free_port(), {"retry": Retry(NoBackoff(), 0)})
    for _ in range(3):
        with pytest.raises(redis.ConnectionError, match="refused"):
            node.connect()
        assert node.rests
        with pytest.raises(redis.ConnectionError, match=r"refused.*a moment ago"):
            node.connect()
        wait_until(lambda: not node.rests, "trying again")


@pytest.mark.slow
def test_a_node_that_stands_still_is_asked_for_a_sign_of_life_first() -> None:
    with RedisServer() as server:
        node = Node("127.0.0.1", server.port, {"retry": Retry(NoBackoff(), 0), "socket_timeout": 5.0})
        assert node.ask("PING") == b"PONG"
        server.pause()
        with pytest.raises(redis.TimeoutError):
            node.ask("PING")
        wait_until(lambda: not node.rests, "trying again")
        node.client.connection_pool.connection_kwargs["socket_timeout"] = 60.0
        began = time.monotonic()
        with pytest.raises(redis.TimeoutError):
            node.connect()
        assert time.monotonic() - began < 30
        server.resume()
        wait_until(lambda: node.ask("PING") == b"PONG", "answering again")
        node.client.close()


def test_nothing_is_confirmed_where_a_connection_broke_before_it_could_be(
    redis_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no replica to wait for.
    monkeypatch.setattr(
        cluster_broker, "durability_commands", lambda *_: [("WAIT", 1, 100), ("WAITAOF", 1, 0, 100)]
    )
    client = cluster_of(redis_cluster)
    client.refresh()
    first = client.serving(0)
    other = next(slot for slot in range(16_384) if client.serving(slot) is not first)
    stored, ended = RoutedCommand(0, ("PING",), first), RoutedCommand(0, ("QUIT",), first)
    lost, elsewhere = (
        RoutedCommand(0, ("PING",), first),
        RoutedCommand(other, ("PING",), client.serving(other)),
    )
    trip = NodeTrip(client, [stored, ended, lost, elsewhere], wanted=Durability(replicas=1, fsync=True))
    trip.send().receive()
    assert (stored.reply, elsewhere.reply) == (b"PONG", b"PONG")
    assert isinstance(lost.reply, redis.ConnectionError)
    assert trip.confirmed == (None, False)
    client.close()


@pytest.mark.slow
def test_a_node_that_is_away_fails_its_calls_alone_and_its_replica_takes_over(prefix: str) -> None:
    with RedisCluster() as server, hasty(server, prefix) as broker:
        for slot in range(16):
            broker.send_merge(WORK, slot, 0, [b"a"])
        gone = server.owner(hash_slot(broker, 3))
        theirs = {slot for slot in range(16) if server.owner(hash_slot(broker, slot)) is gone}
        assert 0 < len(theirs) < 16
        wait_until(lambda: ask(gone.port, "WAIT", 1, 1000) == 1, "the replica having all of it")
        gone.kill()
        pipeline = broker.pipeline()
        for slot in range(16):
            pipeline.count(WORK, slot)
        pipeline.heads(WORK, range(16))
        *counts, heads = pipeline.execute()
        assert {i for i, reply in enumerate(counts) if isinstance(reply, NodeUnavailable)} == theirs
        assert {i for i, due in enumerate(heads) if due is None} == theirs
        assert broker.now_ms() > 0
        broker.ping()
        with pytest.raises(NodeUnavailable):
            broker.heads(WORK, sorted(theirs))
        server.wait_for_promotion(server.replicas[server.primaries.index(gone)])

        def all_answer() -> bool:
            pipeline = broker.pipeline()
            for slot in range(16):
                pipeline.count(WORK, slot)
            return all(getattr(reply, "store", None) == 1 for reply in pipeline.execute())

        eventually(all_answer, "all slots answering")


def test_a_cluster_that_is_not_there_is_an_error_of_the_whole_server() -> None:
    client = Cluster([("127.0.0.1", 1)], {"socket_connect_timeout": 1.0}, patience=0.05)
    broker = ClusterBroker(client)
    began = time.monotonic()
    for ask_it in (broker.ping, broker.now_ms, broker.definitions, lambda: broker.wakeups([WORK])):
        with pytest.raises(ServerUnavailable):
            ask_it()
    pipeline = broker.pipeline()
    for slot in range(16):
        pipeline.count(WORK, slot)
    assert all(isinstance(reply, ServerUnavailable) for reply in pipeline.execute())
    assert time.monotonic() - began < 60


@contextmanager
def proxied(server: RedisCluster, prefix: str, **options: float) -> Iterator[tuple[ClusterBroker, TcpProxy]]:
    """A broker whose connections to the node of slot 3 go through a proxy."""
    with TcpProxy(server.owner(key_slot(slot_keys(prefix, WORK.name, 3).store)).port) as proxy:

        class Detour(Cluster):
            def node(self, host: str, port: int) -> Node:
                return super().node(host, proxy.port if port == proxy.target_port else port)

        plain = cluster_of(server)
        client = Detour([("127.0.0.1", node.port) for node in server.nodes], plain.options, **options)
        yield ClusterBroker(client, prefix), proxy
        client.close()


def test_scripts_that_a_node_forgets_again_and_again_are_trouble_of_that_node(
    server: RedisCluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_nothing(node: Node, connection: Any) -> None:
        connection.send_command("SCRIPT", "FLUSH")
        connection.read_response()
        node.knows_scripts = True

    monkeypatch.setattr(Node, "load_scripts", load_nothing)
    said = "no node of the cluster ran the command in time"
    with hasty(server, prefix) as broker, pytest.raises(NodeUnavailable, match=said):
        broker.acquire(WORK, 0)


@pytest.mark.parametrize("call", ["script", "command"])
def test_a_slot_whose_nodes_all_say_that_it_is_elsewhere_is_trouble_of_its_node(
    server: RedisCluster, prefix: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with hasty(server, prefix) as broker:
        broker.ping()
        serving = Cluster.serving

        def wrong(cluster: Cluster, hash_slot: int) -> Node:
            right = serving(cluster, hash_slot)
            return next(node for node in cluster.primaries() if node is not right)

        monkeypatch.setattr(Cluster, "serving", wrong)
        if call == "script":
            with pytest.raises(NodeUnavailable, match="no node of the cluster ran the command in time"):
                broker.acquire(WORK, 0)
        else:
            with pytest.raises(ServerUnavailable, match="no node of the cluster ran the command in time"):
                broker.definitions()


def test_a_script_that_is_not_there_when_it_has_just_been_loaded_is_trouble_that_passes() -> None:
    assert type(translate(NoScriptError("No matching script. Please use EVAL."))) is ServerUnavailable


def test_what_was_sent_over_a_connection_that_broke_is_not_repeated(
    server: RedisCluster, prefix: str
) -> None:
    with proxied(server, prefix, patience=5.0) as (broker, proxy):
        assert broker.send_merge(WORK, 3, 0, [b"a"])[0].status == "stored"
        node = broker.client.serving(hash_slot(broker, 3))
        assert node.port == proxy.port
        other = next(n for n in range(16) if broker.client.serving(hash_slot(broker, n)) is not node)
        proxy.drop_reply(b"EVALSHA")
        pipeline = broker.pipeline()
        pipeline.prepare(WORK, 3, "A", None, 10)
        pipeline.count(WORK, other)
        lost, counts = pipeline.execute()
        assert isinstance(lost, NodeUnavailable)
        assert counts.store == 0
        eventually(lambda: answers(broker), "the node answering again")
        assert total(broker, WORK, "prepared") == 1
        assert [thing.delivery.member for thing in broker.list_held(WORK, 3, "A") or []] == [b"a"]


@pytest.mark.slow
def test_a_worker_whose_replies_are_lost_loses_and_doubles_nothing(
    server: RedisCluster, broker: ClusterBroker, prefix: str
) -> None:
    heard = Heard()
    with proxied(server, prefix, patience=0.05) as (workers, proxy), Worker(workers, WORK, heard):
        for lost in range(10):
            proxy.drop_reply(b"EVALSHA")
            send(broker, WORK, [{"n": lost * 160 + n} for n in range(160)])
            proxy.wait_for_drop()
        heard.wait(1600)
        eventually(lambda: live(broker, WORK) == 0, "all being settled")
    assert sorted(body["n"] for body in heard.bodies) == list(range(1600))
    assert total(broker, WORK, "committed") == 1600
    assert total(broker, WORK, "expired") == 0


def answers(broker: ClusterBroker) -> bool:
    try:
        broker.count(WORK, 3)
    except RmqError:
        return False
    return True


@pytest.mark.slow
def test_a_worker_goes_on_with_the_other_nodes_while_one_is_frozen(prefix: str) -> None:
    with RedisCluster(replicas=False, node_timeout_ms=60_000) as server:
        client = cluster_of(server, socket_timeout=0.5, patience=0.05)
        broker, heard = ClusterBroker(client, prefix), Heard()
        direct = ClusterBroker(cluster_of(server), prefix)
        try:
            with Worker(broker, WORK, heard):
                send(direct, WORK, [{"n": n} for n in range(64)])
                heard.wait(64)
                frozen = server.owner(hash_slot(broker, 3))
                free = [slot for slot in range(16) if server.owner(hash_slot(broker, slot)) is not frozen]
                frozen.pause()
                for n in range(20):
                    for slot in free:
                        direct.send_merge(WORK, slot, 1, [b'{"m":%d}' % n])
                heard.wait(64 + 20 * len(free))
                frozen.resume()
                direct.send_merge(WORK, 3, 1, [b'{"late":1}'])
                eventually(lambda: live(direct, WORK) == 0, "all being settled")
            assert {"late": 1} in heard.bodies
        finally:
            client.close()
            direct.close()
