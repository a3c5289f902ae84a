"""What became of a message: `status`, and the progress that listeners report."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.test import override_settings
from django.utils import timezone

import django_rmq
from django_rmq import (
    InvalidMessage,
    Message,
    Reject,
    Retry,
    SendResult,
    UnknownTopic,
    aensure_message,
    amessage_status,
    areplay_message,
    cancel_message,
    ensure_message,
    listener,
    message_status,
    remove_message,
    replay_message,
    send_message,
)
from django_rmq.connections import get_broker
from django_rmq.core.model import delivered_message as delivery_handle
from django_rmq.core.model.replies import FoundReply
from django_rmq.core.model.status import status_of
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.message_ids import sealed_id
from django_rmq.testing import Clock, clock_from_now, drain, memory_broker
from django_rmq.worker.listener_registry import isolated
from tests.support.brokers import intercept
from tests.support.sends import counted_trips
from tests.support.workers import send, work_off

TOPICS: dict[str, dict[str, Any]] = {
    "kept": {"TYPE": "priority", "SLOTS": 4, "MAX_RETRIES": 2, "BACKOFF": 60, "OUTCOME_RETENTION": "1h"},
    "orders": {"TYPE": "fixed_time", "SLOTS": 4, "IDENTITY": "key", "OUTCOME_RETENTION": 600},
    "line": {"TYPE": "fifo", "SLOTS": 4, "OUTCOME_RETENTION": "90s"},
    "shared": {"TYPE": "priority", "SLOTS": 1, "SERIAL": False, "OUTCOME_RETENTION": timedelta(hours=1)},
    "forgotten": {"TYPE": "priority", "SLOTS": 4},
}
KEPT = Topic("seen", TopicType.RANGE_MERGE, slots=2, time_range_ms=1, outcome_retention_ms=60_000)


@pytest.fixture(autouse=True)
def _settings(redis_url: str, prefix: str) -> Iterator[None]:
    rmq = {"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS, "AUTODISCOVER": None}
    with override_settings(RMQ=rmq), isolated():
        yield


@pytest.fixture
def still() -> Iterator[Clock]:
    """A broker in memory whose time stands still until it is advanced."""
    with memory_broker(found := clock_from_now()):
        yield found


def instant(still: Clock) -> datetime:
    return datetime.fromtimestamp(still() // 1000 / 1000, UTC)


def near(when: datetime | None, other: datetime) -> bool:
    return when is not None and abs(when - other) < timedelta(milliseconds=2)


def test_a_message_is_followed_from_its_send_to_its_end() -> None:
    seen = []

    @listener("kept")
    def work(message: Message) -> None:
        seen.append(message_status("kept", {"n": 1}))

    assert message_status("kept", {"n": 1}).state == "unknown"
    send_message("kept", {"n": 1}, priority=500)
    assert (found := message_status("kept", {"n": 1})).state == "waiting"
    assert (found.priority, found.due, found.attempts, found.worker) == (500, None, 0, "")
    drain(live=True)
    assert [(one.state, one.attempts) for one in seen] == [("running", 1)]
    found = message_status("kept", {"n": 1})
    assert (found.state, found.attempts, found.reason, found.error_class) == ("done", 1, "", "")
    assert found.worker == seen[0].worker != ""
    assert found.delivered is not None
    assert near(seen[0].delivered, found.delivered)
    assert found.took is not None
    assert 0 <= found.took < 60


def test_what_fails_rests_and_dies(still: Clock) -> None:
    @listener("kept")
    def work(message: Message) -> None:
        raise Retry("shop.Down: later") if message.retries_left else ValueError("no")

    send_message("kept", 1, priority=500)
    drain(raise_errors=False)
    began = instant(still)
    found = message_status("kept", 1)
    assert (found.state, found.attempts, found.error_class) == ("resting", 1, "Retry")
    assert found.due == began + timedelta(minutes=1)
    assert found.first_failed == found.last_failed == began
    for _ in range(3):
        still.advance(60)
        drain(raise_errors=False)
    found = message_status("kept", 1)
    assert (found.state, found.attempts, found.reason) == ("dead", 3, "failed")
    assert found.error_class == "ValueError"
    assert found.ended == began + timedelta(minutes=2)
    assert found.first_failed == began
    assert near(found.delivered, found.ended)


def test_a_dead_message_that_is_sent_again_and_succeeds_is_done(still: Clock) -> None:
    outcomes = [Reject("no"), None]

    @listener("kept")
    def work(message: Message) -> None:
        if outcome := outcomes.pop(0):
            raise outcome

    send_message("kept", 1, priority=500)
    drain()
    assert message_status("kept", 1).state == "dead"
    still.advance(1)
    send_message("kept", 1, priority=500)
    assert message_status("kept", 1).state == "waiting"
    drain()
    assert message_status("kept", 1).state == "done", "Dead holds the older one"


def test_keyed_messages_are_found_by_their_key_and_those_without_a_name_by_their_id(still: Clock) -> None:
    @listener("line")
    def work(message: Message) -> None: ...

    send_message("orders", {"n": 1}, key="o1", fixed_time=instant(still) + timedelta(minutes=1))
    found = message_status("orders", key="o1")
    assert (found.state, found.due) == ("waiting", instant(still) + timedelta(minutes=1))
    remove_message("orders", key="o1")
    found = message_status("orders", key="o1")
    assert (found.state, found.attempts) == ("removed", 0)
    sent = [send_message("line", {"n": n}) for n in range(2)]
    drain("line")
    assert [message_status("line", id=one.id).state for one in sent] == ["done", "done"]
    assert message_status("line", id=sent[0].id).id == sent[0].id
    assert sent[0].id not in repr(message_status("line", id=sent[0].id)), "an id contains what is stored"


NO_IDS = ["", "0", "0.!", "9.YQ", "-1.YQ", "00.YQ", "0.YQ==", "0~YQ", "~", "0~", "x" * 1_000, 7]


@pytest.mark.parametrize("ask", [message_status, remove_message, cancel_message])
@pytest.mark.parametrize("name", NO_IDS)
def test_what_is_no_id_is_refused(ask: Callable[..., Any], name: Any) -> None:
    with pytest.raises(InvalidMessage) as error:
        ask("kept", id=name)
    if name == "x" * 1_000:
        assert "<slot>.<message>" in str(error.value) and "<slot>~<digest>" in str(error.value)


@pytest.mark.parametrize("act", [remove_message, cancel_message])
def test_the_id_of_a_log_line_names_a_message_as_the_id_of_its_send_does(act: Callable[..., Any]) -> None:
    due = datetime(2096, 10, 2, tzinfo=UTC)
    sends: list[tuple[str, dict[str, Any]]] = [
        ("kept", {"priority": 500}),
        ("orders", {"key": "o1", "fixed_time": due}),
        ("orders", {"key": "o2", "fixed_time": due, "slot_basis": "a shop"}),
        ("line", {}),
        ("forgotten", {"priority": 500}),
    ]
    for topic, options in sends:
        for sealed in (False, True):
            sent = send_message(topic, {"n": 1}, **options)
            name = sealed_id(topic, sent.slot, sent.member) if sealed else sent.id
            found = message_status(topic, id=name)
            assert (found.state, found.id) == ("waiting", sent.id)
            assert act(topic, id=name).status == "waiting"
            ended = message_status(topic, id=name)
            assert ended.state == ("unknown" if topic == "forgotten" else "removed")
            assert ended.id == name
            assert act(topic, id=name).status == "not_found"
    with pytest.raises(InvalidMessage, match="whole name"):
        act("kept", {"n": 1}, id="0.YQ")


@pytest.mark.django_db(transaction=True)
def test_an_id_is_taken_back_at_the_commit() -> None:
    due = datetime(2096, 10, 2, tzinfo=UTC)
    sent = [send_message("orders", n, key=f"k{n}", fixed_time=due, slot_basis=n) for n in range(6)]
    with transaction.atomic():
        names = [one.id if n % 2 else sealed_id("orders", one.slot, one.member) for n, one in enumerate(sent)]
        results = [remove_message("orders", id=name) for name in names]
        assert {str(result) for result in results} == {"pending"}
        assert {message_status("orders", id=one.id).state for one in sent} == {"waiting"}
    assert {result.status for result in results} == {"waiting"}
    assert {message_status("orders", id=one.id).state for one in sent} == {"removed"}


def test_topics_and_names_are_checked() -> None:
    with pytest.raises(UnknownTopic):
        message_status("nobody", 1)
    with pytest.raises(InvalidMessage):
        message_status("orders", {"n": 1})
    with pytest.raises(InvalidMessage):
        message_status("kept", 1, key="k")


def test_a_topic_without_outcome_retention_knows_what_lives_and_what_is_dead() -> None:
    progress = []

    @listener("forgotten")
    def work(message: Message) -> None:
        progress.append((message.progress(0.5), message_status("forgotten", message.body).state))
        if message.body == "bad":
            raise Reject("shop.Bad: no")

    for body in ("good", "bad"):
        send_message("forgotten", body, priority=100)
    assert message_status("forgotten", "good").state == "waiting"
    drain(live=True)
    assert progress == [(False, "running")] * 2
    assert message_status("forgotten", "good").state == "unknown"
    found = message_status("forgotten", "bad")
    assert (found.state, found.reason, found.attempts, found.error_class) == ("dead", "rejected", 1, "Reject")
    assert (found.worker, found.delivered, found.took) == ("", None, None)


def test_on_topics_that_are_not_serial_no_worker_is_named(still: Clock) -> None:
    @listener("shared")
    def work(message: Message) -> None:
        seen.append(message_status("shared", 1).worker)

    seen: list[str] = []
    send_message("shared", 1, priority=100)
    drain()
    assert seen == [""]
    assert message_status("shared", 1).worker == ""
    assert message_status("shared", 1).took is not None


def test_status_takes_one_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    send_message("kept", 1, priority=500)
    with counted_trips(monkeypatch) as trips:
        assert message_status("kept", 1).state == "waiting"
    assert len(trips) == 1


def test_status_from_a_coroutine() -> None:
    send_message("kept", 1, priority=500)
    assert async_to_sync(amessage_status)("kept", 1) == message_status("kept", 1)
    assert isinstance(message_status("kept", 1), django_rmq.MessageStatus)


def test_progress_is_shown_while_it_runs_and_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [100.0]
    monkeypatch.setattr(delivery_handle, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    seen: list[Any] = []

    @listener("kept")
    def work(message: Message) -> None:
        for fraction, text, wait in (
            (0.1, "one", 0.5),
            (0.2, "two", 0.5),
            (0.3, "three", 0.0),
            (1, "é" * 300, 0),
        ):
            seen.append((message.progress(fraction, text), message_status("kept", 1).progress))
            seconds[0] += wait
        seen.append(message_status("kept", 1))

    with memory_broker():
        send_message("kept", 1, priority=500)
        drain()
        assert seen[:4] == [(True, 0.1), (False, 0.1), (True, 0.3), (True, 1.0)]
        assert seen[4].progress_text == "é" * 100
        assert seen[4].progress_at is not None
        assert (message_status("kept", 1).state, message_status("kept", 1).progress) == ("done", 1)


@pytest.mark.parametrize("fraction", [-0.01, 1.01, float("nan"), "0.5", None, True])
def test_what_is_no_fraction_is_refused(fraction: Any) -> None:
    @listener("kept")
    def work(message: Message) -> None:
        message.progress(fraction)

    with memory_broker():
        send_message("kept", 1, priority=500)
        with pytest.raises(ValueError, match="from 0 to 1"):
            drain()


def test_a_report_that_redis_does_not_take_is_lost_without_an_error() -> None:
    words = []

    @listener("kept")
    def work(message: Message) -> None:
        words.append(message.progress(0.5))

    def away(_: Any) -> Any:
        raise django_rmq.ServerUnavailable("no")

    broker: Any = get_broker("worker")
    send_message("kept", 1, priority=500)
    run = intercept(broker, "progress", away)
    try:
        assert drain(live=True) == 1
    finally:
        broker.run = run
    assert words == [False]


def test_an_earlier_delivery_that_goes_on_reports_nothing(still: Clock) -> None:
    kept: list[Message] = []

    @listener("kept")
    def work(message: Message) -> None:
        if kept:
            seen.append((message.progress(0.2), kept[0].progress(0.9), message_status("kept", 1).progress))
        kept.append(message)
        raise Retry("again", delay=0)

    seen: list[Any] = []
    send_message("kept", 1, priority=500)
    drain()
    assert seen[0] == (True, False, 0.2)


@pytest.mark.parametrize("size", [None, 10])
def test_workers_report_progress_of_each_message_of_a_list(broker: Any, size: int | None) -> None:
    seen: dict[Any, Any] = {}

    def work(given: Any) -> None:
        for number, message in enumerate(given if size else [given]):
            message.progress(number / 10, f"number {number}")
            answer = broker.status(KEPT, message.slot, message.delivery.member)
            found = status_of(KEPT, message.slot, message.delivery.member, answer)
            seen[message.body["n"]] = (number / 10, found.progress, found.state)

    send(broker, KEPT, [{"n": n} for n in range(10)])
    work_off(broker, KEPT, work, batch_size=size)
    assert len(seen) == 10
    assert all(wanted == found and state == "running" for wanted, found, state in seen.values())


def test_coroutines_report_progress(broker: Any) -> None:
    seen: list[Any] = []

    async def work(message: Message) -> None:
        word = await message.aprogress(0.25, "a quarter")
        answer = await asyncio.to_thread(broker.status, KEPT, message.slot, message.delivery.member)
        seen.append((word, status_of(KEPT, message.slot, message.delivery.member, answer).progress_text))

    send(broker, KEPT, [{"n": 1}])
    work_off(broker, KEPT, work, threads=1)
    assert seen == [(True, "a quarter")]


@pytest.mark.parametrize("raw", [b"", b"x", b"done", b"done - x 1 1 \n", b"running 1 2\n", b"\xff \xfe\n"])
def test_a_record_that_rmq_did_not_write_counts_as_none(raw: bytes) -> None:
    found = FoundReply(None, None, None, 5.0, None, raw, raw, raw, "", raw)
    assert status_of(KEPT, 0, b"a", found).state == "dead"
    assert status_of(KEPT, 0, b"a", found._replace(dead=None)).state == "unknown"
    assert status_of(KEPT, 0, b"a", found._replace(prepare=5.0)).state == "running"


def named(way: str, topic: str, sent: SendResult) -> dict[str, Any]:
    if way == "id":
        return {"id": sent.id}
    if way == "sealed id":
        return {"id": sealed_id(topic, sent.slot, sent.member)}
    return {"key": "o1"} if topic == "orders" else {"body": {"n": 1}}


@pytest.mark.parametrize(
    ("topic", "way"),
    [
        *itertools.product(("forgotten", "orders"), ("body or key", "id", "sealed id")),
        # A message of this topic without a key is named by its id alone.
        ("line", "id"),
        ("line", "sealed id"),
    ],
)
def test_a_dead_message_is_sent_again_however_it_is_named(still: Clock, topic: str, way: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "forgotten": {"priority": 50},
        "orders": {"key": "o1", "fixed_time": timezone.now()},
        "line": {},
    }
    sent = send_message(topic, {"n": 1}, **options[topic])
    name = named(way, topic, sent)
    assert replay_message(topic, **name) == "waiting"
    seen: list[str] = []

    @listener(topic)
    def reject(message: Message[Any]) -> None:
        seen.append(replay_message(topic, **name))
        raise Reject("not today")

    still.advance(1)
    drain(topic)
    assert (seen, message_status(topic, id=sent.id).state) == (["running"], "dead")
    assert async_to_sync(areplay_message)(topic, **name) == "replayed"
    assert message_status(topic, id=sent.id).state == "waiting"
    still.advance(1)
    drain(topic)
    if topic != "line":
        send_message(topic, {"n": 1}, **options[topic])
    assert replay_message(topic, **name) == ("replayed" if topic == "line" else "merged")


def test_what_is_not_dead_or_not_named_is_not_replayed(still: Clock) -> None:
    assert replay_message("forgotten", {"n": 7}) == "not_found"
    sent = send_message("forgotten", {"n": 1}, priority=50)
    for ask in (replay_message, message_status, remove_message):
        with pytest.raises(InvalidMessage, match="id= is the whole name"):
            ask("forgotten", {"n": 1}, id=sent.id)
        with pytest.raises(InvalidMessage):
            ask("forgotten", id="no id")


@pytest.mark.parametrize("seal", [False, True])
def test_a_message_is_sent_unless_it_is_there_by_the_id_of_an_earlier_send(still: Clock, seal: bool) -> None:
    def id_of(sent: SendResult) -> str:
        return sealed_id(sent.topic, sent.slot, sent.member) if seal else sent.id

    due = timezone.now() + timedelta(minutes=5)
    first = send_message("orders", {"n": 1}, fixed_time=due)  # its id is its only name
    assert ensure_message("orders", {"n": 1}, id=id_of(first), fixed_time=due).status == "present"
    based = send_message("orders", {"n": 2}, key="k", fixed_time=due, slot_basis="shop 7")
    with pytest.raises(InvalidMessage, match="pass the slot_basis="):
        ensure_message("orders", {"n": 2}, id=id_of(based), fixed_time=due)
    again = ensure_message("orders", {"n": 2}, id=id_of(based), fixed_time=due, slot_basis="shop 7")
    assert (again.status, again.id) == ("present", based.id)
    plain = send_message("forgotten", {"n": 3}, priority=50)
    assert ensure_message("forgotten", {"n": 3}, id=id_of(plain), priority=50).status == "present"
    with pytest.raises(InvalidMessage, match="not that of a message with this body"):
        ensure_message("forgotten", {"n": 4}, id=id_of(plain), priority=50)
    with pytest.raises(InvalidMessage, match="not both"):
        ensure_message("orders", {"n": 1}, key="k", id=id_of(first), fixed_time=due)
    keyless = send_message("line", {"n": 5})
    with pytest.raises(InvalidMessage, match="sent without a key"):
        ensure_message("line", {"n": 5}, id=id_of(keyless))
    for ensure in (ensure_message, async_to_sync(aensure_message)):
        with pytest.raises(InvalidMessage, match="each send is another message: pass key= or id="):
            ensure("line", {"n": 5})
    remove_message("orders", id=first.id, on_commit=False)
    if seal:
        with pytest.raises(InvalidMessage, match="holds no message"):
            ensure_message("orders", {"n": 1}, id=id_of(first), fixed_time=due)
    else:
        assert ensure_message("orders", {"n": 1}, id=first.id, fixed_time=due).status == "stored"
