"""Reading a claim in tasks: pages of rows, all of one claim or none."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from django_rmq.core.commands import claims, inspect
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.inspect import walk
from django_rmq.core.model.envelope import raw_body
from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import LostRace
from django_rmq.spark.broker_connection import RetryPolicy
from django_rmq.spark.row_pages import (
    FIRST_PAGE,
    MOST_ROWS,
    PAGE_BYTES,
    PAGES,
    SCRIPT_BYTES,
    Rows,
    entry_batch,
    fitting,
    following,
    narrow_batch,
)

logger = logging.getLogger("django_rmq.spark")


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
            taken = size if whole else min(size - offset, room)
            parts[-1].append(ClaimPart(slot, offset, taken))
            offset += taken
            room = max(0, room - taken)
    return [part for part in parts if part]


class ClaimReader(NamedTuple):
    """Reads pieces of a claim."""

    broker: Broker
    topic: Topic
    schema: pa.Schema
    patience: RetryPolicy

    def piece(self, task: ClaimTask, piece: ClaimPart) -> Iterator[pa.RecordBatch]:
        slot, offset, end = piece.slot, piece.offset, piece.offset + piece.rows
        claim = (self.topic, slot, task.consumer, task.number)
        first_page = min(FIRST_PAGE, piece.rows)
        read = self.patience(lambda: self.broker.run(claims.read_claim(*claim, offset, first_page)))
        if not read.rows:
            return
        yield self._batch(slot, read.rows, read.envelopes)
        offset += len(read.rows) // 2
        # If there are bodies, a script reads both together; Redis returns members alone faster without a
        # script.
        plain = not read.envelopes
        most, most_bytes = (MOST_ROWS, PAGE_BYTES) if plain else (BATCH, SCRIPT_BYTES)
        size = min(fitting(read.rows, read.envelopes, most_bytes), most)
        while offset < end:
            firsts = range(offset, min(end, offset + PAGES * size), size)
            parts, state = self.patience(partial(self._trip, claim, firsts, plain=plain))
            if state != "sealed" or not all(rows for rows, _ in parts):
                raise self._lost(task, slot)
            for rows, envelopes in parts:
                yield self._batch(slot, rows, envelopes)
                offset += len(rows) // 2
            size = min(fitting(rows, envelopes, most_bytes), most)

    def piece_with_metadata(self, task: ClaimTask, piece: ClaimPart) -> Iterator[pa.RecordBatch]:
        """Read a piece with what is known of its messages, by the order of (score, member), which is that of ranks."""
        topic, slot, offset = self.topic, piece.slot, piece.offset
        claim = (topic, slot, task.consumer, task.number)
        after: tuple[str, bytes] | None = None
        if offset:
            before = inspect.rows(topic, slot, "claim", offset - 1, offset - 1)
            member, score = self.patience(lambda: self.broker.run(before)) or (b"", b"inf")
            after = (score.decode(), member)
        left, size = piece.rows, FIRST_PAGE
        while left:
            page = self.patience(
                partial(
                    self.broker.run,
                    inspect.peek(
                        topic, slot, "claim", after=after, limit=min(left, size), max_bytes=SCRIPT_BYTES
                    ),
                )
            )
            state = self.patience(lambda: self.broker.run(claims.read_claim(*claim))).state
            if state != "sealed" and left == piece.rows:
                return
            rest = left - len(page.entries)
            if state != "sealed" or (rest and page.cursor is None):
                raise self._lost(task, slot)
            yield entry_batch(self.schema, topic, slot, "claim", page.entries)
            left, after, size = rest, page.cursor, following(page.entries)

    def _lost(self, task: ClaimTask, slot: int) -> LostRace:
        # Half of a part is neither complete nor empty; when it is tried again, it reads as empty.
        return LostRace(
            f"claim {task.number} of topic {self.topic.name} slot {slot} was lost while it was being read"
        )

    def _trip(
        self, claim: tuple[Topic, int, str, int], firsts: range, *, plain: bool
    ) -> tuple[list[tuple[Rows, Sequence[bytes | None]]], str]:
        """Return the pages of a claim that begin at ``firsts``, and its state after they were read."""
        topic, slot, *_ = claim
        pages = [(first, min(firsts.step, firsts.stop - first)) for first in firsts]
        parts: list[tuple[Rows, Sequence[bytes | None]]]
        if plain:
            rows = [inspect.rows(topic, slot, "claim", first, first + wanted - 1) for first, wanted in pages]
            parts = [(found, ()) for found in walk(self.broker, rows)]
        else:
            reads = [claims.read_claim(*claim, first, wanted) for first, wanted in pages]
            parts = [(read.rows, read.envelopes) for read in walk(self.broker, reads)]
        # Checked after everything was read: if it is still sealed, nothing had been taken out before.
        return parts, self.broker.run(claims.read_claim(*claim)).state

    def _batch(self, slot: int, rows: Rows, envelopes: Sequence[bytes | None]) -> pa.RecordBatch:
        members: Rows = rows[::2]
        if envelopes or self.topic.is_fifo:
            stored = envelopes or repeat(None, len(members))
            members = list(map(raw_body, repeat(self.topic), members, stored))
        return narrow_batch(self.schema, self.topic.name, slot, members, rows[1::2])
