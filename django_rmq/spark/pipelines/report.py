"""``report``: counts what topics contain."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from django_rmq.conf import get_config
from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import walk
from django_rmq.core.model.replies import ERROR_CLASS
from django_rmq.core.model.topic import Topic
from django_rmq.spark.pipelines.pipeline import Context, Pipeline, register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

QUEUES = ("store", "prepare", "claim", "retry", "dead")
DUE = (
    (-3600, "late > 1 h"),
    (-60, "late > 1 min"),
    (0, "due"),
    (60, "in 1 min"),
    (3600, "in 1 h"),
    (86_400, "in 1 d"),
)
"""Upper bounds (seconds from now) of the classes of waiting messages, and their names."""
DUE_LATER = "later"
NO_TIME = "no time"
DEAD = ((60, "< 1 min"), (3600, "< 1 h"), (86_400, "< 1 d"), (604_800, "< 7 d"))
DEAD_LONGER = "longer"
ERRORS = 10
"""The number of error classes that are named."""


@register
class Report(Pipeline):
    """Report the contents of topics: backlog, due times, age of dead messages, slot skew, error classes, merge ratio.

    Reads every message once and changes nothing. As text or as JSON.
    """

    name = "report"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="default: all")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, context: Context, **options: Any) -> None:
        names = options["topics"] or list(get_config().topics)
        topics = [context.topic(name) for name in names]
        reports = {topic.name: _empty(topic) for topic in topics}
        frame = context.read(*names, queues=",".join(QUEUES), includeMetadata=True)
        with context.watching():
            _count(frame, context.broker.now_ms(), reports)
        for topic in topics:
            _finish(context, topic, reports[topic.name])
        if options["json"]:
            context.show(json.dumps(reports, indent=2))
        else:
            for name, one in reports.items():
                context.show("\n".join(_lines(name, one)))


class Figures(TypedDict):
    """What is reported about a topic."""

    type: str
    slots: int
    backlog: dict[str, int]
    due: dict[str, int]
    dead: dict[str, int]
    depths: list[int]
    errors: dict[str, int]
    skew: NotRequired[float | None]
    sent: NotRequired[int]
    merge_ratio: NotRequired[float | None]


def _empty(topic: Topic) -> Figures:
    return {
        "type": topic.type.value,
        "slots": topic.slots,
        "backlog": dict.fromkeys(QUEUES, 0),
        "due": dict.fromkeys([*(name for _, name in DUE), DUE_LATER, NO_TIME], 0),
        "dead": dict.fromkeys([*(name for _, name in DEAD), DEAD_LONGER], 0),
        "depths": [0] * topic.slots,
        "errors": {},
    }


def _count(frame: DataFrame, now_ms: int, figures_of: dict[str, Figures]) -> None:
    """Count in one pass; bodies stay in the tasks."""
    from pyspark.sql import functions as sql

    small = frame.withColumn("error", sql.regexp_extract("error", f"^{ERROR_CLASS}", 1)).selectExpr(
        *("topic", "slot", "queue", "error"),
        f"case when queue = 'store' then {_classes(f'(unix_millis(due) - {now_ms}) / 1000', DUE, DUE_LATER)} end as due",
        f"case when queue = 'dead' then {_classes(f'({now_ms} - score) / 1000', DEAD, DEAD_LONGER)} end as age",
    )
    for row in small.groupBy(*small.columns).count().collect():
        one, count = figures_of[row.topic], row["count"]
        one["backlog"][row.queue] += count
        if row.queue == "store":
            one["due"][row.due or NO_TIME] += count
        if row.queue == "dead":
            one["dead"][row.age] += count
        else:
            one["depths"][row.slot] += count
        if row.error:
            one["errors"][row.error] = one["errors"].get(row.error, 0) + count


def _classes(value: str, bounds: Sequence[tuple[int, str]], beyond: str) -> str:
    cases = " ".join(f"when {value} <= {bound} then '{name}'" for bound, name in bounds)
    return f"case when {value} is null then null {cases} else '{beyond}' end"


def _finish(context: Context, topic: Topic, one: Figures) -> None:
    mean = sum(one["depths"]) / topic.slots
    one["skew"] = round(max(one["depths"]) / mean, 3) if mean else None
    most = sorted(one["errors"].items(), key=lambda pair: (-pair[1], pair[0]))
    one["errors"] = dict(most[:ERRORS])
    sent = merged = 0
    for ledger in walk(context.broker, (inspect.audit_ledger(topic, slot) for slot in range(topic.slots))):
        sent += ledger["sent"]
        merged += ledger["merged"] + ledger["replaced"]
    one["sent"] = sent
    one["merge_ratio"] = round(merged / sent, 4) if sent else None


def _lines(name: str, one: Figures) -> list[str]:
    """Return the report of one topic in readable form."""
    backlog = ", ".join(f"{count} {state}" for state, count in one["backlog"].items())
    lines = [f"{name} ({one['type']}, {one['slots']} slots): {backlog}"]
    for title, counts in (("waiting", one["due"]), ("dead for", one["dead"]), ("errors", one["errors"])):
        counts_text = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        if counts_text:
            lines.append(f"  {title}: {counts_text}")
    if one["skew"] is not None:
        lines.append(f"  deepest slot: {one['skew']:g} times the mean")
    if one["merge_ratio"] is not None:
        lines.append(f"  merged: {one['merge_ratio']:.1%} of {one['sent']} sends")
    return lines
