"""Stopping what runs: messages that somebody cancels, and listeners that exceed HARD_TIMEOUT."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from django_rmq.core.clock import uptime
from django_rmq.core.consumer import heartbeat, watchdog
from django_rmq.core.consumer.async_executor import AsyncExecutor
from django_rmq.core.consumer.batch import Batch
from django_rmq.core.consumer.mailbox import HardTimeoutExceeded
from django_rmq.core.consumer.shared_notes import SharedNotes
from django_rmq.core.consumer.slots import ConsumedSlot
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.keys import read_wakeup
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.worker_processes.child_process import HARD_TIMEOUT_EXCEEDED
from django_rmq.core.worker_processes.crash_recovery import settle
from django_rmq.exceptions import Cancelled
from tests.support.workers import LONG, Listener, Worker, audit, eventually, live, send, total, work_off

TOPIC = Topic(
    "work", TopicType.RANGE_MERGE, slots=1, time_range_ms=1, timeout=60, max_retries=3, backoff=BackOff(0, 0)
)
ONE = b'{"n":0}'


def numbered(count: int, first: int = 0) -> list[dict[str, int]]:
    return [{"n": n} for n in range(first, first + count)]


def ends(broker: Any, *topics: Topic) -> dict[str, int]:
    """Return how many deliveries have ended in each way."""
    names = ("committed", "cancelled", "failed", "overran", "expired", "released")
    found = {name: sum(total(broker, topic, name) for topic in topics) for name in names}
    return {name: count for name, count in found.items() if count}


def test_a_sync_listener_sees_that_it_is_cancelled_and_stops(broker: Any) -> None:
    begun, seen = threading.Event(), list[float]()

    def listener(message: Message) -> None:
        begun.set()
        before = time.monotonic()
        while not message.cancelled:
            time.sleep(0.01)
        seen.append(time.monotonic() - before)
        raise Cancelled

    send(broker, TOPIC, numbered(1))
    with Worker(broker, TOPIC, listener, threads=1):
        assert begun.wait(LONG)
        assert broker.cancel(TOPIC, 0, [ONE]) == ["running"]
        eventually(lambda: live(broker, TOPIC) == 0, "the end")
    # The news comes at once, not only when the time-out is extended, after 20 s.
    assert len(seen) == 1 and seen[0] < 19
    assert ends(broker, TOPIC) == {"cancelled": 1}
    audit(broker, TOPIC)


@pytest.mark.parametrize("cause", ["cancel", "HARD_TIMEOUT"])
def test_a_coroutine_that_returns_although_it_was_cancelled_is_done(broker: Any, cause: str) -> None:
    begun = threading.Event()
    topic = TOPIC if cause == "cancel" else replace(TOPIC, hard_timeout=0.3)

    async def listener(message: Message) -> None:
        begun.set()
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            pass

    send(broker, topic, numbered(1))
    with Worker(broker, topic, listener, threads=1):
        assert begun.wait(LONG)
        if cause == "cancel":
            broker.cancel(topic, 0, [ONE])
        eventually(lambda: live(broker, topic) == 0, "the end")
    assert ends(broker, topic) == {"committed": 1}


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_in_hand_and_has_not_begun_does_not_begin(broker: Any, is_async: bool) -> None:
    begun, goes_on, called = threading.Event(), threading.Event(), list[int]()

    def listener(message: Message) -> None:
        called.append(message.body["n"])
        begun.set()
        goes_on.wait(LONG)

    async def coroutine(message: Message) -> None:
        called.append(message.body["n"])
        begun.set()
        while not goes_on.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.01)

    send(broker, TOPIC, numbered(3))
    with Worker(broker, TOPIC, coroutine if is_async else listener, threads=1) as worker:
        assert begun.wait(LONG)
        [first] = called
        others = [b'{"n":%d}' % n for n in range(3) if n != first]
        broker.cancel(TOPIC, 0, others[:1])
        hand = worker.dispatcher._in_flight
        is_told = lambda: any(m.cancelled for b in hand.batches.values() for m in b.messages)  # noqa: E731
        if len(next(iter(hand.batches.values())).messages) > 1:
            eventually(is_told, "being told")
        goes_on.set()
        eventually(lambda: live(broker, TOPIC) == 0, "the end")
    assert len(called) == 2
    assert total(broker, TOPIC, "committed") == 2
    assert total(broker, TOPIC, "cancelled") + total(broker, TOPIC, "removed") == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_in_a_list_each_message_is_told_by_itself(broker: Any, is_async: bool) -> None:
    """A coroutine is cancelled only if all of its list is."""
    begun, seen = threading.Event(), list[list[bool]]()

    def listener(messages: list[Message]) -> None:
        begun.set()
        while not any(message.cancelled for message in messages):
            time.sleep(0.01)
        seen.append(sorted(message.cancelled for message in messages))
        for message in messages:
            if message.cancelled:
                message.retry("cancelled")

    async def coroutine(messages: list[Message]) -> None:
        begun.set()
        while not any(message.cancelled for message in messages):  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.01)
        seen.append(sorted(message.cancelled for message in messages))
        await asyncio.sleep(LONG)

    send(broker, TOPIC, numbered(2))
    with Worker(broker, TOPIC, coroutine if is_async else listener, threads=1, batch_size=10):
        assert begun.wait(LONG)
        broker.cancel(TOPIC, 0, [ONE])
        if is_async:
            eventually(lambda: len(seen) == 1, "the first")
            broker.cancel(TOPIC, 0, [b'{"n":1}'])
        eventually(lambda: live(broker, TOPIC) == 0, "the end")
    assert seen == [[False, True]]
    assert ends(broker, TOPIC) == ({"cancelled": 2} if is_async else {"cancelled": 1, "committed": 1})


# Without a new subscription the listener learns of it when the time-out is extended, after 20 s.
@pytest.mark.parametrize(("when", "seconds"), [("it extends", LONG), ("it subscribes again", 19)])
def test_a_worker_that_missed_the_news_is_told(
    broker: Any, monkeypatch: pytest.MonkeyPatch, when: str, seconds: float
) -> None:
    begun = threading.Event()

    def listener(message: Message) -> None:
        begun.set()
        while not message.cancelled:
            time.sleep(0.01)
        raise Cancelled

    monkeypatch.setattr(heartbeat.Heartbeat, "look_again", lambda *args: None)
    send(broker, TOPIC, numbered(1))
    with Worker(broker, TOPIC, listener, threads=1) as worker:
        assert begun.wait(LONG)
        broker.cancel(TOPIC, 0, [ONE])
        if when == "it extends":
            [batch] = worker.dispatcher._in_flight.batches.values()
            batch.confirmed -= TOPIC.timeout / 3
        else:
            worker.dispatcher._background.renew()
        eventually(lambda: live(broker, TOPIC) == 0, "the end", seconds)
    assert ends(broker, TOPIC) == {"cancelled": 1}


def taken(broker: Any, count: int) -> Batch:
    """Return a batch as a worker builds it, which is not yet in its hand."""
    send(broker, TOPIC, numbered(count))
    time.sleep(0.02)  # a send is due within TIME_RANGE, 1 ms
    at, found = uptime(), broker.prepare(TOPIC, 0, "me", None, count)
    messages = [Message(TOPIC, 0, found.receipt, each) for each in found.deliveries]
    return Batch(ConsumedSlot(TOPIC, 0, 0), Listener("work", print), found.receipt, messages, at)


def test_news_that_comes_before_its_batch_is_in_hand_is_kept_for_it(broker: Any) -> None:
    """Between the take and the hand are a round trip and the work of the dispatcher."""
    hand: list[Batch] = []
    beat = heartbeat.Heartbeat(broker, [TOPIC], lambda: hand, watchdog.CallWatch(lambda batch: None))
    batch = taken(broker, 2)
    broker.cancel(TOPIC, 0, [ONE])
    beat.look_again(TOPIC.name, 0)
    beat.beat()
    hand.append(batch)
    beat.beat()
    assert {message.body["n"]: message.cancelled for message in batch.messages} == {0: True, 1: False}
    confirmed = batch.confirmed
    beat.beat()
    assert batch.confirmed == confirmed > batch.queued


def test_what_is_abandoned_is_not_extended_by_news(broker: Any) -> None:
    """After MAX_RUNTIME a message is left to its time-out, although it is cancelled as well."""
    batch = taken(broker, 1)
    batch.abandoned = True
    beat = heartbeat.Heartbeat(broker, [TOPIC], lambda: [batch], watchdog.CallWatch(lambda batch: None))
    broker.cancel(TOPIC, 0, [ONE])
    beat.look_again(TOPIC.name, 0)
    beat.look_everywhere()
    beat.beat()
    assert batch.confirmed < batch.queued


def test_a_coroutine_that_learns_by_extending_is_cancelled_once(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker hears of it later than itself, and more than once."""
    seen: list[str] = []
    tell = heartbeat.Heartbeat.look_again
    monkeypatch.setattr(heartbeat.Heartbeat, "look_again", lambda *args: None)

    async def listener(message: Message) -> None:
        beat = worker.dispatcher._background._heartbeat.thread
        broker.cancel(TOPIC, 0, [ONE])
        try:
            await message.aextend()
            seen.append(f"cancelled: {message.cancelled}")
            tell(beat, TOPIC.name, 0)
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            tell(beat, TOPIC.name, 0)
            await asyncio.sleep(0.5)
            seen.append("cleaned up")
            raise

    worker = Worker(broker, TOPIC, listener, threads=1)
    with worker:
        send(broker, TOPIC, numbered(1))
        eventually(lambda: total(broker, TOPIC, "prepared") == 1 and live(broker, TOPIC) == 0, "the end")
    assert seen == ["cancelled: True", "cleaned up"]
    assert ends(broker, TOPIC) == {"cancelled": 1}


def test_a_listener_that_fails_before_its_worker_has_heard_ends_as_cancelled_for_all(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis answers the failure, so no signal says that a message has failed or died."""
    told: list[tuple[str, bool]] = []
    monkeypatch.setattr(heartbeat.Heartbeat, "look_again", lambda *args: None)

    class Watcher:
        def wants(self, topic: str) -> bool:
            return True

        def ended(self, committed: list[Any], failed: list[tuple[Message, Failure]], began_ns: int) -> None:
            told.extend((failure.kind, message.cancelled) for message, failure in failed)

    def listener(message: Message) -> None:
        broker.cancel(TOPIC, 0, [ONE])
        raise ValueError("for another reason")

    send(broker, TOPIC, numbered(1))
    with Worker(broker, TOPIC, listener, threads=1, watcher=Watcher()):
        eventually(lambda: told, "the end")
    assert told == [("cancelled", False)]
    assert ends(broker, TOPIC) == {"cancelled": 1}


def test_extend_tells_as_well_and_the_delivery_stays_valid(broker: Any) -> None:
    told: list[tuple[bool, bool]] = []

    def listener(message: Message) -> None:
        broker.cancel(TOPIC, 0, [ONE])
        told.append((message.extend(), message.cancelled))

    send(broker, TOPIC, numbered(1))
    work_off(broker, TOPIC, listener, threads=1)
    assert told == [(True, True)]


def test_a_worker_asks_only_about_what_it_has_in_hand_of_that_slot(broker: Any) -> None:
    """Nothing is asked on topics and in slots of which nothing is cancelled."""
    asked: list[int] = []
    beat = heartbeat.Heartbeat(broker, [TOPIC], list, watchdog.CallWatch(lambda batch: None))
    beat._extend = lambda due: asked.append(len(due))  # type: ignore[method-assign]
    beat.look_again(TOPIC.name, 0)
    beat.beat()
    assert asked == []
    assert read_wakeup(-1048580) == ("look_again", 3)


def test_a_coroutine_that_runs_for_too_long_is_cancelled_and_tried_again(
    broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    topic, calls = replace(TOPIC, hard_timeout=0.3), list[int]()

    async def listener(message: Message) -> None:
        calls.append(message.retries_left)
        assert not message.cancelled
        if len(calls) == 1:
            await asyncio.sleep(LONG)

    send(broker, topic, numbered(1))
    with Worker(broker, topic, listener, threads=1) as worker:
        eventually(lambda: live(broker, topic) == 0, "the end")
        assert not worker.dispatcher.exceeded_hard_timeout
    assert calls == [3, 2]
    assert ends(broker, topic) == {"committed": 1, "failed": 1, "overran": 1}
    assert "longer than HARD_TIMEOUT; it is cancelled" in caplog.text and "asyncio.sleep" in caplog.text
    assert "HardTimeout: the listener ran longer than 0.3 s" in caplog.text


def test_a_coroutine_that_blocks_the_loop_costs_only_itself(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in which it keeps the others from going on is not theirs."""
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", LONG)
    topic = replace(TOPIC, slots=8, hard_timeout=2.0)
    calls, blocked = list[int](), threading.Event()

    async def listener(message: Message) -> None:
        calls.append(message.body["n"])
        if message.retries_left < 3:
            return
        if message.body["n"] == 0:
            while len(calls) < 6:  # noqa: ASYNC110 - the others begin
                await asyncio.sleep(0.01)
            time.sleep(3)  # noqa: ASYNC251 - it is about this
            blocked.set()
            await asyncio.sleep(LONG)
        while not blocked.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # the loop gives a sign of life
        worker.dispatcher._background._heartbeat.thread.beat()

    send(broker, topic, numbered(6))
    worker = Worker(broker, topic, listener, threads=1)
    with worker:
        eventually(lambda: live(broker, topic) == 0, "the end")
    assert ends(broker, topic) == {"committed": 6, "failed": 1, "overran": 1}


def test_an_async_list_that_runs_for_too_long_is_tried_one_by_one(broker: Any) -> None:
    topic, calls = replace(TOPIC, hard_timeout=0.5), list[int]()

    async def listener(messages: list[Message]) -> None:
        calls.append(len(messages))
        if any(message.body["n"] == 1 for message in messages) and messages[0].retries_left == 3:
            await asyncio.sleep(LONG)

    send(broker, topic, numbered(3))
    work_off(broker, topic, listener, threads=1, batch_size=10)
    assert ends(broker, topic) == {"committed": 3, "failed": 1, "overran": 1}
    assert calls == [3, 1, 1, 1, 1]


def replaced(
    broker: Any, topics: list[Topic], listeners: dict[str, Callable[[Message], Any]], notes: SharedNotes
) -> Worker:
    """Run a worker until a listener that exceeds HARD_TIMEOUT ends it, as its process does."""
    worker = Worker(broker, topics, listeners, threads=2, notes=notes, shutdown_timeout=2.0)
    notes.owner = worker.dispatcher.owner
    with worker:
        # Before its listener ends by itself.
        eventually(lambda: worker.dispatcher.exceeded_hard_timeout, "running for too long", LONG / 2)
        eventually(lambda: not worker.thread.is_alive(), "the end")
    notes.announce(HARD_TIMEOUT_EXCEEDED)
    return worker


@pytest.mark.parametrize("is_blocking_the_loop", [False, True])
def test_a_thread_that_runs_for_too_long_ends_its_worker_and_only_its_message_is_charged(
    broker: Any, monkeypatch: pytest.MonkeyPatch, is_blocking_the_loop: bool
) -> None:
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.2)
    hangs = replace(TOPIC, name="hangs", hard_timeout=0.5)
    works = replace(TOPIC, name="works", slots=4)
    slow = replace(TOPIC, name="slow", slots=1)
    notes, release, done = SharedNotes(3), threading.Event(), list[int]()

    def hanging(message: Message) -> None:
        release.wait(LONG)

    async def blocking(message: Message) -> None:
        release.wait(LONG)

    send(broker, hangs, numbered(3))
    send(broker, works, numbered(20))
    send(broker, slow, numbered(2))
    listeners: dict[str, Callable[[Message], Any]] = {
        "hangs": blocking if is_blocking_the_loop else hanging,
        "works": lambda message: done.append(message.body["n"]),
        "slow": hanging,
    }
    replaced(broker, [hangs, works, slow], listeners, notes)
    settled = settle(broker, [hangs, works, slow], notes)
    release.set()
    assert settled.count("overran") == 1 and settled.count("charged") == 0
    assert (total(broker, hangs, "failed"), total(broker, hangs, "overran")) == (1, 1)
    assert [total(broker, each, name) for each in (works, slow) for name in ("failed", "expired")] == [0] * 4
    assert live(broker, hangs) == 3 and live(broker, slow) == 2
    assert live(broker, works) + len(set(done)) == 20
    for topic in (hangs, works, slow):
        audit(broker, topic)


def test_a_listener_that_holds_the_lock_of_a_log_handler_ends_its_worker_all_the_same(broker: Any) -> None:
    # As a handler does that sends its lines over a network, while it waits for an answer.
    topic, release, handler = replace(TOPIC, hard_timeout=0.3), threading.Event(), logging.StreamHandler()

    def hanging(message: Message) -> None:
        handler.acquire()
        release.wait(LONG)
        handler.release()

    logger = logging.getLogger("django_rmq.consumer")
    logger.addHandler(handler)
    try:
        send(broker, topic, numbered(1))
        notes = SharedNotes(2)
        replaced(broker, [topic], {"work": hanging}, notes)
        assert settle(broker, [topic], notes).count("overran") == 1
    finally:
        logger.removeHandler(handler)
        release.set()


def test_if_the_process_crashes_on_the_way_what_ran_is_charged_as_after_any_crash(broker: Any) -> None:
    topic, notes, release = replace(TOPIC, slots=2, hard_timeout=0.5), SharedNotes(2), threading.Event()
    other = replace(TOPIC, name="other", slots=1)

    def hanging(message: Message) -> None:
        release.wait(LONG)

    send(broker, topic, numbered(1))
    send(broker, other, numbered(1))
    listeners = {"work": hanging, "other": hanging}
    worker = Worker(broker, [topic, other], listeners, threads=2, notes=notes, shutdown_timeout=1.0)
    notes.owner = worker.dispatcher.owner
    with worker:
        eventually(lambda: not worker.thread.is_alive(), "the end")
    settled = settle(broker, [topic, other], notes)
    release.set()
    assert (settled.count("overran"), settled.count("charged")) == (1, 1)


def test_until_its_process_has_ended_a_listener_keeps_its_message(broker: Any) -> None:
    """The heartbeat goes on after the dispatcher, so that nobody gets the message beside the listener that hangs."""
    topic, release = replace(TOPIC, hard_timeout=0.3), threading.Event()
    send(broker, topic, numbered(1))
    with Worker(broker, topic, lambda message: release.wait(LONG), threads=1) as worker:
        eventually(lambda: not worker.thread.is_alive(), "the end")
        [batch] = worker.dispatcher._in_flight.batches.values()
        confirmed, beat = batch.confirmed, worker.dispatcher._background._heartbeat.thread
        beat.look_everywhere()
        eventually(lambda: batch.confirmed > confirmed, "being extended", LONG / 2)
        assert not batch.stale
        assert broker.count(topic, 0).prepare == 1
    release.set()
    beat.stop()


def test_a_call_that_returns_before_its_worker_ends_for_it_costs_the_next_message_nothing(
    broker: Any,
) -> None:
    topic, calls, notes = replace(TOPIC, hard_timeout=LONG), list[int](), SharedNotes(2)
    begun: list[tuple[Batch, float]] = []

    def listener(message: Message) -> None:
        calls.append(message.body["n"])
        [batch] = worker.dispatcher._in_flight.batches.values()
        if len(calls) == 1:
            assert batch.call_began_at is not None
            begun.append((batch, batch.call_began_at))
        elif len(calls) == 2:
            # The dispatcher learns only now of the call before.
            worker.dispatcher._mailbox.put(HardTimeoutExceeded(*begun[0]))
            eventually(lambda: batch.halted, "reading the item")

    send(broker, topic, numbered(3))
    worker = Worker(broker, topic, listener, threads=1, notes=notes)
    with worker:
        eventually(lambda: live(broker, topic) == 0, "the end")
        assert not worker.dispatcher.exceeded_hard_timeout
    assert sorted(calls) == [0, 1, 2]
    assert ends(broker, topic) == {"committed": 3, "released": 1}


def test_a_coroutine_that_returns_while_its_stack_is_read_costs_the_next_message_nothing(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, calls = replace(TOPIC, hard_timeout=0.3), list[int]()
    stacks, second = threading.Event(), threading.Event()

    async def listener(message: Message) -> None:
        calls.append(message.body["n"])
        if len(calls) > 1:
            second.set()
            await asyncio.sleep(0.1)
        while not stacks.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def stack_of(executor: AsyncExecutor, batch: Batch) -> str:
        stacks.set()
        assert second.wait(LONG)
        return ""

    monkeypatch.setattr(AsyncExecutor, "stack_of", stack_of)
    send(broker, topic, numbered(2))
    with Worker(broker, topic, listener, threads=1):
        eventually(lambda: live(broker, topic) == 0, "the end")
    assert sorted(calls) == [0, 1]
    assert ends(broker, topic) == {"committed": 2}
