"""``manage.py runrmqpipeline``: run a pipeline on Spark.

Exit codes: 0 done, or stopped when asked to; 1 it failed; 2 usage, configuration, no PySpark or no Java; 3 Redis. The
first SIGTERM or SIGINT lets a stream's batch end and cancels other jobs; the second leaves at once.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from typing import Any

from django.core.management.base import CommandError

from django_rmq.exceptions import RmqError
from django_rmq.management.rmq_command import (
    Options,
    RmqCommand,
    UsageError,
    duration,
    exit_code_of,
    one_line,
    stopped_by_signals,
)
from django_rmq.spark.java import check_installed, describe, is_sparks
from django_rmq.spark.pipelines import Pipeline, pipelines, summary
from django_rmq.spark.pipelines.pipeline import Context, Stopped

_SHARED = ("master", "remote", "conf", "checkpoint", "available_now", "interval", "grace")

_DJANGOS = frozenset(
    [
        "verbosity",
        "settings",
        "pythonpath",
        "traceback",
        "no_color",
        "force_color",
        "skip_checks",
        "stdout",
        "stderr",
    ]
)
"""The options of every command; the other options belong to the pipeline."""


class Command(RmqCommand):
    """Run a pipeline on Spark."""

    help = (
        "Run a pipeline on Spark: a built-in one, or one of an app's `pipelines` module. Without a name, "
        "list them. Exit codes: 0 done or stopped, 1 failed, 2 usage or configuration (also: no PySpark, "
        "no Java), 3 Redis unavailable."
    )
    requires_system_checks = "__all__"

    def add_arguments(self, parser: ArgumentParser) -> None:
        subparsers = parser.add_subparsers(dest="pipeline", metavar="NAME")
        for name, pipeline in pipelines().items():
            own = subparsers.add_parser(name, help=summary(pipeline), description=pipeline.__doc__)
            own.register("type", "duration", duration)
            _add_shared(own)
            pipeline().add_arguments(own)

    def handle(self, *args: object, **options: Any) -> None:
        name = options.pop("pipeline")
        if name is None:
            rows = [(name, summary(pipeline)) for name, pipeline in pipelines().items()]
            self.print_table(rows)
            return
        shared = {key: options.pop(key) for key in _SHARED}
        conf = dict(shared.pop("conf"))
        if shared["master"] and shared["remote"]:
            raise UsageError("use --master or --remote, not both")
        check_installed(shared["remote"])
        say = self._printer(options["verbosity"])
        context = Context(
            name, conf=conf, actor=self.operations().actor, say=say, show=self.stdout.write, **shared
        )
        own = {key: value for key, value in options.items() if key not in _DJANGOS}
        self._run(context, pipelines()[name](), own)

    def _run(self, context: Context, pipeline: Pipeline, options: Options) -> None:
        with stopped_by_signals(context.stop):
            try:
                pipeline.run(context, **options)
            except Stopped:
                context.say("stopped")
            except RmqError:
                raise
            except Exception as error:
                if not is_sparks(error):
                    raise
                raise _command_error(error) from error
            finally:
                context.close()

    def _printer(self, verbosity: int) -> Callable[[str], None]:
        def say(text: str) -> None:
            if verbosity:
                self.stderr.write(text, self.style.NOTICE)
                self.stderr.flush()

        return say


def _command_error(error: BaseException) -> CommandError:
    """Return an error of Spark as one line, with the exit code of the error raised in the task or the query."""
    name, sentence = describe(error)
    kind = getattr(sys.modules["django_rmq.exceptions"], name, None) if name else None
    returncode = exit_code_of(kind) if kind is not None and issubclass(kind, RmqError) else 1
    return CommandError(one_line(sentence), returncode=returncode)


def _add_shared(parser: ArgumentParser) -> None:
    shared = parser.add_argument_group("Spark")
    shared.add_argument("--master", metavar="URL", help="Spark's master (default: local[*])")
    shared.add_argument("--remote", metavar="URL", help="use a Spark Connect server, such as sc://host:15002")
    shared.add_argument(
        "--conf",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of Spark; may be repeated",
    )
    streams = parser.add_argument_group("streams")
    streams.add_argument(
        "--checkpoint",
        type=_folder,
        metavar="PATH",
        help="the folder in which a stream, or ingest, stores its progress",
    )
    trigger = streams.add_mutually_exclusive_group()
    trigger.add_argument(
        "--available-now", action="store_true", help="end when all messages that are due now are done"
    )
    trigger.add_argument(
        "--interval", type="duration", metavar="TIME", help="time between the starts of two batches: 5s, 2m"
    )
    streams.add_argument(
        "--grace",
        type="duration",
        default=30.0,
        metavar="TIME",
        help="how long a running batch may take to finish after SIGTERM (default: 30s)",
    )


def _folder(text: str) -> str:
    # Without a name it would be the root of the file system.
    if not text.strip("/"):
        raise ArgumentTypeError(f"{text!r} is not the path of a folder")
    return text


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ArgumentTypeError(f"{text!r} is not a setting of the form key=value")
    return key, value
