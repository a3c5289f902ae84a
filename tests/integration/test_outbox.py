"""The outbox: what a transaction sends is in its database until Redis has it, and the relay sends what was left."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from types import FrameType
from typing import Any
from unittest import mock
from uuid import uuid4

import pytest
from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import DEFAULT_DB_ALIAS, DataError, OperationalError, connection, transaction
from django.db.models import F
from django.db.transaction import TransactionManagementError
from django.test import Client, TestCase, override_settings
from django.urls import reverse
from django.utils import timezone
from django.utils.connection import ConnectionDoesNotExist

from django_rmq import (
    ConfigurationError,
    Send,
    ServerUnavailable,
    aremove_message,
    asend_message,
    connections,
    database_access,
    ensure_message,
    remove_message,
    send_message,
    send_messages,
    signals,
)
from django_rmq.conf import get_config
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.envelope import raw_body
from django_rmq.core.model.send_results import SendResult
from django_rmq.core.redis import broker as pipeline
from django_rmq.models import OutboxMessage
from django_rmq.operations import Actor, Operations, outbox
from django_rmq.outbox import deletion, row_lists
from django_rmq.outbox import relay as outbox_relay
from django_rmq.outbox import rows as outbox_rows
from django_rmq.outbox.relay import REFUSALS, relay
from django_rmq.outbox.rows import StoredRow
from django_rmq.sending import on_commit
from django_rmq.testing import RMQTestMixin, captured_messages
from tests.support.brokers import direct
from tests.support.databases import MEGABYTE, SchemaRouter, write_large_rows
from tests.support.reports import printed, samples
from tests.support.sends import Undo, entries, listening
from tests.support.sends import scores as waiting
from tests.support.servers import TcpProxy
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

TOPICS: dict[str, dict[str, Any]] = {
    "prices": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 5},
    "renders": {"TYPE": "priority", "SLOTS": 4},
    "orders": {"TYPE": "fixed_time", "SLOTS": 4},
    "keyed": {"TYPE": "priority", "SLOTS": 4, "IDENTITY": "key"},
    "plain": {"TYPE": "priority", "SLOTS": 4, "OUTBOX": False},
    "gone": {"TYPE": "priority", "SLOTS": 4},
    "jobs": {"SLOTS": 4},
    "latest": {"SLOTS": 4, "ON_DUPLICATE": "replace"},
}


def configured(url: str, prefix: str, **rmq: Any) -> override_settings:
    given = {"REDIS": url, "KEY_PREFIX": prefix, "TOPICS": TOPICS, "OUTBOX": {"GRACE": 60}, **rmq}
    return override_settings(RMQ=given)


@pytest.fixture(autouse=True)
def _settings(redis_url: str, prefix: str) -> Iterator[None]:
    with configured(redis_url, prefix):
        yield


def rows() -> list[OutboxMessage]:
    return list(OutboxMessage.objects.order_by("id"))


def make_due() -> None:
    OutboxMessage.objects.filter(due_ms__isnull=False).update(due_ms=1)


def relay_due() -> outbox_relay.RelayStep:
    """Relay all that waits, whenever it is due."""
    make_due()
    return relay("default")


def dying() -> Any:
    """A process that dies between the commit and the callback."""
    return mock.patch("django_rmq.sending.on_commit._flush")


@contextmanager
def without_table() -> Iterator[None]:
    """A database that was not migrated."""
    with connection.schema_editor() as editor:
        editor.delete_model(OutboxMessage)
    try:
        yield
    finally:
        with connection.schema_editor() as editor:
            editor.create_model(OutboxMessage)
        outbox_rows._missing.clear()


def after_each_attempt(act: Callable[[], Any]) -> Any:
    """Do something between the answers of Redis and what the process does with them."""
    real = connections.get_producer().attempt

    def attempt(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        act()
        return found

    return mock.patch.object(connections.get_producer(), "attempt", attempt)


def left_behind(send: Any) -> Any:
    with dying(), transaction.atomic():
        return send()


def test_a_send_is_a_row_until_redis_has_it() -> None:
    with transaction.atomic():
        result = send_message("renders", 1, priority=100)
        (row,) = rows()
        assert (row.topic, row.act, bytes(row.member), row.score) == ("renders", "send", b"1", 100)
        assert waiting("renders") == {}
    assert result.status == "stored"
    assert rows() == []
    assert waiting("renders") == {b"1": 100}


def test_every_kind_of_call_is_a_row() -> None:
    with transaction.atomic():
        send_message("renders", 1, priority=100)
        ensure_message("renders", 2, priority=100)
        remove_message("renders", 3)
        send_messages("renders", [4, 5], priority=100)
        assert [row.act for row in rows()] == ["send", "ensure", "remove", "send", "send"]
        assert [bytes(row.member) for row in rows()] == [b"1", b"2", b"3", b"4", b"5"]
    assert rows() == []


def test_a_savepoint_that_is_rolled_back_takes_its_rows_along() -> None:
    with transaction.atomic():
        send_message("renders", 1, priority=100)
        with suppress(Undo), transaction.atomic():
            send_message("renders", 2, priority=100)
            with transaction.atomic():
                send_message("renders", 3, priority=100)
            raise Undo
        assert [bytes(row.member) for row in rows()] == [b"1"]
    assert (rows(), waiting("renders")) == ([], {b"1": 100})


def test_a_project_without_it_makes_no_query(
    redis_url: str, prefix: str, django_assert_num_queries: Any
) -> None:
    with configured(redis_url, prefix, OUTBOX=False), django_assert_num_queries(0):
        send_message("renders", 1, priority=100)
    begin_and_commit = 2
    without = configured(redis_url, prefix, OUTBOX=False)
    with without, django_assert_num_queries(begin_and_commit), transaction.atomic():
        send_message("renders", 2, priority=100)


def test_a_send_to_a_topic_without_it_does_nothing_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(using: str | None) -> set[int]:
        raise AssertionError(using)

    monkeypatch.setattr("django_rmq.sending.api.rows_waiting", refuse)
    assert send_message("plain", 1, priority=100).status == "stored"
    with transaction.atomic():
        send_message("plain", 2, priority=100)
        assert rows() == []
    with pytest.raises(AssertionError):
        send_message("renders", 1, priority=100)


def test_with_it_a_transaction_makes_three_more(django_assert_num_queries: Any) -> None:
    send_message("renders", 0, priority=100)
    begin_and_commit, row_older_and_deletion = 2, 3
    with django_assert_num_queries(begin_and_commit + row_older_and_deletion), transaction.atomic():
        send_message("renders", 1, priority=100)


def test_without_a_key_there_is_no_older_row_to_ask_for(
    django_assert_num_queries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_message("jobs", 0, key="k")
    monkeypatch.setattr(deletion, "SURE_SECONDS", 60)
    with django_assert_num_queries(0):
        send_message("jobs", 0)
    begin_and_commit, row_and_deletion = 2, 2
    with django_assert_num_queries(begin_and_commit + row_and_deletion), transaction.atomic():
        send_messages("jobs", [1, 2])
    assert (rows(), len(waiting("jobs"))) == ([], 4)


def test_coroutines_write_rows_too() -> None:
    from asgiref.sync import async_to_sync

    async def send() -> None:
        await asend_message("renders", 1, priority=100)
        await aremove_message("renders", 2)

    with transaction.atomic():
        async_to_sync(send)()
        assert [row.act for row in rows()] == ["send", "remove"]
    assert (rows(), set(waiting("renders"))) == ([], {b"1"})


def test_what_a_dead_process_left_is_relayed() -> None:
    left_behind(lambda: send_message("renders", 1, priority=100))
    assert (len(rows()), waiting("renders")) == (1, {})
    assert relay("default").sent == 0  # its process may still be sending it
    assert relay_due().sent == 1
    assert (rows(), waiting("renders")) == ([], {b"1": 100})


def test_redis_down_at_the_commit_loses_nothing(
    proxy: TcpProxy, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "django_rmq")
    with configured(proxy.url, prefix), listening(signals.send_failed) as failures:
        send_message("renders", 0, priority=100)
        proxy.cut()
        with transaction.atomic():
            sent = send_message("renders", 1, priority=100)
            removed = remove_message("renders", 0)
        assert (sent.status, removed.status, sent.ok) == ("in_outbox", "in_outbox", False)
        assert len(rows()) == 2
        make_due()
        with pytest.raises(ServerUnavailable):
            relay("default")
        assert len(rows()) == 2
        proxy.mend()
        assert relay("default").sent == 2
        assert (rows(), waiting("renders")) == ([], {b"1": 100})
    assert failures == []
    levels = [record.levelname for record in caplog.records if record.name == "django_rmq.sending"]
    assert levels == ["WARNING"]


def test_the_relay_sends_what_the_process_would_have_sent() -> None:
    due = timezone.now() + timedelta(hours=1)

    def send_all() -> None:
        send_message("prices", {"sku": 1}, time_range="1h")
        send_message("renders", 1, priority=77)
        send_message("renders", 2, priority=78, slot_basis="shop 7")
        send_message("orders", {"order": 1}, fixed_time=due)
        limits: dict[str, Any] = {"max_retries": 2, "timeout": 10}
        send_message("keyed", {"n": 1}, key="k", priority=5_000, headers={"a": "b"}, expires=due, **limits)

    with transaction.atomic():
        send_all()
    names = ("prices", "renders", "orders", "keyed")
    broker = direct(connections.get_broker("worker"))

    def held() -> dict[str, Any]:
        return {
            name: [
                (entry.slot if hasattr(entry, "slot") else slot, entry.member, entry.score, entry.envelope)
                for slot in range(4)
                for entry in broker.list_messages(get_config().topic(name), slot, "store").entries
            ]
            for name in names
        }

    by_process = held()
    for name in names:
        for slot in range(4):
            broker.purge(get_config().topic(name), slot, "store", float("inf"), 100)
    assert not any(held().values())
    left_behind(send_all)
    assert relay_due().sent == 5
    by_relay = held()
    times = [found["prices"][0][2] for found in (by_process, by_relay)]
    assert abs(times[0] - times[1]) < 60_000
    for found in (by_process, by_relay):
        found["prices"] = [(*entry[:2], 0, entry[3]) for entry in found["prices"]]
    assert by_relay == by_process


def test_a_later_send_ends_what_was_left_of_the_same_message() -> None:
    left_behind(lambda: send_message("keyed", "old", key="a", priority=100))
    left_behind(lambda: send_message("keyed", "other", key="b", priority=100))
    make_due()
    with transaction.atomic():
        send_message("keyed", "new", key="a", priority=900)
    assert [bytes(row.member) for row in rows()] == [b"b"]
    relay_due()
    assert waiting("keyed") == {b"a": 900, b"b": 100}


@pytest.mark.parametrize("at_once", [True, False])
def test_a_later_removal_ends_what_was_left_of_the_same_message(at_once: bool) -> None:
    left_behind(lambda: send_message("keyed", "old", key="a", priority=100))
    make_due()
    with transaction.atomic():
        remove_message("keyed", key="a", on_commit=not at_once)
    assert (rows(), relay("default").sent, waiting("keyed")) == ([], 0, {})


def test_a_later_send_at_once_ends_what_was_left_of_the_same_message() -> None:
    left_behind(lambda: send_message("keyed", "old", key="a", priority=100))
    send_message("keyed", "new", key="a", priority=900)
    left_behind(lambda: send_message("renders", 1, priority=100))
    send_messages("renders", [1, 2], priority=900)
    assert (rows(), waiting("keyed"), waiting("renders")) == ([], {b"a": 900}, {b"1": 900, b"2": 900})


def test_an_ensure_that_finds_its_message_before_an_older_removal_is_done_after_it() -> None:
    send_message("keyed", "first", key="a", priority=100)
    left_behind(lambda: remove_message("keyed", key="a"))
    with transaction.atomic():
        assert ensure_message("keyed", "again", key="a", priority=200).status == "pending"
    assert [row.act for row in rows()] == ["remove", "ensure"]
    assert relay_due().rows == 2
    assert waiting("keyed") == {b"a": 200}


def test_a_row_that_becomes_visible_after_the_send_is_not_deleted_by_it() -> None:
    """A transaction with a lower id that is committed later has a newer state."""
    left_behind(lambda: send_message("keyed", "late", key="a", priority=100))
    late = OutboxMessage.objects.get()
    OutboxMessage.objects.all().delete()
    with after_each_attempt(lambda: late.save(force_insert=True)), transaction.atomic():
        send_message("keyed", "early", key="a", priority=900)
    assert [row.pk for row in rows()] == [late.pk]


def test_a_send_that_a_relay_may_have_overtaken_is_sent_again() -> None:
    """The relay sends the older row while this process sends the newer one, and deletes it first."""
    left_behind(lambda: send_message("keyed", "old", key="a", priority=100))
    make_due()
    with after_each_attempt(OutboxMessage.objects.filter(due_ms=1).delete), transaction.atomic():
        send_message("keyed", "new", key="a", priority=900)
    (row,) = rows()
    assert row.score == 900


@contextmanager
def before_each_flush(act: Callable[[], Any]) -> Iterator[None]:
    """Do something, once, between the next commit and its send: the process is slow in between."""
    real, left = on_commit._flush, [act]

    def flush(together: Any) -> None:
        if left:
            left.pop()()
        real(together)

    with mock.patch.object(on_commit, "_flush", flush):
        yield


def send_new() -> None:
    with transaction.atomic():
        send_message("keyed", "new", key="a", priority=900)


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_state_that_a_newer_transaction_has_replaced_is_not_sent(is_removed: bool) -> None:
    with before_each_flush(send_new), transaction.atomic():
        if is_removed:
            old: Any = remove_message("keyed", key="a")
        else:
            old = send_message("keyed", "old", key="a", priority=100)
        other = send_message("renders", 1, priority=77)
    assert (old.status, other.status) == ("outdated", "stored")
    assert (waiting("keyed"), waiting("renders")) == ({b"a": 900}, {b"1": 77})
    relay_due()
    assert (rows(), waiting("keyed")) == ([], {b"a": 900})


@pytest.mark.parametrize("is_removed", [False, True])
def test_what_the_relay_has_sent_is_not_sent_by_its_slow_process(is_removed: bool) -> None:
    def relayed() -> None:
        assert relay_due().sent == 1
        if is_removed:
            send_message("keyed", "new", key="a", priority=900)

    with listening(signals.message_sent) as told, before_each_flush(relayed), transaction.atomic():
        act = remove_message if is_removed else partial(send_message, body="old", priority=100)
        old = act("keyed", key="a")
    assert old.status == "outdated"
    assert is_removed or old.ok
    assert waiting("keyed") == {b"a": 900 if is_removed else 100}
    assert sum(len(call["results"]) for call in told) == 1, "by the relay, or by the send of its own"


def test_a_slow_process_looks_for_its_row_although_its_message_has_no_key() -> None:
    def relay_late() -> None:
        time.sleep(2 * deletion.SURE_SECONDS)
        assert relay_due().sent == 1

    with before_each_flush(relay_late), transaction.atomic():
        result = send_message("jobs", 1)
    assert (result.status, rows(), len(waiting("jobs"))) == ("outdated", [], 1)


@pytest.mark.parametrize("is_older", [False, True])
def test_a_removal_by_id_takes_the_row_of_its_send_along(is_older: bool) -> None:
    if is_older:
        result = left_behind(lambda: send_message("jobs", 1))
        make_due()
    with transaction.atomic():
        if not is_older:
            result = send_message("jobs", 1)
        remove_message("jobs", id=result.id)
    assert (rows(), waiting("jobs")) == ([], {})


def test_a_row_is_looked_for_even_among_very_many_older_ones() -> None:
    left_behind(lambda: send_messages("keyed", [Send(n, key="a") for n in range(300)], priority=100))

    def delete_newest() -> None:
        rows()[-1].delete()

    with before_each_flush(delete_newest), transaction.atomic():
        gone = send_message("keyed", "old", key="a", priority=900)
    assert (gone.status, waiting("keyed"), len(rows())) == ("outdated", {}, 300)


@pytest.mark.parametrize("older", ["send", "ensure", "remove"])
@pytest.mark.parametrize("newer", ["send", "remove"])
def test_a_send_that_its_older_process_may_overtake_is_sent_again(older: str, newer: str) -> None:
    """The process of the older row has looked for it, and has not sent it yet: it is not due."""

    def do(act: str, body: str) -> None:
        if act == "remove":
            remove_message("keyed", key="a")
        else:
            (ensure_message if act == "ensure" else send_message)("keyed", body, key="a", priority=100)

    real, newer_commits = connections.get_producer().attempt, [True]

    def overtaken(*args: Any, **options: Any) -> Any:
        if newer_commits:
            newer_commits.clear()
            with transaction.atomic():
                do(newer, "new")
        return real(*args, **options)

    with mock.patch.object(connections.get_producer(), "attempt", overtaken), transaction.atomic():
        do(older, "old")
    is_harmless = (older, newer) == ("ensure", "send")
    assert [row.act for row in rows()] == ([] if is_harmless else [newer])
    assert relay_due().sent == (0 if is_harmless else 1)
    assert rows() == []
    found = [b"new" in (entry.envelope or b"") for entry in entries("keyed")]
    assert found == ([True] if newer == "send" else [])


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_send_at_once_in_a_transaction_leaves_the_rows_of_that_transaction(is_removed: bool) -> None:
    left_behind(lambda: send_message("keyed", "oldest", key="a", priority=100))
    with dying(), transaction.atomic():
        send_message("keyed", "waits", key="a", priority=200)
        with transaction.atomic():
            send_message("keyed", "too", key="a", priority=300)
        if is_removed:
            remove_message("keyed", key="a", on_commit=False)
        else:
            send_message("keyed", "at once", key="a", priority=900, on_commit=False)
        assert [row.score for row in rows()] == [200, 300], "the older transaction's row is gone"
    assert waiting("keyed") == ({} if is_removed else {b"a": 900})
    assert relay_due().sent == 1
    assert waiting("keyed") == {b"a": 300}


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_row_that_a_send_at_once_has_deleted_is_back_after_a_roll_back(is_removed: bool) -> None:
    """As the page says: the relay then sends it, although it is the older state."""
    left_behind(lambda: send_message("keyed", "older", key="a", priority=100))
    with suppress(Undo), transaction.atomic():
        if is_removed:
            remove_message("keyed", key="a", on_commit=False)
        else:
            send_message("keyed", "at once", key="a", priority=900, on_commit=False)
        assert rows() == []
        raise Undo
    assert waiting("keyed") == ({} if is_removed else {b"a": 900})
    assert [row.score for row in rows()] == [100]
    assert relay_due().sent == 1
    assert waiting("keyed") == {b"a": 100}


def test_many_messages_of_a_topic_that_is_gone_are_marked_in_queries_of_a_few(
    redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database has a limit for the parameters of a query."""
    left_behind(lambda: send_messages("renders", list(range(5)), priority=100))
    topics = {name: options for name, options in TOPICS.items() if name != "renders"}
    monkeypatch.setattr(outbox_rows, "MOST_PARAMETERS", 2)
    updates: list[int] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "failed_ms" in sql and sql.startswith("UPDATE"):
            updates.append(len(params))
        return execute(sql, params, many, context)

    make_due()
    with configured(redis_url, prefix, TOPICS=topics), connection.execute_wrapper(note):
        assert relay("default").failed == 5
    values = 4
    assert sorted(updates) == [values + 1, values + 2, values + 2]
    assert {row.attempts for row in rows()} == {1}


def test_a_message_of_a_topic_that_is_gone_is_kept_and_marked(
    redis_url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    left_behind(lambda: send_message("renders", 1, priority=100))
    left_behind(lambda: send_message("keyed", 1, key="a", priority=100))
    topics = {name: options for name, options in TOPICS.items() if name != "renders"}
    with configured(redis_url, prefix, TOPICS=topics):
        for attempt in range(1, REFUSALS + 1):
            assert relay_due().failed == 1
            (row,) = rows()
            assert (row.attempts, row.due_ms is None) == (attempt, attempt == REFUSALS)
        assert relay_due().failed == 0
    assert "UnknownTopic" in row.error and row.failed_ms
    records: list[Any] = [record for record in caplog.records if record.name == "django_rmq.outbox"]
    assert [record.rmq_event for record in records] == ["outbox_refused"]
    assert caplog.text.endswith(
        "delete it: no topic 'renders' is declared in RMQ[\"TOPICS\"]; did you mean 'orders'?\n"
    )
    assert set(waiting("keyed")) == {b"a"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"TYPE": "fixed_time"}, "type"),
        ({"IDENTITY": "key"}, "IDENTITY"),
        ({"MAX_BODY": 3}, "MAX_BODY"),
        ({"MAX_RETRIES": 100}, "priority"),
    ],
)
def test_a_message_that_is_invalid_by_now_is_kept_and_marked(
    redis_url: str, prefix: str, change: dict[str, Any], word: str
) -> None:
    left_behind(lambda: send_message("renders", "abcdef", priority=50))
    # Under another prefix Redis has no earlier definition of the topic, as after `rmqtopics`.
    with configured(redis_url, f"{prefix}2", TOPICS={"renders": {**TOPICS["renders"], **change}}):
        assert relay_due().failed == 1
    (row,) = rows()
    assert word in row.error


def test_a_message_for_a_full_slot_waits_in_the_outbox(redis_url: str, prefix: str) -> None:
    full = {"renders": {"TYPE": "priority", "SLOTS": 1, "MAX_BACKLOG": 1}}
    with configured(redis_url, prefix, TOPICS=full):
        send_message("renders", 1, priority=100)
        with transaction.atomic():
            result = send_message("renders", 2, priority=100)
        assert (result.status, len(rows())) == ("in_outbox", 1)
        for _ in range(REFUSALS + 2):
            assert relay_due().failed == 1
        (row,) = rows()
        assert row.due_ms is not None and "TopicFull" in row.error
        remove_message("renders", 1)
        assert relay_due().sent == 1
        assert set(waiting("renders")) == {b"2"}


def test_a_row_stays_until_enough_replicas_have_its_message(
    redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is none to wait for.
    monkeypatch.setattr(pipeline, "durability_commands", lambda *_: [("WAIT", 1, 100)])
    with configured(redis_url, prefix, OUTBOX={"REPLICAS": 1}):
        with transaction.atomic():
            result = send_message("renders", 1, priority=100)
            remove_message("renders", 2)
        assert (result.status, len(rows()), set(waiting("renders"))) == ("stored", 2, {b"1"})
        assert relay_due().failed == 2
        assert {row.error for row in rows()} == {"Unconfirmed: 0 of 1 replicas have confirmed the message"}
    assert relay_due().sent == 2
    assert rows() == []


def test_a_send_at_once_ends_older_rows_although_no_replica_has_its_message(
    redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No row of it is left for the relay, which would write the older state over it.
    monkeypatch.setattr(pipeline, "durability_commands", lambda *_: [("WAIT", 1, 100)])
    with configured(redis_url, prefix, OUTBOX={"REPLICAS": 1}):
        left_behind(lambda: send_message("keyed", "old", key="a", priority=100))
        result = send_message("keyed", "new", key="a", priority=900, replicas=1)
        make_due()
        step = relay_due()
    assert (result.ok, result.durable, rows(), step.sent + step.failed) == (True, False, [], 0)
    assert waiting("keyed") == {b"a": 900}


def test_a_step_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_relay, "STEP_BYTES", 10_000)
    large = {"keyed": {**TOPICS["keyed"], "MAX_BODY": 50_000}}
    sizes = [*[3_000] * 8, 40_000, *[10] * 5]
    with override_settings(RMQ={**settings.RMQ, "TOPICS": large}):
        sends = [Send("x" * size, key=f"{n}") for n, size in enumerate(sizes)]
        left_behind(lambda: send_messages("keyed", sends, priority=100))
        # Of a message with many rows, only what is sent counts.
        left_behind(lambda: send_messages("keyed", [Send("y" * 3_000, key="0")] * 20, priority=100))
        make_due()
        steps = list(outbox_relay.relay_all(DEFAULT_DB_ALIAS))
        assert [step.sent for step in steps] == [3, 3, 2, 1, 5]
        assert [step.is_full for step in steps] == [True] * 4 + [False]
        assert (rows(), len(waiting("keyed"))) == ([], len(sizes))


def test_a_message_that_does_not_pass_its_link_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis answers, but a trip with this message runs into the time-out each time."""
    monkeypatch.setattr(outbox_relay, "STEP_BYTES", 10_000)
    left_behind(lambda: send_messages("renders", ["x" * 20_000, "a", "b"], priority=100))
    make_due()
    producer = connections.get_producer("coordinator")
    real = producer.attempt

    def attempt(messages: Any, *args: Any, **options: Any) -> Any:
        results, errors = real([out for out in messages if len(out.member) < 10_000], *args, **options)
        if len(results) < len(messages):
            return [SendResult(out.topic.name, 0, out.member, "failed") for out in messages], {
                index: ServerUnavailable("Timeout writing to socket") for index in range(len(messages))
            }
        return results, errors

    monkeypatch.setattr(producer, "attempt", attempt)
    with pytest.raises(ServerUnavailable):
        relay("default")
    assert relay("default").sent == 2
    (row,) = rows()
    assert (len(bytes(row.member)), row.attempts, set(waiting("renders"))) == (20_002, 0, {b'"a"', b'"b"'})


def test_an_alias_that_does_not_exist_is_said_at_the_call() -> None:
    with pytest.raises(ConnectionDoesNotExist), transaction.atomic():
        send_message("renders", 1, priority=100, using="nowhere")


def test_a_database_without_the_table_is_said_at_the_call() -> None:
    said = pytest.raises(ConfigurationError, match=r"manage\.py migrate django_rmq --database=default")
    with without_table():
        with said, transaction.atomic():
            send_message("renders", 1, priority=100)
        assert waiting("renders") == {}
        assert send_message("renders", 2, priority=100).status == "stored"
        with transaction.atomic():
            send_message("renders", 3, priority=100, on_commit=False)
            assert User.objects.count() == 0  # the transaction goes on
        assert list(outbox_relay.relay_all(DEFAULT_DB_ALIAS)) == []


def test_a_row_that_cannot_be_written_undoes_its_transaction() -> None:
    failing = mock.patch("django_rmq.outbox.rows.insert", side_effect=OperationalError("disk full"))
    with failing, transaction.atomic():
        with pytest.raises(OperationalError, match="disk full"):
            send_message("renders", 1, priority=100)
        with pytest.raises(TransactionManagementError):
            User.objects.count()
    assert waiting("renders") == {}


def test_databases_with_another_sql_write_and_find_rows_by_the_orm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_rows, "WRITTEN_HERE", frozenset[str]())
    left_behind(lambda: send_messages("keyed", [Send(n, key=f"{n}", priority=n) for n in range(100, 300)]))
    assert [row.score for row in rows()] == [*range(100, 300)]
    make_due()
    with transaction.atomic():
        send_message("keyed", "new", key="100", priority=900)
        remove_message("keyed", key="101")
    assert [row.score for row in rows()] == [*range(102, 300)]
    assert relay("default").sent == 198
    assert waiting("keyed") == {b"100": 900} | {b"%d" % n: n for n in range(102, 300)}


def test_a_send_without_a_transaction_looks_only_where_an_outbox_may_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        override_settings(DATABASE_ROUTERS=[NoOutbox()]),
        mock.patch("django_rmq.outbox.deletion.visible", side_effect=OperationalError("no such table")),
    ):
        assert send_message("renders", 1, priority=100).status == "stored"
    assert caplog.messages == []


class NoOutbox:
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if app_label == "django_rmq" else None


def test_a_router_that_keeps_the_outbox_out_is_respected() -> None:
    with override_settings(DATABASE_ROUTERS=[NoOutbox()]):
        said = pytest.raises(ConfigurationError, match="DATABASE_ROUTERS")
        with said, transaction.atomic():
            send_message("renders", 1, priority=100)
        assert list(outbox_relay.duties()) == []
    assert (rows(), waiting("renders")) == ([], {})


def test_a_router_that_answers_by_the_schema_of_a_request_lets_it_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with override_settings(DATABASE_ROUTERS=[SchemaRouter(monkeypatch)]):
        left_behind(lambda: send_message("renders", 1, priority=100))
        make_due()
        assert relay("default").sent == 1
    assert waiting("renders") == {b"1": 100}


@pytest.mark.parametrize(("seconds", "threads"), [(60.0, 1), (0.0, 3)])
def test_such_a_router_is_asked_in_a_new_thread_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, seconds: float, threads: int
) -> None:
    class Counting(SchemaRouter):
        asked = 0

        def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
            self.asked += threading.current_thread() is not threading.main_thread()
            return super().allow_migrate(db, app_label, **hints)

    monkeypatch.setattr(database_access, "ROUTER_SECONDS", seconds)
    routers = [Counting(monkeypatch), Counting(monkeypatch)]
    for router in routers:
        with override_settings(DATABASE_ROUTERS=[router]):
            for n in range(3):
                with transaction.atomic():
                    send_message("renders", n, priority=100)
    assert [router.asked for router in routers] == [threads, threads]


def test_nothing_is_written_where_nothing_is_delivered() -> None:
    with captured_messages() as found, transaction.atomic():
        result = send_message("renders", 1, priority=100)
        remove_message("renders", 1)
        assert rows() == []
    assert (result.status, len(found), waiting("renders")) == ("stored", 1, {})


def test_a_database_that_fails_at_the_deletion_costs_a_second_delivery_and_nothing_else() -> None:
    failing = mock.patch("django_rmq.outbox.deletion.delete_free", side_effect=OSError("gone"))
    with failing, transaction.atomic():
        result = send_message("renders", 1, priority=100)
    assert (result.status, len(rows())) == ("stored", 1)
    assert relay_due().sent == 1


class InTestCase(RMQTestMixin, TestCase):
    def test_callbacks_that_are_captured_send_and_delete(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            result = send_message("renders", 1, priority=100)
            assert OutboxMessage.objects.count() == 1
        assert (result.status, OutboxMessage.objects.count()) == ("stored", 0)

    def test_callbacks_that_do_not_run_leave_the_row_in_the_transaction_of_the_test(self) -> None:
        result = send_message("renders", 1, priority=100)
        assert (result.status, OutboxMessage.objects.count()) == ("pending", 1)


def command(*arguments: str) -> Any:
    return json.loads(printed("rmqoutbox", *arguments, "--json"))


@pytest.fixture
def one_hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One of two databases never answers; what was asked of it, and the topics of the other one."""
    goes_on, asked = threading.Event(), list[str]()
    row = StoredRow(1, "renders", "priority", "send", uuid4(), 0, b"1", None, 100, 0, False, 0, 0, 0)

    def answer(alias: str, found: Any) -> Any:
        asked.append(alias)
        if alias == "hangs":
            assert goes_on.wait(60)
        return found

    def relay(alias: str) -> outbox_relay.RelayStep:
        answer(alias, None)
        return outbox_relay.RelayStep(sent=2, rows=2)

    def rows(alias: str, *_: Any, **__: Any) -> list[row_lists.ListedRow]:
        return answer(alias, [row_lists.ListedRow(alias, row, "", None)])

    for module in (outbox, outbox_relay):
        monkeypatch.setattr(module, "aliases", lambda: ["hangs", "answers"])
    monkeypatch.setattr(outbox, "needs_this_thread", lambda alias: False)
    monkeypatch.setattr(outbox, "_inquiries", {})
    monkeypatch.setattr(outbox, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(outbox, "STEP_SECONDS", 1.0)
    monkeypatch.setattr(row_lists, "waiting", lambda alias: answer(alias, [row_lists.Waiting("renders", 3)]))
    monkeypatch.setattr(row_lists, "rows", rows)
    monkeypatch.setattr(outbox_relay, "relay", relay)
    try:
        yield asked
    finally:
        goes_on.set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), '"messages": 3'), (("--list",), '"id": "answers:1"'), (("--once",), '"sent": 2')],
)
def test_a_database_that_hangs_does_not_keep_the_command_from_the_others(
    one_hangs: list[str], arguments: tuple[str, ...], said: str
) -> None:
    out = io.StringIO()
    with pytest.raises(CommandError, match="the database hangs does not answer within 1 s") as raised:
        call_command("rmqoutbox", *arguments, "--json", stdout=out)
    assert raised.value.returncode == 3
    assert said in out.getvalue()


def test_one_thread_waits_for_a_database_that_hangs(one_hangs: list[str]) -> None:
    operations = Operations(Actor("a person", "admin"))
    for _ in range(3):
        found, problems = operations.outbox_as_known(seconds=0.2)
        assert [one.messages for one in found] == [3]
        assert problems == ["the database hangs does not answer within 0.2 s"]
    assert one_hangs.count("hangs") == 1
    with pytest.raises(ServerUnavailable, match="hangs"):
        operations.outbox()


def test_the_relay_of_a_database_that_hangs_delays_that_of_no_other(one_hangs: list[str]) -> None:
    threads = Operations(Actor("a person", "command")).relay_duties()
    for thread in threads:
        thread.start()
    eventually(lambda: one_hangs.count("answers") > 1, "relaying the other one again")
    for thread in threads:
        thread.stop()
    threads[1].join(60)
    assert not threads[1].is_alive()
    assert one_hangs.count("hangs") == 1


def test_the_page_shows_what_answers_and_names_the_database_that_does_not(
    one_hangs: list[str], staff: Callable[..., Client]
) -> None:
    page = staff("view_topic").get(reverse("admin:django_rmq_topic_outbox")).content.decode()
    assert "the database hangs does not answer within 1 s" in page
    assert "renders" in page and "The outbox is empty" not in page


def test_the_command_relays_lists_retries_and_deletes(redis_url: str, prefix: str) -> None:
    assert command() == []
    left_behind(lambda: send_message("renders", 1, priority=100))
    left_behind(lambda: send_message("gone", 2, priority=100))
    make_due()
    less = {name: options for name, options in TOPICS.items() if name != "gone"}
    with configured(redis_url, prefix, TOPICS=less):
        with pytest.raises(CommandError, match="1 messages could not be sent"):
            command("--once")
        ((shown,), (row,)) = command(), command("--list")
        assert (shown["topic"], shown["messages"], shown["refused"]) == ("gone", 1, 0)
        assert (row["topic"], row["attempts"], row["refused"]) == ("gone", 1, False)
        OutboxMessage.objects.update(due_ms=None)
        assert command("--list", "--refused")[0]["id"] == row["id"]
        assert command("--list", "renders") == command("--list", "\udcff") == []
        assert command("--once") == {"sent": 0, "failed": 0, "waiting": 0, "refused": 1}
        assert command("--retry", row["id"], "default:999999") == {"retried": 1, "gone": 1}
    assert command("--once") == {"sent": 1, "failed": 0, "waiting": 0, "refused": 0}
    assert (set(waiting("renders")), set(waiting("gone"))) == ({b"1"}, {b"2"})
    left_behind(lambda: send_message("gone", 3, priority=100))
    assert command("--delete", f"default:{rows()[0].pk}") == {"deleted": 1, "gone": 0}
    with pytest.raises(CommandError, match="not a row of the outbox"):
        command("--delete", "12")


def test_a_database_that_fails_stops_no_other_one_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def relayed(alias: str) -> outbox_relay.RelayStep:
        if alias == "gone":
            raise OperationalError("the server does not answer")
        return relay(alias)

    monkeypatch.setattr(outbox, "aliases", lambda: ["gone", DEFAULT_DB_ALIAS])
    monkeypatch.setattr(outbox, "needs_this_thread", lambda alias: True)
    monkeypatch.setattr(row_lists, "waiting", lambda alias: [])
    monkeypatch.setattr(outbox_relay, "_relayed", relayed)
    left_behind(lambda: send_message("renders", 1, priority=100))
    make_due()
    with pytest.raises(CommandError, match="the server does not answer") as raised:
        call_command("rmqoutbox", "--once")
    assert raised.value.returncode == 3
    assert (rows(), set(waiting("renders"))) == ([], {b"1"})


def test_the_admin_lists_filters_retries_and_deletes(staff: Callable[..., Client]) -> None:
    left_behind(lambda: send_message("renders", {"secret": 1}, priority=100))
    left_behind(lambda: send_message("keyed", {"secret": 2}, key="k", priority=100))
    first, second = rows()
    OutboxMessage.objects.filter(pk=second.pk).update(due_ms=None, error="InvalidMessage: too <b>long</b>")
    url = reverse("admin:django_rmq_topic_outbox")
    viewer = staff("view_topic")
    shown = viewer.get(url).content.decode()
    assert "renders" in shown and "too &lt;b&gt;long" in shown and "secret" not in shown
    assert 'value="retry"' not in shown and 'value="delete"' not in shown
    for act in ("retry", "delete"):
        assert viewer.post(url, {"act": act, "id": f"default:{first.pk}"}).status_code == 403
    person = staff("view_topic", "view_bodies", "send_messages", "delete_messages")
    assert "secret" in person.get(url).content.decode()
    refused = person.get(url, {"state": "refused"}).content.decode()
    assert f"default:{second.pk}" in refused and f"default:{first.pk}" not in refused
    # PostgreSQL takes no text with NUL.
    for topic in ("renders", "ren\0ders"):
        listed = person.get(url, {"topic": topic}).content.decode()
        assert f"default:{first.pk}" in listed and f"default:{second.pk}" not in listed
    assert person.post(url, {"act": "retry", "id": f"default:{second.pk}"}).status_code == 302
    second.refresh_from_db()
    assert second.due_ms is not None
    question = person.post(url, {"act": "delete", "id": f"default:{first.pk}"})
    assert question.status_code == 200 and OutboxMessage.objects.count() == 2
    person.post(url, {"act": "delete", "id": f"default:{first.pk}", "confirmed": "yes"})
    assert [row.pk for row in rows()] == [second.pk]
    notes = list(LogEntry.objects.order_by("pk").values_list("object_id", "change_message"))
    assert notes == [
        ("keyed", f"Retry in the outbox (1 chosen: default:{second.pk}): 1 retried (admin)"),
        ("renders", f"Delete from the outbox (1 chosen: default:{first.pk}): 1 deleted (admin)"),
    ]
    dashboard = person.get(reverse("admin:django_rmq_topic_changelist")).content.decode()
    assert url in dashboard


def test_the_admin_lists_the_removal_of_a_message_whose_key_is_no_text(staff: Callable[..., Client]) -> None:
    """Another program may have sent it. A person has named it by its id."""
    left_behind(lambda: remove_message("keyed", id=message_id(0, b"\xffkey")))
    page = staff("view_topic", "view_bodies").get(reverse("admin:django_rmq_topic_outbox"))
    assert (page.status_code, "\\xffkey" in page.content.decode()) == (200, True)


def test_an_outbox_that_ages_is_red(staff: Callable[..., Client]) -> None:
    viewer, outbox = staff("view_topic"), reverse("admin:django_rmq_topic_outbox")

    def link() -> tuple[bool, str]:
        """Whether the way to the outbox is red, and what it says; on the page and when it is refreshed."""
        way = rf'<a class="([^"]*)" href="{outbox}">Outbox(?: <span[^>]*>([^<]*)</span>)?</a>'
        pages = [reverse(f"admin:django_rmq_topic_{page}") for page in ("changelist", "dashboard_live")]
        found = [re.search(way, viewer.get(page).content.decode()) for page in pages]
        # A second may pass between the two.
        (one,) = {
            ("rmq-is-alarm" in each[1], re.sub(r"oldest 6\d s$", "oldest 60 s", each[2] or ""))
            for each in found
            if each is not None
        }
        assert None not in found
        return one

    assert link() == (False, "")
    left_behind(lambda: send_message("renders", {"secret": 1}, priority=100))
    left_behind(lambda: send_message("keyed", {"secret": 2}, key="k", priority=100))
    OutboxMessage.objects.update(sent_ms=F("sent_ms") - 60_000)
    alarm, text = link()
    assert not alarm and text.startswith("2 waiting, oldest 6")
    OutboxMessage.objects.update(sent_ms=F("sent_ms") - 600_000)
    assert link() == (True, "2 waiting, oldest 11 min")
    assert "rmq-tile rmq-is-alarm" in viewer.get(outbox).content.decode()
    OutboxMessage.objects.update(due_ms=None, error="InvalidMessage: too long")
    assert link() == (True, "2 refused")
    with mock.patch.object(row_lists, "waiting", side_effect=OperationalError("no connection")):
        assert link() == (True, "unreadable")


def test_a_topic_that_no_database_can_store_has_no_rows(staff: Callable[..., Client]) -> None:
    """PostgreSQL refuses a query with NUL."""

    def refuse(_alias: str, topics: Any, **_: Any) -> list[Any]:
        if any("\0" in name for name in topics or ()):
            raise DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
        return []

    left_behind(lambda: send_message("renders", 1, priority=100))
    url = reverse("admin:django_rmq_topic_outbox")
    with mock.patch("django_rmq.outbox.row_lists.rows", side_effect=refuse):
        shown = staff("view_topic").get(url, {"topic": "\0"})
    assert shown.status_code == 200
    assert Operations(Actor("a person", "admin")).outbox_rows(["ren\0ders"]) == ([], [])


@pytest.mark.parametrize(
    ("limit", "names"), [(3, ["b:1", "a:1", "b:2"]), (100, ["b:1", "a:1", "b:2", "a:2", "a:3"])]
)
def test_the_rows_of_several_databases_are_listed_oldest_first(
    monkeypatch: pytest.MonkeyPatch, limit: int, names: list[str]
) -> None:
    # The clock of the sender of a:3 was behind: within a database, the order is that of the rows.
    sent = {"a": [20, 40, 30], "b": [10, 30]}

    def rows(alias: str, *_: Any, **__: Any) -> list[row_lists.ListedRow]:
        stored = [
            StoredRow(
                number, "renders", "priority", "send", uuid4(), 0, b"1", None, 100, 0, False, at_ms, 0, 0
            )
            for number, at_ms in enumerate(sent[alias], 1)
        ]
        return [row_lists.ListedRow(alias, row, "", None) for row in stored]

    monkeypatch.setattr(outbox, "aliases", lambda: ["a", "b"])
    monkeypatch.setattr(outbox, "needs_this_thread", lambda alias: True)
    monkeypatch.setattr(row_lists, "rows", rows)
    listed, _ = Operations(Actor("a person", "admin")).outbox_rows(limit=limit)
    assert [row.id for row in listed] == names


def test_lists_of_large_rows_are_bounded_and_each_row_is_shown(staff: Callable[..., Client]) -> None:
    write_large_rows(DEFAULT_DB_ALIAS, "renders", 80)
    viewer = staff("view_topic", "view_bodies")
    viewer.get(reverse("admin:django_rmq_topic_outbox"))  # whatever a first request imports
    tracemalloc.start()
    try:
        page = viewer.get(reverse("admin:django_rmq_topic_outbox")).content.decode()
        listed = command("--list")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * row_lists.LIST_BYTES
    assert page.count("1048578 bytes") == 37
    assert page.count("&quot;xxxxxxxxxx&quot;") == 40
    assert [one["size"] for one in listed] == [12, MEGABYTE + 2] * 40


@pytest.mark.parametrize("formatter", ["builtins.repr", {"renders": "builtins.repr"}], ids=["all", "one"])
def test_a_formatter_of_all_topics_redacts_rows_of_a_topic_that_settings_no_longer_have(
    redis_url: str, prefix: str, formatter: Any
) -> None:
    person = Actor("a person", "admin", permits=lambda permission: True)
    with configured(redis_url, prefix, ADMIN={"FORMATTER": formatter}):
        left_behind(lambda: send_message("renders", {"secret": 1}, priority=100))
        ((declared,), _) = Operations(person).outbox_rows()
        OutboxMessage.objects.update(topic="undeclared")
        ((row,), _) = Operations(person).outbox_rows()
    assert (declared.topic, declared.raw) == ("renders", None)
    assert (row.topic, row.raw) == ("undeclared", None if formatter == "builtins.repr" else b'{"secret":1}')


def test_stats_and_health_tell_what_waits(proxy: TcpProxy, prefix: str) -> None:
    left_behind(lambda: send_message("renders", 1, priority=100))
    OutboxMessage.objects.update(sent_ms=F("sent_ms") - 90_000)
    out = io.StringIO()
    call_command("rmqstats", "renders", "--json", stdout=out)
    (row,) = json.loads(out.getvalue())
    assert row["outbox"]["waiting"] == 1 and 90 <= row["outbox"]["oldest_seconds"] < 120
    call_command("rmqstats", "renders", stdout=out)
    assert "outbox of renders: 1 waiting, the oldest for " in out.getvalue()
    call_command("rmqhealth", "--no-workers", "--max-outbox-age", "2m", stdout=out)
    with pytest.raises(CommandError, match=r"sent \d+ s ago"):
        call_command("rmqhealth", "--no-workers", "--max-outbox-age", "1m", stdout=out)
    with configured(proxy.url, prefix):
        proxy.cut()
        with pytest.raises(CommandError, match="2 of 2 checks failed"):
            call_command("rmqhealth", "--no-workers", "--max-outbox-age", "1m", stdout=out)


def test_metrics_tell_what_waits_even_while_redis_or_the_database_is_down(
    proxy: TcpProxy, prefix: str
) -> None:
    left_behind(lambda: send_message("renders", 1, priority=100))
    OutboxMessage.objects.update(sent_ms=F("sent_ms") - 90_000)
    with configured(proxy.url, prefix):
        proxy.cut()
        found = samples()
    assert found["rmq_up",] == 0
    assert found["rmq_outbox_messages", "renders", "waiting"] == 1
    assert found["rmq_outbox_messages", "keyed", "waiting"] == 0
    assert 90 <= found["rmq_outbox_oldest_seconds", "renders"] < 120
    with mock.patch("django_rmq.outbox.row_lists.waiting", side_effect=OperationalError("gone")):
        found = samples()
    assert found["rmq_up",] == 1
    assert not any(name.startswith("rmq_outbox") for name, *_ in found)
    assert found["rmq_messages", "renders", "waiting"] == 0


def test_checks_find_a_missing_table_and_routers_that_allow_no_outbox() -> None:
    found = checks.run_checks(tags=["rmq"], include_deployment_checks=True)
    assert not [each for each in found if "05" in str(each.id)]
    with override_settings(DATABASE_ROUTERS=[NoOutbox()]):
        assert "django_rmq.E050" in {one.id for one in checks.run_checks(tags=["rmq"])}
    with without_table():
        by_id = {one.id: one for one in checks.run_checks(tags=["rmq"], include_deployment_checks=True)}
        assert "manage.py migrate django_rmq --database=default" in by_id["django_rmq.E051"].msg


def test_the_duty_of_a_worker_relays_and_costs_one_query_while_nothing_is_due(
    django_assert_num_queries: Any,
) -> None:
    left_behind(lambda: send_message("renders", 1, priority=100))
    make_due()
    ((alias, begin),) = outbox_relay.duties()
    assert alias == "default"
    duty = begin()
    assert [next(duty), next(duty)] == [0.0, 15.0]
    assert (rows(), set(waiting("renders"))) == ([], {b"1"})
    with django_assert_num_queries(1):
        next(duty)
    duty.close()


def test_with_debug_the_queries_of_one_turn_of_the_duty_are_kept_until_the_next() -> None:
    ((_, begin),) = outbox_relay.duties()
    duty = begin()
    with override_settings(DEBUG=True):
        kept = []
        for _ in range(8):
            next(duty)
            kept.append(len(connection.queries))
    duty.close()
    # A turn that opens its connection to MariaDB has a second query.
    assert {*kept} <= {1, 2}


def test_a_message_with_very_many_older_rows_is_left_to_the_relay() -> None:
    left_behind(lambda: send_messages("keyed", [Send(n, key="a") for n in range(300)], priority=100))
    with transaction.atomic():
        assert send_message("keyed", "new", key="a", priority=900).status == "pending"
    assert (len(rows()), waiting("keyed")) == (301, {b"a": 900})
    step = relay_due()
    assert (step.sent, step.rows, rows(), waiting("keyed")) == (1, 301, [], {b"a": 900})


def test_many_messages_replace_an_older_row_each() -> None:
    def send() -> None:
        send_messages("keyed", [Send(n, key=str(n)) for n in range(outbox_rows.MOST_OLDER + 1)], priority=100)

    left_behind(send)
    OutboxMessage.objects.update(due_ms=0)
    with transaction.atomic():
        send()
    assert (rows(), len(waiting("keyed"))) == ([], outbox_rows.MOST_OLDER + 1)


def bodies(name: str) -> list[bytes]:
    """The bodies that wait, in the order of their places."""
    topic = get_config().topic(name)
    places = sorted(entries(name), key=lambda entry: entry.score)
    return [raw_body(topic, entry.member, entry.envelope) for entry in places]


def test_what_is_left_of_a_topic_without_a_type_comes_in_its_order_behind_what_was_sent_meanwhile() -> None:
    long = "x" * 3000
    left_behind(lambda: [send_message("jobs", body, slot_basis="a") for body in (1, long, 3)])
    send_message("jobs", 4, slot_basis="a")
    assert relay_due().sent == 3
    assert (rows(), bodies("jobs")) == ([], [b"4", b"1", json.dumps(long).encode(), b"3"])


def test_a_message_without_a_key_that_is_sent_twice_by_process_and_relay_is_one(
    proxy: TcpProxy, prefix: str
) -> None:
    with configured(proxy.url, prefix):
        send_message("jobs", 0)
        proxy.drop_reply(b"LONE-BODY")
        with transaction.atomic():
            result = send_message("jobs", "LONE-BODY")
        assert (result.status, len(rows()), len(bodies("jobs"))) == ("in_outbox", 1, 2)
        assert relay_due().sent == 1
        assert (rows(), sorted(bodies("jobs"))) == ([], [b'"LONE-BODY"', b"0"])


@pytest.mark.parametrize(("topic", "kept"), [("jobs", b"1"), ("latest", b"2")])
def test_of_two_sends_with_a_key_the_relay_sends_the_one_that_on_duplicate_means(
    topic: str, kept: bytes
) -> None:
    left_behind(lambda: [send_message(topic, body, key="k") for body in (1, 2)])
    assert relay_due().sent == 1
    assert (rows(), bodies(topic)) == ([], [kept])


def test_a_send_that_left_a_waiting_message_alone_leaves_no_row() -> None:
    send_message("jobs", 1, key="k")
    with transaction.atomic():
        results = [send_message("jobs", body, key="k") for body in (2, 3)]
    assert ([each.status for each in results], rows(), bodies("jobs")) == (["present", "present"], [], [b"1"])


def test_a_removal_that_was_left_comes_before_the_send_that_found_its_message() -> None:
    send_message("jobs", 1, key="k")
    left_behind(lambda: remove_message("jobs", key="k"))
    with transaction.atomic():
        result = send_message("jobs", 2, key="k")
    assert (result.status, [row.act for row in rows()]) == ("present", ["remove", "send"])
    relay_due()
    assert (rows(), bodies("jobs")) == ([], [b"2"])


def test_a_message_without_a_key_is_taken_back_by_its_id_before_redis_has_it() -> None:
    result = left_behind(lambda: send_message("jobs", 1))
    assert (remove_message("jobs", id=result.id).status, rows()) == ("not_found", [])
    assert (relay_due().sent, bodies("jobs")) == (0, [])


def test_a_row_without_a_key_is_shown_with_its_body() -> None:
    left_behind(lambda: [send_message("jobs", {"n": 1}), send_message("jobs", 2, key="k")])
    (found, *_) = Operations(Actor("shell", "test")).outbox_rows()
    shown = sorted((row.key or "", row.raw, row.size) for row in found)
    assert shown == [("", b'{"n":1}', 7), ("k", b"2", 1)]


def test_the_relay_ends_on_a_signal_that_comes_at_any_call_with_which_it_begins_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An event would wait for a lock that its own ``wait`` holds, if the handler of a signal sets it just then."""
    monkeypatch.setattr(Operations, "relay_duties", lambda operations: [])
    late: list[int] = []

    def send_late(number: int, frame: FrameType | None) -> None:
        late.append(number)
        assert len(late) == 1, "the command did not end"
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGALRM, send_late)
    try:
        for skipped in count():
            calls = count()

            def interrupt(frame: FrameType, event: str, argument: object) -> None:
                if signal.getsignal(signal.SIGTERM) is not before[0] and next(calls) == skipped:  # noqa: B023
                    os.kill(os.getpid(), signal.SIGTERM)

            signal.setitimer(signal.ITIMER_REAL, 1, 5)
            sys.setprofile(interrupt)
            try:
                call_command("rmqoutbox", "--watch")
            finally:
                sys.setprofile(None)
                signal.setitimer(signal.ITIMER_REAL, 0)
            if late:
                break
        assert skipped > 3
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGALRM, before[1])
