"""Sends of coroutines over the connection that their event loop shares: round trips, errors, cancellation, loops and forks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import pytest
import redis
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.test import override_settings
from redis.exceptions import NoPermissionError

from django_rmq import (
    InvalidMessage,
    SendResult,
    ServerRefused,
    ServerUnavailable,
    TopicFull,
    aensure_message,
    asend_message,
    connections,
    open_transactions,
    send_message,
    signals,
)
from django_rmq.conf import get_config
from django_rmq.core.redis.shared_connection import SharedConnection
from django_rmq.core.reslotting import begin, finish, move
from tests.support.sends import entries
from tests.support.servers import RedisCluster, ask

TOPICS = {
    "jobs": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 5},
    "small": {"TYPE": "range_merge", "SLOTS": 1, "TIME_RANGE": 5, "MAX_BACKLOG": 2},
    "named": {"TYPE": "range_merge", "SLOTS": 1, "TIME_RANGE": 5, "IDENTITY": "key"},
}


@pytest.fixture(autouse=True)
def _settings(redis_url: str, prefix: str) -> Iterator[None]:
    with override_settings(RMQ={"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS}):
        yield


@pytest.fixture(autouse=True)
def _no_transaction_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget connections that other tests have left in a transaction and that are not collected yet."""
    monkeypatch.setattr(open_transactions, "_everywhere", WeakValueDictionary())
    open_transactions.record_opened_before()


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls each round trip of a shared connection has carried."""
    carried: list[int] = []
    carry = SharedConnection._carry

    async def counted(self: SharedConnection, trip: Any) -> None:
        carried.append(len(trip))
        await carry(self, trip)

    monkeypatch.setattr(SharedConnection, "_carry", counted)
    return carried


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[asyncio.Event, asyncio.Event]]:
    """Hold round trips before they are written, once the loop asks for it: the events say "begun" and "go on"."""

    def hold() -> tuple[asyncio.Event, asyncio.Event]:
        begun, go_on = asyncio.Event(), asyncio.Event()
        carry = SharedConnection._carry

        async def waits(self: SharedConnection, trip: Any) -> None:
            begun.set()
            await go_on.wait()
            await carry(self, trip)

        monkeypatch.setattr(SharedConnection, "_carry", waits)
        return begun, go_on

    return hold


async def prepared(topic: str = "jobs") -> None:
    """Make the sends by the thread with which a loop, and a topic in a process, begin."""
    await asend_message(topic, "first")
    await asend_message(topic, "first")


def waiting(name: str) -> int:
    return len(entries(name))


def test_sends_that_wait_at_the_same_time_share_a_round_trip(trips: list[int]) -> None:
    async def send() -> list[SendResult]:
        await prepared()
        trips.clear()
        return await asyncio.gather(*(asend_message("jobs", number) for number in range(100)))

    results = asyncio.run(send())
    assert [result.status for result in results] == ["stored"] * 100
    assert [result.member for result in results] == [b"%d" % number for number in range(100)]
    assert trips == [100]
    assert waiting("jobs") == 101


def test_a_send_that_ensures_shares_the_connection(trips: list[int]) -> None:
    async def send() -> list[str]:
        await prepared()
        # The server gets the script with the first call.
        await aensure_message("jobs", "first")
        trips.clear()
        return [(await aensure_message("jobs", body)).status for body in (1, 1)]

    assert asyncio.run(send()) == ["stored", "present"]
    assert trips == [1, 1]


def test_a_message_without_a_name_is_not_ensured() -> None:
    async def ensure() -> None:
        # The thread makes the first send of a loop; later ones share the connection.
        for _ in range(2):
            await aensure_message("named", "body", key="a")
        with pytest.raises(InvalidMessage, match=r"pass key= or id=$"):
            await aensure_message("named", "body")

    asyncio.run(ensure())
    assert waiting("named") == 1


def test_the_first_send_of_a_loop_goes_through_its_thread(trips: list[int]) -> None:
    send_message("jobs", 0)
    for number in range(3):
        asyncio.run(asend_message("jobs", number))
    assert trips == []


def test_an_error_comes_back_to_its_own_sender(trips: list[int]) -> None:
    async def send() -> list[SendResult | BaseException]:
        await prepared("small")
        trips.clear()
        options: list[dict[str, Any]] = [{}, {"priority": 5}, {}, {}]
        sends = [asend_message("small", number, **options[number]) for number in range(4)]
        return await asyncio.gather(*sends, return_exceptions=True)

    stored, invalid, *full = asyncio.run(send())
    assert isinstance(stored, SendResult) and stored.status == "stored"
    assert isinstance(invalid, InvalidMessage)
    assert [type(error) for error in full] == [TopicFull, TopicFull]
    assert trips == [3]


def test_a_cancelled_send_leaves_the_others_alone(held: Any) -> None:
    async def send() -> list[SendResult | BaseException]:
        await prepared()
        begun, go_on = held()
        under_way = [asyncio.create_task(asend_message("jobs", number)) for number in range(3)]
        await begun.wait()
        behind = [asyncio.create_task(asend_message("jobs", number)) for number in range(10, 13)]
        await asyncio.sleep(0)
        under_way[1].cancel()
        behind[1].cancel()
        await asyncio.wait([under_way[1], behind[1]])
        go_on.set()
        return await asyncio.gather(*under_way, *behind, return_exceptions=True)

    results = asyncio.run(send())
    assert [getattr(result, "status", type(result)) for result in results] == [
        "stored", asyncio.CancelledError, "stored", "stored", asyncio.CancelledError, "stored",
    ]  # fmt: skip
    # The first cancelled send belonged to a round trip that was under way, so it was sent; the second one was not.
    assert waiting("jobs") == 1 + 3 + 2


def test_a_server_that_does_not_answer_in_time_fails_its_round_trip_and_not_the_next_one(
    held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send() -> str:
        await prepared()
        shared = connections.get_shared_connection()
        assert shared is not None
        _, go_on = held()
        monkeypatch.setattr(shared, "_seconds", 0.05)
        sends = [asend_message("jobs", number) for number in range(2)]
        errors = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(error) for error in errors] == [ServerUnavailable] * 2
        assert errors[0] is not errors[1]
        monkeypatch.setattr(shared, "_seconds", 60.0)
        go_on.set()
        return (await asend_message("jobs", 5)).status

    assert asyncio.run(send()) == "stored"


def block(seconds: float) -> None:
    """Do what no coroutine should do."""
    time.sleep(seconds)


def test_a_send_succeeds_though_the_loop_is_blocked_for_longer_than_its_time_out(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send() -> list[str]:
        await prepared()
        shared = connections.get_shared_connection()
        assert shared is not None
        await asend_message("jobs", 1)
        monkeypatch.setattr(shared, "_seconds", 0.5)
        # Redis answers while the loop is blocked, and not before.
        redis_client.execute_command("CLIENT", "PAUSE", 300, "ALL")
        sends = [asyncio.create_task(asend_message("jobs", number)) for number in range(2, 5)]
        for _ in range(20):
            await asyncio.sleep(0)
        # The calls are written by now.
        block(0.8)
        return [(await each).status for each in sends]

    assert asyncio.run(send()) == ["stored"] * 3


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def test_a_connection_that_the_server_has_closed_is_made_again(redis_url: str) -> None:
    async def send() -> list[str]:
        await prepared()
        before = await asend_message("jobs", 1)
        shared = connections.get_shared_connection()
        assert shared is not None
        host, port = shared._connection._writer.get_extra_info("sockname")[:2]
        assert ask(port_of(redis_url), "CLIENT", "KILL", "ADDR", f"{host}:{port}", "SKIPME", "no") == 1
        after = await asyncio.gather(*(asend_message("jobs", number) for number in (2, 3)))
        return [result.status for result in (before, *after)]

    assert asyncio.run(send()) == ["stored"] * 3


def test_a_server_that_lost_its_scripts_gets_them_again(redis_url: str) -> None:
    async def send() -> list[str]:
        await prepared()
        ask(port_of(redis_url), "SCRIPT", "FLUSH")
        results = await asyncio.gather(*(asend_message("jobs", number) for number in range(3)))
        return [result.status for result in results]

    assert asyncio.run(send()) == ["stored"] * 3


def test_a_refusal_of_the_server_is_the_error_of_the_send() -> None:
    async def send() -> None:
        await prepared()
        with patch.object(SharedConnection, "_carry", _answer_with_an_error):
            await asend_message("jobs", 1)

    with pytest.raises(ServerRefused, match="denies access"):
        asyncio.run(send())


async def _answer_with_an_error(self: SharedConnection, trip: Any) -> None:
    for call in trip:
        call.reply.set_result(NoPermissionError("NOPERM this user has no permissions"))


def test_a_topic_that_is_re_slotted_meanwhile_is_followed() -> None:
    async def send() -> SendResult:
        await prepared()
        await asyncio.to_thread(re_slot)
        return await asend_message("jobs", 1)

    def re_slot() -> None:
        broker = connections.get_broker("worker")
        topic = get_config().topic("jobs")
        reslotting = begin(broker, topic, 8)
        assert reslotting is not None
        move(broker, reslotting)
        finish(broker, reslotting)

    result = asyncio.run(send())
    assert result.status == "stored"


@pytest.mark.django_db(transaction=True)
def test_a_send_of_a_transaction_waits_for_its_commit(trips: list[int]) -> None:
    async def send() -> tuple[SendResult, SendResult]:
        await asend_message("jobs", 0, on_commit=False)
        return await asend_message("jobs", 1), await asend_message("jobs", 2, on_commit=False)

    send_message("jobs", "first")
    with transaction.atomic():
        late, soon = async_to_sync(send)()
        assert (late.status, soon.status) == ("pending", "stored")
    assert late.status == "stored"
    assert trips == [1]


@pytest.mark.django_db(transaction=True)
def test_an_open_transaction_is_seen_from_every_thread() -> None:
    assert not open_transactions.is_any_open("default")
    with transaction.atomic():
        assert asyncio.run(asyncio.to_thread(open_transactions.is_any_open, "default"))
        assert not open_transactions.is_any_open("other")
    assert not open_transactions.is_any_open("default")
    connection.set_autocommit(False)
    try:
        assert open_transactions.is_any_open("default")
    finally:
        connection.set_autocommit(True)


def test_receivers_of_signals_hear_of_shared_sends_outside_the_loop(trips: list[int]) -> None:
    heard: list[tuple[str, bool]] = []

    def receive(results: list[SendResult], **_: Any) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            heard.append((results[0].status, False))
        else:
            heard.append((results[0].status, True))

    async def send() -> None:
        await prepared()
        trips.clear()
        signals.message_sent.connect(receive, sender="jobs")
        try:
            await asend_message("jobs", 1)
        finally:
            signals.message_sent.disconnect(receive, sender="jobs")

    asyncio.run(send())
    assert heard == [("stored", False)]
    assert trips == [1]


def test_a_cluster_is_served_by_the_thread(
    redis_cluster: RedisCluster, prefix: str, trips: list[int]
) -> None:
    async def send() -> list[str]:
        await prepared()
        results = await asyncio.gather(*(asend_message("jobs", number) for number in range(10)))
        return [result.status for result in results]

    cluster = {"CLUSTER": redis_cluster.url}
    with override_settings(RMQ={"REDIS": cluster, "KEY_PREFIX": prefix, "TOPICS": TOPICS}):
        assert asyncio.run(send()) == ["stored"] * 10
    assert trips == []


def test_the_connection_closes_with_its_loop() -> None:
    closed: list[bool] = []

    async def send() -> Any:
        await prepared()
        await asend_message("jobs", 1)
        shared = connections.get_shared_connection()
        assert shared is not None
        assert shared._connection.is_connected
        return shared._connection

    for _ in range(3):
        used = asyncio.run(send())
        closed.append(not used.is_connected)
    assert closed == [True] * 3


def test_several_loops_have_a_connection_each(trips: list[int]) -> None:
    async def send() -> int:
        await prepared()
        await asend_message("jobs", 1)
        return id(connections.get_shared_connection())

    async def both() -> tuple[int, int]:
        return await asyncio.gather(asyncio.to_thread(asyncio.run, send()), send())

    first, second = asyncio.run(both())
    assert first != second
    assert trips and set(trips) == {1}


def test_loops_that_have_closed_are_forgotten() -> None:
    for _ in range(3):
        asyncio.run(prepared())
    assert len(connections.brokers.current().shared) == 1


def test_a_child_process_has_a_connection_of_its_own() -> None:
    async def in_child() -> None:
        # The threads of asgiref's executor are those of the parent, so no send of the child may need one.
        connections.get_shared_connection()
        assert connections.get_shared_connection() is not None
        assert (await asend_message("jobs", "of the child")).status == "stored"

    async def send() -> tuple[int, str]:
        await prepared()
        await asend_message("jobs", 1)
        child = os.fork()
        if not child:
            code = 1
            try:
                # A child that hangs fails the test, and does not outlive it.
                signal.alarm(60)
                send_message("jobs", "first of the child")
                asyncio.run(in_child())
                code = 0
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        return status, (await asend_message("jobs", 2)).status

    assert asyncio.run(send()) == (0, "stored")


def test_callers_get_an_answer_when_all_tasks_of_the_loop_are_cancelled(held: Any) -> None:
    async def send() -> str:
        await prepared()
        begun, go_on = held()
        sending: Awaitable[SendResult] = asyncio.create_task(asend_message("jobs", 1))
        await begun.wait()
        shared = connections.get_shared_connection()
        assert shared is not None and shared._writer is not None
        shared._writer.cancel()
        with pytest.raises(ServerUnavailable, match="stopped"):
            await sending
        go_on.set()
        return (await asend_message("jobs", 2)).status

    assert asyncio.run(send()) == "stored"
