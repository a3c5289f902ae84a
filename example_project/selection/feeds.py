"""Files as suppliers, a warehouse and others would send them: for the demo and for tests."""

from __future__ import annotations

import csv
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import Any

from example_project.prices.management.commands.seed_shop import ADJECTIVES, SURFACES
from example_project.prices.rendering import KINDS
from example_project.selection.sources import SOURCES, Source

SECONDS_PER_FILE = 1.0
SHARES = {"catalogue": 1, "suppliers": 8, "warehouse": 8, "reviews": 3}
"""How much more often one source reports than another."""

Reports = Iterable[tuple[Any, Any, Any]]
"""(sku, version, value)."""


def write_file(feeds: Path, source: Source, name: str, reports: Reports) -> Path:
    """Write events as one file of a source. It appears whole or not at all: Spark passes over names with a dot."""
    folder = source.folder(feeds)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{source.format}"
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        if source.format == "csv":
            csv.writer(file).writerows(reports)
        else:
            for sku, version, value in reports:
                # A price is a number in JSON, with all its digits.
                told = str(value) if isinstance(value, Decimal) else json.dumps(value)
                file.write(f'{{"sku": {sku}, "version": {version}, "{source.field}": {told}}}\n')
    return unfinished.rename(path)


class Feeds:
    """What four sources report of some items; a few of the items change all the time.

    `latest` is what it all comes to, `written` how many events each source has reported.
    """

    def __init__(self, folder: Path, items: int, seed: int | None = None) -> None:
        self.folder = folder
        self.latest: dict[int, dict[str, Any]] = {sku: {} for sku in range(1, items + 1)}
        self.written: Counter[str] = Counter()
        self._draw = random.Random(seed)
        # Zipf: the second item changes half as often as the first, the third a third as often, …
        self._ranks = list(accumulate(1 / rank for rank in range(1, items + 1)))
        # Above the versions of an earlier run.
        self._version = time.time_ns() // 1_000
        for source in SOURCES:
            source.folder(folder).mkdir(parents=True, exist_ok=True)

    def report_all(self) -> None:
        """Every source reports every item once."""
        for source in SOURCES:
            self._report(source, list(self.latest))

    def report_changes(self, events: int) -> None:
        """So many changes, each source with its share of them."""
        chosen = self._draw.choices(SOURCES, [SHARES[source.name] for source in SOURCES], k=events)
        for source, count in Counter(chosen).items():
            self._report(source, self._draw.choices(list(self.latest), cum_weights=self._ranks, k=count))

    def _report(self, source: Source, skus: Iterable[int]) -> None:
        reports = []
        for sku in skus:
            self._version += 1
            value = self._value(source.field, self.latest[sku].get(source.field))
            self.latest[sku][source.field] = value
            reports.append((sku, self._version, value))
        write_file(self.folder, source, str(self._version), reports)
        self.written[source.name] += len(reports)

    def _value(self, field: str, before: Any) -> Any:
        draw = self._draw
        match field:
            case "title":
                kind = before.split()[-1] if before else draw.choice(KINDS)
                return f"{draw.choice(ADJECTIVES)} {draw.choice(SURFACES)} {kind}"
            case "price":
                if before is None:
                    return Decimal(draw.randint(300, 19_999)) / 100
                price = (before * draw.randint(900, 1_112) / 1_000).quantize(Decimal("0.01"))
                return min(max(price, Decimal(3)), Decimal(400))
            case "stock":
                if before is None or before < 3:
                    return draw.choice((0, 5, 20, 100))
                return max(0, before - draw.randint(1, 10))
        return Decimal(draw.randint(20, 50)) / 10


class FeedThread(threading.Thread):
    """Has the sources report `rate` changes per second until `stop()`; what went wrong is in `error` then."""

    def __init__(self, feeds: Feeds, rate: float) -> None:
        super().__init__(name="feeds")
        self.feeds = feeds
        self.rate = rate
        self.error: Exception | None = None
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Let the files under way be finished, and return when they are. Harmless before the start."""
        self._stopping.set()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        try:
            began, reported = time.monotonic(), 0
            while not self._stopping.wait(SECONDS_PER_FILE):
                wanted = round((time.monotonic() - began) * self.rate)
                self.feeds.report_changes(wanted - reported)
                reported = wanted
        except Exception as error:  # noqa: BLE001 - a thread cannot raise to its starter, which reads `error`
            self.error = error
