"""A dispatcher at work, on a real Redis: outcomes, order, time, ownership."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from django_rmq.core import unserved_topics
from django_rmq.core.clock import uptime
from django_rmq.core.consumer import Dispatcher, WorkerOptions, capacity, executor_pool
from django_rmq.core.consumer import batch as in_flight
from django_rmq.core.consumer.heartbeat import Heartbeat
from django_rmq.core.consumer.mailbox import Wake
from django_rmq.core.consumer.shutdown import SETTLING_SECONDS
from django_rmq.core.consumer.slots import SlotState
from django_rmq.core.duties import DutyThread
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.keys import slot_keys, wake_channel
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.core.unserved_topics import UnservedTopics
from django_rmq.exceptions import Reject, Retry, SlotMoved
from django_rmq.testing import Clock
from tests.support.brokers import set_clock
from tests.support.workers import (
    LONG,
    Broker,
    Heard,
    HeldListener,
    Listener,
    Worker,
    audit,
    eventually,
    finish,
    live,
    send,
    total,
    turn_until_idle,
)

MERGE = Topic("prices", TopicType.RANGE_MERGE, slots=4, time_range_ms=0)
PRIORITY = Topic("renders", TopicType.PRIORITY, slots=1)
FIXED = Topic("orders", TopicType.FIXED_TIME, slots=4)
AT_ONCE = BackOff(0, 0)


def dead(broker: Any, topic: Topic) -> dict[bytes, tuple[str, bytes]]:
    """Member → reason and error of all that died."""
    found = {}
    for slot in range(topic.slots):
        for entry in broker.list_messages(topic, slot, "dead").entries:
            head, _, rest = entry.record.partition(b"\n")
            found[entry.member] = (head.split(b" ")[0].decode(), rest)
    return found


def foreign_send(broker: Any, topic: Topic, slot: int, member: bytes, score: float) -> None:
    """A plain ZADD, as a stranger does it: nobody is woken."""
    key = slot_keys(broker.prefix, topic.name, slot).store
    broker.client.zadd(key, {member: score})


def test_what_returns_is_committed_and_leaves_nothing(broker: Any) -> None:
    heard = Heard()
    send(broker, MERGE, range(500))
    worker = finish(Worker(broker, MERGE, heard, burst=True))
    assert sorted(heard.bodies) == list(range(500))
    assert worker.dispatcher.processed == total(broker, MERGE, "committed") == 500
    assert live(broker, MERGE) == 0


def test_failures_are_kept_with_kind_and_text_and_retried_until_they_are_dead(broker: Any) -> None:
    topic = replace(MERGE, max_retries=2, backoff=AT_ONCE)
    tries: Counter[str] = Counter()

    def listener(message: Message) -> Any:
        tries[message.body] += 1
        if message.body == "false":
            return False
        if message.body == "error":
            raise LookupError("no such product")
        if message.body == "reject":
            raise Reject("never")
        return None

    send(broker, topic, ["false", "error", "reject", "fine"])
    foreign_send(broker, topic, 0, b"{", 1.0 + time.time() * 1000)
    with Worker(broker, topic, listener, burst=False):
        eventually(lambda: len(dead(broker, topic)) == 4, "four deaths")
    assert tries == {"false": 3, "error": 3, "reject": 1, "fine": 1}
    deaths = dead(broker, topic)
    assert deaths[b'"false"'][0] == "failed"
    assert b"the listener returned False" in deaths[b'"false"'][1]
    assert deaths[b'"error"'][0] == "failed"
    assert b"LookupError: no such product" in deaths[b'"error"'][1]
    assert deaths[b'"reject"'][0] == "rejected"
    assert b"Reject: never" in deaths[b'"reject"'][1]
    assert deaths[b"{"][0] == "undecodable"


def test_a_retry_rests_as_long_as_the_listener_says_and_wakes_the_sleeping_worker(broker: Any) -> None:
    heard = Heard()

    def listener(message: Message) -> None:
        heard(message)
        if message.retries_left == message.topic.max_retries:
            raise Retry(delay=0.3)

    send(broker, MERGE, ["x"])
    with Worker(broker, MERGE, listener, poll_seconds=30):
        heard.wait(2)
    first, second = heard.times
    assert second >= first + 300 - 2
    assert second < first + 300 + 20_000


def test_message_extend_begins_the_time_out_anew_and_says_when_it_is_too_late(broker: Any) -> None:
    topic = replace(MERGE, slots=1)
    answers: list[bool] = []

    def listener(message: Message) -> None:
        answers.append(message.extend())
        broker.release(topic, message.slot, message.receipt, [message.delivery.member])
        answers.append(message.extend())
        raise Reject

    send(broker, topic, ["x"])
    finish(Worker(broker, topic, listener, max_messages=1))
    assert answers[:2] == [True, False]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this machine stands still, no call counts as long or hung, and nothing that waits is given back."""
    monkeypatch.setattr(executor_pool, "REFRESH_SECONDS", 10 * LONG)
    monkeypatch.setattr(in_flight, "LONG_CALL_SECONDS", 10 * LONG)
    monkeypatch.setattr(in_flight, "TAKEN_SECONDS", 10 * LONG)


@pytest.mark.usefixtures("patient")
def test_messages_of_one_slot_never_overlap_and_slots_run_in_parallel(broker: Any) -> None:
    topic = replace(MERGE, slots=8)
    running, overlaps, together = set[int](), list[int](), list[int]()
    threads: defaultdict[int, set[int]] = defaultdict(set)
    lock, both = threading.Lock(), threading.Barrier(2)

    def listener(message: Message) -> None:
        with lock:
            if message.slot in running:
                overlaps.append(message.slot)
            running.add(message.slot)
            together.append(len(running))
            is_early = len(together) <= 2
            threads[message.slot].add(threading.get_ident())
        if is_early:
            both.wait(LONG)
        with lock:
            running.discard(message.slot)

    send(broker, topic, range(400))
    finish(Worker(broker, topic, listener, threads=4, burst=True))
    assert overlaps == []
    assert max(together) > 1, "slots on different threads run in parallel"
    assert all(len(idents) == 1 for idents in threads.values()), "a slot belongs to one thread"
    assert len(set.union(*threads.values())) == 4
    assert total(broker, topic, "committed") == 400


def test_without_serial_one_slot_keeps_all_threads_busy(broker: Any) -> None:
    topic = replace(MERGE, slots=1, serial=False)
    meeting = threading.Barrier(4)
    heard = Heard()

    def listener(message: Message) -> None:
        meeting.wait(LONG)
        heard(message)

    send(broker, topic, range(4))
    with Worker(broker, topic, listener, threads=4, poll_seconds=30) as worker:
        heard.wait(4, 20)
        worker.asleep()
        for body in range(4, 8):
            send(broker, topic, [body])
        heard.wait(8, 20)
    assert sorted(heard.bodies) == list(range(8))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("where", ["in the same slot", "in another slot"])
def test_a_late_high_priority_is_not_stuck_behind_what_was_prefetched(broker: Any, where: str) -> None:
    topic = replace(PRIORITY, slots=2)
    order: list[str] = []
    begun, go = threading.Event(), threading.Event()

    def listener(message: Message) -> None:
        order.append(message.body["name"])
        if len(order) == 1:
            begun.set()
            assert go.wait(LONG)
        # Ten times what the dispatcher takes an unknown listener to need.
        threading.Event().wait(0.02)

    send(broker, topic, ({"name": f"low {i}"} for i in range(200)), priority=100)
    with Worker(broker, topic, listener, threads=1) as worker:
        assert begun.wait(LONG)
        running = slot_of(broker, topic, {"name": order[0]}, priority=100)
        slot = running if where == "in the same slot" else 1 - running
        eventually(lambda: audit(broker, topic)[slot].prepare > 1, "a prefetch")
        names = (f"urgent {i}" for i in range(100))
        urgent = next(n for n in names if slot_of(broker, topic, {"name": n}, priority=100) == slot)
        send(broker, topic, [{"name": urgent}], priority=9000)
        go.set()
        eventually(lambda: urgent in order, "the urgent one")
        worker.dispatcher.stop()
    assert order.index(urgent) <= 30


@pytest.mark.usefixtures("patient")
def test_what_waits_long_for_its_thread_is_taken_anew_by_priority(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_pool, "REFRESH_SECONDS", 0.1)
    topic = replace(PRIORITY, slots=2)
    held = HeldListener()
    order = held.bodies
    names = [f"low {i}" for i in range(20)]
    send(broker, topic, names, priority=100)
    with Worker(broker, topic, held, threads=1):
        assert held.begun.wait(LONG)
        slot = 1 - slot_of(broker, topic, order[0], priority=100)
        eventually(lambda: audit(broker, topic)[slot].prepare > 1, "a prefetch")
        urgent = next(n for n in map(str, range(100)) if slot_of(broker, topic, n, priority=100) == slot)
        send(broker, topic, [urgent], priority=9000)
        eventually(
            lambda: b'"%s"' % urgent.encode() in in_flight_of(broker, topic, slot),
            "the urgent one being taken while the thread is held up",
        )
        held.go.set()
        eventually(lambda: len(order) == 21, "the others")
    own = [name for name in names if slot_of(broker, topic, name, priority=100) == slot]
    assert order.index(urgent) < min(map(order.index, own)), "before what was taken before it"


def in_flight_of(broker: Any, topic: Topic, slot: int) -> dict[bytes, float]:
    entries = broker.list_messages(topic, slot, "prepare").entries
    return {entry.member: entry.score for entry in entries}


def slot_of(broker: Any, topic: Topic, body: Any, **options: Any) -> int:
    return Producer(broker).build(topic, body, **options).slot


def test_timed_messages_are_never_early_and_hardly_late(broker: Any) -> None:
    heard = Heard()
    with Worker(broker, FIXED, lambda m: heard.note((m.body, broker.now_ms())), poll_seconds=30) as worker:
        worker.asleep()
        start = broker.now_ms() + 150
        due = {i: start + i * 7 for i in range(60)}
        for i, instant in due.items():
            broker.send_replace(FIXED, i % FIXED.slots, [instant], [b"%d" % i])
        heard.wait(60)
    lateness = sorted(at - due[body] for body, at in heard.bodies)
    assert lateness[0] >= 0
    # The slow poll comes after 30 s: whoever is in time has been woken for it. How late in ms is for the benchmark to say.
    assert lateness[-1] <= 20_000


def test_an_earlier_time_wakes_a_worker_that_sleeps_until_a_later_one(broker: Any) -> None:
    heard = Heard()
    topic = replace(FIXED, slots=1)
    send(broker, topic, ["later"], fixed_time=broker.now_ms() + 600_000)
    with Worker(broker, topic, heard, poll_seconds=30) as worker:
        worker.asleep()
        due = broker.now_ms() + 120
        send(broker, topic, ["sooner"], fixed_time=due)
        heard.wait(1)
        assert heard.bodies == ["sooner"]
        assert 0 <= heard.times[0] - due < 20_000


class Silence:
    """A subscription to wake-ups whose connection is dead without an error."""

    def fileno(self) -> int:
        """Raise ``OSError``: there is nothing to poll."""
        raise OSError

    def get(self, timeout: float) -> list[tuple[str, int]]:
        threading.Event().wait(timeout)
        return []

    def close(self) -> None:
        """End the subscription."""


def test_every_message_is_found_though_no_wake_up_arrives(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "wakeups", lambda topics, inbox: Silence())
    heard, go, topic = Heard(), threading.Event(), replace(MERGE, slots=1)

    def listen(message: Message) -> None:
        heard(message)
        assert go.wait(LONG)

    with Worker(broker, topic, listen, poll_seconds=0.2):
        send(broker, topic, [0])
        heard.wait(1)
        send(broker, topic, [1])
        go.set()
        for count in range(2, 6):
            heard.wait(count)
            send(broker, topic, [count])
        heard.wait(6)


def test_what_others_publish_hides_no_wake_up_that_comes_with_it(broker: Any) -> None:
    wakeups = broker.wakeups([MERGE])
    try:
        with broker.client.pipeline(transaction=True) as pipeline:
            for what in (b"nothing", b"3", b"nothing", b"2"):
                pipeline.publish(wake_channel(broker.prefix, MERGE.name), what)
            pipeline.execute()
        heard = [*wakeups.get(timeout=5)]

        def hear() -> bool:
            heard.extend(wakeups.get())
            return len(heard) == 2

        eventually(hear, "both wake-ups")
        assert heard == [(MERGE.name, 3), (MERGE.name, 2)]
    finally:
        wakeups.close()


@pytest.mark.parametrize("serial", [True, False])
def test_what_has_not_begun_is_given_back_when_its_topic_is_paused(broker: Any, serial: bool) -> None:
    topic = replace(MERGE, slots=1, serial=serial)
    heard, go = Heard(), threading.Event()

    def listen(message: Message) -> None:
        heard(message)
        go.wait(30)

    send(broker, topic, range(20))
    with Worker(broker, topic, listen, threads=1, poll_seconds=30):
        heard.wait(1)
        broker.pause(topic, 0)
        eventually(lambda: broker.count(topic, 0).prepare <= 1, "giving back what has not begun", 20)
        go.set()
        eventually(lambda: broker.count(topic, 0).prepare == 0, "the end of what ran", 20)
        assert len(heard.bodies) == 1
        assert broker.count(topic, 0).store == 19
        broker.pause(topic, 0, paused=False)
        heard.wait(20, 20)
    [ledger] = audit(broker, topic)
    assert ledger["committed"] == 20 and ledger["failed"] == ledger["expired"] == 0


@pytest.mark.slow
def test_an_idle_worker_with_1024_slots_sends_few_commands(broker: Broker) -> None:
    topic = replace(MERGE, slots=1024)

    def sent() -> int:
        # Other commands are those that scripts call.
        stats = broker.client.info("commandstats")
        names = ("evalsha", "time", "ping", "script", "subscribe")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names)

    with Worker(broker, topic, Heard(), poll_seconds=1) as worker:
        worker.asleep()
        before, begun = sent(), time.monotonic()
        threading.Event().wait(3)
        eventually(lambda: sent() - before >= 3, "three commands")
        assert sent() - before <= 5 * (time.monotonic() - begun)


def batch_of_this_thread() -> Any:
    thread: Any = threading.current_thread()
    return thread.current


def pass_a_second(broker: Any, topic: Topic, clock: Clock) -> None:
    """Let a second pass in Redis; return when the heartbeat has extended all that is in flight in slot 0."""
    later = {member: score + 1000 for member, score in in_flight_of(broker, topic, 0).items()}
    clock.advance(1)
    eventually(lambda: in_flight_of(broker, topic, 0) == later, "a heartbeat")


@pytest.mark.slow
def test_a_long_listener_keeps_its_message_by_the_heartbeat_and_nothing_that_waits_behind_it(
    broker: Any,
) -> None:
    topic, heard = replace(MERGE, slots=1, timeout=1), HeldListener()
    set_clock(broker, clock := Clock())
    send(broker, topic, range(5))
    with Worker(broker, topic, heard, burst=True) as worker:
        heard.wait(1)
        eventually(lambda: broker.count(topic, 0).prepare == 1, "the others being given back")
        for _ in range(3):
            pass_a_second(broker, topic, clock)
        assert broker.count(topic, 0).store == 4
        heard.go.set()
        worker.join()
    [ledger] = audit(broker, topic)
    assert sorted(heard.bodies) == [0, 1, 2, 3, 4]
    assert (ledger["committed"], ledger["failed"]) == (5, 0)


@pytest.mark.slow
def test_a_message_with_a_short_time_out_is_kept_by_the_heartbeat_while_its_listener_runs(
    broker: Any,
) -> None:
    topic, heard = replace(MERGE, slots=1, identity="key"), HeldListener()
    set_clock(broker, clock := Clock())
    producer = Producer(broker)
    producer.send([producer.build(topic, "x", key="a", timeout=1)])
    with Worker(broker, topic, heard, burst=True) as worker:
        heard.wait(1)
        for _ in range(3):
            pass_a_second(broker, topic, clock)
        heard.go.set()
        worker.join()
    [ledger] = audit(broker, topic)
    assert heard.bodies == ["x"]
    assert (ledger["committed"], ledger["expired"]) == (1, 0)


@pytest.mark.slow
def test_a_hung_listener_times_out_while_the_other_slots_of_its_thread_go_on(
    broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    topic = replace(MERGE, slots=4, timeout=1, max_runtime=30, backoff=AT_ONCE)
    set_clock(broker, clock := Clock())
    release, hung, heard = threading.Event(), threading.Event(), Heard()
    slots, running, overlapped = list[int](), list[int](), list[bool]()

    def listener(message: Message) -> None:
        if message.slot == slots[0] and not hung.is_set():
            running.append(message.slot)
            batch_of_this_thread().call_began_at -= 31
            hung.set()
            release.wait(25)
            running.clear()
        overlapped.append(message.slot in running)
        heard(message)

    slots.append(slot_of(broker, topic, 0))
    sibling = next(i for i in range(1, 100) if slot_of(broker, topic, i) == slots[0])
    others = [i for i in range(100) if slot_of(broker, topic, i) != slots[0]]
    caplog.set_level(logging.ERROR)
    with Worker(broker, topic, listener, threads=1, poll_seconds=0.2) as worker:
        send(broker, topic, [0, sibling])
        assert hung.wait(LONG)
        send(broker, topic, others)
        heard.wait(len(others), 20)
        assert set(heard.bodies) == set(others), "its own slot stays shut"
        eventually(lambda: total(broker, topic, "committed") == len(others), "the end of the others")
        clock.advance(2)
        eventually(lambda: total(broker, topic, "expired") == 1, "the time-out")
        assert set(heard.bodies) == set(others)
        release.set()
        heard.wait(len(others) + 3)
        worker.asleep()
    assert not any(overlapped)
    assert "longer than MAX_RUNTIME" in caplog.text
    assert "release.wait(25)" in caplog.text, "the stack of the listener"
    assert total(broker, topic, "stale") >= 1
    assert total(broker, topic, "expired") == 1
    assert live(broker, topic) == 0
    assert Counter(heard.bodies)[sibling] == 1, "what had not begun was given back, not timed out"


class SlowAtFirst(Heard):
    """A listener whose first message seems to take 20 s, and the others no time."""

    def __call__(self, message: Message) -> None:
        super().__call__(message)
        if len(self.bodies) == 1:
            batch_of_this_thread().confirmed -= 20


@pytest.mark.parametrize(("of_topic", "of_one_message"), [(30, None), (60, 30)])
def test_a_message_is_given_back_and_not_begun_when_half_of_its_time_out_is_over(
    broker: Any, monkeypatch: pytest.MonkeyPatch, of_topic: int, of_one_message: int | None
) -> None:
    topic = replace(MERGE, slots=1, timeout=of_topic, identity="key")
    monkeypatch.setattr(Heartbeat, "_extend", lambda *_: None)  # a heartbeat that reaches nobody
    heard = SlowAtFirst()
    producer = Producer(broker)
    limits = {3: of_one_message}
    producer.send([producer.build(topic, n, key=f"{n}", timeout=limits.get(n)) for n in range(5)])
    finish(Worker(broker, topic, heard, burst=True))
    [ledger] = audit(broker, topic)
    assert sorted(heard.bodies) == [0, 1, 2, 3, 4]
    assert ledger["released"] >= 1
    assert (ledger["committed"], ledger["expired"]) == (5, 0)


def test_members_that_a_heartbeat_finds_stale_are_not_begun(broker: Any) -> None:
    topic = replace(MERGE, slots=1, timeout=1)
    set_clock(broker, Clock())  # nothing times out
    heard = Heard()

    def listener(message: Message) -> None:
        heard(message)
        if len(heard.bodies) == 1:
            # Somebody else ends the deliveries behind this one.
            rest = [b"%d" % i for i in range(4) if i != message.body]
            assert broker.commit(topic, 0, message.receipt, rest) == ["ok"] * 3
            batch = batch_of_this_thread()
            eventually(lambda: batch.stale == set(rest), "a heartbeat")

    send(broker, topic, range(4))
    finish(Worker(broker, topic, listener, burst=True))
    assert len(heard.bodies) == 1
    assert total(broker, topic, "committed") == 4


def test_a_disowned_slot_gives_back_what_has_not_begun_and_may_be_owned_again(broker: Any) -> None:
    topic = replace(MERGE, slots=1)
    held = HeldListener()
    send(broker, topic, range(10))
    with Worker(broker, topic, held, poll_seconds=30) as worker:
        assert held.begun.wait(LONG)
        worker.dispatcher.disown([(topic.name, 0)])
        eventually(lambda: audit(broker, topic)[0].prepare == 1, "the others being given back")
        assert audit(broker, topic)[0].store == 9
        worker.dispatcher.own([(topic.name, 0)])
        held.go.set()
        held.wait(10)
        worker.asleep()
        worker.dispatcher.disown([(topic.name, 0)])
        eventually(lambda: not worker.dispatcher._table, "the slot being forgotten")
        send(broker, topic, ["later"])
        worker.dispatcher.own([(topic.name, 0)])
        held.wait(11)
    assert sorted(map(str, held.bodies)) == sorted(map(str, [*range(10), "later"]))
    [ledger] = audit(broker, topic)
    # The send may have pushed the last one to this worker before anybody else has acquired the slot.
    assert ledger["released"] in (9, 10)
    assert (ledger["committed"], ledger["failed"], ledger["expired"]) == (11, 0, 0)
    assert ledger["stale"] == 0, "each was given back once"


def test_a_slot_that_returns_before_it_was_acquired_is_acquired_once(broker: Any) -> None:
    topic = replace(MERGE, slots=1)
    running, overlaps = threading.Lock(), list[Any]()
    heard, pause = Heard(), threading.Event()

    def listener(message: Message) -> None:
        if running.acquire(blocking=False):
            pause.wait(0.01)
            running.release()
        else:
            overlaps.append(message.body)
        heard(message)

    send(broker, topic, range(40))
    worker = Worker(broker, topic, listener, confirmed=uptime)
    worker.dispatcher.disown([(topic.name, 0)])
    worker.dispatcher.own([(topic.name, 0)])
    with worker:
        heard.wait(40)
        worker.asleep()
        assert overlaps == []
        assert control_of(broker, topic, 0)[b"epoch"] == b"1", "nobody fights over the slot"
        worker.dispatcher.disown([(topic.name, 0)])
        eventually(lambda: not worker.dispatcher._table, "the slot being given up")


def test_two_workers_on_the_same_slots_do_not_overlap_and_stay_calm(
    broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    topic = replace(MERGE, slots=4)
    running, overlaps = set[int](), list[int]()
    lock, heard, pause = threading.Lock(), Heard(), threading.Event()

    def listener(message: Message) -> None:
        with lock:
            if message.slot in running:
                overlaps.append(message.slot)
            running.add(message.slot)
        pause.wait(0.002)
        with lock:
            running.discard(message.slot)
        heard(message)

    send(broker, topic, range(200))
    one, other = (Worker(broker, topic, listener, poll_seconds=0.1) for _ in range(2))
    with one as first, other as second:
        for i in range(200, 260):
            send(broker, topic, [i])
            pause.wait(0.005)
        heard.wait(260)
        pause.wait(0.3)
        places = [*first.dispatcher._table.awake.values(), *second.dispatcher._table.awake.values()]
        assert sum(slot.state is SlotState.FENCED for slot in places) <= topic.slots
    assert overlaps == []
    assert Counter(heard.bodies) == Counter(range(260))
    epochs = [control_of(broker, topic, slot)[b"epoch"] for slot in range(topic.slots)]
    assert all(int(epoch) <= 3 for epoch in epochs), "nobody fights over slots"


def control_of(broker: Any, topic: Topic, slot: int) -> dict[bytes, bytes]:
    key = slot_keys(broker.prefix, topic.name, slot).control
    return dict(broker.client.hgetall(key))


@pytest.mark.slow
def test_a_fenced_worker_takes_over_again_when_nobody_takes_for_a_time_out(broker: Any) -> None:
    topic = replace(MERGE, slots=1, timeout=1)
    heard = Heard()
    with Worker(broker, topic, heard, poll_seconds=0.1) as worker:
        send(broker, topic, ["before"])
        heard.wait(1)
        worker.asleep()
        broker.acquire(topic, 0)  # a worker that is gone at once
        sent = time.monotonic()
        send(broker, topic, ["after"])
        heard.wait(2)
        assert time.monotonic() - sent >= topic.timeout


@pytest.mark.slow
def test_a_fenced_worker_leaves_a_slot_alone_that_another_one_holds(broker: Any) -> None:
    topic = replace(MERGE, slots=1, timeout=1)
    pause = threading.Event()
    with Worker(broker, topic, Heard(), poll_seconds=0.1) as worker:
        worker.asleep()
        broker.acquire(topic, 0)
        send(broker, topic, ["first"])
        awake = worker.dispatcher._table.awake
        eventually(
            lambda: [slot.state for slot in list(awake.values())] == [SlotState.FENCED], "being fenced"
        )
        taken = broker.prepare(topic, 0, "another worker", 2, 1)
        send(broker, topic, ["second"])
        for _ in range(8):
            pause.wait(0.3)
            assert broker.extend(topic, 0, taken.receipt, [b'"first"']) == ["ok"]
        assert control_of(broker, topic, 0)[b"epoch"] == b"2"
        assert [slot.state is SlotState.FENCED for slot in awake.values()] == [True]


# Otherwise what waits for a call of more than a second is given back anyway, and behind one of more than a tenth nothing is
# prepared.
@pytest.mark.usefixtures("patient")
def test_a_fenced_worker_gives_back_what_has_not_begun(broker: Any) -> None:
    topic = replace(MERGE, slots=1, prefetch=4)
    held = HeldListener()
    send(broker, topic, range(4))
    with Worker(broker, topic, held, poll_seconds=0.1) as worker:
        assert held.begun.wait(LONG)
        broker.acquire(topic, 0)
        send(broker, topic, range(4, 8))  # the second batch is prepared now, and answered fenced
        eventually(lambda: audit(broker, topic)[0].prepare == 1, "giving back what waits", LONG / 3)
        assert [slot.state is SlotState.FENCED for slot in worker.dispatcher._table.awake.values()] == [True]
        held.go.set()
    [ledger] = audit(broker, topic)
    assert (ledger["committed"], ledger.store) == (1, 7)


def test_another_slot_count_ends_the_worker_after_it_has_settled(broker: Any) -> None:
    topic = replace(MERGE, slots=4)
    held = HeldListener()
    send(broker, topic, ["x"])
    with Worker(broker, topic, held) as worker:
        assert held.begun.wait(LONG)
        for slot in range(4):
            broker.configure(replace(topic, slots=8), slot)
            worker.dispatcher._mailbox.put(Wake(topic.name, slot))
        held.go.set()
        with pytest.raises(SlotMoved, match="no longer has 4 slots"):
            worker.join()
        worker.error = None
    assert total(broker, topic, "committed") == 1


def test_burst_ends_when_nothing_can_be_taken_any_more(broker: Any) -> None:
    heard = Heard()
    send(broker, MERGE, range(50))
    send(broker, replace(FIXED, name="prices2"), ["later"], fixed_time=broker.now_ms() + 600_000)
    finish(Worker(broker, [MERGE, replace(FIXED, name="prices2")], heard, burst=True))
    assert sorted(heard.bodies) == list(range(50))


def test_max_messages_ends_the_worker_and_gives_the_rest_back(broker: Any) -> None:
    topic = replace(MERGE, prefetch=2)
    send(broker, topic, range(1000))
    worker = finish(Worker(broker, topic, lambda _: None, max_messages=100))
    assert 100 <= worker.dispatcher.processed < 1000
    assert live(broker, topic) == 1000 - worker.dispatcher.processed
    assert all(ledger.prepare == 0 for ledger in audit(broker, topic))


def test_max_idle_time_ends_the_worker_some_time_after_its_last_message(broker: Any) -> None:
    heard = Heard()
    send(broker, MERGE, ["x"])
    finish(Worker(broker, MERGE, heard, max_idle_time=0.4))
    assert time.time() * 1000 - heard.times[0] >= 390


def test_a_worker_with_a_max_idle_time_sleeps_while_its_slots_wait_for_their_limits(broker: Broker) -> None:
    topic = replace(MERGE, slots=1, max_in_flight=1)
    allowed = broker.allow(topic, "another", tokens=0, in_use=1, wanted=1, lease_ms=600_000)
    assert allowed.permits == 1
    send(broker, topic, ["x"])
    listener = Listener(topic.name, lambda message: None)
    options = WorkerOptions(threads=1, max_idle_time=5.0)
    dispatcher = Dispatcher(broker, [topic], {topic.name: listener}, options)
    dispatcher.own([(topic.name, 0)])
    dispatcher._mailbox.process_items()
    turn_until_idle(dispatcher)
    assert dispatcher._schedule.parked[topic.name]
    now = time.monotonic()
    dispatcher._in_flight.last_work = now - 60
    assert not dispatcher._idle_check.is_over()
    assert dispatcher._idle_check.due(now) == pytest.approx(now + SETTLING_SECONDS)
    dispatcher._in_flight.last_work = now
    assert dispatcher._idle_check.due(now) == now + 5.0


def test_a_listener_longer_than_the_shutdown_time_out_is_left_to_time_out(
    broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    topic = replace(MERGE, slots=1)
    held = HeldListener()
    send(broker, topic, range(3))
    with Worker(broker, topic, held, shutdown_timeout=0.2) as worker:
        assert held.begun.wait(LONG)
        worker.dispatcher.stop()
        worker.join()
    assert worker.dispatcher.forced
    assert "their messages will time out" in caplog.text
    [ledger] = audit(broker, topic)
    assert (ledger.prepare, ledger.store) == (1, 2)
    held.go.set()


def test_all_threads_end_with_the_worker(broker: Any) -> None:
    before = set(threading.enumerate())
    send(broker, MERGE, range(10))
    finish(Worker(broker, MERGE, lambda _: None, burst=True, threads=8))
    eventually(lambda: {each for each in threading.enumerate() if each.name.startswith("rmq-")} <= before)


@pytest.mark.usefixtures("patient")
def test_no_more_than_a_bound_is_in_hand(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "MESSAGES_IN_FLIGHT", 64)
    topic = replace(PRIORITY, slots=16)
    held = HeldListener()
    send(broker, topic, range(1000), priority=100)
    with Worker(broker, topic, held, threads=1, poll_seconds=0.05) as worker:
        assert held.begun.wait(LONG)
        eventually(lambda: worker.dispatcher._in_flight.messages > 32, "a prefetch")
        threading.Event().wait(0.2)
        assert worker.dispatcher._in_flight.messages <= 64
        assert sum(ledger.prepare for ledger in audit(broker, topic)) <= 64
        held.go.set()
        eventually(lambda: total(broker, topic, "committed") == 1000, "the end")


@pytest.mark.slow
def test_wake_ups_leave_nothing_behind(broker: Any) -> None:
    topic = replace(FIXED, slots=2)
    heard = Heard()
    now = broker.now_ms()
    for body in range(10):
        # An entry that is left behind comes to light only where an earlier one lies before it.
        seconds = 86_400 if slot_of(broker, topic, body, fixed_time=now + 600_000) else 600
        send(broker, topic, [body], fixed_time=now + seconds * 1000)
    with Worker(broker, topic, heard, poll_seconds=30) as worker:
        worker.asleep()
        sizes = []
        for _ in range(200):
            worker.dispatcher._mailbox.put(Wake(topic.name, 1))
            eventually(worker.dispatcher._mailbox._items.empty, "being heard")
            worker.asleep()
            sizes.append(len(worker.dispatcher._schedule._heap))
        assert max(sizes) <= 2 * topic.slots + 65
        assert len(set(sizes)) > 1, "each wake-up leaves an entry, for a while"
        assert worker.dispatcher._in_flight.batches == {}


def time_out(broker: Any, topic: Topic, slots: Sequence[int], times: int = 1) -> None:
    """Let a message of each slot end as timed out, so many times, as for a process that died."""
    for slot in list(slots) * times:
        taken = broker.prepare(topic, slot, "gone", None, 1)
        [delivery] = taken.deliveries
        failure = Failure(delivery.member, "timed_out")
        assert broker.rollback(topic, slot, taken.receipt, [failure]) == ["ok"]


def one_in_each_slot(broker: Any, topic: Topic) -> dict[int, int]:
    """Send a message into each slot; return slot -> its body."""
    bodies: dict[int, int] = {}
    for body in itertools.count():
        if len(bodies) == topic.slots:
            break
        bodies.setdefault(slot_of(broker, topic, body), body)
    send(broker, topic, bodies.values())
    return bodies


def test_messages_that_timed_out_repeatedly_run_one_at_a_time_and_hold_up_no_other(broker: Any) -> None:
    topic = replace(MERGE, backoff=AT_ONCE)
    bodies = one_in_each_slot(broker, topic)
    suspects, fresh = {bodies[slot] for slot in (0, 1, 2)}, bodies[3]
    running, together = list[int](), list[int]()
    fresh_ran, heard = threading.Event(), Heard()

    def listener(message: Message) -> None:
        if message.body == fresh:
            fresh_ran.set()
        else:
            running.append(message.body)
            together.append(len(running))
            assert fresh_ran.wait(LONG), "it stands still beside a suspect"
            threading.Event().wait(0.2)  # for long enough that another one would begin beside it
            running.remove(message.body)
        heard(message)

    time_out(broker, topic, [0, 1, 2], times=2)
    with Worker(broker, topic, listener, threads=4) as worker:
        assert set(heard.wait(4)) == {*suspects, fresh}
        worker.asleep()
        assert not worker.dispatcher._router.suspects
    assert together == [1, 1, 1]
    assert total(broker, topic, "expired") == 6


def test_a_slow_message_that_timed_out_once_holds_up_no_other_and_nothing_behind_it(broker: Any) -> None:
    topic = replace(MERGE, slots=2, backoff=AT_ONCE)
    bodies = one_in_each_slot(broker, topic)
    time_out(broker, topic, [0, 1])
    behind = [body for body in range(100, 200) if slot_of(broker, topic, body) == 1][:20]
    send(broker, topic, behind)
    go, heard = threading.Event(), Heard()

    def listener(message: Message) -> None:
        if message.body == bodies[0]:
            assert go.wait(LONG)
        heard(message)

    with Worker(broker, topic, listener, threads=2) as worker:
        assert set(heard.wait(1 + len(behind), LONG / 3)) == {bodies[1], *behind}
        go.set()
        heard.wait(2 + len(behind))
        worker.asleep()
    assert total(broker, topic, "committed") == 2 + len(behind)


@pytest.mark.usefixtures("patient")
def test_a_suspect_that_waits_for_another_is_given_back_at_the_end(broker: Any) -> None:
    topic = replace(MERGE, slots=2, backoff=AT_ONCE)
    one_in_each_slot(broker, topic)
    held = HeldListener()
    time_out(broker, topic, [0, 1], times=2)
    with Worker(broker, topic, held) as worker:
        assert held.begun.wait(LONG)
        eventually(lambda: len(worker.dispatcher._router.suspects) == 2, "both being in hand")
        worker.dispatcher.stop()
        eventually(lambda: total(broker, topic, "released") == 1, "the one that waits being given back")
        held.go.set()
    assert total(broker, topic, "committed") == 1
    assert live(broker, topic) == 1


def test_a_suspect_that_waits_for_another_for_long_is_given_back_and_due(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_pool, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(executor_pool, "SUSPECT_REST_SECONDS", 10 * LONG)
    topic = replace(MERGE, slots=2, backoff=AT_ONCE)
    one_in_each_slot(broker, topic)
    held = HeldListener()
    time_out(broker, topic, [0, 1], times=2)
    with Worker(broker, topic, held, poll_seconds=0.1) as worker:
        assert held.begun.wait(LONG)
        eventually(lambda: total(broker, topic, "released") == 1, "the one that waits being given back")
        held.go.set()
        eventually(lambda: total(broker, topic, "committed") == 1, "the end of the other")
        assert sum(ledger.store for ledger in audit(broker, topic)) == 1
        for slot in range(2):
            worker.dispatcher._mailbox.put(Wake(topic.name, slot))
        eventually(lambda: total(broker, topic, "committed") == 2, "its turn")
    assert total(broker, topic, "failed") == 0


def test_a_suspect_that_hangs_lets_the_next_one_run(broker: Any) -> None:
    topic = replace(MERGE, slots=2, timeout=1, max_runtime=0.3, backoff=AT_ONCE)
    one_in_each_slot(broker, topic)
    first: list[int] = []
    go, heard = threading.Event(), Heard()

    def listener(message: Message) -> None:
        first.append(message.slot)
        if message.slot == first[0]:
            assert go.wait(LONG)
        heard(message)

    time_out(broker, topic, [0, 1], times=2)
    with Worker(broker, topic, listener) as worker:
        heard.wait(1)
        assert len(set(first)) == 2
        go.set()
        worker.dispatcher.stop()
        worker.join()


def test_a_burst_does_not_end_before_all_its_slots_are_told(broker: Any) -> None:
    heard, asked, is_settled = Heard(), threading.Event(), threading.Event()

    def settled() -> bool:
        asked.set()
        return is_settled.is_set()

    send(broker, MERGE, range(8))
    worker = Worker(broker, MERGE, heard, slots=[], burst=True, settled=settled)
    with worker:
        assert asked.wait(LONG)
        assert worker.thread.is_alive()
        worker.dispatcher.own([(MERGE.name, slot) for slot in range(MERGE.slots)])
        is_settled.set()
        worker.join()
    assert sorted(heard.bodies) == list(range(8))


def test_slots_told_after_the_end_began_are_left_to_others(broker: Any) -> None:
    held = HeldListener()

    def leaving() -> None:
        worker.dispatcher.own([("renders", 0)])
        held.go.set()

    send(broker, MERGE, ["x"])
    slots = [(MERGE.name, slot) for slot in range(MERGE.slots)]
    with Worker(broker, [MERGE, PRIORITY], held, slots=slots, leaving=leaving) as worker:
        assert held.begun.wait(LONG)
        worker.dispatcher.stop()
        worker.join()
    assert worker.dispatcher._table.get("renders", 0) is None
    assert broker.acquire(PRIORITY, 0) == 1, "nobody has acquired it before"
    assert total(broker, MERGE, "committed") == 1


@pytest.mark.slow
def test_a_worker_ends_what_has_timed_out_in_topics_that_it_does_not_serve(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unserved_topics, "SWEEP_SECONDS", 0.05)
    claimed = replace(FIXED, name="claimed", slots=2, backoff=BackOff(3_600_000, 3_600_000))
    prepared = replace(claimed, name="prepared", timeout=1)
    for topic in (claimed, prepared):
        for slot in range(topic.slots):
            broker.send_replace(topic, slot, [broker.now_ms() - 1], [b"a"])
    assert broker.claim(claimed, 1, "spark", 1, 100, 10).taken == 1
    assert broker.renew_claim(claimed, 1, "spark", 1, 100, seal=True) == 1
    assert broker.prepare(prepared, 0, "dead", None, 10).status == "ok"
    duties = DutyThread([UnservedTopics(broker, [claimed, prepared])])
    duties.start()
    try:
        eventually(lambda: broker.count(claimed, 1).retry == 1, "the claim's end")
        eventually(lambda: broker.count(prepared, 0).retry == 1, "the delivery's end")
    finally:
        duties.stop()
        duties.join()
    assert broker.read_claim(claimed, 1, "spark", 1).state == "lost"
    # Nothing else is done there.
    assert (broker.count(claimed, 0).store, broker.count(prepared, 1).store) == (1, 1)
    assert all(broker.audit_ledger(topic, slot).balanced for topic in (claimed, prepared) for slot in (0, 1))


def test_what_times_out_in_a_slot_that_a_topic_was_given_later_is_ended(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = replace(FIXED, name="grown", slots=1, timeout=1, backoff=BackOff(3_600_000, 3_600_000))
    grown = replace(topic, slots=2)
    broker.define(grown)
    broker.send_replace(grown, 1, [broker.now_ms() - 1], [b"a"])
    assert broker.prepare(grown, 1, "dead", None, 10).status == "ok"
    sweep = UnservedTopics(broker, [topic])()
    eventually(lambda: next(sweep) is not None and broker.count(grown, 1).retry == 1, "the delivery's end")


def test_the_reaper_brings_back_a_lost_claim_in_many_steps_without_a_pause(broker: Any) -> None:
    topic = replace(FIXED, name="claimed", slots=1, backoff=AT_ONCE)
    names = [b"%d" % n for n in range(900)]
    broker.send_replace(topic, 0, [broker.now_ms() - 1] * 900, names)
    assert broker.claim(topic, 0, "spark", 1, 1, 900).taken == 900
    broker.renew_claim(topic, 0, "spark", 1, 1, seal=True)
    eventually(lambda: broker.count(topic, 0).due == 900, "the end of the lease")
    steps, sweep = UnservedTopics(broker, [topic])(), unserved_topics.SWEEP_SECONDS
    pauses = list(itertools.takewhile(lambda seconds: seconds < sweep, steps))
    assert len(pauses) > 1 and not any(pauses)
    assert (broker.count(topic, 0).claimed, broker.count(topic, 0).store) == (0, 900)


def test_a_worker_goes_on_with_a_slot_when_the_lease_of_a_dead_spark_consumer_ends(broker: Any) -> None:
    heard = Heard()
    topic = replace(FIXED, slots=1, backoff=AT_ONCE)
    broker.send_replace(topic, 0, [broker.now_ms() - 1], [b"1"])
    assert broker.claim(topic, 0, "spark", 1, 300, 10).taken == 1
    broker.send_replace(topic, 0, [broker.now_ms() - 1], [b"2"])
    with Worker(broker, topic, heard, poll_seconds=30):
        assert sorted(heard.wait(2)) == [1, 2]
