"""``report`` counts what topics contain, ``deaths`` the dead messages by cause, hour, worker and more."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from django_rmq.conf import get_config
from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import walk
from django_rmq.core.model import status
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, OperationRefused
from django_rmq.spark.pipelines.archive import archived_columns, present_archive
from django_rmq.spark.pipelines.pipeline import Context, Options, Pipeline, register

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
# The class of an error is the text before the first colon of its first line.
CLASS = "nullif(trim(substring_index(substring_index(error, '\\n', 1), ':', 1)), '')"
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
    small = frame.selectExpr(
        *("topic", "slot", "queue"),
        f"case when queue = 'store' then {_classes(f'(unix_millis(due) - {now_ms}) / 1000', DUE, DUE_LATER)} end as due",
        f"case when queue = 'dead' then {_classes(f'({now_ms} - score) / 1000', DEAD, DEAD_LONGER)} end as age",
        f"{CLASS} as error",
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


DEATH_COLUMNS = {
    "topic": "topic",
    "cause": f"concat_ws(' ', reason, {CLASS})",
    "hour": "date_format(died_at, 'yyyy-MM-dd HH:00')",
    "day": "date",
    "slot": "slot",
}
WORKER = "worker"
UNKNOWN = "unknown"
MOST_LOOKED_UP = 200_000
"""The largest number of messages of which the workers are looked up, one by one."""


@register
class Deaths(Pipeline):
    """Count dead messages by cause, hour, worker and more: what dies most comes first.

    Counts what is in Dead, or in an archive. The worker of a message is known on topics with OUTCOME_RETENTION, and
    only of messages in Dead. Changes nothing.
    """

    name = "deaths"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="default: all")
        parser.add_argument("--archive", metavar="PATH", help="count those of an archive, instead of Dead")
        parser.add_argument(
            "--by",
            default="topic,cause",
            metavar="NAMES",
            help=f"what to group by, of {', '.join([*DEATH_COLUMNS, WORKER])} (default: %(default)s)",
        )
        parser.add_argument(
            "--where",
            metavar="SQL",
            help="only messages that match, as for archive: \"reason = 'timed_out'\"",
        )
        parser.add_argument(
            "--top", type=int, default=50, metavar="N", help="at most N rows (default: %(default)s)"
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, context: Context, **options: Any) -> None:
        by = _columns_of(options["by"], (*DEATH_COLUMNS, WORKER))
        if WORKER in by and options["archive"]:
            raise InvalidRequest(
                "an archive does not have the workers of its messages: leave out --by worker"
            )
        dead = _dead(context, options)
        if options["where"]:
            dead = dead.withColumn("body", dead.value.cast("string")).where(options["where"])
        counted = _by_worker(context, dead, by) if WORKER in by else _counted(context, dead, by)
        rows = sorted(counted.items(), key=lambda pair: (-pair[1], pair[0]))[: options["top"]]
        lines = [(*values, count) for values, count in rows]
        _show(context, [*by, "messages"], lines, as_json=options["json"])


def _dead(context: Context, options: Options) -> DataFrame:
    names = options["topics"] or list(get_config().topics)
    slots = {name: context.topic(name).slots for name in names}
    if not options["archive"]:
        return archived_columns(context.read(*names, queues="dead", includeMetadata=True), slots)
    archive = present_archive(context, options["archive"])
    return archive.where(archive.topic.isin(names)) if options["topics"] else archive


def _counted(context: Context, dead: DataFrame, by: list[str]) -> Counter[tuple[object, ...]]:
    grouped = dead.selectExpr(*(f"{DEATH_COLUMNS[name]} as {name}" for name in by)).groupBy(*by).count()
    with context.watching():
        return Counter({tuple(row)[:-1]: row["count"] for row in grouped.collect()})


def _by_worker(context: Context, dead: DataFrame, by: list[str]) -> Counter[tuple[object, ...]]:
    """Count messages by what their topics have kept of their ends, which is looked up here."""
    columns = [f"{DEATH_COLUMNS[name]} as by_{name}" for name in by if name != WORKER]
    rows = dead.selectExpr("topic", "slot", "member", *columns)
    with context.watching():
        # One row more shows that there are too many, without counting all of them.
        collected = rows.limit(MOST_LOOKED_UP + 1).collect()
    if len(collected) > MOST_LOOKED_UP:
        raise OperationRefused(
            f"the workers of more than {MOST_LOOKED_UP} messages would be looked up: choose fewer with --where"
        )
    topics = {name: context.topic(name) for name in {row.topic for row in collected}}
    counted: Counter[tuple[object, ...]] = Counter()
    calls = (inspect.status(topics[row.topic], row.slot, bytes(row.member)) for row in collected)
    for row, answer in zip(collected, walk(context.broker, calls), strict=True):
        worker_name = (
            status.status_of(topics[row.topic], row.slot, bytes(row.member), answer).worker or UNKNOWN
        )
        counted[tuple(worker_name if name == WORKER else row[f"by_{name}"] for name in by)] += 1
    return counted


def _columns_of(text: str, known: Collection[str]) -> list[str]:
    """Return the columns of ``--by``. Raises ``InvalidRequest`` for one that is not ``known``."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidRequest(f"--by must be among {', '.join(known)}, got {', '.join(unknown)}")
    return names


def _show(context: Context, names: Sequence[str], rows: Sequence[Sequence[object]], *, as_json: bool) -> None:
    """Show rows under ``names``; numbers are aligned to the right."""
    if as_json:
        context.show(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        return
    texts = [list(names), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    right = [bool(rows) and isinstance(cell, int | float) for cell in (rows[0] if rows else names)]
    for text in texts:
        cells = zip(text, widths, right, strict=True)
        context.show(
            "  ".join(cell.rjust(width) if is_right else cell.ljust(width) for cell, width, is_right in cells)
        )
