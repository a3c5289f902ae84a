"""Fails messages of a batch on purpose: the whole batch, or some of its rows.

What becomes of a batch whose query dies is decided in ``lua/slot/claims.lua``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from django_rmq.core.commands import claims
from django_rmq.core.commands.broker_interface import Broker, walk
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError, LostRace
from django_rmq.spark.broker_connection import RetryPolicy, reached
from django_rmq.spark.dead_messages import Rows, each_slot, outcomes_of_rows
from django_rmq.spark.source_options import STREAM, SourceOptions

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def fail(frame: DataFrame, options: Mapping[str, str], error: str | Column, *, reject: bool = False) -> int:
    """Fail the rows of ``frame``, which are some of a batch; return how many there are.

    When Spark has recorded the batch, each uses a retry and rests as its topic says, or goes to Dead if it has no
    retries left; with ``reject`` it goes to Dead at once. Until then the batch reads as before. The other rows are
    acknowledged as ever. What was failed stays so if the batch is repeated.

    ``options`` are those of the stream, with ``consumerId``. ``error`` is a text, or a column with one for each row,
    of which 1,024 bytes are kept. ``frame`` needs the columns ``slot`` and ``value`` as they were read; on keyed
    topics ``slot`` and ``key`` (``includeMetadata``).

    Raises ``ConfigurationError`` without these columns, or without the ``consumerId`` of a query; ``ValueError`` if
    rows are not messages of the batch; and ``LostRace`` if it is no longer the query's own: then its messages are
    delivered again anyway.
    """
    from pyspark.sql import functions as sql

    source = _options(options, "fail")
    patience = RetryPolicy(source.patience, f"topic {source.topic()}")
    broker, topic = patience(lambda: reached(source))
    name = "key" if topic.keyed else "value"
    if missing := {"slot", name} - set(frame.columns):
        raise ConfigurationError(
            f"the frame has no column {' or '.join(sorted(missing))}: fail needs slot and {name} as they were read"
            + (", so load the stream with includeMetadata" if topic.keyed else "")
        )
    patience(lambda: _check_consumer(broker, topic, source.consumer))
    rows = frame.select(
        frame["slot"].cast("int").alias("slot"),
        frame[name].cast("binary").alias("member"),
        sql.lit("rejected" if reject else "failed").alias("kind"),
        (sql.lit(error) if isinstance(error, str) else error).cast("string").alias("error"),
    )
    act = partial(_fail_rows, source.consumer)
    counted = outcomes_of_rows(rows, options, act, "slot", "member", "kind", "error")
    outcomes: dict[str, int] = {row.outcome: row.messages for row in counted.collect()}
    noted = outcomes.pop("ok", 0) + outcomes.pop("again", 0)
    if strangers := outcomes.pop("not_found", 0):
        raise ValueError(
            f"{strangers} of {strangers + noted} rows are not messages of the batch of {source.consumer}: fail needs "
            f"slot and {name} as they were read"
        )
    if lost := sum(outcomes.values()):
        raise LostRace(
            f"the batch of {source.consumer} on topic {topic.name} is no longer its own: {lost} of the rows are "
            "delivered again as they were"
        )
    return noted


def fail_batch(options: Mapping[str, str]) -> int:
    """Give back the batch that a query is working on, with a retry of each message used; return how many there are.

    ``options`` are those of the stream, with ``consumerId``, which says whose batch it is. Messages rest as
    after a time-out; those without retries left go to Dead. Call it in the function of ``foreachBatch`` and
    return: Spark records the batch, and the query goes on. Until then the batch reads as empty, so call it after
    the last use of the frame.

    Raises ``ConfigurationError`` without the ``consumerId`` of a query, and ``ServerUnavailable`` after ``patience``
    seconds.
    """
    source = _options(options, "fail_batch")
    consumer, patience = source.consumer, RetryPolicy(source.patience, f"topic {source.topic()}")
    sizes: dict[int, int] = {}

    def give_back() -> None:
        broker, topic = reached(source)
        _check_consumer(broker, topic, consumer)
        slots = range(topic.slots)
        reads = walk(broker, (claims.read_claim(topic, slot, consumer) for slot in slots))
        for slot, claim in zip(slots, reads, strict=True):
            # A claim that is lost already goes back by itself; this continues one whose answer was not received.
            if claim.state not in ("sealed", "lost"):
                continue
            # If Redis was unavailable meanwhile, a claim that was given back before reads as lost, with the size 0.
            sizes.setdefault(slot, claim.size)
            while broker.run(claims.return_claim(topic, slot, consumer, claim.number, spent=True))[1]:
                pass

    patience(give_back)
    return sum(sizes.values())


def _options(options: Mapping[str, str], who: str) -> SourceOptions:
    source_options = SourceOptions(options, STREAM, who)
    if source_options.text("consumerId") is None:
        raise ConfigurationError(
            f"option consumerId is missing: {who} needs the one with which the stream was loaded"
        )
    return source_options


def _check_consumer(broker: Broker, topic: Topic, consumer: str) -> None:
    """Raise ``ConfigurationError`` if no query has the name: its batch would be acknowledged, and nobody would have failed it."""
    if broker.run(claims.driver_of_consumer(topic, consumer)) is None:
        raise ConfigurationError(
            f"no query consumes topic {topic.name} with consumerId {consumer}: give the one with which the stream was loaded"
        )


def _fail_rows(consumer: str, broker: Broker, topic: Topic, patience: RetryPolicy, rows: Rows) -> list[str]:
    """Note that messages of a consumer's batch failed (``slot, member, kind, error``).

    Outcomes: ``ok``, ``again``, ``not_found``, and ``open`` or ``stale`` if the batch is no longer its own.
    """
    located = [at for at, row in enumerate(rows) if row["slot"] is not None and row["member"] is not None]
    slots = sorted({rows[at]["slot"] for at in located})
    calls = [claims.read_claim(topic, slot, consumer) for slot in slots]
    reads = patience(lambda: list(walk(broker, calls)))
    numbers = {slot: claim.number for slot, claim in zip(slots, reads, strict=True)}

    def call(slot: int, part: Rows) -> Call[list[str]]:
        failures = [Failure(row["member"], row["kind"], error=row["error"] or "") for row in part]
        return claims.fail_claimed(topic, slot, consumer, numbers[slot], failures)

    outcomes = ["not_found"] * len(rows)
    words = each_slot(broker, patience, [rows[at] for at in located], call, {})
    for at, word in zip(located, words, strict=True):
        outcomes[at] = word
    return outcomes
