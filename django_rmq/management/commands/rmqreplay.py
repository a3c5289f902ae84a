"""``manage.py rmqreplay``: send dead messages again."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from typing import Any

from django.core.management.base import CommandError

from django_rmq.management.messages import (
    add_bulk_options,
    add_filter,
    add_names,
    chosen_filter,
    chosen_ids,
    copies_of,
    json_of,
)
from django_rmq.management.rmq_command import (
    Options,
    RmqCommand,
    UsageError,
    messages_text,
    one_line,
    outcomes_text,
    progress_as_json,
)
from django_rmq.operations import BulkProgress, BulkRun, Limits, Operations


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
        operations, name, wanted = self.operations(), options["topic"], chosen_filter(options)
        ids = chosen_ids(operations, options, wanted, "--error, --text")
        if options["new_body"] is not None and len(ids) != 1:
            raise UsageError("--new-body requires one message, named by --id, --key or --body")
        if ids:
            self._replay_named(operations, name, ids, options)
            return

        def run(limits: Limits | None = None, *, dry_run: bool = False) -> BulkRun:
            return operations.replay_all(name, wanted, limits=limits, dry_run=dry_run)

        question = f"of {name} will be sent again."
        if not self.confirmed(name, lambda: run(dry_run=True), "replayed", question, "yes", options):
            return
        if options["background"]:
            self.start_in_background("replay", "dead", wanted, options, rate=options["rate"])
            return
        limits = Limits(messages=options["limit"], rate=options["rate"])
        self.print_outcomes(name, self.follow(run(limits), f"replay {name}", options), options)

    def print_count(self, what: str, progress: BulkProgress, done: str, options: Options) -> None:
        """Print how many messages would be replayed, and of how many of them an error has which class."""
        grouped = self.operations().groups(what, "dead", "error", chosen_filter(options))
        classes = Counter[str]()
        for one in grouped.rows:
            classes[one.error_class] += one.count
        if options["json"]:
            counted = {**progress_as_json(progress), "classes": classes, "classes_of": grouped.looked_at}
            self.print_json(counted)
            return
        super().print_count(what, progress, done, options)
        if not grouped.is_complete:
            self.stdout.write(f"classes of {grouped.looked_at} of them:")
        self._write_classes(classes)

    def _write_classes(self, classes: Counter[str]) -> None:
        width = len(str(max(classes.values(), default=0)))
        for name, count in sorted(classes.items(), key=lambda pair: (-pair[1], pair[0])):
            self.stdout.write(f"  {count:>{width}}  {one_line(name) or 'no class of an error'}")

    def _count_named(self, operations: Operations, name: str, ids: list[str], options: Options) -> None:
        outcomes: dict[str, str] = {}
        classes = Counter[str]()
        for one in dict.fromkeys(ids):
            copies = copies_of(operations, name, one)
            dead = next((copy for copy in copies if copy.state == "dead"), None)
            outcomes[one] = "matching" if dead else copies[0].state if copies else "gone"
            if dead:
                classes[dead.error_class] += 1
        counted = {"outcomes": Counter(outcomes.values()), "found": outcomes, "classes": classes}
        self.print_answer(counted, f"{name}: {messages_text(classes.total())} would be replayed", options)
        if not options["json"]:
            self._write_classes(classes)
        self._raise_missed(len(outcomes) - classes.total(), len(outcomes))

    def _replay_named(self, operations: Operations, name: str, ids: list[str], options: Options) -> None:
        if options["dry_run"]:
            self._count_named(operations, name, ids, options)
            return
        if options["new_body"] is None:
            result = operations.replay(name, ids)
        else:
            result = operations.replay_edited(name, ids[0], json_of("--new-body", options["new_body"]))
        answer = {"outcomes": result.outcomes, "found": result.found}
        self.print_answer(answer, f"{name}: {outcomes_text(result.outcomes)}", options)
        replayed = sum(result.outcomes.get(word, 0) for word in ("replayed", "merged"))
        self._raise_missed(len(result.found) - replayed, len(result.found))

    def _raise_missed(self, missed: int, named: int) -> None:
        if missed:
            raise CommandError(f"{missed} of {messages_text(named)} are not dead", returncode=1)
