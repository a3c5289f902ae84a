"""``replay``: sends dead or archived messages that an SQL predicate selects again."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django_rmq.exceptions import LostRace, OperationRefused
from django_rmq.operations.authorization import record
from django_rmq.pipelines import Context, Pipeline, register
from django_rmq.pipelines.archive import archive_of, archived_columns, tally, told


@register
class Replay(Pipeline):
    """Send dead messages again, from Dead or from an archive, selected by an SQL predicate.

    Each gets its full number of retries. From Dead it does the same as `rmqreplay`. An archive is not
    changed: if it is replayed twice, messages that still wait merge and the others are sent twice.
    """

    name = "replay"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        parser.add_argument("--archive", metavar="PATH", help="replay from an archive instead of Dead")
        parser.add_argument(
            "--where",
            metavar="SQL",
            help="a condition on body, key, error, reason, failures, died_at, slot and date: \"error like 'shop.%%'\"",
        )
        parser.add_argument("--dry-run", action="store_true", help="only print how many there are")

    def run(self, context: Context, **options: Any) -> None:
        from django_rmq.spark import row_actions

        if not options["dry_run"]:
            row_actions.check_version()
        topic = context.topic(options["topic"])
        if options["archive"]:
            found = archive_of(context, options["archive"])
            if found is None:
                raise OperationRefused(f"{options['archive']} does not hold an archive")
            found = found.where(found.topic == topic.name)
        else:
            dead = context.read(topic.name, queues="dead", includeMetadata=True)
            found = archived_columns(dead, {topic.name: topic.slots})
        found = found.withColumn("body", found.value.cast("string"))
        if options["where"]:
            found = found.where(options["where"])
        if options["dry_run"]:
            with context.watching():
                context.say(f"{found.count()} messages would be replayed")
            return
        outcomes = self._replay(context, topic.name, found, from_archive=bool(options["archive"]))
        record(context.actor, "replay", topic.name, outcomes, "archive" if options["archive"] else "dead")
        context.say(f"{topic.name}: {told(outcomes)}")
        if outcomes.get("unplaced"):
            raise LostRace(
                f"{outcomes['unplaced']} messages were sent with slot_basis=, which is not stored, and "
                "the topic now has more slots: their slots are unknown"
            )

    def _replay(self, context: Context, topic: str, found: Any, *, from_archive: bool) -> dict[str, int]:
        from django_rmq.spark import row_actions

        options = context.options(topic)
        if not from_archive:
            return tally(context, row_actions.replay(found, options))
        # If one message died several times, the last death counts.
        deaths = found.selectExpr("slot", "member", "struct(died_ms, slots, envelope, scored) as death")
        last = deaths.groupBy("slot", "member").agg({"death": "max"}).withColumnRenamed("max(death)", "death")
        return tally(context, row_actions.revive(last.select("slot", "member", "death.*"), options))


__all__ = ["Replay"]
