"""``manage.py rmqpurge``: delete waiting, resting or dead messages of a topic."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django_rmq.core.model.stored_actions import ActionKind
from django_rmq.management.messages import (
    FILTERS,
    add_bulk_options,
    add_filter,
    add_priority,
    add_state,
    chosen_filter,
)
from django_rmq.management.rmq_command import RmqCommand, UsageError, refuse_beside
from django_rmq.operations import BulkRun, Limits
from django_rmq.operations.filters import is_for_purge


class Command(RmqCommand):
    """Purge a state of a topic."""

    help = (
        "Delete all messages of one state of a topic, or those that match all filters. Running messages are never "
        "deleted. The first 100,000, up to 64 MB of them, can be brought back for one hour with --undo: fewer, or none, if "
        "Redis is full or keeps much of earlier deletions. "
        "You must confirm by typing the name of the topic."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        parser.add_argument(
            "--for-good",
            action="store_true",
            help="free the memory at once; the messages cannot be brought back",
        )
        parser.add_argument(
            "--undo", metavar="ID", help="bring back what the deletion ID has deleted; newer messages stay"
        )
        add_state(parser, "waiting", "resting", "dead", is_optional=True)
        add_filter(parser)
        add_priority(parser)
        add_bulk_options(parser, has_rate=False)

    def handle(self, *args: object, **options: Any) -> None:
        operations, name, state = self.operations(), options["topic"], options["state"]
        if options["undo"] is not None:
            refuse_beside("--undo", options, "state", "for_good", "limit", "background", "dry_run", *FILTERS)
            run = operations.undo(options["undo"], [name])
            self.print_outcomes(name, self.follow(run, f"undo {name}", options), options)
            return
        if state is None:
            raise UsageError("give --state, or --undo")
        keep, wanted = not options["for_good"], chosen_filter(options)
        kind: ActionKind = "purge" if is_for_purge(wanted) else "delete"

        def purge(limits: Limits | None, *, dry_run: bool) -> BulkRun:
            how: dict[str, Any] = {"limits": limits, "dry_run": dry_run, "keep": keep}
            if kind == "purge":
                return operations.purge(name, state, older_than=wanted.older_than, slot=wanted.slot, **how)
            return operations.delete_all(name, state, wanted, **how)

        rest = (
            "can be brought back for one hour: the first 100,000 and up to 64 MB of them, and fewer, or none, if Redis is full "
            "or keeps much of earlier deletions"
            if keep
            else "cannot be brought back"
        )
        question = f"of {name} ({state}) will be deleted. They {rest}."
        if not self.confirmed(name, lambda: purge(None, dry_run=True), "deleted", question, name, options):
            return
        if options["background"]:
            self.start_in_background(kind, state, wanted, options, keep=keep)
            return
        run = purge(Limits(messages=options["limit"]), dry_run=False)
        progress = self.follow(run, f"purge {name}", options)
        try:
            self.print_outcomes(name, progress, options)
        finally:
            # A deletion that was ended early has kept messages, too.
            if progress.undo and not options["json"]:
                self.stdout.write(
                    f"To bring {progress.kept} back: manage.py rmqpurge {name} --undo {progress.undo}"
                )
