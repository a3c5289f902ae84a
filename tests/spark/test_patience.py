"""A Redis that is unavailable for a while ends no query: neither its driver's work nor its tasks' nor a write."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from django_rmq.core import lua
from django_rmq.core.commands import broker_interface
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import NodeUnavailable, RmqError, ServerRefused, ServerUnavailable
from django_rmq.spark import broker_connection, dead_messages
from django_rmq.spark.broker_connection import RetryPolicy
from django_rmq.spark.bulk_write import ArrowBulk, ArrowRows
from tests.spark.conftest import MakeQueue, Queue
from tests.spark.test_streaming import ALL, plan, reader, rows
from tests.support.brokers import Broker
from tests.support.servers import RedisServer, TcpProxy
from tests.support.workers import client_of


def test_work_is_repeated_while_redis_is_unavailable_and_a_line_is_logged_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1_000.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    monkeypatch.setattr(broker_connection, "time", clock)

    def work() -> float:
        if now[0] < 1_035:
            raise ServerUnavailable("refused")
        return now[0]

    with caplog.at_level(logging.WARNING, "django_rmq.spark"):
        assert 1_035 <= RetryPolicy(60, "topic x")(work) <= 1_036
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" (")[0] for line in lines[:-1]] == [
        f"topic x: Redis is unavailable for {seconds} s" for seconds in (0, 11, 21, 31)
    ]
    assert "available again after 35" in lines[-1] or "available again after 36" in lines[-1]
    now[0] = 1_000.0
    with pytest.raises(ServerUnavailable):
        RetryPolicy(30, "topic x")(work)
    assert now[0] == pytest.approx(1_030)

    def refuse() -> None:
        now[0] += 1
        raise ServerRefused("no")

    with pytest.raises(ServerRefused):
        RetryPolicy(60, "topic x")(refuse)
    assert now[0] == pytest.approx(1_031)


@pytest.fixture
def lasting() -> Iterator[tuple[RedisServer, Queue]]:
    """A Redis that keeps what it has when it is stopped, and a topic in it."""
    with RedisServer(appendonly=True, appendfsync="always") as server:
        client = client_of(server.url)
        topic = Topic("t", TopicType.PRIORITY, slots=4, backoff=BackOff(0, 0))
        yield server, Queue(Broker(client), server.url, topic)
        client.close()


@contextmanager
def restarted(server: RedisServer) -> Iterator[None]:
    """Stop a server, and start it again while a block runs."""
    server.stop()
    thread = threading.Timer(0.5, server.start)
    thread.start()
    yield
    thread.join()


def test_each_step_of_a_batch_outlasts_a_restart(lasting: tuple[RedisServer, Queue]) -> None:
    server, queue = lasting
    queue.send(list(range(1_000)))
    source = reader(queue)
    start = source.initialOffset()
    seen: Counter[bytes] = Counter()

    with restarted(server):
        end_ = source.latestOffset(start, ALL)
    with restarted(server):
        tasks = plan(source, start, end_)
    with restarted(server):
        for executor, task in tasks:
            for batch in executor.read(task):
                seen.update(batch.column("value").to_pylist())
    assert seen.total() == len(seen) == end_["rows"] == 1_000
    with restarted(server):
        source.commit(end_)
    assert queue.total("acked") == 1_000
    with restarted(server):
        assert source.latestOffset(end_, ALL) == end_
    server.stop()
    with pytest.raises(ServerUnavailable):
        reader(queue, patience="0")
    server.start()


@pytest.mark.parametrize("script", ["claim", "renew_claim"])
def test_a_claim_whose_answer_was_lost_is_found_again(
    lasting: tuple[RedisServer, Queue], script: str
) -> None:
    server, queue = lasting
    queue.send(list(range(100)))
    with TcpProxy(server.port) as proxy:
        source = reader(queue, url=proxy.url)
        start = source.initialOffset()
        queue.broker.load_scripts()
        source._broker.load_scripts()
        proxy.drop_reply(lua.load(script).sha)
        end_ = source.latestOffset(start, ALL)
        proxy.wait_for_drop()
        assert (end_["claim"], end_["rows"]) == (1, 100)
        assert rows(source, start, end_).total() == 100
        assert source.latestOffset(end_, ALL) == end_
    assert queue.total("acked") == 100 and queue.depth("claimed") == queue.depth("store") == 0


def test_rows_of_dead_messages_outlast_a_restart(lasting: tuple[RedisServer, Queue], spark: Any) -> None:
    server, queue = lasting
    queue.send(list(range(40)))
    rows = list(queue.places())
    for slot, member in rows:
        queue.broker.bury(queue.topic, slot, [member], "")
    frame = spark.createDataFrame(rows, "slot int, member binary").coalesce(1)
    with restarted(server):
        outcomes = dead_messages.replay(frame, queue.options).collect()
    assert [tuple(row) for row in outcomes] == [("replayed", 40)]


@pytest.mark.parametrize("unavailable", ["a node", "the server"])
def test_only_calls_without_an_answer_are_repeated(
    queue: MakeQueue, monkeypatch: pytest.MonkeyPatch, unavailable: str
) -> None:
    topic = queue(slots=4)
    topic.send(list(range(40)))
    rows = [{"slot": slot, "member": member} for slot, member in topic.places()]
    for row in rows:
        topic.broker.bury(topic.topic, row["slot"], [row["member"]], "")
    run_all, asked = broker_interface.run_all, []

    def fail_once(broker: Broker, calls: list[Call[list[str]]]) -> list[list[str] | RmqError]:
        asked.append(len(calls))
        if len(asked) > 1:
            return run_all(broker, calls)
        if unavailable == "the server":
            return [ServerUnavailable("away")] * len(calls)
        return [*run_all(broker, calls[:-1]), NodeUnavailable("away")]

    monkeypatch.setattr(dead_messages, "run_all", fail_once)
    words = dead_messages._replay(topic.broker, topic.topic, RetryPolicy(20, "a test"), rows)
    assert words == ["replayed"] * 40 and asked == [4, 4 if unavailable == "the server" else 1]


def test_sends_whose_answers_were_lost_are_repeated_in_their_order(
    lasting: tuple[RedisServer, Queue],
) -> None:
    server, queue = lasting
    with TcpProxy(server.port) as proxy:
        broker = Broker(client_of(proxy.url))
        bulk = ArrowBulk(Producer(broker), queue.topic, RetryPolicy(20, "a test"))
        broker.load_scripts()
        for turn in range(6):
            if turn == 3:
                proxy.drop_reply(b"EVALSHA")
            if turn == 5:
                proxy.cut()
                threading.Timer(0.5, proxy.mend).start()
            members = [b"%d" % n for n in range(turn * 50, turn * 50 + 100)]
            priorities = pa.array([100 + turn] * 100)
            bulk.send(ArrowRows(members, lambda _: [], priorities))
        bulk.finish()
        broker.close()
    # Of each message the last send counts.
    assert queue.scores() == {f"{n}": 100 + min(5, n // 50) for n in range(350)}
