"""Acknowledge a batch as soon as Spark has recorded it (a ``StreamingQueryListener``), not at the query's next poll."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from pyspark.sql.streaming.listener import QueryProgressEvent, StreamingQueryListener

from django_rmq.exceptions import RmqError
from django_rmq.spark.broker_connection import RetryPolicy, reached
from django_rmq.spark.claims import Claims
from django_rmq.spark.source_options import SourceOptions, connection_part
from django_rmq.spark.stream_reader import Offset, slots_in

logger = logging.getLogger("django_rmq.spark")


def acknowledge(options: Mapping[str, str], offset: Offset) -> int:
    """Acknowledge what a query had recorded, up to ``offset``; return how many slots had a claim.

    ``options`` are those of the query, or at least those that name the topic. Without this call a claim is
    acknowledged only when the query polls again, and given to others when its lease ends.
    """
    topic_name = offset.get("topic") or options.get("topic", "")
    given = SourceOptions.of_connection({**options, "topic": topic_name}, "acknowledge")

    def end() -> int:
        broker, topic = reached(given)
        # A claim takes whole slots, and everything that a re-slotting has moved was acknowledged before.
        slots = [slot for slot in slots_in(offset["held"], topic.slots) if slot < topic.slots]
        return Claims(broker, topic, 0).acknowledge(offset["consumer"], int(offset["claim"]), slots)

    return RetryPolicy(given.patience, f"topic {given.topic()}")(end)


class Acknowledger(StreamingQueryListener):
    """A listener for queries that read ``format("rmq")``: ``spark.streams.addListener(Acknowledger(options))``.

    ``options`` contain the connection to Redis, like those of the query. With ``topic`` (one or several) only
    queries on these topics are acknowledged; without it those on all topics of that Redis. Spark calls it
    after each commit.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = connection_part(options)
        # A listener must not delay Spark; what cannot be acknowledged now is acknowledged at the next poll.
        self._at_once = {**self._options, "patience": "0"}
        self._topics = set(SourceOptions.of_connection(options, "Acknowledger").names("topic"))

    def onQueryStarted(self, event: object) -> None:  # noqa: N802 - Spark's name
        """Do nothing: nothing is recorded yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Acknowledge the batch whose record Spark has just written."""
        self.note(event.progress)

    def onQueryIdle(self, event: object) -> None:  # noqa: N802 - Spark's name
        """Do nothing: nothing was recorded."""

    def onQueryTerminated(self, event: object) -> None:  # noqa: N802 - Spark's name
        """Do nothing: its last batch had its progress."""

    def note(self, progress: Any) -> None:
        """Acknowledge the batch of a progress record; only log a warning if Redis does not answer."""
        if all(source["startOffset"] == source["endOffset"] for source in progress["sources"]):
            return
        try:
            self._acknowledge(progress, self._at_once)
        except RmqError as error:
            logger.warning("Cannot acknowledge a batch (%s); the next poll tries again", error)

    def acknowledge(self, progress: object) -> None:
        """Acknowledge everything that a progress record reports as done, with the patience of the options.

        Raises ``RmqError``.
        """
        self._acknowledge(progress, self._options)

    def _acknowledge(self, progress: Any, options: Mapping[str, str]) -> None:
        # A progress record is written after the record of its batch (the commit log).
        for source in progress["sources"]:
            offset = _offset(source["endOffset"])
            if offset is None:
                continue
            # Offsets of older checkpoints do not name their topic.
            topics = [offset["topic"]] if "topic" in offset else sorted(self._topics)
            for topic in topics:
                if topic in self._topics or not self._topics:
                    acknowledge({**options, "topic": topic}, offset)


def _offset(text: str | None) -> Offset | None:
    """Return an offset of RMQ. None: it belongs to another source."""
    try:
        offset = json.loads(text or "{}")
    except (TypeError, ValueError):
        return None
    # An offset of Kafka has names of topics, one of which may be the same.
    is_ours = isinstance(offset, dict) and isinstance(offset.get("consumer"), str)
    return offset if is_ours else None
