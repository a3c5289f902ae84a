"""A pipeline as an app would have it."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django_rmq.exceptions import InvalidRequest
from django_rmq.pipelines import Context, Pipeline, consume, register
from django_rmq.pipelines.consume import Consume


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
class Unrecorded(Consume):
    """Consume into a table, and stay between the table and Spark's own record; for tests that kill it there."""

    name = "unrecorded"

    def run(self, context: Context, **options: Any) -> None:
        def write_and_wait(options: dict[str, Any], frame: Any, number: int) -> None:
            into_table(options, frame, number)
            context.say(f"batch {number} is in the table")
            time.sleep(300)

        into_table = consume._into_table
        consume._into_table = write_and_wait
        super().run(context, **options)
