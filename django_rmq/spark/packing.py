"""Bulk sends from Arrow: rows are grouped by slot and encoded for the server, without Python code for each row.

Only the CRC of each member is computed in Python. The rules are those of ``Producer``, which sends again what
a slot refuses because its topic is being re-slotted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from django_rmq.core.calls import inserting, sending
from django_rmq.core.calls.broker import Pipeline
from django_rmq.core.calls.packed import Packed
from django_rmq.core.producer.sending import Producer
from django_rmq.core.redis import wire
from django_rmq.core.words.bounds import BATCH
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import RmqError, ServerUnavailable, SlotMoved
from django_rmq.spark.inserting import Inserting
from django_rmq.spark.patience import Patience

CALL_BYTES = 1_048_576
"""The number of bytes that a call may send beyond its first message: it limits how long Redis is blocked."""


class Group(NamedTuple):
    """The rows of one call: of one slot, in their order."""

    slot: int
    rows: pa.Array
    """Their indexes."""
    packed: Packed


def groups(
    members: Sequence[bytes], column: pa.Array, scores: pa.Array | bytes | None, slots: int
) -> Iterator[Group]:
    """Yield the calls that send ``column``, whose values are ``members``; ``scores``: texts, one for each or for all."""
    crcs = pa.array(list(map(crc32, members)), pa.uint32())
    placed = pc.bit_wise_and(crcs, pa.scalar(slots - 1, pa.uint32()))
    # Stable: if a member is sent several times, the last one counts.
    order = pc.array_sort_indices(placed)
    before = _text(b"")
    if isinstance(scores, bytes):
        before = _text(b"".join(wire.parts_of_argument(b"%d" % len(scores), scores, bytes)))
    elif scores is not None:
        before = _written(scores.take(order))
    texts = _written(column.take(order), before)
    ends = memoryview(texts.buffers()[1]).cast("q")
    data = memoryview(texts.buffers()[2])
    runs = pc.run_end_encode(placed.take(order))
    start = 0
    for slot, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        while start < end:
            most = min(start + BATCH, end)
            last = max(start + 1, bisect_right(ends, ends[start] + CALL_BYTES, start, most + 1) - 1)
            packed = Packed(last - start, 1 if scores is None else 2, data[ends[start] : ends[last]])
            yield Group(slot, order.slice(start, last - start), packed)
            start = last


def _text(raw: bytes) -> pa.Scalar:
    return pa.scalar(raw, pa.large_binary())


def _written(texts: pa.Array, *before: Any) -> pa.Array:
    """Return each text as an argument of a command, behind what is ``before`` it."""
    lengths = pc.binary_length(texts).cast(pa.large_string()).cast(pa.large_binary())
    parts = wire.parts_of_argument(lengths, texts.cast(pa.large_binary()), _text)
    return pc.binary_join_element_wise(*before, *parts, _text(b""))


class Call(NamedTuple):
    """One round trip: its content, and its rows."""

    groups: list[Group]
    members: Sequence[bytes]
    priorities: pa.Array | None
    bounds: tuple[int, int] | None
    """The lowest and the highest score if the messages are inserted."""


class Bulk:
    """Sends to one unkeyed topic; ``counts`` has the results after ``finish``.

    While Redis is unavailable, everything without an answer is sent again. Of two sends of a member the later
    one counts: Redis runs one round trip while the next is packed, but two are never under way together,
    because their connections may overtake each other.
    """

    def __init__(self, producer: Producer, topic: Topic, patience: Patience) -> None:
        self.counts: Counter[str] = Counter()
        self._producer = producer
        self._topic = replace(topic, body="bytes")
        self._patience = patience
        self._inserting = Inserting(producer.broker)
        self._under_way: tuple[Pipeline | None, Call] | None = None
        """Without a pipeline: not sent."""

    def send(self, members: Sequence[bytes], column: pa.Array, priorities: pa.Array | None) -> None:
        """Send valid rows. ``priorities``: whole numbers, on priority topics."""
        scores: pa.Array | bytes | None = None
        bounds = None
        now_ms = None if self._topic.debounce_ms else self._patience(self._inserting.now_ms)
        if priorities is not None:
            scores = priorities.cast(pa.large_string()).cast(pa.large_binary())
            found = pc.min_max(priorities).as_py()
            bounds = found["min"], found["max"]
        elif now_ms is not None:
            due = now_ms + (self._topic.time_range_ms or 0)
            scores, bounds = b"%d" % due, (due, due)
        placed = list(groups(members, column, scores, self._topic.slots))
        call = Call(placed, members, priorities, bounds if now_ms is not None else None)
        pipeline = self._pipeline(call)
        self.finish()
        try:
            self._under_way = pipeline.send(), call
        except ServerUnavailable:
            self._under_way = None, call

    def finish(self) -> None:
        """Wait for the round trip under way."""
        if self._under_way is None:
            return
        (pipeline, call), self._under_way = self._under_way, None
        try:
            answers = self._answers(call, pipeline.receive()) if pipeline is not None else None
        except ServerUnavailable:
            answers = None
        if answers is None:
            answers = self._patience(lambda: self._answers(call, self._pipeline(call).execute()))
        for group, found in zip(call.groups, answers, strict=True):
            if isinstance(found, SlotMoved):
                self._patience(partial(self._follow, group, call))
            else:
                self.counts.update(found)

    def _pipeline(self, call: Call) -> Pipeline:
        pipeline = self._producer.broker.pipeline()
        for group in call.groups:
            if call.bounds is None:
                pipeline.add(sending.send_packed(self._topic, group.slot, group.packed))
                continue
            rows = inserting.Rows(len(group.packed), group.packed, *call.bounds)
            for part in inserting.insertion(self._topic, group.slot, rows):
                pipeline.add(part)
        return pipeline

    def _answers(self, call: Call, found: list[Any]) -> list[Any]:
        if call.bounds is not None:
            found = self._with_declined(call, found[inserting.PARTS - 1 :: inserting.PARTS])
        for answer in found:
            if isinstance(answer, RmqError) and not isinstance(answer, SlotMoved):
                raise answer
        return found

    def _with_declined(self, call: Call, found: list[Any]) -> list[Any]:
        """Return the answers, after sending what has to be looked at one by one."""
        declined = [index for index, answer in enumerate(found) if not isinstance(answer, Counter)]
        if not declined:
            return found
        self._inserting.decline()
        pipeline = self._producer.broker.pipeline()
        for index in declined:
            slot, rows, _ = call.groups[index]
            members = [call.members[row] for row in rows.to_pylist()]
            pipeline.add(inserting.end_insertion(self._topic, slot))
            if call.priorities is None:
                pipeline.add(sending.send_merge(self._topic, slot, self._topic.time_range_ms or 0, members))
            else:
                priorities = call.priorities.take(rows).to_pylist()
                pipeline.add(sending.send_replace(self._topic, slot, priorities, members))
        for index, answer in zip(declined, pipeline.execute()[1::2], strict=True):
            is_error = isinstance(answer, RmqError)
            found[index] = answer if is_error else Counter(sent.status for sent in answer)
        return found

    def _follow(self, group: Group, call: Call) -> None:
        options: list[dict[str, Any]] = [{}] * len(group.rows)
        if call.priorities is not None:
            options = [{"priority": priority} for priority in call.priorities.take(group.rows).to_pylist()]
        built = [
            self._producer.build(self._topic, call.members[row], **given)
            for row, given in zip(group.rows.to_pylist(), options, strict=True)
        ]
        self.counts.update(result.status for result in self._producer.send(built))
