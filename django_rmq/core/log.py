"""What all processes log with: a logger that never raises, a throttle for repeated errors, and the worker's id in each line.

How a line names a message, and whether it may show what a message contains, is decided in ``redaction``.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from typing import Any

from django_rmq.exceptions import LostRace, ServerRefused, ServerTrouble


class SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs like the logger that it wraps, and never raises: an error of a filter or a handler goes to standard error.

    A project may attach filters and handlers to RMQ's loggers, and Python does not catch what a filter raises. If
    such an error ended a worker's thread, the thread's slots would be held without being served.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """See ``logging.Logger.log``."""
        try:
            # One level up is the line that logs.
            self.logger.log(level, msg, *args, stacklevel=2, **kwargs)
        # rule: log_calls_raise
        except Exception:  # noqa: BLE001 - whatever a project's filter or handler raises
            self._report(msg)

    def _report(self, text: object) -> None:
        try:
            sys.stderr.write(f"{self.logger.name}: cannot write this log record: {text}\n")
            traceback.print_exc()
        except Exception:  # noqa: BLE001, S110 - there is no other place to report it to
            pass


def safe_logger(name: str) -> SafeLogger:
    """Return the logger of this name, wrapped so that it never raises."""
    return SafeLogger(logging.getLogger(name), {})


FIRST_SECONDS = 10.0
"""Seconds after a line for which the same kind of error is not logged; doubled each time the error continues."""

LONGEST_SECONDS = 300.0

KINDS = 1_000
"""The number of kinds of errors that are remembered; beyond that the oldest are forgotten."""


class _Streak:
    """A series of errors of one kind without a long pause."""

    __slots__ = ("left_out", "pause", "until")

    def __init__(self, now: float) -> None:
        self.pause = FIRST_SECONDS
        self.until = now + FIRST_SECONDS
        self.left_out = 0


class LogThrottle:
    """Writes the first line about an error to ``logger`` at once, then fewer, with the number left out. Thread-safe.

    A server that is unavailable for ten minutes causes about ten lines of each kind, not thousands. An error that stops and
    comes back later is logged at once again.
    """

    def __init__(self, logger: logging.Logger | SafeLogger) -> None:
        self._logger = logger
        self._streaks: dict[object, _Streak] = {}
        self._lock = threading.Lock()

    def admit(self, kind: object) -> int | None:
        """Return how many of this kind were left out since its last line; None if this one is left out too."""
        now = time.monotonic()
        with self._lock:
            streak = self._streaks.get(kind)
            if streak is not None and now < streak.until:
                streak.left_out += 1
                return None
            if streak is None or not streak.left_out:
                # The error is new, or did not occur since its last line. The dict keeps the order of the last lines.
                self._streaks.pop(kind, None)
                self._streaks[kind] = _Streak(now)
                if len(self._streaks) > KINDS:
                    del self._streaks[next(iter(self._streaks))]
                return 0
            left_out, streak.left_out = streak.left_out, 0
            streak.pause = min(2 * streak.pause, LONGEST_SECONDS)
            streak.until = now + streak.pause
            return left_out

    def __call__(self, kind: object, text: str, error: Exception, *, exc_info: bool = False) -> None:
        """Log ``text``, with ``error`` for its ``%s``, unless the same kind was logged recently.

        An error that may pass by itself is logged as a warning, every other one as an error. ``exc_info``: include the traceback
        in the first line of a series.
        """
        left_out = self.admit(kind)
        if left_out is None:
            return
        text += counted(left_out)
        passes = isinstance(error, (ServerTrouble, LostRace)) and not isinstance(error, ServerRefused)
        self._logger.log(
            logging.WARNING if passes else logging.ERROR,
            text,
            error,
            exc_info=error if exc_info and not left_out else None,
            extra={"rmq_event": "trouble"},
        )


def counted(left_out: int, what: str = "") -> str:
    """Return the end of a line that stands for ``left_out`` others; ``what`` names them."""
    return f" (and {left_out} more {what}{' ' if what else ''}since the last line)" if left_out else ""


SHOWN = 8
"""The number of characters shown of a worker's id, by which the admin and ``rmqworkers`` list it."""

_worker = "-"


def name_worker(worker: str) -> None:
    """Set the id of this process's worker."""
    global _worker  # noqa: PLW0603 - a process has one worker
    _worker = worker


def this_worker() -> str:
    """Return the id of this process's worker; "-" in a process without one."""
    return _worker


class WorkerFilter(logging.Filter):
    """A filter for handlers: it lets all lines through and gives each ``rmq_worker``, the id of the worker.

    The id is "-" in processes without a worker. ``process`` is the id of the process, as always in ``logging``.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Set ``rmq_worker`` of a line, and let it through."""
        record.rmq_worker = _worker[:SHOWN]
        return True
