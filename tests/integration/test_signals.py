"""Signals of what happens to messages: what they carry, when and where they come, and that nobody pays for none."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from django.dispatch import Signal
from django.test import override_settings

from django_rmq import connections, observability, send_messages, signals
from django_rmq.conf import get_config
from django_rmq.core.consumer import Hooks
from django_rmq.core.consumer.acks import PendingAcks
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.producer.placement import slot_of
from django_rmq.exceptions import Reject
from django_rmq.observability import announcements
from django_rmq.operations import Actor, Operations
from tests.support.brokers import Broker
from tests.support.sends import listening
from tests.support.workers import LONG, Heard, Worker, client_of, eventually, send

TOPIC = Topic("work", TopicType.RANGE_MERGE, slots=2, time_range_ms=1, max_retries=1, backoff=BackOff(0, 0))
KIND = {"TYPE": "range_merge", "TIME_RANGE": "1ms"}
NAMES = ("started", "committed", "failed", "dead", "replayed")


@pytest.fixture
def broker(redis_url: str, prefix: str) -> Iterator[Any]:
    with ExitStack() as stack:
        client = client_of(redis_url)
        stack.callback(client.close)
        broker = Broker(client, prefix)
        rmq = {"BROKER": "memory", "TOPICS": {"work": {**KIND, "SLOTS": 2, "MAX_RETRIES": 1, "BACKOFF": 0}}}
        stack.enter_context(override_settings(RMQ=rmq))
        stack.enter_context(connections.replaced_broker(broker))
        yield broker


class Told:
    """What receivers of the signals were given, and in which threads."""

    def __init__(self) -> None:
        self.calls: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
        self.threads: dict[str, set[str]] = {name: set() for name in NAMES}

    def bodies(self, name: str) -> list[Any]:
        calls = self.calls[name]
        if name in ("started", "committed"):
            return [message.body for call in calls for message in call["messages"]]
        return [message.body for call in calls for message, _ in call["failures"]]


@contextmanager
def told_of(*names: str) -> Iterator[Told]:
    told, receivers = Told(), []
    for name in names:

        def receive(name: str = name, **kwargs: Any) -> None:
            told.calls[name].append(kwargs)
            told.threads[name].add(threading.current_thread().name)

        signal_of(name).connect(receive)
        receivers.append((name, receive))
    try:
        yield told
    finally:
        for name, receive in receivers:
            signal_of(name).disconnect(receive)


def signal_of(name: str) -> Signal:
    signal = getattr(signals, f"message_{name}")
    assert isinstance(signal, Signal)
    return signal


@contextmanager
def worker(broker: Any, listener: Any, **options: Any) -> Iterator[Worker]:
    """A dispatcher with the hooks that the settings' workers have."""
    reporter = announcements.Reporter()
    hooks = Hooks(around=announcements.around)
    with Worker(broker, TOPIC, listener, hooks=hooks, watcher=reporter, **options) as running:
        yield running
    reporter.stop(LONG)


def counted(broker: Any, name: str) -> int:
    return sum(broker.audit_ledger(TOPIC, slot)[name] for slot in range(TOPIC.slots))


def test_what_a_worker_does_is_told_with_its_messages(broker: Any) -> None:
    def listen(message: Message) -> None:
        if message.body == "bad":
            raise ValueError("no such thing")
        if message.body == "worse":
            raise Reject("never again")

    send(broker, TOPIC, ["good", "bad", "worse"])
    with told_of(*NAMES) as told, worker(broker, listen):
        eventually(lambda: len(told.bodies("dead")) == 2, "two deaths")
    assert sorted(told.bodies("started")) == ["bad", "bad", "good", "worse"]
    assert told.bodies("committed") == ["good"]
    assert sorted(told.bodies("failed")) == ["bad", "bad", "worse"]
    assert sorted(told.bodies("dead")) == ["bad", "worse"]
    calls = [call for name in NAMES for call in told.calls[name]]
    assert {(call["topic"], call["sender"]) for call in calls} == {("work", "work")}
    failures = {message.body: failure for call in told.calls["dead"] for message, failure in call["failures"]}
    assert failures["bad"].error.startswith("ValueError: no such thing")
    assert failures["worse"] == Failure(b'"worse"', "rejected", None, "Reject: never again")
    assert all(name.startswith("rmq-executor-") for name in told.threads["started"])
    assert told.threads["committed"] | told.threads["failed"] == {"rmq-reporter"}


def test_a_cancelled_delivery_is_no_failure(broker: Any) -> None:
    def listen(message: Message) -> None:
        member = b'"x"'
        slot = slot_of(member, TOPIC.slots)
        assert broker.cancel(TOPIC, slot, [member]) == ["running"]
        assert message.extend() and message.cancelled
        raise ValueError("whatever ends it")

    with told_of("failed", "dead", "committed") as told, worker(broker, listen):
        send(broker, TOPIC, ["x"])
        eventually(lambda: counted(broker, "cancelled") == 1, "the end")
    assert told.calls["failed"] == told.calls["dead"] == told.calls["committed"] == []


def test_a_batch_is_told_at_once(broker: Any) -> None:
    def listen(messages: list[Message]) -> None:
        messages[0].reject("first")

    topic_bodies = list(range(20))
    send(broker, TOPIC, topic_bodies)
    with told_of("started", "committed", "failed") as told, worker(broker, listen, batch_size=50):
        eventually(lambda: len(told.bodies("committed")) + len(told.bodies("failed")) == 20, "all of them")
    assert sorted(told.bodies("started")) == topic_bodies
    # Which of two threads ends first is open.
    assert sorted(len(call["messages"]) for call in told.calls["started"]) == sorted(
        len(committed["messages"]) + 1 for committed in told.calls["committed"]
    )


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_receivers_that_raise_harm_nothing(broker: Any, error: type[BaseException]) -> None:
    def broken(**kwargs: Any) -> None:
        raise error("a receiver's own")

    heard = Heard()
    for name in ("started", "committed"):
        signal_of(name).connect(broken)
    try:
        send(broker, TOPIC, range(10))
        with worker(broker, heard):
            eventually(lambda: counted(broker, "committed") == 10, "ten commits")
    finally:
        for name in ("started", "committed"):
            signal_of(name).disconnect(broken)
    assert sorted(heard.bodies) == list(range(10))
    assert counted(broker, "failed") == 0


def test_a_slow_receiver_holds_no_message_up(broker: Any) -> None:
    goes_on, heard = threading.Event(), Heard()

    def slow(**kwargs: Any) -> None:
        assert goes_on.wait(LONG)

    signals.message_committed.connect(slow)
    try:
        with worker(broker, heard):
            for number in range(5):
                send(broker, TOPIC, [number])
                heard.wait(number + 1)
            eventually(lambda: counted(broker, "committed") == 5, "five commits")
            goes_on.set()
    finally:
        goes_on.set()
        signals.message_committed.disconnect(slow)


def test_what_cannot_be_told_in_time_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announcements, "WAITING", 3)
    goes_on, begun = threading.Event(), threading.Event()
    message = Message(TOPIC, 0, 1, None)  # type: ignore[arg-type]
    heard: list[int] = []

    def slow(messages: list[Message], **kwargs: Any) -> None:
        begun.set()
        assert goes_on.wait(LONG)
        heard.append(len(messages))

    signals.message_committed.connect(slow)
    reporter = announcements.Reporter()
    try:
        with override_settings(RMQ={"BROKER": "memory", "TOPICS": {}}):
            reporter.ended([message], [])
            assert begun.wait(LONG)
            for _ in range(3):
                reporter.ended([message] * 2, [])
            goes_on.set()
            reporter.stop(LONG)
    finally:
        signals.message_committed.disconnect(slow)
    assert heard == [1, 2]
    assert "not called for the end of 2 messages" in caplog.text


def test_what_ended_while_no_thread_could_start_is_told_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    message, reporter = Message(TOPIC, 0, 1, None), announcements.Reporter()  # type: ignore[arg-type]
    with (
        listening(signals.message_committed) as told,
        override_settings(RMQ={"BROKER": "memory", "TOPICS": {}}),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            reporter.ended([message], [])
        reporter.ended([message] * 2, [])
        reporter.stop(LONG)
    assert [len(call["messages"]) for call in told] == [1, 2]


def test_a_receiver_may_choose_a_topic_by_its_name(broker: Any) -> None:
    chosen: list[Any] = []
    others: list[Any] = []
    all_: list[Any] = []
    # Equal names that are not one object, as those of two modules.
    name, same = str(b"work", "ascii"), str(b"work", "ascii")
    assert name is not same
    receivers = [(chosen, name), (others, "other"), (all_, None)]
    connected = []
    for calls, sender in receivers:

        def receive(calls: list[Any] = calls, **kwargs: Any) -> None:
            calls.append((kwargs["sender"], kwargs["topic"]))

        signals.message_sent.connect(receive, sender=sender, weak=False)
        connected.append((receive, sender))
    try:
        assert observability.are_sends_watched(same)
        send_messages(same, [1])
    finally:
        gone = [signals.message_sent.disconnect(receive, sender=sender) for receive, sender in connected]
    assert (chosen, others, all_) == ([("work", "work")], [], [("work", "work")])
    assert gone == [True, True, True]
    assert not observability.are_sends_watched("work")


def test_a_topic_whose_receivers_are_of_another_topic_costs_nothing() -> None:
    def receive(**kwargs: Any) -> None: ...

    with override_settings(RMQ={"BROKER": "memory", "TOPICS": {"work": KIND}}):
        reporter = announcements.Reporter()
        for name in ("sent", "started", "committed"):
            signal_of(name).connect(receive, sender="other")
        try:
            assert not observability.are_sends_watched("work")
            assert observability.are_sends_watched("other")
            assert announcements.around(TOPIC, print) is print
            assert (reporter.wants("work"), reporter.wants("other")) == (False, True)
        finally:
            for name in ("sent", "started", "committed"):
                signal_of(name).disconnect(receive, sender="other")


def test_a_sender_that_is_no_name_is_refused() -> None:
    with pytest.raises(TypeError, match="the name of a topic, not <class"):
        signals.message_dead.connect(print, sender=Topic)


def test_nobody_listening_costs_nothing(broker: Any) -> None:
    def listen(message: Message) -> None:
        heard(message)

    heard, reporter = Heard(), announcements.Reporter()
    assert announcements.around(TOPIC, listen) is listen
    assert not reporter.wants("work")
    with Worker(broker, TOPIC, listen, watcher=reporter) as running:
        settled: list[int] = []
        tell = running.dispatcher._acks._notify_watcher

        def spy(settlement: PendingAcks, *rest: Any) -> None:
            settled.append(len(settlement.messages))
            tell(settlement, *rest)

        running.dispatcher._acks._notify_watcher = spy  # type: ignore[method-assign,assignment]
        send(broker, TOPIC, range(5))
        heard.wait(5)
        eventually(lambda: settled, "a commit")
    assert not any(settled)
    assert reporter._thread is None


def test_replaying_is_told_once_with_its_outcomes(broker: Any) -> None:
    operations = Operations(Actor("ann", "command"))
    send_messages("work", [1, 2, 3])
    for slot in range(2):
        members = [
            entry.member for entry in broker.list_messages(get_config().topic("work"), slot, "store").entries
        ]
        broker.bury(get_config().topic("work"), slot, members, "test")
    with told_of("replayed") as told:
        copies = operations.listing("work", "dead").copies
        operations.replay("work", [copies[0].id])
        assert list(operations.replay_all("work"))[-1].is_complete
        operations.replay("work", [copies[0].id])
        operations.delete("work", [copies[1].id], "live")
    calls = [(call["topic"], call["outcomes"], call["actor"]) for call in told.calls["replayed"]]
    assert calls == [("work", {"replayed": 1}, "ann"), ("work", {"replayed": 2}, "ann")]


def test_draining_in_a_test_tells_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from django_rmq import testing
    from django_rmq.worker import listener_registry

    clock = testing.clock_from_now()

    def listen(message: Message) -> None:
        if message.body == 2:
            raise ValueError

    name = f"drained-{uuid.uuid4().hex[:8]}"
    rmq = {"BROKER": "memory", "TOPICS": {name: {**KIND, "SLOTS": 1, "MAX_RETRIES": 0}}}
    monkeypatch.setattr(listener_registry, "autodiscover", lambda: None)
    found = {name: listener_registry.Listener(name, listen, None, "here:1", "here.listen")}
    monkeypatch.setattr(listener_registry, "listeners", lambda: found)
    with override_settings(RMQ=rmq), testing.memory_broker(clock), told_of(*NAMES) as told:
        send_messages(name, [1, 2])
        clock.advance(1)
        testing.drain(raise_errors=False)
    assert sorted(told.bodies("started")) == [1, 2]
    assert (told.bodies("committed"), told.bodies("failed"), told.bodies("dead")) == ([1], [2], [2])
