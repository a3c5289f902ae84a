"""The supervisor: the parent of worker processes. It forks them, replaces them, and checks that they are alive.

It runs no listener, owns no slot, has no thread, and keeps no connection while it forks; the work of a child
is injected. A child records in shared memory that it is alive and what its threads run (``progress``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django_rmq.core.consumer.child_processes import (
    CLEAN,
    FINISH_SECONDS,
    ChildProcess,
    Orphans,
    log_end,
)
from django_rmq.core.consumer.health_server import HealthServer
from django_rmq.core.consumer.progress import (
    DONE_FOR_GOOD,
    FORCED,
    USAGE,
    WATCHDOG,
    SharedProgress,
)
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.exceptions import ConfigurationError, RmqError

logger = safe_logger("django_rmq.consumer")

FRESH_SECONDS = 15.0
"""Seconds without a beat after which a child does not count as alive. A single call to Redis may take 5 s."""

OVERTIME_SECONDS = 5.0 + FINISH_SECONDS
"""Seconds beyond the shutdown time-out in which a child may end by itself: to leave the others, and for exit handlers.
After that it is considered hung, and killed."""


@contextmanager
def handling_signals(
    handler: Callable[[int, Any], object], *numbers: int, install: Callable[[int, Any], Any] = signal.signal
) -> Iterator[None]:
    """Call ``handler`` for each of these signals. ``install`` sets it, and returns the previous one.

    A program that blocks signals may have started this one, so they are unblocked: otherwise no SIGTERM would arrive.
    """
    previous = {number: install(number, handler) for number in numbers}
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, before in previous.items():
            signal.signal(number, before)


@dataclass
class Supervisor:
    """Keeps ``processes`` children running until told to stop.

    ``child`` is called in the new process with its notes and returns one of the ends of ``notes``, which is its exit
    code, too: ``DONE_FOR_GOOD`` ends it, ``RECYCLE`` asks for a successor, ``USAGE`` ends everything. A process that
    ends before ``child`` returns has died, and gets a successor. ``died`` is called in the parent after any end that
    is not clean, with the notes of the child, and returns how many messages it gave back. ``before_fork`` closes what
    a child must not inherit.
    """

    child: Callable[[SharedProgress], int]
    processes: int
    make_notes: Callable[[], SharedProgress]
    died: Callable[[SharedProgress], int] = lambda notes: 0
    before_fork: Callable[[], None] = lambda: None
    prepare: Callable[[], bool] = lambda: True
    """Called about once a second until it returns True; no child starts before. Signals and health checks are answered
    meanwhile. What it raises ends the supervisor."""
    ready: Callable[[], None] = lambda: None
    """Called once after ``prepare``, before the first child is there."""
    shutdown_timeout: float = 30.0
    watchdog: float | None = None
    """Seconds without a beat after which a child is ended."""
    changed: Callable[[], bool] = lambda: False
    """Called about once a second; True ends everything as after SIGTERM and starts again, because the code
    has changed."""
    heartbeat_file: str | None = None
    health_address: str | None = None
    processed: int = field(default=0, init=False)
    """The number of deliveries settled by all children so far."""
    begin_anew: bool = field(default=False, init=False)
    """Whether ``changed`` ended it, and no one asked for the end."""
    _children: list[ChildProcess] = field(default_factory=list, init=False)
    _asked: list[int] = field(default_factory=list, init=False)
    _stopping_since: float | None = field(default=None, init=False)
    _worst: int = field(default=0, init=False)
    _looked: float = field(default=0.0, init=False)
    _touched: float = field(default=0.0, init=False)
    _next_change: float = field(default=0.0, init=False)
    _is_prepared: bool = field(default=False, init=False)
    _next_prepare: float = field(default=0.0, init=False)
    _health: HealthServer | None = field(default=None, init=False)
    _wakeup: tuple[int, int] = field(default=(-1, -1), init=False)
    _orphans: Orphans = field(default_factory=Orphans, init=False)

    def run(self) -> int:
        """Run until every child has ended for good; return the exit code, an end of ``notes``."""
        with self._signals(), selectors.DefaultSelector() as selector:
            try:
                self._begin(selector)
                while True:
                    self._heed()
                    self._reap()
                    if self._is_prepared:
                        self._start_due()
                    elif self._stopping_since is None:
                        self._prepare()
                    self._watch()
                    if all(child.done for child in self._children):
                        return self._worst
                    for key, _ in selector.select(self._pause()):
                        if key.fd == self._wakeup[0]:
                            os.read(self._wakeup[0], 4096)
                    if self._health is not None:
                        self._health.serve()
            finally:
                for child in self._children:
                    if child.pid:
                        child.send(signal.SIGKILL)
                        os.waitpid(child.pid, 0)
                if self._health is not None:
                    self._health.close()

    def _begin(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._wakeup[0], selectors.EVENT_READ)
        if self.health_address:
            self._health = HealthServer(self.health_address, self.health)
            self._health.join(selector)
        if self.heartbeat_file:
            try:
                Path(self.heartbeat_file).touch()
            except OSError as error:
                raise ConfigurationError(f"cannot touch the heartbeat file: {error}") from error
        self._looked = time.monotonic()
        self._children = [ChildProcess(self.make_notes(), seen=self._looked) for _ in range(self.processes)]

    def _prepare(self) -> None:
        if time.monotonic() < self._next_prepare:
            return
        self._is_prepared = self.prepare()
        self._next_prepare = time.monotonic() + 1.0
        if self._is_prepared:
            for child in self._children:
                child.seen = time.monotonic()
            self.ready()

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return [child.pid for child in self._children if child.pid]

    def health(self, what: str) -> tuple[bool, dict[str, Any]]:
        """Return whether all children are alive ("live"), or have slots to work on ("ready"), and which are running."""
        is_so = self._is_alive()
        if what == "ready":
            is_so = (
                is_so
                and self._stopping_since is None
                and all(child.pid and child.notes.is_ready for child in self._children if not child.done)
            )
        return is_so, {"processes": self.pids, "settled": self._settled()}

    def _settled(self) -> int:
        return self.processed + sum(child.notes.processed for child in self._children if child.pid)

    def _is_alive(self) -> bool:
        now = time.monotonic()
        # A restart of the parent would not help while it waits for its server.
        return not self._is_prepared or all(
            child.done or now - child.seen < FRESH_SECONDS for child in self._children
        )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        self._wakeup = os.pipe()
        os.set_blocking(self._wakeup[1], False)
        wakeup = signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
        try:
            with handling_signals(self._note, *handled):
                yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for descriptor in self._wakeup:
                os.close(descriptor)

    def _note(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self._asked.append(number)

    def _pause(self) -> float:
        now = time.monotonic()
        if not self._is_prepared and self._stopping_since is None:
            return max(0.0, self._next_prepare - now)
        times = [child.not_before for child in self._children if not child.pid and not child.done]
        times += [child.kill_at for child in self._children if child.kill_at is not None]
        return max(0.0, min([1.0, *(at - now for at in times)]))

    # --- signals

    def _heed(self) -> None:
        while self._asked:
            number = self._asked.pop(0)
            if number == signal.SIGUSR1:
                with contextlib.suppress(OSError, ValueError, RuntimeError):
                    faulthandler.dump_traceback(all_threads=True)
                self._tell(signal.SIGUSR1)
            elif number == signal.SIGHUP:
                if self._stopping_since is None:
                    logger.info(
                        "Replacing %d worker processes", len(self.pids), extra={"rmq_event": "replacing"}
                    )
                    self._tell(signal.SIGTERM)
            elif self._stopping_since is None or self.begin_anew:
                self.begin_anew = False
                self._stop()
            else:
                logger.warning("Stopping immediately", extra={"rmq_event": "forced"})
                self._worst = self._worst or FORCED
                self._tell(signal.SIGKILL)
        if self._stopping_since is not None and self.pids:
            over = time.monotonic() - self._stopping_since - self.shutdown_timeout
            if over > OVERTIME_SECONDS:
                self._worst = self._worst or FORCED
                self._tell(signal.SIGKILL)

    def _stop(self) -> None:
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
        self._tell(signal.SIGTERM)
        for child in self._children:
            if not child.pid:
                child.done = True

    def _tell(self, number: int) -> None:
        for child in self._children:
            child.send(number)

    # --- children

    def _start_due(self) -> None:
        for child in self._children:
            if not child.pid and not child.done and time.monotonic() >= child.not_before:
                self.before_fork()
                child.fork(self.child, self._close)

    def _close(self) -> None:
        """Close the supervisor's resources in a child."""
        for descriptor in self._wakeup:
            os.close(descriptor)
        if self._health is not None:
            self._health.close()

    def _reap(self) -> None:
        for child in self._children:
            status = child.wait()
            if status is not None:
                self.processed += child.notes.processed
                pid, child.pid = child.pid, 0
                self._ended(child, pid, status)
        self._orphans.reap(self.pids)

    def _ended(self, child: ChildProcess, pid: int, status: int) -> None:
        end = child.notes.end  # rule: believes_an_exit_code
        log_end(pid, status, end)
        if end not in CLEAN:
            self._give_back(child, pid)
        was_hung, child.kill_at = child.kill_at is not None, None
        if was_hung and not self._others_live(child):
            self._worst = WATCHDOG
            self._stop()
        elif end == USAGE:
            self._worst = self._worst or USAGE
            self._stop()
        if self._stopping_since is not None:
            child.done = True
            if end not in CLEAN:
                self._worst = self._worst or end or FORCED
        elif end == DONE_FOR_GOOD:
            child.done = True
        else:
            child.rest()

    def _give_back(self, child: ChildProcess, pid: int) -> None:
        try:
            given = self.died(child.notes)
            if given:
                logger.info(
                    "Gave back %d messages that process %d had taken but not begun",
                    given,
                    pid,
                    extra={"rmq_event": "given_back", "rmq_pid": pid, "rmq_messages": given},
                )
        except RmqError as error:
            logger.warning("The messages of process %d will time out: %s", pid, error)

    def _others_live(self, hung: ChildProcess) -> bool:
        now = time.monotonic()
        return any(
            child.pid and child.kill_at is None and now - child.seen < FRESH_SECONDS
            for child in self._children
            if child is not hung
        )

    # --- whether they are alive

    def _watch(self) -> None:
        now = time.monotonic()
        away = now - self._looked - 2.0
        self._looked = now
        for child in self._children:
            child.watch(now, away, self.watchdog)
        if self._stopping_since is None and now >= self._next_change:
            self._next_change = now + 1.0
            if self.changed():
                self.begin_anew = True
                self._stop()
        if self.heartbeat_file and now - self._touched >= 1.0 and self._is_alive():
            self._touched = now
            try:
                Path(self.heartbeat_file).touch()
            except OSError as error:
                logger.warning("Cannot touch the heartbeat file: %s", error)


__all__ = ["Supervisor", "handling_signals"]
