"""``manage.py runrmqconsumers``: worker processes that run the listeners.

The parent runs the project's system checks, waits until Redis and ZooKeeper answer, then forks and watches the
workers. Exit codes: 0 clean, 1 forced (the shutdown time-out or a second signal), 2 usage or configuration, 3 Redis
or ZooKeeper refuses the worker (or does not answer, with --burst), 4 the watchdog killed the last live worker
process, 5 a listener exceeded HARD_TIMEOUT while its process was ending.

The first SIGTERM or SIGINT lets running listeners end and gives the rest back; the second leaves at once.
SIGHUP replaces all processes, SIGUSR1 writes the stack of every thread to standard error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
from argparse import Action, ArgumentParser, BooleanOptionalAction
from collections.abc import Callable
from typing import Any, TypeVar

from django.core.management.base import CommandError

from django_rmq import connections
from django_rmq.conf import get_config, is_debug
from django_rmq.conf.settings_reader import Consumer
from django_rmq.core import forked_copies
from django_rmq.core.log import WorkerFilter, safe_logger
from django_rmq.core.model.topic import Topic
from django_rmq.core.worker_processes.child_process import RECYCLE
from django_rmq.core.worker_processes.supervisor import handling_signals, stopping_or_leaving
from django_rmq.exceptions import ConfigurationError
from django_rmq.management.rmq_command import Options, RmqCommand, at_least, discard_output, duration
from django_rmq.worker import reload as reloading
from django_rmq.worker import startup
from django_rmq.worker import worker_process as forking
from django_rmq.worker.worker_process import ProcessOptions, WorkerProcess

logger = safe_logger("django_rmq.consumer")

T = TypeVar("T")

LINE = "%(asctime)s %(levelname)s %(process)d %(rmq_worker)s %(threadName)s %(message)s"
"""The format of RMQ's log lines if the project's LOGGING has none for them."""

_LEVELS = {0: logging.ERROR, 1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG}

ENVIRONMENT = "RMQ_CONSUMER_"
"""Every flag may come from an environment variable too: RMQ_CONSUMER_MAX_MESSAGES for --max-messages."""

_FIELDS = {"health_addr": "health_address"}
"""Flags whose setting has another name."""


def _describe(action: Action, settings: Consumer, given: str | None) -> None:
    """Name the default of a flag and its environment variable in the help."""
    field = _FIELDS.get(action.dest, action.dest)
    default = ""
    if given or hasattr(settings, field):
        value = given or getattr(settings, field)
        number = f"{value:g}" if isinstance(value, float) else str(value)
        # argparse takes a percent sign in a help text for the beginning of a format.
        default = f" (default: {'none' if value is None else number})".replace("%", "%%")
    action.help = f"{action.help}{default} [{ENVIRONMENT}{action.dest.upper()}]"


def _settings() -> Consumer:
    """Return ``RMQ["CONSUMER"]``; the defaults if the settings are wrong, because help must not depend on them."""
    try:
        return get_config().consumer
    except ConfigurationError:
        return Consumer()


def _from_environment(parser: ArgumentParser, action: Action, given: str | None) -> None:
    """Take the default of a flag from an environment variable."""
    name = f"{ENVIRONMENT}{action.dest.upper()}"
    if not given:
        return
    if action.dest in ("topics", "exclude"):
        action.default = given.replace(",", " ").split()
    elif action.nargs == 0:
        if given.lower() not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            parser.error(f"{name} is {given!r}: it must be 1 or 0")
        action.default = given.lower() in ("1", "true", "yes", "on")
    else:
        action.default = given  # argparse reads it as if it had been typed


class Command(RmqCommand):
    """Consume topics until told to stop."""

    help = (
        "Run the listeners of the named topics (default: of all topics that have one). Exit codes: 0 clean, "
        "1 forced, or a process failed while ending, 2 usage or configuration, 3 Redis or ZooKeeper refuses the "
        "worker, 4 the watchdog, 5 a listener exceeded HARD_TIMEOUT while its process was ending. "
        'Defaults of the options: the environment variable in brackets, else RMQ["CONSUMER"].'
    )
    requires_system_checks = "__all__"

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command. While it loads the project, it has no processes to replace, but a stack to write."""
        for number in (signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, _heed_while_loading)
        super().run_from_argv(argv)

    def add_arguments(self, parser: ArgumentParser) -> None:
        settings = _settings()

        def add(*names: str, **options: Any) -> None:
            action = parser.add_argument(*names, **options)
            from_environment = os.environ.get(f"{ENVIRONMENT}{action.dest.upper()}")
            _describe(action, settings, from_environment)
            _from_environment(parser, action, from_environment)

        whole = at_least(1)
        add("topics", nargs="*", metavar="topic", help="only these topics")
        add("--exclude", action="append", default=[], metavar="TOPIC", help="do not consume this topic")
        add("-p", "--processes", type=whole, metavar="N", help="worker processes")
        add("-t", "--threads", type=whole, metavar="N", help="parallel listeners in each process")
        add("--burst", action="store_true", help="end when no message is due")
        add("--max-messages", type=whole, metavar="N", help="replace a process after about N messages")
        add(
            "--max-memory",
            type=whole,
            metavar="MIB",
            help="replace a process that uses more memory than this",
        )
        add("--max-idle-time", type=duration, metavar="TIME", help="end after this time without a message")
        add(
            "--shutdown-timeout",
            type=duration,
            metavar="TIME",
            help="how long running listeners may take to finish at shutdown",
        )
        add(
            "--watchdog",
            type=duration,
            metavar="TIME",
            help="kill a process whose main loop (not a listener) makes no progress for this time; 0: never",
        )
        self._add_watching(add)

    @staticmethod
    def _add_watching(add: Callable[..., None]) -> None:
        """Add the options for watching processes, and the alternatives to running them."""
        add(
            "--heartbeat-file",
            metavar="PATH",
            help="a file that is touched while all processes make progress",
        )
        add(
            "--reload",
            action=BooleanOptionalAction,
            help="restart when the code changes (default: settings.DEBUG)",
        )
        add(
            "--dry-run",
            action="store_true",
            help="load settings and listeners, print what would be consumed, and exit",
        )
        add("--health-addr", metavar="HOST:PORT", help="serve GET /live and /ready at this address")

    def handle(self, *args: object, **options: Any) -> None:
        _log_to_stderr(options["verbosity"])
        config = get_config().consumer
        topics = startup.chosen_topics(options["topics"], options["exclude"])
        how = ProcessOptions(
            threads=options["threads"] or config.threads,
            burst=options["burst"],
            shutdown_timeout=_or_default(options["shutdown_timeout"], config.shutdown_timeout),
            max_messages=options["max_messages"] or config.max_messages,
            max_memory=options["max_memory"] or config.max_memory,
            max_idle_time=_or_default(options["max_idle_time"], config.max_idle_time),
            run_parts=_run_parts,
        )
        processes = options["processes"] or config.processes
        if options["dry_run"]:
            self.stdout.write(startup.ready_line(topics, how.threads or 1, processes))
            return
        if connections.in_memory():
            code, settled = self._run_here(startup.check_start(topics), how, options["verbosity"])
        else:
            code, settled = self._run_processes(topics, how, processes, options)
        self._print(options["verbosity"], f"Settled {settled} deliveries")
        if code:
            raise CommandError(_REASONS.get(code, f"a worker process failed ({code})"), returncode=code)

    def _print(self, verbosity: int, text: str) -> None:
        # A worker does not depend on whether anybody reads what it prints.
        with contextlib.suppress(OSError):
            if verbosity:
                self.stdout.write(text)
                self.stdout.flush()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                discard_output(stream)

    def _run_processes(
        self, topics: list[Topic], how: ProcessOptions, processes: int, options: Options
    ) -> tuple[int, int]:
        """Run as the parent of the workers; return the exit code, and how many deliveries were settled."""
        config = get_config().consumer
        # A restart replaces the process, which after ``call_command`` is a program of the project.
        reloads = _or_default(options["reload"], is_debug()) and getattr(
            self, "_called_from_command_line", False
        )
        watch = reloading.SourceWatch() if reloads else None
        supervisor = forking.supervise(
            topics,
            how,
            processes=processes,
            shutdown_timeout=how.shutdown_timeout,
            watchdog=_or_default(options["watchdog"], config.watchdog) or None,
            **({"changed": watch} if watch else {}),
            heartbeat_file=options["heartbeat_file"] or config.heartbeat_file,
            health_address=options["health_addr"] or config.health_address,
            # A burst is often started by a timer, and the next one would wait beside it.
            prepare=startup.StartCheck(topics, waits=not how.burst),
            ready=lambda: self._print(
                options["verbosity"], startup.ready_line(topics, how.threads or 1, processes)
            ),
        )
        try:
            code = supervisor.run()
        finally:
            if watch is not None:
                watch.end_trial()
        if supervisor.begin_anew:
            forking.before_fork()
            reloading.start_again()
        return code, supervisor.processed

    def _run_here(self, topics: list[Topic], how: ProcessOptions, verbosity: int) -> tuple[int, int]:
        """Run as the only worker, because no other process can use a broker in memory."""
        logger.warning(
            'Messages are in the memory of this process, because of RMQ["TESTING"] or RMQ["BROKER"]: only what its own listeners '
            "and schedules send is consumed, and all of it ends with the process"
        )
        worker = WorkerProcess(topics, how)
        ask = stopping_or_leaving(worker.stop)
        with handling_signals(ask, signal.SIGTERM, signal.SIGINT, install=forked_copies.handle_signal):
            self._print(verbosity, startup.ready_line(topics, how.threads or 1))
            code = worker.run()
        return (0 if code == RECYCLE else code), worker.dispatcher.processed


_REASONS = {
    1: "not all messages were settled in time, or a process had to be killed; see the log above",
    2: "a worker process could not start, see the log above",
    3: "a worker process could not reach Redis or ZooKeeper; see the log above",
    4: "the watchdog killed the last live worker process",
    5: "a listener exceeded HARD_TIMEOUT while its process was ending; see the log above",
}


def _heed_while_loading(number: int, frame: object) -> None:
    """Write the stack of every thread at SIGUSR1, and do nothing at SIGHUP. By default either ends a process."""
    if number == signal.SIGUSR1:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            faulthandler.dump_traceback(all_threads=True)


def _run_parts(worker: str, is_over: Callable[[], bool]) -> bool:
    # A worker without an action does not load what pages and commands do.
    from django_rmq.operations.bulk_actions import run_parts

    return run_parts(worker, is_over)


def _or_default(option: T | None, default: T) -> T:
    return default if option is None else option


def _log_to_stderr(verbosity: int) -> None:
    """Show RMQ's log lines if the project's LOGGING does not handle them; change nothing of the project's."""
    ours = logging.getLogger("django_rmq")
    if not ours.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(LINE))
        handler.addFilter(WorkerFilter())
        ours.addHandler(handler)
        ours.setLevel(_LEVELS[verbosity])
