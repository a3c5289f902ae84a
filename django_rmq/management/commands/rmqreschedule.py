"""``manage.py rmqreschedule``: give waiting messages another due time or priority."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import UTC, datetime, timedelta
from typing import Any

from django.core.management.base import CommandError

from django_rmq.management.messages import (
    add_bulk_options,
    add_filter,
    add_names,
    add_priority,
    add_state,
    chosen_filter,
    chosen_ids,
    copies_of,
)
from django_rmq.management.rmq_command import (
    Options,
    RmqCommand,
    at_least,
    duration,
    instant_of,
    messages_text,
    outcomes_text,
)
from django_rmq.operations import ActionResult, BulkRun, Limits, Operations
from django_rmq.operations.actions import new_score


class Command(RmqCommand):
    """Reschedule messages."""

    help = (
        "Give waiting messages another due time (--in, --at) or another priority (--to-priority): those named by --id, "
        "--key or --body, those that match all filters, or with --all all of the state. Messages that failed keep their "
        "retries. Exits with 1 if a named message does not wait."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        new = parser.add_mutually_exclusive_group(required=True)
        new.add_argument(
            "--to-priority", type=at_least(1), metavar="N", help="priority topics: the new priority"
        )
        new.add_argument(
            "--in",
            type=duration,
            dest="after",
            metavar="TIME",
            help="due after 0, 90, 15m, 2h or 7d; 0: at once",
        )
        new.add_argument("--at", metavar="WHEN", help="due at 2026-12-24T18:00 (TIME_ZONE, or with +01:00)")
        add_names(parser, many=True)
        parser.add_argument("--all", action="store_true", help="all messages of the state")
        add_state(parser, "waiting", "resting", default="waiting")
        add_filter(parser)
        add_priority(parser)
        add_bulk_options(parser, in_background=False)

    def handle(self, *args: object, **options: Any) -> None:
        operations, name, wanted = self.operations(), options["topic"], chosen_filter(options)
        ids = chosen_ids(operations, options, wanted, "--priority, --text, --error")
        new = {"priority": options["to_priority"], "due": _due(options)}
        if ids:
            self._reschedule_named(operations, name, ids, new, options)
            return

        def run(limits: Limits | None = None, *, dry_run: bool = False) -> BulkRun:
            return operations.reschedule_all(
                name, options["state"], wanted, **new, limits=limits, dry_run=dry_run
            )

        question = f"of {name} will be rescheduled."
        if not self.confirmed(name, lambda: run(dry_run=True), "rescheduled", question, "yes", options):
            return
        limits = Limits(messages=options["limit"], rate=options["rate"])
        self.print_outcomes(name, self.follow(run(limits), f"reschedule {name}", options), options)

    def _reschedule_named(
        self, operations: Operations, name: str, ids: list[str], new: dict[str, Any], options: Options
    ) -> None:
        if options["dry_run"]:
            new_score(operations.config.topic(name), **new)
            result, good = ActionResult({one: _foretold(operations, name, one) for one in ids}), "matching"
        else:
            result, good = operations.reschedule(name, ids, **new), "rescheduled"
        count = result.outcomes.get(good, 0)
        would = f"{messages_text(count)} would be rescheduled"
        text = would if options["dry_run"] else outcomes_text(result.outcomes)
        self.print_answer({"outcomes": result.outcomes, "found": result.found}, f"{name}: {text}", options)
        missed = len(result.found) - count
        if missed:
            raise CommandError(
                f"{missed} of {messages_text(len(result.found))} do not wait, or keep their place",
                returncode=1,
            )


def _foretold(operations: Operations, name: str, message_id: str) -> str:
    """Return ``matching`` if the message would be rescheduled, otherwise why not: its state, ``refused`` or ``gone``."""
    copies = copies_of(operations, name, message_id)
    waits = next((copy for copy in copies if copy.state in ("waiting", "resting")), None)
    if waits is None:
        return copies[0].state if copies else "gone"
    # By priority, a message that failed keeps its place.
    has_failed = waits.state == "resting" or waits.retries_left is not None
    return "refused" if waits.topic.is_priority and has_failed else "matching"


def _due(options: Options) -> datetime | None:
    if options["after"] is not None:
        return datetime.now(UTC) + timedelta(seconds=options["after"])
    return None if options["at"] is None else instant_of("--at", options["at"])
