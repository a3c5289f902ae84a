"""``manage.py rmqreplay``: send dead messages again."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from typing import Any

from django.core.management.base import CommandError

from django_rmq.core.model.body_codec import exact_json
from django_rmq.exceptions import MessageGone
from django_rmq.management.message_options import (
    add_bulk_options,
    add_filter,
    add_names,
    filter_of,
    is_named,
    name_of,
)
from django_rmq.management.rmq_command import (
    Options,
    RmqCommand,
    messages_text,
    one_line,
    outcomes_text,
    progress_as_json,
)
from django_rmq.operations import BulkProgress, Filter, Limits, Operations


class Command(RmqCommand):
    """Replay dead messages."""

    help = (
        "Send dead messages again, with their full number of retries: those named by --id, --key or --body, those that "
        "match all filters, or with --all all of the topic. Exits with 1 if a named message is not dead."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        add_names(parser, many=True)
        parser.add_argument("--all", action="store_true", help="all dead messages")
        add_filter(parser)
        parser.add_argument(
            "--new-body", metavar="JSON", help="with one named message: replay it with this body instead"
        )
        add_bulk_options(parser, counted=", by the class of their error")

    def handle(self, *args: object, **options: Any) -> None:
        operations, name = self.operations(), options["topic"]
        topic = operations.config.topic(name)
        wanted = filter_of(options)
        ways = [is_named(options), options["all"], not wanted.is_empty]
        if sum(ways) != 1:
            raise CommandError(
                "choose messages: use --id, --key or --body, or filters (--error, --text, --older-than, --newer-than, "
                "--slot), or --all",
                returncode=2,
            )
        arguments = name_of(topic, options) if is_named(options) else {"id": []}
        ids = arguments["id"] if "id" in arguments else [operations.id_of(name, **arguments)]
        if options["new_body"] is not None and len(ids) != 1:
            raise CommandError(
                "--new-body requires one message, named by --id, --key or --body", returncode=2
            )
        if ids:
            self._replay_named(operations, name, ids, options)
            return
        if options["dry_run"] or options["interactive"]:
            counted = self.follow(operations.replay_all(name, wanted, dry_run=True), "counting", options)
            matching = min(counted.outcomes.get("matching", 0), options["limit"] or counted.total)
            if options["dry_run"] or not matching:
                self._print_dry_run(operations, name, wanted, counted, options)
                return
            self.confirm(f"{messages_text(matching)} of {name} will be sent again.", "yes", options)
        if options["background"]:
            if options["limit"] is not None:
                raise CommandError("--background takes no --limit", returncode=2)
            self.print_started(operations.start_action(name, "replay", "dead", wanted, rate=options["rate"]))
            return
        limits = Limits(messages=options["limit"], rate=options["rate"])
        run = operations.replay_all(name, wanted, limits=limits)
        self.print_outcomes(name, self.follow(run, f"replay {name}", options), options)

    def _print_dry_run(
        self, operations: Operations, name: str, wanted: Filter, counted: BulkProgress, options: Options
    ) -> None:
        """Print how many messages would be replayed, and of how many of them an error has which class."""
        grouped = operations.groups(name, "dead", "error", wanted)
        classes = Counter[str]()
        for one in grouped.rows:
            classes[one.error_class] += one.count
        if options["json"]:
            self.print_json(
                {**progress_as_json(counted), "classes": classes, "classes_of": grouped.looked_at}
            )
        else:
            self.print_count(name, counted, "replayed", options)
            if not grouped.is_complete:
                self.stdout.write(f"classes of the {grouped.looked_at} that died last:")
            self._write_classes(classes)
        self.raise_problems(counted)

    def _write_classes(self, classes: Counter[str]) -> None:
        width = len(str(max(classes.values(), default=0)))
        for name, count in sorted(classes.items(), key=lambda pair: (-pair[1], pair[0])):
            self.stdout.write(f"  {count:>{width}}  {one_line(name) or 'no class of an error'}")

    def _print_dry_run_of_named(
        self, operations: Operations, name: str, ids: list[str], options: Options
    ) -> None:
        outcomes: dict[str, str] = {}
        classes = Counter[str]()
        for one in dict.fromkeys(ids):
            try:
                copies = operations.get(name, one)
            except MessageGone:
                copies = []
            dead = next((copy for copy in copies if copy.state == "dead"), None)
            outcomes[one] = "matching" if dead else copies[0].state if copies else "gone"
            if dead:
                classes[dead.error_class] += 1
        if options["json"]:
            self.print_json({"outcomes": Counter(outcomes.values()), "found": outcomes, "classes": classes})
        else:
            self.stdout.write(f"{name}: {messages_text(classes.total())} would be replayed")
            self._write_classes(classes)
        self._raise_missed(len(outcomes) - classes.total(), len(outcomes))

    def _replay_named(self, operations: Operations, name: str, ids: list[str], options: Options) -> None:
        if options["dry_run"]:
            self._print_dry_run_of_named(operations, name, ids, options)
            return
        if options["new_body"] is None:
            result = operations.replay(name, ids)
        else:
            try:
                body = exact_json(options["new_body"])
            except ValueError as error:
                raise CommandError(f"--new-body is not JSON: {error}", returncode=2) from error
            result = operations.replay_edited(name, ids[0], body)
        if options["json"]:
            self.print_json({"outcomes": result.outcomes, "found": result.found})
        else:
            self.stdout.write(f"{name}: {outcomes_text(result.outcomes)}")
        replayed = sum(result.outcomes.get(word, 0) for word in ("replayed", "merged"))
        self._raise_missed(len(result.found) - replayed, len(result.found))

    def _raise_missed(self, missed: int, named: int) -> None:
        if missed:
            raise CommandError(f"{missed} of {messages_text(named)} are not dead", returncode=1)
