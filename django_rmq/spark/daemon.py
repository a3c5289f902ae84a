"""Spark's daemon of Python workers for a local session, without a traceback for each worker that Spark has done with.

Spark closes the socket of a worker that plans a read or a write as soon as it has the answer. If the worker has then
something left to flush, PySpark prints a traceback, and a job that has done all its work looks as if it had failed.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from pyspark import daemon


class Tracebacks:
    """The module ``traceback``, as the daemon of PySpark uses it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self) -> None:
        """Print the error that is being handled, unless Spark has closed the socket."""
        if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError)):
            traceback.print_exc()


if __name__ == "__main__":
    vars(daemon)["traceback"] = Tracebacks()
    daemon.manager()
