"""The selection at work, for the demos: sources that report, and Spark in a process of its own."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.db.models import Count, Sum
from django.utils import timezone

from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.spark_session import check_installed
from example_project.accounts import TopicAccounts
from example_project.selection import changes
from example_project.selection.feeds import Feeds, FeedThread
from example_project.selection.models import Batch, Item, ProductSet, Work
from example_project.selection.sets import TOPIC, differing_sets, resume, save_set
from example_project.selection.showing import Showing
from example_project.stage import Child, DemoFailed

STARTING = "starting Spark …"
START_SECONDS = 300.0

CAMPAIGN = "Flash sale"
CAMPAIGN_RULE = "price < 60 and rating >= 4"


def why_not() -> str:
    """Why Spark cannot run here; empty if it can."""
    try:
        check_installed()
    except ConfigurationError as error:
        return str(error)
    return ""


class SelectionRun:
    """One run from the first file to the last; what was counted before it does not count."""

    pipeline: Child

    def __init__(self, data: Path, *, items: int, rate: float) -> None:
        self.data = data
        # Files of an earlier run were told by feeds that are no more.
        shutil.rmtree(settings.SELECTION_FEEDS, ignore_errors=True)
        shutil.rmtree(settings.SELECTION_CHECKPOINTS / "intake", ignore_errors=True)
        self.feeds = Feeds(settings.SELECTION_FEEDS, items)
        self.thread = FeedThread(self.feeds, rate)
        self.accounts = TopicAccounts(TOPIC, changes.TOPIC)
        self.showing = Showing()
        self.began = timezone.now()
        self._begun = False

    def start(self, cleanup: ExitStack) -> None:
        """Make the sets, start Spark, and have every item reported once."""
        call_command("seed_selection")
        # Messages of an earlier run were lost with its Redis.
        resume()
        # From here on it counts who joins and leaves.
        self.showing.rows()
        self.pipeline = Child(
            "selection",
            self.data / "selection.log",
            "runrmqpipeline",
            "selection",
            "--master",
            f"local[{min(os.cpu_count() or 1, 4)}]",
            "--interval",
            "1s",
            "--conf",
            "spark.sql.shuffle.partitions=2",
            DJANGO_DEBUG="0",
        )
        # What the demos show first is not what Spark needs the processors for.
        os.setpriority(os.PRIO_PROCESS, self.pipeline.process.pid, 10)
        cleanup.callback(self.pipeline.stop)
        cleanup.callback(self.thread.stop)
        self.feeds.report_all()

    def check(self) -> None:
        """Raise DemoFailed if anything that should run does not."""
        self.pipeline.check()
        if self.thread.error is not None:
            raise DemoFailed(f"the feeds failed: {self.thread.error!r}") from self.thread.error

    def has_begun(self) -> bool:
        """Whether Spark runs, and has evaluated the first items."""
        self._begun = self._begun or bool(self._done(Work.SELECTION)["batches"])
        return self._begun

    def failure(self) -> str:
        """Why Spark does not begin any more; empty if it may."""
        if (ended := self.pipeline.process.poll()) is not None:
            return f"Spark ended with {ended}; see {self.pipeline.log}"
        if timezone.now() - self.began > timedelta(seconds=START_SECONDS):
            return f"Spark has evaluated nothing within {START_SECONDS:g} s; see {self.pipeline.log}"
        return ""

    def start_feeds(self, seconds: float | None) -> None:
        """Let changes come, and a campaign begin and end within these seconds (None: within a minute)."""
        self.thread.start()
        seconds = 60.0 if seconds is None else seconds
        campaign = ProductSet.objects.filter(name=CAMPAIGN).first() or ProductSet(name=CAMPAIGN)
        campaign.rule, campaign.active = CAMPAIGN_RULE, True
        campaign.starts_at = timezone.now() + timedelta(seconds=seconds / 6)
        campaign.ends_at = timezone.now() + timedelta(seconds=seconds * 3 / 4)
        save_set(campaign)

    def stop_feeds(self) -> None:
        """Let no more changes come."""
        self.thread.stop()

    def stop(self) -> int:
        """End the feeds, and Spark in order; return its exit code."""
        self.stop_feeds()
        return self.pipeline.stop()

    def taken_in(self) -> int:
        """How many events have been read."""
        return self._done(Work.INTAKE)["rows"] or 0

    def finished(self) -> bool:
        """Whether all that was reported has been selected, and the labels have followed."""
        if self.taken_in() != self.feeds.written.total():
            return False
        # What the first topic causes is in the second before it leaves the first.
        return not any(figures.live for figures in self.accounts.figures().values())

    def rich_table(self) -> Any:
        """The sets as rich draws them."""
        return self.showing.rich_table() if self.has_begun() else f"product sets: {STARTING}"

    def told(self) -> str:
        """The sets and their sizes in one line."""
        if not self.has_begun():
            return STARTING
        sizes = (
            ProductSet.objects.order_by("name").annotate(size=Count("members")).values_list("name", "size")
        )
        return ", ".join(f"{name}: {size}" for name, size in sizes)

    def summary(self) -> dict[str, object]:
        """What was done, by name."""
        intake, selection = self._done(Work.INTAKE), self._done(Work.SELECTION)
        # Those that left with the end of a campaign are in no batch.
        rows = self.showing.rows()
        figures, told = self.accounts.figures().values()
        differing = differing_sets()
        return {
            "events written": f"{self.feeds.written.total()} about {len(self.feeds.latest)} items",
            "events taken in": f"{intake['rows'] or 0} in {intake['batches']} batches",
            "messages sent": f"{figures.counters['sent']} ({figures.merged} merged)",
            "messages consumed": f"{figures.counters['acked']} in {selection['batches']} batches",
            "joined and left": f"{sum(row[3] for row in rows)} and {sum(row[4] for row in rows)}",
            "sent on": f"{told.counters['sent']} ({told.merged} merged)",
            "product sets": self.told(),
            "evaluated again": f"{len(differing)} sets differ" if differing else "the same sets",
            "labels": f"{len(unlike)} differ"
            if (unlike := changes.differing_labels())
            else "those of the sets",
            "ledger": f"NOT balanced in {len(wrong)} slots"
            if (wrong := self.accounts.unbalanced())
            else "balanced",
        }

    def complaints(self) -> list[str]:
        """What does not add up, a sentence each; call it when Spark has stopped."""
        found = self.accounts.unbalanced()
        if (taken := self.taken_in()) != self.feeds.written.total():
            found.append(f"{self.feeds.written.total()} events were written, {taken} taken in")
        for name, figures in self.accounts.figures().items():
            if figures.live:
                found.append(f"{figures.live} messages of {name} were not consumed")
        items = Item.objects.in_bulk(list(self.feeds.latest))
        wrong = [
            sku
            for sku, told in self.feeds.latest.items()
            if sku not in items or any(getattr(items[sku], name) != value for name, value in told.items())
        ]
        if wrong:
            found.append(f"{len(wrong)} items are not what the sources last said, such as {wrong[:5]}")
        for name, (missing, wrong_ones) in differing_sets().items():
            found.append(f"the set {name!r} lacks {len(missing)} items and has {len(wrong_ones)} too many")
        now = timezone.now()
        found += [
            f"the set {one.name!r} did not begin or end at its time"
            for one in ProductSet.objects.all()
            if one.running != one.is_due(now)
        ]
        if differing := len(changes.differing_labels()):
            found.append(f"{differing} labels do not follow the sets")
        return found

    def _done(self, work: Work) -> dict[str, int | None]:
        return Batch.objects.filter(work=work, at__gte=self.began).aggregate(
            rows=Sum("rows"), batches=Count("pk")
        )
