"""Bulk sends out of Arrow: rows are grouped by slot and written as the server reads them, with no step of ours for each.

What is left in Python is the CRC of each member. The rules are those of ``Producer``, which takes over what a slot refuses
because its topic is being re-slotted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from django_rmq.broker import Packed, Pipeline
from django_rmq.exceptions import RmqError, SlotMoved
from django_rmq.messages import BATCH, Topic, TopicType
from django_rmq.producer import Producer

IN_FLIGHT = 2
"""Round trips under way at once: Redis works on one while the next is written."""


class Group(NamedTuple):
    """The rows of one call: of one slot, in their order."""

    slot: int
    rows: pa.Array
    """Their indexes."""
    packed: Packed


def groups(
    members: Sequence[bytes], column: pa.Array, scores: pa.Array | None, slots: int
) -> Iterator[Group]:
    """Yield the calls that send ``column``, whose values are ``members``; ``scores``: texts, one for each."""
    crcs = pa.array(list(map(crc32, members)), pa.uint32())
    placed = pc.bit_wise_and(crcs, pa.scalar(slots - 1, pa.uint32()))
    # Stable: of several sends of a member the last one counts.
    order = pc.array_sort_indices(placed)
    texts = _written(column.take(order))
    if scores is not None:
        texts = pc.binary_join_element_wise(_written(scores.take(order)), texts, _text(b""))
    ends = memoryview(texts.buffers()[1]).cast("q")
    data = memoryview(texts.buffers()[2])
    runs = pc.run_end_encode(placed.take(order))
    start = 0
    for slot, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        for first in range(start, end, BATCH):
            last = min(first + BATCH, end)
            packed = Packed(last - first, 1 if scores is None else 2, data[ends[first] : ends[last]])
            yield Group(slot, order.slice(first, last - first), packed)
        start = end


def _text(raw: bytes) -> pa.Scalar:
    return pa.scalar(raw, pa.large_binary())


def _written(texts: pa.Array) -> pa.Array:
    """Return each text as an argument of a command."""
    lengths = pc.binary_length(texts).cast(pa.large_string()).cast(pa.large_binary())
    return pc.binary_join_element_wise(
        _text(b"$"), lengths, _text(b"\r\n"), texts.cast(pa.large_binary()), _text(b"\r\n"), _text(b"")
    )


class Bulk:
    """Sends to one unkeyed topic; ``counts`` says what became of it, after ``finish``."""

    def __init__(self, producer: Producer, topic: Topic) -> None:
        self.counts: Counter[str] = Counter()
        self._producer = producer
        self._topic = replace(topic, body="bytes")
        self._under_way: deque[tuple[Pipeline, list[Group], Sequence[bytes], pa.Array | None]] = deque()

    def send(self, members: Sequence[bytes], column: pa.Array, priorities: pa.Array | None) -> None:
        """Send rows that are known to be good; ``priorities``: whole numbers, on priority topics."""
        scores = None if priorities is None else priorities.cast(pa.large_string()).cast(pa.large_binary())
        pipeline = self._producer.broker.pipeline()
        sent = list(groups(members, column, scores, self._topic.slots))
        for group in sent:
            if self._topic.type is TopicType.RANGE_MERGE:
                pipeline.send_merge(self._topic, group.slot, self._topic.time_range_ms or 0, group.packed)
            else:
                pipeline.send_replace(self._topic, group.slot, (), group.packed)
        self._under_way.append((pipeline.send(), sent, members, priorities))
        while len(self._under_way) >= IN_FLIGHT:
            self._collect()

    def finish(self) -> None:
        """Wait for what is under way."""
        while self._under_way:
            self._collect()

    def _collect(self) -> None:
        pipeline, sent, members, priorities = self._under_way.popleft()
        for group, found in zip(sent, pipeline.receive(), strict=True):
            if isinstance(found, SlotMoved):
                self._follow(group, members, priorities)
            elif isinstance(found, RmqError):
                raise found
            else:
                self.counts.update(found)

    def _follow(self, group: Group, members: Sequence[bytes], priorities: pa.Array | None) -> None:
        options: list[dict[str, Any]] = [{}] * len(group.rows)
        if priorities is not None:
            options = [{"priority": priority} for priority in priorities.take(group.rows).to_pylist()]
        built = [
            self._producer.build(self._topic, members[row], **given)
            for row, given in zip(group.rows.to_pylist(), options, strict=True)
        ]
        self.counts.update(result.status for result in self._producer.send(built))
