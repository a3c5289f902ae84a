"""Listeners with ``once`` on PostgreSQL: two deliveries at the same time, and transactions that cannot be committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import connections, transaction

from django_rmq import Message
from django_rmq.core.consumer import calling
from django_rmq.core.words.answers import Delivery
from django_rmq.core.words.envelopes import Envelope, encode_envelope, new_origin
from django_rmq.core.words.failures import Failure
from django_rmq.core.words.topics import Topic, TopicType
from django_rmq.models import ProcessedMessage
from django_rmq.project.listening.once import Once
from django_rmq.project.listening.processed import has_table
from tests.e2e.postgres import postgres
from tests.workers import LONG, Listener, eventually

TOPIC = Topic("payments", TopicType.RANGE_MERGE, identity="key", origin=True)
ALIAS = "bank"
Effect = ContentType
"""A model without relations, whose rows stand for what a listener does."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with postgres() as server:
        yield server.port


@pytest.fixture(autouse=True)
def bank(port: int, django_db_blocker: Any) -> Iterator[None]:
    """A database of its own, with the tables that the tests need."""
    default = connections.settings["default"]
    address = {"NAME": "shop", "USER": "shop", "HOST": "127.0.0.1", "PORT": str(port)}
    engine = {"ENGINE": "django.db.backends.postgresql", "OPTIONS": {}}
    connections.settings[ALIAS] = {**default, **engine, **address}
    models = (ProcessedMessage, Effect)
    with django_db_blocker.unblock():
        with connections[ALIAS].schema_editor() as editor:
            for model in models:
                editor.create_model(model)
        try:
            yield
        finally:
            with connections[ALIAS].schema_editor() as editor:
                for model in models:
                    editor.delete_model(model)
            connections[ALIAS].close()
            del connections[ALIAS]
            del connections.settings[ALIAS]


def sent(body: str) -> Delivery:
    envelope = encode_envelope(Envelope(f'"{body}"'.encode(), origin=new_origin()))
    return Delivery(body.encode(), 0.0, TOPIC.max_retries, envelope)


def call(
    listener: Callable[[Any], Any], *given: Delivery, receipt: int = 1, batch_size: int | None = None
) -> list[Failure | None]:
    """Call a listener with ``once`` for a delivery."""
    found = Listener("payments", Once("listener", listener, ALIAS), batch_size)
    return calling.run(found, [Message(TOPIC, 0, receipt, each) for each in given])


def write(message: Message) -> None:
    Effect.objects.using(ALIAS).create(app_label=message.body)


def effects() -> list[str]:
    return sorted(Effect.objects.using(ALIAS).values_list("app_label", flat=True))


class Zombie(threading.Thread):
    """A delivery of the same message in another worker."""

    def __init__(
        self, listener: Callable[[Any], Any], *given: Delivery, batch_size: int | None = None
    ) -> None:
        super().__init__(daemon=True)
        self.outcomes: list[Failure | None] = []
        self._run: Callable[[], list[Failure | None]] = lambda: call(
            listener, *given, receipt=2, batch_size=batch_size
        )

    def run(self) -> None:
        try:
            self.outcomes = self._run()
        finally:
            connections[ALIAS].close()

    def wait_for_lock(self) -> None:
        """Return when it waits for the transaction of this thread."""

        def waits() -> bool:
            with connections[ALIAS].cursor() as cursor:
                cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
                row: tuple[int] = cursor.fetchone()
                return row[0] > 0

        eventually(waits, "waiting for the other transaction")


@pytest.mark.parametrize("fails", [False, True], ids=["commits", "rolls back"])
@pytest.mark.parametrize("batch_size", [None, 10])
def test_of_two_deliveries_at_once_the_second_waits_for_the_first(
    fails: bool, batch_size: int | None
) -> None:
    given, calls = [sent("a"), sent("b")][: 1 if batch_size is None else 2], list[str]()

    def second(argument: Any) -> None:
        calls.append("second")
        for message in argument if batch_size else [argument]:
            write(message)

    zombie = Zombie(second, *given, batch_size=batch_size)

    def first(argument: Any) -> None:
        calls.append("first")
        for message in argument if batch_size else [argument]:
            write(message)
        if not zombie.is_alive() and not zombie.outcomes:
            zombie.start()
            zombie.wait_for_lock()
        if fails:
            raise ValueError("no")

    outcomes = call(first, *given[:1] if fails else given, batch_size=batch_size)
    zombie.join(LONG)
    assert [outcome is None for outcome in outcomes] == [not fails] * len(outcomes)
    assert zombie.outcomes == [None] * len(given)
    assert calls == (["first", "second"] if fails else ["first"])
    assert effects() == ["a", "b"][: len(given)]
    assert ProcessedMessage.objects.using(ALIAS).count() == len(given)


def swallow_an_error_of_sql() -> None:
    with connections[ALIAS].cursor() as cursor:
        try:
            cursor.execute("SELECT 1 / 0")
        except Exception:  # noqa: BLE001
            pass


SPOILS: dict[str, Callable[[], None]] = {
    "error": swallow_an_error_of_sql,
    "close": lambda: connections[ALIAS].close(),  # noqa: PLW0108 - there is no such alias yet
    "close all": connections.close_all,
    "rollback": lambda: transaction.set_rollback(True, using=ALIAS),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_transaction_that_cannot_be_committed_is_a_failure(spoil: str) -> None:
    given = sent("a")

    def listener(message: Message) -> None:
        write(message)
        if message.receipt == 1:
            SPOILS[spoil]()

    (outcome,) = call(listener, given)
    assert outcome is not None
    assert "NotCommitted" in outcome.error
    assert effects() == []
    assert call(listener, given, receipt=2) == [None]
    assert effects() == ["a"]


def test_an_error_of_sql_around_which_there_is_a_savepoint_is_none() -> None:
    def listener(message: Message) -> None:
        try:
            with transaction.atomic(ALIAS):
                write(message)
                with connections[ALIAS].cursor() as cursor:
                    cursor.execute("SELECT 1 / 0")
        except Exception:  # noqa: BLE001
            Effect.objects.using(ALIAS).create(app_label="instead")

    assert call(listener, sent("a")) == [None]
    assert effects() == ["instead"]


def test_a_commit_whose_answer_is_lost_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given, connection = sent("a"), connections[ALIAS]
    commit = connection.commit

    def committed_and_lost() -> None:
        commit()
        raise ConnectionError("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(connection, "commit", committed_and_lost)
        (outcome,) = call(write, given)
    assert outcome is not None
    assert call(write, given, receipt=2) == [None]
    assert effects() == ["a"]


def test_a_missing_table_is_an_error_of_the_database_and_spoils_no_later_message() -> None:
    given = sent("a")
    with connections[ALIAS].schema_editor() as editor:
        editor.delete_model(ProcessedMessage)
    try:
        (outcome,) = call(write, given)
    finally:
        with connections[ALIAS].schema_editor() as editor:
            editor.create_model(ProcessedMessage)
    assert outcome is not None
    assert outcome.error.startswith("django.db.utils.ProgrammingError")
    assert call(write, given, receipt=2) == [None]
    assert effects() == ["a"]


def test_the_table_is_asked_for() -> None:
    assert has_table(ALIAS)
    with connections[ALIAS].schema_editor() as editor:
        editor.delete_model(ProcessedMessage)
    assert not has_table(ALIAS)
    with connections[ALIAS].schema_editor() as editor:
        editor.create_model(ProcessedMessage)
