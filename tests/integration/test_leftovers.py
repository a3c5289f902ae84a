"""What the call of a listener leaves behind in its thread, and that the next message finds nothing of it."""

from __future__ import annotations

import asyncio
import decimal
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from asgiref.sync import sync_to_async
from django.core.cache import caches
from django.db import connections, transaction
from django.test import override_settings
from django.utils import timezone, translation
from django.utils.connection import ConnectionDoesNotExist

from django_rmq import Message, open_transactions, send_message
from django_rmq import listener as register
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.open_transactions import TransactionLeftOpen
from django_rmq.testing import drain, memory_broker
from django_rmq.worker import listener_registry
from django_rmq.worker.listener_hooks import hooks
from tests.e2e.postgres import postgres
from tests.support.brokers import OracleBroker
from tests.support.workers import Worker, eventually, send, total

ALIAS = "shop"
TOPIC = Topic("orders", TopicType.RANGE_MERGE, slots=1, time_range_ms=1, max_retries=0, backoff=BackOff(0, 0))
RMQ = {
    "BROKER": "memory",
    "AUTODISCOVER": None,
    "TOPICS": {"orders": {"TYPE": "priority", "SLOTS": 1, "MAX_RETRIES": 0}},
}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with postgres() as server:
        yield server.port


@pytest.fixture(autouse=True, params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def shop(request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: Any) -> Iterator[None]:
    """A database that several threads can open, and no listeners."""
    own: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": tmp_path / "shop.sqlite3"}
    if request.param == "postgresql":
        own = {"ENGINE": "django.db.backends.postgresql", "PORT": str(request.getfixturevalue("port"))}
        own |= {"NAME": "shop", "USER": "shop", "HOST": "127.0.0.1", "OPTIONS": {}, "CONN_MAX_AGE": None}
    connections.settings[ALIAS] = {**connections.settings["default"], **own}
    with override_settings(RMQ=RMQ), listener_registry.isolated(), django_db_blocker.unblock():
        with connections[ALIAS].cursor() as cursor:
            cursor.execute("CREATE TABLE effect (name text)")
        try:
            yield
        finally:
            with connections[ALIAS].cursor() as cursor:
                cursor.execute("DROP TABLE effect")
            connections[ALIAS].close()
            del connections[ALIAS]
            del connections.settings[ALIAS]


@pytest.fixture
def broker() -> OracleBroker:
    return OracleBroker("m:")


@pytest.fixture
def listeners() -> Iterator[Shop]:
    found = Shop()
    yield found
    while found.left:
        with suppress(ConnectionDoesNotExist):
            found.left.pop().close()


def write(name: str) -> None:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("INSERT INTO effect VALUES (%s)", [name])


def lose_connection() -> None:
    """Ask over a connection that the database ends meanwhile, as at its restart."""
    connection: Any = connections[ALIAS]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        else:
            # No server ends the connections to a file, so Django takes all of them for usable.
            connection.is_usable = lambda: False
            connection.connection.close()
            cursor.execute("SELECT 1")


def effects() -> list[str]:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("SELECT name FROM effect ORDER BY name")
        return [name for (name,) in cursor.fetchall()]


class Shop:
    """Listeners that do what the body says; each is one thread's, so that a message follows the other there."""

    def __init__(self) -> None:
        self.left: list[Any] = []
        """Generators that have not run to their end."""
        self.late: list[str] = []
        """What the end of such a generator raised."""

    def rows(self) -> Iterator[int]:
        with transaction.atomic(using=ALIAS):
            write("left open")
            yield 1
            yield 2

    def do(self, body: str) -> None:
        if body == "leave":
            self.left.append(self.rows())
            next(self.left[-1])
        elif body == "leave and fail":
            self.do("leave")
            raise ValueError("of the listener")
        elif body == "switch autocommit off":
            transaction.set_autocommit(False, using=ALIAS)
            write("left open")
        elif body == "lose the connection":
            lose_connection()
        elif body == "close the generator":
            with transaction.atomic(using=ALIAS):
                write("before")
                try:
                    self.left.pop().close()
                except Exception as error:  # noqa: BLE001 - looked at by the test
                    self.late.append(type(error).__name__)
                write("after")
        else:
            write(body)

    def one(self, message: Message) -> None:
        self.do(message.body)

    def many(self, messages: list[Message]) -> None:
        for message in messages:
            self.do(message.body)

    async def later(self, message: Message) -> None:
        await sync_to_async(self.do)(message.body)

    def looping(self, message: Message) -> None:
        asyncio.run(self.later(message))


def run(
    broker: Any, listener: Callable[[Any], Any], bodies: list[Any], batch_size: int | None = None
) -> None:
    """Have one thread of a worker handle these bodies, in any order or together."""
    register("orders", batch_size=batch_size)(listener)
    with Worker(broker, TOPIC, listener, batch_size=batch_size, threads=1, hooks=hooks()):
        for body in bodies:
            before = total(broker, TOPIC, "committed") + total(broker, TOPIC, "failed")
            each = body if isinstance(body, list) else [body]
            send(broker, TOPIC, each)

            def is_done(count: int = before + len(each)) -> bool:
                return total(broker, TOPIC, "committed") + total(broker, TOPIC, "failed") == count

            eventually(is_done, f"the end of {body}")


@pytest.mark.parametrize("kind", ["one", "many", "later", "looping"])
@pytest.mark.parametrize("body", ["leave", "leave and fail", "switch autocommit off"])
def test_a_transaction_left_open_fails_its_message_and_no_other(
    broker: OracleBroker, listeners: Shop, caplog: pytest.LogCaptureFixture, kind: str, body: str
) -> None:
    run(broker, getattr(listeners, kind), ["a", body, "b", "c"], 10 if kind == "many" else None)
    assert effects() == ["a", "b", "c"]
    assert (total(broker, TOPIC, "failed"), total(broker, TOPIC, "committed")) == (1, 3)
    said = f"listener tests.integration.test_leftovers.Shop.{kind} has left a transaction open on database 'shop'"
    assert said in caplog.text
    assert ("ValueError" in caplog.text) == (body == "leave and fail")


@pytest.mark.parametrize("kind", ["one", "later", "looping"])
def test_a_connection_that_the_database_has_ended_fails_one_message_and_no_other(
    broker: OracleBroker, listeners: Shop, kind: str
) -> None:
    run(broker, getattr(listeners, kind), ["a", "lose the connection", "b", "c"])
    assert effects() == ["a", "b", "c"]
    assert (total(broker, TOPIC, "failed"), total(broker, TOPIC, "committed")) == (1, 3)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_process_that_a_listener_has_forked_waits_for_no_thread_of_its_loops(
    broker: OracleBroker, listeners: Shop
) -> None:
    children: list[int] = []

    def fork(message: Message) -> None:
        listeners.looping(message)
        children.append(os.fork())

    run(broker, fork, ["a"])
    try:
        eventually(lambda: os.waitid(os.P_PID, children[0], os.WEXITED | os.WNOHANG | os.WNOWAIT), "its end")
    finally:
        os.kill(children[0], signal.SIGKILL)
        assert os.waitpid(children[0], 0) == (children[0], 0)


def test_the_thread_of_loops_ends_with_that_of_their_listener(broker: OracleBroker, listeners: Shop) -> None:
    threads: list[threading.Thread] = []

    def looping(message: Message) -> None:
        listeners.looping(message)
        threads.append(asyncio.run(sync_to_async(threading.current_thread)()))

    run(broker, looping, ["a", "b"])
    assert len(set(threads)) == 1
    eventually(lambda: not threads[0].is_alive(), "the end of the thread")


def test_of_a_list_only_the_message_that_leaves_a_transaction_open_fails(
    broker: OracleBroker, listeners: Shop
) -> None:
    run(broker, listeners.many, [["a", "b", "leave", "c"]], 10)
    assert total(broker, TOPIC, "failed") == 1
    assert total(broker, TOPIC, "committed") == 3


def test_the_late_end_of_an_open_block_ends_no_transaction_of_another_message(
    broker: OracleBroker, listeners: Shop
) -> None:
    run(broker, listeners.one, ["leave", "close the generator", "z"])
    assert listeners.late == ["ConnectionDoesNotExist"]
    assert effects() == ["after", "before", "z"]
    assert total(broker, TOPIC, "failed") == 1


def test_drain_raises_what_is_left_open_and_keeps_the_transaction_of_the_test(listeners: Shop) -> None:
    register("orders")(listeners.one)
    with memory_broker(), transaction.atomic(using=ALIAS):
        write("by the test")
        send_message("orders", "leave", priority=50, on_commit=False)
        with pytest.raises(TransactionLeftOpen, match=r"Shop\.one has left a transaction open"):
            drain()
        assert effects() == ["by the test"]
        send_message("orders", "a", priority=50, on_commit=False)
        assert drain() == 1
        with pytest.raises(ConnectionDoesNotExist):
            listeners.left.pop().close()
        assert effects() == ["a", "by the test"]
    assert effects() == ["a", "by the test"]


customer: ContextVar[str] = ContextVar("customer", default="nobody")


def seen() -> tuple[Any, ...]:
    zone, digits = timezone.get_current_timezone_name(), decimal.getcontext().prec
    return customer.get(), translation.get_language(), zone, digits


def change() -> None:
    customer.set("customer 7")
    translation.activate("de")
    timezone.activate("Asia/Tokyo")
    decimal.getcontext().prec = 3


@pytest.mark.parametrize("kind", ["one", "many", "later"])
def test_language_time_zone_and_context_variables_end_with_the_call(broker: OracleBroker, kind: str) -> None:
    found: list[tuple[Any, ...]] = []
    threads: set[int] = set()

    def one(message: Message) -> None:
        threads.add(threading.get_ident())
        found.append(seen())
        change()
        if message.body == "fails":
            raise ValueError

    def many(messages: list[Message]) -> None:
        one(messages[0])

    async def later(message: Message) -> None:
        await sync_to_async(one)(message)

    chosen: dict[str, Callable[[Any], Any]] = {"one": one, "many": many, "later": later}
    run(broker, chosen[kind], ["a", "fails", "b", "c"], 10 if kind == "many" else None)
    assert len(threads) == 1
    assert found == [found[0]] * 4
    assert found[0][0] == "nobody"
    assert found[0][1:] != ("de", "Asia/Tokyo", 3)


def test_what_a_listener_changes_ends_with_its_call_in_drain_and_what_the_test_has_set_is_seen() -> None:
    found: list[tuple[Any, ...]] = []

    @register("orders")
    def listener(message: Message) -> None:
        found.append(seen())
        change()

    with memory_broker(), translation.override("zh-hans"):
        for body in ("a", "b"):
            send_message("orders", body, priority=50, on_commit=False)
        before = seen()
        assert drain() == 2
        assert seen() == before
    assert found == [before] * 2


def test_caches_are_made_once_for_each_thread_and_not_for_each_call(broker: OracleBroker) -> None:
    found: list[Any] = []

    def listener(message: Message) -> None:
        found.append(caches["default"])

    run(broker, listener, ["a", "b", "c"])
    assert len(found) == 3
    assert len({id(cache) for cache in found}) == 1


@pytest.mark.parametrize("kind", ["one", "later", "looping"])
@pytest.mark.parametrize("debug", [True, False])
def test_with_debug_the_queries_of_one_message_are_kept_until_the_next(
    broker: OracleBroker, listeners: Shop, kind: str, debug: bool
) -> None:
    kept: list[int] = []

    def count(body: str) -> None:
        listeners.do(body)
        kept.append(len(connections[ALIAS].queries))

    def one(message: Message) -> None:
        count(message.body)

    async def later(message: Message) -> None:
        await sync_to_async(count)(message.body)

    def looping(message: Message) -> None:
        asyncio.run(later(message))

    chosen: dict[str, Callable[[Any], Any]] = {"one": one, "later": later, "looping": looping}
    with override_settings(DEBUG=debug):
        run(broker, chosen[kind], ["a", "b", "c"])
    assert kept == [int(debug)] * 3


def test_looking_for_open_transactions_asks_for_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"AUTOCOMMIT": True}
    idle = Mock(in_atomic_block=False, autocommit=True, atomic_blocks=[], settings_dict=settings)
    closed = Mock(in_atomic_block=False, autocommit=False, atomic_blocks=[], connection=None)
    switched = Mock(
        in_atomic_block=False, autocommit=False, atomic_blocks=[], settings_dict=settings, vendor="sqlite"
    )
    switched.connection.in_transaction = True
    for one in (idle, closed, switched):
        # As in a test without a database.
        one.ensure_connection.side_effect = one.get_autocommit.side_effect = RuntimeError("forbidden")
    opened = {"idle": idle, "closed": closed}
    monkeypatch.setattr(open_transactions, "_opened", Mock(connections=opened))
    assert open_transactions.roll_back_open() == []
    opened["switched"] = switched
    assert open_transactions.roll_back_open() == ["switched"]
    assert switched.close.called and not idle.close.called
