"""Bulk sends out of Arrow: the same bytes on the wire as redis-py writes, and the same messages as any other send."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import hiredis
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.spark.broker_connection import RetryPolicy
from django_rmq.spark.bulk_write import (
    CALL_BYTES,
    CHUNK_BYTES,
    PAUSE,
    ArrowBulk,
    ArrowRows,
    Inserting,
    gathered,
    groups,
)
from tests.spark.conftest import MakeQueue, Queue
from tests.support.brokers import Broker
from tests.support.servers import TcpProxy
from tests.support.workers import client_of

NONE = RetryPolicy(0, "a test")

bodies = st.lists(
    st.binary(min_size=1, max_size=40) | st.sampled_from([b"\r\n", b"$1\r\n", b"\xff\x00"]), min_size=1
)


def none_built(_: list[int]) -> list[Any]:
    raise AssertionError("no slot has refused anything")


@given(
    members=bodies,
    slots=st.sampled_from([1, 2, 16]),
    score=st.integers(17, 1 << 43),
    scored=st.booleans(),
    enveloped=st.booleans(),
)
def test_what_is_packed_is_what_redis_py_would_write(
    members: list[bytes], slots: int, score: int, scored: bool, enveloped: bool
) -> None:
    scores = [score + n for n in range(len(members))] if scored else None
    envelopes = [b"0 {}\n" + member for member in members] if enveloped else None
    rows = ArrowRows(members, none_built, scores and pa.array(scores, pa.int64()), None, envelopes)
    seen: Counter[int] = Counter()
    for group in groups(rows, slots, 1_000):
        chosen = group.rows.to_pylist()
        assert chosen == sorted(chosen) and group.range_ms == 1_000
        assert {crc32(members[row]) % slots for row in chosen} == {group.slot}
        texts = [
            text for row in chosen for text in ((scores[row], members[row]) if scores else (members[row],))
        ]
        texts += [envelopes[row] for row in chosen] if envelopes else []
        whole = hiredis.pack_command(tuple(texts))
        assert b"".join(group.packed.data) == whole.partition(b"\r\n")[2]
        assert len(group.packed) == len(chosen)
        assert group.packed.width * len(chosen) == len(texts)
        seen.update(chosen)
    assert seen == Counter(range(len(members)))


@given(
    members=bodies.map(lambda found: list(dict.fromkeys(found))),
    ranges=st.lists(st.integers(1, 4), min_size=1),
)
def test_rows_of_a_call_have_one_range_of_time(members: list[bytes], ranges: list[int]) -> None:
    given = [ranges[n % len(ranges)] for n in range(len(members))]
    rows = ArrowRows(members, none_built, ranges=pa.array(given, pa.int32()))
    seen = [
        (members[row], group.slot, group.range_ms)
        for group in groups(rows, 4)
        for row in group.rows.to_pylist()
    ]
    expected = [(member, crc32(member) % 4, given[n]) for n, member in enumerate(members)]
    assert sorted(seen) == sorted(expected)


def test_a_call_is_bounded_in_bytes_however_large_the_bodies_are() -> None:
    members = [b"%05d" % n + b"x" * 240_000 for n in range(50)] + [b"y" * 3_000_000, b"small"]
    found = list(groups(ArrowRows(members, none_built), 1))
    assert [row for group in found for row in group.rows.to_pylist()] == list(range(52))
    sizes = [(len(group.packed), sum(map(len, group.packed.data))) for group in found]
    assert all(size <= CALL_BYTES or count == 1 for count, size in sizes), sizes
    assert sizes[0][0] == 4


def test_a_chunk_of_large_rows_is_cut_by_its_bytes(queue: MakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = queue(TopicType.RANGE_MERGE, slots=1, body="bytes")
    sent: list[int] = []
    send = ArrowBulk.send

    def spied(bulk: ArrowBulk, rows: ArrowRows) -> None:
        sent.append(sum(map(len, rows.members)))
        send(bulk, rows)

    monkeypatch.setattr(ArrowBulk, "send", spied)
    assert topic.write_batch({"value": [b"%05d" % n + b"x" * 200_000 for n in range(200)]}) == {"stored": 200}
    assert max(sent) <= CHUNK_BYTES and sum(sent) == 200 * 200_005


BOTH = pytest.mark.parametrize("kind", [TopicType.RANGE_MERGE, TopicType.PRIORITY])


@BOTH
def test_a_bulk_merges_and_counts_as_any_other_send(queue: MakeQueue, kind: TopicType) -> None:
    topic = queue(kind, slots=8, body="bytes", time_range_ms=60_000)
    members = [b"%d" % (n % 3_000) for n in range(5_000)]
    priorities = None if kind is TopicType.RANGE_MERGE else pa.array(range(100, 5_100))
    bulk = ArrowBulk(Producer(topic.broker), topic.topic, NONE)
    for first in range(0, 5_000, 1_700):
        part = members[first : first + 1_700]
        bulk.send(ArrowRows(part, none_built, priorities and priorities.slice(first, 1_700)))
    bulk.finish()
    met = "merged" if priorities is None else "replaced"
    assert bulk.counts == {"stored": 3_000, met: 2_000}
    assert (topic.total("stored"), topic.total(met), topic.depth("store")) == (3_000, 2_000, 3_000)
    if priorities is not None:
        assert topic.scores() == {f"{n}": 100 + n + (3_000 if n < 2_000 else 0) for n in range(3_000)}


@contextmanager
def behind_proxy(topic: Queue) -> Iterator[tuple[TcpProxy, Broker]]:
    with TcpProxy(topic.broker.client.connection_pool.connection_kwargs["port"]) as proxy:
        broker = Broker(client_of(proxy.url), topic.broker.prefix)
        yield proxy, broker
        broker.close()


def test_the_later_of_two_sends_counts_though_its_connection_is_the_faster(queue: MakeQueue) -> None:
    topic = queue(slots=2, body="bytes")
    members = [b"%d" % n for n in range(100)]
    with behind_proxy(topic) as (proxy, broker):
        broker.load_scripts()
        bulk = ArrowBulk(Producer(broker), topic.topic, NONE)
        for delay, priority in ((0.5, 50), (0, 60)):
            proxy.delay(delay)
            bulk.send(ArrowRows(members, none_built, pa.array([priority] * 100)))
            time.sleep(0.1)
        bulk.finish()
    assert set(topic.scores().values()) == {60} and bulk.counts == {"stored": 100, "replaced": 100}


def send_all(bulk: ArrowBulk, members: list[bytes], kind: TopicType) -> None:
    priorities = pa.array([50] * len(members)) if kind is TopicType.PRIORITY else None
    bulk.send(ArrowRows(members, none_built, priorities))
    bulk.finish()


@BOTH
def test_where_messages_have_to_be_looked_at_a_bulk_sends_them_one_by_one(
    queue: MakeQueue, kind: TopicType, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = queue(kind, slots=4, body="bytes", time_range_ms=60_000)
    members = [b"%d" % n for n in range(400)]
    bulk = ArrowBulk(Producer(topic.broker), topic.topic, NONE)
    if kind is TopicType.PRIORITY:
        topic.broker.send_replace(topic.topic, 0, [50], [b"resting"])
    else:
        topic.broker.send_merge(topic.topic, 0, 0, [b"resting"])
    receipt = topic.broker.prepare(topic.topic, 0, "A", None, 1).receipt
    send_all(bulk, members, kind)
    failure = Failure(b"resting", "failed", 3_600_000)
    assert topic.broker.rollback(topic.topic, 0, receipt, [failure]) == ["ok"]
    declined: list[Inserting] = []
    decline = Inserting.decline

    def spied(asked: Inserting) -> None:
        declined.append(asked)
        decline(asked)

    monkeypatch.setattr(Inserting, "decline", spied)
    for _ in range(PAUSE + 2):
        send_all(bulk, members, kind)
    assert len(declined) == 2
    met = "merged" if kind is TopicType.RANGE_MERGE else "replaced"
    assert bulk.counts["stored"] == 400 and bulk.counts[met] + bulk.counts["superseded"] == 400 * (PAUSE + 2)
    assert (topic.depth("store"), topic.total("sent")) == (400, 400 * (PAUSE + 3) + 1)
    assert not topic.broker.client.keys(f"inserting_*{topic.broker.prefix}*")


@BOTH
def test_a_server_that_has_lost_its_scripts_keeps_no_part_of_a_bulk(
    queue: MakeQueue, kind: TopicType
) -> None:
    topic = queue(kind, slots=4, body="bytes", time_range_ms=60_000)
    topic.broker.load_scripts()
    topic.broker.client.script_flush()
    bulk = ArrowBulk(Producer(topic.broker), topic.topic, NONE)
    send_all(bulk, [b"%d" % n for n in range(400)], kind)
    assert bulk.counts == {"stored": 400} and topic.total("stored") == topic.depth("store") == 400
    assert not topic.broker.client.keys(f"inserting_*{topic.broker.prefix}*")


@BOTH
def test_a_bulk_needs_no_transactions(queue: MakeQueue, kind: TopicType) -> None:
    topic = queue(kind, slots=4, body="bytes", time_range_ms=60_000)
    client, port = topic.broker.client, topic.broker.client.connection_pool.connection_kwargs["port"]
    client.execute_command("ACL", "SETUSER", "single", "reset", "on", ">x", "~*", "&*", "+@all", "-multi")
    try:
        other = client_of(f"redis://single:x@127.0.0.1:{port}/0")
        bulk = ArrowBulk(Producer(Broker(other, topic.broker.prefix)), topic.topic, NONE)
        send_all(bulk, [b"%d" % n for n in range(400)], kind)
        other.close()
    finally:
        client.execute_command("ACL", "DELUSER", "single")
    assert bulk.counts == {"stored": 400} and topic.depth("store") == 400


@pytest.mark.parametrize("delay", [0, 1.3])
def test_a_message_is_due_its_range_after_a_moment_within_its_send(queue: MakeQueue, delay: float) -> None:
    topic = queue(TopicType.RANGE_MERGE, slots=1, body="bytes", time_range_ms=60_000)
    with behind_proxy(topic) as (proxy, broker):
        bulk = ArrowBulk(Producer(broker), topic.topic, NONE)
        send_all(bulk, [b"first"], TopicType.RANGE_MERGE)
        proxy.delay(delay)
        before = topic.broker.now_ms()
        send_all(bulk, [b"second"], TopicType.RANGE_MERGE)
        after = topic.broker.now_ms()
    # It may be later by the round trip that has read the clock, and is never later by more than a second.
    assert before <= topic.scores()["second"] - 60_000 <= after + 1_000
    assert bulk.counts == {"stored": 2}


@pytest.mark.parametrize(
    ("sizes", "rows", "wanted"), [([], 5, []), ([0, 3], 5, [3]), ([3, 3, 3, 1], 5, [6, 4]), ([9], 5, [9])]
)
def test_small_batches_are_sent_together(sizes: list[int], rows: int, wanted: list[int]) -> None:
    batches = [pa.record_batch({"value": pa.array([b"x"] * size, pa.binary())}) for size in sizes]
    assert [batch.num_rows for batch in gathered(iter(batches), rows)] == wanted
