"""``lateness``: how late messages are: those that wait, or those that were consumed into files."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django_rmq.exceptions import OperationRefused
from django_rmq.pipelines import Context, Pipeline, register
from django_rmq.pipelines.rows import columns_of, show
from django_rmq.project.settings import get_config
from django_rmq.spark.session import stored_files

BY = ("topic", "slot", "hour")
QUANTILES = (0.5, 0.95, 0.99)
NAMES = ("messages", "p50", "p95", "p99", "longest")


@register
class Lateness(Pipeline):
    """Report how late messages are, in seconds after they were due: median, 95th and 99th percentile, longest.

    Of messages that are due and wait; or, with --consumed, of those in the files of `consume --metadata`: from
    when they were due to when Spark took them. Priority topics have no due times. Changes nothing.
    """

    name = "lateness"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="default: all")
        parser.add_argument("--consumed", metavar="PATH", help="the folder of `consume --metadata --parquet`")
        parser.add_argument(
            "--by",
            default="topic",
            metavar="NAMES",
            help=f"what to group by, of {', '.join(BY)} (default: %(default)s). The hour is that of the due time",
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, context: Context, **options: Any) -> None:
        by = columns_of(options["by"], BY)
        late = _consumed(context, options) if options["consumed"] else _waiting(context, options)
        columns = ", ".join(by)
        found = context.spark.sql(
            f"select {columns}, count(*) as messages, percentile_approx(late, array{QUANTILES}) as quantiles, "  # noqa: S608
            f"max(late) as longest from {{late}} group by {columns}",
            late=late.withColumn("hour", late.due.cast("string").substr(1, 13)),
        )
        with context.watching():
            rows = sorted(found.collect())
        lines = [
            [
                *(row[name] for name in by),
                row.messages,
                *(round(one, 3) for one in (*row.quantiles, row.longest)),
            ]
            for row in rows
        ]
        show(context, [*by, *NAMES], lines, as_json=options["json"])


def _waiting(context: Context, options: dict[str, Any]) -> Any:
    """Return the messages that are due: each is late by the time since then."""
    names = options["topics"] or list(get_config().topics)
    frame = context.read(*names, queues="store,retry", includeMetadata=True)
    late = f"({context.broker.now_ms()} - unix_millis(due)) / 1000"
    return frame.selectExpr("topic", "slot", "due", f"{late} as late").where("late > 0")


def _consumed(context: Context, options: dict[str, Any]) -> Any:
    """Return the messages in files: each was late by the time until it was taken."""
    path = options["consumed"]
    frame = stored_files(context.spark, path)
    if frame is None:
        raise OperationRefused(f"{path} does not hold files")
    missing = {"topic", "slot", "due", "taken"} - set(frame.columns)
    if missing:
        raise OperationRefused(
            f"{path} has no column {', '.join(sorted(missing))}: it must be written by consume --metadata"
        )
    if options["topics"]:
        frame = frame.where(frame.topic.isin(options["topics"]))
    late = "(unix_millis(taken) - unix_millis(due)) / 1000"
    return frame.where("due is not null").selectExpr("topic", "slot", "due", f"greatest({late}, 0) as late")


__all__ = ["Lateness"]
