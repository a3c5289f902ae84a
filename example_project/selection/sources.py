"""Where changes come from: one folder of files for each source, one fact of an item in each event."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """Reports one `field` of items, in files of this `format`; `type` is what Spark reads it as.

    The columns of an event are `sku`, `version` and the field. A source's versions of one item only rise.
    """

    name: str
    field: str
    format: str
    type: str

    @property
    def schema(self) -> str:
        """The columns of its files, as Spark writes them down."""
        return f"sku long, version long, {self.field} {self.type}"

    def folder(self, feeds: Path) -> Path:
        """Where its files are."""
        return feeds / self.name


SOURCES = (
    Source("catalogue", "title", "json", "string"),
    Source("suppliers", "price", "json", "decimal(9,2)"),
    Source("warehouse", "stock", "csv", "int"),
    Source("reviews", "rating", "json", "decimal(2,1)"),
)
