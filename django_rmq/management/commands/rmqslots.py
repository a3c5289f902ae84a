"""``manage.py rmqslots``: the owners of slots, their depths, and how evenly they are filled."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from django_rmq.core.model.topic import Topic
from django_rmq.management.rmq_command import RmqCommand, age_of_oldest, ago, at_least, one_line
from django_rmq.operations import Operations, SlotsStats, SlotStats

SLOTS_PER_TRIP = 1_000


class Command(RmqCommand):
    """List slots."""

    help = (
        "List the slots of topics: the worker that each is assigned to, for how long, and the messages in "
        "it. The deepest come first. Skew is the depth of the deepest slot divided by the mean depth."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="only these (default: all)")
        parser.add_argument(
            "--limit", type=at_least(1), default=20, metavar="N", help="slots shown per topic (default: 20)"
        )
        parser.add_argument("--json", action="store_true", help="print JSON, of all slots")

    def handle(self, *args: object, **options: Any) -> None:
        operations = self.operations()
        tables = []
        for topic in self.topics(options["topics"]):
            slots = _all_slots(operations, topic)
            if options["json"]:
                tables.append(
                    {
                        "topic": topic.name,
                        "serial": topic.serial,
                        "mean_depth": slots.mean_depth,
                        "skew": slots.skew,
                        "workers_problem": slots.workers_problem or None,
                        "slots": [_row(row) for row in slots.rows],
                    }
                )
            else:
                self._print(slots, options["limit"])
        if options["json"]:
            self.print_json(tables)

    def _print(self, slots: SlotsStats, limit: int) -> None:
        topic, rows, now_ms = slots.topic, slots.rows, slots.now_ms
        self.stdout.write(
            f"{topic.name}: {topic.slots} slots, {slots.mean_depth:.1f} messages in each, skew {slots.skew:.1f}"
            f"{_owners_text(slots)}"
        )
        shown_rows = sorted(rows, key=lambda row: (-row.depth, row.slot))[:limit]
        heads = (
            "  slot",
            "waiting",
            "due",
            "running",
            "resting",
            "dead",
            "oldest",
            "longest",
            "worker",
            "for",
            "",
        )
        lines: list[tuple[object, ...]] = [heads]
        for row in shown_rows:
            counts = row.counts
            oldest, undrained, running = (
                None if at_ms is None else (now_ms - at_ms) / 1000
                for at_ms in (counts.oldest_due_ms, counts.undrained_since_ms, counts.running_since_ms)
            )
            since = None if row.since_ms is None else max(0, now_ms - row.since_ms) / 1000
            lines.append(
                (
                    f"  {row.slot}",
                    counts.store,
                    counts.due,
                    counts.prepare,
                    counts.retry,
                    counts.dead,
                    age_of_oldest(oldest, undrained),
                    ago(running),
                    one_line(row.worker)[:8] or "-",
                    ago(since),
                    one_line(row.problem) or ("paused" if counts.paused else ""),
                )
            )
        self.print_table(lines, right=range(1, 8))
        if len(rows) > limit:
            self.stdout.write(f"  … and {len(rows) - limit} more")


def _owners_text(slots: SlotsStats) -> str:
    if not slots.topic.serial:
        return ", shared by all workers"
    if slots.workers_problem:
        return f", workers unknown: {one_line(slots.workers_problem)}"
    unowned = sum(not row.worker for row in slots.rows)
    return f", {unowned} without a worker" if unowned else ""


def _all_slots(operations: Operations, topic: Topic) -> SlotsStats:
    rows: list[SlotStats] = []
    while True:
        part = operations.slots(topic.name, len(rows), SLOTS_PER_TRIP)
        rows += part.rows
        if len(rows) >= part.topic.slots:
            return replace(part, rows=rows)


def _row(row: SlotStats) -> dict[str, object]:
    counts = row.counts
    return {
        "slot": row.slot,
        "worker": row.worker or None,
        "since": _instant(row.since_ms),
        "last_taken_by": counts.owner or None,
        "waiting": counts.store,
        "due": counts.due,
        "running": counts.prepare,
        "resting": counts.retry,
        "dead": counts.dead,
        "claimed": counts.claimed,
        "oldest_due": _instant(counts.oldest_due_ms),
        "undrained_since": _instant(counts.undrained_since_ms),
        "running_since": _instant(counts.running_since_ms),
        "paused": counts.paused,
        "problem": row.problem or None,
    }


def _instant(ms: int | None) -> str | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
