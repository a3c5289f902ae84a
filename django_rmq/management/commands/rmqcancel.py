"""``manage.py rmqcancel``: delete waiting messages, and notify the listeners of running ones."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from django_rmq.management.messages import add_names, name_of
from django_rmq.management.rmq_command import RmqCommand, outcomes_text


class Command(RmqCommand):
    """Cancel messages."""

    help = (
        "Cancel messages, named by --id, --key or --body. Waiting messages are deleted. The listener of a running "
        "message is notified; unless it succeeds, its message ends as cancelled. Exits with 1 if a message was "
        "not found, or its consumer cannot be notified."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        add_names(parser, many=True)
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: object, **options: Any) -> None:
        operations, name = self.operations(), options["topic"]
        arguments = name_of(operations.config.topic(name), options)
        if "id" in arguments:
            outcomes = operations.cancel(name, arguments["id"]).outcomes
        else:
            outcomes = {operations.cancel_sent(name, **arguments): 1}
        self.print_answer({"outcomes": outcomes}, f"{name}: {outcomes_text(outcomes)}", options)
        missed = sum(count for word, count in outcomes.items() if word not in ("deleted", "notified"))
        if missed:
            raise CommandError(
                f"{missed} messages were not cancelled: there was none that waits or runs, or its consumer "
                "cannot be notified",
                returncode=1,
            )
