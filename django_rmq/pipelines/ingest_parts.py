"""Messages of an ``ingest`` in pieces: stored in the checkpoint, sent one after the other, and each one recorded.

``checkpoint/messages/piece=…`` holds the messages, ``checkpoint/plan`` the size of each piece, and
``checkpoint/sent`` the pieces that were sent. Which piece a message is in depends on nothing but the message.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import run_all
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, RmqError
from django_rmq.pipelines import Context
from django_rmq.pipelines.pipeline_context import PROGRESS_SECONDS
from django_rmq.spark.broker_connection import RetryPolicy
from django_rmq.spark.source_options import PATIENCE
from django_rmq.spark.spark_session import stored_files

PIECE_SECONDS = 2.0
"""The time that a piece takes at the rate for which it was made."""
PIECE = 50_000
"""The number of messages of a piece, without a rate."""
MOST_PIECES = 4_096
"""The largest number of pieces: each is a folder."""
SHARE = 4
"""A piece is at most this part of ``--max-backlog``, so that the topic is never empty for want of a piece."""
LOOK_SECONDS = 0.5
"""Seconds between two counts of a backlog that is too large."""
SECRET = re.compile(r"secret|password|token|access\.?key", re.IGNORECASE)


class Pieces:
    """The pieces of one ingest. ``arguments`` choose its messages, ``sending`` are the options of a write."""

    def __init__(
        self, context: Context, topic: Topic, arguments: Mapping[str, Any], sending: Mapping[str, str]
    ) -> None:
        self._context = context
        self._topic = topic
        self._arguments = fingerprint(topic.name, arguments)
        self._sending = sending
        self._folder = (context.checkpoint or "").rstrip("/")

    def planned(self) -> dict[int, int] | None:
        """Return the number of messages of each piece. None: nothing is stored yet.

        Raises ``InvalidRequest`` if the checkpoint belongs to other arguments.
        """
        plan = stored_files(self._context.spark, f"{self._folder}/plan")
        rows = [] if plan is None else plan.collect()
        if not rows:
            return None
        if rows[0].arguments != self._arguments:
            raise InvalidRequest(
                f"{self._folder} belongs to an ingest with other arguments: give those, or another --checkpoint"
            )
        return {row.piece: row.messages for row in rows}

    def store(self, messages: Any, count: int, *, rate: float | None, max_backlog: int | None) -> None:
        """Store ``count`` messages in pieces; what a killed run had stored is replaced."""
        size = _size(rate, max_backlog)
        pieces = min(MOST_PIECES, max(1, math.ceil(count / size)))
        names = ", ".join(messages.columns)
        with self._context.watching():
            piece = f"pmod(xxhash64({names}), {pieces}) as piece"
            shared = messages.selectExpr("*", piece).repartition("piece")
            shared.write.partitionBy("piece").mode("overwrite").parquet(f"{self._folder}/messages")
            stored = self._context.spark.read.parquet(f"{self._folder}/messages").groupBy("piece").count()
            plan = stored.selectExpr(
                *("cast(piece as bigint) as piece", "count as messages"),
                f"'{self._arguments}' as arguments",
            )
            plan.coalesce(1).write.mode("overwrite").parquet(f"{self._folder}/plan")

    def sent(self) -> set[int]:
        """Return the pieces that were sent."""
        found = stored_files(self._context.spark, f"{self._folder}/sent")
        return set() if found is None else {row.piece for row in found.collect()}

    def send(self, planned: Mapping[int, int], *, rate: float | None, max_backlog: int | None) -> None:
        """Send the pieces that are left: at most ``rate`` messages per second, and while there is room."""
        context, done, total = self._context, self.sent(), sum(planned.values())
        sent = sum(count for piece, count in planned.items() if piece in done)
        if sent:
            context.say(f"{sent} of {total} messages were sent before")
        start = told = time.monotonic()
        before, due = sent, start
        for piece in sorted(set(planned) - done):
            count = planned[piece]
            if max_backlog is not None:
                self._wait_for_room(count, max_backlog)
            context.wait(due - time.monotonic())
            due = time.monotonic() + (count / rate if rate else 0.0)
            self._send(piece)
            sent += count
            now = time.monotonic()
            if now - told >= PROGRESS_SECONDS or sent == total:
                told = now
                pace = (sent - before) / (now - start)
                context.say(
                    f"{sent} of {total} messages sent, {pace:.0f}/s, {(total - sent) / pace:.0f} s left"
                )

    def _send(self, piece: int) -> None:
        # A stop that is requested meanwhile does not cancel this: a piece is short, and would be sent again.
        context = self._context
        messages = context.spark.read.parquet(f"{self._folder}/messages/piece={piece}")
        messages.write.format("rmq").options(**self._sending).mode("append").save()
        record = context.spark.range(piece, piece + 1, 1, 1).selectExpr("id as piece")
        record.write.mode("append").parquet(f"{self._folder}/sent")

    def _wait_for_room(self, count: int, most: int) -> None:
        """Return when ``count`` more messages exceed the largest backlog no more, or nothing waits."""
        look = RetryPolicy(PATIENCE, f"topic {self._topic.name}")
        told = float("-inf")
        while (waiting := look(self._waiting)) and waiting + count > most:
            if time.monotonic() - told >= 10 * PROGRESS_SECONDS:
                told = time.monotonic()
                self._context.say(f"Waiting: {waiting} messages wait in {self._topic.name}")
            self._context.wait(LOOK_SECONDS)

    def _waiting(self) -> int:
        """Return how many messages wait for a consumer, or rest until they are tried again."""
        # It may have been re-slotted meanwhile.
        topic, found = self._context.topic(self._topic.name), 0
        for first in range(0, topic.slots, 1_000):
            calls = [inspect.count(topic, slot) for slot in range(first, min(first + 1_000, topic.slots))]
            for counts in run_all(self._context.broker, calls):
                if isinstance(counts, RmqError):
                    raise counts
                found += counts.store + counts.retry
        return found


def _size(rate: float | None, max_backlog: int | None) -> int:
    """Return how many messages a piece has."""
    size = PIECE if rate is None else math.ceil(rate * PIECE_SECONDS)
    return size if max_backlog is None else min(size, max(1, max_backlog // SHARE))


def fingerprint(topic: str, arguments: Mapping[str, Any]) -> str:
    """Return what distinguishes one ingest from another, without the secrets in it."""
    kept = {
        name: [one for one in value if not SECRET.search(one.partition("=")[0])]
        if isinstance(value, list)
        else value
        for name, value in arguments.items()
    }
    return hashlib.sha256(json.dumps([topic, kept], sort_keys=True).encode()).hexdigest()


__all__ = ["Pieces", "fingerprint"]
