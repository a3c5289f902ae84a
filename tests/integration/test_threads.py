"""Threads of a worker that die, hang or fork: nothing is held for ever, nothing runs twice at once, nothing is forged."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from django_rmq.core.clock import uptime
from django_rmq.core.consumer import Dispatcher, WorkerOptions, shared_notes, watchdog
from django_rmq.core.consumer.batch import Batch, BatchReport
from django_rmq.core.consumer.batch_run import NO_HOOKS, Hooks
from django_rmq.core.consumer.executor_pool import ExecutorPool, ExecutorThread
from django_rmq.core.consumer.heartbeat import Heartbeat
from django_rmq.core.consumer.mailbox import MaxRuntimeExceeded, WakeupSubscriber
from django_rmq.core.consumer.shared_notes import SPARE, SharedNotes, mark_of
from django_rmq.core.consumer.slots import ConsumedSlot
from django_rmq.core.consumer.watchdog import ThreadLost
from django_rmq.core.coordination import Worker as Identity
from django_rmq.core.coordination import topic_slots
from django_rmq.core.coordination.redis_coordinator import RedisCoordinator
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.testing import Clock
from tests.support.brokers import OracleBroker
from tests.support.workers import LONG, Heard, Listener, Worker, audit, eventually, live, send, total

# Threads die here as they would.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

MERGE = Topic("prices", TopicType.RANGE_MERGE, slots=4, time_range_ms=0, backoff=BackOff(0, 0))


@pytest.fixture
def broker() -> OracleBroker:
    return OracleBroker("m:")


class Poisoned(logging.Filter):
    """What a project's filter does that wants what only a request has."""

    def filter(self, record: logging.LogRecord) -> bool:
        raise AttributeError("there is no request")


@pytest.fixture
def poisoned() -> Iterator[None]:
    names = ("django_rmq.consumer", "django_rmq.coordination")
    poison = Poisoned()
    for name in names:
        logging.getLogger(name).addFilter(poison)
    yield
    for name in names:
        logging.getLogger(name).removeFilter(poison)


def worker_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("rmq-")}


@pytest.mark.parametrize("batch_size", [None, 10])
def test_a_log_filter_that_raises_ends_no_thread(
    broker: Any, poisoned: None, batch_size: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    topic = replace(MERGE, max_retries=1)

    def listener(argument: Any) -> None:
        for message in argument if isinstance(argument, list) else [argument]:
            if message.body == 3:
                raise ValueError("three")

    others = worker_threads()
    with Worker(broker, topic, listener, batch_size=batch_size) as worker:
        worker.asleep()
        before = worker_threads()
        assert len(before - others) == 4
        send(broker, topic, range(20))
        eventually(lambda: live(broker, topic) == 0, "the end of all")
        assert worker_threads() == before
    assert (total(broker, topic, "committed"), total(broker, topic, "expired")) == (19, 0)
    assert "cannot write this log record" in capfd.readouterr().err


class BadMeta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError("a metaclass that fails")


class Nameless(Exception, metaclass=BadMeta):
    def _fail(self) -> type:
        raise RuntimeError("an error that does not say what it is")

    __class__ = property(_fail)


@pytest.mark.parametrize("batch_size", [None, 10])
def test_an_error_whose_class_fails_is_a_failure_like_any_other(broker: Any, batch_size: int | None) -> None:
    topic = replace(MERGE, max_retries=1)

    def listener(argument: Any) -> None:
        for message in argument if isinstance(argument, list) else [argument]:
            if message.body == 3:
                raise Nameless

    send(broker, topic, range(20))
    with Worker(broker, topic, listener, batch_size=batch_size):
        eventually(lambda: live(broker, topic) == 0, "the end of all")
    assert (total(broker, topic, "committed"), total(broker, topic, "expired")) == (19, 0)
    assert sum(ledger.dead for ledger in audit(broker, topic)) == 1


def test_what_a_thread_fails_at_outside_a_listener_is_reported_before_it_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ExecutorThread, "_call_listener", fail)
    monkeypatch.setattr("django_rmq.core.consumer.executor_pool.logger.exception", fail)
    inbox: SimpleQueue[Any] = SimpleQueue()
    thread = ExecutorThread(0, inbox, NO_HOOKS)
    messages = [Message(MERGE, 0, 1, Delivery(b"%d" % i, 1.0, 16)) for i in range(3)]
    batch = Batch(ConsumedSlot(MERGE, 0, 0), Listener("prices", print), 1, messages, uptime())
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    thread.put(batch)
    thread.start()
    thread.join(LONG)
    assert thread.is_dead
    assert thread.current is None
    found = inbox.get_nowait()
    assert isinstance(found, BatchReport)
    assert (found.last, found.released) == (True, [b"1", b"2"]), "the first one counts as begun"


def dying_once(monkeypatch: pytest.MonkeyPatch, begun: int) -> threading.Event:
    """The first executor thread that gets a batch dies with it, after it has begun so many messages."""
    died = threading.Event()
    run_batch = ExecutorThread._run_batch

    def die(thread: ExecutorThread, batch: Batch) -> None:
        if died.is_set():
            run_batch(thread, batch)
            return
        died.set()
        batch.begun = begun
        raise SystemExit

    monkeypatch.setattr(ExecutorThread, "_run_batch", die)
    return died


@pytest.mark.slow
@pytest.mark.parametrize("begun", [0, 1])
@pytest.mark.parametrize("serial", [True, False])
def test_a_dead_thread_is_replaced_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, serial: bool, begun: int
) -> None:
    clock, topic, heard = Clock(), replace(MERGE, serial=serial), Heard()
    broker = OracleBroker("m:", clock)
    send(broker, topic, range(40))
    died = dying_once(monkeypatch, begun)
    with Worker(broker, topic, heard, threads=1, poll_seconds=0.2) as worker:
        assert died.wait(LONG)
        worker.asleep()
        # What had begun times out.
        clock.advance(topic.timeout + 1)
        heard.wait(40)
        worker.asleep()
        assert worker.dispatcher.thread_watch.is_whole
        assert not worker.dispatcher._in_flight.batches
        assert worker.dispatcher._in_flight.load == pytest.approx([0.0])
    assert Counter(heard.bodies) == Counter(range(40))
    assert total(broker, topic, "expired") == begun, "only what had begun is charged"
    assert "has stopped working and was replaced" in caplog.text


def test_a_batch_of_a_dead_thread_is_not_extended(broker: Any) -> None:
    extended: list[object] = []
    monitored: Any = OracleBroker()

    def note(call: object) -> list[str]:
        extended.append(call)
        return ["ok"]

    monitored.run = note
    thread = ExecutorThread(0, SimpleQueue(), NO_HOOKS)
    message = Message(MERGE, 0, 1, Delivery(b"1", 1.0, 16))
    taken_at = uptime() - MERGE.timeout / 2
    batch = Batch(ConsumedSlot(MERGE, 0, 0), Listener("prices", print), 1, [message], taken_at)
    batch.thread = thread
    heartbeat = Heartbeat(monitored, [MERGE], lambda: [batch], watchdog.CallWatch(lambda _: None))
    thread.start()
    heartbeat.beat()
    assert len(extended) == 1
    batch.confirmed -= MERGE.timeout / 2
    thread.stop()
    thread.join(LONG)
    heartbeat.beat()
    assert len(extended) == 1


@pytest.mark.slow
def test_a_dead_heartbeat_is_replaced(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = replace(MERGE, slots=1)
    heard, died, extended = Heard(), threading.Event(), threading.Event()
    beat, extend = Heartbeat.beat, Heartbeat._extend

    def die(heartbeat: Heartbeat) -> None:
        # A worker of an earlier test may have left a heartbeat that goes on.
        if heartbeat is first:
            died.set()
            raise SystemExit
        beat(heartbeat)

    def note(heartbeat: Heartbeat, due: list[Batch]) -> None:
        extend(heartbeat, due)
        extended.set()

    def listener(message: Message) -> None:
        heard(message)
        assert extended.wait(LONG)

    send(broker, topic, ["x"])
    worker = Worker(broker, topic, listener, burst=True)
    watched = worker.dispatcher._background._heartbeat
    first = watched.thread
    monkeypatch.setattr(Heartbeat, "beat", die)
    monkeypatch.setattr(Heartbeat, "_extend", note)
    with worker:
        heard.wait()
        eventually(lambda: watched.thread is not first, "another heartbeat")
        watched.thread.look_everywhere()
        worker.join()
    assert died.is_set()
    [ledger] = audit(broker, topic)
    assert (heard.bodies, ledger["committed"], ledger["expired"]) == (["x"], 1, 0)


def test_a_dead_wake_up_thread_is_replaced(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, died = Heard(), threading.Event()
    run = WakeupSubscriber.run

    def die(listening: WakeupSubscriber) -> None:
        if not died.is_set():
            died.set()
            listening.subscribed.set()
            raise SystemExit
        run(listening)

    monkeypatch.setattr(WakeupSubscriber, "run", die)
    with Worker(broker, MERGE, heard, poll_seconds=60) as worker:
        worker.asleep()
        assert died.is_set()
        send(broker, MERGE, range(4))
        # Otherwise they are found by the next poll.
        heard.wait(4, LONG / 2)


def test_a_coordinator_goes_on_when_its_threads_have_died(broker: Any) -> None:
    owned: set[tuple[str, int]] = set()
    deaths = iter([True])

    def own(slots: Any) -> None:
        if next(deaths, False):
            raise SystemExit
        owned.update(slots)

    worker = Identity("a" * 32, "host", os.getpid(), time.time(), 1, topic_slots([MERGE]))
    coordinator = RedisCoordinator(broker, worker, own, owned.difference_update, session_seconds=LONG)
    coordinator.start()
    try:
        eventually(lambda: not coordinator.is_alive(), "the death of the thread that tells")
        coordinator.revive()
        assert coordinator.is_alive()
        assert coordinator.wait_settled(LONG)
        assert len(owned) == MERGE.slots
    finally:
        coordinator.stop(LONG)
    assert not owned
    assert coordinator.is_alive(), "what was stopped needs no thread"


def test_a_worker_that_cannot_replace_a_thread_is_not_whole_and_ends(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(watchdog, "GIVE_UP_SECONDS", 0.5)
    send(broker, MERGE, range(40))
    died = dying_once(monkeypatch, 0)
    seen: list[bool] = []
    start = ExecutorThread.start

    def no_more(thread: ExecutorThread) -> None:
        if died.is_set():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(ExecutorThread, "start", no_more)

    def beat() -> None:
        seen.append(worker.dispatcher.thread_watch.is_whole)

    worker: Worker = Worker(broker, MERGE, Heard(), threads=1, poll_seconds=0.05, beat=beat)
    with pytest.raises(ThreadLost, match="can't start new thread"), worker:
        worker.join()
    assert seen[0]
    assert not seen[-1]
    assert total(broker, MERGE, "released") >= 1
    assert sum(ledger.prepare for ledger in audit(broker, MERGE)) == 0, "nothing is held"


def test_a_successor_shares_no_marks_with_a_thread_that_hangs(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_notes, "MARKS", 4)
    topic = replace(MERGE, slots=8, timeout=30, max_runtime=0.3, prefetch=1)
    kept = SharedNotes(1)
    release, last_begun, end = threading.Event(), threading.Event(), threading.Event()
    order: list[Message] = []

    def listener(message: Message) -> None:
        order.append(message)
        if len(order) == 1:
            assert release.wait(LONG)
        elif len(order) == 5:
            # The place of the first one in a ring of four.
            last_begun.set()
            assert end.wait(LONG)

    send(broker, topic, range(40))
    with Worker(broker, topic, listener, threads=1, notes=kept, poll_seconds=0.1) as worker:
        assert last_begun.wait(LONG)
        hung, running = order[0], order[4]
        assert kept.begun()[_mark(running)] is False
        release.set()
        eventually(lambda: _committed(broker, topic, hung), "the end of the listener that hung")
        assert kept.begun()[_mark(running)] is False, "it runs, whatever others write"
        end.set()
        worker.dispatcher.stop()
    assert worker.dispatcher._in_flight.load == pytest.approx([0.0])


def _mark(message: Message) -> int:
    return mark_of(message.topic.name, message.slot, message.receipt, message.delivery.member)


def _committed(broker: Any, topic: Topic, message: Message) -> bool:
    members = [entry.member for entry in broker.list_messages(topic, message.slot, "prepare").entries]
    return message.delivery.member not in members


def test_marks_of_threads_that_hang_are_used_again_when_these_have_ended() -> None:
    kept = SharedNotes(1)
    crew = ExecutorPool(1, SimpleQueue(), NO_HOOKS, kept)
    hung: list[tuple[Any, threading.Event]] = []
    crew.threads[0].start()

    def hang() -> None:
        go, begun = threading.Event(), threading.Event()

        def listener(_: Message) -> None:
            begun.set()
            assert go.wait(LONG)

        message = Message(MERGE, 0, 1, Delivery(b"1", 1.0, 16))
        thread = crew.threads[0]
        thread.put(Batch(ConsumedSlot(MERGE, 0, 0), Listener("prices", listener), 1, [message], uptime()))
        assert begun.wait(LONG)
        thread.hangs = True
        assert not crew.has_live_thread(0)
        hung.append((thread, go))

    try:
        for _ in range(SPARE):
            hang()
            crew.replace_thread(0)
            assert crew.has_live_thread(0)
        hang()
        said = f"{SPARE} listeners that exceeded MAX_RUNTIME are still running"
        with pytest.raises(RuntimeError, match=said):
            crew.replace_thread(0)
        assert len({id(thread.marks) for thread, _ in hung}) == SPARE + 1
        crew.free_marks()
        with pytest.raises(RuntimeError, match=said):
            crew.replace_thread(0)
        first, go = hung[0]
        go.set()
        first.join(LONG)
        crew.free_marks()
        crew.replace_thread(0)
        assert crew.threads[0].marks is first.marks
    finally:
        for _, go in hung:
            go.set()
        crew.threads[0].stop()


@pytest.fixture
def shut(broker: Any) -> Dispatcher:
    """A dispatcher whose threads do not run, with a slot in which a listener has begun and will not return."""
    topic = replace(MERGE, slots=1)
    listener = Listener(topic.name, lambda message: None)
    made = Dispatcher(broker, [topic], {topic.name: listener}, WorkerOptions(threads=1))
    made.own([(topic.name, 0)])
    made._mailbox.process_items()
    send(broker, topic, ["hangs"])
    while made._turn():
        pass
    [batch] = made._in_flight.batches.values()
    thread: Any = batch.thread
    thread.withdraw(batch)
    thread.current, batch.begun = batch, 1
    send(broker, topic, ["next"])
    return made


def settle(dispatcher: Dispatcher) -> None:
    while dispatcher._turn():
        pass


@pytest.mark.parametrize("is_lost", [True, False])
def test_nothing_begins_in_a_slot_that_is_shut_for_a_listener_that_does_not_return(
    broker: Any, shut: Dispatcher, is_lost: bool
) -> None:
    [batch] = shut._in_flight.batches.values()
    slot = batch.slot
    shut._schedule.make_ready(slot)
    trip = shut._round_trips.send()
    assert trip is not None
    assert list(trip.plan.slots) == [slot]
    if is_lost:
        replies = trip.pipeline.receive()
        assert replies[-1].status == "ok"
        shut._round_trips.lost(trip)
        assert slot.is_uncertain
        shut._replacer.replace_hung_thread(MaxRuntimeExceeded(batch))
        settle(shut)
        assert not slot.is_uncertain, "it was asked what was handed out"
    else:
        shut._replacer.replace_hung_thread(MaxRuntimeExceeded(batch))
        shut._round_trips.receive(trip)
        settle(shut)
    assert list(shut._in_flight.batches.values()) == [batch]
    [ledger] = audit(broker, batch.topic)
    assert (ledger.prepare, ledger.store, ledger["released"]) == (1, 1, 1)
    # When the listener returns at last, the slot goes on.
    shut._router.finished(BatchReport(batch, [b'"hangs"'], [], [], 5.0, True))
    settle(shut)
    [following] = shut._in_flight.batches.values()
    assert [message.body for message in following.messages] == ["next"]


def test_a_call_that_has_ended_when_it_is_given_up_shuts_no_slot(shut: Dispatcher) -> None:
    [batch] = shut._in_flight.batches.values()
    shut._router.finished(BatchReport(batch, [b'"hangs"'], [], [], 5.0, True))
    # The thread has reported the end, and knows the batch until its hooks are done.
    shut._replacer.replace_hung_thread(MaxRuntimeExceeded(batch))
    assert batch.slot.blocked_by is None


def test_of_a_serial_slot_the_older_batch_runs_first_whatever_their_heads() -> None:
    topic = replace(MERGE, type=TopicType.PRIORITY, time_range_ms=None)
    here, there = ConsumedSlot(MERGE, 0, 0), ConsumedSlot(MERGE, 1, 0)
    seen: list[tuple[int, int]] = []
    listener = Listener("prices", lambda m: seen.append((m.slot, m.receipt)))
    thread = ExecutorThread(0, SimpleQueue(), NO_HOOKS)
    for slot, receipt, head in ((here, 915, 100.0), (there, 7, 200.0), (here, 916, 300.0)):
        given = Message(topic, slot.number, receipt, Delivery(b"1", head, 16))
        thread.put(Batch(slot, listener, receipt, [given], uptime()))
    thread.stop()
    thread.start()
    thread.join(LONG)
    assert seen == [(0, 915), (0, 916), (1, 7)]


def test_receipts_of_a_slot_rise_while_priorities_overtake(broker: Any) -> None:
    topic = Topic("renders", TopicType.PRIORITY, slots=2, prefetch=4)
    heard = Heard()
    receipts: dict[int, list[int]] = {0: [], 1: []}

    def listener(message: Message) -> None:
        receipts[message.slot].append(message.receipt)
        heard(message)

    with Worker(broker, topic, listener, threads=1):
        for i in range(600):
            send(broker, topic, [i], priority=17 + i * 7919 % 1000)
        heard.wait(600)
    assert all(found == sorted(found) for found in receipts.values())


@pytest.mark.parametrize("how", ["returns", "raises", "exits"])
@pytest.mark.parametrize("batch_size", [None, 10])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_listener_that_forks_and_returns_in_the_child_ends_it(
    broker: Any, how: str, batch_size: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    topic = replace(MERGE, slots=1)
    here = os.getpid()
    readable, writable = os.pipe()
    children: list[int] = []
    ended: list[int] = []

    def listener(_: Any) -> None:
        if os.getpid() != here:
            os.write(writable, b"again\n")
        elif not children:
            children.append(os.fork())
            if children[-1] == 0:
                os.write(writable, b"forked\n")
                if how == "raises":
                    raise ValueError("in the copy")
                if how == "exits":
                    raise SystemExit(5)

    send(broker, topic, range(5))
    try:
        with Worker(broker, topic, listener, batch_size=batch_size, threads=1, hooks=Hooks()) as worker:
            eventually(lambda: total(broker, topic, "committed") == 5, "the end of all")
            worker.asleep()

            def has_ended() -> bool:
                pid, status = os.waitpid(children[0], os.WNOHANG)
                ended.extend([os.waitstatus_to_exitcode(status)] if pid else [])
                return bool(pid)

            eventually(has_ended, "the end of the child")
        assert ended == [{"returns": 0, "raises": 1, "exits": 5}[how]]
        os.close(writable)
        assert os.read(readable, 1000) == b"forked\n", "nothing else ran in it"
    finally:
        if children and not ended:
            os.kill(children[0], signal.SIGKILL)
            os.waitpid(children[0], 0)
        os.close(readable)
    said = capfd.readouterr().err
    assert ("left the listener without exiting" in said) == (how != "exits")
    assert ("in the copy" in said) == (how == "raises")
