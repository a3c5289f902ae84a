"""A worker process, as its parent sees it: its fork, its end with exit handlers, its pulse, and the orphans that it leaves.

A child announces in its notes that it ends, and with which meaning. Then it runs the exit handlers of user code. An end
is a death unless the announced one is in ``CLEAN``. The exit code does not count, because a listener or a library in C may exit
with any.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from django_rmq.core.consumer.shared_notes import SharedNotes
from django_rmq.core.consumer.watchdog import stack_of_thread
from django_rmq.core.log import safe_logger

logger = safe_logger("django_rmq.consumer")

DONE_FOR_GOOD, FORCED, USAGE, SERVER, WATCHDOG, HARD_TIMEOUT_EXCEEDED, RECYCLE = 0, 1, 2, 3, 4, 5, 75
"""The meanings of an end that a process announces, which are also its exit code. DONE_FOR_GOOD: it needs no successor.
FORCED: something was not settled in time. USAGE: a successor would fail too. SERVER: Redis or the coordinator was
unavailable. WATCHDOG: only of the whole command, the last process that could work hung. HARD_TIMEOUT_EXCEEDED: only the end
of the process could end a listener that exceeded HARD_TIMEOUT. RECYCLE: it was asked to end, or has reached its limit of
messages or memory, and needs a successor."""

CLEAN = (DONE_FOR_GOOD, RECYCLE)
"""The announced ends that leave nothing to settle. Any other end is a death, also an announced one."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before a child that died is replaced: the first pause, doubled up to the longest while children die
young."""

LONGEST_PAUSE_AWAY = 1.0
"""The longest pause for a child that could not begin because a server was unavailable, so that it works soon
after the server is back."""

OLD_ENOUGH = 30.0
"""Seconds after which a child's death says nothing about the next one's."""

FINISH_SECONDS = 5.0
"""Seconds for the functions that user code has registered with ``atexit``, after a child has announced its end."""

JOIN_SECONDS = 2.0
"""How many of these seconds the threads and executors of user code have to end by themselves, and then its processes
after a SIGTERM."""

FLUSH_SECONDS = 1.0
"""Seconds for which a child that ends waits until its output is written."""

ORPHAN_SECONDS = 5.0
"""Seconds after which an ended process that was not waited for is an orphan. User code that has started it in the
parent waits sooner."""

DUMP_SECONDS = 0.5
"""Seconds that a hung child has to write down where it hangs."""


@dataclass
class ChildProcess:
    """A worker process and its successors, which share the same notes."""

    notes: SharedNotes
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

    def fork(self, work: Callable[[SharedNotes], int], close: Callable[[], None]) -> None:
        """Start a process that calls ``close``, then ``work``, and exits with the code that it returns."""
        self.notes.clear()
        _flush()
        # A signal that arrives before the child has its own handlers waits for them.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        try:
            pid = os.fork()
            if pid == 0:
                self._be(work, close)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self.pid, self.beaten, self.kill_at = pid, 0, None
        self.started = self.seen = time.monotonic()
        logger.info("Worker process %d started", pid, extra={"rmq_event": "process_started", "rmq_pid": pid})

    def _be(self, work: Callable[[SharedNotes], int], close: Callable[[], None]) -> NoReturn:
        code = 1
        try:
            # The pipe for signals is the parent's: a signal of the child must not wake the parent.
            signal.set_wakeup_fd(-1)
            _leave_to_parent()  # rule: ends_what_the_parent_has_made
            close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # Ctrl-C and a lost terminal signal the whole process group, and the parent decides what to do.
            # Unlike SIG_IGN, a handler that does nothing is not inherited by programs that listeners start.
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, _ignore)
            with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
                faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
            code = work(self.notes)
            self.notes.announce(code)
            _finish(code)  # rule: ends_without_exit_handlers
        except BaseException:
            logger.exception("A worker process failed")
        finally:
            # A listener may hang in a write to a full pipe, and then holds the lock of the stream.
            _call_for(FLUSH_SECONDS, _flush)
            os._exit(code)

    def wait(self) -> int | None:
        """Return the exit code (negative: the signal) of the ended process; None if it is running, or there is none."""
        if not self.pid:
            return None
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def rest(self) -> None:
        """Delay the successor of a process that has ended; the delay grows with the number that died young."""
        is_young = time.monotonic() - self.started < OLD_ENOUGH
        is_clean = self.notes.end in (*CLEAN, HARD_TIMEOUT_EXCEEDED)
        self.deaths = 0 if is_clean else self.deaths + 1 if is_young else 1
        # A child that could not begin without its server must not wait for long once the server is back.
        longest = LONGEST_PAUSE_AWAY if self.notes.end == SERVER else LONGEST_PAUSE
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
        # The child has announced its end, so it beats no more while its exit handlers run.
        if self.notes.end is not None:
            watchdog += FINISH_SECONDS + FLUSH_SECONDS
        if self.kill_at is not None:
            if now >= self.kill_at:
                self.send(signal.SIGKILL)
                # In a call of the kernel that cannot be interrupted, a process ends only when that returns.
                self.kill_at = now + DUMP_SECONDS
        elif now - self.seen > watchdog:
            logger.error(
                "Worker process %d has made no progress for %.0f s and is killed",
                self.pid,
                watchdog,
                extra={"rmq_event": "watchdog", "rmq_pid": self.pid},
            )
            # The child writes the stacks of its threads before it is killed.
            self.send(signal.SIGUSR1)
            self.kill_at = now + DUMP_SECONDS


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _call_for(seconds: float, function: Callable[[], object]) -> None:
    """Call a function that may hang, and wait for it for at most ``seconds``."""

    def call() -> None:
        with contextlib.suppress(BaseException):
            function()

    with contextlib.suppress(RuntimeError):  # no thread can be started
        calling = threading.Thread(target=call, daemon=True)
        calling.start()
        calling.join(seconds)


def _leave_to_parent() -> None:
    """Have this child leave the temporary directories and processes alone that modules have made in the parent.

    At its end it would delete and terminate them, although the parent and the other children still use them.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False
    getattr(sys.modules.get("multiprocessing.process"), "_children", set()).clear()
    # Only the parent can wait for the fork server that it has started. A listener would get ChildProcessError instead of
    # a process. Without its pid, multiprocessing starts another fork server.
    fork_server: Any = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    if fork_server is not None:
        fork_server._forkserver_pid = None  # noqa: SLF001 - nothing public does it


def _finish(code: int) -> None:
    """End like Python itself, within FINISH_SECONDS: user code releases its resources, and its processes end.

    Python itself would wait without a limit, for example for a thread of a listener that hangs.
    """
    main = threading.current_thread()

    def give_up() -> None:
        stack = stack_of_thread(main)
        _call_for(FLUSH_SECONDS, lambda: _log_unfinished(stack))
        _end_processes(signal.SIGKILL)
        os._exit(code)

    _start_timer(FINISH_SECONDS, give_up)
    _call_for(JOIN_SECONDS, threading._shutdown)  # type: ignore[attr-defined]  # noqa: SLF001 - nothing public does it
    _end_processes(signal.SIGTERM)
    # One of the exit handlers is that of multiprocessing, which waits until they have ended.
    _start_timer(JOIN_SECONDS, lambda: _end_processes(signal.SIGKILL))
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()  # noqa: SLF001 - nothing public does it
    _end_processes(signal.SIGKILL)


def _start_timer(seconds: float, function: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # no thread can be started
        timer = threading.Timer(seconds, function)
        timer.daemon = True
        timer.start()


def _log_unfinished(stack: str) -> None:
    logger.warning(
        "The exit handlers (atexit) of worker process %d have not ended within %g s, and are given up. The stack:\n%s",
        os.getpid(),
        FINISH_SECONDS,
        stack,
        extra={"rmq_event": "exit_handlers", "rmq_pid": os.getpid()},
    )


def _end_processes(number: int) -> None:
    """Send a signal to the processes that listeners have started by ``multiprocessing``, if it was imported."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    for process in multiprocessing.active_children() if multiprocessing is not None else ():
        with contextlib.suppress(OSError, ValueError):
            os.kill(process.pid, number)


def log_end(pid: int, status: int, end: int | None) -> None:
    """Log that a process has ended with an exit code (negative: by a signal), and with the ``end`` that it announced."""
    logger.log(
        logging.INFO if end in CLEAN else logging.ERROR,
        "Worker process %d ended: %s",
        pid,
        _meaning(status, end),
        extra={"rmq_event": "process_ended", "rmq_pid": pid, "rmq_exit_code": status},
    )


def _ignore(number: int, frame: object) -> None:
    pass


def _meaning(status: int, end: int | None) -> str:
    if status < 0:
        return f"killed by {_name(-status)}"
    if end is None:
        return (
            f"exit code {status}, which it has not announced: a listener, a library or an error has ended it"
        )
    return {
        DONE_FOR_GOOD: "done",
        HARD_TIMEOUT_EXCEEDED: "a listener exceeded HARD_TIMEOUT",
        RECYCLE: "stopped on request, or to be replaced",
    }.get(end, f"exit code {status}")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Orphans:
    """Reaps the processes that a parent inherits, if it does: as PID 1 of a container, or as a child subreaper.

    A process that listeners have started and that outlives its worker would otherwise stay as a zombie.
    """

    def __init__(self) -> None:
        self._adopts = os.getpid() == 1 or _is_subreaper()
        self._ended: dict[int, float] = {}
        """Processes that have ended -> when they were first seen so."""

    def reap(self, own: Collection[int]) -> None:
        """Reap orphans that have ended; the processes ``own`` are waited for by others."""
        if not self._adopts or not _has_ended_child():
            return
        now = time.monotonic()
        ended = {pid: self._ended.get(pid, now) for pid in _ended_children() if pid not in own}
        self._ended = {pid: seen for pid, seen in ended.items() if now - seen < ORPHAN_SECONDS}
        for pid in ended.keys() - self._ended.keys():
            # The code that started the process may have waited for it meanwhile.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _is_subreaper() -> bool:
    """Return whether Linux gives this process the orphans among its descendants, as it does to PID 1."""
    try:
        import ctypes  # some builds of Python have none

        flag = ctypes.c_int(0)
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(flag), 0, 0, 0)
    except (ImportError, OSError, AttributeError, TypeError):
        return False
    return bool(flag.value)


_PR_GET_CHILD_SUBREAPER = 37


def _has_ended_child() -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _ended_children() -> list[int]:
    """Return the children of this process that have ended and were not waited for."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        # A process may vanish between the listing and the reading of its file.
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) == os.getpid():
                pids.append(int(path.parent.name))
    return pids
