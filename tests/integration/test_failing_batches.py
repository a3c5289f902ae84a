"""A list that raises is settled in one pass, on topics of every kind: one bad message costs its neighbours one more run."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from typing import Any

import pytest

from django_rmq.core.consumer import batch_run, executor_pool
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from tests.support.workers import LONG, Worker, audit, eventually, live, send, total

AT_ONCE = BackOff(0, 0)
KINDS: dict[str, dict[str, Any]] = {
    "priority": {"type": TopicType.PRIORITY},
    "priority, not serial": {"type": TopicType.PRIORITY, "serial": False},
    "range_merge": {"type": TopicType.RANGE_MERGE, "time_range_ms": 0},
    "range_merge, not serial": {"type": TopicType.RANGE_MERGE, "time_range_ms": 0, "serial": False},
    "fixed_time": {"type": TopicType.FIXED_TIME},
}


def options(topic: Topic) -> dict[str, Any]:
    if topic.is_priority:
        return {"priority": 100}
    return {"fixed_time": int(time.time() * 1000) + 300} if topic.type is TopicType.FIXED_TIME else {}


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for something better waits no longer than a few calls of the listener."""
    monkeypatch.setattr(batch_run, "PATIENCE_SECONDS", 0.005)
    monkeypatch.setattr(executor_pool, "REFRESH_SECONDS", 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 20, 500])
@pytest.mark.parametrize("kind", KINDS)
def test_a_list_that_raises_is_settled_in_one_pass(broker: Any, kind: str, size: int) -> None:
    topic = Topic("prices", slots=1, backoff=AT_ONCE, **KINDS[kind])
    count = 100 if size == 500 else 40
    runs: Counter[int] = Counter()
    alone: Counter[int] = Counter()
    receipts: defaultdict[int, set[int]] = defaultdict(set)
    lock, pause = threading.Lock(), threading.Event()

    def listener(many: list[Message]) -> None:
        with lock:
            for message in many:
                runs[message.body] += 1
                receipts[message.body].add(message.receipt)
                alone[message.body] += len(many) == 1
        fails = any(message.body == 3 for message in many)
        # Longer than the patience, on a busy machine too, so that the rest of the batch is wanted back while its list runs.
        pause.wait(0.002 if len(many) == 1 else 0.4 if fails else 0.05)
        if fails:
            raise ValueError("three")

    send(broker, topic, range(count), **options(topic))
    with Worker(broker, topic, listener, batch_size=size, threads=3):
        eventually(lambda: live(broker, topic) == 0, "the end of all", 3 * LONG)
    good = {body: times for body, times in runs.items() if body != 3}
    assert len(good) == count - 1
    assert max(good.values()) <= 2
    assert len(receipts[3]) == alone[3] == 1 + topic.max_retries
    assert runs[3] <= alone[3] + 1, "once in a list"
    ends = (total(broker, topic, "committed"), sum(ledger.dead for ledger in audit(broker, topic)))
    assert ends == (count - 1, 1)


def test_a_list_is_settled_in_one_pass_though_it_fails_while_the_rest_of_its_batch_is_taken_again(
    broker: Any,
) -> None:
    topic = Topic("prices", TopicType.PRIORITY, slots=1, serial=False)
    lists: list[list[int]] = []
    is_wanted_back = threading.Event()

    def listener(many: list[Message]) -> None:
        lists.append([message.body for message in many])
        if len(lists) == 1:
            batches = worker.dispatcher._in_flight.batches
            halted = lambda: any(each.begun and each.halted for each in batches.values())  # noqa: E731
            eventually(halted, "the rest being taken again")
            is_wanted_back.set()
            raise ValueError

    send(broker, topic, range(20), **options(topic))
    with Worker(broker, topic, listener, batch_size=10, threads=1) as worker:
        eventually(lambda: live(broker, topic) == 0, "the end of all")
    assert is_wanted_back.is_set()
    assert len(lists[0]) == 10
    assert lists[1:11] == [[body] for body in lists[0]]
    assert sorted(body for many in lists[11:] for body in many) == sorted(set(range(20)) - set(lists[0]))


@pytest.mark.parametrize("serial", [True, False])
def test_a_worker_that_stops_gives_back_the_rest_of_a_list_that_raised(broker: Any, serial: bool) -> None:
    topic = Topic("prices", TopicType.PRIORITY, slots=1, serial=serial)
    begun, go = threading.Event(), threading.Event()
    runs: Counter[int] = Counter()

    def listener(many: list[Message]) -> None:
        runs.update(message.body for message in many)
        if len(many) > 1:
            raise ValueError
        begun.set()
        assert go.wait(LONG)

    send(broker, topic, range(20), **options(topic))
    with Worker(broker, topic, listener, batch_size=20, threads=1) as worker:
        assert begun.wait(LONG)
        worker.dispatcher.stop()
        eventually(lambda: worker.dispatcher._shutdown.begun, "the stop being heard")
        batches = worker.dispatcher._in_flight.batches
        eventually(lambda: all(batch.dropped for batch in batches.values()), "the end of the pass")
        go.set()
    assert sorted(runs.values()) == [1] * 19 + [2]
    [ledger] = audit(broker, topic)
    assert (ledger["committed"], ledger["failed"], ledger.store) == (1, 0, 19)
