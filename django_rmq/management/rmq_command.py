"""The common part of the commands of manage.py: errors in one line, exit codes, and what several of them read and print.

Exit codes: 0 all is well, 1 it is not, 2 usage or configuration, 3 Redis or the coordinator, 141 nobody reads the output.
"""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from io import TextIOWrapper
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TextIO

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser, SystemCheckError
from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_naive, make_aware

from django_rmq.core.model import bounds
from django_rmq.core.model.body_codec import dumps
from django_rmq.core.model.bounds import LARGEST, MAX_AGE
from django_rmq.core.model.status import STATE_OF
from django_rmq.core.model.topic import Topic
from django_rmq.core.worker_processes.supervisor import handling_signals, stopping_or_leaving
from django_rmq.durations import InvalidDuration, parse_duration
from django_rmq.exceptions import LostRace, RmqError, ServerTrouble

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from django_rmq.core.model.stored_actions import ActionKind, ActionProgress
    from django_rmq.operations import BulkProgress, BulkRun, Filter, Operations

UNREAD = 128 + signal.SIGPIPE
"""The exit code of a command whose output nobody reads any more: that of a Unix tool which ended by SIGPIPE."""

UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Why output is not written: the disk is full, a quota or the largest size of a file is reached, or the device fails."""

Options = Mapping[str, Any]
"""The options of a command as argparse has read them."""


class UsageError(CommandError):
    """The options of a command do not fit together, or a value is not valid."""

    def __init__(self, text: str) -> None:
        super().__init__(text, returncode=2)


def refuse_beside(flag: str, options: Options, *names: str) -> None:
    """Raise ``UsageError`` if one of these options is given, which a command with ``flag`` would ignore."""
    for name in names:
        if options.get(name) is not None and options[name] is not False:
            raise UsageError(f"--{name.replace('_', '-')} cannot be used with {flag}")


def exit_code_of(error: type[RmqError]) -> int:
    """Return the exit code of a command that ends with an error."""
    return 3 if issubclass(error, ServerTrouble) else 1 if issubclass(error, LostRace) else 2


class RmqCommand(BaseCommand):
    """A command whose RMQ errors become one line and an exit code."""

    # Operators need these commands most when the project is broken, and probes run them often. They run none of
    # the project's code, and report wrong settings of RMQ in one line. Commands that do run it set "__all__".
    requires_system_checks: list[str] | tuple[str, ...] | Literal["__all__"] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        _open_missing_streams()
        super().__init__(*args, **options)

    ended_early: CommandError | ServerTrouble | None = None
    """Why ``follow`` has ended a long operation that had done something."""

    purpose: Literal["web", "worker"] = "worker"
    """The connections of the command. Those of a worker wait for an answer of Redis for some seconds, those of a page for one."""

    def create_parser(self, prog_name: str, subcommand: str, **options: Any) -> CommandParser:
        """Return the parser, which refuses options with the value ``--``."""
        parser = super().create_parser(prog_name, subcommand, **options)
        parse_args: Callable[..., Namespace] = parser.parse_args

        def checked(args: Sequence[str] | None = None, namespace: Namespace | None = None) -> Namespace:
            for text in takewhile(lambda text: text != "--", sys.argv[1:] if args is None else args):
                # Python before 3.13 drops such a value, and the option gets an empty list, whatever its type.
                if name := re.fullmatch("(--[^=]+)=--|(-[a-zA-Z])--", text):
                    parser.error(f"argument {name[1] or name[2]}: its value cannot be --")
            return parse_args(args, namespace)

        parser.parse_args = checked  # type: ignore[assignment, method-assign]
        return parser

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command. If nobody reads its errors, its exit code is the same."""
        if _has_no_reader(sys.stderr):
            discard_output(sys.stderr)
        # Bodies have any characters, and a terminal or a file of another encoding than UTF-8 does not.
        if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")
        super().run_from_argv(argv)

    def check(self, *args: Any, **options: Any) -> None:
        """Run system checks. Warnings that nobody reads do not keep the command from running.

        The checks of models ask no database. Django 6.1 lets them connect to every MySQL, and would wait for one that hangs.
        """
        try:
            super().check(*args, **{"databases": [], **options})
        except BrokenPipeError:
            discard_output(sys.stderr)

    def execute(self, *args: object, **options: object) -> str | None:
        """Run the command; raises ``CommandError`` for any error of RMQ or the settings, and for failed system checks."""
        try:
            try:
                return super().execute(*args, **options)
            finally:
                # Python would report at its end that what is left in a buffer cannot be written, with an exit code of its own.
                self.stdout.flush()
        except SystemCheckError as error:
            error.returncode = 2
            raise
        except RmqError as error:
            raise CommandError(one_line(str(error)), returncode=exit_code_of(type(error))) from error
        except ImproperlyConfigured as error:  # Such as a project without DATABASES
            raise CommandError(one_line(str(error)), returncode=2) from error
        except BrokenPipeError:
            discard_output(sys.stdout)
            raise SystemExit(UNREAD) from None
        except OSError as error:
            if error.errno not in UNWRITTEN:
                raise
            discard_output(sys.stdout)
            raise CommandError(f"not all was written: {error.strerror}", returncode=1) from error

    def operations(self, *, as_shown: bool = False) -> Operations:
        """Return the operations of a shell, to which everything is permitted. The audit trail names its user.

        ``as_shown``: topics with a FORMATTER are read as it shows them, for commands that print bodies.
        """
        # A worker runs none of them, and is started often.
        from django_rmq.operations import Actor, Operations

        return Operations(Actor.of_shell(as_shown=as_shown), self.purpose)

    def topics(self, names: Sequence[str]) -> list[Topic]:
        """Return the topics of these names, or all. Raises ``UnknownTopic``."""
        config = self.operations().config
        return [config.topic(name) for name in names] if names else list(config.topics.values())

    def follow(self, run: BulkRun, what: str, options: Options) -> BulkProgress:
        """Complete a long operation, with a progress bar on a terminal; Ctrl-C ends it in order.

        If Ctrl-C or a server ends it, ``raise_problems`` raises the error, after the caller has printed what was done.
        """
        is_quiet = options.get("json") or options["verbosity"] == 0 or not sys.stderr.isatty()
        with _progress_bar(what, quiet=is_quiet) as show:
            try:
                for progress in run:
                    show(progress)
            except KeyboardInterrupt:
                run.close()
                self.ended_early = CommandError("stopped by Ctrl-C", returncode=1)
            except ServerTrouble as error:
                if not run.progress.done:
                    raise
                self.ended_early = error
        return run.progress

    def confirm(self, question: str, wanted: str, options: Options) -> None:
        """Go on only if the person types ``wanted``; raises ``CommandError`` otherwise."""
        if not options["interactive"]:
            return
        if not sys.stdin.isatty():
            raise UsageError(f"{question} Use --no-input if the command cannot ask")
        try:
            answer = input(f"{question} Type {wanted} to continue: ").strip()
        except (EOFError, KeyboardInterrupt):  # Ctrl-D and Ctrl-C
            answer = ""
        if answer != wanted:
            raise CommandError("nothing was done", returncode=1)

    def print_json(self, value: object) -> None:
        self.stdout.write(dumps(value, indent=2))

    @contextmanager
    def printing_rows(self, options: Options) -> Iterator[list[dict[str, Any]]]:
        """Give the block a list for a row of each thing that it does; print it with --json, also if the block fails."""
        rows: list[dict[str, Any]] = []
        try:
            yield rows
        finally:
            if options["json"]:
                self.print_json(rows)

    def print_answer(self, value: object, text: str, options: Options) -> None:
        """Print an answer: ``value`` with the option --json, otherwise ``text``."""
        if options["json"]:
            self.print_json(value)
        else:
            self.stdout.write(text)

    def print_table(self, rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> None:
        """Print rows in aligned columns, those in ``right`` aligned to the right."""
        self.print_lines(table(rows, right=right))

    def print_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.stdout.write(line)

    def confirmed(
        self, name: str, count: Callable[[], BulkRun], done: str, question: str, word: str, options: Options
    ) -> bool:
        """Count the messages of a long operation on topic ``name``, and return whether to do it.

        A dry run, or an operation that concerns nothing, ends here, with a line that says how many would be ``done``.
        Else the number and ``question`` are shown, and the user has to type ``word``.
        """
        if not (options["dry_run"] or options["interactive"]):
            return True
        counted = self.follow(count(), f"count {name}", options)
        matching = counted.outcomes.get("matching", 0)
        if options["dry_run"] or not matching or self.ended_early:
            self.print_count(name, counted, done, options)
            self.raise_problems(counted)
            return False
        number = messages_text(min(matching, options["limit"] or matching))
        self.confirm(f"{number} {question}", word, options)
        return True

    def print_count(self, what: str, progress: BulkProgress, done: str, options: Options) -> None:
        """Print how many messages a dry run has counted; ``done`` is what would be done to them."""
        count = progress.outcomes.get("matching", 0)
        limit = options.get("limit") or count
        more = f" (at most {limit} of {count})" if limit < count else _rest(progress)
        text = f"{what}: {messages_text(min(count, limit))} would be {done}{more}"
        self.print_answer(progress_as_json(progress), text, options)

    def print_outcomes(self, what: str, progress: BulkProgress, options: Options) -> None:
        """Print how a long operation ended; raises the errors of ``raise_problems``."""
        text = f"{what}: {outcomes_text(progress.outcomes)}{_rest(progress)}"
        self.print_answer(progress_as_json(progress), text, options)
        self.raise_problems(progress)

    def start_in_background(
        self, kind: ActionKind, state: str, wanted: Filter, options: Options, **how: Any
    ) -> None:
        """Let workers do an action on all messages that ``wanted`` selects, and print which it is."""
        if options["limit"] is not None:
            raise UsageError("--background takes no --limit")
        started = self.operations().start_action(options["topic"], kind, state, wanted, **how)
        action = started.action
        number = messages_text(action.total) if action.is_exact else f"up to {messages_text(action.total)}"
        text = f"{action.id}: {action.kind} of {number} of {action.topic}, in the background"
        self.print_answer(action_as_json(started, action.started_ms), text, options)

    def raise_problems(self, progress: BulkProgress) -> None:
        """Raise an error if a long operation was ended early, or part of it could not be done."""
        if self.ended_early:
            raise self.ended_early
        if progress.problems:
            raise CommandError(
                one_line(f"{len(progress.problems)} slots failed: {progress.problems[0]}"), returncode=1
            )


def progress_as_json(progress: BulkProgress) -> dict[str, object]:
    """Return how a long operation ended, for JSON."""
    return {
        "outcomes": progress.outcomes,
        "done": progress.done,
        "total": progress.total,
        "complete": progress.is_complete,
        "problems": list(progress.problems),
        **({"undo": progress.undo, "kept": progress.kept} if progress.undo else {}),
    }


def action_as_json(one: ActionProgress, now_ms: int) -> dict[str, object]:
    """Return an action in the background for JSON, with the names of REST."""
    action = one.action
    return {
        "action_id": action.id,
        "action": action.kind,
        "topic": action.topic,
        "state": STATE_OF.get(action.state, action.state),
        "selection": action.described,
        "status": one.state(now_ms),
        "done": one.done,
        "total": action.total,
        "exact": action.is_exact,
        "outcomes": one.outcomes,
        "rate": one.rate(now_ms),
        "seconds_left": one.seconds_left(now_ms),
        "started_by": action.by,
        "started_ms": action.started_ms,
        "stopped_by": one.stopped_by or None,
        "ended_ms": one.ended_ms,
        "problem": one.problem,
    }


def _rest(progress: BulkProgress) -> str:
    return "" if progress.is_complete else f" (stopped after {progress.done} of {progress.total})"


def messages_text(count: int) -> str:
    """Return a number of messages in words."""
    return f"{count} message" if count == 1 else f"{count} messages"


def _open_missing_streams() -> None:
    """Open the standard streams that were closed when Python began, because it has None in their place.

    Otherwise Django could not write to them, and the next socket would be where C code writes its output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - until the process ends


PROGRESS_SECONDS = 2.0
"""Seconds between two lines of progress without rich."""


@contextmanager
def _progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[BulkProgress], None]]:
    if quiet:
        yield lambda progress: None
        return
    try:
        bar = _rich_bar()
    except ImportError:
        yield _ProgressLines(what).show
        return
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda progress: bar.update(task, completed=progress.done, total=progress.total or None)


def _rich_bar() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Standard output is for the result, which another program may read.
    return RichProgress(*columns, console=Console(file=sys.stderr), transient=True)


class _ProgressLines:
    """Writes a line from time to time."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next = time.monotonic() + PROGRESS_SECONDS

    def show(self, progress: BulkProgress) -> None:
        """Write a line, unless the last one is recent."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_SECONDS
            sys.stderr.write(f"{self._what}: {progress.done} of {progress.total}\n")


def ended_by_signals(end: Callable[[int, FrameType | None], object]) -> AbstractContextManager[None]:
    """Call ``end`` for each SIGTERM and SIGINT, even if the program that has started the command has blocked them."""
    return handling_signals(end, signal.SIGTERM, signal.SIGINT)


def stopped_by_signals(stop: Callable[[], object]) -> AbstractContextManager[None]:
    """Call ``stop`` at the first request by SIGTERM or SIGINT, and end the process at the second one."""
    return ended_by_signals(stopping_or_leaving(stop))


def _has_no_reader(stream: TextIO) -> bool:
    """Return whether a stream is a pipe or socket whose other end is closed."""
    try:
        poll = select.poll()
        # ``poll`` reports that the other end is closed, even if no event is asked for.
        poll.register(stream.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False  # It is no file, or it is closed.


def discard_output(stream: TextIO) -> None:
    """Discard what is written to a stream whose reader has gone. Python would report that once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def allow_options_between_arguments(parser: ArgumentParser) -> None:
    """Let ``parser`` take its last, optional argument after options, too: ``rmqreslot prices --dry-run 128``.

    Python before 3.12.8 and 3.13.1 takes an optional argument as missing if an option comes before it.
    """
    parser.parse_args = parser.parse_intermixed_args  # type: ignore[method-assign]


def outcomes_text(outcomes: dict[str, int]) -> str:
    """Return outcomes in readable form."""
    counts = ", ".join(f"{count} {word.replace('_', ' ')}" for word, count in outcomes.items() if count)
    return counts or "nothing to do"


def one_line(text: str) -> str:
    """Return ``text`` as one line without control sequences for the terminal."""
    line = " ".join(text.split())
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line
    )


def seconds_of(ms: float | None) -> float | None:
    """Return milliseconds as seconds. None: None."""
    return None if ms is None else ms / 1000


def ago(seconds: float | None) -> str:
    """Return a duration in readable form, in its largest unit. None: a dash."""
    if seconds is None:
        return "-"
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def age_of_oldest(due: float | None, not_empty: float | None) -> str:
    """Return for how many seconds the oldest message has been due, in readable form.

    Messages of priority topics hold no time. There it is at most the time for which a slot has not been empty.
    """
    return ago(due) if not_empty is None else f"≤ {ago(not_empty)}"


def duration(text: str, least: float = 0.0) -> float:
    """Read seconds from ``90``, ``250ms``, ``15m``, ``2h`` or ``7d``, as an argument's type."""
    try:
        return parse_duration(text, timedelta(seconds=least)).total_seconds()
    except InvalidDuration as error:
        raise ArgumentTypeError(f"must be {error.typed}, got {error.given}") from None


def instant_of(flag: str, text: str) -> datetime:
    """Read a date and time that a person has typed: in TIME_ZONE, unless it has an offset. Raises ``CommandError``."""
    try:
        instant = parse_datetime(text)
    except ValueError:
        instant = None
    if instant is None:
        raise UsageError(f"{flag} {text!r} is not a date and time such as 2026-12-24T18:00")
    return make_aware(instant) if is_naive(instant) else instant


def at_least(low: float, kind: type[int | float] = int) -> Callable[[str], float]:
    """Return an argument's type: a number from ``low`` up to the maximum for counts (int) or waiting times (float)."""
    high = LARGEST if kind is int else MAX_AGE

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise ArgumentTypeError(f"{text[:80]!r} is not a number") from None
        if not value >= low:
            raise ArgumentTypeError(f"must be at least {low:g}, got {bounds.abbreviated(value)}")
        if value > high:
            raise ArgumentTypeError(f"must be at most {high}, got {bounds.abbreviated(value)}")
        return value

    return parse


def table(rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> list[str]:
    """Return rows as lines with aligned columns; the columns in ``right`` are aligned to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    ]
