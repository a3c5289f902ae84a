"""``ingest``: sends rows of files or of a database table as messages of a topic."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest
from django_rmq.pipelines import Context, Pipeline, register
from django_rmq.pipelines.ingest_parts import Pieces
from django_rmq.spark.body_columns import encoded
from django_rmq.spark.source_options import PAST_TIMES
from django_rmq.spark.spark_session import stored_files

FORMATS = ("csv", "json", "parquet", "jdbc")
SHOWN = 10
OPTIONS = ("priority", "fixed_time", "time_range", "delay", "slot_basis", "key")
CHOOSING = (*OPTIONS, "source", "format", "option", "where", "select", "value", "merge", "limit")
"""The arguments that choose the messages; those of an ingest that goes on must be the same."""


@register
class Ingest(Pipeline):
    """Send the rows of CSV, JSON or Parquet files, or of a JDBC table, to a topic.

    A row becomes the JSON object of its columns: decimals are text, timestamps have microseconds. Equal messages
    are merged before they are sent. If rows are sent again after a failure, messages that still wait merge too.
    With --checkpoint the messages are first stored there in pieces: an ingest that was stopped or killed goes on
    with the first piece that was not sent.
    """

    name = "ingest"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        parser.add_argument("source", help="files or a folder; with --format jdbc the URL of the database")
        parser.add_argument("--format", choices=FORMATS, help="default: by the file extension of SOURCE")
        parser.add_argument(
            "--option",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="an option of Spark's reader, such as dbtable=orders; may be repeated",
        )
        parser.add_argument("--where", metavar="SQL", help="only rows for which this is true")
        parser.add_argument(
            "--select",
            action="append",
            default=[],
            metavar="SQL",
            help="columns of the body, such as 'id as item'",
        )
        parser.add_argument("--value", metavar="SQL", help="the whole body, instead of an object of columns")
        for name in OPTIONS:
            parser.add_argument(f"--{name.replace('_', '-')}", metavar="SQL", help=f"the {name} of a message")
        parser.add_argument(
            "--no-merge", dest="merge", action="store_false", help="send equal rows one by one"
        )
        parser.add_argument("--limit", type=int, metavar="N", help="at most N rows")
        parser.add_argument(
            "--rate", type=float, metavar="N", help="send at most N messages per second; needs --checkpoint"
        )
        parser.add_argument(
            "--max-backlog",
            type=int,
            metavar="N",
            help="wait while more than N messages would wait in the topic; needs --checkpoint",
        )
        parser.add_argument(
            "--past-times", choices=PAST_TIMES, help="what to do with a --fixed-time that has passed"
        )
        parser.add_argument(
            "--bad",
            metavar="PATH",
            help="leave out rows that cannot be sent, and store them in this folder, with the reasons",
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
            with context.kept(_chosen(context, topic, given, options)) as kept:
                with context.watching():
                    count = kept.count()
                context.say(f"{count} messages are stored in {context.checkpoint}")
                if count:
                    pieces.store(kept, count, **pace)
            planned = pieces.planned() or {}
        left_out = _LeftOut(context, options["bad"])
        pieces.send(planned, **pace)
        context.say(left_out.told(sum(planned.values()), topic))

    def _send(self, context: Context, topic: Topic, given: dict[str, str], options: dict[str, Any]) -> None:
        """Send all at once, or only show it."""
        with context.watching():
            read = _rows(context, options).count()
        with context.kept(_chosen(context, topic, given, options)) as kept:
            with context.watching():
                sent = kept.count()
            equal = "equal keys" if topic.keyed else "equal bodies"
            context.say(f"{read} rows, {sent} messages after merging {equal}")
            if options["dry_run"]:
                for row in kept.limit(SHOWN).collect():
                    context.say(str(row.asDict()))
                context.say(f"nothing was sent to {topic.name}")
                return
            left_out = _LeftOut(context, options["bad"])
            context.write(kept, topic.name, pastTimes=options["past_times"], badRows=options["bad"])
            context.say(left_out.told(sent, topic))


class _LeftOut:
    """The rows that ``--bad`` leaves out from now on."""

    def __init__(self, context: Context, path: str | None) -> None:
        self._context, self._path = context, path
        self._before = self._count()

    def told(self, messages: int, topic: Topic) -> str:
        """Return what became of ``messages``."""
        left = self._count() - self._before
        more = f"; {left} could not be sent and are in {self._path}" if left else ""
        return f"{messages - left} messages sent to {topic.name}{more}"

    def _count(self) -> int:
        found = None if self._path is None else stored_files(self._context.spark, self._path)
        return 0 if found is None else int(found.count())


def _check(topic: Topic, given: dict[str, str], options: dict[str, Any]) -> None:
    needed = "key" if topic.keyed and not topic.is_fifo else None
    if topic.is_priority and topic.default_priority is None:
        needed = "priority"
    if topic.type == "fixed_time":
        needed = "fixed_time"
    if needed and needed not in given:
        raise InvalidRequest(
            f"topic {topic.name} is {topic.type.value}{', with IDENTITY key' if topic.keyed else ''}: "
            f"--{needed.replace('_', '-')} is missing, an SQL expression over the rows"
        )
    if options["value"] and options["select"]:
        raise InvalidRequest("use --value or --select, not both")


def _check_pace(context: Context, topic: Topic, options: dict[str, Any]) -> None:
    given = [name for name in ("rate", "max_backlog") if options[name] is not None]
    for name in given:
        flag = f"--{name.replace('_', '-')}"
        if not options[name] > 0:
            raise InvalidRequest(f"{flag} must be greater than 0, got {options[name]}")
        if context.checkpoint is None:
            raise InvalidRequest(
                f"{flag} needs --checkpoint: a folder for the messages and the record of what was sent"
            )
    if context.checkpoint is not None and topic.is_fifo:
        raise InvalidRequest(
            f"topic {topic.name} is fifo: --checkpoint sends in pieces, which would change the order of the rows"
        )


def _chosen(context: Context, topic: Topic, given: dict[str, str], options: dict[str, Any]) -> Any:
    """Return the messages, equal ones once."""
    messages = encoded(_rows(context, options), given, value=options["value"], select=options["select"])
    return _merged(messages, topic) if options["merge"] else messages


def _rows(context: Context, options: dict[str, Any]) -> Any:
    source = options["source"]
    chosen = options["format"] or next(
        (name for name in FORMATS if source.rstrip("/").lower().removesuffix(".gz").endswith(f".{name}")),
        None,
    )
    if chosen is None:
        raise InvalidRequest(f"the format of {source} is unknown: use --format {', '.join(FORMATS)}")
    reader = context.spark.read.format(chosen)
    if chosen == "csv":
        reader = reader.options(header="true")
    for one in options["option"]:
        key, found, value = one.partition("=")
        if not found:
            raise InvalidRequest(f"--option {one!r} must be key=value")
        reader = reader.option(key, value)
    rows = reader.option("url", source).load() if chosen == "jdbc" else reader.load(source)
    if options["where"]:
        rows = rows.where(options["where"])
    return rows.limit(options["limit"]) if options["limit"] else rows


def _merged(messages: Any, topic: Topic) -> Any:
    """Return each message once: equal messages, which the topic would merge anyway, are sent once."""
    if topic.is_fifo:
        return messages
    if topic.keyed:
        return messages.dropDuplicates(["key"])
    if "priority" in messages.columns:
        # Of equal bodies, the more urgent one is kept.
        others = [name for name in messages.columns if name not in ("value", "priority")]
        grouped = messages.groupBy("value", *others)
        return grouped.agg({"priority": "max"}).withColumnRenamed("max(priority)", "priority")
    return messages.dropDuplicates(["value"])


__all__ = ["Ingest"]
