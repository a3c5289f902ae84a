"""What ``docs/explanation/order.md`` promises beyond the rules of one slot; how workers keep the order of a strict topic; and
fifo topics by every way in and out: Python, coroutines, transactions, REST, commands, the admin, and tests of a project.
"""

from __future__ import annotations

import html
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.test import Client, override_settings
from django.urls import reverse

from django_rmq import (
    InvalidMessage,
    Message,
    Retry,
    Send,
    asend_message,
    asend_messages,
    listener,
    send_message,
    send_messages,
)
from django_rmq.core import reslotting
from django_rmq.core.commands import ack, fetch
from django_rmq.core.commands import send as send_commands
from django_rmq.core.consumer import batch_run, executor_pool
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.producer.bulk_send import ROUND_TRIP
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import ServerRefused
from django_rmq.operations import Actor, Operations
from django_rmq.operations.consumption import LongPoll
from django_rmq.testing import Clock, clock_from_now, drain, memory_broker
from django_rmq.worker.listener_registry import isolated
from tests.support.brokers import ClusterBroker
from tests.support.programs import Consumer
from tests.support.reports import printed
from tests.support.workers import Heard, Listener, Worker, audit, cluster_of, live, send, total, work_off

QUICK = BackOff(10, 10)
AT_ONCE = BackOff(0, 0)


def fifo(**options: Any) -> Topic:
    return Topic("line", TopicType.FIFO, **{"slots": 1, "identity": "key", "backoff": QUICK, **options})


def order_of(broker: Any, topic: Topic, limit: int = 1_000) -> list[Any]:
    """Return the bodies of slot 0 in the order in which they are taken."""
    prepared = broker.run(fetch.prepare(topic, 0, "A", None, limit))
    return [Message(topic, 0, prepared.receipt, each).body for each in prepared.deliveries]


def drained(broker: Any, topic: Topic, slot: int, count: int) -> list[Any]:
    """Take and commit ``count`` messages of a slot; return their bodies in that order."""
    found: list[Any] = []
    while len(found) < count:
        prepared = broker.run(fetch.prepare(topic, slot, "A", None, 1_000))
        if prepared.status != "ok":
            continue  # a few places are in the next millisecond
        found += [Message(topic, slot, 0, each).body for each in prepared.deliveries]
        members = [each.member for each in prepared.deliveries]
        broker.run(ack.commit(topic, slot, prepared.receipt, members))
    return found


@pytest.mark.parametrize("kind", [TopicType.RANGE_MERGE, TopicType.FIXED_TIME])
def test_equal_times_run_in_the_order_of_bytes(broker: Any, kind: TopicType) -> None:
    topic = Topic("times", kind, slots=1)
    if kind is TopicType.RANGE_MERGE:
        broker.run(send_commands.send_merge(topic, 0, 0, [b"9", b"10"]))
    else:
        broker.run(send_commands.send_replace(topic, 0, [5_000, 5_000], [b"9", b"10"]))
    assert order_of(broker, topic) == [10, 9]


def test_one_call_with_many_round_trips_and_options_keeps_the_order_given(broker: Any) -> None:
    topic = fifo()
    count = ROUND_TRIP + 2_500
    producer = Producer(broker)
    options = [{"expires": 4_000_000_000_000} if n % 7 == 0 else {} for n in range(count)]
    producer.send([producer.build(topic, n, **options[n]) for n in range(count)])
    assert drained(broker, topic, 0, count) == list(range(count))


def test_what_comes_behind_an_error_is_not_sent(broker: Any) -> None:
    topic = fifo()
    producer = Producer(broker)
    built = [producer.build(topic, n) for n in range(ROUND_TRIP + 10)]
    built[5] = built[5]._replace(score=-1)
    results, errors = producer.attempt(built)
    assert isinstance(errors[5], ServerRefused)
    assert isinstance(errors[ROUND_TRIP + 9], ServerRefused)
    assert {result.status for result in results[ROUND_TRIP:]} == {"failed"}


@pytest.mark.parametrize("is_bulk", [True, False])
def test_what_comes_behind_a_call_that_was_refused_is_not_sent_in_its_line(
    broker: Any, monkeypatch: pytest.MonkeyPatch, is_bulk: bool
) -> None:
    """As by a server that is full, and has room again at the next call."""
    topic, producer, calls = fifo(), Producer(broker), list[int]()
    real = send_commands.send_fifo

    def send_fifo(topic: Topic, slot: int, delay: int, members: Any, *rest: Any, **options: Any) -> Any:
        calls.append(len(members))
        return real(topic, slot, -1 if len(calls) == 2 else delay, members, *rest, **options)

    monkeypatch.setattr(send_commands, "send_fifo", send_fifo)
    count = 3_500
    if is_bulk:
        with pytest.raises(ServerRefused):
            producer.send_bodies(topic, list(range(count)))
    else:
        _, errors = producer.attempt([producer.build(topic, n) for n in range(count)])
        assert min(errors) == 1_000 and len(errors) == count - 1_000
    assert calls[:2] == [1_000, 1_000]
    assert drained(broker, topic, 0, 1_000) == list(range(1_000))
    assert broker.count(topic, 0).store == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"priority": 100}, "pass delay=, not priority="),
        ({"fixed_time": 4_000_000_000_000}, "pass delay=, not fixed_time="),
        ({"delay": -1}, "delay must be from 0"),
        ({"delay": "soon"}, "delay must be from 0 to 31622400000 ms, got 'soon'"),
    ],
    ids=str,
)
def test_an_option_that_a_fifo_topic_does_not_have_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidMessage, match=told):
        Producer(None).build(fifo(), 1, **options)  # type: ignore[arg-type]


def test_send_takes_a_delay() -> None:
    assert Send(1, delay="5ms").options() == {"delay": "5ms"}


def test_retries_of_a_fifo_topic_are_listed_in_their_place() -> None:
    topic = fifo(max_retries=3)
    lefts = [3, 2, 3, 3, 3, 2, 2]
    messages = [Message(topic, 0, 1, Delivery(b"%d" % n, 1.0, left)) for n, left in enumerate(lefts)]
    listed = [[message.delivery.member for message in group] for group in batch_run.groups(messages, 2)]
    assert listed == [[b"0"], [b"1"], [b"2", b"3"], [b"4"], [b"5"], [b"6"]]


class Unlimited:
    """Permits of a topic without limits."""

    def request(self, request: str, most: int) -> tuple[int, int]:
        return most, 0

    def report_taken(self, *args: Any) -> None:
        """Do nothing."""


@pytest.mark.parametrize(("order", "count"), [("strict", 1), ("loose", 5)])
def test_a_program_is_given_one_message_of_a_strict_slot_at_a_time(
    broker: Any, order: str, count: int
) -> None:
    topic = fifo(order=order)
    send(broker, topic, range(5))
    permits: Any = Unlimited()
    found = LongPoll(broker, topic, permits).take("program", 10, 0.0)
    assert [message.body for message in found] == list(range(count))


@pytest.mark.parametrize("counts", [(2, 8), (8, 2)])
def test_each_entity_keeps_its_order_while_its_topic_is_re_slotted(
    broker: Any, counts: tuple[int, int]
) -> None:
    before, after = counts
    topic = fifo(slots=before, slot_basis="entity")
    broker.define(topic)
    producer = Producer(broker)
    entities = 10

    def send_numbers(first: int, last: int) -> None:
        bodies = [{"entity": n % entities, "n": n // entities} for n in range(first, last)]
        producer.send([producer.build(topic, body) for body in bodies])

    send_numbers(0, 300)
    chosen = reslotting.begin(broker, topic, after)
    assert chosen is not None
    sent = [300]

    def send_more(step: str, progress: Any) -> None:
        if sent[0] < 600:
            send_numbers(sent[0], sent[0] + 50)
            sent[0] += 50

    reslotting.move(broker, chosen, report=send_more)
    reslotting.finish(broker, chosen)
    send_numbers(sent[0], 700)
    found: defaultdict[int, list[int]] = defaultdict(list)
    now = replace(topic, slots=after)
    for slot in range(after):
        while (prepared := broker.run(fetch.prepare(now, slot, "A", None, 100))).status == "ok":
            members = [each.member for each in prepared.deliveries]
            for each in prepared.deliveries:
                body = Message(now, slot, 0, each).body
                found[body["entity"]].append(body["n"])
            broker.run(ack.commit(now, slot, prepared.receipt, members))
    assert [found[entity] for entity in range(entities)] == [list(range(70))] * entities


def test_a_strict_topic_in_a_cluster_is_not_re_slotted(redis_cluster: Any) -> None:
    cluster = cluster_of(redis_cluster)
    broker = ClusterBroker(cluster, f"t{uuid4().hex[:12]}:")
    strict, loose = fifo(slots=2), replace(fifo(slots=2, order="loose"), name="loose")
    for topic in (strict, loose):
        broker.define(topic)
    assert "a clock of its own" in reslotting.obstacle(broker, strict, 4)
    assert reslotting.obstacle(broker, strict, 2) == ""
    assert reslotting.obstacle(broker, loose, 4) == ""
    cluster.close()


class Entities:
    """A listener that writes down what it begins and what succeeds, and fails some messages a few times."""

    def __init__(self, fails: Callable[[Any, int], bool] = lambda body, times: False) -> None:
        self.begun: list[Any] = []
        self.succeeded: list[Any] = []
        self.times: Counter[Any] = Counter()
        self.fails = fails
        self._lock = threading.Lock()

    def begin(self, body: Any) -> bool:
        with self._lock:
            self.begun.append(body)
            self.times[body] += 1
            return self.fails(body, self.times[body])

    def __call__(self, message: Message) -> None:
        if self.begin(message.body):
            raise ValueError("not yet")
        with self._lock:
            self.succeeded.append(message.body)

    def many(self, messages: list[Message]) -> None:
        failing = [message for message in messages if self.begin(message.body)]
        for message in failing:
            message.retry()
        with self._lock:
            self.succeeded += [m.body for m in messages[: messages.index(failing[0]) if failing else None]]

    def raising(self, messages: list[Message]) -> None:
        fails = [self.begin(message.body) for message in messages]
        if any(fails):
            raise ValueError("one of these")
        with self._lock:
            self.succeeded += [message.body for message in messages]


def fails_first(body: Any, times: int) -> bool:
    return body % 5 == 2 and times <= 2


def finish(broker: Any, topic: Topic, listener: Any, count: int, **options: Any) -> None:
    send(broker, topic, range(count))
    work_off(broker, topic, listener, **options)


def of_kind(kind: str, listener: Callable[[list[Message]], None]) -> Callable[[list[Message]], Any]:
    """Return the listener, or a coroutine that does the same."""

    async def coroutine(messages: list[Message]) -> None:
        listener(messages)

    return coroutine if kind == "coroutine" else listener


def test_a_worker_holds_a_strict_slot_behind_a_message_that_failed(broker: Any) -> None:
    topic, heard = fifo(), Entities(fails_first)
    finish(broker, topic, heard, 30)
    assert heard.succeeded == list(range(30))
    assert heard.begun == [n for n in range(30) for _ in range(3 if n % 5 == 2 else 1)]
    assert total(broker, topic, "failed") == 12


@pytest.mark.parametrize("size", [1, 4, 50])
@pytest.mark.parametrize("way", ["many", "raising"])
def test_a_list_commits_only_what_comes_before_its_first_failure(broker: Any, size: int, way: str) -> None:
    topic, heard = fifo(), Entities(fails_first)
    finish(broker, topic, getattr(heard, way), 30, batch_size=size)
    firsts = list(dict.fromkeys(heard.succeeded))
    assert firsts == list(range(30))
    again = max(heard.times[n] for n in range(30) if n % 5 != 2)
    assert size == 1 or again > 1, "what is behind a failure is seen again"
    if way == "many":
        assert total(broker, topic, "failed") <= 12
        assert sum(ledger.dead for ledger in audit(broker, topic)) == 0


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
def test_a_list_is_not_called_with_what_comes_behind_an_unreadable_message(broker: Any, kind: str) -> None:
    topic = fifo(max_retries=2)
    begun: list[Any] = []

    def listener(messages: list[Message]) -> None:
        begun.extend(message.body for message in messages)

    send(broker, topic, [0])
    send(broker, replace(topic, body="bytes"), [b"not JSON"])
    send(broker, topic, [1, 2])
    work_off(broker, topic, of_kind(kind, listener), batch_size=10)
    assert begun == [0, 1, 2]
    (ledger,) = audit(broker, topic)
    assert (ledger.dead, total(broker, topic, "failed") + total(broker, topic, "undecodable")) == (1, 3)


@pytest.mark.parametrize("kind", ["thread", "coroutine", "drain"])
def test_what_a_list_holds_back_is_given_back_uncharged_behind_the_first_failure(
    broker: Any, kind: str
) -> None:
    """``once`` rolls back and calls again without these; even if the failed message is then cancelled."""
    topic = fifo(backoff=AT_ONCE)
    calls: list[list[Any]] = []

    def listener(messages: list[Message]) -> None:
        calls.append([message.body for message in messages])
        if len(calls) == 1:
            for message in messages[1:]:
                message.outcome = batch_run.HELD_BACK

    send(broker, topic, range(4))
    if kind == "drain":
        prepared = broker.run(fetch.prepare(topic, 0, "test", None, 10))
        messages = [Message(topic, 0, prepared.receipt, given) for given in prepared.deliveries]
        assert batch_run.call_all(Listener(topic.name, listener, 10), messages) == [None]
        return
    work_off(broker, topic, of_kind(kind, listener), batch_size=10)
    assert calls == [[0, 1, 2, 3], [1, 2, 3]]
    assert total(broker, topic, "failed") == 0


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", ["thread", "coroutine"])
def test_a_listener_that_empties_its_list_has_run_it(broker: Any, kind: str, count: int) -> None:
    topic = fifo()
    begun: list[Any] = []

    def listener(messages: list[Message]) -> None:
        while messages:
            begun.append(messages.pop(0).body)

    finish(broker, topic, of_kind(kind, listener), count, batch_size=10)
    assert begun == list(range(count))


def test_a_slot_that_is_taken_over_goes_on_in_its_order(broker: Any) -> None:
    topic = fifo(slots=4, slot_basis="entity", backoff=AT_ONCE)
    producer, entities, count = Producer(broker), 4, 200
    bodies = [{"entity": n % entities, "n": n // entities} for n in range(entities * count)]
    producer.send([producer.build(topic, body) for body in bodies])
    begun: defaultdict[int, list[int]] = defaultdict(list)

    def listener(message: Message) -> None:
        body = message.body
        begun[body["entity"]].append(body["n"])
        if body["n"] % 50 == 7 and begun[body["entity"]].count(body["n"]) == 1:
            raise ValueError("once")

    while live(broker, topic):
        with Worker(broker, topic, listener):
            threading.Event().wait(0.02)
    for numbers in begun.values():
        firsts = list(dict.fromkeys(numbers))
        assert firsts == list(range(count))
        assert all(later <= earlier + 1 for earlier, later in pairwise(numbers))


def test_a_stale_message_ends_its_batch(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = fifo()
    heard = Heard()
    batches: list[Any] = []
    real = executor_pool.ExecutorThread._run_batch

    def run_batch(thread: Any, batch: Any) -> None:
        if not batches:
            batch.stale = {batch.messages[1].delivery.member}
        batches.append(batch)
        real(thread, batch)

    monkeypatch.setattr(executor_pool.ExecutorThread, "_run_batch", run_batch)
    send(broker, topic, range(5))
    with Worker(broker, replace(topic, timeout=1), heard):
        assert heard.wait(5) == [0, 1, 2, 3, 4]


LINE = {"TYPE": "fifo", "SLOTS": 4, "BACKOFF": 0}
TOPICS = {
    "line": LINE,
    "accounts": {**LINE, "SLOT_BASIS": "account"},
    "unique": {**LINE, "ON_DUPLICATE": "keep"},
    "newest": {**LINE, "ON_DUPLICATE": "replace"},
}


@pytest.fixture
def still(db: None) -> Iterator[Clock]:
    rmq = {"REDIS": "redis://nowhere", "TOPICS": TOPICS, "AUTODISCOVER": None, "ON_COMMIT": False}
    with override_settings(RMQ=rmq), isolated(), memory_broker(found := clock_from_now()):
        yield found


def heard_in_line(topic: str, still: Clock | None = None) -> list[Any]:
    """Let a listener run what waits; return the bodies in the order of its calls."""
    found: list[Any] = []
    with isolated():
        listener(topic)(lambda message: found.append(message.body))
        if still is not None:
            still.advance(0.05)  # of many messages some have a place in the next milliseconds
        drain()
    return found


def operations() -> Operations:
    return Operations(Actor("shell", "test"))


def test_coroutines_send_into_the_same_line(still: Clock) -> None:
    async_to_sync(asend_message)("line", 9)
    async_to_sync(asend_messages)("line", [Send(7), 8])
    send_message("line", 1)
    assert heard_in_line("line", still) == [9, 7, 8, 1]


@pytest.mark.django_db(transaction=True)
def test_within_a_transaction_the_order_is_that_of_the_calls(still: Clock) -> None:
    with transaction.atomic():
        send_message("line", 9, on_commit=True)
        send_messages("line", [7, 8], on_commit=True)
        send_message("line", 3)
        send_message("line", 1, on_commit=True)
    assert heard_in_line("line", still) == [3, 9, 7, 8, 1]


def test_an_entity_has_one_line_whether_a_field_a_slot_basis_or_a_key_names_it(still: Clock) -> None:
    by_field = {send_message("accounts", {"account": 7, "n": n}).slot for n in range(9)}
    by_basis = {send_message("line", n, slot_basis="account 7").slot for n in range(9)}
    by_key = {send_message("newest", n, key="account 7").slot for n in range(9)}
    by_none = {send_message("line", n).slot for n in range(9)}
    assert [len(slots) for slots in (by_field, by_basis, by_key, by_none)] == [1, 1, 1, 1]
    others = {send_message("line", n, slot_basis=f"account {n}").slot for n in range(50)}
    assert len(others) == 4


@pytest.mark.parametrize("delay", [timedelta(), timedelta(days=366)])
def test_a_delay_may_be_as_long_as_its_bounds(still: Clock, delay: timedelta) -> None:
    assert send_message("line", 1, delay=delay).status == "stored"
    for wrong in (delay - timedelta(days=366.1), delay + timedelta(days=366.1)):
        with pytest.raises(InvalidMessage, match=r"delay must be .* from 0s to 366d, got datetime.timedelta"):
            send_message("line", 1, delay=wrong)


def test_over_rest_a_line_is_sent_listed_and_consumed_in_its_order(still: Clock) -> None:
    consumer = Consumer("accounts")
    messages: list[dict[str, Any]] = [{"body": {"account": 7, "n": n}} for n in (9, 8, 7)]
    messages.append({"body": {"account": 7, "n": 1}, "delay_ms": 5000})
    consumer.ok("POST", "topics/accounts/messages/", {"messages": messages}, 202)
    listed = consumer.ok("GET", "topics/accounts/messages/?state=store")["results"]
    assert [one["body"]["n"] for one in listed] == [9, 8, 7, 1]
    still.advance(1)
    (first,) = consumer.take(10)
    assert consumer.take(10) == []
    consumer.settle("rollback", first)
    (again,) = consumer.take(10)
    assert (again["body"]["n"], again["retries_left"]) == (9, 15)
    consumer.settle("commit", again)
    found = []
    still.advance(9)
    while taken := consumer.take(10):
        found += [one["body"]["n"] for one in taken]
        consumer.settle("commit", *taken)
    assert found == [8, 7, 1]


@pytest.mark.parametrize(("topic", "status"), [("unique", "present"), ("newest", "replaced")])
def test_rest_says_what_a_send_with_a_waiting_key_does(still: Clock, topic: str, status: str) -> None:
    consumer = Consumer(topic)
    for expected in ("stored", status):
        sent = {"body": expected, "key": "a"}
        answer = consumer.ok("POST", f"topics/{topic}/messages/", sent, 202)
        assert answer["outcomes"] == {expected: 1}


def test_rmqsend_keeps_the_order_of_its_lines(still: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    printed("rmqsend", "line", "9")
    lines = [b"%d" % n for n in (7, 8, 5, 6)]
    monkeypatch.setattr("sys.stdin", type("Input", (), {"buffer": iter(lines)}))
    printed("rmqsend", "line", "--jsonl")
    printed("rmqsend", "line", "1", "--delay", "1m")
    assert heard_in_line("line", still) == [9, 7, 8, 5, 6]
    still.advance(60)
    assert heard_in_line("line") == [1]


def test_the_admin_sends_with_a_delay_and_lists_a_line_in_its_order(
    still: Clock, staff: Callable[..., Client]
) -> None:
    person = staff("view_topic", "view_bodies", "send_messages")
    address = reverse("admin:django_rmq_topic_send", args=["line"])
    assert 'name="delay"' in person.get(address).content.decode()
    for body, delay in (("9", ""), ("8", "1m"), ("7", "")):
        answer = person.post(address, {"body": body, "delay": delay}, follow=True)
        assert "Send: 1 stored." in html.unescape(answer.content.decode())
    refused = person.post(address, {"body": "1", "delay": "-1"})
    assert "errorlist" in refused.content.decode()
    page = person.get(reverse("admin:django_rmq_topic_change", args=["line"]) + "?tab=store")
    shown = re.findall(r'"rmq-message"><a[^>]*>([^<]*)</a>', html.unescape(page.content.decode()))
    assert [one[-1] for one in shown] == ["9", "7", "8"]


def test_drain_keeps_the_order_also_behind_a_failure(still: Clock) -> None:
    send_messages("line", [9, 8, 7])
    found: list[Any] = []

    @listener("line")
    def listen(message: Message) -> None:
        found.append(message.body)
        if len(found) <= 2:
            raise Retry(delay=0)

    still.advance(1)
    drain()
    assert found == [9, 9, 9, 8, 7]
