"""`manage.py runrmqpipeline product-sets`: both queries in one Spark."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.conf import settings

from django_rmq.exceptions import InvalidRequest
from django_rmq.spark.pipelines import Context, Pipeline, register
from example_project.product_sets.sets import CHANGES


@register
class ProductSets(Pipeline):
    """Keep product sets up to date: files of changes become messages, messages become members.

    It may be killed at any moment and started again with the same checkpoint. With --available-now all files that are there
    are taken in, then the messages that are due by then are consumed.
    """

    name = "product-sets"

    def run(self, context: Context, **options: Any) -> None:
        if context.remote is not None:
            raise InvalidRequest(
                "this pipeline writes to the database from Spark's driver: use --master instead of --remote"
            )
        # PySpark is not there in every process that lists pipelines.
        from example_project.product_sets.queries import evaluation, intake

        queries = {
            "intake": (
                intake(context.spark, settings.PRODUCT_SETS_FEEDS, context.sending_options(CHANGES)),
                (),
            ),
            "evaluation": (evaluation(context.spark, context.options(CHANGES)), (CHANGES,)),
        }
        checkpoints = Path(context.checkpoint or settings.PRODUCT_SETS_CHECKPOINTS)

        def follow(name: str) -> int:
            own = replace(
                context, checkpoint=str(checkpoints / name), say=lambda text: context.say(f"{name}: {text}")
            )
            writer, topics = queries[name]
            return own.follow(writer, *topics)

        # One after the other, what the first has sent is there for the second.
        with ThreadPoolExecutor(1 if context.available_now else len(queries)) as threads:
            running = {threads.submit(follow, name): name for name in queries}
            try:
                done = {running[future]: future.result() for future in as_completed(running)}
            finally:
                # Without the one the other is of no use.
                context.stop()
        context.say(f"{done['intake']} events taken in, {done['evaluation']} messages consumed")
