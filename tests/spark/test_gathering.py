"""How small and how large a batch is: `minMessagesPerTrigger` with `maxTriggerDelay`, and `maxBytesPerTrigger`."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from django_rmq.spark import stream_reader
from django_rmq.spark.stream_reader import MinBatch
from tests.spark.conftest import MakeQueue
from tests.spark.test_streaming import ALL, first_batch, reader, rows


def test_too_few_messages_wait_until_there_are_enough(queue: MakeQueue) -> None:
    topic = queue()
    topic.send([1, 2, 3])
    source = reader(topic, minMessagesPerTrigger="5")
    start = source.initialOffset()
    assert source.latestOffset(start, ALL) == start
    assert topic.depth("claimed") == 0
    topic.send([4, 5])
    end = source.latestOffset(start, ALL)
    assert end["rows"] == 5 and rows(source, start, end).total() == 5
    # What came meanwhile waits again; the last batch is acknowledged all the same.
    topic.send([6])
    assert source.latestOffset(end, ALL) == end
    assert topic.total("acked") == 5 and topic.depth("store") == 1


def test_too_few_messages_are_a_batch_when_they_have_waited_long_enough(queue: MakeQueue) -> None:
    topic = queue()
    topic.send([1])
    source = reader(topic, minMessagesPerTrigger="5", maxTriggerDelay="0.3")
    start, began = source.initialOffset(), time.monotonic()
    while (end := source.latestOffset(start, ALL)) == start:
        time.sleep(0.01)
    assert time.monotonic() - began >= 0.3 and end["rows"] == 1


def test_what_is_due_now_waits_for_no_more(queue: MakeQueue) -> None:
    topic = queue()
    topic.send([1])
    source = reader(topic, minMessagesPerTrigger="5")
    assert source.latestOffset(source.initialOffset(), ReadAllAvailable())["rows"] == 1
    topic = queue()
    topic.send([1])
    source = reader(topic, minMessagesPerTrigger="5")
    source.prepareForTriggerAvailableNow()
    assert source.latestOffset(source.initialOffset(), ALL)["rows"] == 1


def test_a_claim_that_a_dead_driver_has_left_waits_for_no_more(queue: MakeQueue) -> None:
    topic = queue()
    topic.send([1, 2])
    start = reader(topic).initialOffset()
    first = reader(topic).latestOffset(start, ALL)
    assert reader(topic, minMessagesPerTrigger="5").latestOffset(start, ALL) == first


def test_the_delay_begins_anew_with_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stream_reader, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found = MinBatch(10, 60.0)

    def at(seconds: float, due: int) -> bool:
        now[0] = seconds
        return found.is_enough(lambda: due)

    assert [at(0, 0), at(1, 3), at(60, 9), at(61, 9)] == [False, False, False, True]
    assert [at(62, 1), at(100, 10), at(101, 1), at(150, 1), at(161, 1)] == [False, True, False, False, True]
    # Nothing is due: another consumer has it, and what comes next waits from then on.
    assert [at(200, 1), at(230, 0), at(261, 1), at(320, 1), at(321, 1)] == [False, False, False, False, True]
    assert MinBatch(0, 60.0).is_enough(lambda: pytest.fail("nobody needs the number"))


@pytest.mark.parametrize("options", [{}, {"identity": "key"}])
def test_a_batch_has_about_as_many_bytes_as_were_allowed(queue: MakeQueue, options: dict[str, str]) -> None:
    topic = queue(slots=2, **options)
    for n in range(200):
        topic.send([f"{n:03}" + "x" * 995], **({"key": f"k{n}"} if options else {}))
    source = reader(topic, maxBytesPerTrigger="50000")
    _start, end = first_batch(source)
    assert 45 <= end["rows"] <= 51
    # One message is larger than that.
    small = reader(topic, maxBytesPerTrigger="10", consumerId="small")
    source.commit(end)
    assert small.latestOffset(small.initialOffset(), ALL)["rows"] <= 2
