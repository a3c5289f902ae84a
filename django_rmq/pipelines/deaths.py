"""``deaths``: counts dead messages, or those of an archive, by cause, hour, worker and more."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from django_rmq.conf import get_config
from django_rmq.core.commands import inspect
from django_rmq.core.commands.broker_interface import run_all
from django_rmq.core.model import status
from django_rmq.exceptions import InvalidRequest, OperationRefused, RmqError
from django_rmq.pipelines import Context, Pipeline, register
from django_rmq.pipelines.archive import archive_of, archived_columns

# The class of an error is the text before the first colon of its first line.
CLASS = "nullif(trim(substring_index(substring_index(error, '\\n', 1), ':', 1)), '')"
COLUMNS = {
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
STEP = 1_000


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
            help=f"what to group by, of {', '.join([*COLUMNS, WORKER])} (default: %(default)s)",
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
        by = _columns_of(options["by"], (*COLUMNS, WORKER))
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


def _dead(context: Context, options: dict[str, Any]) -> Any:
    names = options["topics"] or list(get_config().topics)
    slots = {name: context.topic(name).slots for name in names}
    if not options["archive"]:
        return archived_columns(context.read(*names, queues="dead", includeMetadata=True), slots)
    found = archive_of(context, options["archive"])
    if found is None:
        raise OperationRefused(f"{options['archive']} does not hold an archive")
    return found.where(found.topic.isin(names)) if options["topics"] else found


def _counted(context: Context, dead: Any, by: list[str]) -> Counter[tuple[Any, ...]]:
    grouped = dead.selectExpr(*(f"{COLUMNS[name]} as {name}" for name in by)).groupBy(*by).count()
    with context.watching():
        return Counter({tuple(row)[:-1]: row["count"] for row in grouped.collect()})


def _by_worker(context: Context, dead: Any, by: list[str]) -> Counter[tuple[Any, ...]]:
    """Count messages by what their topics have kept of their ends, which is looked up here."""
    chosen = [f"{COLUMNS[name]} as by_{name}" for name in by if name != WORKER]
    rows = dead.selectExpr("topic", "slot", "member", *chosen)
    with context.watching():
        found = rows.limit(MOST_LOOKED_UP + 1).collect()
    if len(found) > MOST_LOOKED_UP:
        raise OperationRefused(
            f"the workers of more than {MOST_LOOKED_UP} messages would be looked up: choose fewer with --where"
        )
    topics = {name: context.topic(name) for name in {row.topic for row in found}}
    counted: Counter[tuple[Any, ...]] = Counter()
    for first in range(0, len(found), STEP):
        step = found[first : first + STEP]
        members = [bytes(row.member) for row in step]
        calls = [
            inspect.status(topics[row.topic], row.slot, member)
            for row, member in zip(step, members, strict=True)
        ]
        for row, member, answer in zip(step, members, run_all(context.broker, calls), strict=True):
            if isinstance(answer, RmqError):
                raise answer
            known = status.read(topics[row.topic], row.slot, member, answer).worker or UNKNOWN
            counted[tuple(known if name == WORKER else row[f"by_{name}"] for name in by)] += 1
    return counted


def _columns_of(text: str, known: Collection[str]) -> list[str]:
    """Return the columns of ``--by``. Raises ``InvalidRequest`` for one that is not ``known``."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidRequest(f"--by must be among {', '.join(known)}, got {', '.join(unknown)}")
    return names


def _show(context: Context, names: Sequence[str], rows: Sequence[Sequence[Any]], *, as_json: bool) -> None:
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


__all__ = ["Deaths"]
