"""What became of every event: the feeds, the ledgers of the topics and the database, held against each other."""

from __future__ import annotations

from django.db.models import Count, Sum

from example_project.demo.accounts import TopicAccounts, live, merged
from example_project.product_sets.feeds import Feeds
from example_project.product_sets.models import FIELDS, Batch, Item, ProductSet
from example_project.product_sets.sets import (
    CHANGES,
    EVALUATION,
    INTAKE,
    MEMBERSHIPS,
    differing_labels,
    differing_members,
)


class SetAccounts(TopicAccounts):
    """Those of one run; what was counted before it does not count."""

    def __init__(self, feeds: Feeds) -> None:
        super().__init__(CHANGES, MEMBERSHIPS)
        self.feeds = feeds

    def events_read(self) -> int:
        """How many events Spark has read."""
        return self._written(INTAKE)["rows"] or 0

    def finished(self) -> bool:
        """Whether all that was reported has been evaluated, and the labels have followed."""
        if self.events_read() != self.feeds.written:
            return False
        # What the first topic causes is in the second before it leaves the first.
        return not any(map(live, self.figures().values()))

    def sizes(self) -> str:
        """The sets and their sizes in one line."""
        sets = ProductSet.objects.annotate(size=Count("members"))
        return ", ".join(f"{each.name}: {each.size}" for each in sets)

    def summary(self) -> dict[str, object]:
        """What was done, by name."""
        intake, evaluation = self._written(INTAKE), self._written(EVALUATION)
        changes, memberships = self.figures().values()
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
        complaints = self.unbalanced()
        if (read := self.events_read()) != self.feeds.written:
            complaints.append(f"{self.feeds.written} events were written, {read} read")
        for name, figures in self.figures().items():
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
