"""``manage.py rmqreschedule``: give waiting messages another due time or priority."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import UTC, datetime, timedelta
from typing import Any

from django.core.management.base import CommandError

from django_rmq.management import (
    RmqCommand,
    at_least,
    duration,
    instant_of,
    messages_text,
    outcomes_text,
)
from django_rmq.management.messages import add_filter, add_id, add_priority, add_state, filter_of
from django_rmq.operations import Limits, Operations, Run


class Command(RmqCommand):
    """Reschedule messages."""

    help = (
        "Give waiting messages another due time (--in, --at) or another priority (--to-priority): those named by --id, "
        "those that match all filters, or with --all all of the state. Messages that failed keep their retries. Exits "
        "with 1 if a named message does not wait."
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
        add_id(parser, many=True)
        parser.add_argument("--all", action="store_true", help="all messages of the state")
        add_state(parser, "waiting", "resting", default="waiting")
        add_filter(parser)
        add_priority(parser)
        parser.add_argument("--limit", type=at_least(1), metavar="N", help="at most N messages")
        parser.add_argument(
            "--rate", type=at_least(0.001, float), metavar="N", help="at most N messages per second"
        )
        parser.add_argument("--dry-run", action="store_true", help="only print how many there are")
        parser.add_argument(
            "--no-input", "--noinput", action="store_false", dest="interactive", help="skip the confirmation"
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        operations, name, wanted = self.operations(), options["topic"], filter_of(options)
        operations.config.topic(name)
        if sum((bool(options["id"]), options["all"], not wanted.is_empty)) != 1:
            raise CommandError(
                "choose messages: use --id, or filters (--priority, --text, --error, --older-than, --newer-than, "
                "--slot), or --all",
                returncode=2,
            )
        new = {"priority": options["to_priority"], "due": _due(options)}
        if options["id"]:
            self._reschedule_named(operations, name, new, options)
            return

        def run(limits: Limits | None = None, *, dry_run: bool = False) -> Run:
            return operations.reschedule_all(
                name, options["state"], wanted, **new, limits=limits, dry_run=dry_run
            )

        question = f"of {name} will be rescheduled."
        if not self.confirmed(name, lambda: run(dry_run=True), "rescheduled", question, "yes", options):
            return
        limits = Limits(messages=options["limit"], rate=options["rate"])
        self.tell(name, self.follow(run(limits), f"reschedule {name}", options), options)

    def _reschedule_named(
        self, operations: Operations, name: str, new: dict[str, Any], options: dict[str, Any]
    ) -> None:
        if options["dry_run"]:
            raise CommandError("--dry-run requires filters or --all", returncode=2)
        done = operations.reschedule(name, options["id"], **new)
        if options["json"]:
            self.print_json({"outcomes": done.outcomes, "found": done.found})
        else:
            self.stdout.write(f"{name}: {outcomes_text(done.outcomes)}")
        missed = len(done.found) - done.outcomes.get("rescheduled", 0)
        if missed:
            raise CommandError(
                f"{missed} of {messages_text(len(done.found))} do not wait, or keep their place", returncode=1
            )


def _due(options: dict[str, Any]) -> datetime | None:
    if options["after"] is not None:
        return datetime.now(UTC) + timedelta(seconds=options["after"])
    return None if options["at"] is None else instant_of("--at", options["at"])


__all__ = ["Command"]
