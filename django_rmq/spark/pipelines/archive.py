"""``archive`` moves dead messages to Parquet files; ``replay`` sends dead or archived messages again."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from django_rmq.conf import get_config
from django_rmq.exceptions import LostRace, OperationRefused
from django_rmq.operations.audit_trail import record, record_and_announce
from django_rmq.spark.pipelines.pipeline import KEY_TEXT, Context, Options, Pipeline, register, stored_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

YOUNGEST_MS = 1_000
"""Messages that died within this many ms stay, so that one time of death stands for one death."""

KEY = ("topic", "slot", "member", "died_ms")

REVIVED = {"stored": "replayed", "replaced": "merged"}
"""Outcome of a message that was sent from an archive -> what it is called of one that was replayed from Dead."""


@register
class Archive(Pipeline):
    """Put dead messages into Parquet files by topic and date, then delete exactly those from Dead.

    The files are read back before anything is deleted, and a message that has died again meanwhile stays. If
    the pipeline is killed, start it again: messages that are already in the files are only deleted.
    """

    name = "archive"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("path", help="the folder of the archive; it grows with each run")
        parser.add_argument("topics", nargs="*", metavar="topic", help="default: all")
        parser.add_argument(
            "--older-than",
            type="duration",
            default=0.0,
            metavar="TIME",
            help="only messages that have been dead for this time: 7d",
        )
        parser.add_argument(
            "--where",
            metavar="SQL",
            help="only messages that match: \"error like 'shop.%%'\"; the columns are those of the archive, and body",
        )
        parser.add_argument("--keep", action="store_true", help="keep the messages in Dead")
        parser.add_argument("--dry-run", action="store_true", help="only print how many there are")

    def run(self, context: Context, **options: Any) -> None:
        from django_rmq.spark import dead_messages

        if not (options["keep"] or options["dry_run"]):
            # Before the files are written.
            dead_messages.check_version()
        topics = options["topics"] or list(get_config().topics)
        slots = {name: context.topic(name).slots for name in topics}
        up_to = context.broker.now_ms() - max(YOUNGEST_MS, round(options["older_than"] * 1000))
        # What another program has put into Dead with another score has no time of death, and stays.
        dead = context.read(*topics, queues="dead", includeMetadata=True, minScore=0, maxScore=up_to)
        columns = archived_columns(dead, slots)
        if options["where"] is not None:
            columns = (
                columns.withColumn("body", columns.value.cast("string")).where(options["where"]).drop("body")
            )
        with context.kept(columns) as cached:
            self._archive(context, cached, options)

    def _archive(self, context: Context, frame: DataFrame, options: Options) -> None:
        with context.watching():
            rows = frame.groupBy("topic", "date").count().collect()
        counts: Counter[str] = Counter()
        for row in rows:
            counts[row.topic] += row["count"]
        for name, count in sorted(counts.items()):
            context.say(f"{name}: {count} dead messages")
        if options["dry_run"] or not counts:
            context.say("nothing was archived")
            return
        dates = sorted({row.date for row in rows})
        context.say(
            f"{self._append(context, frame, dates, options['path'])} messages written to {options['path']}"
        )
        if not options["keep"]:
            for name in sorted(counts):
                self._delete(context, frame.where(frame.topic == name), name, dates, options["path"])

    def _append(self, context: Context, frame: DataFrame, dates: list[str], path: str) -> int:
        """Write the messages that the archive does not have; return their number."""
        archive = archive_of(context, path)
        run = uuid4().hex
        with context.watching():
            fresh = frame
            if archive is not None:
                archive = archive.where(archive.date.isin(dates))
                fresh = frame.join(archive.select(*KEY), list(KEY), "left_anti")
            fresh = fresh.selectExpr("*", f"'{run}' as run")
            fresh.write.partitionBy("topic", "date").mode("append").parquet(path)
            return present_archive(context, path).where(f"run = '{run}'").count()

    def _delete(self, context: Context, frame: DataFrame, topic: str, dates: list[str], path: str) -> None:
        from django_rmq.spark import dead_messages

        # A message that is not in the files is not deleted, whatever happened to them.
        archive = present_archive(context, path)
        safe = archive.where((archive.topic == topic) & archive.date.isin(dates)).select(*KEY).distinct()
        archived = frame.select(*KEY).join(safe, list(KEY), "left_semi")
        outcomes = tally(context, dead_messages.discard(archived, context.options(topic)))
        record(context.actor, "archive", topic, outcomes)
        context.say(f"{topic}: {outcomes_text(outcomes)}")


def archived_columns(dead: DataFrame, slots: dict[str, int]) -> DataFrame:
    """Return dead messages with the columns of the archive."""
    counts = " ".join(f"when '{name}' then {count}" for name, count in slots.items())
    return dead.selectExpr(
        *("topic", "slot", f"case topic {counts} end as slots", "value", "coalesce(key, value) as member"),
        KEY_TEXT,
        *("envelope", "scored", "reason", "failures", "error", "died_at", "cast(score as bigint) as died_ms"),
        "date_format(died_at, 'yyyy-MM-dd') as date",
    )


def archive_of(context: Context, path: str) -> DataFrame | None:
    """Return an archive as a frame. None: there is none yet. Raises ``OperationRefused`` for other files."""
    archive = stored_files(context.spark, path)
    if archive is None:
        return None
    missing = {*KEY, "slots", "envelope", "scored", "run", "date"} - set(archive.columns)
    if missing:
        raise OperationRefused(
            f"{path} holds files that are not an archive: {', '.join(sorted(missing))} is missing"
        )
    return archive


def present_archive(context: Context, path: str) -> DataFrame:
    """Return an archive as a frame. Raises ``OperationRefused`` if there is none."""
    archive = archive_of(context, path)
    if archive is None:
        raise OperationRefused(f"{path} does not hold an archive")
    return archive


def tally(context: Context, outcomes: DataFrame) -> dict[str, int]:
    """Run a frame of ``dead_messages``; return outcome → number of messages."""
    with context.watching():
        rows = outcomes.collect()
    return {row.outcome: row.messages for row in sorted(rows) if row.messages}


def outcomes_text(outcomes: dict[str, int]) -> str:
    """Return outcomes in readable form."""
    return ", ".join(f"{count} {word}" for word, count in outcomes.items()) or "nothing to do"


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
        from django_rmq.spark import dead_messages

        if not options["dry_run"]:
            dead_messages.check_version()
        topic = context.topic(options["topic"])
        if options["archive"] is not None:
            messages = present_archive(context, options["archive"])
            messages = messages.where(messages.topic == topic.name)
        else:
            dead = context.read(topic.name, queues="dead", includeMetadata=True)
            messages = archived_columns(dead, {topic.name: topic.slots})
        messages = messages.withColumn("body", messages.value.cast("string"))
        if options["where"] is not None:
            messages = messages.where(options["where"])
        if options["dry_run"]:
            with context.watching():
                context.say(f"{messages.count()} messages would be replayed")
            return
        outcomes = self._replay(context, topic.name, messages, from_archive=options["archive"] is not None)
        words: Counter[str] = Counter()
        for word, count in outcomes.items():
            words[REVIVED.get(word, word)] += count
        source = "archive" if options["archive"] is not None else "dead"
        record_and_announce(context.actor, "replay", topic.name, words, source)
        context.say(f"{topic.name}: {outcomes_text(outcomes)}")
        if outcomes.get("unplaced"):
            raise LostRace(
                f"{outcomes['unplaced']} messages were sent with slot_basis=, which is not stored, and "
                "the topic now has more slots: their slots are unknown"
            )

    def _replay(
        self, context: Context, topic: str, frame: DataFrame, *, from_archive: bool
    ) -> dict[str, int]:
        from django_rmq.spark import dead_messages

        options = context.options(topic)
        if not from_archive:
            return tally(context, dead_messages.replay(frame, options))
        # If one message died several times, the last death counts: Spark compares structs by their first field.
        deaths = frame.selectExpr("slot", "member", "struct(died_ms, slots, envelope, scored) as death")
        last = deaths.groupBy("slot", "member").agg({"death": "max"}).withColumnRenamed("max(death)", "death")
        return tally(context, dead_messages.revive(last.select("slot", "member", "death.*"), options))
