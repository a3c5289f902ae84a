"""Children: the worker processes of a supervisor. How each is forked, how it ended, and when a successor starts."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from django_rmq.core.consumer.notes import Notes
from django_rmq.core.logs.safe import safe_logger

logger = safe_logger("django_rmq.consumer")

RECYCLE = 75
"""Exit code of a child that asks for a successor: it was told to end, or has reached its limit of messages or
memory."""

USAGE, SERVER, WATCHDOG, OVERRAN = 2, 3, 4, 5
"""Exit codes. USAGE: a successor would fail too. SERVER: Redis or the coordinator was unavailable. WATCHDOG:
the watchdog had to end the last process that could work. OVERRAN: only the end of the process could end a
listener that exceeded HARD_TIMEOUT."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before a child that died is replaced: the first pause, doubled up to the longest while children die
young."""

LONGEST_PAUSE_AWAY = 1.0
"""The longest pause for a child that could not begin because a server was unavailable, so that it works soon
after the server is back."""

OLD_ENOUGH = 30.0
"""Seconds after which a child's death says nothing about the next one's."""

FLUSH_SECONDS = 1.0
"""Seconds for which a child that ends waits until what it has printed is written."""

DUMP_SECONDS = 0.5
"""Seconds that a hung child has to write down where it hangs."""


@dataclass
class Child:
    """A worker process and its successors, which share the same notes."""

    notes: Notes
    pid: int = 0
    started: float = 0.0
    beaten: int = 0
    seen: float = 0.0
    """When the parent last saw a new beat, or started the child."""
    deaths: int = 0
    """How many children in a row died young."""
    not_before: float = 0.0
    kill_at: float | None = None
    """When to kill the child, if the watchdog has found it hung."""
    done: bool = False
    """Whether it has ended and needs no successor."""

    def send(self, number: int) -> None:
        """Send it a signal, if it is running."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def fork(self, work: Callable[[Notes], int], close: Callable[[], None]) -> None:
        """Start a process that calls ``close``, then ``work``, and exits with the code that it returns."""
        self.notes.clear()
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal that arrives before the child has its own handlers waits for them.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        try:
            pid = os.fork()
            if pid == 0:
                self._be(work, close)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self.pid, self.beaten, self.kill_at = pid, 0, None
        self.started = time.monotonic()
        logger.info("Worker process %d started", pid, extra={"rmq_event": "process_started", "rmq_pid": pid})

    def _be(self, work: Callable[[Notes], int], close: Callable[[], None]) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # Ctrl-C and a lost terminal signal the whole process group, and the parent decides what to do.
            # Unlike SIG_IGN, a handler that does nothing is not inherited by programs that listeners start.
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, _ignore)
            with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
                faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
            code = work(self.notes)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            logger.exception("A worker process failed")
        finally:
            with contextlib.suppress(Exception):
                # A listener that hangs in a write to a stream that nobody reads holds the lock of that stream.
                flushing = threading.Thread(target=_flush, daemon=True)
                flushing.start()
                flushing.join(FLUSH_SECONDS)
            os._exit(code)

    def wait(self) -> int | None:
        """Return the exit code (negative: the signal) of the ended process. None: it is running, or there is none."""
        if not self.pid:
            return None
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def rest(self, code: int) -> None:
        """Delay the successor of a process that ended with ``code``; the delay grows with the number that died young."""
        is_clean = is_clean_end(code)
        is_young = time.monotonic() - self.started < OLD_ENOUGH
        is_clean = is_clean or code == OVERRAN
        self.deaths = 0 if is_clean else self.deaths + 1 if is_young else 1
        longest = LONGEST_PAUSE_AWAY if code == SERVER else LONGEST_PAUSE
        pause = 0.0 if is_clean else min(longest, FIRST_PAUSE * 2 ** min(self.deaths - 1, 20))
        self.not_before = time.monotonic() + pause

    def watch(self, now: float, away: float, watchdog: float | None) -> None:
        """Check for a new beat, and end a process without one. ``away``: seconds in which the parent could not check."""
        if away > 0:
            # The parent itself did not run (stopped, or giving messages back), so this time does not count
            # against the child.
            self.seen = min(now, self.seen + away)
        beaten = self.notes.beaten
        if self.pid and beaten != self.beaten:
            self.beaten, self.seen = beaten, now
        if not self.pid or watchdog is None:
            return
        if self.kill_at is not None:
            if now >= self.kill_at:
                self.send(signal.SIGKILL)
        elif now - max(self.seen, self.started) > watchdog:
            logger.error(
                "Worker process %d has made no progress for %.0f s and is killed",
                self.pid,
                watchdog,
                extra={"rmq_event": "watchdog", "rmq_pid": self.pid},
            )
            self.send(signal.SIGUSR1)
            self.kill_at = now + DUMP_SECONDS


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def is_clean_end(code: int) -> bool:
    """Return whether a process ended normally."""
    return code in (0, RECYCLE)


def log_end(pid: int, code: int) -> None:
    """Log that a process has ended."""
    is_clean = is_clean_end(code)
    logger.log(
        logging.INFO if is_clean else logging.ERROR,
        "Worker process %d ended: %s",
        pid,
        _meaning(code),
        extra={"rmq_event": "process_ended", "rmq_pid": pid, "rmq_exit_code": code},
    )


def _ignore(number: int, frame: object) -> None:
    pass


def _meaning(code: int) -> str:
    if code < 0:
        return f"killed by {_name(-code)}"
    return {
        0: "done",
        OVERRAN: "a listener exceeded HARD_TIMEOUT",
        RECYCLE: "stopped on request, or to be replaced",
    }.get(code, f"exit code {code}")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


__all__ = ["OVERRAN", "RECYCLE", "SERVER", "USAGE", "WATCHDOG", "Child", "is_clean_end", "log_end"]
