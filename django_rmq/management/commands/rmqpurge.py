"""``manage.py rmqpurge``: delete waiting, resting or dead messages of a topic."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from django_rmq.management import RmqCommand
from django_rmq.management.message_options import (
    add_bulk_options,
    add_filter,
    add_priority,
    add_state,
    filter_of,
)
from django_rmq.operations import BulkRun, Filter, Limits


class Command(RmqCommand):
    """Purge a state of a topic."""

    help = (
        "Delete all messages of one state of a topic, or those that match all filters, permanently. Running "
        "messages are never deleted. "
        "You must confirm by typing the name of the topic."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        add_state(parser, "waiting", "resting", "dead")
        add_filter(parser)
        add_priority(parser)
        add_bulk_options(parser, has_rate=False)

    def handle(self, *args: object, **options: Any) -> None:
        operations, name, state = self.operations(), options["topic"], options["state"]
        wanted = filter_of(options)

        def purge(limits: Limits | None, *, dry_run: bool) -> BulkRun:
            if wanted == Filter(older_than=wanted.older_than, slot=wanted.slot):
                age, slot = wanted.older_than, wanted.slot
                return operations.purge(
                    name, state, older_than=age, slot=slot, limits=limits, dry_run=dry_run
                )
            return operations.delete_all(name, state, wanted, limits=limits, dry_run=dry_run)

        question = f"of {name} ({state}) will be deleted permanently."
        if not self.confirmed(name, lambda: purge(None, dry_run=True), "deleted", question, name, options):
            return
        if options["background"]:
            if options["limit"] is not None:
                raise CommandError("--background takes no --limit", returncode=2)
            is_plain = wanted == Filter(older_than=wanted.older_than, slot=wanted.slot)
            self.tell_started(operations.start_action(name, "purge" if is_plain else "delete", state, wanted))
            return
        run = purge(Limits(messages=options["limit"]), dry_run=False)
        self.tell(name, self.follow(run, f"purge {name}", options), options)
