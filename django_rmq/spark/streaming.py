"""Stream read: a query consumes a topic in two phases.

The driver claims in ``latestOffset``; tasks only read what is claimed, so a task may be tried as often as Spark likes. A
batch is acknowledged when the next poll says that it is committed: Spark itself calls ``commit`` only when there is a
next batch. The identity of the consumer travels in the offset: the checkpoint is the identity. Decision 0004 says why so.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from django_rmq.broker import Broker
from django_rmq.exceptions import ConfigurationError, LostRace, RmqError, SlotMoved
from django_rmq.keys import TOPIC_NAME
from django_rmq.messages import BATCH, Claimed, Counts, Topic, decode_envelope
from django_rmq.spark.connection import broker_of, topic_of
from django_rmq.spark.options import CONNECTION, STREAM, Options
from django_rmq.spark.paging import FIRST_PAGE, MOST_ROWS, PAGES, Rows, fitting, narrow_batch

logger = logging.getLogger("django_rmq.spark")

HEADS = 1_024

ANY_SIZE = 1 << 53
"""Bytes of a claim: what waits in a slot changes its name whole, however large it is."""

LOOK_SECONDS = 5.0
"""Between two looks whether a topic that seems empty was re-slotted."""


class Piece(NamedTuple):
    """A part of a task: some rows of a claim in one slot."""

    slot: int
    offset: int
    rows: int


class Task(InputPartition):
    """What one task reads of a claim."""

    def __init__(self, consumer: str, number: int, pieces: Sequence[Piece]) -> None:
        super().__init__(number)
        self.consumer = consumer
        self.number = number
        self.pieces = list(pieces)


def split(sizes: dict[int, int], tasks: int) -> list[list[Piece]]:
    """Return the rows of each slot in ``tasks`` parts of the same size, up to whole pages."""
    rows = sum(sizes.values())
    share = max(1, math.ceil(rows / max(1, tasks)))
    parts: list[list[Piece]] = [[]]
    room = share
    for slot, size in sizes.items():
        offset = 0
        while offset < size:
            if not room:
                parts.append([])
                room = share
            taken = min(size - offset, room)
            parts[-1].append(Piece(slot, offset, taken))
            offset += taken
            room -= taken
    return [part for part in parts if part]


def acknowledge(options: Mapping[str, str], offset: Mapping[str, Any]) -> int:
    """Acknowledge what a query that has ended had recorded, up to ``offset``; return how many claims that were.

    ``options`` are those of the query, or as many of them as say where the topic is. Without it a claim is only
    acknowledged when the query begins anew, and given to others when its lease ends.
    """
    known = {name: value for name, value in options.items() if name in CONNECTION}
    reader = StreamReader(Options(known, STREAM, "spark.readStream"), StructType())
    return reader.acknowledge(offset["consumer"], int(offset["claim"]))


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Claims on the driver, reads in tasks."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._name = options.topic()
        self._most = options.whole("maxMessagesPerTrigger", 200_000, low=1)
        self._lease_ms = round(options.number("claimTimeout", 120.0, low=1.0, high=86_400.0) * 1000)
        options.tasks(0)
        self._fail_on_loss = options.flag("failOnDataLoss", default=False)
        self._poll_seconds = options.number("pollInterval", 0.5, low=0.0, high=3_600.0)
        self._consumer = options.text("consumerId") or uuid4().hex
        if not TOPIC_NAME.fullmatch(self._consumer):
            raise ConfigurationError(
                f"option consumerId must be 1 to 100 of A-Z a-z 0-9 . _ -, got {self._consumer!r}"
            )
        self._topic = self._look_up()
        self._last_empty = float("-inf")
        """When (monotonic) a poll last found nothing."""
        self._next_look = float("-inf")
        self._newest = 0
        self._rest: int | None = None
        """AvailableNow: how many may still be claimed."""
        self._known: set[str] = set()
        """Consumers whose claims we know, for they are our own doing."""
        self._holder = ""
        self._held: dict[int, int] = {}
        """Slot -> number of the claim that we renew."""
        self._lock = threading.Lock()
        self._renewing: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_options", "_schema", "_name", "_topic", "_fail_on_loss")
        return {name: self.__dict__[name] for name in kept}

    def _look_up(self) -> Topic:
        return topic_of(self._name, self._broker.definitions().of(self._name))

    @property
    def _broker(self) -> Broker:
        return broker_of(self._options)

    # --- offsets

    def _offset(self, consumer: str, claim: int, rows: int) -> dict[str, Any]:
        # The engine compares offsets by their text: the order of the keys is part of it.
        return {"version": 1, "consumer": consumer, "claim": claim, "rows": rows, "slots": self._topic.slots}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return self._offset(self._consumer, 0, 0)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadMaxRows(self._most)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return None: a queue has no end that could be named."""
        return None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Take what is due by now, and no more of what comes meanwhile."""
        self._rest = sum(counts.due for counts in self._each(range(self._topic.slots), "count"))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Acknowledge what is committed, claim more, and return the offset of the new claim or ``start`` itself."""
        self._check(start)
        try:
            return self._next(start, self._budget(limit))
        except RmqError:
            # What ran and what did not is to be looked up.
            self._known.clear()
            raise

    def _next(self, start: dict[str, Any], budget: int) -> dict[str, Any]:
        consumer, committed = start["consumer"], int(start["claim"])
        newest = self._settle(consumer, committed)
        orphan = self._seal(consumer, newest) if newest > committed else 0
        if orphan:
            # Made by a driver that died before it could log the offset.
            return self._offset(consumer, newest, orphan)
        self._pause()
        number = max(newest, committed) + 1
        if self._claim(consumer, number, budget):
            rows = self._seal(consumer, number)
            if rows:
                if self._rest is not None:
                    self._rest = max(0, self._rest - rows)
                return self._offset(consumer, number, rows)
        self._last_empty = time.monotonic()
        self._look_for_slots()
        return start

    def _look_for_slots(self) -> None:
        """Make sure, now and then, that an empty topic is empty: after a re-slotting others have its messages."""
        if self._last_empty < self._next_look:
            return
        self._next_look = self._last_empty + LOOK_SECONDS
        if self._look_up().slots != self._topic.slots:
            raise self._moved()

    def _moved(self) -> SlotMoved:
        return SlotMoved(
            f"topic {self._name} has another slot count by now than the {self._topic.slots} with which the query began: what "
            "Spark had recorded is acknowledged; begin again with a new checkpoint"
        )

    def commit(self, end: dict[str, Any]) -> None:
        """Acknowledge once more: the poll has done it before."""
        self._settle(end["consumer"], int(end["claim"]))

    def acknowledge(self, consumer: str, committed: int) -> int:
        """Acknowledge every claim up to ``committed`` and hold nothing; return how many there were."""
        slots = range(self._topic.slots)
        ending = [
            (slot, read.number)
            for slot, read in zip(slots, self._each(slots, "read_claim", consumer), strict=True)
            if 0 < read.number <= committed and read.state in ("open", "sealed", "acked")
        ]
        self._end(consumer, list(ending))
        return len(ending)

    def _check(self, offset: dict[str, Any]) -> None:
        if int(offset["slots"]) != self._topic.slots:
            raise SlotMoved(
                f"topic {self._name} has {self._topic.slots} slots by now, the checkpoint was begun with {offset['slots']}: "
                "let the old claims come back by their lease, and begin with a new checkpoint"
            )

    def _budget(self, limit: ReadLimit) -> int:
        most = self._most
        if isinstance(limit, ReadMaxRows):
            most = int(limit.max_rows)
        elif isinstance(limit, ReadAllAvailable):
            most = 1 << 53
        return most if self._rest is None else min(most, self._rest)

    def _pause(self) -> None:
        rest = self._last_empty + self._poll_seconds - time.monotonic()
        if rest > 0:
            time.sleep(rest)

    # --- claims, on the driver

    def _each(self, slots: Sequence[int], transition: str, *args: Any, **options: Any) -> list[Any]:
        found: list[Any] = []
        for first in range(0, len(slots), HEADS):
            pipeline = self._broker.pipeline()
            for slot in slots[first : first + HEADS]:
                getattr(pipeline, transition)(self._topic, slot, *args, **options)
            for answer in pipeline.execute():
                if isinstance(answer, RmqError):
                    raise answer
                found.append(answer)
        return found

    def _settle(self, consumer: str, committed: int) -> int:
        """End every claim up to ``committed``; return the number of the newest one that there is or was."""
        slots: list[int] = list(range(self._topic.slots))
        if consumer in self._known:
            slots = list(self._held)
        newest = 0
        ending: list[tuple[int, int]] = []
        for slot, read in zip(slots, self._each(slots, "read_claim", consumer), strict=True):
            newest = max(newest, read.number)
            if read.number > committed and read.state in ("open", "sealed"):
                self._hold(slot, consumer, read.number)
            elif read.number <= committed and read.state in ("open", "sealed", "acked"):
                ending.append((slot, read.number))
            else:
                if read.number == committed and read.state in ("lost", "returned"):
                    self._say_lost(slot, read.number)
                self._let_go(slot)
        self._end(consumer, ending)
        self._known.add(consumer)
        self._newest = max(self._newest, newest)
        return self._newest

    def _end(self, consumer: str, ending: list[tuple[int, int]]) -> None:
        """Acknowledge claims, in steps where failures have to be tidied up; give back what was never sealed."""
        while ending:
            pipeline = self._broker.pipeline()
            for slot, number in ending[:HEADS]:
                pipeline.ack(self._topic, slot, consumer, number)
            rest: list[tuple[int, int]] = []
            for (slot, number), answer in zip(ending[:HEADS], pipeline.execute(), strict=True):
                if isinstance(answer, RmqError):
                    raise answer
                word, left = answer
                while word == "open" and left:
                    # A request that came too late for its batch: nobody has read what it took.
                    _, left = self._broker.return_claim(self._topic, slot, consumer, number)
                if word == "stale":
                    self._say_lost(slot, number)
                if word == "ok" and left:
                    rest.append((slot, number))
                else:
                    self._let_go(slot)
            ending = rest + ending[HEADS:]

    def _let_go(self, slot: int) -> None:
        with self._lock:
            self._held.pop(slot, None)

    def _say_lost(self, slot: int, number: int) -> None:
        logger.warning(
            "Claim %d of topic %s slot %d was lost before Spark had recorded its batch: it is delivered again",
            number,
            self._name,
            slot,
        )

    def _claim(self, consumer: str, number: int, budget: int) -> bool:
        """Claim up to ``budget`` messages that are due; return whether any."""
        slots = range(self._topic.slots)
        now = self._broker.now_ms()
        due: dict[int, int] = {}
        for first in range(0, len(slots), HEADS):
            part = slots[first : first + HEADS]
            heads = self._broker.heads(self._topic, part)
            due.update(
                (slot, at) for slot, at in zip(part, heads, strict=True) if at is not None and at <= now
            )
        if not due or budget < 1:
            return False
        left = self._shares(due, budget)
        taken, moved = 0, False
        while left and taken < budget:
            pipeline = self._broker.pipeline()
            asked: list[int] = []
            rest = budget - taken
            for slot, quota in left.items():
                wanted = min(quota, rest)
                if wanted < 1:
                    break
                rest -= wanted
                asked.append(slot)
                pipeline.claim(self._topic, slot, consumer, number, self._lease_ms, wanted, ANY_SIZE)
            for slot, answer in zip(asked, pipeline.execute(), strict=True):
                if isinstance(answer, RmqError):
                    raise answer
                if answer.status == "moved":
                    moved = True
                    continue
                self._note(slot, consumer, number, answer)
                taken += answer.taken
                left[slot] -= answer.taken
                if not (answer.taken and answer.more and left[slot] > 0):
                    del left[slot]
            if moved:
                self._give_back(consumer, number)
                raise self._moved()
        return taken > 0

    def _shares(self, due: dict[int, int], budget: int) -> dict[int, int]:
        """Return how much to claim of each slot, in the order in which to ask; ``due``: slot -> when its first one was due.

        If not all of it: of a topic of time the slots with the oldest first, and whole, as a worker goes from slot to slot; of
        a priority topic its part of each slot, so that the most urgent of all slots go.
        """
        slots = list(due)
        counts = dict(zip(slots, self._each(slots, "count"), strict=True))
        sizes = {slot: max(1, found.due) for slot, found in counts.items()}
        total = sum(sizes.values())
        if total <= budget:
            # What has come since it was counted, too, but nobody's share for it.
            more = min(BATCH, (budget - total) // len(slots))
            return {slot: size + more for slot, size in sizes.items()}
        if self._topic.is_priority:
            # In any order: each part is rounded up, and may leave nothing to the last ones.
            random.shuffle(slots)
            return {slot: math.ceil(budget * sizes[slot] / total) for slot in slots}
        shut = {slot for slot, found in counts.items() if self._is_shut(found)}
        # What has timed out there keeps them shut, and they might not be asked for long.
        self._each(list(shut), "expire")
        slots.sort(key=lambda slot: (slot in shut, due[slot]))
        return {slot: sizes[slot] for slot in slots}

    def _is_shut(self, found: Counts) -> bool:
        """Whether a slot gives nothing now: asked in its turn it would only keep the budget from the others."""
        return found.paused or found.claimed > 0 or (self._topic.serial and found.prepare > 0)

    def _give_back(self, consumer: str, number: int) -> None:
        """Return a claim that no batch will ever read, in every slot that has a part of it."""
        with self._lock:
            slots = [slot for slot, held in self._held.items() if held == number]
        for slot in slots:
            while self._broker.return_claim(self._topic, slot, consumer, number)[1]:
                pass
            self._let_go(slot)

    def _note(self, slot: int, consumer: str, number: int, answer: Claimed) -> None:
        if answer.taken:
            self._hold(slot, consumer, number)
        elif answer.status not in ("ok", "busy", "paused"):
            logger.warning("Cannot claim from topic %s slot %d: %s", self._name, slot, answer.status)

    def _seal(self, consumer: str, number: int) -> int:
        """Seal a claim in every slot that has a part of it; return how many messages it holds."""
        with self._lock:
            slots = [slot for slot, held in self._held.items() if held == number]
        rows = 0
        for slot, size in zip(
            slots, self._each(slots, "renew", consumer, number, self._lease_ms, seal=True), strict=True
        ):
            if size is None:
                self._let_go(slot)
            else:
                rows += size
        self._newest = max(self._newest, number)
        return rows

    # --- the lease

    def _hold(self, slot: int, consumer: str, number: int) -> None:
        with self._lock:
            self._held[slot] = number
            self._holder = consumer
            if self._renewing is None:
                self._renewing = threading.Thread(target=self._renew, name="rmq-claims", daemon=True)
                self._renewing.start()

    def _renew(self) -> None:
        """Renew what is held, for as long as this process lives: Spark kills it with the query."""
        while True:
            time.sleep(self._lease_ms / 3_000)
            with self._lock:
                held = dict(self._held)
            try:
                pipeline = self._broker.pipeline()
                for slot, number in held.items():
                    pipeline.renew(self._topic, slot, self._holder, number, self._lease_ms)
                for (slot, number), size in zip(held.items(), pipeline.execute(), strict=True):
                    if size is None:
                        logger.warning("Claim %d of topic %s slot %d is lost", number, self._name, slot)
                        with self._lock:
                            if self._held.get(slot) == number:
                                del self._held[slot]
            except RmqError as error:
                logger.warning("Cannot renew the claims of topic %s: %s", self._name, error)

    # --- batches

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of the batch that ends with ``end``: pure, for Spark may ask more than once."""
        if start["consumer"] == end["consumer"] and start["claim"] == end["claim"]:
            return []
        self._check(end)
        consumer, number = end["consumer"], int(end["claim"])
        slots = range(self._topic.slots)
        sizes = {
            slot: read.size
            for slot, read in zip(slots, self._each(slots, "read_claim", consumer, number), strict=True)
            if read.state == "sealed" and read.size
        }
        for slot in sizes:
            self._hold(slot, consumer, number)
        rows = sum(sizes.values())
        if rows < int(end["rows"]):
            self._lost(number, int(end["rows"]) - rows)
        return [Task(consumer, number, pieces) for pieces in split(sizes, self._options.tasks(rows))]

    def _lost(self, number: int, missing: int) -> None:
        text = (
            f"{missing} messages of claim {number} of topic {self._name} are no longer held for this batch: their lease "
            "ended, or the checkpoint is older than what it acknowledged. What was lost is delivered again later"
        )
        if self._fail_on_loss:
            raise LostRace(text)
        logger.warning("%s", text)

    # --- in tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Where a batch has no rows, Spark makes a partition of its own.
        if not isinstance(partition, Task):
            return
        schema = to_arrow_schema(self._schema, timezone="UTC")
        for slot, offset, count in partition.pieces:
            yield from self._read_piece(schema, partition, slot, offset, count)

    def _read_piece(
        self, schema: pa.Schema, task: Task, slot: int, offset: int, count: int
    ) -> Iterator[pa.RecordBatch]:
        end = offset + count
        first_page = min(FIRST_PAGE, count)
        read = self._broker.read_claim(self._topic, slot, task.consumer, task.number, offset, first_page)
        if not read.rows:
            self._lost(task.number, count)
            return
        yield self._batch(schema, slot, read.rows, read.envelopes)
        offset += len(read.rows) // 2
        # Where there are bodies, a script reads them together; members alone Redis tells faster by itself.
        plain = not read.envelopes
        size = min(fitting(read.rows, read.envelopes), MOST_ROWS if plain else BATCH)
        while offset < end:
            pipeline = self._broker.pipeline()
            for first in range(offset, min(end, offset + PAGES * size), size):
                wanted = min(size, end - first)
                if plain:
                    pipeline.rows(self._topic, slot, "claim", first, first + wanted - 1)
                else:
                    pipeline.read_claim(self._topic, slot, task.consumer, task.number, first, wanted)
            answers = pipeline.execute()
            for answer in answers:
                if isinstance(answer, RmqError):
                    raise answer
            parts = [(answer, ()) if plain else (answer.rows, answer.envelopes) for answer in answers]
            # Asked when all of it is here: if it is sealed still, nothing had been taken out before.
            state = self._broker.read_claim(self._topic, slot, task.consumer, task.number).state
            if state != "sealed" or not all(rows for rows, _ in parts):
                # Half of a part is neither the same rows nor none: tried again, it reads as none.
                raise LostRace(
                    f"claim {task.number} of topic {self._name} slot {slot} was lost while it was read"
                )
            for rows, envelopes in parts:
                yield self._batch(schema, slot, rows, envelopes)
                offset += len(rows) // 2

    def _batch(
        self, schema: pa.Schema, slot: int, rows: Rows, envelopes: Sequence[bytes | None]
    ) -> pa.RecordBatch:
        members: Rows = rows[::2]
        if envelopes:
            members = [
                member if envelope is None else decode_envelope(envelope).body
                for member, envelope in zip(members, envelopes, strict=True)
            ]
        return narrow_batch(schema, self._name, slot, members, rows[1::2])
