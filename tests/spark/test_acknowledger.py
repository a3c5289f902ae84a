"""A batch is acknowledged right after Spark's commit, not when the query polls again."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from django_rmq.core.commands.broker_interface import walk
from django_rmq.core.model.topic import TopicType
from django_rmq.spark.stream_reader import ranges, slots_in
from tests.spark.conftest import MakeQueue, Queue, begin
from tests.spark.test_streaming import ALL, fill, first_batch, reader
from tests.support.workers import Worker, eventually


@contextmanager
def started(spark: Any, queue: Queue, checkpoint: Path, into: Any, seconds: int) -> Iterator[None]:
    query = begin(queue.stream(spark, claimTimeout="3"), into, checkpoint, every=f"{seconds} seconds")
    try:
        yield
    finally:
        query.stop()


def test_a_query_that_is_stopped_between_two_polls_delivers_nothing_twice(
    spark: Any, queue: MakeQueue, tmp_path: Path
) -> None:
    from django_rmq.spark.acknowledger import Acknowledger

    topic = queue(slots=4)
    other = queue(slots=1)
    topic.send(list(range(1_000)))
    seen: Counter[str] = Counter()

    def into(frame: Any, number: int) -> None:
        seen.update(bytes(row.value).decode() for row in frame.collect())

    listeners = [Acknowledger(other.options), Acknowledger(topic.options)]
    for listener in listeners:
        spark.streams.addListener(listener)
    try:
        with started(spark, topic, tmp_path, into, 600):
            eventually(lambda: topic.total("acked") == 1_000, "the acknowledgement", 250)
        # Longer than the lease, while a worker sees to leases that end.
        with Worker(topic.broker, [topic.topic, other.topic], lambda message: seen.update(["worker"])):
            time.sleep(4)
        topic.send(["later"])
        with started(spark, topic, tmp_path, into, 1):
            eventually(lambda: topic.total("acked") == 1_001, "the rest", 250)
    finally:
        for listener in listeners:
            spark.streams.removeListener(listener)
    assert len(seen) == 1_001 and set(seen.values()) == {1}
    assert topic.total("claim_returned") == 0


def test_a_claim_that_was_acknowledged_by_a_listener_is_no_loss(
    queue: MakeQueue, caplog: pytest.LogCaptureFixture
) -> None:
    from django_rmq.spark.acknowledger import acknowledge

    topic = queue(slots=4)
    topic.send(list(range(100)))
    source, _start, end = first_batch(topic, claimTimeout="1")
    with caplog.at_level(logging.WARNING, "django_rmq.spark"):
        assert acknowledge(topic.options, end) == 4
        # The thread that renews finds the claims gone.
        eventually(lambda: not source._claims.lease.slots(1), "a renewal", 20)
        assert acknowledge(topic.options, end) == 4
        topic.send(["more"])
        following = source.latestOffset(end, ALL)
        # Late, it touches nothing of the next batch.
        assert acknowledge(topic.options, end) == 3
    assert (following["claim"], following["rows"]) == (2, 1)
    # Another query's listener may still have something to say.
    assert topic.topic.name not in caplog.text
    assert (topic.total("acked"), topic.depth("claimed")) == (100, 1)


def test_an_offset_of_another_source_is_left_alone(queue: MakeQueue) -> None:
    from django_rmq.spark.acknowledger import Acknowledger

    # Kafka's are objects with the names of its topics.
    offsets = ['{"consumer":{"0":5}}', '{"claim":{"0":5}}', "17", "[1]", "no JSON", None]
    progress = {"sources": [{"startOffset": None, "endOffset": offset} for offset in offsets]}
    Acknowledger(queue().options).acknowledge(progress)


def test_only_slots_that_a_batch_holds_are_asked(queue: MakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = queue(TopicType.FIXED_TIME, slots=4_096)
    fill(topic, {7: 10, 8: 10, 900: 10}, 2)
    source, start, end = first_batch(topic)
    assert (end["held"], end["rows"], end["topic"]) == ("7-8,900", 6, topic.topic.name)

    # Not counted by the server, which leases of other tests' claims may still ask.
    asked: list[Any] = []

    def noted(broker: Any, calls: Iterable[Any], *at_once: int) -> Iterator[Any]:
        calls = list(calls)
        # The threads that renew the leases of other tests ask too.
        if threading.current_thread() is threading.main_thread():
            asked.extend(calls)
        return walk(broker, calls, *at_once)

    monkeypatch.setattr("django_rmq.spark.claims.walk", noted)
    # Another driver renews the leases that it takes over.
    for driver, renewed in ((source, 0), (reader(topic), 3)):
        asked.clear()
        assert len(driver.partitions(start, end)) == 1
        assert Counter(call.script for call in asked) == Counter(read_claim=3, renew_claim=renewed)
    # A batch of which an offset does not name the slots, because they are too many, has all of them asked.
    end["held"] = None
    assert len(source.partitions(start, end)) == 1


@pytest.mark.parametrize(
    ("slots", "text"),
    [([], ""), ([3], "3"), ([2, 0, 1], "0-2"), ([0, 1, 5, 7, 8, 9], "0-1,5,7-9"), (range(0, 5_000, 2), None)],
)
def test_slots_are_told_as_ranges(slots: Any, text: str | None) -> None:
    assert ranges(slots) == text
    assert slots_in(text, 5_000) == (sorted(slots) if text is not None else list(range(5_000)))
