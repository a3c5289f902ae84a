"""``manage.py runrmqconsumers``: a worker process that runs the listeners.

Exit codes: 0 clean, 1 forced (the shutdown time-out or a second signal), 2 usage or configuration,
3 Redis does not answer at the start. The first SIGTERM or SIGINT lets running listeners end and gives
the rest back; the second leaves at once.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from typing import Any

from django.core.management.base import CommandError

from django_rmq import consuming
from django_rmq.conf import get_config
from django_rmq.consumer import Dispatcher
from django_rmq.management import RmqCommand

_LEVELS = {0: logging.ERROR, 1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG}


def _at_least(low: float, kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a number") from None
        if value < low:
            raise ArgumentTypeError(f"must be at least {low:g}, got {text}")
        return value

    return parse


class Command(RmqCommand):
    """Consume topics until told to stop."""

    help = (
        "Run the listeners of the named topics (default: of all topics that have one). Exit codes: "
        "0 clean, 1 forced, 2 usage or configuration, 3 Redis away at the start."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topics", nargs="*", metavar="topic", help="only these topics")
        parser.add_argument("--exclude", action="append", default=[], metavar="TOPIC", help="not this topic")
        parser.add_argument(
            "-t", "--threads", type=_at_least(1, int), help="listeners that run at once in this process"
        )
        parser.add_argument("--burst", action="store_true", help="end when nothing can be taken any more")
        parser.add_argument(
            "--max-messages", type=_at_least(1, int), metavar="N", help="end after about so many messages"
        )
        parser.add_argument(
            "--max-idle-time",
            type=_at_least(0, float),
            metavar="SECONDS",
            help="end after so long without one",
        )
        parser.add_argument(
            "--shutdown-timeout",
            type=_at_least(0, float),
            metavar="SECONDS",
            help="how long running listeners may take to end",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        _log_to_stderr(options["verbosity"])
        asked: list[int] = []
        running: list[Dispatcher] = []

        def ask(number: int, frame: object) -> None:
            if asked:
                os._exit(1)
            asked.append(number)
            if not running:
                sys.exit(0)  # nothing has been taken yet
            running[0].stop()

        previous = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            dispatcher = self._dispatcher(options)
            running.append(dispatcher)
            # What is loaded by now stays: the collector need not look at it again between messages.
            gc.collect()
            gc.freeze()
            dispatcher.run()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if options["verbosity"]:
            self.stdout.write(f"Settled {dispatcher.processed} deliveries")
            self.stdout.flush()
        if dispatcher.forced:
            error = "not all messages could be settled in time; they are left to time out"
            if getattr(self, "_called_from_command_line", False):
                # Listeners still run: neither they nor the event loops of async ones may hold up the end.
                self.stderr.write(f"CommandError: {error}")
                self.stderr.flush()
                os._exit(1)
            raise CommandError(error, returncode=1)

    def _dispatcher(self, options: dict[str, Any]) -> Dispatcher:
        config = get_config()
        topics = consuming.chosen_topics(options["topics"], options["exclude"])
        threads = options["threads"] or config.consumer.threads
        dispatcher = consuming.build_dispatcher(
            topics,
            threads=threads,
            burst=options["burst"],
            shutdown_timeout=options["shutdown_timeout"],
            max_messages=options["max_messages"] or config.consumer.max_messages,
            max_idle_time=(
                config.consumer.max_idle_time
                if options["max_idle_time"] is None
                else options["max_idle_time"]
            ),
        )
        if options["verbosity"]:
            self.stdout.write(consuming.ready_line(topics, threads))
            self.stdout.flush()
        return dispatcher


def _log_to_stderr(verbosity: int) -> None:
    """Show our log lines if the project's LOGGING does not handle them; change nothing of the project's."""
    ours = logging.getLogger("django_rmq")
    if not ours.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(_LEVELS[verbosity])
