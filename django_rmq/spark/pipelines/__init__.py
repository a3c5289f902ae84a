"""Pipelines on Spark: what ``manage.py runrmqpipeline NAME`` runs.

A pipeline is a class with a ``name``, its own arguments and ``run``. Apps define theirs in a module
``pipelines``, which only that command imports, so web processes and workers never start a Spark session.

    @register
    class Prices(Pipeline):
        \"\"\"Send the prices of yesterday's file.\"\"\"

        name = "prices"

        def add_arguments(self, parser):
            parser.add_argument("file")

        def run(self, context, **options):
            frame = context.spark.read.parquet(options["file"])
            context.write(frame.selectExpr("to_json(struct(*)) as value"), "price-changes")

``Context`` (``pipeline``) gives it the session and the topics as the settings describe them. Code in tasks must not need
Django: functions for executors are in ``django_rmq.spark``.
"""

from django_rmq.spark.pipelines.pipeline import Context, Pipeline, pipelines, register, summary

__all__ = ["Context", "Pipeline", "pipelines", "register", "summary"]
