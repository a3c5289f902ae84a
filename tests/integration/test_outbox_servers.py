"""The outbox on PostgreSQL and MariaDB: relays and commits beside others that hold rows, or stand still while they do."""

from __future__ import annotations

import logging
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from django.db import DatabaseError, connections, transaction
from django.test import override_settings

from django_rmq import connections as rmq
from django_rmq import send_message, send_messages
from django_rmq.database_access import threads_of_duties
from django_rmq.models import OutboxMessage
from django_rmq.outbox import relay as outbox_relay
from django_rmq.outbox import row_lists
from django_rmq.outbox.relay import relay
from tests.support.databases import MEGABYTE, SERVERS, database_beside, write_large_rows
from tests.support.sends import scores
from tests.support.workers import LONG, eventually

ALIAS = "shop"
TOPICS = {
    "renders": {"TYPE": "priority", "SLOTS": 4},
    "keyed": {"TYPE": "priority", "SLOTS": 4, "IDENTITY": "key"},
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=list(SERVERS))
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    with SERVERS[request.param]() as found:
        yield found


@pytest.fixture(autouse=True)
def shop(
    server: Any, redis_url: str, prefix: str, django_db_blocker: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setattr(outbox_relay, "BATCH", 5)
    given = {"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS, "OUTBOX": {"GRACE": 60}}
    beside = database_beside(ALIAS, server, [OutboxMessage])
    with django_db_blocker.unblock(), override_settings(RMQ=given), beside:
        yield


class Beside(threading.Thread):
    """What another process does; it stops at a point until it may go on."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._act = act
        self.stands, self.go_on = threading.Event(), threading.Event()
        self.returned: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.returned = self._act()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error
        finally:
            connections[ALIAS].close()

    def stand(self) -> None:
        """Stand still at this point."""
        self.stands.set()
        assert self.go_on.wait(LONG)

    def end(self) -> None:
        """Let it go on to its end."""
        self.go_on.set()
        self.join(LONG)
        assert not self.is_alive()


def leave_rows(count: int, first: int = 0) -> None:
    with mock.patch("django_rmq.sending.on_commit._flush"), transaction.atomic(ALIAS):
        send_messages("renders", list(range(first, first + count)), priority=100, using=ALIAS)
    OutboxMessage.objects.using(ALIAS).update(due_ms=1)


def rows() -> list[bytes]:
    found = OutboxMessage.objects.using(ALIAS).order_by("id")
    return [bytes(member) for member in found.values_list("member", flat=True)]


def waiting(name: str = "renders") -> dict[bytes, float]:
    return scores(name)


@contextmanager
def relay_that_stands(before: str = "attempt") -> Iterator[Beside]:
    """A relay that stands still while it holds its rows, before it calls this method of its producer."""
    producer = rmq.get_producer("coordinator")
    real = getattr(producer, before)

    def stand_and_call(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is other:
            other.stand()
        return real(*args, **options)

    other = Beside(lambda: relay(ALIAS))
    with mock.patch.object(producer, before, stand_and_call):
        other.start()
        assert other.stands.wait(LONG)
        try:
            yield other
        finally:
            other.end()


def relay_all() -> int:
    return sum(step.sent for step in outbox_relay.relay_all(ALIAS))


def test_a_relay_goes_on_behind_what_one_that_stands_still_holds() -> None:
    leave_rows(23)
    with relay_that_stands() as other:
        assert relay_all() == 18
        assert len(rows()) == len(waiting()) - 13 == 5
        assert relay_all() == 0
    assert (other.returned.sent, rows(), len(waiting())) == (5, [], 23)


def test_several_relays_share_what_is_due() -> None:
    count, relays = 300, 3
    leave_rows(count)
    begin = threading.Barrier(relays)
    steps: list[list[int]] = [[] for _ in range(relays)]

    def relay_on(own: list[int]) -> None:
        for step in outbox_relay.relay_all(ALIAS):
            own.append(step.sent)
            if len(own) == 1:
                begin.wait(LONG)  # each has had a step before any of them goes on

    others = [Beside(lambda own=own: relay_on(own)) for own in steps]  # type: ignore[misc]
    for other in others:
        other.start()
    for other in others:
        other.join(LONG)
    assert [other.error for other in others] == [None] * relays
    assert sum(map(sum, steps)) == count
    assert (rows(), len(waiting())) == ([], count)


def test_a_commit_does_not_wait_for_a_relay_that_holds_its_row() -> None:
    """The transaction has taken longer than GRACE, so its row was due when it was committed."""
    real = outbox_relay.relay

    def make_due_and_relay() -> None:
        OutboxMessage.objects.using(ALIAS).update(due_ms=1)
        other.start()
        assert other.stands.wait(LONG)

    other = Beside(lambda: real(ALIAS))
    relaying_producer = rmq.get_producer("coordinator")
    attempt = relaying_producer.attempt

    def attempt_and_stand(*args: Any, **options: Any) -> Any:
        other.stand()
        return attempt(*args, **options)

    def commit() -> str:
        with transaction.atomic(ALIAS):
            transaction.on_commit(make_due_and_relay, using=ALIAS)
            result = send_message("keyed", "v1", key="a", priority=100, using=ALIAS)
        return result.status

    sender = Beside(commit)
    with mock.patch.object(relaying_producer, "attempt", attempt_and_stand):
        sender.start()
        sender.join(LONG)
        try:
            assert not sender.is_alive()
            assert (sender.error, sender.returned) == (None, "stored")
            assert rows() == [b"a"], "what the relay holds, it deletes"
        finally:
            other.end()
    assert (rows(), waiting("keyed")) == ([], {b"a": 100})


def test_a_commit_waits_for_nobody_who_holds_an_older_row() -> None:
    leave_rows(1)
    with relay_that_stands():

        def send() -> str:
            with transaction.atomic(ALIAS):
                result = send_message("renders", 0, priority=900, using=ALIAS)
            return result.status

        sender = Beside(send)
        sender.start()
        sender.join(LONG)
        assert not sender.is_alive()
        assert (sender.error, sender.returned) == (None, "stored")
        assert len(rows()) == 2, "the relay may send the older state now"
    OutboxMessage.objects.using(ALIAS).update(due_ms=1)
    assert relay_all() == 1
    assert (rows(), waiting()) == ([], {b"0": 900})


def test_the_transaction_of_a_relay_that_stands_still_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_relay, "HELD_SECONDS", 1)
    leave_rows(3)
    with relay_that_stands() as other:
        eventually(lambda: relay_all() == 3, "the rows being free", 60)
        assert (rows(), len(waiting())) == ([], 3)
    assert isinstance(other.error, DatabaseError)


def test_a_relay_that_stood_still_sends_nothing_that_others_have_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox_relay, "HELD_SECONDS", 1)
    leave_rows(1)
    with relay_that_stands("restore") as other:
        eventually(lambda: relay_all() == 1, "the row being free", 60)
        send_message("renders", 0, priority=900, using=ALIAS)
    assert isinstance(other.error, DatabaseError)
    assert (rows(), waiting()) == ([], {b"0": 900})


def test_a_step_leaves_no_limit_behind() -> None:
    leave_rows(1)
    names = {
        "postgresql": "SHOW idle_in_transaction_session_timeout",
        "mysql": "SELECT @@SESSION.idle_transaction_timeout",
    }

    def limit() -> str:
        with connections[ALIAS].cursor() as cursor:
            cursor.execute(names[connections[ALIAS].vendor])
            return str(cursor.fetchone()[0])

    before = limit()
    assert relay(ALIAS).sent == 1
    assert limit() == before == "0"


def test_a_list_reads_the_contents_of_so_many_rows_as_fit() -> None:
    write_large_rows(ALIAS, "renders", 40)
    tracemalloc.start()
    try:
        found = row_lists.rows(ALIAS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * row_lists.LIST_BYTES
    assert [len(one.row.member) or one.unread for one in found] == [12, MEGABYTE + 2] * 20
    assert [bool(one.unread) for one in found[::2]] == [False] * 20, "small rows behind large ones fit"
    assert [bool(one.unread) for one in found[1::2]] == [False] * 3 + [True] * 17
    assert row_lists.topic_of(ALIAS, found[-1].row.id) == "renders"
    assert row_lists.topic_of(ALIAS, 0) is None


def test_a_restart_of_the_database_is_one_line_in_the_log(
    server: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_rmq.core.duties.AGAIN_SECONDS", 0.1)

    def told() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelno >= logging.WARNING]

    found = [(alias, duty) for alias, duty in outbox_relay.duties() if alias == ALIAS]
    with override_settings(RMQ={**_rmq(), "OUTBOX": {"GRACE": 1}}), caplog.at_level("WARNING", "django_rmq"):
        (duties,) = threads_of_duties(found)
        duties.start()
        try:
            leave_rows(3)
            eventually(lambda: len(waiting()) == 3, "the relay running")
            connections[ALIAS].close()
            server.stop()
            eventually(lambda: bool(told()), "the relay noticing")
            server.start()
            leave_rows(3, first=3)
            eventually(lambda: len(waiting()) == 6, "the relay going on", 60)
        finally:
            duties.stop()
            duties.join(LONG)
    (line,) = told()
    assert not line.exc_info
    assert "\n" not in line.getMessage()
    assert f"database {ALIAS}" in line.getMessage()


def _rmq() -> dict[str, Any]:
    from django.conf import settings

    given: dict[str, Any] = settings.RMQ
    return given
