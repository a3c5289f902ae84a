"""Listeners with ``once`` on PostgreSQL and MariaDB: two deliveries at once, and transactions that cannot be committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import DatabaseError, OperationalError, connections, transaction

from django_rmq import Message
from django_rmq.core.consumer.batch_run import call_all
from django_rmq.core.model.envelope import Envelope, encode_envelope, new_origin
from django_rmq.core.model.replies import Delivery, Failure
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.models import ProcessedMessage
from django_rmq.worker.once import OnceListener, has_table
from tests.support.databases import SERVERS, count_lock_waits, database_beside
from tests.support.workers import LONG, Listener, eventually

TOPIC = Topic("payments", TopicType.RANGE_MERGE, identity="key", origin=True)
ALIAS = "bank"
Effect = ContentType
"""A model without relations, whose rows stand for what a listener does."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=list(SERVERS))
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    with SERVERS[request.param]() as found:
        yield found


@pytest.fixture(autouse=True)
def bank(server: Any, django_db_blocker: Any) -> Iterator[None]:
    with django_db_blocker.unblock(), database_beside(ALIAS, server, [ProcessedMessage, Effect]):
        yield


def sent(body: str) -> Delivery:
    envelope = encode_envelope(Envelope(f'"{body}"'.encode(), origin=new_origin()))
    return Delivery(body.encode(), 0.0, TOPIC.max_retries, envelope)


def call(
    listener: Callable[[Any], Any], *given: Delivery, receipt: int = 1, batch_size: int | None = None
) -> list[Failure | None]:
    """Call a listener with ``once`` for a delivery."""
    found = Listener("payments", OnceListener("listener", listener, ALIAS), batch_size)
    return call_all(found, [Message(TOPIC, 0, receipt, each) for each in given])


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

        eventually(lambda: count_lock_waits(ALIAS), "waiting for the other transaction")


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


def fail_in_sql() -> None:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("SELECT * FROM nowhere")


def lose_to_a_deadlock() -> None:
    """Wait for a row of another transaction, which waits for one of this: the database undoes this transaction."""
    Effect.objects.using(ALIAS).filter(app_label="mine").update(model="mine")
    other = Deadlock()
    other.start()
    assert other.has_theirs.wait(LONG)
    eventually(lambda: count_lock_waits(ALIAS), "the other transaction waiting for this one")
    try:
        # A read: after a write that failed, Django itself refuses to commit.
        list(Effect.objects.using(ALIAS).filter(app_label="theirs").select_for_update())
    finally:
        other.join(LONG)


class Deadlock(threading.Thread):
    """The other transaction, which has written so much that the database undoes the first one."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.has_theirs = threading.Event()

    def run(self) -> None:
        theirs = Effect.objects.using(ALIAS)
        try:
            with suppress(DatabaseError), transaction.atomic(ALIAS):
                if connections[ALIAS].vendor == "postgresql":
                    # The one that has waited for this long looks for a deadlock, and gives up.
                    with connections[ALIAS].cursor() as cursor:
                        cursor.execute("SET LOCAL deadlock_timeout = '600s'")
                theirs.bulk_create(Effect(app_label="filler", model=str(n)) for n in range(500))
                theirs.filter(app_label="theirs").update(model="theirs")
                self.has_theirs.set()
                theirs.filter(app_label="mine").update(model="theirs")
        finally:
            connections[ALIAS].close()


def swallow(act: Callable[[], None]) -> None:
    with suppress(DatabaseError):
        act()


SPOILS: dict[str, Callable[[], None]] = {
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


def test_an_error_of_sql_that_is_caught_is_a_failure_only_where_it_spoils_the_transaction() -> None:
    def listener(message: Message) -> None:
        write(message)
        swallow(fail_in_sql)

    (outcome,) = call(listener, sent("a"))
    if connections[ALIAS].vendor == "mysql":
        assert (outcome, effects()) == (None, ["a"])
    else:
        assert outcome is not None and "NotCommitted" in outcome.error
        assert effects() == []


def test_a_transaction_that_was_rolled_back_in_sql_is_a_failure_where_the_driver_tells() -> None:
    def listener(message: Message) -> None:
        write(message)
        with connections[ALIAS].cursor() as cursor:
            cursor.execute("ROLLBACK")

    (outcome,) = call(listener, sent("a"))
    if connections[ALIAS].vendor == "mysql":
        assert outcome is None
    else:
        assert outcome is not None
        assert "NotCommitted" in outcome.error
    assert effects() == []


@pytest.mark.parametrize("batch_size", [None, 10])
@pytest.mark.parametrize("writes_on", [False, True])
def test_a_transaction_that_was_lost_to_a_deadlock_is_a_failure(
    writes_on: bool, batch_size: int | None
) -> None:
    """MySQL begins another transaction with the next statement, and its commit raises nothing."""
    given = [sent("a"), sent("b")][: 1 if batch_size is None else 2]
    for name in ("mine", "theirs"):
        Effect.objects.using(ALIAS).create(app_label=name)
    lost: list[bool] = []

    def listener(argument: Any) -> None:
        messages = argument if batch_size else [argument]
        for message in messages:
            write(message)
        if lost:
            return
        try:
            lose_to_a_deadlock()
        except DatabaseError:
            lost.append(True)
            if writes_on:
                swallow(lambda: write(messages[0]))

    outcomes = call(listener, *given, batch_size=batch_size)
    assert lost
    if batch_size is None:
        assert outcomes[0] is not None and "NotCommitted" in outcomes[0].error
        assert "a" not in effects()
        assert ProcessedMessage.objects.using(ALIAS).count() == 0
    else:
        assert outcomes == [None, None], "one by one they succeed"
        assert effects().count("a") == effects().count("b") == 1


def test_a_lock_that_is_not_waited_for_is_no_failure_if_a_savepoint_is_around_it() -> None:
    """As the docs ask for; the server reports it by an ``OperationalError``, as it does a deadlock."""
    Effect.objects.using(ALIAS).create(app_label="held")
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic(ALIAS):
                list(Effect.objects.using(ALIAS).filter(app_label="held").select_for_update())
                held.set()
                go_on.wait(LONG)
        finally:
            connections[ALIAS].close()

    def listener(message: Message) -> None:
        try:
            with transaction.atomic(ALIAS):
                list(Effect.objects.using(ALIAS).filter(app_label="held").select_for_update(nowait=True))
        except OperationalError:
            write(message)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(LONG)
    try:
        assert call(listener, sent("a")) == [None]
    finally:
        go_on.set()
        thread.join(LONG)
    assert effects() == ["a", "held"]


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
