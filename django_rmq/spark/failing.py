"""Fails messages of a batch on purpose, whole or by rows of a frame; deletes dead messages by rows, or sends them again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from django_rmq.core.commands import claims, operate
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.inspect import walk
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.envelope import decode_envelope, encode_envelope
from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.replies import Entry, Failure
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import Outgoing, score_at_once
from django_rmq.core.producer.producer import Producer
from django_rmq.core.resharding import Reslotting
from django_rmq.exceptions import ConfigurationError, LostRace
from django_rmq.spark.broker_connection import RetryPolicy, reached
from django_rmq.spark.reader import too_old
from django_rmq.spark.source_options import CONNECTION, STREAM, SourceOptions

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Rows = list[dict[str, Any]]

STEP = 250
"""The number of messages in one script."""


def discard(frame: DataFrame, options: Mapping[str, str]) -> DataFrame:
    """Delete dead messages (``slot, member, died_ms``) that are unchanged.

    Outcomes: ``deleted``, ``changed``, ``gone``.
    """
    return _outcomes(frame, options, _discard, "slot", "member", "died_ms")


def replay(frame: DataFrame, options: Mapping[str, str]) -> DataFrame:
    """Replay dead messages (``slot, member``). Outcomes: ``replayed``, ``merged``, ``gone``."""
    return _outcomes(frame, options, _replay, "slot", "member")


def fail_rows(frame: DataFrame, options: Mapping[str, str], consumer: str) -> DataFrame:
    """Note that messages of a consumer's batch failed (``slot, member, kind, error``).

    Outcomes: ``ok``, ``again``, ``not_found``, and ``open`` or ``stale`` if the batch is no longer its own.
    """
    return _outcomes(frame, options, partial(_fail_rows, consumer), "slot", "member", "kind", "error")


def revive(frame: DataFrame, options: Mapping[str, str]) -> DataFrame:
    """Send archived messages again (``slot, slots, member, envelope, scored``), with their full number of retries.

    Outcomes are those of a send, and ``unplaced``: the slot under the present slot count is unknown.
    """
    return _outcomes(frame, options, _revive, "slot", "slots", "member", "envelope", "scored")


def _outcomes(
    frame: DataFrame,
    options: Mapping[str, str],
    act: Callable[[Broker, Topic, Rows], list[str]],
    *columns: str,
) -> DataFrame:
    """Return ``outcome, messages`` of the answers of ``act`` for each row."""
    from pyspark.sql import functions as sql

    own_options = dict(options)

    def outcomes(rows: pa.Array) -> pa.Array:
        broker, topic = _reached(own_options)
        words: list[str] = []
        for first in range(0, len(rows), BATCH):
            words += act(broker, topic, rows.slice(first, BATCH).to_pylist())
        return pa.array(words, pa.string())

    outcome = _in_tasks(outcomes, "string")(sql.struct(*columns))
    counts = frame.select(outcome.alias("outcome")).groupBy("outcome").count()
    return counts.withColumnRenamed("count", "messages")


def check_version() -> None:
    """Raise ``ConfigurationError`` for a PySpark without what all of these operations need."""
    _arrow_udf()


def _arrow_udf() -> Any:
    try:
        from pyspark.sql.pandas.functions import arrow_udf
    except ImportError:
        raise too_old("replay and archive without --keep", "4.1") from None

    return arrow_udf


def _in_tasks(function: Callable[[pa.Array], pa.Array], result: str) -> Callable[[Column], Column]:
    """Return a function of columns. Unlike ``mapInArrow`` it needs no pandas."""
    # It has effects: the optimizer must neither leave it out nor run it twice.
    of_columns: Callable[[Column], Column] = _arrow_udf()(function, result).asNondeterministic()
    return of_columns


def _reached(options: Mapping[str, str]) -> tuple[Broker, Topic]:
    source_options = SourceOptions(
        {key: value for key, value in options.items() if key in CONNECTION}, CONNECTION, "a task"
    )
    return reached(source_options)


def _each_slot(
    broker: Broker, rows: Rows, call: Callable[[int, Rows], Call[list[str]]], words: Mapping[str, str]
) -> list[str]:
    """Return the answers of a transition for each row, in other ``words``."""
    by_slot: defaultdict[int, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        by_slot[row["slot"]].append(at)
    places_by_slot = [
        (slot, places[first : first + STEP])
        for slot, places in by_slot.items()
        for first in range(0, len(places), STEP)
    ]
    calls = [call(slot, [rows[at] for at in places]) for slot, places in places_by_slot]
    outcomes = [""] * len(rows)
    for (_, places), answer in zip(places_by_slot, walk(broker, calls, len(calls)), strict=True):
        for at, word in zip(places, answer, strict=True):
            outcomes[at] = words.get(word, word)
    return outcomes


def _discard(broker: Broker, topic: Topic, rows: Rows) -> list[str]:
    def call(slot: int, part: Rows) -> Call[list[str]]:
        return operate.discard(topic, slot, [row["died_ms"] for row in part], [row["member"] for row in part])

    return _each_slot(broker, rows, call, {"dead": "deleted", "not_found": "gone"})


def _replay(broker: Broker, topic: Topic, rows: Rows) -> list[str]:
    def call(slot: int, part: Rows) -> Call[list[str]]:
        return operate.replay(topic, slot, [row["member"] for row in part])

    return _each_slot(broker, rows, call, {"not_found": "gone"})


def _fail_rows(consumer: str, broker: Broker, topic: Topic, rows: Rows) -> list[str]:
    located = [at for at, row in enumerate(rows) if row["slot"] is not None and row["member"] is not None]
    slots = sorted({rows[at]["slot"] for at in located})
    reads = walk(broker, (claims.read_claim(topic, slot, consumer) for slot in slots))
    numbers = {slot: claim.number for slot, claim in zip(slots, reads, strict=True)}

    def call(slot: int, part: Rows) -> Call[list[str]]:
        failures = [Failure(row["member"], row["kind"], error=row["error"] or "") for row in part]
        return claims.fail_claimed(topic, slot, consumer, numbers[slot], failures)

    outcomes = ["not_found"] * len(rows)
    for at, word in zip(located, _each_slot(broker, [rows[at] for at in located], call, {}), strict=True):
        outcomes[at] = word
    return outcomes


def _revive(broker: Broker, topic: Topic, rows: Rows) -> list[str]:
    now_ms = broker.now_ms()
    outcomes = ["unplaced"] * len(rows)
    built: list[Outgoing] = []
    places: list[int] = []
    for at, row in enumerate(rows):
        member, envelope = row["member"], row["envelope"]
        # As if the topic were being re-slotted from its count at that time.
        slot = Reslotting(topic, row["slots"], 0).target(row["slot"], "store", Entry(member, 0.0, envelope))
        if slot is None:
            continue
        if envelope is not None:
            decoded = decode_envelope(envelope)
            if 0 < decoded.expires_ms <= now_ms:
                envelope = encode_envelope(decoded._replace(expires_ms=0))
        built.append(Outgoing(topic, slot, member, score_at_once(topic, row["scored"], now_ms), envelope))
        places.append(at)
    for at, result in zip(places, Producer(broker).send(built), strict=True):
        outcomes[at] = result.status
    return outcomes


def fail(frame: DataFrame, options: Mapping[str, str], error: str | Column, *, reject: bool = False) -> int:
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

    source = _options(options, "fail")
    _, topic = reached(source)
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
        row.outcome: row.messages for row in fail_rows(rows, options, source.consumer).collect()
    }
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

    Raises ``ConfigurationError`` without ``consumerId``, and ``ServerUnavailable`` after ``patience`` seconds.
    """
    source = _options(options, "fail_batch")
    consumer, patience = source.consumer, RetryPolicy(source.patience, f"topic {source.topic()}")

    def give_back() -> int:
        broker, topic = reached(source)
        slots = range(topic.slots)
        reads = walk(broker, (claims.read_claim(topic, slot, consumer) for slot in slots))
        messages = 0
        for slot, claim in zip(slots, reads, strict=True):
            # A claim that is lost already goes back by itself; this continues one whose answer was not received.
            if claim.state not in ("sealed", "lost"):
                continue
            messages += claim.size
            while broker.run(claims.return_claim(topic, slot, consumer, claim.number, spent=True))[1]:
                pass
        return messages

    return patience(give_back)


def _options(options: Mapping[str, str], who: str) -> SourceOptions:
    source_options = SourceOptions(options, STREAM, who)
    if source_options.text("consumerId") is None:
        raise ConfigurationError(
            f"option consumerId is missing: {who} needs the one with which the stream was loaded"
        )
    return source_options
