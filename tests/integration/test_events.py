"""The stream of events: what processes publish where EVENTS is on, how much at most, and who watches it."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_rmq import connections, observability, send_message, send_messages
from django_rmq.conf import get_config
from django_rmq.core.consumer import Hooks
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.monitoring import events
from django_rmq.core.monitoring.events import EventStream
from django_rmq.exceptions import NotPermitted, OperationRefused, ServerUnavailable
from django_rmq.message_ids import sealed_id
from django_rmq.observability import announcements
from django_rmq.operations import Actor, Operations, Permission
from tests.support.brokers import OracleBroker, project_on
from tests.support.workers import LONG, Worker, broker_on

TOPICS = {
    "work": {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": "1ms", "MAX_RETRIES": 0},
    "later": {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": 60},
}


@pytest.fixture(params=["redis", "cluster"])
def broker(request: pytest.FixtureRequest) -> Iterator[Any]:
    with ExitStack() as stack:
        broker = stack.enter_context(broker_on(request))
        stack.enter_context(override_settings(RMQ={"BROKER": "memory", "EVENTS": True, "TOPICS": TOPICS}))
        stack.enter_context(connections.replaced_broker(broker))
        yield broker
        connections.close()


class Watched:
    """What a subscriber has heard."""

    def __init__(self, broker: Any) -> None:
        self.subscription = broker.events()
        self.events: list[dict[str, Any]] = []

    def until(self, enough: Callable[[list[dict[str, Any]]], object]) -> list[dict[str, Any]]:
        end = time.monotonic() + LONG
        while not enough(self.events):
            assert time.monotonic() < end, self.events
            for payload in self.subscription.get(0.1):
                assert len(payload) < 2 * events.PAYLOAD_BYTES
                self.events += events.decode_events(payload)
        return self.events

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


@pytest.fixture
def watched(broker: Any) -> Iterator[Watched]:
    watching = Watched(broker)
    yield watching
    watching.subscription.close()


def test_sends_are_published_with_their_ids(watched: Watched) -> None:
    before = time.time() * 1000
    result = send_message("later", {"sku": 7})
    send_messages("later", [1, 2, 1])
    watched.until(lambda found: len(found) >= 3)
    events = [(event["event"], event["topic"], event["count"]) for event in watched.events]
    assert events == [("sent", "later", 1), ("sent", "later", 3), ("merged", "later", 1)]
    assert watched.events[0]["ids"] == [message_id(result.slot, b'{"sku":7}')]
    assert before - 1 <= watched.events[0]["at"] <= time.time() * 1000 + 1
    assert set(watched.events[0]) == {"event", "at", "topic", "count", "ids", "host", "pid"}


def test_what_workers_do_is_published(broker: Any, watched: Watched) -> None:
    def listen(message: Any) -> None:
        if message.body == 2:
            raise ValueError("two\nlines")

    topic, reporter = get_config().topic("work"), announcements.Reporter()
    send_messages("work", [1, 2])
    with Worker(broker, topic, listen, hooks=Hooks(around=announcements.around), watcher=reporter):
        watched.until(lambda found: {"committed", "dead"} <= {event["event"] for event in found})
    reporter.stop(LONG)
    counted = Counter(event["event"] for event in watched.events for _ in event["ids"])
    assert counted == {"sent": 2, "started": 2, "committed": 1, "failed": 1, "dead": 1}
    (dead,) = watched.of("dead")
    assert dead["errors"] == ["ValueError: two"]
    operations = Operations(Actor("ann", "command"))
    assert operations.get("work", dead["ids"][0])[0].state == "dead"
    operations.replay("work", dead["ids"])
    watched.until(lambda found: found[-1]["event"] == "replayed")
    assert (
        watched.events[-1] | {"outcomes": {"replayed": 1}, "actor": "ann", "count": 1} == watched.events[-1]
    )


def test_many_messages_are_several_events_in_few_payloads(watched: Watched) -> None:
    bodies = [f"{number:04}" for number in range(2_500)]
    send_messages("later", bodies)
    watched.until(lambda found: sum(event["count"] for event in found) >= 2_500)
    assert {event["count"] for event in watched.of("sent")} == {events.IDS}
    ids = [one for event in watched.of("sent") for one in event["ids"]]
    assert len(set(ids)) == 2_500


def test_a_long_member_is_named_by_its_sealed_digest(watched: Watched) -> None:
    result = send_message("later", "x" * 600)
    watched.until(len)
    (named,) = watched.events[0]["ids"]
    assert named == sealed_id("later", result.slot, result.member) and len(named) < 60


def test_events_of_a_redacted_topic_hold_nothing_of_its_messages(broker: Any) -> None:
    redacted = {"FORMATTER": {"later": "builtins.repr"}}
    with project_on(broker, BROKER="memory", EVENTS=True, TOPICS=TOPICS, ADMIN=redacted):
        watching = Watched(broker)
        result = send_message("later", {"card": 4111})
        watching.until(len)
        watching.subscription.close()
        assert watching.events[0]["ids"] == [sealed_id("later", result.slot, result.member)]
        connections.close()


def test_nothing_is_published_where_events_are_off(broker: Any) -> None:
    with project_on(broker, BROKER="memory", TOPICS=TOPICS):
        assert connections.events() is None
        assert not observability.are_sends_watched("work")
        with pytest.raises(OperationRefused, match="EVENTS"):
            Operations(Actor("ann", "command")).events()


def test_a_payload_of_another_program_hides_no_event_of_it() -> None:
    lines = [b"[" * 100_000, b"x", b"\xff", b'{"event":"sent","at":1}']
    assert events.decode_events(b"\n".join(lines)) == [{"event": "sent", "at": 1}]


def test_what_cannot_wait_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is slow, then away: what is noted meanwhile is bounded, and the rest is told as dropped."""
    monkeypatch.setattr(events, "WAITING", 10)
    began, goes_on = threading.Event(), threading.Event()
    answers: list[Exception | None] = [None, ServerUnavailable("away"), None]
    heard: list[dict[str, Any]] = []

    class Slow:
        def publish_events(self, payload: bytes) -> int:
            began.set()
            assert goes_on.wait(LONG)
            answer = answers.pop(0)
            if answer is not None:
                raise answer
            heard.extend(events.decode_events(payload))
            return 1

    stream = EventStream(Slow(), sealed_id)  # type: ignore[arg-type]
    stream.note("sent", "t", [(0, b"first")])
    assert began.wait(LONG)
    for _ in range(4):
        stream.note("sent", "t", [(0, b"m")] * 5)
    goes_on.set()
    stream.flush(LONG)
    stream.note("sent", "t", [(0, b"last")])
    stream.close(LONG)
    # Two batches found no room, and two were lost with the server.
    counts = [(event["event"], event["count"]) for event in heard]
    assert counts == [("sent", 1), ("dropped", 20), ("sent", 1)]


def test_what_was_noted_while_no_thread_could_start_is_published_by_the_next_one(
    broker: Any, watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert send_message("later", 1).ok
    assert caplog.text.count("can't start new thread") == 1
    assert send_message("later", 2).ok
    watched.until(lambda heard: sum(event["count"] for event in heard) == 2)


def test_a_stream_of_another_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = EventStream(OracleBroker("m:"), sealed_id)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    stream.close(0)
    assert not stream._is_closed


def test_nobody_waits_for_a_thread_that_makes_the_stream_as_it_may_be_gone_in_a_forked_process(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, streams = threading.Event(), threading.Event(), list[EventStream | None]()
    make = EventStream.__init__

    def make_slowly(stream: EventStream, *arguments: Any) -> None:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(LONG)
        make(stream, *arguments)

    monkeypatch.setattr(EventStream, "__init__", make_slowly)
    threads = [threading.Thread(target=lambda: streams.append(connections.events())) for _ in range(2)]
    threads[0].start()
    assert begun.wait(LONG)
    threads[1].start()
    threads[1].join(5)
    try:
        assert len(streams) == 1, "the second thread has a stream"
    finally:
        go_on.set()
        for thread in threads:
            thread.join()
    assert streams[0] is streams[1] is connections.events() is not None


def test_whoever_may_not_see_bodies_may_not_watch(broker: Any) -> None:
    with pytest.raises(NotPermitted, match="view_bodies"):
        Operations(Actor("ann", "rest", permits=lambda one: one is Permission.VIEW)).events()


def monitored(*arguments: str, act: Callable[[], object]) -> str:
    """What `rmqstats --events` prints of what `act` does."""
    output, failed = StringIO(), []

    def run() -> None:
        try:
            call_command("rmqstats", *arguments, stdout=output, no_color=True)
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    end = time.monotonic() + LONG
    while thread.is_alive():
        assert time.monotonic() < end, output.getvalue()
        # Whoever begins to listen misses what was before.
        act()
        thread.join(0.2)
    if failed:
        raise failed[0]
    return output.getvalue()


def test_rmqstats_prints_a_line_for_each_event(broker: Any) -> None:
    text = monitored("later", "--events", "--count", "1", act=lambda: send_message("later", 1))
    (line,) = text.splitlines()
    assert re.search(" later (sent|merged) 1 ", line) and message_id(1, b"1")[2:] in line
    told = monitored(
        "work", "--events", "--json", "--count", "1", act=lambda: [send_message(name, 1) for name in TOPICS]
    )
    assert json.loads(told)["topic"] == "work"


def test_an_event_shows_no_control_characters() -> None:
    from django_rmq.management.commands.rmqstats import _event_line

    line = _event_line({"event": "failed", "at": 0, "count": 1, "ids": ["a\x1b[2J"], "errors": ["b\nc"]})
    assert line.isprintable() and "b c" in line


def test_rmqstats_says_that_events_are_off(broker: Any) -> None:
    with project_on(broker, BROKER="memory", TOPICS=TOPICS), pytest.raises(CommandError, match="EVENTS"):
        call_command("rmqstats", "--events")


def test_failures_of_the_stream_never_reach_who_sends(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no thread can be started")

    monkeypatch.setattr(connections, "events", fails)
    assert send_message("later", 1).status == "stored"
    assert not observability.are_sends_watched("work")
    assert not announcements.Reporter().wants("work")
