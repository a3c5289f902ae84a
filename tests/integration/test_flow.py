"""FLOW "auto" in a worker: a listener that becomes slow finds its pace, and its neighbours keep theirs."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest

from django_rmq.core.consumer.flow import AdaptiveConcurrency, FlowThreads
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from tests.support.workers import LONG, Heard, Worker, eventually, live, send, total

SLOW = Topic("slow", TopicType.RANGE_MERGE, slots=64, time_range_ms=0, flow="auto", backoff=BackOff(0, 0))
FREE = Topic("free", TopicType.RANGE_MERGE, slots=64, time_range_ms=0)


class Bottleneck:
    """A listener that needs one of a few of something for some time, and knows who runs and where."""

    def __init__(self, capacity: int, seconds: float) -> None:
        self.seconds = seconds
        self.running = self.most = self.done = 0
        self.threads: Counter[str] = Counter()
        self.slots: set[int] = set()
        self.overlapped = False
        self.go = threading.Event()
        self._few = threading.Semaphore(capacity)
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> None:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.threads[threading.current_thread().name] += 1
            self.overlapped = self.overlapped or message.slot in self.slots
            self.slots.add(message.slot)
        with self._few:
            self.go.wait(self.seconds)
        with self._lock:
            self.running -= 1
            self.done += 1
            self.slots.discard(message.slot)


def flow_of(worker: Worker) -> AdaptiveConcurrency:
    """Return the limit of the slow listener."""
    flow_threads = worker.dispatcher._capacity.flow_threads
    assert flow_threads is not None
    return flow_threads.flows["slow"]


@pytest.mark.slow
def test_the_limit_settles_at_what_the_bottleneck_takes(broker: Any) -> None:
    bottleneck = Bottleneck(3, 0.02)
    send(broker, SLOW, range(10_000))
    with Worker(broker, SLOW, bottleneck, threads=12) as worker:
        flow = flow_of(worker)
        seen: deque[int] = deque(maxlen=500)
        done = 0

        def has_settled() -> bool:
            nonlocal done
            if bottleneck.done > done:
                done = bottleneck.done
                seen.append(flow.limit)
            return len(seen) == 500 and 2 <= statistics.median(seen) <= 4

        eventually(has_settled, "settling at what the bottleneck takes", 60)
    assert not bottleneck.overlapped, "slots stay serial"


@pytest.mark.slow
def test_a_topic_with_a_flow_leaves_a_thread_to_the_others(broker: Any) -> None:
    bottleneck, heard = Bottleneck(100, LONG), Heard()
    send(broker, SLOW, range(300))
    with Worker(broker, [SLOW, FREE], {"slow": bottleneck, "free": heard}, threads=4) as worker:
        flow = flow_of(worker)
        flow.limit = flow.most
        eventually(lambda: bottleneck.running == 3, "a listener in each thread of its flow")
        for part in range(5):
            send(broker, FREE, range(part * 200, part * 200 + 200))
            heard.wait(part * 200 + 200, 20)
        assert bottleneck.most == 3
        bottleneck.go.set()
    assert not bottleneck.overlapped


@pytest.mark.parametrize("kind", [TopicType.RANGE_MERGE, TopicType.PRIORITY])
@pytest.mark.parametrize("serial", [True, False])
def test_failures_burst_and_every_kind_of_topic_end_well(broker: Any, kind: TopicType, serial: bool) -> None:
    merge = kind is TopicType.RANGE_MERGE
    topic = replace(
        SLOW, type=kind, serial=serial, time_range_ms=0 if merge else None, max_retries=2, slots=4
    )
    tries: Counter[int] = Counter()

    def listen(message: Message) -> bool:
        tries[message.body] += 1
        time.sleep(0.002)
        return message.body % 10 != 0

    send(broker, topic, range(200), **({} if merge else {"priority": 50}))
    with Worker(broker, topic, listen, threads=3, burst=True) as worker:
        worker.join(60)
    assert live(broker, topic) == 0
    assert total(broker, topic, "committed") == 180
    assert total(broker, topic, "died") == 20
    assert {tries[body] for body in range(0, 200, 10)} == {3}


def test_batches_have_a_flow_too(broker: Any) -> None:
    lengths: list[int] = []

    def listen(messages: list[Message]) -> None:
        lengths.append(len(messages))
        time.sleep(0.001)

    send(broker, SLOW, range(3000))
    with Worker(broker, SLOW, listen, batch_size=50, threads=4, burst=True) as worker:
        worker.join(60)
    assert sum(lengths) == 3000
    assert live(broker, SLOW) == 0


def test_a_flow_and_a_limit_hold_together(broker: Any) -> None:
    topic = replace(SLOW, max_in_flight=2)
    bottleneck = Bottleneck(100, 0.01)
    send(broker, topic, range(150))
    with Worker(broker, topic, bottleneck, threads=8, burst=True) as worker:
        worker.join(60)
    assert bottleneck.done == 150
    assert bottleneck.most == 2


def test_a_flow_takes_threads_from_above_and_the_others_go_below() -> None:
    flow_threads, load = FlowThreads([SLOW, FREE], 4), [0.0] * 4
    flow_threads.flows["slow"].limit = 2
    assert flow_threads.choose("slow", 0, load, 0.0) == 3
    flow_threads.started(1, "slow", 3)
    assert flow_threads.choose("slow", 0, load, 0.0) == 2
    flow_threads.started(2, "slow", 2)
    assert flow_threads.capacity("slow", 1) == 0
    assert flow_threads.capacity("slow", 2) == 2
    assert flow_threads.choose("slow", 0, load, 0.0) in (2, 3), "behind one that runs, not beside"
    assert flow_threads.choose("free", 3, load, 0.0) == 0
    assert flow_threads.choose("free", 1, load, 0.0) == 1, "no reason to move"
    assert flow_threads.choose("free", 1, [0.0, 0.5, 0, 0], 0.0) == 0
    flow_threads.ended(1, 5.0)
    assert flow_threads.choose("free", 3, load, 5.5) == 0, "its next message comes"
    assert flow_threads.choose("free", 3, load, 7.0) == 3
    assert flow_threads.capacity("free", 1) > 1000


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_one_thread_is_never_a_lane_where_others_need_one(threads: int) -> None:
    flow_threads = FlowThreads([SLOW, FREE], threads)
    flow = flow_threads.flows["slow"]
    assert flow.most == max(1, threads - 1)
    flow.limit = flow.most
    for number in range(flow.limit):
        flow_threads.started(number, "slow", flow_threads.choose("slow", 0, [0.0] * threads, 0.0))
    assert flow_threads.choose("free", threads - 1, [0.0] * threads, 0.0) == 0
    assert flow_threads.has_flow(0, 0.0) == (threads == 1)
    assert FlowThreads([SLOW], threads).flows["slow"].most == threads
