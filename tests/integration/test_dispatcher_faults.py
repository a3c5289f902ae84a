"""A dispatcher while its Redis restarts, freezes, loses replies, forgets its scripts or holds foreign keys.

Afterwards every ledger balances, nothing is lost, and nothing has run twice that Redis could say had run.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from django_rmq.core import lua
from django_rmq.core.consumer import acks, shutdown
from django_rmq.core.consumer.slots import ConsumedSlot
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import NodeUnavailable
from django_rmq.testing import Clock
from tests.support.brokers import set_clock
from tests.support.servers import RedisServer, TcpProxy
from tests.support.workers import (
    LONG,
    Broker,
    Heard,
    HeldListener,
    Worker,
    audit,
    client_of,
    eventually,
    live,
    send,
    total,
)

TOPIC = Topic("prices", TopicType.RANGE_MERGE, slots=8, time_range_ms=0, backoff=BackOff(0, 0))
GOES_ON = 20.0
"""Ten times the goal: a worker goes on within 2 s after Redis answers, and not only by the slow poll after 30 s."""


@pytest.fixture
def direct(redis_url: str, prefix: str) -> Iterator[Broker]:
    """The way of the test, which nothing disturbs."""
    client = client_of(redis_url)
    yield Broker(client, prefix)
    client.close()


@pytest.fixture
def disturbed(proxy: TcpProxy, prefix: str) -> Iterator[Broker]:
    """The way of the worker, through the proxy."""
    client = client_of(proxy.url)
    broker = Broker(client, prefix)
    broker.load_scripts()
    yield broker
    client.close()


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    with RedisServer(appendonly=True, appendfsync="always") as server:
        yield server


@pytest.mark.parametrize("script", ["prepare", "commit_delivery", "acquire_slots", "heads"])
def test_a_lost_reply_loses_nothing_and_runs_nothing_twice(
    direct: Broker, disturbed: Broker, proxy: TcpProxy, script: str
) -> None:
    heard = Heard()
    send(direct, TOPIC, range(100))
    proxy.drop_reply(lua.load(script).sha)
    with Worker(disturbed, TOPIC, heard, poll_seconds=0.1) as worker:
        proxy.wait_for_drop()
        heard.wait(100, GOES_ON)
        send(direct, TOPIC, range(100, 150))
        heard.wait(150)
        worker.asleep()
    assert Counter(heard.bodies) == Counter(range(150))
    assert total(direct, TOPIC, "committed") == 150
    assert total(direct, TOPIC, "expired") == 0
    assert live(direct, TOPIC) == 0


def test_a_strict_line_keeps_its_order_over_a_lost_reply(
    direct: Broker, disturbed: Broker, proxy: TcpProxy
) -> None:
    heard, producer, line = Heard(), Producer(direct), Topic("line", TopicType.FIFO, slots=1, identity="key")
    names = [f"{n * 7 % 50:02}" for n in range(50)]
    producer.send([producer.build(line, name, key=name) for name in names])
    proxy.drop_reply(lua.load("prepare").sha)
    with Worker(disturbed, line, heard, poll_seconds=0.1):
        proxy.wait_for_drop()
        heard.wait(50, GOES_ON)
    assert heard.bodies == names


def test_a_lost_reply_of_held_is_asked_again(direct: Broker, disturbed: Broker, proxy: TcpProxy) -> None:
    heard = Heard()
    with Worker(disturbed, TOPIC, heard, poll_seconds=30) as worker:
        worker.asleep()
        proxy.drop_reply(lua.load("prepare").sha, lua.load("list_held").sha)
        send(direct, TOPIC, range(50))
        proxy.wait_for_drop()
        heard.wait(50, GOES_ON)
        worker.asleep()
    assert Counter(heard.bodies) == Counter(range(50))
    assert total(direct, TOPIC, "expired") == total(direct, TOPIC, "stale") == 0
    assert live(direct, TOPIC) == 0


def test_a_lost_reply_of_rollback_spends_one_retry(
    direct: Broker, disturbed: Broker, proxy: TcpProxy
) -> None:
    heard = Heard()

    def listener(message: Message) -> bool:
        heard.note(message.retries_left)
        return message.retries_left < 16

    send(direct, TOPIC, ["x"])
    proxy.drop_reply(lua.load("rollback").sha)
    with Worker(disturbed, TOPIC, listener, poll_seconds=30) as worker:
        proxy.wait_for_drop()
        heard.wait(2, GOES_ON)
        worker.asleep()
    assert heard.bodies == [16, 15]
    assert total(direct, TOPIC, "failed") == 1
    assert live(direct, TOPIC) == 0


@pytest.mark.slow
def test_a_lost_reply_of_extend_lets_the_next_heartbeat_extend(
    direct: Broker, disturbed: Broker, proxy: TcpProxy
) -> None:
    topic = replace(TOPIC, slots=1, timeout=1)
    clock = Clock()
    for broker in (direct, disturbed):
        set_clock(broker, clock)
    heard, go = Heard(), threading.Event()

    def listener(message: Message) -> None:
        heard(message)
        assert go.wait(LONG)

    send(direct, topic, ["x"])
    proxy.drop_reply(lua.load("extend").sha)
    with Worker(disturbed, topic, listener, burst=True) as worker:
        proxy.wait_for_drop()
        [lost] = direct.list_messages(topic, 0, "prepare").entries
        clock.advance(1)
        eventually(
            lambda: direct.list_messages(topic, 0, "prepare").entries[0].score == lost.score + 1000,
            "the next one",
        )
        clock.advance(1)
        go.set()
        worker.join()
    assert heard.bodies == ["x"]
    assert (total(direct, topic, "committed"), total(direct, topic, "expired")) == (1, 0)


def test_a_lost_reply_of_release_gives_back_once(direct: Broker, disturbed: Broker, proxy: TcpProxy) -> None:
    topic = replace(TOPIC, slots=1)
    held = HeldListener()
    send(direct, topic, range(10))
    with Worker(disturbed, topic, held) as worker:
        assert held.begun.wait(LONG)
        proxy.drop_reply(lua.load("release").sha)
        worker.dispatcher.stop()
        proxy.wait_for_drop()
        held.go.set()
        worker.join()
    assert not worker.dispatcher.forced
    [ledger] = audit(direct, topic)
    assert (ledger["committed"], ledger["released"], ledger.store, ledger.prepare) == (1, 9, 9, 0)


def test_a_worker_stopped_after_a_lost_prepare_gives_back_what_it_never_heard_of(
    direct: Broker, disturbed: Broker, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "UNCERTAIN_SECONDS", LONG)
    heard = Heard()
    with Worker(disturbed, TOPIC, heard, poll_seconds=30) as worker:
        worker.asleep()
        proxy.drop_reply(lua.load("prepare").sha)
        send(direct, TOPIC, ["x"])
        proxy.wait_for_drop()
        proxy.cut()
        worker.dispatcher.stop()
        proxy.mend()
        worker.join()
    assert total(direct, TOPIC, "prepared") == 1
    assert total(direct, TOPIC, "released") + total(direct, TOPIC, "committed") == 1
    assert sum(ledger.prepare for ledger in audit(direct, TOPIC)) == 0


def test_cut_connections_are_made_anew(direct: Broker, disturbed: Broker, proxy: TcpProxy) -> None:
    heard = Heard()
    sent = 0
    with Worker(disturbed, TOPIC, heard, poll_seconds=30) as worker:
        for _ in range(5):
            send(direct, TOPIC, range(sent, sent + 100))
            sent += 100
            heard.wait(sent - 50)
            proxy.disconnect()
            heard.wait(sent, GOES_ON)
        worker.asleep()
        proxy.cut()
        send(direct, TOPIC, range(sent, sent + 100))
        threading.Event().wait(0.3)
        proxy.mend()
        heard.wait(sent + 100, GOES_ON)
        worker.asleep()
    assert Counter(heard.bodies) == Counter(range(sent + 100))
    assert live(direct, TOPIC) == 0


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_restarted_redis_loses_nothing_and_the_worker_goes_on(own_server: RedisServer, how: str) -> None:
    heard = Heard()
    broker, mine = Broker(client_of(own_server.url)), Broker(client_of(own_server.url))

    def listener(message: Message) -> None:
        heard(message)
        if message.body % 50 == 0:
            threading.Event().wait(0.02)

    send(mine, TOPIC, range(2000))
    with Worker(broker, TOPIC, listener, poll_seconds=30) as worker:
        heard.wait(300)
        if how == "killed":
            own_server.kill()
        else:
            own_server.stop()
        own_server.start()
        so_far = len(heard.bodies)
        heard.wait(min(2000, so_far + 300), GOES_ON)
        heard.wait(2000)
        worker.asleep()
        send(mine, TOPIC, [2000])
        heard.wait(2001, GOES_ON)
        worker.asleep()
    assert Counter(heard.bodies) == Counter(range(2001))
    assert total(mine, TOPIC, "committed") == 2001
    assert live(mine, TOPIC) == 0
    for each in (broker, mine):
        each.client.close()


def test_a_frozen_redis_holds_the_worker_up_and_no_longer(own_server: RedisServer) -> None:
    heard = Heard()
    broker, mine = Broker(client_of(own_server.url, socket_timeout=0.3)), Broker(client_of(own_server.url))
    send(mine, TOPIC, range(3000))
    with Worker(broker, TOPIC, heard, poll_seconds=30) as worker:
        heard.wait(300)
        own_server.pause()
        threading.Event().wait(1.2)
        own_server.resume()
        heard.wait(3000, GOES_ON)
        worker.asleep()
    assert Counter(heard.bodies) == Counter(range(3000))
    assert live(mine, TOPIC) == 0
    for each in (broker, mine):
        each.client.close()


def test_a_foreign_key_stops_its_slot_alone_and_is_complained_about_once(
    direct: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acks, "REST_SECONDS", 0.1)
    heard = Heard()
    wrong = slot_keys(direct.prefix, TOPIC.name, 3).retry
    send(direct, TOPIC, range(100))
    stuck = live_in(direct, 3)
    assert stuck
    direct.client.set(wrong, "a stranger's")
    caplog.set_level(logging.WARNING, "django_rmq.consumer")
    with Worker(direct, TOPIC, heard, poll_seconds=0.1):
        heard.wait(100 - stuck)
        threading.Event().wait(0.5)
        complaints = [record for record in caplog.records if "Cannot process" in record.getMessage()]
        assert len(complaints) == 1
        assert "slot 3" in complaints[0].getMessage()
        assert len(heard.bodies) == 100 - stuck
        direct.client.delete(wrong)
        heard.wait(100)
    assert Counter(heard.bodies) == Counter(range(100))
    assert live(direct, TOPIC) == 0


def live_in(broker: Broker, slot: int) -> int:
    ledger = broker.audit_ledger(TOPIC, slot)
    return ledger.store + ledger.prepare + ledger.retry


def test_what_cannot_be_settled_for_a_foreign_key_is_settled_once_that_is_gone(
    direct: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acks, "REST_SECONDS", 0.1)
    topic = replace(TOPIC, slots=1)
    wrong = slot_keys(direct.prefix, topic.name, 0).failures
    heard = Heard()

    def listener(message: Message) -> None:
        if not heard.bodies:
            direct.client.set(wrong, "a stranger's")
        heard(message)

    # Beside failures, a delivery is committed by the names of its messages, and their failures are deleted.
    direct.client.hset(wrong, "another", "message's")
    send(direct, topic, range(5))
    with Worker(direct, topic, listener, poll_seconds=30) as worker:
        heard.wait(5)
        eventually(
            lambda: worker.dispatcher._acks.pending and not worker.dispatcher._in_flight.messages, "a refusal"
        )
        direct.client.delete(wrong)
        worker.asleep()
    assert Counter(heard.bodies) == Counter(range(5))
    [ledger] = audit(direct, topic)
    assert (ledger["committed"], ledger["expired"]) == (5, 0)


def test_a_worker_that_cannot_settle_ends_all_the_same_and_says_so(direct: Broker) -> None:
    topic = replace(TOPIC, slots=1)
    wrong = slot_keys(direct.prefix, topic.name, 0).failures

    def listener(_: Message) -> None:
        direct.client.set(wrong, "a stranger's")

    direct.client.hset(wrong, "another", "message's")
    send(direct, topic, ["x"])
    with Worker(direct, topic, listener, burst=True) as worker:
        worker.join()
    assert worker.dispatcher.forced


def test_a_worker_stops_while_redis_is_away(own_server: RedisServer) -> None:
    broker = Broker(client_of(own_server.url, socket_timeout=0.3))
    with Worker(broker, TOPIC, Heard(), poll_seconds=0.05) as worker:
        worker.asleep()
        own_server.kill()
        threading.Event().wait(0.3)
        worker.dispatcher.stop()
        worker.join(40)  # long before its shutdown time-out
    assert not worker.dispatcher.forced
    broker.client.close()


def test_a_stopping_worker_commits_although_a_lost_reply_cannot_be_asked_for(
    direct: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the node of the lost reply were away, and the one of the message answered."""
    monkeypatch.setattr(shutdown, "UNCERTAIN_SECONDS", LONG)
    heard = HeldListener()
    send(direct, TOPIC, [{"n": 1}])
    with Worker(direct, TOPIC, heard) as worker:
        assert heard.begun.wait(LONG)
        acquirer = worker.dispatcher._acquirer
        lost = ConsumedSlot(TOPIC, 0, 0)

        def away() -> bool:
            raise NodeUnavailable("away")

        with monkeypatch.context() as patch:
            patch.setattr(acquirer, "acquire_again", away)
            worker.dispatcher.stop()
            eventually(lambda: worker.dispatcher._shutdown.begun, "the stop")
            acquirer.unacquired[lost] = None
            heard.go.set()
            eventually(lambda: live(direct, TOPIC) == 0, "the commit")
            assert worker.thread.is_alive()
            acquirer.unacquired.clear()
    assert total(direct, TOPIC, "committed") == 1
