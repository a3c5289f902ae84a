"""``manage.py rmqreslot``: give a topic another number of slots while it is in use."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from typing import Any

from django_rmq.core.topics import reslotting
from django_rmq.core.topics.reslotting import Progress, Reslotting
from django_rmq.exceptions import ConfigurationError, ServerTrouble
from django_rmq.management import RmqCommand, at_least
from django_rmq.operations import reslots
from django_rmq.project.connections import get_broker
from django_rmq.project.settings import get_config

PATIENCE = 60.0
"""Seconds without an answer of Redis after which the command gives up; it can be started again."""

REPORT_SECONDS = 1.0


class Command(RmqCommand):
    """Move a topic's messages to where they belong with another slot count."""

    help = (
        "Give a topic another number of slots (a power of two), or finish what was begun. Senders and workers go on; "
        "killed at any moment it can be started again. Afterwards write the number into the settings: until then "
        "processes warn and follow the registered one. Exits with 2 where the topic has to keep its slots."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        parser.add_argument(
            "slots",
            nargs="?",
            type=at_least(1),
            help="default: finish what was begun, else what the settings say",
        )
        parser.add_argument("--dry-run", action="store_true", help="say what would be done")
        parser.add_argument(
            "--at-once",
            type=at_least(1),
            default=reslotting.AT_ONCE,
            metavar="N",
            help="sets of slots that stand still at once, at most (default: %(default)s)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        topic, broker = get_config().topic(options["topic"]), get_broker("worker")
        plan = reslots.plan(broker, topic, options["slots"])
        slots = plan.slots
        if options["dry_run"]:
            self._foretell(plan)
            return
        chosen = reslotting.begin(broker, topic, slots)
        if chosen is None:
            self.stdout.write(f"{topic.name} has {slots} slots")
            return
        word = "Going on with" if plan.is_begun else "Beginning with"
        self.stdout.write(f"{word} {topic.name}: {chosen.before} → {slots} slots")
        progress = self._move(broker, chosen, options["at_once"])
        strays = f"; {progress.strays} stay where nobody can tell their slot" if progress.strays else ""
        self.stdout.write(
            self.style.SUCCESS(f"{topic.name} has {slots} slots, {progress.moved} messages moved{strays}")
        )
        if get_config().topic(topic.name).slots != slots:
            self.stdout.write(f'Write "SLOTS": {slots} into the settings')

    def _foretell(self, plan: reslots.Plan) -> None:
        if plan.obstacle:
            raise ConfigurationError(f'topic "{plan.topic.name}" keeps its slots: {plan.obstacle}')
        self.stdout.write(
            f"{plan.topic.name} has {plan.before} slots and would get {plan.slots}; nothing was changed"
        )

    def _move(self, broker: Any, chosen: Reslotting, at_once: int) -> Progress:
        """Move until all is done, whatever Redis does meanwhile."""
        told = answered = time.monotonic()

        def report(step: str, progress: Progress) -> None:
            nonlocal told, answered
            answered = time.monotonic()
            if answered - told >= REPORT_SECONDS:
                told = answered
                waiting = f", waiting for {progress.waiting} in flight" if progress.waiting else ""
                self.stdout.write(
                    f"{progress.done} of {progress.families} sets of slots, {progress.moved} messages moved{waiting}"
                )
                self.stdout.flush()

        while True:
            try:
                progress = reslotting.move(broker, chosen, at_once=at_once, report=report)
                reslotting.finish(broker, chosen)
                return progress
            except ServerTrouble as error:
                if time.monotonic() - answered > PATIENCE:
                    raise
                self.stderr.write(f"{error}; trying again")
                time.sleep(1.0)


__all__ = ["Command"]
