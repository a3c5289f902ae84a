"""Files of events, as suppliers, a warehouse and others would send them: for the demo and for tests."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import Any

from example_project.prices.management.commands.seed_shop import ADJECTIVES, SURFACES
from example_project.prices.rendering import KINDS
from example_project.product_sets.models import FIELDS

SECONDS_PER_FILE = 1.0
WEIGHTS = {"title": 1, "price": 8, "stock": 8, "rating": 3}
"""How often each field changes, compared with the others."""


def write_file(feeds: Path, name: str, events: Iterable[tuple[str, Any, Any, Any]]) -> Path:
    """Write events (field, sku, version, value) as one file. It appears whole or not at all.

    Spark passes over names that begin with a dot.
    """
    feeds.mkdir(parents=True, exist_ok=True)
    unfinished = feeds / f".{name}.json"
    with unfinished.open("w", encoding="utf-8") as file:
        for field, sku, version, value in events:
            event = {"field": field, "sku": sku, "version": version, "value": str(value)}
            file.write(json.dumps(event) + "\n")
    return unfinished.rename(feeds / f"{name}.json")


class Feeds:
    """The reports about some items, a few of which change all the time.

    `latest` is what all reports come to, `written` the number of events.
    """

    def __init__(self, folder: Path, items: int, seed: int | None = None) -> None:
        self.folder = folder
        self.latest: dict[int, dict[str, Any]] = {sku: {} for sku in range(1, items + 1)}
        self.written = 0
        self._random = random.Random(seed)
        # Zipf: the second item changes half as often as the first, the third a third as often, …
        self._weights = list(accumulate(1 / rank for rank in range(1, items + 1)))
        # Above the versions of an earlier run.
        self._version = time.time_ns() // 1_000

    def report_all(self) -> None:
        """Report every field of every item once."""
        self._report([(field, sku) for sku in self.latest for field in FIELDS])

    def report_changes(self, count: int) -> None:
        """Report so many changes."""
        fields = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
        skus = self._random.choices(list(self.latest), cum_weights=self._weights, k=count)
        self._report(list(zip(fields, skus, strict=True)))

    def _report(self, changes: list[tuple[str, int]]) -> None:
        events = []
        for field, sku in changes:
            self._version += 1
            value = self._value(field, self.latest[sku].get(field))
            self.latest[sku][field] = value
            events.append((field, sku, self._version, value))
        write_file(self.folder, str(self._version), events)
        self.written += len(events)

    def _value(self, field: str, before: Any) -> Any:
        choose = self._random
        match field:
            case "title":
                kind = before.split()[-1] if before else choose.choice(KINDS)
                return f"{choose.choice(ADJECTIVES)} {choose.choice(SURFACES)} {kind}"
            case "price":
                return Decimal(choose.randint(300, 19_999)) / 100
            case "stock":
                return choose.choice((0, 1, 5, 20, 100))
        return Decimal(choose.randint(20, 50)) / 10
