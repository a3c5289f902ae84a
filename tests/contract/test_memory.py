"""What the broker in memory adds to the rules: threads, pipelines, a clock; and what it does without."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from django_rmq.core.memory.broker import InMemoryBroker
from django_rmq.core.memory.clock import Clock
from django_rmq.core.redis.broker import Broker, Pipeline
from django_rmq.core.words.topics import Topic, TopicType
from django_rmq.exceptions import SlotMoved
from tests.contract.slots import START_MS, TYPES, Slot

MakeSlot = Callable[..., Slot]


def test_it_needs_neither_redis_nor_django() -> None:
    code = (
        "import sys, django_rmq.core.memory.broker; "
        "print([name for name in sys.modules if name.split('.')[0] in ('redis', 'django', 'hiredis')])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_it_has_every_public_method_of_the_broker() -> None:
    def public(cls: type) -> set[str]:
        return {name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))}

    assert public(InMemoryBroker) >= public(Broker)
    pipeline = InMemoryBroker().pipeline()
    # What reads past the scripts is asked for by Spark alone, and never of memory.
    asked = public(Pipeline) - {"rank", "rows"}
    assert all(callable(getattr(pipeline, name)) for name in asked)


@pytest.mark.parametrize("kind", TYPES)
def test_a_pipeline_answers_each_call_in_order_and_errors_in_their_places(
    make_slot: MakeSlot, kind: TopicType
) -> None:
    slot = make_slot(kind, slots=4)
    slot.send(b"a")
    broker, topic = slot.broker, slot.topic
    pipeline = broker.pipeline()
    assert pipeline.execute() == []
    score = 0 if kind is TopicType.RANGE_MERGE else slot.fresh_score()
    indexes = [
        pipeline.ensure(topic, 0, [score], [b"a"]),
        pipeline.ensure(slot.with_topic(slots=8).topic, 0, [score], [b"b"]),
        pipeline.prepare(topic, 0, "A", None, 5),
        pipeline.commit(topic, 0, 1, [b"a"]),
    ]
    assert indexes == [0, 1, 2, 3] and len(pipeline) == 4
    present, moved, prepared, committed = pipeline.send().receive()
    assert present[0].status == "present" and isinstance(moved, SlotMoved)
    assert prepared.deliveries[0].member == b"a" and committed == ["ok"]
    assert len(pipeline) == 0


class Call(NamedTuple):
    name: str
    given: Mapping[str, Any]


def test_a_transition_that_is_a_value_is_found_by_its_name() -> None:
    broker, topic = InMemoryBroker(clock=Clock(START_MS)), Topic("t", TopicType.PRIORITY, slots=1)
    place = {"topic": topic, "slot": 0}
    sent = broker.run(Call("send_replace", {**place, "scores": [50], "members": [b"a"], "envelopes": ()}))
    assert [(one.status, one.score) for one in sent] == [("stored", 50)]
    page = broker.run(Call("peek", {**place, "state": "store", "after": None, "limit": 5}))
    assert [entry.member for entry in page.entries] == [b"a"]
    assert broker.run(Call("heads", {"topic": topic, "slots": [0]})) == broker.heads(topic, [0]) == [0]


def test_the_time_is_the_brokers(broker: Any, clock: Clock) -> None:
    broker.ping()
    assert broker.now_ms() == START_MS
    clock.advance(seconds=1.5, ms=-0.2)
    assert broker.now_ms() == START_MS + 1_499
    assert clock() == START_MS * 1000 + 1_499_800


def test_without_a_clock_it_goes_by_the_machines() -> None:
    broker = InMemoryBroker()
    before = time.time_ns() // 1_000_000
    assert before <= broker.now_ms() <= time.time_ns() // 1_000_000
    topic = Topic("t", TopicType.RANGE_MERGE, slots=1)
    broker.send_merge(topic, 0, 0, [b"a"])
    assert broker.prepare(topic, 0, "A", None, 1).status == "ok"


def test_a_thread_that_waits_for_a_wake_up_is_woken_by_another() -> None:
    broker, topic = InMemoryBroker(), Topic("t", TopicType.PRIORITY, slots=1)
    wakeups = broker.wakeups([topic])
    assert wakeups.get() == []
    broker.prepare(topic, 0, "A", None, 1)
    waiting = threading.Event()
    heard: list[tuple[str, int]] = []

    def wait() -> None:
        waiting.set()
        heard.extend(wakeups.get(30))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(30)
    broker.send_replace(topic, 0, [50], [b"a"])
    thread.join(30)
    assert heard == [("t", 0)]
    wakeups.close()
    broker.prepare(topic, 0, "A", None, 5)
    broker.prepare(topic, 0, "A", None, 5)
    broker.send_replace(topic, 0, [50], [b"b"])
    assert wakeups.get() == []
    with pytest.raises(OSError, match="descriptor"):
        wakeups.fileno()


@pytest.mark.parametrize("serial", [True, False])
def test_threads_that_send_and_take_at_once_lose_and_double_nothing(serial: bool) -> None:
    broker = InMemoryBroker()
    topic = Topic("t", TopicType.PRIORITY, slots=1, serial=serial)
    members = [b"%04d" % n for n in range(600)]
    done: list[bytes] = []

    def send(part: list[bytes]) -> None:
        for member in part:
            broker.send_replace(topic, 0, [50], [member])

    def take(owner: str) -> None:
        while len(done) < len(members):
            answer = broker.prepare(topic, 0, owner, None, 7)
            taken = [delivery.member for delivery in answer.deliveries]
            if taken:
                assert broker.commit(topic, 0, answer.receipt, taken) == ["ok"] * len(taken)
                done.extend(taken)

    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(send, members[n::3]) for n in range(3)]
        jobs += [pool.submit(take, owner) for owner in "ABC"]
        for job in jobs:
            job.result(60)
    assert sorted(done) == members
    assert broker.audit(topic, 0).balanced


def test_a_clock_that_is_given_starts_where_it_is_told() -> None:
    clock = Clock(start_ms=5)
    assert clock() == 5_000
    clock.advance(ms=0.001)
    clock.advance(seconds=2)
    assert clock() == 2_005_001
