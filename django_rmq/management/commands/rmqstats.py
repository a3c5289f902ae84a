"""``manage.py rmqstats``: depths of all topics; with --watch live and with rates; with --events each event on a line."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from django_rmq.core.model.server_checks import ServerInfo
from django_rmq.exceptions import RmqError, ServerTrouble
from django_rmq.management.commands import rmqschedules
from django_rmq.management.messages import (
    add_names,
    as_json,
    is_named,
    line_of_hold,
    lines_of_status,
    name_of,
)
from django_rmq.management.rmq_command import (
    Options,
    RmqCommand,
    UsageError,
    age_of_oldest,
    ago,
    at_least,
    duration,
    one_line,
    refuse_beside,
    seconds_of,
    table,
)
from django_rmq.operations import Operations, ScheduleStats, TopicCounters, TopicStats, Waiting
from django_rmq.operations.health import judge_server

if TYPE_CHECKING:
    from rich.table import Table

Rates = dict[str, dict[str, float]]
WATCH_SECONDS = 1.0


class Command(RmqCommand):
    """Show figures of topics."""

    help = (
        "Show for every topic how many messages wait, are due, run, rest and are dead, how long the "
        "oldest has been due (priority topics: how long a slot has not been empty), and the live workers. "
        "--watch repeats it, with rates and schedules; JSON is then one line each time. With the extra cli (rich) a "
        "terminal is updated in place. --events prints events of messages instead, which processes with EVENTS publish. "
        "With --id, --key or --body: what is known about one message, and what keeps it from being delivered now."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="only these (default: all)")
        parser.add_argument(
            "--watch",
            action="store_true",
            help="repeat, each second unless --interval says otherwise, until Ctrl-C",
        )
        parser.add_argument(
            "--interval",
            type=lambda text: duration(text, 0.1),
            metavar="TIME",
            help="repeat like --watch, after 250ms, 5s, 15m or 2h",
        )
        parser.add_argument("--events", action="store_true", help="print each event instead of figures")
        parser.add_argument(
            "--count",
            type=at_least(1),
            metavar="N",
            help="with --watch or --events: end after N times, or events",
        )
        parser.add_argument("--json", action="store_true", help="print JSON")
        add_names(parser)

    def handle(self, *args: object, **options: Any) -> None:
        operations = self.operations()
        if is_named(options):
            refuse_beside("--id, --key or --body", options, "watch", "interval", "events", "count")
            self._show_message(operations, options)
            return
        names = [topic.name for topic in self.topics(options["topics"])]
        options["watch"] = options["watch"] or options["interval"] is not None
        try:
            if options["events"]:
                self._write_events(operations, set(names) if options["topics"] else None, options)
            elif not options["watch"]:
                self._show(operations, names, {}, options)
            elif sys.stdout.isatty() and not options["json"] and find_spec("rich") is not None:
                self._update(operations, names, options)
            else:
                self._repeat(operations, names, options)
        except KeyboardInterrupt:
            pass

    def _repeat(self, operations: Operations, names: list[str], options: Options) -> None:
        before = operations.flow(names)
        for _turn in islice(count(), options["count"]):
            time.sleep(options["interval"] or WATCH_SECONDS)
            try:
                flow = operations.flow(names)
                self._show(operations, names, flow.since(before), options)
                before = flow
            except ServerTrouble as error:
                # A person who watches wants to see it come back, and a program learns of it by the exit code.
                if options["json"] or not sys.stdout.isatty():
                    raise
                self.stdout.write(one_line(str(error)))

    def _update(self, operations: Operations, names: list[str], options: Options) -> None:
        """Show a table on the terminal, and update it in place."""
        from rich.console import Group, RenderableType
        from rich.live import Live
        from rich.text import Text

        before: TopicCounters | None = None
        with Live(auto_refresh=False, screen=False) as live:
            for turn in islice(count(), options["count"]):
                if turn:
                    time.sleep(options["interval"] or WATCH_SECONDS)
                try:
                    flow = operations.flow(names)
                    topics = _table(operations.overview(names), {} if before is None else flow.since(before))
                    schedules = operations.schedules(names)
                    lines = [*outbox_lines(_outbox(operations)), *server_lines(operations.servers())]
                    more: list[RenderableType] = [Text(line) for line in lines]
                    more += ["", _schedules(schedules)] if schedules else []
                    live.update(Group(topics, *more), refresh=True)
                    before = flow
                except ServerTrouble as error:
                    # The person who watches wants to see it come back.
                    live.update(Text(one_line(str(error)), style="bold red"), refresh=True)

    def _write_events(self, operations: Operations, topics: set[str] | None, options: Options) -> None:
        for event in islice(self._events(operations, topics), options["count"]):
            self.stdout.write(json.dumps(event) if options["json"] else _event_line(event))

    def _events(self, operations: Operations, topics: set[str] | None) -> Iterator[dict[str, Any]]:
        for events in operations.events():
            yield from (one for one in events if topics is None or one.get("topic") in {*topics, ""})
            self.stdout.flush()

    def _show_message(self, operations: Operations, options: Options) -> None:
        if len(options["topics"]) != 1:
            raise UsageError("--id, --key and --body name a message of one topic: give that topic.")
        (topic,) = self.topics(options["topics"])
        status = operations.status(topic.name, **name_of(topic, options))
        waits = status.state in ("waiting", "resting")
        holds = operations.holds(topic.name, status.id) if waits else []
        if options["json"]:
            self.print_json(as_json(status) | {"held_by": [asdict(hold) for hold in holds]})
            return
        self.print_lines([*lines_of_status(status), *map(line_of_hold, holds)])

    def _show(self, operations: Operations, names: list[str], rates: Rates, options: Options) -> None:
        figures, waits = operations.overview(names), _outbox(operations)
        if options["json"]:
            rows = [row_of(one, rates.get(one.topic.name)) | _outbox_of(waits, one) for one in figures]
            self.stdout.write(json.dumps(rows, indent=None if options["watch"] else 2))
            self.stdout.flush()
            return
        lines = [*lines_of(figures, rates), *outbox_lines(waits), *server_lines(operations.servers())]
        if options["watch"]:
            schedules = operations.schedules(names)
            lines += ["", *rmqschedules.lines_of(schedules), ""] if schedules else [""]
        self.print_lines(lines)
        self.stdout.flush()


def _outbox(operations: Operations) -> dict[str, Waiting] | None:
    """Return what is in the outbox, by topic. None: its database is unavailable."""
    if not operations.config.uses_outbox:
        return {}
    try:
        return {one.topic: one for one in operations.outbox()}
    except RmqError:
        return None


def _outbox_of(waits: Mapping[str, Waiting] | None, one: TopicStats) -> dict[str, object]:
    """Return for JSON what the outbox of a topic holds; nothing if it has none, or it is unknown."""
    if waits is None or not (one.topic.outbox or one.topic.name in waits):
        return {}
    waiting = waits.get(one.topic.name) or Waiting(one.topic.name)
    age = seconds_of(waiting.oldest_ms)
    return {"outbox": {"waiting": waiting.messages, "refused": waiting.refused, "oldest_seconds": age}}


def outbox_lines(waits: Mapping[str, Waiting] | None) -> list[str]:
    """Return a line for each topic with something in the outbox. None: it cannot be read."""
    if waits is None:
        return ["outbox: its database is unavailable"]
    lines = []
    for one in waits.values():
        oldest = "" if one.oldest_ms is None else f", the oldest for {ago(one.oldest_ms / 1000)}"
        refused = f", {one.refused} refused" if one.refused else ""
        lines.append(f"outbox of {one_line(one.topic)}: {one.messages} waiting{oldest}{refused}")
    return lines


def server_lines(servers: list[ServerInfo] | None) -> list[str]:
    """Return a line for each reason why a server refuses writes, will soon, or deletes messages. None: it is unknown."""
    return [one_line(finding.text) for server in servers or () for finding in judge_server(server)]


def row_of(one: TopicStats, rates: dict[str, float] | None) -> dict[str, object]:
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
        "oldest_due_seconds": seconds_of(one.age_ms),
        "undrained_seconds": seconds_of(one.undrained_ms),
        "oldest_running_seconds": seconds_of(one.running_ms),
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


def cells_of(one: TopicStats) -> tuple[str, ...]:
    """Return the figures of a topic as cells of a table, in the order of ``COLUMNS``."""
    return (
        one.topic.name,
        one.topic.type.value,
        str(one.store),
        str(one.due),
        str(one.prepare),
        str(one.retry),
        str(one.dead),
        age_of_oldest(seconds_of(one.age_ms), seconds_of(one.undrained_ms)),
        ago(seconds_of(one.running_ms)),
        "?" if one.workers_problem else str(one.consumers),
    )


def remarks_of(one: TopicStats) -> str:
    """Return additional remarks about a topic."""
    remarks = []
    if one.is_paused:
        remarks.append("paused")
    elif one.is_partly_paused:
        remarks.append(f"{one.paused_slots} slots paused")
    if one.unowned_due:
        remarks.append(f"{one.unowned_due} due in slots that no worker has")
    if one.workers_problem:
        remarks.append("workers unknown")
    if one.definition_problem:
        remarks.append("its definition cannot be read")
    if one.problems:
        remarks.append(f"{len(one.problems)} slots cannot be read")
    if one.looked_at + len(one.problems) < one.topic.slots:
        remarks.append(f"{one.looked_at} of {one.topic.slots} slots")
    return ", ".join(remarks)


def lines_of(figures: list[TopicStats], rates: Rates) -> list[str]:
    """Return a table of topics, with rates if there are any."""
    head = (*COLUMNS, *(("sent/s", "done/s", "failed/s") if rates else ()), "")
    rows = [head]
    for one in figures:
        flow = rates.get(one.topic.name, {})
        cells = (
            (f"{flow[name]:.1f}" if name in flow else "-" for name in TopicCounters.RATES) if rates else ()
        )
        rows.append((*cells_of(one), *cells, remarks_of(one)))
    return table(rows, right=range(2, len(head) - 1))


def _event_line(event: dict[str, Any]) -> str:
    """Return an event as one readable line: when, where, what, how many, of which messages, and why."""
    at = datetime.fromtimestamp(event.get("at", 0) / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]
    who = f"{event.get('host', '?')}/{event.get('pid', '?')}"
    ids = [str(one)[:60] for one in event.get("ids", ())]
    rest = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    why = "".join(f": {error}" for error in event.get("errors", ())[:1])
    by = f" by {event['actor']}" if "actor" in event else ""
    what = f"{event['event']} {event.get('count', '')}{by} {' '.join(ids[:3])}{rest}{why}"
    return one_line(f"{at} {who} {event.get('topic') or '-'} {what}")


def _schedules(schedules: list[ScheduleStats]) -> Table:
    from rich.table import Table
    from rich.text import Text

    # rich takes brackets in plain strings for markup, and would leave out a part of a name; ``Text`` is shown as it is.
    table = Table(*rmqschedules.HEAD, box=None, pad_edge=False, header_style="bold")
    for one in schedules:
        *cells, state = map(Text, rmqschedules.cells_of(one))
        if state.plain != rmqschedules.ON_TIME:
            state.stylize("yellow")
        table.add_row(*cells, state)
    return table


def _table(figures: list[TopicStats], rates: Rates) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate((*COLUMNS, "sent/s", "done/s", "failed/s", "")):
        table.add_column(
            name,
            justify="right" if 2 <= i < len(COLUMNS) + 3 else "left",
            no_wrap=True,
            # On a narrow terminal the type is shortened, not the name.
            min_width=min(40, max(len(one.topic.name) for one in figures)) if not i and figures else None,
        )
    for one in figures:
        flow = rates.get(one.topic.name, {})
        cells = [Text(cell) for cell in cells_of(one)]
        if one.dead:
            cells[6].stylize("red")
        if not one.consumers:
            cells[COLUMNS.index("workers")].stylize("yellow")
        rates_cells = [Text(f"{flow[name]:.1f}" if name in flow else "-") for name in TopicCounters.RATES]
        table.add_row(*cells, *rates_cells, Text(remarks_of(one), style="yellow"))
    return table
