"""The product sets at work, for the demo: sources that report, and Spark in a process of its own."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

from django.conf import settings
from django.db.models import Count, Sum
from django.utils import timezone

from example_project.demo.accounts import TopicAccounts, live, merged
from example_project.demo.stage import Child, DemoFailed
from example_project.product_sets.feeds import Feeds, FeedThread
from example_project.product_sets.models import FIELDS, Batch, Item, ProductSet
from example_project.product_sets.sets import (
    CHANGES,
    EVALUATION,
    INTAKE,
    MEMBERSHIPS,
    create_first_sets,
    differing_labels,
    differing_members,
    send_memberships,
)


class ProductSetsRun:
    """One run from the first file to the last; what was counted before it does not count."""

    pipeline: Child

    def __init__(self, data: Path, *, items: int, rate: float) -> None:
        self.data = data
        # The files of an earlier run are of feeds that no longer exist.
        shutil.rmtree(settings.PRODUCT_SETS_FEEDS, ignore_errors=True)
        shutil.rmtree(settings.PRODUCT_SETS_CHECKPOINTS / "intake", ignore_errors=True)
        self.feeds = Feeds(settings.PRODUCT_SETS_FEEDS, items)
        self.thread = FeedThread(self.feeds, rate)
        self.accounts = TopicAccounts(CHANGES, MEMBERSHIPS)
        self.began = timezone.now()

    def start(self, cleanup: ExitStack) -> None:
        """Make the sets, start Spark, and have every item reported once."""
        create_first_sets()
        # The messages of an earlier run were lost with its Redis.
        send_memberships(differing_labels())
        self.pipeline = Child(
            "product sets",
            self.data / "product-sets.log",
            *("runrmqpipeline", "product-sets", "--interval", "1s"),
            *("--master", f"local[{min(os.cpu_count() or 1, 4)}]"),
            *("--conf", "spark.sql.shuffle.partitions=2"),
            DJANGO_DEBUG="0",
        )
        cleanup.callback(self.stop)
        self.feeds.report_all()

    def check(self) -> None:
        """Raise DemoFailed if anything that should run does not."""
        self.pipeline.check()
        if self.thread.error is not None:
            raise DemoFailed(f"the feeds failed: {self.thread.error!r}") from self.thread.error

    def stop(self) -> int:
        """End the feeds, and Spark in order; return its exit code."""
        self.thread.stop()
        return self.pipeline.stop()

    def events_read(self) -> int:
        """How many events Spark has read."""
        return self._written(INTAKE)["rows"] or 0

    def finished(self) -> bool:
        """Whether all that was reported has been evaluated, and the labels have followed."""
        if self.events_read() != self.feeds.written:
            return False
        # What the first topic causes is in the second before it leaves the first.
        return not any(map(live, self.accounts.figures().values()))

    def sizes(self) -> str:
        """The sets and their sizes in one line."""
        sets = ProductSet.objects.annotate(size=Count("members"))
        return ", ".join(f"{each.name}: {each.size}" for each in sets)

    def summary(self) -> dict[str, object]:
        """What was done, by name."""
        intake, evaluation = self._written(INTAKE), self._written(EVALUATION)
        changes, memberships = self.accounts.figures().values()
        return {
            "events written": f"{self.feeds.written} about {len(self.feeds.latest)} items",
            "events read": f"{intake['rows'] or 0} in {intake['batches']} batches",
            "changes sent": f"{changes['sent']} ({merged(changes)} merged)",
            "changes consumed": f"{changes['acked']} in {evaluation['batches']} batches",
            "memberships sent": f"{memberships['sent']} ({merged(memberships)} merged)",
            "product sets": self.sizes(),
        }

    def complaints(self) -> list[str]:
        """What does not add up, a sentence each; call it when Spark has stopped."""
        complaints = self.accounts.unbalanced()
        if (read := self.events_read()) != self.feeds.written:
            complaints.append(f"{self.feeds.written} events were written, {read} read")
        for name, figures in self.accounts.figures().items():
            if left := live(figures):
                complaints.append(f"{left} messages of {name} were not consumed")
        items = Item.objects.in_bulk(list(self.feeds.latest))
        differing = [
            sku
            for sku, values in self.feeds.latest.items()
            if sku not in items or values != {field: getattr(items[sku], field) for field in FIELDS}
        ]
        if differing:
            complaints.append(f"{len(differing)} items are not as last reported, such as {differing[:5]}")
        for name, skus in differing_members().items():
            complaints.append(f"the set {name!r} has {len(skus)} items missing or too many")
        if labels := differing_labels():
            complaints.append(f"{len(labels)} labels do not follow the sets")
        return complaints

    def _written(self, work: str) -> dict[str, int | None]:
        batches = Batch.objects.filter(work=work, at__gte=self.began)
        return batches.aggregate(rows=Sum("rows"), batches=Count("pk"))
