"""``ingest``: sends rows of files or of a database table as messages of a topic, with a checkpoint in pieces.

``checkpoint/messages/piece=…`` holds the messages, ``checkpoint/plan`` the size of each piece, and
``checkpoint/sent`` the pieces that were sent. Which piece a message is in depends only on the message and
the number of pieces. ``spark.json_bodies`` writes the bodies.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from argparse import ArgumentParser
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import walk
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest
from django_rmq.spark.broker_connection import RetryPolicy
from django_rmq.spark.pipelines.pipeline import (
    PROGRESS_SECONDS,
    Context,
    Options,
    Pipeline,
    register,
    stored_files,
)
from django_rmq.spark.source_options import PAST_TIMES, PATIENCE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PIECE_SECONDS = 2.0
"""The time that a piece takes at the rate for which it was made."""
PIECE = 50_000
"""The number of messages of a piece, without a rate."""
MOST_PIECES = 4_096
"""The largest number of pieces: each is a folder."""
SHARE = 4
"""How many pieces fit into ``--max-backlog``, so that the topic is never empty for want of a piece. Pieces are hashes, so some
are larger than others, and ``MOST_PIECES`` may make all of them larger."""
LOOK_SECONDS = 0.5
"""Seconds between two counts of a backlog that is too large."""
SECRET = re.compile(r"secret|passw|pwd|token|access\.?key", re.IGNORECASE)

_PASSWORDS = (
    (r"(//[^:/?;@]*):[^?;&]*@", r"\1@"),
    (r"(jdbc:oracle:\w+:[^/@]*)/.*@", r"\1@"),
    (rf"([\w.-]*(?:{SECRET.pattern})[\w.-]*)\s*=\s*(?:\{{(?:[^}}]|\}}\}})*\}}|[^&;]*)", r"\1="),
)
"""Where the URL of a database may have a password: before the host, also as Oracle writes it, and in a parameter."""


class Pieces:
    """The pieces of one ingest. ``arguments`` choose its messages, ``sending`` are the options of a write."""

    def __init__(
        self, context: Context, topic: Topic, arguments: Mapping[str, object], sending: Mapping[str, str]
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

    def store(self, messages: DataFrame, count: int, *, rate: float | None, max_backlog: int | None) -> None:
        """Store ``count`` messages in pieces; what a killed run had stored is replaced."""
        size = _size(rate, max_backlog)
        pieces = min(MOST_PIECES, max(1, math.ceil(count / size)))
        names = ", ".join(messages.columns)
        with self._context.watching():
            piece = f"pmod(xxhash64({names}), {pieces}) as piece"
            shared = messages.selectExpr("*", piece).repartition("piece")
            shared.write.partitionBy("piece").mode("overwrite").parquet(f"{self._folder}/messages")
            stored = self._context.spark.read.parquet(f"{self._folder}/messages").groupBy("piece").count()
            # The plan is written last: a run that finds none stores the messages again, because they may be incomplete.
            plan = stored.selectExpr(
                *("cast(piece as bigint) as piece", "count as messages"), f"'{self._arguments}' as arguments"
            )
            plan.coalesce(1).write.mode("overwrite").parquet(f"{self._folder}/plan")

    def sent(self) -> set[int]:
        pieces = stored_files(self._context.spark, f"{self._folder}/sent")
        return set() if pieces is None else {row.piece for row in pieces.collect()}

    def send(self, planned: Mapping[int, int], *, rate: float | None, max_backlog: int | None) -> None:
        """Send the pieces that are left: at most ``rate`` messages per second, and while there is room."""
        context, done, total = self._context, self.sent(), sum(planned.values())
        sent = sum(count for piece, count in planned.items() if piece in done)
        if sent:
            context.say(f"{sent} of {total} messages were sent before")
        start = reported = time.monotonic()
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
            if now - reported >= PROGRESS_SECONDS or sent == total:
                reported = now
                pace = (sent - before) / (now - start)
                context.say(
                    f"{sent} of {total} messages sent, {pace:.0f}/s, {(total - sent) / pace:.0f} s left"
                )

    def _send(self, piece: int) -> None:
        # A stop that is requested meanwhile does not cancel this: a piece is short, and would be sent again.
        context = self._context
        messages = context.spark.read.parquet(f"{self._folder}/messages/piece={piece}")
        messages.write.format("rmq").options(**self._sending).mode("append").save()
        # The record comes after the send: a run that dies in between sends the piece twice, and loses none of it.
        record = context.spark.range(piece, piece + 1, 1, 1).selectExpr("id as piece")
        record.write.mode("append").parquet(f"{self._folder}/sent")

    def _wait_for_room(self, count: int, most: int) -> None:
        """Return when ``count`` more messages exceed the largest backlog no more, or nothing waits."""
        look = RetryPolicy(PATIENCE, f"topic {self._topic.name}")
        reported = float("-inf")
        while (waiting := look(self._waiting)) and waiting + count > most:
            if time.monotonic() - reported >= 10 * PROGRESS_SECONDS:
                reported = time.monotonic()
                self._context.say(f"Waiting: {waiting} messages wait in {self._topic.name}")
            self._context.wait(LOOK_SECONDS)

    def _waiting(self) -> int:
        """Return how many messages wait for a consumer, or rest until they are tried again."""
        # It may have been re-slotted meanwhile.
        topic = self._context.topic(self._topic.name)
        counted = walk(self._context.broker, (inspect.count(topic, slot) for slot in range(topic.slots)))
        return sum(counts.store + counts.retry for counts in counted)


def _size(rate: float | None, max_backlog: int | None) -> int:
    """Return how many messages a piece has."""
    size = PIECE if rate is None else math.ceil(rate * PIECE_SECONDS)
    return size if max_backlog is None else min(size, max(1, max_backlog // SHARE))


def fingerprint(topic: str, arguments: Mapping[str, Any]) -> str:
    """Return a hash of what distinguishes one ingest from another, without passwords, which its readers could guess."""
    chosen = {name: value for name, value in arguments.items() if name not in ("source", "option")}
    options = [one for one in arguments["option"] if not SECRET.search(one.partition("=")[0])]
    places = map(without_password, [arguments["source"], *options])
    return hashlib.sha256(json.dumps([topic, chosen, *places], sort_keys=True).encode()).hexdigest()


def without_password(text: str) -> str:
    """Return an address, or an option of the form ``name=value``, without passwords."""
    for pattern, kept in _PASSWORDS:
        text = re.sub(pattern, kept, text, flags=re.IGNORECASE)
    return text


FORMATS = ("csv", "json", "parquet", "jdbc")
SHOWN = 10
OPTIONS = ("priority", "fixed_time", "time_range", "delay", "slot_basis", "key")
"""The arguments that are options of a message, some of ``core.producer.placement.OPTIONS``."""

CHOOSING = (*OPTIONS, "source", "format", "option", "where", "select", "value", "merge", "limit")
"""The arguments that choose the messages; those of an ingest that goes on must be the same."""


@register
class Ingest(Pipeline):
    """Send the rows of CSV, JSON or Parquet files, or of a JDBC table, to a topic.

    A row becomes the JSON object of its columns, as `send_message` writes their values. Equal messages
    are merged before they are sent, but not on fifo topics or with --no-merge.
    If rows are sent again after a failure, messages that still wait merge too.
    With --checkpoint the messages are first stored there in pieces: an ingest that was stopped or killed goes on
    with the first piece that was not sent.
    """

    name = "ingest"

    def add_arguments(self, parser: ArgumentParser) -> None:
        def add(flag: str, metavar: str, text: str, **more: Any) -> None:
            parser.add_argument(flag, metavar=metavar, help=text, **more)

        repeated: dict[str, Any] = {"action": "append", "default": []}
        parser.add_argument("topic")
        parser.add_argument("source", help="files or a folder; with --format jdbc the URL of the database")
        parser.add_argument("--format", choices=FORMATS, help="default: by the file extension of SOURCE")
        option = "an option of Spark's reader, such as dbtable=orders; may be repeated"
        add("--option", "KEY=VALUE", option, **repeated)
        add("--where", "SQL", "only rows for which this is true")
        add("--select", "SQL", "columns of the body, such as 'id as item'", **repeated)
        add("--value", "SQL", "the whole body, instead of an object of columns")
        for name in OPTIONS:
            add(f"--{name.replace('_', '-')}", "SQL", f"the {name} of a message")
        merge = "send equal rows one by one"
        parser.add_argument("--no-merge", dest="merge", action="store_false", help=merge)
        add("--limit", "N", "at most N rows", type=int)
        add("--rate", "N", "send at most N messages per second; needs --checkpoint", type=float)
        backlog = "wait while more than N messages would wait in the topic; needs --checkpoint"
        add("--max-backlog", "N", backlog, type=int)
        past = "what to do with a --fixed-time that has passed"
        parser.add_argument("--past-times", choices=PAST_TIMES, help=past)
        add(
            "--bad",
            "PATH",
            "leave out rows that cannot be sent, and store them in this folder, with the reasons",
        )
        parser.add_argument("--dry-run", action="store_true", help="only count and show what would be sent")

    def run(self, context: Context, **options: Any) -> None:
        topic = context.topic(options["topic"])
        given = {name: options[name] for name in OPTIONS if options[name] is not None}
        _check(topic, given, options)
        _check_pace(context, topic, options)
        if context.checkpoint is None or options["dry_run"]:
            self._send(context, topic, given, options)
            return
        pace = {"rate": options["rate"], "max_backlog": options["max_backlog"]}
        more = {"pastTimes": options["past_times"], "badRows": options["bad"]}
        sending = context.sending_options(topic.name, **more)
        pieces = Pieces(context, topic, {name: options[name] for name in CHOOSING}, sending)
        planned = pieces.planned()
        if planned is None:
            with context.kept(_chosen(context, topic, given, options)) as cached:
                with context.watching():
                    count = cached.count()
                context.say(f"{count} messages are stored in {context.checkpoint}")
                if count:
                    pieces.store(cached, count, **pace)
            planned = pieces.planned() or {}
        left_out = _LeftOut(context, options["bad"])
        pieces.send(planned, **pace)
        context.say(left_out.result_text(sum(planned.values()), topic))

    def _send(self, context: Context, topic: Topic, given: dict[str, str], options: Options) -> None:
        """Send all at once, or only show it."""
        with context.watching():
            row_count = _rows(context, options).count()
        with context.kept(_chosen(context, topic, given, options)) as cached:
            with context.watching():
                sent = cached.count()
            equal = "keys" if topic.keyed else "bodies"
            merged = f" after merging equal {equal}" if _merges(topic, options) else ""
            context.say(f"{row_count} rows, {sent} messages{merged}")
            if options["dry_run"]:
                for row in cached.limit(SHOWN).collect():
                    context.say(str(row.asDict()))
                context.say(f"nothing was sent to {topic.name}")
                return
            left_out = _LeftOut(context, options["bad"])
            context.write(cached, topic.name, pastTimes=options["past_times"], badRows=options["bad"])
            context.say(left_out.result_text(sent, topic))


class _LeftOut:
    """The rows that ``--bad`` leaves out from now on."""

    def __init__(self, context: Context, path: str | None) -> None:
        self._context, self._path = context, path
        self._before = self._count()

    def result_text(self, messages: int, topic: Topic) -> str:
        """Return what became of ``messages``."""
        left_out = self._count() - self._before
        more = f"; {left_out} could not be sent and are in {self._path}" if left_out else ""
        return f"{messages - left_out} messages sent to {topic.name}{more}"

    def _count(self) -> int:
        rows = None if self._path is None else stored_files(self._context.spark, self._path)
        return 0 if rows is None else int(rows.count())


def _check(topic: Topic, given: dict[str, str], options: Options) -> None:
    # PySpark is not installed in every process that lists pipelines.
    from django_rmq.spark.columns import needed_by

    if missing := [name for name in needed_by(topic) if name not in given]:
        raise InvalidRequest(
            f"topic {topic.name} is {topic.type.value}{', with IDENTITY key' if topic.keyed else ''}: "
            f"--{missing[0].replace('_', '-')} is missing, an SQL expression over the rows"
        )
    if options["value"] and options["select"]:
        raise InvalidRequest("use --value or --select, not both")


def _check_pace(context: Context, topic: Topic, options: Options) -> None:
    given = [name for name in ("rate", "max_backlog") if options[name] is not None]
    for name in given:
        flag = f"--{name.replace('_', '-')}"
        if not 0 < options[name] < math.inf:
            raise InvalidRequest(f"{flag} must be a number greater than 0, got {options[name]}")
        if context.checkpoint is None:
            raise InvalidRequest(
                f"{flag} needs --checkpoint: a folder for the messages and the record of what was sent"
            )
    if context.checkpoint is not None and topic.is_fifo:
        raise InvalidRequest(
            f"topic {topic.name} is fifo: --checkpoint sends in pieces, which would change the order of the rows"
        )


def _chosen(context: Context, topic: Topic, given: dict[str, str], options: Options) -> DataFrame:
    """Return the messages; equal ones once if ``_merges``."""
    # PySpark is not installed in every process that lists pipelines.
    from django_rmq.spark.json_bodies import encode_rows

    messages = encode_rows(_rows(context, options), given, value=options["value"], select=options["select"])
    return _merged(messages, topic) if _merges(topic, options) else messages


def _merges(topic: Topic, options: Options) -> bool:
    """Return whether equal messages are sent once."""
    return bool(options["merge"]) and not topic.is_fifo


def _rows(context: Context, options: Options) -> DataFrame:
    source = options["source"]
    format_name = options["format"] or next(
        (name for name in FORMATS if source.rstrip("/").lower().removesuffix(".gz").endswith(f".{name}")),
        None,
    )
    if format_name is None:
        raise InvalidRequest(
            f"the format of {without_password(source)} is unknown: use --format {', '.join(FORMATS)}"
        )
    reader = context.spark.read.format(format_name)
    if format_name == "csv":
        reader = reader.options(header="true")
    for one in options["option"]:
        key, equals, value = one.partition("=")
        if not equals:
            raise InvalidRequest(f"--option {one!r} must be key=value")
        reader = reader.option(key, value)
    rows = reader.option("url", source).load() if format_name == "jdbc" else reader.load(source)
    if options["where"] is not None:
        rows = rows.where(options["where"])
    return rows if options["limit"] is None else rows.limit(options["limit"])


def _merged(messages: DataFrame, topic: Topic) -> DataFrame:
    """Return each message once: equal messages, which the topic would merge anyway, are sent once."""
    # Two slot bases may lead to two slots, and a topic merges equal messages only within a slot.
    basis = [name for name in messages.columns if name == "slot_basis"]
    if topic.keyed:
        return messages.dropDuplicates(["key", *basis])
    if "priority" in messages.columns:
        # Of equal bodies, the more urgent one is kept.
        others = [name for name in messages.columns if name not in ("value", "priority")]
        grouped = messages.groupBy("value", *others)
        return grouped.agg({"priority": "max"}).withColumnRenamed("max(priority)", "priority")
    return messages.dropDuplicates(["value", *basis])
