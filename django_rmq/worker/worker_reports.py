"""What each worker process reports about itself every few seconds: versions, load, memory, and the calls that run longest.

A report is one field of a hash in Redis. A worker that leaves deletes its own, so a report without a live worker is that of
a process that vanished. Reports are only shown: no other worker depends on them, and a report that cannot be written is
skipped. They contain sealed ids, and nothing of the messages themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.script_call import OfKey, RedisCommand
from django_rmq.core.commands.script_keys import Named
from django_rmq.core.consumer.batch import Batch
from django_rmq.core.consumer.slots import uptime
from django_rmq.core.model.keys import reports_key
from django_rmq.exceptions import RmqError
from django_rmq.opaque_ids import sealed_id

REPORT_SECONDS = 5.0
"""Seconds between two reports of a worker."""

FORGET_MS = 3_600_000
"""Milliseconds after which the report of a worker that vanished is deleted."""

CLEANING_SECONDS = 600.0
"""Mean seconds between two looks of a worker for reports to delete."""

CLOCK_SECONDS = 60.0
"""Seconds after which a worker reads the clock of Redis again."""

MOST_CALLS = 20
"""The maximum number of messages in a report: those that have run longest."""

LONGEST_TEXT = 200
"""Maximum length of a text that is read from a report."""

LONGEST_ID = 1_000
"""Maximum length of a sealed id."""

MOST_NUMBER = 1e15
"""The largest number that is read from a report: later than any date that is shown."""


class RunningCall(NamedTuple):
    """A message whose listener runs."""

    topic: str
    id: str
    """The sealed id of the message."""
    since_ms: int
    """When the call of the listener began, by the clock of Redis."""
    attempt: int
    thread: str


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker process as it described itself at ``at_ms``, by the clock of Redis."""

    at_ms: int
    host: str
    pid: int
    version: str
    """The version of django_rmq."""
    python: str
    code: str
    """``RMQ["CODE_VERSION"]``, or an empty text."""
    load: float
    """The number of processes that ran or waited for a processor on its host, in the mean of a minute."""
    memory_mib: float
    """The resident memory of the process."""
    threads: int
    taken: int
    """How many of its threads run a listener."""
    messages: int
    """The number of messages that it holds: running, and waiting for a thread."""
    running: int
    """The number of messages whose listeners run, in threads and in the event loop."""
    calls: tuple[RunningCall, ...]
    """Those that have run longest."""

    def encode(self) -> str:
        """Return the text that Redis keeps."""
        return json.dumps(asdict(self), separators=(",", ":"))


def decode(text: bytes) -> WorkerReport | None:
    """Return the report in a text, or None if another program wrote it."""
    try:
        given = json.loads(text)
        return WorkerReport(
            at_ms=_whole(given["at_ms"]),
            host=_short(given["host"]),
            pid=_whole(given["pid"]),
            version=_short(given["version"]),
            python=_short(given["python"]),
            code=_short(given["code"]),
            load=_finite(given["load"]),
            memory_mib=_finite(given["memory_mib"]),
            threads=_whole(given["threads"]),
            taken=_whole(given["taken"]),
            messages=_whole(given["messages"]),
            running=_whole(given["running"]),
            calls=tuple(
                RunningCall(
                    _short(topic), _short(message, LONGEST_ID), _whole(since), _whole(attempt), _short(thread)
                )
                for topic, message, since, attempt, thread in given["calls"][:MOST_CALLS]
            ),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _whole(value: object) -> int:
    return round(_finite(value))


def _finite(value: object) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value <= MOST_NUMBER:
        raise ValueError("not a number that a worker reports")
    return value


def _short(value: object, longest: int = LONGEST_TEXT) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    # A lone surrogate is no valid text in a page.
    return value[:longest].encode("utf-8", "replace").decode()


def _key(prefix: str, _: str) -> bytes:
    return reports_key(prefix)


_REPORTS = Named(_key, "")


def _known(key: bytes, reply: Any) -> dict[str, WorkerReport]:
    # On connections with RESP3 the reply is a map, otherwise a flat list.
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    found = ((worker.decode("utf-8", "replace")[:LONGEST_TEXT], decode(text)) for worker, text in pairs)
    return {worker: report for worker, report in found if report is not None}


def write_report(worker: str, report: WorkerReport) -> RedisCommand[int]:
    """Keep the report of a worker in place of its last one."""
    return RedisCommand("HSET", _REPORTS, (worker, report.encode()), int)


def read_reports() -> RedisCommand[dict[str, WorkerReport]]:
    """Return the reports of all workers, also of those that vanished."""
    return RedisCommand("HGETALL", _REPORTS, (), OfKey("reports", _known))


def delete_reports(*workers: str) -> RedisCommand[int]:
    """Forget the reports of these workers."""
    return RedisCommand("HDEL", _REPORTS, workers, int)


def running_calls(batches: Iterable[Batch], now_ms: int) -> list[RunningCall]:
    """Return the messages whose listeners run, those that began first first."""
    now, calls = uptime(), list[RunningCall]()
    for batch in batches:
        # The thread may end the call at any time, so both are read once.
        since, thread = batch.running_since, batch.thread
        if since is None or thread is None:
            continue
        since_ms = now_ms - round((now - since) * 1000)
        topic, slot = batch.topic.name, batch.state.slot
        calls += [
            RunningCall(
                topic,
                sealed_id(topic, slot, message.delivery.member),
                since_ms,
                message.max_retries - message.retries_left + 1,
                str(thread.name),
            )
            for message in batch.running()
        ]
    return sorted(calls, key=lambda one: one.since_ms)


class ReportDuty:
    """Writes the reports of one worker, and now and then deletes those of workers that vanished long ago."""

    def __init__(
        self,
        broker: Broker,
        worker: str,
        threads: int,
        code: str,
        batches: Callable[[], list[Batch]],
        memory_mib: Callable[[], float],
    ) -> None:
        self._broker = broker
        self._worker = worker
        self._threads = threads
        self._code = code
        self._batches = batches
        self._memory_mib = memory_mib

    def __call__(self) -> Generator[float, None, None]:
        """Write a report, and yield the seconds until the next one. A worker that ends deletes its report."""
        clock_ms, read_at = 0, float("-inf")
        cleaning = time.monotonic() + random.uniform(0.0, 2 * CLEANING_SECONDS)
        try:
            while True:
                # A report is only for people: the next one follows soon, and the worker says itself that Redis is unavailable.
                with contextlib.suppress(RmqError):
                    if time.monotonic() - read_at > CLOCK_SECONDS:
                        clock_ms, read_at = self._broker.now_ms(), time.monotonic()
                    now_ms = clock_ms + round((time.monotonic() - read_at) * 1000)
                    self._broker.run(write_report(self._worker, self.report(now_ms)))
                    if time.monotonic() >= cleaning:
                        cleaning = time.monotonic() + random.uniform(0.0, 2 * CLEANING_SECONDS)
                        self.forget(now_ms)
                yield REPORT_SECONDS
        finally:
            self._broker.run(delete_reports(self._worker))

    def report(self, now_ms: int) -> WorkerReport:
        """Return what this worker is at this moment."""
        from django_rmq import __version__  # the package imports this module

        batches = self._batches()
        calls = running_calls(batches, now_ms)
        taken = {
            id(thread)
            for one in batches
            if one.steps is None and one.running_since and (thread := one.thread)
        }
        return WorkerReport(
            at_ms=now_ms,
            host=platform.node(),
            pid=os.getpid(),
            version=__version__,
            python=platform.python_version(),
            code=self._code,
            load=round(_load(), 2),
            memory_mib=round(self._memory_mib(), 1),
            threads=self._threads,
            taken=len(taken),
            messages=sum(len(one.messages) - one.reported for one in batches),
            running=len(calls),
            calls=tuple(calls[:MOST_CALLS]),
        )

    def forget(self, now_ms: int) -> None:
        """Delete the reports of workers that have not reported for an hour."""
        reports = self._broker.run(read_reports())
        old = [worker for worker, one in reports.items() if one.at_ms < now_ms - FORGET_MS]
        if old:
            self._broker.run(delete_reports(*old))


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


__all__ = [
    "FORGET_MS",
    "REPORT_SECONDS",
    "ReportDuty",
    "RunningCall",
    "WorkerReport",
    "decode",
    "delete_reports",
    "read_reports",
    "running_calls",
    "write_report",
]
