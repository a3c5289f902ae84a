"""The record writer: it writes the records of attempts to Redis, many in one round trip.

The start of an attempt is written once it has run for ``TURN_SECONDS``, because most attempts end before. The end of an attempt
is written before its message is acknowledged. Threads that wait for such writes at the same time share a round trip, and so
do the ends of short tasks that follow each other in a thread. What a record says is decided in ``tasks.execution``.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.script_call import Call
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.threads import call_in_thread, start_daemon
from django_rmq.exceptions import RmqError, ServerTrouble, ServerUnavailable

logger = safe_logger("django_rmq.tasks")

TURN_SECONDS = 0.02
"""Seconds between two turns of the thread that writes. So long a task runs before its start is written, and ends wait."""

FULL = 32
"""The number of waiting ends from which the next thread waits until they are written."""

PATIENCE = 10.0
"""Seconds for which the end of a task waits for Redis to have its record."""

PAUSE = 0.2


class Begun(Protocol):
    """An attempt that has begun."""

    ended: bool

    def start(self) -> Call[str]:
        """Return the call that records that the attempt runs."""


@dataclass(eq=False, slots=True)
class Write:
    """A record on its way to Redis."""

    call: Call[str]
    until: float = field(default_factory=lambda: time.monotonic() + PATIENCE)
    is_over: bool = False
    """Whether Redis has the record, or has refused it: then ``error`` says why."""
    error: BaseException | None = None


class RecordWriter:
    """Writes the records of this process. ``broker`` is called in the threads that write. Safe to share between threads."""

    def __init__(self, broker: Callable[[], Broker]) -> None:
        self._broker = broker
        self._begun: deque[tuple[float, Begun]] = deque()
        """The attempts that have begun, and when."""
        self._waiting: deque[Write] = deque()
        self._writing = threading.Lock()
        """Held during a round trip. A thread that waits for it finds its write done, or writes all that wait by then."""
        self._trip: asyncio.Task[bool] | None = None
        """The last round trip for coroutines of an event loop."""
        self._wanted = threading.Event()
        self._starting = threading.Lock()
        self._pid = 0
        self._log_throttled = LogThrottle(logger)

    def begin(self, attempt: Begun) -> None:
        """Write the start of ``attempt`` soon, if it does not end before."""
        self._begun.append((time.monotonic(), attempt))
        self._wake()

    def write(self, call: Call[str]) -> None:
        """Write a record now. Raises ``RmqError`` if it is refused, or if Redis is unavailable for ``PATIENCE``."""
        write = Write(call)
        self._waiting.append(write)
        self.wait(write)

    async def awrite(self, call: Call[str]) -> None:
        """Do what ``write`` does, from a coroutine, without blocking its event loop."""
        write = Write(call)
        self._waiting.append(write)
        while not write.is_over:
            is_answered = await self._write_waiting_beside()
            if not (is_answered or write.is_over):
                await asyncio.sleep(PAUSE)
        if write.error is not None:
            raise write.error

    def add(self, call: Call[str]) -> Write:
        """Write a record within ``TURN_SECONDS``, or with those that come before: the caller has to ``wait`` for it."""
        write = Write(call)
        self._waiting.append(write)
        # While Redis refuses records, no thread runs further tasks, or nobody would know of their ends.
        if len(self._waiting) >= FULL:  # rule: runs_tasks_whose_ends_nobody_writes
            self._write_until(write)
        else:
            self._wake()
        return write

    def wait(self, write: Write) -> None:
        """Return once a record is in Redis. Raises the errors of ``write``."""
        self._write_until(write)
        if write.error is not None:
            raise write.error

    def _write_until(self, write: Write) -> None:
        while not write.is_over:
            self._write_waiting()
            if not write.is_over:
                time.sleep(PAUSE)

    def _write_waiting_beside(self) -> Awaitable[bool]:
        """Do what ``_write_waiting`` does, in a thread; coroutines that wait during a round trip share that of the next one."""
        loop = asyncio.get_running_loop()
        if self._trip is None or self._trip.done() or self._trip.get_loop() is not loop:
            self._trip = loop.create_task(call_in_thread(self._write_waiting))
        # One of them may be cancelled.
        return asyncio.shield(self._trip)

    def _write_waiting(self) -> bool:
        """Write what waits in one round trip; return whether Redis could be asked for all of it.

        What fails because of the server waits for the next round trip, until its ``PATIENCE`` is over.
        """
        with self._writing:
            # Other threads append meanwhile, so exactly those are taken that are there now.
            writes = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if not writes:
                return True
            failed: list[Write] = []
            # An interrupt may leave this method before Redis has answered.
            interrupted = ServerUnavailable("the thread that asked Redis was interrupted")
            answers: list[object] = [interrupted] * len(writes)
            try:
                broker, calls = self._broker(), [write.call for write in writes]
                # A pipeline costs more than a single call.
                answers = run_all(broker, calls) if len(calls) > 1 else [broker.run(calls[0])]
            except Exception as error:  # noqa: BLE001 - each thread raises the error of its own write
                answers = [error] * len(writes)
            finally:
                now = time.monotonic()
                for write, answer in zip(writes, answers, strict=True):
                    # Redis may have run a write whose answer was lost. A second write of the same record changes nothing.
                    if isinstance(answer, ServerTrouble) and now < write.until:
                        failed.append(write)
                        continue
                    write.error = answer if isinstance(answer, BaseException) else None
                    write.is_over = True
                self._waiting.extend(failed)
            return not failed

    # --- the thread that writes what no other thread waits for

    def _wake(self) -> None:
        # Unlike ``set``, this question takes no lock, and each task asks it.
        if not self._wanted.is_set():
            self._wanted.set()
        # A fork copies no threads, so each process starts one at its first task.
        if self._pid != os.getpid():
            self._start()

    def _start(self) -> None:
        with self._starting:
            # Two executor threads may begin the first tasks of a process at the same time.
            if self._pid != os.getpid() and start_daemon(self._run, "rmq-task-records"):
                self._pid = os.getpid()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            # The event is cleared before the queues are read: what comes meanwhile sets it again.
            self._wanted.clear()
            while self._begun or self._waiting:
                time.sleep(TURN_SECONDS)
                try:
                    if not self._write_waiting():
                        time.sleep(PAUSE)
                    self._write_starts()
                except Exception as error:  # noqa: BLE001 - the thread has to go on
                    self._log_throttled("noted", "Cannot note which tasks run: %s", error)

    def _write_starts(self) -> None:
        """Write the starts that are due, in one round trip."""
        until, due = time.monotonic() - TURN_SECONDS, []
        while self._begun and self._begun[0][0] <= until:
            _, attempt = self._begun.popleft()
            # A task that ended within ``TURN_SECONDS`` needs no record of its start, because its end has one.
            if not attempt.ended:
                due.append(attempt.start())
        for answer in run_all(self._broker(), due) if due else ():
            if isinstance(answer, RmqError):
                raise answer
