"""``manage.py rmqschedules``: when schedules run, and pause, resume, run now and edit."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any

from django_rmq.core.model.schedule import CATCH_UP, EDITABLE
from django_rmq.management.messages import instant
from django_rmq.management.rmq_command import (
    Options,
    RmqCommand,
    UsageError,
    ago,
    allow_options_between_arguments,
    one_line,
    table,
)
from django_rmq.operations import Operations, ScheduleStats

ON_TIME = "on time"
HEAD = ("schedule", "topic", "when", "next run (UTC)", "last run (UTC)", "state")


class Command(RmqCommand):
    """Look after schedules."""

    help = (
        "Show when the schedules run that workers have declared. pause takes back the tick that waits; resume "
        "continues from now on; run sends the message now. set changes when a schedule runs, also after the next "
        "deployment, until reset. delete is for a schedule whose topic is no longer in the settings."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "action",
            nargs="?",
            default="list",
            choices=["list", "pause", "resume", "run", "set", "reset", "delete"],
            help="default: list",
        )
        parser.add_argument(
            "names", nargs="*", metavar="schedule", help="these schedules (list: default all)"
        )
        timing = parser.add_mutually_exclusive_group()
        timing.add_argument("--cron", metavar="EXPRESSION", help="set: five fields, such as '0 3 * * *'")
        timing.add_argument("--every", metavar="TIME", help="set: an interval, such as 90, 15m or 2h")
        parser.add_argument("--timezone", metavar="ZONE", help="set: such as Europe/Berlin")
        parser.add_argument("--catch-up", choices=CATCH_UP, help="set: which missed ticks are sent")
        parser.add_argument("--json", action="store_true", help="print JSON")
        allow_options_between_arguments(parser)

    def handle(self, *args: object, **options: Any) -> None:
        operations, action = self.operations(), options["action"]
        changes = {field: options[field] for field in EDITABLE if options[field] is not None}
        if bool(changes) != (action == "set"):
            raise UsageError("set needs --cron, --every, --timezone or --catch-up, and only set takes them")
        if action == "list":
            self._list(operations, options)
            return
        if not options["names"]:
            raise UsageError(f"name the schedules to {action}")
        acts: dict[str, Callable[[str], str]] = {
            "pause": operations.pause_schedule,
            "resume": operations.resume_schedule,
            "run": operations.run_schedule,
            "set": lambda name: operations.edit_schedule(name, changes),
            "reset": operations.reset_schedule,
            "delete": operations.delete_schedule,
        }
        outcomes, sent = dict[str, str](), "sent as " if action == "run" else ""
        try:
            for name in options["names"]:
                outcomes[name] = acts[action](name)
        finally:
            # A schedule that fails does not hide what was done to those before it.
            text = "\n".join(f"{name}: {sent}{outcome}" for name, outcome in outcomes.items())
            if outcomes:
                self.print_answer(outcomes, text, options)

    def _list(self, operations: Operations, options: Options) -> None:
        names = options["names"]
        schedules = [operations.schedule(name) for name in names] if names else operations.schedules()
        if options["json"]:
            self.print_json([_row(one) for one in schedules])
            return
        if not schedules:
            self.stdout.write("no worker has declared a schedule")
            return
        self.print_lines(lines_of(schedules))


def lines_of(schedules: Sequence[ScheduleStats]) -> list[str]:
    """Return the table of schedules as lines."""
    return table([HEAD, *map(cells_of, schedules)])


def cells_of(one: ScheduleStats) -> tuple[str, ...]:
    """Return the cells of a schedule in this table."""
    when = f"{one.timing} (edited)" if one.override else one.timing
    return one.name, one.topic, one_line(when), instant(one.next_ms), instant(one.last_ms), _state(one)


def _state(one: ScheduleStats) -> str:
    state = _punctuality(one)
    if one.outcome == "dead":
        return f"last run died, {state}"
    return f"last run failed, {state}" if one.outcome == "resting" else state


def _punctuality(one: ScheduleStats) -> str:
    if one.is_missing:
        return "not in Redis: no worker declares it"
    if one.is_removed:
        return "is being removed"
    if one.is_paused:
        return "paused"
    if one.problem:
        return one_line(one.problem)
    return f"late by {ago(one.late_ms / 1000)}" if one.late_ms >= 1000 else ON_TIME


def _row(one: ScheduleStats) -> dict[str, object]:
    schedule = one.schedule
    return {
        "name": one.name,
        "topic": one.topic,
        "cron": schedule.cron,
        "every": schedule.every,
        "timezone": schedule.timezone,
        "catch_up": schedule.catch_up,
        "override": dict(one.override),
        "paused": one.is_paused,
        "removed": one.is_removed,
        "next_ms": one.next_ms,
        "last_ms": one.last_ms,
        "late_ms": one.late_ms,
        "problem": one.problem,
        "missing": one.is_missing,
        "outcome": one.outcome,
        "outcome_ms": one.outcome_ms,
    }
