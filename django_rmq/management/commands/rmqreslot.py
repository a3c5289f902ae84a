"""``manage.py rmqreslot``: give a topic another number of slots while it is in use."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from django_rmq.exceptions import ConfigurationError
from django_rmq.management.rmq_command import RmqCommand, allow_options_between_arguments, at_least
from django_rmq.operations import topics
from django_rmq.operations.topics import DrainProgress

REPORT_SECONDS = 1.0


class Command(RmqCommand):
    """Move a topic's messages to where they belong with another slot count."""

    help = (
        "Change the number of slots of a topic (a power of two), or continue an interrupted change. "
        "Senders and workers keep running. If the command is killed, start it again. Afterwards write the "
        "number into the settings: until then, processes warn and use the registered one. Exits with 2 if "
        "the topic cannot be changed."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        allow_options_between_arguments(parser)
        parser.add_argument("topic")
        parser.add_argument(
            "slots",
            nargs="?",
            type=at_least(1),
            help="default: continue an interrupted change, else SLOTS of the settings",
        )
        parser.add_argument("--dry-run", action="store_true", help="only print what would be done")
        parser.add_argument(
            "--at-once",
            type=at_least(1),
            default=topics.SETS_AT_ONCE,
            metavar="N",
            help="how many sets of slots may be blocked at the same time (default: %(default)s)",
        )

        parser.add_argument("--json", action="store_true", help="print JSON, once it is done")

    def handle(self, *args: object, **options: Any) -> None:
        operations, is_text = self.operations(), not options["json"]
        topic, broker = operations.config.topic(options["topic"]), operations.broker
        plan = topics.plan_slot_count(broker, topic, options["slots"])
        slots = plan.slots
        if options["dry_run"]:
            self._print_plan(plan, is_text=is_text)
            return
        change = topics.begin_slot_count(broker, topic, slots)
        if change is None:
            if is_text:
                self.stdout.write(f"{topic.name} has {slots} slots")
            else:
                self.print_json(_as_json(topic.name, slots, slots))
            return
        word = "Continuing with" if plan.is_begun else "Starting with"
        if is_text:
            self.stdout.write(f"{word} {topic.name}: {change.before} → {slots} slots")
        progress = topics.move_to_slots(
            broker,
            change,
            at_once=options["at_once"],
            report=self._report() if is_text else lambda _progress: None,
            report_trouble=lambda error: self.stderr.write(f"{error}; trying again"),
        )
        if not is_text:
            self.print_json(_as_json(topic.name, change.before, slots, progress.moved, progress.strays))
            return
        strays = f"; {progress.strays} stay, because their slot is unknown" if progress.strays else ""
        self.stdout.write(
            self.style.SUCCESS(f"{topic.name} has {slots} slots, {progress.moved} messages moved{strays}")
        )
        if operations.config.topic(topic.name).slots != slots:
            self.stdout.write(f'Write "SLOTS": {slots} into the settings')

    def _print_plan(self, plan: topics.SlotCountPlan, *, is_text: bool) -> None:
        if plan.obstacle:
            raise ConfigurationError(f'topic "{plan.topic.name}" cannot be re-slotted: {plan.obstacle}')
        if not is_text:
            self.print_json({**_as_json(plan.topic.name, plan.before, plan.slots), "dry_run": True})
            return
        self.stdout.write(
            f"{plan.topic.name} has {plan.before} slots and would get {plan.slots}; nothing was changed"
        )

    def _report(self) -> Callable[[DrainProgress], None]:
        reported = time.monotonic()

        def report(progress: DrainProgress) -> None:
            nonlocal reported
            if time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                waiting = f", waiting for {progress.waiting} in flight" if progress.waiting else ""
                self.stdout.write(
                    f"{progress.done} of {progress.families} sets of slots, {progress.moved} messages moved{waiting}"
                )
                self.stdout.flush()

        return report


def _as_json(topic: str, before: int, slots: int, moved: int = 0, strays: int = 0) -> dict[str, object]:
    return {"topic": topic, "before": before, "slots": slots, "moved": moved, "strays": strays}
