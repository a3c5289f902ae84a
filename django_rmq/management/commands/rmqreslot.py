"""``manage.py rmqreslot``: give a topic another number of slots while it is in use."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from django_rmq.exceptions import ConfigurationError
from django_rmq.management import RmqCommand, at_least
from django_rmq.operations import reslots
from django_rmq.operations.reslots import Progress

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
            default=reslots.AT_ONCE,
            metavar="N",
            help="how many sets of slots may be blocked at the same time (default: %(default)s)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        operations = self.operations()
        topic, broker = operations.config.topic(options["topic"]), operations.broker
        plan = reslots.plan(broker, topic, options["slots"])
        slots = plan.slots
        if options["dry_run"]:
            self._foretell(plan)
            return
        chosen = reslots.begin(broker, topic, slots)
        if chosen is None:
            self.stdout.write(f"{topic.name} has {slots} slots")
            return
        word = "Continuing with" if plan.is_begun else "Starting with"
        self.stdout.write(f"{word} {topic.name}: {chosen.before} → {slots} slots")
        progress = reslots.move(
            broker,
            chosen,
            at_once=options["at_once"],
            report=self._report(),
            complain=lambda error: self.stderr.write(f"{error}; trying again"),
        )
        strays = f"; {progress.strays} stay, because their slot is unknown" if progress.strays else ""
        self.stdout.write(
            self.style.SUCCESS(f"{topic.name} has {slots} slots, {progress.moved} messages moved{strays}")
        )
        if operations.config.topic(topic.name).slots != slots:
            self.stdout.write(f'Write "SLOTS": {slots} into the settings')

    def _foretell(self, plan: reslots.Plan) -> None:
        if plan.obstacle:
            raise ConfigurationError(f'topic "{plan.topic.name}" cannot be re-slotted: {plan.obstacle}')
        self.stdout.write(
            f"{plan.topic.name} has {plan.before} slots and would get {plan.slots}; nothing was changed"
        )

    def _report(self) -> Callable[[Progress], None]:
        told = time.monotonic()

        def report(progress: Progress) -> None:
            nonlocal told
            if time.monotonic() - told >= REPORT_SECONDS:
                told = time.monotonic()
                waiting = f", waiting for {progress.waiting} in flight" if progress.waiting else ""
                self.stdout.write(
                    f"{progress.done} of {progress.families} sets of slots, {progress.moved} messages moved{waiting}"
                )
                self.stdout.flush()

        return report


__all__ = ["Command"]
