"""``manage.py rmqcancel``: delete waiting messages, and notify the listeners of running ones."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from django_rmq.management import RmqCommand, outcomes_text


class Command(RmqCommand):
    """Cancel messages."""

    help = (
        "Cancel messages, named by --id, --key or --body. Waiting messages are deleted. The listener of a running "
        "message is notified; unless it succeeds, its message ends as cancelled. Exits with 1 if a message was "
        "not found, or its consumer cannot be notified."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--id", action="append", metavar="ID", dest="ids", help="the message with this id")
        which.add_argument("--key", help="the message with this key (topics with IDENTITY 'key')")
        which.add_argument("--body", metavar="JSON", help="the message with this body (other topics)")
        parser.add_argument("--slot-basis", help="the slot_basis of the send, if it had one")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        operations, name = self.operations(), options["topic"]
        topic = operations.config.topic(name)
        if options["ids"]:
            outcomes = operations.cancel(name, options["ids"]).outcomes
        else:
            body = options["body"]
            if body is not None and topic.body != "text":
                try:
                    body = json.loads(body)
                except ValueError as error:
                    raise CommandError(f"--body is not JSON: {error}", returncode=2) from error
            found = operations.cancel_sent(name, body, key=options["key"], slot_basis=options["slot_basis"])
            outcomes = {found: 1}
        if options["json"]:
            self.print_json({"outcomes": outcomes})
        else:
            self.stdout.write(f"{name}: {outcomes_text(outcomes)}")
        missed = sum(count for word, count in outcomes.items() if word not in ("deleted", "notified"))
        if missed:
            raise CommandError(f"{missed} messages were not cancelled", returncode=1)
