"""Dead messages by rows of a frame: deletes them, replays them, or sends archived ones again.

Tasks do it, so that the members never pass through the driver. ``failing`` does the same with rows of a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from django_rmq.core.commands import operate
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.envelope import decode_envelope, encode_envelope, future_expiry
from django_rmq.core.model.replies import Entry
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import Outgoing, score_at_once
from django_rmq.core.producer.producer import Producer
from django_rmq.core.reslotting import Reslotting
from django_rmq.exceptions import RmqError
from django_rmq.spark.broker_connection import RetryPolicy, reached
from django_rmq.spark.reader import too_old
from django_rmq.spark.source_options import SourceOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Rows = list[dict[str, Any]]

STEP = 250
"""The number of messages in one script; see ``operations.bulk.PER_SLOT``."""


def discard(frame: DataFrame, options: Mapping[str, str]) -> DataFrame:
    """Delete dead messages (``slot, member, died_ms``) that are unchanged.

    Outcomes: ``deleted``, ``changed``, ``gone``.
    """
    return outcomes_of_rows(frame, options, _discard, "slot", "member", "died_ms")


def replay(frame: DataFrame, options: Mapping[str, str]) -> DataFrame:
    """Replay dead messages (``slot, member``). Outcomes: ``replayed``, ``merged``, ``gone``."""
    return outcomes_of_rows(frame, options, _replay, "slot", "member")


def revive(frame: DataFrame, options: Mapping[str, str]) -> DataFrame:
    """Send archived messages again (``slot, slots, member, envelope, scored``), with their full number of retries.

    Outcomes are those of a send, and ``unplaced``: the slot under the present slot count is unknown.
    """
    return outcomes_of_rows(frame, options, _revive, "slot", "slots", "member", "envelope", "scored")


def _discard(broker: Broker, topic: Topic, patience: RetryPolicy, rows: Rows) -> list[str]:
    def call(slot: int, part: Rows) -> Call[list[str]]:
        return operate.discard(topic, slot, [row["died_ms"] for row in part], [row["member"] for row in part])

    return each_slot(broker, patience, rows, call, {"dead": "deleted", "not_found": "gone"})


def _replay(broker: Broker, topic: Topic, patience: RetryPolicy, rows: Rows) -> list[str]:
    def call(slot: int, part: Rows) -> Call[list[str]]:
        return operate.replay(topic, slot, [row["member"] for row in part])

    return each_slot(broker, patience, rows, call, {"not_found": "gone"})


def _revive(broker: Broker, topic: Topic, patience: RetryPolicy, rows: Rows) -> list[str]:
    now_ms = patience(broker.now_ms)
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
            if decoded.expires_ms != (expires_ms := future_expiry(decoded.expires_ms, now_ms)):
                envelope = encode_envelope(decoded._replace(expires_ms=expires_ms))
        built.append(Outgoing(topic, slot, member, score_at_once(topic, row["scored"], now_ms), envelope))
        places.append(at)
    for at, result in zip(places, patience(lambda: Producer(broker).send(built)), strict=True):
        outcomes[at] = result.status
    return outcomes


def outcomes_of_rows(
    frame: DataFrame,
    options: Mapping[str, str],
    act: Callable[[Broker, Topic, RetryPolicy, Rows], list[str]],
    *columns: str,
) -> DataFrame:
    """Return ``outcome, messages``: each answer of ``act``, and the number of rows that got it.

    ``act`` gets a part of the rows, and waits for Redis by the policy that it gets.
    """
    from pyspark.sql import functions as sql

    own_options = dict(options)

    def outcomes(rows: pa.Array) -> pa.Array:
        source = SourceOptions.of_connection(own_options, "a task")
        patience = RetryPolicy(source.patience, f"topic {source.topic()}")
        broker, topic = patience(lambda: reached(source))
        words: list[str] = []
        for first in range(0, len(rows), BATCH):
            words += act(broker, topic, patience, rows.slice(first, BATCH).to_pylist())
        return pa.array(words, pa.string())

    # It has effects: the optimizer must neither leave it out nor run it twice. Unlike ``mapInArrow`` it needs no pandas.
    outcome = _arrow_udf()(outcomes, "string").asNondeterministic()(sql.struct(*columns))
    counts = frame.select(outcome.alias("outcome")).groupBy("outcome").count()
    return counts.withColumnRenamed("count", "messages")


def each_slot(
    broker: Broker,
    patience: RetryPolicy,
    rows: Rows,
    call: Callable[[int, Rows], Call[list[str]]],
    words: Mapping[str, str],
) -> list[str]:
    """Return the answers of a transition for each row, in other ``words``. Only calls without an answer are repeated."""
    by_slot: defaultdict[int, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        by_slot[row["slot"]].append(at)
    places_by_slot = [
        (slot, places[first : first + STEP])
        for slot, places in by_slot.items()
        for first in range(0, len(places), STEP)
    ]
    outcomes = [""] * len(rows)

    def ask() -> None:
        left = [(slot, places) for slot, places in places_by_slot if not outcomes[places[0]]]
        answers = run_all(broker, [call(slot, [rows[at] for at in places]) for slot, places in left])
        for (_, places), answer in zip(left, answers, strict=True):
            if not isinstance(answer, RmqError):
                for at, word in zip(places, answer, strict=True):
                    outcomes[at] = words.get(word, word)
        for failure in answers:
            if isinstance(failure, RmqError):
                raise failure

    patience(ask)
    return outcomes


def check_version() -> None:
    """Raise ``ConfigurationError`` for a PySpark without what all of these operations need."""
    _arrow_udf()


def _arrow_udf() -> Any:
    try:
        from pyspark.sql.pandas.functions import arrow_udf
    except ImportError:
        raise too_old("replay and archive without --keep", "4.1") from None

    return arrow_udf
