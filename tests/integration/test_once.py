"""Listeners with ``once``: what they write happens once, whatever becomes of their deliveries."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock
from uuid import RFC_4122, UUID

import pytest
from django.contrib.auth.models import Group
from django.core import checks
from django.db import DatabaseError, connection, transaction
from django.db import connections as databases
from django.test import TestCase, override_settings
from django.utils import timezone
from django.utils.connection import ConnectionDoesNotExist

from django_rmq import (
    Message,
    Reject,
    Retry,
    asend_message,
    ensure_message,
    listener,
    open_transactions,
    send_message,
    send_messages,
)
from django_rmq import database_access as databases_of_outbox
from django_rmq.checks import check_listeners, check_outbox_tables, check_tables
from django_rmq.conf import get_config
from django_rmq.core.commands import ack, fetch, inspect, operate
from django_rmq.core.commands.send import send_merge
from django_rmq.core.consumer.batch_run import call_all
from django_rmq.core.model.envelope import decode_envelope, encode_envelope
from django_rmq.core.model.replies import Failure
from django_rmq.core.producer.placement import slot_of
from django_rmq.exceptions import ConfigurationError, ServerUnavailable
from django_rmq.models import ProcessedMessage
from django_rmq.operations import Actor, Operations
from django_rmq.testing import Clock, InMemoryBroker, RMQTestMixin, drain, memory_broker
from django_rmq.worker import listener_registry, once, startup
from django_rmq.worker.once import row_of
from tests.e2e.mariadb import use_driver
from tests.support.databases import SchemaRouter

KEYED = {"TYPE": "range_merge", "TIME_RANGE": "1ms", "SLOTS": 1, "IDENTITY": "key", "BACKOFF": 0}
RMQ: dict[str, Any] = {
    "BROKER": "memory",
    "AUTODISCOVER": None,
    "TOPICS": {
        "payments": {**KEYED, "ORIGIN": True},
        "moving": {**KEYED, "SLOTS": 4, "SLOT_BASIS": "shop", "ORIGIN": True},
        "others": {**KEYED, "ORIGIN": True},
        "plain": KEYED,
        "unkeyed": {"TYPE": "range_merge", "TIME_RANGE": "1ms", "SLOTS": 1},
        "accounts": {"TYPE": "fifo", "SLOTS": 1, "ORIGIN": True, "BACKOFF": 0, "OUTBOX": False},
    },
}

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def settings_of_this_test() -> Iterator[None]:
    with override_settings(RMQ=RMQ), listener_registry.isolated():
        yield


class Queue:
    """The queue, whose time stands still, and what may become of deliveries."""

    def __init__(self, broker: InMemoryBroker, clock: Clock) -> None:
        self.run, self.advance = broker.run, clock.advance

    def deliver(self, topic: str = "payments") -> tuple[list[Message], list[Failure | None]]:
        """Take what is due and call the listener, but tell the queue nothing."""
        declared, found = get_config().topic(topic), listener_registry.listeners()[topic]
        self.advance("5ms")
        prepared = self.run(fetch.prepare(declared, 0, "test", None, 100))
        messages = [Message(declared, 0, prepared.receipt, given) for given in prepared.deliveries]
        return messages, call_all(found, messages)

    def failure(self) -> Failure:
        """Deliver one message, and return how it failed."""
        _, (outcome,) = self.deliver()
        assert outcome is not None
        return outcome

    def give_back(self, messages: list[Message]) -> None:
        """Let the messages wait as if they had never been delivered, as after a fail-over."""
        members = [message.delivery.member for message in messages]
        self.run(ack.release(messages[0].topic, 0, messages[0].receipt, members))

    def commit(self, messages: list[Message]) -> None:
        members = [message.delivery.member for message in messages]
        self.run(ack.commit(messages[0].topic, 0, messages[0].receipt, members))

    def origins(self) -> list[str]:
        listener_registry.add("payments", str)
        messages, _ = self.deliver()
        self.give_back(messages)
        return [origin_of(message) for message in messages]


@pytest.fixture
def queue() -> Iterator[Queue]:
    clock = Clock(1_800_000_000_000)
    with memory_broker(clock) as broker:
        yield Queue(broker, clock)


def write(message: Message) -> None:
    Group.objects.create(name=message.body)


def groups() -> list[str]:
    return sorted(Group.objects.values_list("name", flat=True))


def origin_of(message: Message) -> str:
    assert message.origin is not None
    return message.origin


def given_up(messages: list[Message], outcomes: list[Failure | None]) -> dict[Any, str | None]:
    """Of each body, how it failed."""
    pairs = zip(messages, outcomes, strict=True)
    return {message.body: outcome and outcome.kind for message, outcome in pairs}


def test_a_delivery_whose_end_was_lost_has_no_second_effect(queue: Queue) -> None:
    calls: list[str] = []

    @listener("payments", once=True)
    def pay(message: Message) -> None:
        calls.append(origin_of(message))
        Group.objects.create(name=f"{message.body}-{len(calls)}")

    send_message("payments", "a")
    first, outcomes = queue.deliver()
    assert outcomes == [None]
    queue.give_back(first)
    again, outcomes = queue.deliver()
    assert outcomes == [None], "the queue commits it"
    assert [message.receipt for message in again] != [message.receipt for message in first]
    assert [message.origin for message in again] == [message.origin for message in first] == calls
    assert groups() == ["a-1"]
    row = ProcessedMessage.objects.get()
    assert (row.topic, row.origin.hex) == ("payments", calls[0])
    assert abs(row.processed_at - timezone.now()) < timedelta(minutes=1)


def fails(message: Message) -> None:
    raise ValueError("no")


def retries(message: Message) -> None:
    raise Retry("later")


def rejects(message: Message) -> None:
    raise Reject("never")


def returns_false(message: Message) -> bool:
    return False


def decides(message: Message) -> None:
    message.retry("later")


def exits(message: Message) -> None:
    raise SystemExit(3)


def forgets_to_await(message: Message) -> Any:
    return asend_message("payments", "x")


@pytest.mark.parametrize(
    "ending_of",
    [fails, retries, rejects, returns_false, decides, forgets_to_await, exits],
    ids=lambda each: each.__name__,
)
def test_whatever_is_no_success_rolls_back(queue: Queue, ending_of: Callable[[Message], Any]) -> None:
    @listener("payments", once=True)
    def pay(message: Message) -> Any:
        write(message)
        return ending_of(message)

    send_message("payments", "a")
    outcome = queue.failure()
    assert outcome.kind == ("rejected" if ending_of is rejects else "failed")
    assert outcome.error.startswith("SystemExit: 3") is (ending_of is exits)
    assert groups() == []
    assert not ProcessedMessage.objects.exists()


def test_a_listener_that_leaves_a_block_open_keeps_nothing(queue: Queue) -> None:
    open_transactions.record_opened_before()
    left: list[Iterator[None]] = []

    def rows() -> Iterator[None]:
        with transaction.atomic():
            yield

    @listener("payments", once=True)
    def pay(message: Message) -> None:
        write(message)
        if message.body == "leaves":
            left.append(rows())
            next(left[-1])

    send_message("payments", "leaves")
    outcome = queue.failure()
    assert "TransactionLeftOpen: listener tests.integration.test_once." in outcome.error
    assert groups() == []
    assert not ProcessedMessage.objects.exists()
    assert not connection.in_atomic_block
    with pytest.raises(ConnectionDoesNotExist):
        next(left[0])


def test_a_failed_message_is_tried_again_with_its_origin(queue: Queue) -> None:
    origins: list[str] = []

    @listener("payments", once=True)
    def pay(message: Message) -> None:
        origins.append(origin_of(message))
        write(message)
        if len(origins) < 3:
            raise Retry("later", delay=0)

    send_message("payments", "a")
    queue.advance("5ms")
    for _ in range(5):
        drain()
        queue.advance(1)
    assert len(origins) == 3
    assert len(set(origins)) == 1
    assert groups() == ["a"]


def test_an_integrity_error_of_the_listener_is_its_own(queue: Queue) -> None:
    Group.objects.create(name="a")
    listener("payments", once=True)(write)
    send_message("payments", "a")
    outcome = queue.failure()
    assert "IntegrityError" in outcome.error
    assert not ProcessedMessage.objects.exists()


def test_an_error_that_the_listener_catches_around_an_atomic_block_is_none(queue: Queue) -> None:
    Group.objects.create(name="a")

    @listener("payments", once=True)
    def pay(message: Message) -> None:
        try:
            with transaction.atomic():
                write(message)
        except Exception:  # noqa: BLE001
            Group.objects.create(name="instead")

    send_message("payments", "a")
    assert queue.deliver()[1] == [None]
    assert groups() == ["a", "instead"]


def swallow_an_error() -> None:
    try:
        Group.objects.create(name="there")
    except Exception:  # noqa: BLE001
        pass


@pytest.mark.parametrize(
    "spoil", [lambda: transaction.set_rollback(True), swallow_an_error], ids=["rollback", "error"]
)
def test_a_listener_whose_transaction_cannot_be_committed_has_failed(
    queue: Queue, spoil: Callable[[], None]
) -> None:
    Group.objects.create(name="there")

    @listener("payments", once=True)
    def pay(message: Message) -> None:
        write(message)
        spoil()

    send_message("payments", "a")
    outcome = queue.failure()
    assert "NotCommitted" in outcome.error
    assert groups() == ["there"]


def test_hooks_of_the_listener_run_after_the_commit_and_not_for_what_was_rolled_back(queue: Queue) -> None:
    hooked: list[bool] = []

    @listener("payments", once=True)
    def pay(message: Message) -> bool:
        write(message)
        transaction.on_commit(lambda: hooked.append(Group.objects.filter(name="a").exists()))
        send_message("others", f"after {message.body}")
        return message.retries_left < 16

    send_message("payments", "a")
    queue.advance("5ms")
    drain(raise_errors=False)
    assert (hooked, groups()) == ([True], ["a"])
    others = queue.run(inspect.list_messages(get_config().topic("others"), 0, "store", limit=10)).entries
    assert len(others) == 1, "what the delivery that failed had sent was never sent"


def test_a_hook_that_fails_leaves_the_effect(queue: Queue) -> None:
    @listener("payments", once=True)
    def pay(message: Message) -> None:
        write(message)
        transaction.on_commit(lambda: fails(message))

    send_message("payments", "a")
    messages, (outcome,) = queue.deliver()
    assert outcome is not None
    queue.run(ack.rollback(messages[0].topic, 0, messages[0].receipt, [outcome]))
    queue.advance(2)
    assert drain() == 1
    assert groups() == ["a"]


def test_a_listener_that_was_called_within_a_transaction_has_failed(queue: Queue) -> None:
    listener("payments", once=True)(write)
    with transaction.atomic():
        send_message("payments", "a", on_commit=False)
        outcome = queue.failure()
    assert "durable atomic block" in outcome.error
    assert groups() == []


def test_a_listener_whose_connection_has_autocommit_off_has_failed(queue: Queue) -> None:
    listener("payments", once=True)(write)
    send_message("payments", "a")
    transaction.set_autocommit(False)
    try:
        _, (outcome,) = queue.deliver()
        transaction.rollback()
    finally:
        transaction.set_autocommit(True)
    assert outcome is not None
    assert "autocommit is off" in outcome.error
    assert groups() == []


def test_what_a_coroutine_writes_belongs_to_the_transaction(queue: Queue) -> None:
    @listener("payments", once=True)
    async def pay(message: Message) -> None:
        await Group.objects.acreate(name=message.body)
        assert await Group.objects.filter(name=message.body).aexists()
        if message.body == "bad":
            raise ValueError("no")

    for name in ("bad", "good"):
        send_message("payments", name)
    messages, outcomes = queue.deliver()
    assert given_up(messages, outcomes) == {"bad": "failed", "good": None}
    assert groups() == ["good"]
    queue.give_back(messages)
    assert [outcome is None for outcome in queue.deliver()[1]].count(True) == 1
    assert groups() == ["good"]


def pay_in_lists() -> list[list[str]]:
    """Register a listener that writes what it gets in lists; return the bodies of each of its calls."""
    calls: list[list[str]] = []

    @listener("payments", once=True, batch_size=10)
    def pay(messages: list[Message]) -> None:
        calls.append(sorted(message.body for message in messages))
        for message in messages:
            write(message)

    return calls


def test_of_a_list_only_what_is_new_is_handed_over(queue: Queue) -> None:
    calls = pay_in_lists()
    send_messages("payments", ["a", "b"])
    first, outcomes = queue.deliver()
    assert outcomes == [None, None]
    queue.give_back(first)
    send_messages("payments", ["c", "d"])
    again, outcomes = queue.deliver()
    assert (len(again), outcomes) == (4, [None] * 4)
    assert calls == [["a", "b"], ["c", "d"]]
    queue.give_back(again)
    assert queue.deliver()[1] == [None] * 4
    assert len(calls) == 2, "not called with an empty list"
    assert groups() == ["a", "b", "c", "d"]
    assert ProcessedMessage.objects.count() == 4


def test_what_is_given_up_in_a_list_has_no_effect_and_the_others_have_theirs_once(queue: Queue) -> None:
    calls: list[int] = []

    @listener("payments", once=True, batch_size=10)
    def pay(messages: list[Message]) -> None:
        calls.append(len(messages))
        for message in messages:
            write(message)
            if message.body == "bad":
                message.reject("bad")
            elif message.body == "late":
                message.retry("late")

    send_messages("payments", ["a", "bad", "c", "late"])
    messages, outcomes = queue.deliver()
    assert given_up(messages, outcomes) == {"a": None, "bad": "rejected", "c": None, "late": "failed"}
    assert (calls, groups()) == ([4, 2], ["a", "c"])
    assert ProcessedMessage.objects.count() == 2


def book_in_lists(decide: Callable[[Message], None]) -> tuple[list[list[Any]], list[Any]]:
    """Register a listener of ``accounts``; return its calls, and the bodies whose effects were committed, in order."""
    calls, booked = list[list[Any]](), list[Any]()

    @listener("accounts", once=True, batch_size=10)
    def book(messages: list[Message]) -> None:
        calls.append([message.body for message in messages])
        for message in messages:
            Group.objects.create(name=str(message.body))
            decide(message)
        transaction.on_commit(lambda: booked.extend(calls[-1]))

    return calls, booked


@pytest.mark.parametrize("end", ["retry", "reject"])
def test_the_effects_of_a_strict_fifo_topic_are_committed_in_order(queue: Queue, end: str) -> None:
    tries: list[int] = []

    def decide(message: Message) -> None:
        if message.body == 2 and len(tries) < 2:
            tries.append(2)
            getattr(message, end)("not yet")

    calls, booked = book_in_lists(decide)
    send_messages("accounts", [1, 2, 3, 4])
    messages, outcomes = queue.deliver("accounts")
    if end == "reject":
        assert [outcome and outcome.kind for outcome in outcomes] == [None, "rejected", None, None]
        assert booked == [1, 3, 4], "a dead message holds nobody"
        return
    assert [outcome and outcome.kind for outcome in outcomes] == [None, "failed"]
    assert (calls, booked) == ([[1, 2, 3, 4], [1]], [1])
    queue.give_back(messages)
    tries.clear()
    queue.advance("10ms")
    while drain("accounts"):
        queue.advance("10ms")
    assert booked == [1, 2, 3, 4]
    assert ProcessedMessage.objects.count() == 4


def test_messages_behind_the_hold_are_not_counted_as_processed(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    _, booked = book_in_lists(lambda message: None)
    send_messages("accounts", [1, 2, 3])
    messages, _ = queue.deliver("accounts")
    row = once.row_of(messages[1])
    queue.give_back(messages)
    ProcessedMessage.objects.filter(origin=row[1]).delete()
    Group.objects.all().delete()
    calls, booked = book_in_lists(lambda message: message.retry("later"))
    with caplog.at_level("DEBUG", "django_rmq"):
        _, outcomes = queue.deliver("accounts")
    assert [outcome and outcome.kind for outcome in outcomes] == [None, "failed"]
    assert (calls, booked) == ([[2]], [])
    told = [each for each in caplog.records if getattr(each, "rmq_event", "") == "processed_before"]
    assert len(told) == 1, "the first one; the third comes back behind the second"


def test_a_listener_that_empties_its_list_hides_no_outcome(queue: Queue) -> None:
    @listener("payments", once=True, batch_size=10)
    def pay(messages: list[Message]) -> None:
        while messages:
            message = messages.pop()
            write(message)
            if message.body == "bad":
                message.reject("bad")

    send_messages("payments", ["a", "bad"])
    messages, outcomes = queue.deliver()
    assert given_up(messages, outcomes) == {"a": None, "bad": "rejected"}
    assert groups() == ["a"]


@pytest.mark.parametrize("how", ["raises", "returns False"])
def test_a_list_that_fails_is_rolled_back_and_settled_one_by_one(queue: Queue, how: str) -> None:
    @listener("payments", once=True, batch_size=10)
    def pay(messages: list[Message]) -> bool:
        for message in messages:
            write(message)
        if any(message.body == "bad" for message in messages):
            if how == "raises":
                raise ValueError("bad")
            return False
        return True

    send_messages("payments", ["a", "bad", "c"])
    messages, outcomes = queue.deliver()
    assert given_up(messages, outcomes) == {"a": None, "bad": "failed", "c": None}
    assert groups() == ["a", "c"]
    queue.give_back(messages)
    queue.deliver()
    assert groups() == ["a", "c"]


def test_every_way_to_send_gives_an_origin(queue: Queue) -> None:
    send_message("payments", 1)
    send_messages("payments", [2, 3])
    ensure_message("payments", 4, key="d")
    with transaction.atomic():
        send_message("payments", 5)
    origins = queue.origins()
    assert len(set(origins)) == 5
    assert all(len(origin) == 32 for origin in origins)


def test_a_replay_keeps_the_origin_and_an_edited_one_is_a_new_send(queue: Queue) -> None:
    send_message("payments", 1, key="k")
    (sent,) = queue.origins()
    topic = get_config().topic("payments")
    queue.run(operate.bury(topic, 0, [b"k"]))
    queue.run(operate.replay(topic, 0, [b"k"]))
    assert queue.origins() == [sent]
    queue.run(operate.bury(topic, 0, [b"k"]))
    operations = Operations(Actor("tester", "command"))
    assert operations.replay_edited("payments", "0.aw", 2).outcomes == {"replayed": 1}
    (edited,) = queue.origins()
    assert edited != sent
    assert len(edited) == 32


def test_an_edited_replay_that_is_repeated_after_its_answer_was_lost_is_the_same_send(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edited message goes to another slot, and the process dies before the dead one is deleted."""
    topic = get_config().topic("moving")
    sent = send_message("moving", {"shop": 1}, key="k")
    shops = [n for n in range(2, 99) if slot_of(str(n).encode(), topic.slots) != sent.slot]
    queue.run(operate.bury(topic, sent.slot, [b"k"]))
    operations, found = Operations(Actor("tester", "command")), []
    for shop in (shops[0], shops[0], shops[1]):
        with monkeypatch.context() as patch:
            patch.setattr(operate, "remove", mock.Mock(side_effect=ServerUnavailable("gone")))
            with pytest.raises(ServerUnavailable):
                operations.replay_edited("moving", sent.id, {"shop": shop})
        slot = slot_of(str(shop).encode(), topic.slots)
        (looked,) = queue.run(inspect.describe_messages(topic, slot, [b"k"]))
        assert looked.envelope is not None
        found.append(decode_envelope(looked.envelope).origin)
    first, again, edited_otherwise = found
    assert first == again != edited_otherwise


@pytest.mark.parametrize("topic", ["plain", "unkeyed"])
def test_a_message_without_an_origin_has_none_and_the_row_of_its_delivery(queue: Queue, topic: str) -> None:
    listener_registry.add(topic, str)
    send_messages(topic, [1, 2])
    first, _ = queue.deliver(topic)
    queue.give_back(first)
    again, _ = queue.deliver(topic)
    assert {message.origin for message in first + again} == {None}
    assert len({row_of(message) for message in first + again}) == 4, "two messages, two deliveries"


def test_a_message_without_an_origin_is_processed_with_a_warning_per_topic(
    queue: Queue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "_warned", set())
    listener_registry.add("plain", write, using="default")
    send_messages("plain", ["a", "b"])
    messages, outcomes = queue.deliver("plain")
    assert outcomes == [None, None]
    assert groups() == ["a", "b"]
    assert ProcessedMessage.objects.count() == 2
    warnings = [each for each in caplog.records if getattr(each, "rmq_event", "") == "no_origin"]
    assert len(warnings) == 1
    queue.give_back(messages)
    _, outcomes = queue.deliver("plain")
    assert all(outcome is not None for outcome in outcomes), "as without once: the listener is called again"


def test_an_origin_of_another_program_is_one_too(queue: Queue) -> None:
    listener("payments", once=True)(write)
    topic = get_config().topic("payments")
    for member, origin in ((b"k", "order 17"), (b"l", "order 18"), (b"m", "order 17")):
        envelope = b'0 {"origin":"%s"}\n"%s"' % (origin.encode(), member)
        queue.run(send_merge(topic, 0, 0, [member], [envelope]))
        messages, outcomes = queue.deliver()
        assert outcomes == [None]
        queue.commit(messages)
    assert groups() == ["k", "l"]


def replace_origin(message: Message, origin: str) -> Message:
    """Return the same delivery with another origin."""
    envelope = encode_envelope(message.envelope._replace(origin=origin))
    return Message(message.topic, message.slot, 1, message.delivery._replace(envelope=envelope))


def test_old_rows_are_deleted_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "ROWS_AT_ONCE", 3)
    now = timezone.now()
    for hours in (30, 29, 28, 27, 26, 23, 22, 1):
        processed = now - timedelta(hours=hours)
        ProcessedMessage.objects.create(topic="payments", origin=f"{hours:032x}", processed_at=processed)
    topic = get_config().topic("payments")
    ((alias, duty),) = once.forgetting([topic], {"payments": "default"}, 86_400, lambda _: True)
    steps = duty()
    assert (alias, next(steps)) == ("default", 0.05)
    assert ProcessedMessage.objects.count() == 5
    assert next(steps) == 600.0
    assert ProcessedMessage.objects.count() == 3
    ((_, idle),) = once.forgetting([topic], {"payments": "default"}, 1, lambda _: False)
    next(idle())
    assert ProcessedMessage.objects.count() == 3, "another worker looks after it"


def test_a_database_that_cannot_ignore_rows_uses_savepoints(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "IGNORING", set())
    monkeypatch.setattr(connection, "vendor", "other")
    calls = pay_in_lists()
    send_messages("payments", ["a", "b"])
    first, _ = queue.deliver()
    queue.give_back(first)
    send_message("payments", "c")
    assert queue.deliver()[1] == [None] * 3
    assert calls == [["a", "b"], ["c"]]
    assert groups() == ["a", "b", "c"]


def test_of_many_rows_those_are_counted_that_are_new() -> None:
    rows = [("payments", f"{n:032x}") for n in range(1000)]
    with transaction.atomic():
        assert once.insert(connection, rows).new == 1000
        some_new = once.insert(connection, [*rows, ("others", rows[0][1])]).new
        assert some_new == (0 if connection.vendor == "mysql" else 1)
    assert ProcessedMessage.objects.count() == 1000 + some_new


def test_an_error_that_is_no_conflict_is_none() -> None:
    """A row that the database refuses does not count as one that exists."""
    with pytest.raises(DatabaseError), transaction.atomic():
        once.insert(connection, [("x" * 101, "0" * 32), ("x' || NULL", "not a UUID")])
    assert not ProcessedMessage.objects.exists()


@pytest.mark.parametrize(
    "origin", ["order 17", "f" * 32, "0" * 32, "12345678123481238012345678123456", "ab" * 16]
)
def test_what_is_no_uuid_becomes_one_by_which_it_is_known(queue: Queue, origin: str) -> None:
    listener("payments", once=True)(write)
    send_message("payments", "a")
    messages, _ = queue.deliver()
    envelope = replace_origin(messages[0], origin)
    (topic, row), (_, same) = once.row_of(envelope), once.row_of(envelope)
    assert (topic, row) == ("payments", same)
    found = UUID(row)
    assert (found.version, found.variant) == (8, RFC_4122)
    assert found.bytes[8] & 0x20, "of version 8, MariaDB refuses those whose ninth byte is 0x80"
    assert row != once.row_of(messages[0])[1] == messages[0].origin


@pytest.mark.parametrize("given", [0, 1, "", ["default"], None])
def test_once_is_true_false_or_an_alias(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="once must be True, False or the alias"):
        listener("payments", once=given)


class Nowhere:
    """A router that keeps the package's tables out of every database."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if app_label == "django_rmq" else None


def told(**rmq: Any) -> list[Any]:
    with override_settings(RMQ={**RMQ, **rmq}):
        return check_listeners()


def test_a_sound_listener_is_told_nothing() -> None:
    listener("payments", once=True)(write)
    assert told() == []


@pytest.mark.parametrize("topic", ["plain", "unkeyed"])
def test_a_topic_without_origins_is_an_error(topic: str) -> None:
    listener(topic, once=True)(write)
    (error,) = told()
    assert error.id == "django_rmq.E060"
    assert ('"IDENTITY": "key" and' in error.hint) is (topic == "unkeyed")
    with pytest.raises(ConfigurationError, match='"ORIGIN": True'):
        startup.check_start([get_config().topic(topic)])


def test_a_database_that_is_not_there_is_an_error() -> None:
    listener("payments", once="billing")(write)
    (error,) = told()
    assert error.id == "django_rmq.E061"
    assert "'billing'" in error.msg
    assert "'default'" in error.hint


def test_a_database_without_autocommit_is_an_error(settings: Any) -> None:
    listener("payments", once=True)(write)
    changed = {**settings.DATABASES["default"], "AUTOCOMMIT": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(settings.DATABASES, "default", changed)
        assert [error.id for error in told()] == ["django_rmq.E062"]


def test_a_check_during_the_migration_of_another_schema_asks_for_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener("payments", once=True)(write)
    with override_settings(DATABASE_ROUTERS=[SchemaRouter(monkeypatch)]):
        assert told() == []


def test_a_router_that_forbids_the_table_is_an_error() -> None:
    listener("payments", once=True)(write)
    with override_settings(DATABASE_ROUTERS=[Nowhere()]):
        assert [error.id for error in told()] == ["django_rmq.E063"]


@pytest.mark.parametrize(
    ("changes", "is_fine"),
    [
        ({}, True),
        ({"MAX_RETRIES": 999}, False),
        ({"MAX_RETRIES": 999, "MAX_RUNTIME": 60, "TIMEOUT": 1}, True),
        ({"BACKOFF": 86_400}, False),
        ({"BACKOFF": "tests.integration.test_once.a_day"}, False),
        ({"BACKOFF": "tests.integration.test_once.no_time"}, True),
    ],
    ids=str,
)
def test_messages_that_outlive_their_rows_are_an_error(changes: dict[str, Any], is_fine: bool) -> None:
    listener("payments", once=True)(write)
    found = told(TOPICS={"payments": {**RMQ["TOPICS"]["payments"], **changes}})
    assert [error.id for error in found] == ([] if is_fine else ["django_rmq.E064"])
    for error in found:
        seconds = int(error.hint.partition("to more than ")[2].partition(",")[0])
        topics = {"payments": {**RMQ["TOPICS"]["payments"], **changes}}
        assert told(TOPICS=topics, ONCE_RETENTION=seconds + 1) == []
        assert told(TOPICS=topics, ONCE_RETENTION=seconds - 1) != []


def a_day(failures: int) -> float:
    return 86_400.0


def no_time(failures: int) -> float:
    raise ValueError("no")


def test_a_listener_whose_sends_do_not_wait_for_its_transaction_is_warned_of(settings: Any) -> None:
    listener("payments", once="billing")(write)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(settings.DATABASES, "billing", settings.DATABASES["default"])
        assert told() == []
        (warning,) = told(OUTBOX=True)
    assert warning.id == "django_rmq.W066"
    assert "using='billing'" in warning.hint


def test_a_worker_does_not_start_without_the_table_and_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener("payments", once=True)(write)
    topic = get_config().topic("payments")
    startup.check_start([topic])
    with monkeypatch.context() as patch:
        patch.setattr(ProcessedMessage._meta, "db_table", "not_there")
        with pytest.raises(ConfigurationError, match=r"python manage\.py migrate django_rmq"):
            startup.check_start([topic])
        (warning,) = checks.run_checks(tags=["rmq"], databases=["default"])
        assert warning.id == "django_rmq.W065"
    assert checks.run_checks(tags=["rmq"], databases=["default"]) == []


@pytest.fixture(params=["postgresql", "mysql"])
def silent(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The aliases of two databases whose server takes connections and never says anything."""
    aliases = ["silent-1", "silent-2"]
    if request.param == "mysql":
        use_driver()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = {"HOST": "127.0.0.1", "PORT": str(server.getsockname()[1]), "NAME": "bank", "USER": "bank"}
        engine = {"ENGINE": f"django.db.backends.{request.param}"}
        for alias in aliases:
            databases.settings[alias] = {**databases.settings["default"], **address, **engine}
        try:
            yield aliases
        finally:
            for alias in aliases:
                del databases[alias], databases.settings[alias]


@pytest.mark.usefixtures("queue")
def test_databases_that_hang_are_asked_at_once_and_for_a_bounded_time(
    silent: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(databases_of_outbox, "ANSWER_SECONDS", 2.0)
    waits = list[float]()
    began_at = databases_of_outbox._begin

    def begin(question: Any, alias: str, end: float) -> Any:
        if alias in silent:  # the project's database is asked in the same way, unless it is SQLite
            waits.append(end)
        return began_at(question, alias, end)

    monkeypatch.setattr(databases_of_outbox, "_begin", begin)
    listener("payments", once=silent[0])(write)
    listener("others", once=silent[1])(write)
    topics = [get_config().topic(name) for name in ("payments", "others")]
    threads = threading.active_count()
    assert startup.check_start(topics) == topics
    for alias in silent:
        assert f"Database {alias} cannot be asked whether its migrations are applied" in caplog.text
    assert len(waits) == 2 and len(set(waits)) == 1, "they have the same 2 s"
    assert check_tables(databases=[*silent, "default"]) == []
    with override_settings(RMQ={**RMQ, "OUTBOX": True}):
        assert check_outbox_tables() == []
    assert len(waits) == 6
    # Nothing is left that a fork could meet.
    assert (threading.active_count(), multiprocessing.active_children()) == (threads, [])


class InATestCase(RMQTestMixin, TestCase):
    """A listener with ``once`` in the transaction that Django's TestCase rolls back."""

    def test_a_project_tests_a_listener_with_once(self) -> None:
        with override_settings(RMQ=RMQ), listener_registry.isolated():
            runs: list[str] = []

            @listener("payments", once=True)
            def pay(message: Message) -> None:
                runs.append(origin_of(message))
                write(message)
                if len(runs) == 1:
                    raise Retry("once more", delay=0)

            with self.captureOnCommitCallbacks(execute=True):
                send_message("payments", "a")
            self.advance("5ms")
            self.drain()
            self.advance(1)
            self.drain()
            assert len(runs) == 2
            assert groups() == ["a"]
            assert ProcessedMessage.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_a_database_that_cannot_be_asked_for_any_reason_is_a_problem_that_says_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(alias: str) -> None:
        raise LookupError(f"no router for {alias}")

    monkeypatch.setattr(databases_of_outbox, "needs_this_thread", lambda alias: False)
    assert databases_of_outbox.ask_each(["default"], refuse).problems == {
        "default": "LookupError('no router for default')"
    }
