"""The name of the worker in its log lines: the id by which the admin and ``rmqworkers`` list it."""

from __future__ import annotations

import logging

SHOWN = 8
"""The number of characters of a worker's id that are shown."""

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
