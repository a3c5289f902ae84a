"""A pipeline as an app would have it."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

from django_rmq.exceptions import InvalidRequest
from django_rmq.spark.foreach_batch import Files
from django_rmq.spark.pipelines import Context, Pipeline, register
from django_rmq.spark.pipelines.consume import Consume


@register
class Doubling(Pipeline):
    """Send what waits in one topic, doubled, to another.

    For tests.
    """

    name = "doubling"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("source")
        parser.add_argument("target")
        parser.add_argument("--times", type=int, default=2)

    def run(self, context: Context, **options: Any) -> None:
        if options["times"] < 1:
            raise InvalidRequest("--times must be at least 1")
        frame = context.read(options["source"])
        doubled = frame.selectExpr(
            f"cast(cast(cast(value as string) as int) * {options['times']} as string) as value"
        )
        context.write(doubled.selectExpr("value", "50 as priority"), options["target"])


@register
class Endless(Pipeline):
    """Run a job that takes minutes, for tests that stop it."""

    name = "endless"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("marker", type=Path)

    def run(self, context: Context, **options: Any) -> None:
        marker = str(options["marker"])

        def wait(rows: Any) -> Any:
            Path(marker).touch()
            time.sleep(300)
            yield from rows

        with context.watching():
            context.spark.range(2).mapInArrow(wait, "id long").count()


@register
class Slowly(Consume):
    """Consume with tasks that take their time while they write; for tests that kill something then."""

    name = "slowly"

    def run(self, context: Context, **options: Any) -> None:
        def slow(rows: Any) -> Any:
            for batch in rows:
                for first in range(0, batch.num_rows, 100):
                    time.sleep(1)
                    yield batch.slice(first, 100)

        def write_slowly(files: Files, frame: Any, query: str, number: int, **how: Any) -> None:
            # Long rows: short ones would all be on their way before the file is begun.
            padded = frame.selectExpr("*", "repeat(value, 1000) as pad")
            write(files, padded.mapInArrow(slow, padded.schema), query, number, **how)

        write = Files.write
        with patch.object(Files, "write", write_slowly):
            super().run(context, **options)


def noted(frame: Any, number: int, query: str) -> None:
    """Print the name of a batch and how many rows it has, and read it again; for `--each`."""
    frame.foreach(lambda row: None)
    print(f"batch {number} of {query}: {frame.count()} rows", flush=True)


def unnamed(frame: Any, number: int) -> None:
    """Take no name of a batch."""
