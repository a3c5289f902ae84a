"""``manage.py rmqreplay``: send dead messages again."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from django_rmq.management import RmqCommand, at_least, duration, outcomes_text
from django_rmq.operations import Filter, Limits, Operations


class Command(RmqCommand):
    """Replay dead messages."""

    help = (
        "Send dead messages again, with their full number of retries: those named by --id, those that "
        "match all filters, or with --all all of the topic. Exits with 1 if a named message is not dead."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        which = parser.add_argument_group("which messages")
        which.add_argument(
            "--id", action="append", default=[], metavar="ID", dest="ids", help="the message with this id"
        )
        which.add_argument("--all", action="store_true", help="all dead messages")
        which.add_argument(
            "--error", metavar="CLASS", default="", help="messages that failed with this class of error"
        )
        which.add_argument(
            "--text",
            default="",
            help="messages with this text in the body, the key, the headers or the error",
        )
        which.add_argument(
            "--older-than", type=duration, metavar="AGE", help="dead for at least: 90, 15m, 2h or 7d"
        )
        which.add_argument("--newer-than", type=duration, metavar="AGE", help="dead for at most")
        which.add_argument("--slot", type=at_least(0), metavar="N", help="messages of this slot")
        parser.add_argument(
            "--body", metavar="JSON", help="with exactly one --id: replay with this body instead"
        )
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
        operations, name = self.operations(), options["topic"]
        operations.config.topic(name)
        wanted = Filter(
            options["text"], options["error"], options["older_than"], options["newer_than"], options["slot"]
        )
        ways = [bool(options["ids"]), options["all"], not wanted.is_empty]
        if sum(ways) != 1:
            raise CommandError(
                "choose messages: use --id, or filters (--error, --text, --older-than, --newer-than, --slot), or --all",
                returncode=2,
            )
        if options["body"] is not None and len(options["ids"]) != 1:
            raise CommandError("--body requires exactly one --id", returncode=2)
        if options["ids"]:
            self._replay_named(operations, name, options)
            return
        limits = Limits(messages=options["limit"], rate=options["rate"])
        if options["dry_run"]:
            found = self.follow(operations.replay_all(name, wanted, dry_run=True), "counting", options)
            self.tell(f"{name}, nothing was replayed", found, options)
            return
        if options["interactive"]:
            found = self.follow(operations.replay_all(name, wanted, dry_run=True), "counting", options)
            matching = min(found.outcomes.get("matching", 0), options["limit"] or found.total)
            if not matching:
                self.tell(f"{name}, nothing was replayed", found, options)
                return
            self.confirm(f"{matching} dead messages of {name} will be sent again.", "yes", options)
        run = operations.replay_all(name, wanted, limits=limits)
        self.tell(name, self.follow(run, f"replay {name}", options), options)

    def _replay_named(self, operations: Operations, name: str, options: dict[str, Any]) -> None:
        if options["dry_run"]:
            raise CommandError("--dry-run requires filters or --all", returncode=2)
        if options["body"] is None:
            done = operations.replay(name, options["ids"])
        else:
            try:
                body = json.loads(options["body"])
            except ValueError as error:
                raise CommandError(f"--body is not JSON: {error}", returncode=2) from error
            done = operations.replay_edited(name, options["ids"][0], body)
        if options["json"]:
            self.print_json({"outcomes": done.outcomes, "found": done.found})
        else:
            self.stdout.write(f"{name}: {outcomes_text(done.outcomes)}")
        missed = len(done.found) - sum(done.outcomes.get(word, 0) for word in ("replayed", "merged"))
        if missed:
            raise CommandError(f"{missed} of {len(done.found)} messages are not dead", returncode=1)
