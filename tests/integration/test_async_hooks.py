"""What Django has around async listeners: a thread for synchronous code, its connections, signals and spans."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection
from django.db import connections as databases
from django.dispatch import receiver
from django.test import override_settings
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from django_rmq import open_transactions
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.observability import telemetry
from django_rmq.signals import message_started
from django_rmq.worker import listener_hooks
from django_rmq.worker.listener_hooks import SyncThreads
from django_rmq.worker.listener_registry import isolated, listener, listeners

TOPIC = Topic("prices", TopicType.RANGE_MERGE)


def message(n: int = 1) -> Message:
    return Message(TOPIC, 0, 1, Delivery(b"%d" % n, 1.0, 16))


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which old connections were closed."""
    found: list[int] = []
    monkeypatch.setattr(open_transactions, "close_old", lambda: found.append(threading.get_ident()))
    return found


@pytest.fixture
def threads() -> Iterator[SyncThreads]:
    found = SyncThreads()
    yield found
    found.close()


def together(call: Any, count: int) -> list[Any]:
    """Await a function for so many messages at the same time, each in a task of its own."""

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(asyncio.create_task(call(message(n))) for n in range(count)))

    return asyncio.run(all_of_them())


def test_calls_that_overlap_have_threads_of_their_own_and_each_call_only_one(
    threads: SyncThreads, closed: list[int]
) -> None:
    begun = threading.Barrier(3)

    async def listen(message: Message) -> set[int]:
        first = await sync_to_async(threading.get_ident)()
        # Nobody comes by here before all three are in their threads.
        await sync_to_async(begun.wait)(10)
        return {first, await sync_to_async(threading.get_ident)()}

    found = together(threads.around(TOPIC, listen), 3)
    assert all(len(each) == 1 for each in found)
    assert len(set.union(*found)) == 3
    assert Counter(closed) == Counter(dict.fromkeys(set.union(*found), 1))


def test_a_thread_serves_the_next_call_and_connections_are_checked_before_and_after(
    threads: SyncThreads, closed: list[int]
) -> None:
    async def listen(message: Message) -> int:
        return await sync_to_async(threading.get_ident)()

    call = threads.around(TOPIC, listen)
    found = [together(call, 1)[0] for _ in range(3)]
    assert len(set(found)) == 1
    assert closed == found[:1] * 5


def test_a_call_without_synchronous_code_starts_no_thread(threads: SyncThreads, closed: list[int]) -> None:
    async def listen(message: Message) -> None:
        await asyncio.sleep(0)

    before = set(threading.enumerate())
    together(threads.around(TOPIC, listen), 20)
    assert set(threading.enumerate()) <= before
    assert closed == []


def test_after_a_failure_connections_are_checked_as_well(threads: SyncThreads, closed: list[int]) -> None:
    async def listen(message: Message) -> None:
        await sync_to_async(threading.get_ident)()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        together(threads.around(TOPIC, listen), 1)
    assert len(closed) == 1


def test_at_the_end_each_thread_closes_its_connections_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(databases, "close_all", lambda: closed.append(threading.get_ident()))
    threads = SyncThreads()

    async def listen(message: Message) -> int:
        return await sync_to_async(threading.get_ident)()

    [used] = together(threads.around(TOPIC, listen), 1)
    ended = [each for each in threading.enumerate() if each.ident == used]
    threads.close()
    for each in ended:
        each.join(10)
    assert closed == [used]


def test_a_call_in_another_loop_takes_no_thread_that_ends(
    threads: SyncThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that hung ends while its successor serves calls."""
    end, used = listener_hooks._end, list[int]()

    async def listen(message: Message) -> int:
        return await sync_to_async(threading.get_ident)()

    def end_beside_a_call(thread: Any) -> None:
        end(thread)
        if len(used) == 1:
            used.extend(together(call, 1))

    call = threads.around(TOPIC, listen)
    used += together(call, 1)
    monkeypatch.setattr(listener_hooks, "_end", end_beside_a_call)
    threads.close()
    assert len(used) == 2
    assert not threads._idle


def test_a_call_cancelled_twice_leaves_its_thread_to_what_runs_there_and_the_thread_ends(
    threads: SyncThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    monkeypatch.setattr(databases, "close_all", lambda: closed.append(threading.get_ident()))
    used: list[int] = []
    begun, may_end = threading.Event(), threading.Event()

    def blocks() -> None:
        used.append(threading.get_ident())
        begun.set()
        may_end.wait(30)

    async def listen(message: Message) -> int:
        if message.slot:
            return await sync_to_async(threading.get_ident)()
        await sync_to_async(blocks)()
        return 0

    async def cancel_twice() -> int:
        call = threads.around(TOPIC, listen)
        task = asyncio.ensure_future(call(message()))
        await asyncio.to_thread(begun.wait, 30)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        # The next call does not wait for what still runs.
        other = await asyncio.wait_for(call(Message(TOPIC, 1, 1, Delivery(b"2", 1.0, 16))), 10)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return int(other)

    other = asyncio.run(cancel_twice())
    for each in [each for each in threading.enumerate() if each.ident == used[0]]:
        each.join(10)
    assert closed == used
    assert other != used[0]


def test_the_orm_without_await_is_refused_as_everywhere_in_django(threads: SyncThreads) -> None:
    async def listen(message: Message) -> None:
        connection.cursor()

    with pytest.raises(SynchronousOnlyOperation):
        together(threads.around(TOPIC, listen), 1)


def test_a_coroutine_function_overlaps_and_with_once_it_does_not() -> None:
    async def later(message: Any) -> str:
        return f"{message} handled"

    with isolated():
        listener("a")(later)
        listener("b", once=True)(later)
        listener("c")(lambda message: None)
        found = listeners()
        assert found["a"].coroutine is later
        assert found["a"].function("x") == "x handled", "tests call it without an event loop"
        assert found["b"].coroutine is None
        assert found["c"].coroutine is None


def test_receivers_of_the_start_are_called_where_they_may_use_the_database(threads: SyncThreads) -> None:
    seen: list[Any] = []

    @receiver(message_started, sender="prices")
    def started(messages: list[Message], **_: Any) -> None:
        seen.append((messages[0].body, threading.get_ident()))

    @receiver(message_started, sender="prices")
    async def later(messages: list[Message], **_: Any) -> None:
        await asyncio.sleep(0)
        seen.append(messages[0].body)

    @receiver(message_started, sender="prices")
    def fails(**_: Any) -> None:
        raise ValueError("a receiver")

    async def listen(message: Message) -> int:
        seen.append("called")
        return await sync_to_async(threading.get_ident)()

    try:
        [used] = together(threads.around(TOPIC, listen), 1)
    finally:
        for each in (started, later, fails):
            message_started.disconnect(each, sender="prices")
    assert seen[-1] == "called"
    assert (0, used) in seen
    assert 0 in seen


def test_a_call_has_a_span_that_is_current_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)

    async def listen(message: Message) -> bool:
        mine = trace.get_current_span().get_span_context().span_id
        await asyncio.sleep(0.01)
        assert trace.get_current_span().get_span_context().span_id == mine != 0
        return message.body != 1

    with override_settings(RMQ={"BROKER": "memory", "TRACING": True, "TOPICS": {}}):
        assert together(telemetry.around_async(TOPIC, listen), 3) == [True, False, True]
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["process prices"] * 3
    assert sorted(span.status.status_code is StatusCode.ERROR for span in spans) == [False, False, True]
    assert len({span.context.trace_id for span in spans if span.context}) == 3
