"""Operations of tasks on named messages: delete archived ones, replay and revive.

Each function takes a frame and the options of ``format("rmq")``, and returns a frame that does the work when
it is collected, and contains the outcomes. A task that is tried again repeats what it can; all operations may
be repeated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

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
from django_rmq.spark.broker_connection import reached
from django_rmq.spark.source_options import CONNECTION, SourceOptions
from django_rmq.spark.versions import too_old

Rows = list[dict[str, Any]]

STEP = 250
"""The number of messages in one script."""


def discard(frame: Any, options: Mapping[str, str]) -> Any:
    """Delete dead messages (``slot, member, died_ms``) that are unchanged.

    Outcomes: ``deleted``, ``changed``, ``gone``.
    """
    return _outcomes(frame, options, _discard, "slot", "member", "died_ms")


def replay(frame: Any, options: Mapping[str, str]) -> Any:
    """Replay dead messages (``slot, member``). Outcomes: ``replayed``, ``merged``, ``gone``."""
    return _outcomes(frame, options, _replay, "slot", "member")


def fail(frame: Any, options: Mapping[str, str], consumer: str) -> Any:
    """Note that messages of a consumer's batch failed (``slot, member, kind, error``).

    Outcomes: ``ok``, ``again``, ``not_found``, and ``open`` or ``stale`` if the batch is no longer its own.
    """
    return _outcomes(frame, options, partial(_fail, consumer), "slot", "member", "kind", "error")


def revive(frame: Any, options: Mapping[str, str]) -> Any:
    """Send archived messages again (``slot, slots, member, envelope, scored``), with their full number of retries.

    Outcomes are those of a send, and ``unplaced``: the slot under the present slot count is unknown.
    """
    return _outcomes(frame, options, _revive, "slot", "slots", "member", "envelope", "scored")


def _outcomes(
    frame: Any, options: Mapping[str, str], act: Callable[[Broker, Topic, Rows], list[str]], *columns: str
) -> Any:
    """Return ``outcome, messages`` of the answers of ``act`` for each row."""
    from pyspark.sql import functions as sql

    given = dict(options)

    def outcomes(rows: pa.Array) -> pa.Array:
        broker, topic = _reached(given)
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


def _in_tasks(function: Callable[[pa.Array], pa.Array], result: str) -> Any:
    """Return a function of columns. Unlike ``mapInArrow`` it needs no pandas."""
    # It has effects: the optimizer must neither leave it out nor run it twice.
    return _arrow_udf()(function, result).asNondeterministic()


def _reached(options: Mapping[str, str]) -> tuple[Broker, Topic]:
    given = SourceOptions(
        {key: value for key, value in options.items() if key in CONNECTION}, CONNECTION, "a task"
    )
    return reached(given)


def _each_slot(
    broker: Broker, rows: Rows, call: Callable[[int, Rows], Call[list[str]]], words: Mapping[str, str]
) -> list[str]:
    """Return the answers of a transition for each row, in other ``words``."""
    by_slot: defaultdict[int, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        by_slot[row["slot"]].append(at)
    asked = [
        (slot, places[first : first + STEP])
        for slot, places in by_slot.items()
        for first in range(0, len(places), STEP)
    ]
    calls = [call(slot, [rows[at] for at in places]) for slot, places in asked]
    found = [""] * len(rows)
    for (_, places), answer in zip(asked, walk(broker, calls, len(calls)), strict=True):
        for at, word in zip(places, answer, strict=True):
            found[at] = words.get(word, word)
    return found


def _discard(broker: Broker, topic: Topic, rows: Rows) -> list[str]:
    def call(slot: int, part: Rows) -> Call[list[str]]:
        return operate.discard(topic, slot, [row["died_ms"] for row in part], [row["member"] for row in part])

    return _each_slot(broker, rows, call, {"dead": "deleted", "not_found": "gone"})


def _replay(broker: Broker, topic: Topic, rows: Rows) -> list[str]:
    def call(slot: int, part: Rows) -> Call[list[str]]:
        return operate.replay(topic, slot, [row["member"] for row in part])

    return _each_slot(broker, rows, call, {"not_found": "gone"})


def _fail(consumer: str, broker: Broker, topic: Topic, rows: Rows) -> list[str]:
    known = [at for at, row in enumerate(rows) if row["slot"] is not None and row["member"] is not None]
    slots = sorted({rows[at]["slot"] for at in known})
    reads = walk(broker, (claims.read_claim(topic, slot, consumer) for slot in slots))
    numbers = {slot: read.number for slot, read in zip(slots, reads, strict=True)}

    def call(slot: int, part: Rows) -> Call[list[str]]:
        failures = [Failure(row["member"], row["kind"], error=row["error"] or "") for row in part]
        return claims.fail_claimed(topic, slot, consumer, numbers[slot], failures)

    found = ["not_found"] * len(rows)
    for at, word in zip(known, _each_slot(broker, [rows[at] for at in known], call, {}), strict=True):
        found[at] = word
    return found


def _revive(broker: Broker, topic: Topic, rows: Rows) -> list[str]:
    now_ms = broker.now_ms()
    found = ["unplaced"] * len(rows)
    built: list[Outgoing] = []
    places: list[int] = []
    for at, row in enumerate(rows):
        member, envelope = row["member"], row["envelope"]
        # As if the topic were being re-slotted from its count at that time.
        slot = Reslotting(topic, row["slots"], 0).target(row["slot"], "store", Entry(member, 0.0, envelope))
        if slot is None:
            continue
        if envelope is not None:
            kept = decode_envelope(envelope)
            if 0 < kept.expires_ms <= now_ms:
                envelope = encode_envelope(kept._replace(expires_ms=0))
        built.append(Outgoing(topic, slot, member, score_at_once(topic, row["scored"], now_ms), envelope))
        places.append(at)
    for at, result in zip(places, Producer(broker).send(built), strict=True):
        found[at] = result.status
    return found


__all__ = ["discard", "fail", "replay", "revive"]
