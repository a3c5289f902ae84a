"""``reslot``: changes the slot count of a topic in use, with several tasks moving its slots at the same time."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from typing import Any

from django_rmq.core.topics import reslotting
from django_rmq.exceptions import ConfigurationError
from django_rmq.operations import reslots
from django_rmq.pipelines import Context, Pipeline, register
from django_rmq.pipelines.archive import tally
from django_rmq.project.settings import get_config
from django_rmq.spark.session import describe, is_sparks

PATIENCE = 60.0
"""Seconds for which a refused call is repeated; the pipeline can be started again."""

SERVER_TROUBLES = ("ServerTrouble", "ServerUnavailable", "NodeUnavailable", "ServerFull", "ServerRefused")


@register
class Reslot(Pipeline):
    """Give a topic another number of slots: what `rmqreslot` does, spread over Spark's tasks.

    Senders and workers go on. If the pipeline is killed, start it again, or start `rmqreslot`; both may run
    at the same time.
    """

    name = "reslot"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        parser.add_argument(
            "slots",
            nargs="?",
            type=int,
            help="default: continue an interrupted change, else SLOTS of the settings",
        )
        parser.add_argument(
            "--tasks", type=int, default=4, metavar="N", help="number of Spark tasks (default: %(default)s)"
        )
        parser.add_argument("--dry-run", action="store_true", help="only print what would be done")

    def run(self, context: Context, **options: Any) -> None:
        topic, broker = get_config().topic(options["topic"]), context.broker
        plan = reslots.plan(broker, topic, options["slots"])
        if options["dry_run"]:
            if plan.obstacle:
                raise ConfigurationError(f'topic "{topic.name}" cannot be re-slotted: {plan.obstacle}')
            context.say(
                f"{topic.name} has {plan.before} slots and would get {plan.slots}; nothing was changed"
            )
            return
        from django_rmq.spark import acting

        # Senders and workers wait for slots whose move has begun.
        acting.check_version()
        chosen = reslotting.begin(broker, topic, plan.slots)
        if chosen is None:
            context.say(f"{topic.name} has {plan.slots} slots")
            return
        context.say(
            f"{topic.name}: {chosen.before} → {plan.slots} slots, {len(chosen.families)} sets of slots"
        )
        outcomes = self._move(context, chosen, max(1, options["tasks"]))
        reslotting.finish(broker, chosen)
        strays = outcomes.get("strays", 0)
        stay = f"; {strays} stay, because their slot is unknown" if strays else ""
        context.say(f"{topic.name} has {plan.slots} slots, {outcomes.get('moved', 0)} messages moved{stay}")
        if topic.slots != plan.slots:
            context.say(f'Write "SLOTS": {plan.slots} into the settings')

    def _move(self, context: Context, chosen: reslotting.Reslotting, tasks: int) -> dict[str, int]:
        """Move all families; repeat those that a task could not complete."""
        from django_rmq.spark import acting

        options = {**context.connection(), "topic": chosen.topic.name}
        count = len(chosen.families)
        end = time.monotonic() + PATIENCE
        while True:
            families = context.spark.range(0, count, 1, min(tasks, count)).selectExpr("id as family")
            try:
                return tally(context, acting.move_families(families, options, chosen.number))
            except Exception as error:
                trouble = is_sparks(error) and describe(error)[0] in SERVER_TROUBLES
                if not trouble or time.monotonic() > end:
                    raise
                context.say(f"{describe(error)[1]}; trying again")
                time.sleep(1.0)


__all__ = ["Reslot"]
