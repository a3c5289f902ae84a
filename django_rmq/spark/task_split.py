"""The split of a read into tasks, which are the partitions of its frame: how many there are, and what each of them reads.

A batch read gives whole slots to a task, and a stream read parts of a claim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from django_rmq.core.model.topic import Topic
from django_rmq.spark.source_options import SourceOptions

MESSAGES_PER_TASK = 50_000
"""The number of messages per task; a task costs some 50 ms before its first row."""


def task_count(options: SourceOptions, messages: int) -> int:
    """Return in how many tasks this many messages are read."""
    share = options.whole("messagesPerTask", MESSAGES_PER_TASK, low=1)
    return max(options.whole("minPartitions", 1, low=1), math.ceil(messages / share))


class RowRange(NamedTuple):
    """A part of a task: one state of one slot."""

    topic: Topic
    slot: int
    queue: str


class ReadTask(InputPartition):
    """The content of one task."""

    def __init__(self, pieces: Sequence[RowRange]) -> None:
        super().__init__(len(pieces))
        self.pieces = list(pieces)


def grouped(sizes: Sequence[int], tasks: int) -> list[list[int]]:
    """Return indexes in at most ``tasks`` groups of about the same size, largest first into the emptiest."""
    groups: list[list[int]] = [[] for _ in range(max(1, tasks))]
    filled = [0] * len(groups)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        smallest = min(range(len(groups)), key=filled.__getitem__)
        groups[smallest].append(index)
        filled[smallest] += sizes[index]
    return [group for group in groups if group]


class ClaimPart(NamedTuple):
    """A part of a task: some rows of a claim in one slot."""

    slot: int
    offset: int
    rows: int


class ClaimTask(InputPartition):
    """The part of a claim that one task reads."""

    def __init__(self, consumer: str, number: int, pieces: Sequence[ClaimPart]) -> None:
        super().__init__(number)
        self.consumer = consumer
        self.number = number
        self.pieces = list(pieces)


def split(sizes: dict[int, int], tasks: int, *, whole: bool = False) -> list[list[ClaimPart]]:
    """Return the rows of each slot in ``tasks`` parts of the same size, up to whole pages.

    ``whole``: no slot is divided between two parts, so that its rows stay in their order.
    """
    rows = sum(sizes.values())
    share = max(1, math.ceil(rows / max(1, tasks)))
    parts: list[list[ClaimPart]] = [[]]
    room = share
    for slot, size in sizes.items():
        offset = 0
        while offset < size:
            if not room:
                parts.append([])
                room = share
            part_size = size if whole else min(size - offset, room)
            parts[-1].append(ClaimPart(slot, offset, part_size))
            offset += part_size
            room = max(0, room - part_size)
    return [part for part in parts if part]
