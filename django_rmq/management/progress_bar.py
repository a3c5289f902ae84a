"""Progress of long operations: a bar if rich is installed, plain lines otherwise, nothing without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from django_rmq.operations import BulkProgress, BulkRun

PLAIN_SECONDS = 2.0
"""Seconds between two lines without rich."""


class _Show(Protocol):
    def __call__(self, progress: BulkProgress) -> None: ...


def follow(run: BulkRun, what: str, *, quiet: bool) -> BulkProgress:
    """Complete ``run`` and return how it ended. Ctrl-C stops it; what has been done is returned."""
    with _bar(what, quiet=quiet or not sys.stderr.isatty()) as show:
        try:
            for progress in run:
                show(progress)
        except KeyboardInterrupt:
            run.close()
    return run.progress


@contextmanager
def _bar(what: str, *, quiet: bool) -> Iterator[_Show]:
    if quiet:
        yield lambda progress: None
        return
    try:
        bar: Any = _rich_bar()
    except ImportError:
        yield _Plain(what).show
        return
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda progress: bar.update(task, completed=progress.done, total=progress.total or None)


def _rich_bar() -> object:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return RichProgress(*columns, console=Console(file=sys.stderr), transient=True)


class _Plain:
    """Writes a line from time to time."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next = time.monotonic() + PLAIN_SECONDS

    def show(self, progress: BulkProgress) -> None:
        """Write a line, unless the last one is recent."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PLAIN_SECONDS
            sys.stderr.write(f"{self._what}: {progress.done} of {progress.total}\n")
