"""``manage.py rmqstats``: depths of all topics, and with --interval their rates."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from django.core.management import CommandError

from django_rmq.exceptions import RmqError
from django_rmq.management import RmqCommand, age_of_oldest, ago, at_least, shown, table, update_interval
from django_rmq.management.messages import (
    add_names,
    as_json,
    is_named,
    line_of_hold,
    lines_of_status,
    name_of,
)
from django_rmq.operations import Flow, Operations, TopicFigures, Waiting


class Command(RmqCommand):
    """Show figures of topics."""

    help = (
        "Show for every topic how many messages wait, are due, run, rest and are dead, how long the "
        "oldest has been due (priority topics: how long a slot has not been empty), and the live workers. "
        "--interval repeats it, with rates; JSON is then one line each time. With --id, --key or --body: "
        "what is known about one message, and what keeps it from being delivered now."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="only these (default: all)")
        parser.add_argument(
            "--interval", type=update_interval, metavar="TIME", help="repeat after 1, 15m or 2h, until Ctrl-C"
        )
        parser.add_argument(
            "--count", type=at_least(1), metavar="N", help="with --interval: end after N times"
        )
        parser.add_argument("--json", action="store_true", help="print JSON")
        add_names(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        operations, interval = self.operations(), options["interval"]
        if is_named(options):
            self._tell(operations, options)
            return
        names = [topic.name for topic in self.topics(options["topics"])]
        if interval is None:
            self._show(operations.overview(names), {}, options)
            return
        left = options["count"]
        before = operations.flow(names)
        try:
            while left is None or left > 0:
                time.sleep(interval)
                flow = operations.flow(names)
                self._show(operations.overview(names), flow.since(before), options)
                before = flow
                left = None if left is None else left - 1
        except KeyboardInterrupt:
            pass

    def _tell(self, operations: Operations, options: dict[str, Any]) -> None:
        """Show what is known about one message."""
        if len(options["topics"]) != 1:
            raise CommandError("--id, --key and --body name a message of one topic: give that topic.")
        (topic,) = self.topics(options["topics"])
        found = operations.status(topic.name, **name_of(topic, options))
        waits = found.state in ("waiting", "resting")
        holds = operations.holds(topic.name, found.id) if waits else []
        if options["json"]:
            self.print_json(as_json(found) | {"held_by": [asdict(hold) for hold in holds]})
            return
        for line in [*lines_of_status(found), *map(line_of_hold, holds)]:
            self.stdout.write(line)

    def _outbox(self) -> dict[str, Waiting] | None:
        """Return what is in the outbox, by topic. None: its database is unavailable."""
        operations = self.operations()
        if not operations.config.uses_outbox:
            return {}
        try:
            return {one.topic: one for one in operations.outbox()}
        except RmqError:
            return None

    def _show(
        self, figures: list[TopicFigures], rates: dict[str, dict[str, float]], options: dict[str, Any]
    ) -> None:
        kept = self._outbox()
        rows = [row_of(one, rates.get(one.topic.name)) | _outbox_of(kept, one) for one in figures]
        if options["json"]:
            indent = None if options["interval"] else 2
            self.stdout.write(json.dumps(rows, indent=indent))
            return
        for line in [*lines_of(figures, rates), *outbox_lines(kept)]:
            self.stdout.write(line)
        if options["interval"]:
            self.stdout.write("")
        self.stdout.flush()


def _outbox_of(kept: Mapping[str, Waiting] | None, one: TopicFigures) -> dict[str, Any]:
    """Return for JSON what the outbox of a topic holds; nothing if it has none, or it is unknown."""
    if kept is None or not (one.topic.outbox or one.topic.name in kept):
        return {}
    found = kept.get(one.topic.name) or Waiting(one.topic.name)
    age = None if found.oldest_ms is None else found.oldest_ms / 1000
    return {"outbox": {"waiting": found.messages, "refused": found.refused, "oldest_seconds": age}}


def outbox_lines(kept: Mapping[str, Waiting] | None) -> list[str]:
    """Return a line for each topic with something in the outbox. None: it cannot be read."""
    if kept is None:
        return ["outbox: its database is unavailable"]
    lines = []
    for one in kept.values():
        oldest = "" if one.oldest_ms is None else f", the oldest for {ago(one.oldest_ms / 1000)}"
        refused = f", {one.refused} refused" if one.refused else ""
        lines.append(f"outbox of {shown(one.topic)}: {one.messages} waiting{oldest}{refused}")
    return lines


def row_of(one: TopicFigures, rates: dict[str, float] | None) -> dict[str, Any]:
    """Return the figures of a topic for JSON."""
    return {
        "topic": one.topic.name,
        "type": one.topic.type.value,
        "slots": one.topic.slots,
        "waiting": one.store,
        "due": one.due,
        "running": one.prepare,
        "resting": one.retry,
        "dead": one.dead,
        "claimed": one.claimed,
        "oldest_due_seconds": None if one.age_ms is None else one.age_ms / 1000,
        "undrained_seconds": None if one.undrained_ms is None else one.undrained_ms / 1000,
        "oldest_running_seconds": None if one.running_ms is None else one.running_ms / 1000,
        "paused_slots": one.paused_slots,
        "workers": None if one.workers_problem else one.consumers,
        "threads": one.threads,
        "slots_looked_at": one.looked_at,
        "problems": one.troubles,
        **({} if rates is None else {"per_second": rates}),
    }


COLUMNS = (
    *("topic", "type", "waiting", "due", "running", "resting", "dead"),
    *("oldest", "longest", "workers"),
)


def cells_of(one: TopicFigures) -> tuple[str, ...]:
    """Return the figures of a topic as cells of a table, in the order of ``COLUMNS``."""
    return (
        one.topic.name,
        one.topic.type.value,
        str(one.store),
        str(one.due),
        str(one.prepare),
        str(one.retry),
        str(one.dead),
        age_of_oldest(
            None if one.age_ms is None else one.age_ms / 1000,
            None if one.undrained_ms is None else one.undrained_ms / 1000,
        ),
        ago(None if one.running_ms is None else one.running_ms / 1000),
        "?" if one.workers_problem else str(one.consumers),
    )


def remarks_of(one: TopicFigures) -> str:
    """Return additional remarks about a topic."""
    found = []
    if one.is_paused:
        found.append("paused")
    elif one.is_partly_paused:
        found.append(f"{one.paused_slots} slots paused")
    if one.workers_problem:
        found.append("workers unknown")
    if one.definition_problem:
        found.append("its definition cannot be read")
    if one.problems:
        found.append(f"{len(one.problems)} slots cannot be read")
    if one.looked_at + len(one.problems) < one.topic.slots:
        found.append(f"{one.looked_at} of {one.topic.slots} slots")
    return ", ".join(found)


def lines_of(figures: list[TopicFigures], rates: dict[str, dict[str, float]]) -> list[str]:
    """Return a table of topics, with rates if there are any."""
    head = (*COLUMNS, *(("sent/s", "done/s", "failed/s") if rates else ()), "")
    rows = [head]
    for one in figures:
        flow = rates.get(one.topic.name, {})
        told = (f"{flow[name]:.1f}" if name in flow else "-" for name in Flow.RATES) if rates else ()
        rows.append((*cells_of(one), *told, remarks_of(one)))
    return table(rows, right=range(2, len(head) - 1))


__all__ = ["COLUMNS", "Command", "Operations", "cells_of", "lines_of", "remarks_of", "row_of"]
