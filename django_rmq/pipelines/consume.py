"""``consume``: a topic's messages, in two phases, into files, a database, or a function of the project."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from typing import Any

from django.utils.module_loading import import_string

from django_rmq.exceptions import ConfigurationError, InvalidRequest
from django_rmq.pipelines import Context, Pipeline, register


@register
class Consume(Pipeline):
    """Consume a topic into Parquet files, a table of a database, or a function of yours.

    Each message is acknowledged when Spark has recorded its batch. Files have each batch once, whatever dies in between. A
    table or a function may get a batch twice: it is told the number of the batch. Needs --checkpoint, which is the
    consumer's identity.
    """

    name = "consume"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic")
        target = parser.add_mutually_exclusive_group(required=True)
        target.add_argument("--parquet", metavar="PATH", help="a folder of Parquet files")
        target.add_argument("--jdbc", metavar="URL", help="a database; needs --table")
        target.add_argument(
            "--each", metavar="PATH", help="the dotted path of a function (frame, batch number)"
        )
        parser.add_argument("--table", help="a table, which is made if there is none")
        parser.add_argument("--driver", help="the class of the JDBC driver")
        parser.add_argument(
            "--schema",
            metavar="DDL",
            help="read bodies as JSON objects with these columns: 'sku string, n int'",
        )
        parser.add_argument("--max-messages", type=int, metavar="N", help="in one batch (default: 200,000)")
        parser.add_argument(
            "--claim-timeout", type=float, metavar="SECONDS", help="of the lease (default: 120)"
        )

    def run(self, context: Context, **options: Any) -> None:
        if context.checkpoint is None:
            raise InvalidRequest("say --checkpoint, a folder: it is what the consumer is known by")
        if (options["jdbc"] is None) != (options["table"] is None):
            raise InvalidRequest("--jdbc and --table go together")
        each = _function(options["each"]) if options["each"] else None
        topic = context.topic(options["topic"])
        frame = context.stream(
            topic.name, maxMessagesPerTrigger=options["max_messages"], claimTimeout=options["claim_timeout"]
        )
        if topic.body != "bytes":
            frame = frame.withColumn("value", frame["value"].cast("string"))
        if options["schema"]:
            frame = frame.selectExpr(
                f"from_json(value, '{_quoted(options['schema'])}') as body", "topic", "slot"
            )
            frame = frame.selectExpr("body.*", "topic", "slot")
        if options["parquet"]:
            writer = frame.writeStream.format("parquet").option("path", options["parquet"])
        else:
            writer = frame.writeStream.foreachBatch(each or partial(_into_table, options))
        consumed = context.follow(writer, topic.name)
        context.say(f"{consumed} messages of {topic.name} consumed")


def _function(path: str) -> Callable[[Any, int], object]:
    try:
        found = import_string(path)
    except ImportError as error:
        raise ConfigurationError(f"--each {path}: {error}") from error
    if not callable(found):
        raise ConfigurationError(f"--each {path} is no function")
    function: Callable[[Any, int], object] = found
    return function


def _into_table(options: dict[str, Any], frame: Any, number: int) -> None:
    writer = frame.selectExpr("*", f"cast({number} as bigint) as batch").write.format("jdbc")
    writer = writer.option("url", options["jdbc"]).option("dbtable", options["table"])
    if options["driver"]:
        writer = writer.option("driver", options["driver"])
    writer.mode("append").save()


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


__all__ = ["Consume"]
