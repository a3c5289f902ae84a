"""The stream source as Spark's engine calls it, without a session: kills, late requests, leases, many slots."""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from django_rmq.core import reslotting
from django_rmq.core.model.replies import Claimed, Counts, Failure
from django_rmq.core.model.topic import BackOff, TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import ConfigurationError, LostRace, SlotMoved
from django_rmq.spark import stream_reader
from django_rmq.spark.failing import fail_batch
from django_rmq.spark.reader import COLUMNS, FIRST_PAGE, METADATA, PAGE_BYTES, PAGES
from django_rmq.spark.source_options import STREAM, SourceOptions
from django_rmq.spark.stream_reader import ClaimPart, MinBatch, StreamReader, split
from tests.spark.conftest import MakeQueue, Queue
from tests.support.workers import eventually

ALL = ReadMaxRows(1_000_000)
NOTHING = Counts(0, 0, 0, 0, 0, 0, None)


def reader(queue: Queue, **options: str) -> StreamReader:
    """Make a driver's reader, as a started query does."""
    given = SourceOptions({**queue.options, "pollInterval": "0", **options}, STREAM, "spark.readStream")
    return StreamReader(given, METADATA if given.metadata else COLUMNS)


def first_batch(
    queue: Queue, limit: Any = ALL, **options: str
) -> tuple[StreamReader, dict[str, Any], dict[str, Any]]:
    """Return the reader of a new query, where it starts, and where its first batch ends."""
    source = reader(queue, **options)
    start = source.initialOffset()
    return source, start, source.latestOffset(start, limit)


def plan(source: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
    """Return the tasks of a batch, as executors get them: through JSON and pickle."""
    start, end = json.loads(json.dumps(start)), json.loads(json.dumps(end))
    return [pickle.loads(pickle.dumps((source, task))) for task in source.partitions(start, end)]


def read(source: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[dict[str, Any]]:
    """Read a batch."""
    tasks = plan(source, start, end)
    return [row for executor, task in tasks for batch in executor.read(task) for row in batch.to_pylist()]


def rows(source: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> Counter[bytes]:
    """Read the bodies of a batch."""
    return Counter(row["value"] for row in read(source, start, end))


def slots_of(source: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> Counter[int]:
    """Return how many rows of which slot a batch has."""
    return Counter(row["slot"] for row in read(source, start, end))


def fail_all(topic: Queue, slot: int, error: str = "no", delay: int | None = 0, count: int = 1_000) -> None:
    """Let a worker take what waits in a slot, and fail it."""
    taken = topic.broker.prepare(topic.topic, slot, "A", None, count)
    if taken.deliveries:
        failures = [Failure(one.member, "failed", delay, error) for one in taken.deliveries]
        topic.broker.rollback(topic.topic, slot, taken.receipt, failures)


def return_all(topic: Queue, consumer: str) -> None:
    """Let the first claim of a consumer be lost, in all slots."""
    for slot in range(topic.topic.slots):
        while topic.broker.return_claim(topic.topic, slot, consumer, 1, spent=True)[1]:
            pass


@pytest.fixture
def begun(queue: MakeQueue) -> Callable[..., tuple[Queue, StreamReader, dict[str, Any]]]:
    def begin(count: int = 10, **options: Any) -> tuple[Queue, StreamReader, dict[str, Any]]:
        topic = queue(**options)
        topic.send(list(range(count)))
        source = reader(topic)
        return topic, source, source.initialOffset()

    return begin


def test_a_batch_is_read_again_with_the_same_rows_until_it_is_committed(begun: Any) -> None:
    topic, source, start = begun(5_000, slots=8, identity="key")
    end = source.latestOffset(start, ALL)
    assert (end["claim"], end["rows"]) == (1, 5_000)
    first = rows(source, start, end)
    assert first.total() == len(first) == 5_000
    topic.send(["more"])
    assert rows(source, start, end) == first == rows(reader(topic), start, end)
    assert topic.depth("claimed") == 5_000
    following = source.latestOffset(end, ALL)
    assert (following["claim"], following["rows"]) == (2, 1)
    assert topic.total("acked") == 5_000
    source.commit(end)
    with pytest.raises(LostRace, match="the checkpoint is older"):
        rows(source, start, end)
    assert rows(source, end, following) == {b'"more"': 1}


def test_rows_tell_key_headers_and_failures(queue: MakeQueue) -> None:
    topic = queue(slots=1, identity="key", max_retries=5)
    topic.send([{"n": 1}], key="sku-1", headers={"trace": "abc"})
    fail_all(topic, 0, "ValueError: no good")
    topic.send([{"n": 2}], key="sku-2")
    source, start, end = first_batch(topic, includeMetadata="true")
    found = {row["key"]: row for row in read(source, start, end)}
    assert {key: row["value"] for key, row in found.items()} == {b"sku-1": b'{"n":1}', b"sku-2": b'{"n":2}'}
    failed, fresh = found[b"sku-1"], found[b"sku-2"]
    assert (failed["headers"], fresh["headers"]) == ([("trace", "abc")], None)
    assert (failed["failures"], failed["retries"], failed["error"]) == (1, 4, "ValueError: no good")
    assert (fresh["failures"], fresh["retries"], fresh["error"]) == (None, 5, None)
    assert {row["queue"] for row in found.values()} == {"claim"}


@pytest.mark.parametrize("identity", ["body", "key"])
def test_rows_with_metadata_are_those_of_the_claim_in_every_part(queue: MakeQueue, identity: str) -> None:
    topic = queue(slots=2, identity=identity)
    topic.send(list(range(5_000)))
    source, start, end = first_batch(topic, includeMetadata="true", minPartitions="7")
    first = rows(source, start, end)
    assert first.total() == len(first) == 5_000
    assert rows(source, start, end) == first


def test_nothing_to_claim_is_the_same_offset_and_no_task(begun: Any) -> None:
    topic, source, start = begun(0)
    # Spark asks where to begin more than once.
    assert source.initialOffset() == start != reader(topic).initialOffset()
    assert source.latestOffset(start, ALL) == start
    assert source.partitions(start, start) == []
    assert topic.total("claimed") == 0


def fill(topic: Queue, ages: dict[int, int], count: int = 100) -> None:
    """Send ``count`` messages to each slot, the first of which has been due for so many seconds."""
    now = topic.broker.now_ms()
    for slot, age in ages.items():
        due = [now - age * 1_000 + n for n in range(count)]
        topic.broker.send_replace(topic.topic, slot, due, [b"%d %d" % (slot, n) for n in range(count)])


def put(topic: Queue, counts: Sequence[int], scores: Sequence[int]) -> None:
    """Put as many messages into each slot, all with its score."""
    for slot, (count, score) in enumerate(zip(counts, scores, strict=True)):
        for first in range(0, count, 1_000):
            members = [b"%d %d" % (slot, n) for n in range(first, min(count, first + 1_000))]
            topic.broker.send_replace(topic.topic, slot, [score] * len(members), members)


def test_slots_of_a_topic_of_time_are_consumed_whole_the_oldest_first(queue: MakeQueue) -> None:
    topic = queue(TopicType.FIXED_TIME, slots=4)
    fill(topic, {0: 100, 1: 400, 2: 200, 3: 300})
    source = reader(topic)
    offset, seen = source.initialOffset(), []
    while (end := source.latestOffset(offset, ReadMaxRows(150))) != offset:
        seen.append(slots_of(source, offset, end))
        if len(seen) == 1:
            # What a slot gets now is younger than what waits elsewhere.
            fill(topic, {1: 1})
        offset = end
    assert seen == [{1: 100, 3: 50}, {3: 50, 2: 100}, {0: 100, 1: 50}, {1: 50}]


@pytest.mark.parametrize("budget", [8_000, 9_000, 1_000_000])
def test_slots_that_fit_are_claimed_by_their_names(queue: MakeQueue, budget: int) -> None:
    topic = queue(slots=2)
    put(topic, [4_000, 4_000], [100, 100])
    source = reader(topic)
    start = source.initialOffset()
    topic.broker.client.config_resetstat()
    assert source.latestOffset(start, ReadMaxRows(budget))["rows"] == 8_000
    told = topic.broker.client.info("commandstats")
    assert told["cmdstat_rename"]["calls"] == 2 and "cmdstat_zrangestore" not in told


def test_a_slot_that_is_larger_than_a_batch_does_not_starve_the_others(queue: MakeQueue) -> None:
    topic = queue(TopicType.FIXED_TIME, slots=2)
    fill(topic, {0: 900}, 300)
    fill(topic, {1: 600}, 10)
    source = reader(topic)
    offset, seen = source.initialOffset(), []
    for batch in range(4):
        end = source.latestOffset(offset, ReadMaxRows(100))
        seen.append(slots_of(source, offset, end))
        offset = end
        # The large one gets as much again.
        topic.broker.send_replace(
            topic.topic, 0, [topic.broker.now_ms()] * 100, [b"more %d %d" % (batch, n) for n in range(100)]
        )
    assert seen == [{0: 100}, {0: 100}, {0: 100}, {1: 10, 0: 90}]


def test_a_slot_that_gives_nothing_keeps_no_budget_from_the_others(queue: MakeQueue) -> None:
    topic = queue(TopicType.FIXED_TIME, slots=4)
    fill(topic, {0: 400, 1: 300, 2: 200, 3: 100})
    topic.broker.pause(topic.topic, 0)
    held = topic.broker.prepare(topic.topic, 1, "A", None, 1)
    assert topic.broker.claim(topic.topic, 2, "another", 1, 60_000, 1).taken == 1
    topic.broker.renew_claim(topic.topic, 2, "another", 1, 60_000, seal=True)
    source, start, end = first_batch(topic, ReadMaxRows(50))
    assert slots_of(source, start, end) == {3: 50}
    topic.broker.return_claim(topic.topic, 2, "another", 1, spent=True)
    topic.broker.release(topic.topic, 1, held.receipt, [held.deliveries[0].member])
    topic.broker.pause(topic.topic, 0, False)
    following = source.latestOffset(end, ReadMaxRows(250))
    # What came back is a retry, and older than anything.
    assert slots_of(source, end, following) == {2: 100, 0: 100, 1: 50}


def test_the_most_urgent_of_all_slots_are_consumed_first(queue: MakeQueue) -> None:
    topic = queue(slots=4)
    for slot, count in enumerate((100, 200, 300, 400)):
        members = [b"%d %d" % (slot, n) for n in range(count)]
        topic.broker.send_replace(topic.topic, slot, list(range(1_000, 1_000 + count)), members)
    source, start, end = first_batch(topic, ReadMaxRows(100))
    assert slots_of(source, start, end) == {0: 10, 1: 20, 2: 30, 3: 40}
    for slot, count in enumerate((100, 200, 300, 400)):
        left = [entry.score for entry in topic.broker.list_messages(topic.topic, slot, "store").entries]
        assert max(left) < 1_000 + count * 9 // 10


def test_no_slot_of_a_priority_topic_starves_where_a_batch_is_smaller_than_the_slots_are_many(
    queue: MakeQueue,
) -> None:
    topic = queue(slots=8)
    put(topic, [400] * 8, [100] * 8)
    source = reader(topic)
    offset, seen = source.initialOffset(), Counter[int]()
    # By chance: one in 10^11 would fail.
    for _ in range(200):
        end = source.latestOffset(offset, ReadMaxRows(1))
        seen += slots_of(source, offset, end)
        offset = end
        if len(seen) == 8:
            break
    assert seen.keys() == set(range(8))


def test_a_driver_that_dies_before_it_logs_its_offset_finds_its_claim_again(begun: Any) -> None:
    topic, source, start = begun(100)
    end = source.latestOffset(start, ALL)
    topic.send(["more"])
    # Nor does it wait for more messages.
    again = reader(topic, minMessagesPerTrigger="1000").latestOffset(start, ALL)
    assert again == end


def test_a_driver_that_dies_in_the_middle_of_claiming_goes_on_with_what_it_had(begun: Any) -> None:
    topic, source, start = begun(100, slots=4)
    consumer = start["consumer"]
    assert topic.broker.claim(topic.topic, 1, consumer, 1, 60_000, 1_000).taken
    end = source.latestOffset(start, ALL)
    assert end["claim"] == 1 and 0 < end["rows"] < 100
    found = rows(source, start, end)
    following = source.latestOffset(end, ALL)
    found += rows(source, end, following)
    assert found.total() == len(found) == 100


def test_a_claim_that_comes_too_late_for_its_batch_is_given_back_unread(begun: Any) -> None:
    topic, source, start = begun(0, slots=4)
    topic.broker.send_replace(topic.topic, 0, [100], [b"1"])
    end = source.latestOffset(start, ALL)
    topic.broker.send_replace(topic.topic, 2, [100], [b"2"])
    late = topic.broker.claim(topic.topic, 2, start["consumer"], 1, 60_000, 10)
    assert late.taken == 1
    assert rows(source, start, end) == {b"1": 1}
    # A new driver looks at every slot; the old one would leave it to the lease.
    following = reader(topic).latestOffset(end, ALL)
    assert (following["claim"], following["rows"]) == (2, 1)
    assert rows(source, end, following) == {b"2": 1}
    assert (topic.total("acked"), topic.total("claim_returned")) == (1, 1)


def test_a_lost_claim_is_replayed_as_nothing_and_its_number_is_not_used_again(
    begun: Any, caplog: pytest.LogCaptureFixture
) -> None:
    topic, source, start = begun(20, slots=2, backoff=BackOff(0, 0))
    end = source.latestOffset(start, ALL)
    return_all(topic, start["consumer"])
    with caplog.at_level(logging.WARNING, "django_rmq.spark"):
        replaying = reader(topic)
        assert rows(replaying, start, end) == {}
    assert f"Claim 1 of topic {topic.topic.name}: 20 messages are no longer held" in caplog.text
    stops = "20 messages are no longer held .* or they were given back.* until it is started without failOnDataLoss"
    with pytest.raises(LostRace, match=stops):
        reader(topic, failOnDataLoss="true").partitions(start, end)
    following = replaying.latestOffset(end, ALL)
    assert (following["claim"], following["rows"]) == (2, 20)
    # Told once, not again for each slot and each look.
    assert caplog.text.count("WARNING") == 1


@pytest.mark.parametrize("metadata", ["false", "true"])
def test_a_claim_lost_while_it_is_read_fails_the_task_which_then_reads_nothing(
    queue: MakeQueue, metadata: str
) -> None:
    topic = queue(slots=1)
    topic.send(list(range(2_500)))
    source, start, end = first_batch(topic, includeMetadata=metadata)
    [(executor, task)] = plan(source, start, end)
    reading = executor.read(task)
    assert next(reading).num_rows == FIRST_PAGE
    return_all(topic, start["consumer"])
    with pytest.raises(LostRace, match="while it was being read"):
        list(reading)
    assert list(executor.read(task)) == []


@pytest.mark.parametrize("metadata", ["false", "true"])
@pytest.mark.parametrize("has_gone_on", [False, True])
def test_a_batch_that_another_driver_has_recorded_is_not_read_as_nothing(
    queue: MakeQueue, metadata: str, has_gone_on: bool
) -> None:
    """Two drivers from one checkpoint: the later one would replace the batch in its sink by an empty one."""
    topic = queue(slots=1)
    topic.send([1, 2, 3])
    one, start, end = first_batch(topic, includeMetadata=metadata, consumerId="loader")
    other = reader(topic, includeMetadata=metadata)
    [(executor, task)] = plan(other, start, end)
    assert rows(one, start, end).total() == 3
    topic.send([4] if has_gone_on else [])
    # Spark has recorded the batch for the first one.
    assert one.latestOffset(end, ALL)["claim"] == (2 if has_gone_on else 1)
    with pytest.raises(LostRace, match=r"claim 1 of topic .* another query has recorded it, from the same"):
        list(executor.read(task))


def test_an_acknowledgement_tidies_failures_in_steps(begun: Any) -> None:
    topic, source, start = begun(2_500, slots=1)
    fail_all(topic, 0)
    end = source.latestOffset(start, ALL)
    assert end["rows"] == 2_500
    assert source.latestOffset(end, ALL) == end
    assert topic.total("acked") == 2_500 and topic.depth("claimed") == 0


def test_available_now_ends_although_more_keeps_coming(begun: Any) -> None:
    topic, source, start = begun(30)
    source.prepareForTriggerAvailableNow()
    offset, seen = start, 0
    while (end := source.latestOffset(offset, source.getDefaultReadLimit())) != offset:
        seen += end["rows"]
        topic.send([f"more {seen} {n}" for n in range(20)])
        offset = end
    assert seen == 30


def test_a_checkpoint_from_before_what_was_acknowledged_is_refused(begun: Any) -> None:
    topic, source, start = begun(10)
    first = source.latestOffset(start, ALL)
    topic.send(["b"])
    second = source.latestOffset(first, ALL)
    topic.send(["c"])
    third = source.latestOffset(second, ALL)
    # Restored from a copy it would use the numbers of its batches again, for other messages.
    with pytest.raises(LostRace, match=r"claim 1 of topic .* Start with a new checkpoint"):
        reader(topic).partitions(start, first)
    with pytest.raises(LostRace, match="claim 2 of topic"):
        reader(topic).partitions(first, second)
    assert rows(reader(topic), second, third) == {b'"c"': 1}
    assert source.latestOffset(third, ALL) == third
    with pytest.raises(LostRace, match="claim 3 of topic"):
        reader(topic).latestOffset(first, ALL)
    # A new checkpoint under the same name begins behind it.
    topic.broker.leave_consumer(topic.topic, start["consumer"])
    topic.send(["d"])
    fresh = reader(topic, consumerId=start["consumer"])
    begin = fresh.initialOffset()
    assert rows(fresh, begin, fresh.latestOffset(begin, ALL)) == {b'"d"': 1}


def test_a_batch_that_was_failed_rests_and_dies_when_its_retries_are_used(queue: MakeQueue) -> None:
    topic = queue(slots=2, max_retries=1, backoff=BackOff(0, 0))
    topic.send(list(range(1_500)))
    options = {"consumerId": "loader", "pollInterval": "0"}
    source = reader(topic, **options)
    offset = source.initialOffset()
    for tries in range(2):
        end = source.latestOffset(offset, ALL)
        assert rows(source, offset, end).total() == 1_500
        assert fail_batch({**topic.options, **options}) == 1_500
        # The rest of the batch finds nothing, and another call changes nothing.
        assert rows(source, offset, end) == {}
        assert fail_batch({**topic.options, **options}) == 0
        assert topic.depth("dead") == (1_500 if tries else 0)
        offset = end
    assert source.latestOffset(offset, ALL) == offset
    assert (topic.total("claim_returned"), topic.total("acked"), topic.total("died")) == (3_000, 0, 1_500)


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_loss_is_reported_by_one_driver(
    queue: MakeQueue, caplog: pytest.LogCaptureFixture, is_repeated: bool
) -> None:
    topic = queue(slots=2, backoff=BackOff(3_600_000, 3_600_000))
    options = {"consumerId": "loader"}
    source = reader(topic, **options)
    start = source.initialOffset()
    lost: list[int] = []
    for batch in range(2):
        topic.send([f"{batch} {n}" for n in range(20)])
        end = source.latestOffset(start, ALL)
        assert end["rows"] == 20
        assert fail_batch({**topic.options, **options}) == 20
        for run in range(3):
            caplog.clear()
            source = reader(topic, **options)
            if is_repeated and not run:
                # Spark had not recorded the batch, and repeats it.
                assert rows(source, start, end) == {}
            assert source.latestOffset(end, ALL) == end
            lost.append((source.reportLatestOffset() or {})["lostClaims"])
            said = "20 messages are no longer held" if is_repeated else "but in 2 slots its lease had ended"
            lines = [record.getMessage() for record in caplog.records]
            warned = [line for line in lines if f"Claim {end['claim']} of" in line]
            assert len(warned) == lost[-1] and all(said in line for line in warned)
        start = end
    assert lost == [1, 0, 0, 1, 0, 0]


def test_failing_a_batch_leaves_those_of_others_alone(queue: MakeQueue) -> None:
    topic = queue(slots=2)
    topic.send(list(range(10)))
    source, start, end = first_batch(topic, consumerId="one")
    other = reader(topic, consumerId="two")
    other.latestOffset(other.initialOffset(), ALL)
    assert fail_batch({**topic.options, "consumerId": "two"}) == 0
    assert rows(source, start, end).total() == 10
    # A query would record a batch of which nothing was failed.
    with pytest.raises(
        ConfigurationError, match=r"no query consumes topic .* with consumerId three: give the one"
    ):
        fail_batch({**topic.options, "consumerId": "three"})
    with pytest.raises(ConfigurationError, match="consumerId is missing: fail_batch needs"):
        fail_batch(topic.options)


def test_the_backlog_is_counted_from_time_to_time_and_lost_claims_with_it(
    begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, source, start = begun(30, slots=2)
    told = source.reportLatestOffset()
    assert told == {"due": 30, "waiting": 30, "oldestDueSeconds": 0.0, "claimed": 0, "lostClaims": 0}
    end = source.latestOffset(start, ReadMaxRows(10))
    assert source.reportLatestOffset() is told
    monkeypatch.setattr("django_rmq.spark.stream_reader.COUNT_SECONDS", 0.0)
    return_all(topic, start["consumer"])
    assert rows(source, start, end) == {}
    following = reader(topic)
    assert rows(following, start, end) == {}
    found = following.reportLatestOffset() or {}
    assert (found["waiting"], found["claimed"], found["lostClaims"]) == (30, 0, 1)


def test_a_topic_of_many_slots_is_not_counted(begun: Any) -> None:
    _, source, _ = begun(1, slots=8_192)
    assert source.reportLatestOffset() is None


@pytest.mark.parametrize(
    ("slots", "count", "budget", "taken"),
    [
        pytest.param(2, 100_000, 30_000, [4_000, 4_000], id="a-step-of-each"),
        pytest.param(2, 68_000, 30_000, [30_000], id="as-many-as-may-be-carried-back"),
        pytest.param(1, 50_000, 22_000, [6_000], id="examined-until-a-quarter-is-there"),
        pytest.param(1, 26_000, 22_000, [22_000], id="whole"),
    ],
)
def test_a_large_backlog_is_claimed_in_steps(
    queue: MakeQueue, slots: int, count: int, budget: int, taken: list[int]
) -> None:
    topic = queue(TopicType.FIXED_TIME, slots=slots)
    put(topic, [count // slots] * slots, range(1_000, 1_000 + slots))
    source, start, end = first_batch(topic, ReadMaxRows(budget))
    assert slots_of(source, start, end) == dict(enumerate(taken))
    left = count - sum(taken)
    while left:
        following = source.latestOffset(end, ReadMaxRows(budget))
        assert 0 < following["rows"] <= budget
        left, end = left - following["rows"], following
    assert source.latestOffset(end, ALL) == end and topic.total("acked") == count


def test_a_number_that_somebody_has_used_is_noticed(queue: MakeQueue) -> None:
    topic = queue(slots=1)
    one = reader(topic, consumerId="nightly")
    start = one.initialOffset()
    assert one.latestOffset(start, ALL) == start
    topic.send(["a", "b"])
    assert topic.broker.claim(topic.topic, 0, "nightly", 2, 60_000, 1).taken == 1
    topic.broker.renew_claim(topic.topic, 0, "nightly", 2, 60_000, seal=True)
    topic.broker.ack_claim(topic.topic, 0, "nightly", 2)
    with pytest.raises(LostRace, match="another query claims"):
        one.latestOffset(start, ALL)


def test_what_comes_into_empty_parts_of_many_slots_is_found(begun: Any) -> None:
    topic, source, start = begun(0, slots=4_096, kind=TopicType.FIXED_TIME)
    assert source.latestOffset(start, ALL) == start
    ended = 0
    for slot in (0, 1_023, 1_024, 4_095):
        topic.broker.send_replace(topic.topic, slot, [1_000], [b"%d" % slot])
        end = source.latestOffset(start, ALL)
        assert set(rows(source, start, end)) == {b"%d" % slot}
        start, ended = end, ended + 1
        assert topic.total("acked") == ended - 1
    assert source.latestOffset(start, ALL) == start and topic.total("acked") == ended


def test_a_lease_that_ends_in_an_empty_part_of_many_slots_is_found(begun: Any) -> None:
    topic, source, start = begun(0, slots=4_096, kind=TopicType.FIXED_TIME, max_retries=2)
    assert source.latestOffset(start, ALL) == start
    topic.broker.send_replace(topic.topic, 3_000, [1_000], [b"a"])
    assert topic.broker.claim(topic.topic, 3_000, "other", 1, 1, 9).taken == 1
    eventually(
        lambda: source.latestOffset(start, ALL) != start or topic.depth("retry"), "the end of its lease"
    )


def test_a_slot_that_cannot_be_claimed_for_an_unknown_reason_ends_the_query(
    begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source, start = begun(10)
    monkeypatch.setattr(source._claims, "each", lambda calls: [Claimed("full") for _ in calls])
    monkeypatch.setattr(source._claims, "_counts_of", lambda slots: dict.fromkeys(slots, NOTHING))
    with pytest.raises(LostRace, match=r"slot \d of topic .* cannot be claimed: full"):
        source._claims.claim("a", 1, 10)
    assert start["claim"] == 0


def test_a_checkpoint_of_another_topic_is_refused(begun: Any, queue: MakeQueue) -> None:
    topic, source, start = begun()
    end = source.latestOffset(start, ALL)
    other = reader(queue())
    with pytest.raises(ConfigurationError, match=f"is that of a query on topic {topic.topic.name}"):
        other.latestOffset(end, ALL)
    with pytest.raises(ConfigurationError, match="start with a new checkpoint"):
        other.partitions(start, end)
    assert reader(topic).latestOffset(end, ALL) == end
    assert topic.total("acked") == 10


@pytest.mark.parametrize("first", [{}, {"consumerId": "one"}])
def test_a_checkpoint_of_another_consumer_is_refused(queue: MakeQueue, first: dict[str, str]) -> None:
    topic = queue()
    topic.send([1, 2])
    _, start, end = first_batch(topic, **first)
    other = reader(topic, consumerId="two")
    said = f"is that of consumerId {start['consumer']}, and option consumerId is two: give the one of the checkpoint"
    with pytest.raises(ConfigurationError, match=said):
        other.partitions(start, end)
    with pytest.raises(ConfigurationError, match=said):
        other.latestOffset(end, ALL)
    assert topic.total("acked") == 0
    # Its own name, or none, goes on.
    for options in ({}, {"consumerId": start["consumer"]}):
        again = reader(topic, **options)
        assert rows(again, start, end).total() == 2
    assert again.latestOffset(end, ALL) == end and topic.total("acked") == 2


@pytest.mark.parametrize("left_over", [True, False])
def test_a_re_slotting_waits_for_the_batch_and_ends_the_query(
    begun: Any, monkeypatch: pytest.MonkeyPatch, left_over: bool
) -> None:
    monkeypatch.setattr("django_rmq.spark.stream_reader.LOOK_SECONDS", 0.0)
    topic, source, start = begun(40, slots=2)
    end = source.latestOffset(start, ReadMaxRows(20) if left_over else ALL)
    change = reslotting.begin(topic.broker, topic.topic, 8)
    assert change is not None
    waits: list[int] = []

    def meanwhile(seconds: float) -> None:
        waits.append(len(waits))
        if len(waits) == 3:
            # The batch is over: its claim is acknowledged, and where nothing is taken any more the query ends.
            with suppress(SlotMoved):
                source.latestOffset(end, ALL)
            assert topic.depth("claimed") == 0

    reslotting.move(topic.broker, change, pause=meanwhile)
    assert len(waits) >= 3
    reslotting.finish(topic.broker, change)
    with pytest.raises(SlotMoved, match="new checkpoint"):
        source.latestOffset(end, ALL)
    moved = Queue(topic.broker, topic.url, change.topic)
    assert moved.total("acked") == end["rows"] and moved.depth("store") == 40 - end["rows"]
    # A new checkpoint has the rest, the old one stays refused.
    with pytest.raises(SlotMoved):
        reader(topic).latestOffset(end, ALL)
    fresh = reader(topic)
    following = fresh.latestOffset(fresh.initialOffset(), ALL)
    assert following["rows"] == 40 - end["rows"]


def test_large_bodies_are_read_in_small_pages(queue: MakeQueue) -> None:
    topic = queue(TopicType.PRIORITY, slots=1)
    topic.send([f"{n}" + "x" * 200_000 for n in range(100)])
    source, start, end = first_batch(topic)
    sizes = [batch.num_rows for executor, task in plan(source, start, end) for batch in executor.read(task)]
    assert sum(sizes) == end["rows"] and max(sizes) <= 16


@pytest.mark.parametrize("identity", ["body", "key"])
def test_large_bodies_behind_many_small_ones_are_read_in_small_pages(queue: MakeQueue, identity: str) -> None:
    topic = queue(TopicType.PRIORITY, slots=1, identity=identity, body="text")
    for letter, size, count in (("a", 10, 4_000), ("b", 100_000, 400)):
        names = [f"{letter}{n:04}" for n in range(count)]
        for first in range(0, count, 100):
            producer = Producer(topic.broker)
            built = [
                producer.build(
                    topic.topic,
                    name.ljust(size, "."),
                    priority=100,
                    **({"key": name} if topic.topic.keyed else {}),
                )
                for name in names[first : first + 100]
            ]
            assert producer.send(built)
    source, start, end = first_batch(topic)
    batches = [batch for executor, task in plan(source, start, end) for batch in executor.read(task)]
    assert sum(batch.num_rows for batch in batches) == 4_400
    assert max(batch.nbytes for batch in batches) < PAGES * PAGE_BYTES


@pytest.mark.parametrize(
    ("sizes", "tasks", "parts"),
    [
        ({}, 1, []),
        ({0: 10}, 1, [[ClaimPart(0, 0, 10)]]),
        ({0: 10, 3: 5}, 2, [[ClaimPart(0, 0, 8)], [ClaimPart(0, 8, 2), ClaimPart(3, 0, 5)]]),
        ({0: 3}, 5, [[ClaimPart(0, 0, 1)], [ClaimPart(0, 1, 1)], [ClaimPart(0, 2, 1)]]),
    ],
)
def test_a_batch_is_split_into_tasks(sizes: dict[int, int], tasks: int, parts: list[list[ClaimPart]]) -> None:
    assert split(sizes, tasks) == parts


def test_a_slot_of_a_fifo_topic_is_one_part_however_large_it_is() -> None:
    assert split({0: 5, 3: 1, 7: 1}, 3, whole=True) == [
        [ClaimPart(0, 0, 5)],
        [ClaimPart(3, 0, 1), ClaimPart(7, 0, 1)],
    ]


# --- how small and how large a batch is


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
    source, _start, end = first_batch(topic, maxBytesPerTrigger="50000")
    assert 45 <= end["rows"] <= 51
    # One message is larger than that.
    small = reader(topic, maxBytesPerTrigger="10", consumerId="small")
    source.commit(end)
    assert small.latestOffset(small.initialOffset(), ALL)["rows"] <= 2
