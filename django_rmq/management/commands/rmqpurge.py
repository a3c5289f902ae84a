"""``manage.py rmqpurge``: delete waiting, resting or dead messages of a topic."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django_rmq.management import RmqCommand, at_least, duration
from django_rmq.operations import Limits


class Command(RmqCommand):
    """Purge a state of a topic."""

    help = (
        "Delete all messages of one state of a topic, permanently. Messages in flight are never deleted. "
        "You must confirm by typing the name of the topic."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        parser.add_argument(
            "--state",
            required=True,
            choices=("store", "retry", "dead"),
            help="store: waiting messages; retry: failed messages that rest; dead: messages without retries left",
        )
        parser.add_argument(
            "--older-than",
            type=duration,
            metavar="AGE",
            help="only messages that have been due, or dead, for this time: 90, 15m, 2h or 7d. Not for priority topics",
        )
        parser.add_argument("--slot", type=at_least(0), metavar="N", help="only messages of this slot")
        parser.add_argument("--limit", type=at_least(1), metavar="N", help="at most N messages")
        parser.add_argument("--dry-run", action="store_true", help="only print how many there are")
        parser.add_argument(
            "--no-input", "--noinput", action="store_false", dest="interactive", help="skip the confirmation"
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        operations, name, state = self.operations(), options["topic"], options["state"]
        meant = {"older_than": options["older_than"], "slot": options["slot"]}
        counted = operations.purge(name, state, dry_run=True, **meant)
        if options["dry_run"]:
            self.tell(f"{name}, nothing was deleted", self.follow(counted, f"count {name}", options), options)
            return
        if options["interactive"]:
            total = min(
                self.follow(counted, f"count {name}", options).total, options["limit"] or float("inf")
            )
            self.confirm(f"{total} messages of {name} ({state}) will be deleted permanently.", name, options)
        run = operations.purge(name, state, limits=Limits(messages=options["limit"]), **meant)
        self.tell(name, self.follow(run, f"purge {name}", options), options)
