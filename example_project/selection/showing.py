"""The sets as a table that changes while one looks: for the command and for the demo."""

from __future__ import annotations

from typing import Any

from django.db.models import Count

from django_rmq.management import table
from example_project.selection.models import Batch, ProductSet, Work

COLUMNS = ("set", "rule", "members", "joined", "left")


class Showing:
    """What the sets hold, and how many have joined and left them since the first look."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, int]] | None = None

    def rows(self) -> list[tuple[str, str, int, int, int]]:
        """A row of COLUMNS for each set."""
        sets = list(ProductSet.objects.order_by("name").annotate(size=Count("members")))
        if self._before is None:
            self._before = {one.pk: (one.joined, one.left) for one in sets}
        found = []
        for one in sets:
            joined, left = self._before.get(one.pk, (0, 0))
            rule = f"({one.when}) {one.rule}" if one.when else one.rule
            found.append((one.name, rule, one.size, one.joined - joined, one.left - left))
        return found

    def lines(self) -> list[str]:
        """The table as text."""
        return table([COLUMNS, *self.rows()], right=(2, 3, 4))

    def rich_table(self) -> Any:
        """The table as rich draws it."""
        from rich.table import Table
        from rich.text import Text

        drawn = Table(title="product sets", caption=self.newest_batch() or None)
        for i, name in enumerate(COLUMNS):
            drawn.add_column(name, justify="right" if i >= 2 else "left", min_width=7)
        for name, rule, *figures in self.rows():
            # People who edit rules may type text that rich would take for markup.
            drawn.add_row(Text(name), Text(rule), *(f"{figure:,}" for figure in figures))
        return drawn

    @staticmethod
    def newest_batch() -> str:
        """The last batch that was written, in words; empty before the first."""
        batch = Batch.objects.filter(work=Work.SELECTION).first()
        if batch is None:
            return ""
        return (
            f"batch {batch.number} at {batch.at:%H:%M:%S}: {batch.rows} messages, {batch.items} items, "
            f"{batch.joined} joined, {batch.left} left"
        )
