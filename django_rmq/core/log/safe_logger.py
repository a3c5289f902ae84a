"""Loggers that never raise, for threads that must not end.

A project may attach filters and handlers to RMQ's loggers, and Python does not catch what a filter raises. If
such an error ended a worker's thread, the thread's slots would be held without being served.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any


class SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs like the logger that it wraps. An error of a filter or a handler goes to standard error."""

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
