"""``manage.py rmqmonitor``: live figures of all topics, as a table that is updated in place; or each event on a line."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from datetime import UTC, datetime
from typing import Any

from django_rmq.exceptions import ServerTrouble
from django_rmq.management import RmqCommand, at_least, shown, update_interval
from django_rmq.management.commands import rmqschedules
from django_rmq.management.commands.rmqstats import COLUMNS, cells_of, lines_of, remarks_of, row_of
from django_rmq.operations import Flow, ScheduleFigures, TopicFigures

Rates = dict[str, dict[str, float]]


class Command(RmqCommand):
    """Watch topics."""

    help = (
        "Watch topics and schedules live: depths, the oldest due message, workers, and messages sent, done and "
        "failed per second. With the extra cli (rich) the table is updated in place. --events prints events of "
        "messages instead, which processes with EVENTS publish. Ctrl-C ends it."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="only these (default: all)")
        parser.add_argument(
            "--interval",
            type=update_interval,
            default=1.0,
            metavar="TIME",
            help="time between updates, such as 250ms or 5s (default: 1s)",
        )
        parser.add_argument("--count", type=at_least(1), metavar="N", help="end after N updates, or events")
        parser.add_argument("--events", action="store_true", help="print each event instead of figures")
        parser.add_argument(
            "--json", action="store_true", help="print JSON, one line for each update or event"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        names = [topic.name for topic in self.topics(options["topics"])]
        self._before: Flow | None = None
        try:
            if options["events"]:
                self._events(set(names) if options["topics"] else None, options)
            elif sys.stdout.isatty() and _has_rich() and not options["json"]:
                self._live(names, options["interval"], options["count"])
            else:
                self._plain(names, options)
        except KeyboardInterrupt:
            pass

    def _look(self, names: list[str]) -> tuple[list[TopicFigures], Rates]:
        operations = self.operations()
        flow = operations.flow(names)
        rates = {} if self._before is None else flow.since(self._before)
        self._before = flow
        return operations.overview(names), rates

    def _plain(self, names: list[str], options: dict[str, Any]) -> None:
        count = options["count"]
        while True:
            figures, rates = self._look(names)
            if options["json"]:
                rows = [row_of(one, rates.get(one.topic.name)) for one in figures]
                self.stdout.write(json.dumps(rows))
            else:
                schedules = self.operations().schedules(names)
                told = ["", *rmqschedules.lines_of(schedules)] if schedules else []
                for line in [*lines_of(figures, rates), *told]:
                    self.stdout.write(line)
                self.stdout.write("")
            self.stdout.flush()
            count = None if count is None else count - 1
            if count == 0:
                return
            time.sleep(options["interval"])

    def _events(self, topics: set[str] | None, options: dict[str, Any]) -> None:
        left = options["count"]
        for events in self.operations().events():
            for event in events:
                if topics is not None and event.get("topic") not in {*topics, ""}:
                    continue
                self.stdout.write(json.dumps(event) if options["json"] else _event_line(event))
                left = None if left is None else left - 1
                if left == 0:
                    return
            self.stdout.flush()

    def _live(self, names: list[str], interval: float, count: int | None) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text

        with Live(auto_refresh=False, screen=False) as live:
            while True:
                try:
                    topics, schedules = _table(*self._look(names)), self.operations().schedules(names)
                    told = ["", _schedules(schedules)] if schedules else []
                    live.update(Group(topics, *told), refresh=True)
                except ServerTrouble as error:
                    # The person who watches wants to see it come back.
                    live.update(Text(shown(str(error)), style="bold red"), refresh=True)
                count = None if count is None else count - 1
                if count == 0:
                    return
                time.sleep(interval)


def _event_line(event: dict[str, Any]) -> str:
    """Return an event as one readable line: when, where, what, how many, of which messages, and why."""
    at = datetime.fromtimestamp(event.get("at", 0) / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]
    who = f"{event.get('host', '?')}/{event.get('pid', '?')}"
    ids = [str(one)[:60] for one in event.get("ids", ())]
    rest = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    why = "".join(f": {error}" for error in event.get("errors", ())[:1])
    by = f" by {event['actor']}" if "actor" in event else ""
    told = f"{event['event']} {event.get('count', '')}{by} {' '.join(ids[:3])}{rest}{why}"
    return shown(f"{at} {who} {event.get('topic') or '-'} {told}")


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401 - whether it is installed is the question
    except ImportError:
        return False
    return True


def _schedules(found: list[ScheduleFigures]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(*rmqschedules.HEAD, box=None, pad_edge=False, header_style="bold")
    for one in found:
        *cells, state = map(Text, rmqschedules.cells_of(one))
        if state.plain != rmqschedules.ON_TIME:
            state.stylize("yellow")
        table.add_row(*cells, state)
    return table


def _table(figures: list[TopicFigures], rates: Rates) -> Any:
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
        told = [Text(f"{flow[name]:.1f}" if name in flow else "-") for name in Flow.RATES]
        table.add_row(*cells, *told, Text(remarks_of(one), style="yellow"))
    return table
