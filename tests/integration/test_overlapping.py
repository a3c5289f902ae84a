"""Async listeners, which overlap in the event loop of their worker: how many, in which slots, and how they end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from queue import SimpleQueue
from typing import Any

import pytest

from django_rmq.core.clock import uptime
from django_rmq.core.consumer import async_executor
from django_rmq.core.consumer.async_executor import AsyncExecutor
from django_rmq.core.consumer.batch import Batch, BatchReport
from django_rmq.core.consumer.batch_run import NO_HOOKS, Hooks
from django_rmq.core.consumer.mailbox import MaxRuntimeExceeded
from django_rmq.core.consumer.slots import ConsumedSlot
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery, Failure
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.model.worker_report import StackRequest
from django_rmq.exceptions import Reject
from django_rmq.worker.worker_reports import running_calls, stacks_of
from tests.support.workers import LONG, Listener, Worker, audit, eventually, live, send, total, work_off

TOPIC = Topic(
    "mails", TopicType.RANGE_MERGE, slots=8, time_range_ms=1, concurrency=4, timeout=60, backoff=BackOff(0, 0)
)
OTHER = Topic("plain", TopicType.RANGE_MERGE, slots=4, time_range_ms=1)


class Seen:
    """How many calls overlap, in all and by slot, and what has ended."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.slots: Counter[int] = Counter()
        self.most_of_a_slot = 0
        self.ended: list[Any] = []

    def begin(self, message: Message) -> None:
        self.now += 1
        self.slots[message.slot] += 1
        self.most = max(self.most, self.now)
        self.most_of_a_slot = max(self.most_of_a_slot, self.slots[message.slot])

    def end(self, message: Message) -> None:
        self.now -= 1
        self.slots[message.slot] -= 1
        self.ended.append(message.body)


def sleeping(seen: Seen, seconds: float = 0.02) -> Callable[[Message], Awaitable[None]]:
    async def listener(message: Message) -> None:
        seen.begin(message)
        await asyncio.sleep(seconds)
        seen.end(message)

    return listener


def sampled(what: Callable[[], int], seconds: float = 0.001) -> list[int]:
    """Look a hundred times."""
    found = []
    for _ in range(100):
        found.append(what())
        time.sleep(seconds)
    return found


def numbered(count: int) -> list[dict[str, int]]:
    return [{"n": n} for n in range(count)]


def test_calls_overlap_up_to_the_concurrency_and_one_at_a_time_per_slot(broker: Any) -> None:
    seen = Seen()
    send(broker, TOPIC, numbered(80))
    work_off(broker, TOPIC, sleeping(seen), threads=1)
    assert sorted(body["n"] for body in seen.ended) == list(range(80))
    assert seen.most == TOPIC.concurrency
    assert seen.most_of_a_slot == 1
    assert total(broker, TOPIC, "committed") == 80
    audit(broker, TOPIC)


def test_the_event_loop_is_that_of_uvloop_where_it_is_installed(broker: Any) -> None:
    loops: list[str] = []

    async def listener(message: Message) -> None:
        loops.append(type(asyncio.get_running_loop()).__module__.partition(".")[0])

    send(broker, TOPIC, numbered(1))
    with Worker(broker, TOPIC, listener):
        eventually(lambda: loops)
    # `make lowest` runs these tests with uvloop, `make test` without.
    assert loops == ["uvloop" if find_spec("uvloop") else "asyncio"]


def test_without_serial_calls_of_one_slot_overlap(broker: Any) -> None:
    seen, topic = Seen(), replace(TOPIC, slots=1, serial=False)
    send(broker, topic, numbered(40))
    work_off(broker, topic, sleeping(seen), threads=1)
    assert len(seen.ended) == 40
    assert seen.most == topic.concurrency


def test_a_worker_takes_no_more_than_it_can_run(broker: Any) -> None:
    """Each of these messages is a call of 0.2 s, so no slot hands out more than one."""
    seen, topic = Seen(), replace(TOPIC, slots=64, prefetch=1)
    send(broker, topic, numbered(200))
    with Worker(broker, topic, sleeping(seen, 0.2), threads=1) as worker:
        hand = worker.dispatcher._in_flight
        first = sampled(lambda: hand.messages)
        eventually(lambda: len(seen.ended) > 2 * topic.concurrency, "knowing how long it takes")
        then = sampled(lambda: hand.messages, 0.01)
        worker.dispatcher.stop()
    assert max(first) <= 2 * topic.concurrency
    # A quarter more is what runs in 50 ms.
    assert topic.concurrency <= max(then) <= 1.25 * topic.concurrency


def test_an_async_listener_that_is_slow_delays_no_sync_one(broker: Any) -> None:
    done: list[Any] = []
    release = threading.Event()

    async def stuck(message: Message) -> None:
        while not release.is_set():  # noqa: ASYNC110 - it is set by another thread
            await asyncio.sleep(0.02)

    send(broker, TOPIC, numbered(40))
    with Worker(broker, [TOPIC, OTHER], {"mails": stuck, "plain": done.append}, threads=1) as worker:
        eventually(lambda: worker.dispatcher._in_flight.messages, "taking")
        send(broker, OTHER, numbered(20))
        eventually(lambda: len(done) == 20, "the others")
        release.set()


def test_outcomes_are_those_of_sync_listeners(broker: Any) -> None:
    topic = replace(TOPIC, max_retries=1)

    async def listener(message: Message) -> Any:
        await asyncio.sleep(0)
        match message.body["n"]:
            case 0:
                raise ValueError("no")
            case 1:
                return False
            case 2:
                raise Reject("never")
            case 3:
                raise asyncio.CancelledError
            case 4:
                return asyncio.sleep(0)
        return None

    send(broker, topic, numbered(10))
    work_off(broker, topic, listener, threads=1)
    assert total(broker, topic, "committed") == 5
    assert total(broker, topic, "died") == 5
    assert total(broker, topic, "failed") == 8
    audit(broker, topic)


def test_each_call_has_context_variables_of_its_own(broker: Any) -> None:
    mine: ContextVar[int | None] = ContextVar("mine", default=None)
    found: list[int | None] = []
    topic = replace(TOPIC, slots=1)

    async def listener(message: Message) -> None:
        found.append(mine.get())
        mine.set(message.body["n"])
        await asyncio.sleep(0)
        assert mine.get() == message.body["n"]

    send(broker, topic, numbered(10))
    work_off(broker, topic, listener, threads=1)
    assert found == [None] * 10
    assert total(broker, topic, "committed") == 10


def test_what_runs_at_the_stop_is_settled_and_what_has_not_begun_is_given_back(broker: Any) -> None:
    seen, topic = Seen(), replace(TOPIC, slots=2, concurrency=2)
    # A quick listener at first, so that a slot hands out several messages at once.
    seconds = [0.0]

    async def listener(message: Message) -> None:
        seen.begin(message)
        await asyncio.sleep(seconds[0])
        seen.end(message)

    send(broker, topic, numbered(100))
    with Worker(broker, topic, listener, threads=1) as worker:
        eventually(lambda: live(broker, topic) == 0, "the quick ones")
        seconds[0] = 0.5
        send(broker, topic, [{"n": n} for n in range(100, 160)])
        eventually(lambda: seen.now == 2 and worker.dispatcher._in_flight.messages > 2, "several in hand")
        worker.dispatcher.stop()
    assert not worker.dispatcher.forced
    assert seen.now == 0
    assert total(broker, topic, "committed") == len(seen.ended) <= 104
    assert total(broker, topic, "released") > 0
    assert total(broker, topic, "failed") == 0
    audit(broker, topic)


def test_a_call_beyond_max_runtime_shuts_only_its_slot(broker: Any, caplog: pytest.LogCaptureFixture) -> None:
    topic = replace(TOPIC, slots=2, max_runtime=0.3, timeout=1)
    done: list[int] = []
    release = threading.Event()

    async def waits_here(message: Message) -> None:
        await asyncio.to_thread(release.wait, LONG)

    async def listener(message: Message) -> None:
        if message.body.get("stuck"):
            await waits_here(message)
        done.append(message.slot)

    send(broker, topic, [{"n": 0, "stuck": True}])
    with Worker(broker, topic, listener, threads=1) as worker:
        eventually(lambda: "longer than MAX_RUNTIME" in caplog.text, "the log")
        assert "waits_here" in caplog.text
        eventually(lambda: worker.dispatcher._table.blocked, "shutting")
        send(broker, topic, numbered(40))
        eventually(lambda: len(done) >= 10, "the other slot")
        assert len(set(done)) == 1
        release.set()
        eventually(lambda: live(broker, topic) == 0, "everything", LONG)
    assert worker.dispatcher._table.blocked == set()


def test_a_loop_that_is_blocked_beyond_max_runtime_is_replaced_and_its_slots_stay_shut(
    broker: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_executor, "HUNG_SECONDS", 0.5)
    # Those that wait are far from their own MAX_RUNTIME.
    waits = replace(TOPIC, name="waits", slots=2, timeout=20)
    blocks = replace(TOPIC, name="blocks", slots=1, timeout=20, max_runtime=0.5)
    release, seen, is_blocked = threading.Event(), Seen(), threading.Event()

    async def waiting(message: Message) -> None:
        seen.begin(message)
        while not is_blocked.is_set():  # noqa: ASYNC110 - it is about this loop
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        seen.end(message)

    async def blocking(message: Message) -> None:
        is_blocked.set()
        release.wait(LONG)

    send(broker, waits, [{"n": 0}])
    with Worker(broker, [waits, blocks], {"waits": waiting, "blocks": blocking}, threads=1) as worker:
        eventually(lambda: seen.now == 1, "waiting")
        [slot] = [slot for slot, now in seen.slots.items() if now]
        send(broker, blocks, [{"n": 0}])
        eventually(lambda: "event loop thread has stopped" in caplog.text, "replacing")
        shut = {place.key for place in worker.dispatcher._table.blocked}
        assert shut == {("waits", slot), ("blocks", 0)}
        send(broker, waits, [{"n": n} for n in range(1, 40)])
        eventually(lambda: len(seen.ended) > 0, "the other slot")
        assert seen.now <= 2
        release.set()
        eventually(lambda: live(broker, waits) + live(broker, blocks) == 0, "everything", LONG)
    assert seen.most_of_a_slot == 1
    assert len(seen.ended) == 40
    assert worker.dispatcher._table.blocked == set()


def test_a_suspect_that_runs_in_a_loop_that_was_replaced_is_not_given_back(
    broker: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_executor, "HUNG_SECONDS", 0.1)
    waits, blocks = (replace(TOPIC, name=name, slots=1, time_range_ms=0) for name in ("waits", "blocks"))
    release, has_begun, is_blocked = threading.Event(), threading.Event(), threading.Event()

    async def waiting(message: Message) -> None:
        has_begun.set()
        while not release.is_set():  # noqa: ASYNC110 - it is about this loop
            await asyncio.sleep(0.01)

    async def blocking(message: Message) -> None:
        is_blocked.set()
        release.wait(LONG)

    send(broker, blocks, [{"n": 0}])
    taken = broker.prepare(blocks, 0, "gone", None, 1)
    failure = Failure(taken.deliveries[0].member, "timed_out")
    assert broker.rollback(blocks, 0, taken.receipt, [failure]) == ["ok"]
    send(broker, waits, [{"n": 0}])
    listeners = {"waits": waiting, "blocks": blocking}
    with Worker(broker, [waits, blocks], listeners, threads=1, slots=[("waits", 0)]) as worker:
        try:
            dispatcher = worker.dispatcher
            assert has_begun.wait(LONG)
            [first] = dispatcher.batches()
            dispatcher.own([("blocks", 0)])
            assert is_blocked.wait(LONG)
            loop: Any = dispatcher._pool.threads[-1]
            eventually(lambda: loop._lag.silent() > async_executor.HUNG_SECONDS, "silence")
            dispatcher._mailbox.put(MaxRuntimeExceeded(first))
            eventually(lambda: "event loop thread has stopped" in caplog.text, "replacing")
            [suspect] = [batch for batch in dispatcher.batches() if batch.topic.name == "blocks"]
            dispatcher.disown([("blocks", 0)])
            eventually(lambda: not suspect.slot.is_owned, "losing the slot")
            assert suspect in dispatcher.batches()
            assert total(broker, blocks, "released") == 0
            calls = {call.topic: call for call in running_calls(dispatcher.batches(), broker.now_ms())}
            assert {call.thread for call in calls.values()} == {"rmq-event-loop (replaced)"}
            asked = [StackRequest(calls[name].id, 1) for name in listeners]
            texts = [stack.text for stack in stacks_of(dispatcher.batches(), asked, 2)]
            assert ", in waiting\n" in texts[0] and ", in blocking\n" in texts[1]
        finally:
            release.set()
        eventually(lambda: not dispatcher.batches(), "the end of both calls")
    assert [total(broker, topic, "committed") for topic in (waits, blocks)] == [1, 1]
    assert total(broker, blocks, "prepared") == 2


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_a_listener_that_wants_to_exit_fails_its_message_and_the_loop_goes_on(
    broker: Any, error: BaseException
) -> None:
    loops: set[asyncio.AbstractEventLoop] = set()

    async def listener(message: Message) -> None:
        loops.add(asyncio.get_running_loop())
        if message.body["n"] % 2:
            raise error

    topic = replace(TOPIC, backoff=BackOff(60_000, 60_000))
    send(broker, topic, numbered(20))
    with Worker(broker, topic, listener, threads=1):
        eventually(lambda: total(broker, topic, "committed") + total(broker, topic, "failed") == 20, "all")
    assert total(broker, topic, "failed") == 10
    assert len(loops) == 1


def test_a_loop_that_dies_is_replaced(broker: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A task that a listener has started ends the loop. What is sent while it ends begins in its successor."""
    loops: defaultdict[int, list[asyncio.AbstractEventLoop]] = defaultdict(list)
    ending = threading.Event()

    async def ends() -> None:
        raise SystemExit(1)

    async def listener(message: Message) -> None:
        loops[message.body["n"]].append(asyncio.get_running_loop())
        if message.body["n"] == 0 and len(loops[0]) == 1:
            asyncio.get_running_loop().create_task(ends())
            try:
                await asyncio.sleep(30)
            finally:
                ending.set()
                await asyncio.sleep(0.5)

    send(broker, TOPIC, numbered(1))
    with Worker(broker, TOPIC, listener, threads=1):
        assert ending.wait(LONG)
        send(broker, TOPIC, [{"n": n} for n in range(1, 20)])
        eventually(lambda: "event loop thread has stopped" in caplog.text, "replacing")
        eventually(lambda: live(broker, TOPIC) == 0, "all messages")
    assert total(broker, TOPIC, "committed") == 20
    (dead, successor) = loops.pop(0)
    assert {*chain(*loops.values())} == {successor} != {dead}
    assert {len(each) for each in loops.values()} == {1}


def test_what_blocks_the_loop_is_logged(
    broker: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_executor, "BLOCKED_SECONDS", 0.5)

    def blocks_here() -> None:
        end = time.monotonic() + LONG
        while "event loop has been blocked" not in caplog.text and time.monotonic() < end:
            time.sleep(0.02)

    async def listener(message: Message) -> None:
        blocks_here()

    send(broker, TOPIC, numbered(1))
    work_off(broker, TOPIC, listener, threads=1)
    [record] = [each for each in caplog.records if getattr(each, "rmq_event", "") == "loop_blocked"]
    assert record.levelno == logging.WARNING
    assert "blocks_here" in record.getMessage()


def test_with_flow_the_concurrency_follows_the_listener(broker: Any) -> None:
    seen, topic = Seen(), replace(TOPIC, slots=64, concurrency=64, flow="auto")
    bottleneck = asyncio.Semaphore(4)

    async def listener(message: Message) -> None:
        seen.begin(message)
        async with bottleneck:
            await asyncio.sleep(0.005)
        seen.end(message)

    send(broker, topic, numbered(20_000))
    with Worker(broker, topic, listener, threads=1) as worker:
        flow = worker.dispatcher._capacity.async_capacity.flows["mails"]
        eventually(lambda: not flow._doubling and flow.limit < 32, "finding the limit")
    assert 1 <= seen.most <= 64


def executor(inbox: SimpleQueue[Any], concurrency: int = 4, hooks: Hooks = NO_HOOKS) -> AsyncExecutor:
    return AsyncExecutor(0, inbox, hooks, None, {"mails": concurrency})


def a_batch(
    slot: ConsumedSlot, listener: Any, members: list[bytes], topic: Topic = TOPIC, receipt: int = 1
) -> Batch:
    messages = [Message(topic, 0, receipt, Delivery(member, 1.0, 16)) for member in members]
    return Batch(slot, Listener(topic.name, listener), receipt, messages, uptime())


def test_two_batches_of_one_serial_slot_never_overlap() -> None:
    seen, inbox, slot = Seen(), SimpleQueue[Any](), ConsumedSlot(TOPIC, 0, 0)
    thread = executor(inbox)
    listener = sleeping(seen)
    for receipt in range(1, 5):
        thread.put(a_batch(slot, listener, [b"%d" % receipt], receipt=receipt))
    thread.start()
    receipts = [inbox.get(timeout=LONG).batch.receipt for _ in range(4)]
    thread.stop()
    thread.join(LONG)
    assert not thread.is_alive()
    assert seen.most == 1
    assert receipts == [1, 2, 3, 4]


def test_no_more_batches_run_than_the_concurrency() -> None:
    seen, inbox = Seen(), SimpleQueue[Any]()
    thread = executor(inbox, 2)
    for _ in range(6):
        thread.put(a_batch(ConsumedSlot(TOPIC, 0, 0), sleeping(seen), [b"1"]))
    thread.start()
    for _ in range(6):
        inbox.get(timeout=LONG)
    thread.stop()
    assert seen.most == 2


def test_a_batch_that_is_taken_back_before_it_begins_is_not_run() -> None:
    seen, inbox, slot = Seen(), SimpleQueue[Any](), ConsumedSlot(TOPIC, 0, 0)
    thread = executor(inbox)
    release = threading.Event()

    async def listener(message: Message) -> None:
        seen.begin(message)
        await asyncio.to_thread(release.wait, LONG)
        seen.end(message)

    first, second = (a_batch(slot, listener, [name]) for name in (b"1", b"2"))
    thread.put(first)
    thread.put(second)
    thread.start()
    eventually(lambda: seen.now == 1)
    assert thread.withdraw(second)
    assert not thread.withdraw(first)
    release.set()
    inbox.get(timeout=LONG)
    thread.stop()
    thread.join(LONG)
    assert seen.ended == [1]


def test_a_batch_halted_on_the_way_reports_the_rest_as_not_begun() -> None:
    inbox = SimpleQueue[Any]()
    thread = executor(inbox)

    async def listener(message: Message) -> None:
        batch.halted = True

    batch = a_batch(ConsumedSlot(TOPIC, 0, 0), listener, [b"1", b"2", b"3"])
    thread.put(batch)
    thread.start()
    report = inbox.get(timeout=LONG)
    thread.stop()
    assert isinstance(report, BatchReport)
    assert (report.committed, report.released, report.last) == ([b"1"], [b"2", b"3"], True)


def test_what_was_confirmed_longer_than_half_a_time_out_ago_does_not_begin() -> None:
    inbox, seen = SimpleQueue[Any](), Seen()
    thread = executor(inbox)
    batch = a_batch(ConsumedSlot(TOPIC, 0, 0), sleeping(seen), [b"1", b"2"])
    batch.confirmed -= TOPIC.timeout / 2 + 0.1
    thread.put(batch)
    thread.start()
    report = inbox.get(timeout=LONG)
    thread.stop()
    assert (report.committed, report.released) == ([], [b"1", b"2"])
    assert seen.most == 0


def test_what_waits_behind_a_batch_that_cannot_begin_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, slot, failed = SimpleQueue[Any](), ConsumedSlot(TOPIC, 0, 0), list[bytes]()
    begin = async_executor.AsyncBatch

    def fail_once(batch: Batch, *rest: Any) -> Any:
        if not failed:
            failed.append(batch.messages[0].delivery.member)
            raise MemoryError
        return begin(batch, *rest)

    monkeypatch.setattr(async_executor, "AsyncBatch", fail_once)
    thread = executor(inbox)
    for member in (b"1", b"2"):
        thread.put(a_batch(slot, sleeping(Seen(), 0), [member]))
    thread.start()
    reports = [inbox.get(timeout=LONG) for _ in range(2)]
    assert failed == [b"1"]
    assert [report.committed for report in reports] == [[], [b"2"]]
    thread.stop()
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_batch_whose_hook_fails_is_run_all_the_same() -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("a hook")

    inbox = SimpleQueue[Any]()
    thread = executor(inbox, hooks=NO_HOOKS._replace(overlapping=fails))
    thread.put(a_batch(ConsumedSlot(TOPIC, 0, 0), sleeping(Seen(), 0), [b"1"]))
    thread.start()
    assert inbox.get(timeout=LONG).committed == [b"1"]
    thread.stop()
