"""Fails messages on purpose, from the function that ``foreachBatch`` calls: a whole batch, or single rows of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django_rmq.core.commands import claims
from django_rmq.core.commands.inspect import walk
from django_rmq.exceptions import ConfigurationError, LostRace
from django_rmq.spark import row_actions
from django_rmq.spark.broker_connection import RetryPolicy, reached
from django_rmq.spark.source_options import STREAM, SourceOptions


def fail(frame: Any, options: Mapping[str, str], error: Any, *, reject: bool = False) -> int:
    """Fail the rows of ``frame``, which are some of a batch; return how many there are.

    When Spark has recorded the batch, each uses a retry and rests as its topic says, or goes to Dead if it has no
    retries left; with ``reject`` it goes to Dead at once. Until then the batch reads as before. The other rows are
    acknowledged as ever. What was failed stays so if the batch is repeated.

    ``options`` are those of the stream, with ``consumerId``. ``error`` is a text, or a column with one for each row,
    of which 1,024 bytes are kept. ``frame`` needs the columns ``slot`` and ``value`` as they were read; on keyed
    topics ``slot`` and ``key`` (``includeMetadata``).

    Raises ``ConfigurationError`` without ``consumerId`` or these columns, ``ValueError`` if rows are not messages of
    the batch, and ``LostRace`` if it is no longer the query's own: then its messages are delivered again anyway.
    """
    from pyspark.sql import functions as sql

    given = _options(options, "fail")
    _, topic = reached(given)
    name = "key" if topic.keyed else "value"
    if missing := {"slot", name} - set(frame.columns):
        raise ConfigurationError(
            f"the frame has no column {' or '.join(sorted(missing))}: fail needs slot and {name} as they were read"
            + (", so load the stream with includeMetadata" if topic.keyed else "")
        )
    rows = frame.select(
        frame["slot"].cast("int").alias("slot"),
        frame[name].cast("binary").alias("member"),
        sql.lit("rejected" if reject else "failed").alias("kind"),
        (sql.lit(error) if isinstance(error, str) else error).cast("string").alias("error"),
    )
    outcomes: dict[str, int] = {
        row.outcome: row.messages for row in row_actions.fail(rows, options, given.consumer).collect()
    }
    noted = outcomes.pop("ok", 0) + outcomes.pop("again", 0)
    if strangers := outcomes.pop("not_found", 0):
        raise ValueError(
            f"{strangers} of {strangers + noted} rows are not messages of the batch of {given.consumer}: fail needs "
            f"slot and {name} as they were read"
        )
    if lost := sum(outcomes.values()):
        raise LostRace(
            f"the batch of {given.consumer} on topic {topic.name} is no longer its own: {lost} of the rows are "
            "delivered again as they were"
        )
    return noted


def fail_batch(options: Mapping[str, str]) -> int:
    """Give back the batch that a query is working on, with a retry of each message used; return how many there are.

    ``options`` are those of the stream, with ``consumerId``, which says whose batch it is. Messages rest as
    after a time-out; those without retries left go to Dead. Call it in the function of ``foreachBatch`` and
    return: Spark records the batch, and the query goes on. Until then the batch reads as empty, so call it after
    the last use of the frame.

    Raises ``ConfigurationError`` without ``consumerId``, and ``ServerUnavailable`` after ``patience`` seconds.
    """
    given = _options(options, "fail_batch")
    consumer, patience = given.consumer, RetryPolicy(given.patience, f"topic {given.topic()}")

    def give_back() -> int:
        broker, topic = reached(given)
        slots = range(topic.slots)
        reads = walk(broker, (claims.read_claim(topic, slot, consumer) for slot in slots))
        messages = 0
        for slot, read in zip(slots, reads, strict=True):
            # A claim that is lost already goes back by itself; this continues one whose answer was not received.
            if read.state not in ("sealed", "lost"):
                continue
            messages += read.size
            while broker.run(claims.return_claim(topic, slot, consumer, read.number, spent=True))[1]:
                pass
        return messages

    return patience(give_back)


def _options(options: Mapping[str, str], who: str) -> SourceOptions:
    given = SourceOptions(options, STREAM, who)
    if given.text("consumerId") is None:
        raise ConfigurationError(
            f"option consumerId is missing: {who} needs the one with which the stream was loaded"
        )
    return given


__all__ = ["fail", "fail_batch"]
