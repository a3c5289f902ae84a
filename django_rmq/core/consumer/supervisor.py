"""The supervisor: the parent of worker processes. It forks them, replaces those that die, and answers probes.

A child announces in its notes that it ends, and with which meaning. Then it runs the exit handlers of user code. An end
without an announcement is a death, whatever the exit code, because a listener or a library in C may exit with any.
The work of a child, and the settling of its messages after a death, are passed in. A listener that hangs in a thread is noticed
by the ``heartbeat``; here a whole child hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import json
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from django_rmq.core.consumer.invoke import SignalHandler
from django_rmq.core.consumer.progress import (
    DONE_FOR_GOOD,
    FORCED,
    HARD_TIMEOUT_EXCEEDED,
    RECYCLE,
    SERVER,
    USAGE,
    WATCHDOG,
    SharedProgress,
)
from django_rmq.core.consumer.thread_watch import stack_of_thread
from django_rmq.core.log import safe_logger
from django_rmq.exceptions import ConfigurationError, RmqError

THRESHOLD = 10_000
"""How many more objects than at the last collection begin the next one. A worker has thousands of messages in flight,
and the collector, with the 700 of Python 3.11, would look at each of them several times."""


def collect_less() -> None:
    """Keep the objects that exist now out of collections, and make these rarer, unless the project has made them rarer."""
    gc.collect()
    gc.freeze()
    first, *others = gc.get_threshold()
    if first:  # 0: the project has switched collections off
        gc.set_threshold(max(first, THRESHOLD), *others)


_MOST, _SECONDS, _BYTES = 64, 5.0, 8192
"""The maximum number of connections at once, seconds until a request is complete, and bytes of a request."""


class HealthServer:
    """A minimal HTTP server for probes, in the loop of the supervisor, so that a supervisor that hangs does not answer.

    ``address`` is ``host:port``; ``answer`` returns the state for ``live`` or ``ready``, and details.

    Raises ``ConfigurationError`` if the address cannot be used. Call ``serve`` when one of the sockets in
    ``selector`` can be read, and from time to time.
    """

    def __init__(self, address: str, answer: Callable[[str], tuple[bool, dict[str, object]]]) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        self._answer = answer
        self._connections: dict[socket.socket, tuple[float, bytes]] = {}
        self._selector: selectors.BaseSelector | None = None
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, int(port)), family=family)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigurationError(f"cannot serve health checks at {address}: {error}") from error
        self._socket.setblocking(False)

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._socket.getsockname()[1])

    def join(self, selector: selectors.BaseSelector) -> None:
        """Register with ``selector``."""
        self._selector = selector
        selector.register(self._socket, selectors.EVENT_READ)

    def close(self) -> None:
        """Close every socket. In a forked child this closes only the child's copies."""
        for connection in [*self._connections, self._socket]:
            connection.close()
        self._connections.clear()

    def serve(self) -> None:
        """Accept connections, read requests and answer them, as far as that is possible without waiting."""
        assert self._selector is not None
        with contextlib.suppress(BlockingIOError, OSError):
            while True:
                connection, _ = self._socket.accept()
                if len(self._connections) >= _MOST:
                    # Clients that connect and send nothing must not keep a probe from connecting, so the oldest connection
                    # ends.
                    self._end(next(iter(self._connections)))
                connection.setblocking(False)
                self._connections[connection] = (time.monotonic() + _SECONDS, b"")
                self._selector.register(connection, selectors.EVENT_READ)
        for connection, (until, said) in list(self._connections.items()):
            try:
                more = connection.recv(_BYTES)
            except BlockingIOError:
                # The client is too slow: it would keep its place among the connections.
                if time.monotonic() > until:
                    self._end(connection)
                continue
            except OSError:
                self._end(connection)
                continue
            said += more
            if b"\r\n\r\n" in said or b"\n\n" in said:
                with contextlib.suppress(OSError):
                    connection.send(self._reply(said))
                self._end(connection)
            elif not more or len(said) > _BYTES:
                self._end(connection)
            else:
                self._connections[connection] = (until, said)

    def _end(self, connection: socket.socket) -> None:
        del self._connections[connection]
        assert self._selector is not None
        self._selector.unregister(connection)
        connection.close()

    def _reply(self, said: bytes) -> bytes:
        method, _, rest = said.partition(b" ")
        path = rest.split(b" ", 1)[0].split(b"?", 1)[0].strip(b"/").decode("latin-1")
        body: dict[str, object]
        if method not in (b"GET", b"HEAD"):
            status, body = "405 Method Not Allowed", {"error": "GET only"}
        elif path not in ("live", "ready"):
            status, body = "404 Not Found", {"error": "use /live or /ready"}
        else:
            is_so, more = self._answer(path)
            status, body = "200 OK" if is_so else "503 Service Unavailable", {path: is_so, **more}
        text = json.dumps(body).encode() + b"\n"
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (text if method != b"HEAD" else b"")


logger = safe_logger("django_rmq.consumer")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before a child that died is replaced: the first pause, doubled up to the longest while children die
young."""

LONGEST_PAUSE_AWAY = 1.0
"""The longest pause for a child that could not begin because a server was unavailable, so that it works soon
after the server is back."""

OLD_ENOUGH = 30.0
"""Seconds after which a child's death says nothing about the next one's."""

CLEAN = (DONE_FOR_GOOD, RECYCLE)
"""The ends that leave nothing to settle."""

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

    notes: SharedProgress
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

    def fork(self, work: Callable[[SharedProgress], int], close: Callable[[], None]) -> None:
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
        self.started = time.monotonic()
        logger.info("Worker process %d started", pid, extra={"rmq_event": "process_started", "rmq_pid": pid})

    def _be(self, work: Callable[[SharedProgress], int], close: Callable[[], None]) -> NoReturn:
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
        elif now - max(self.seen, self.started) > watchdog:
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


FRESH_SECONDS = 15.0
"""Seconds without a beat after which a child does not count as alive. A single call to Redis may take 5 s."""

OVERTIME_SECONDS = 5.0 + FINISH_SECONDS
"""Seconds beyond the shutdown time-out in which a child may end by itself: to leave the others, and for exit handlers.
After that it is considered hung, and killed."""


@contextmanager
def handling_signals(
    handler: SignalHandler, *numbers: int, install: Callable[[int, SignalHandler], Any] = signal.signal
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
    """Keeps ``processes`` children running until a signal asks for the end.

    ``child`` is called in the new process with its notes and returns one of the ends of ``notes``, which is its exit
    code, too: ``DONE_FOR_GOOD`` ends it, ``RECYCLE`` asks for a successor, ``USAGE`` ends everything. A process that
    ends before ``child`` returns has died, and gets a successor. ``died`` is called in the parent after any end that
    is not clean, with the notes of the child, and returns how many messages it gave back. ``before_fork`` closes
    connections that a child must not inherit.
    """

    child: Callable[[SharedProgress], int]
    processes: int
    make_notes: Callable[[], SharedProgress]
    died: Callable[[SharedProgress], int] = lambda notes: 0
    before_fork: Callable[[], None] = lambda: None
    prepare: Callable[[], bool] = lambda: True
    """Called about once a second until it returns True; no child starts before. Signals and health checks are answered
    meanwhile. An error that it raises ends the supervisor."""
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
                            # A signal has written here, so that `select` returns; `_heed` and `_reap` do the rest.
                            os.read(self._wakeup[0], 4096)
                    if self._health is not None:
                        self._health.serve()
            finally:
                # Children still run here only if an error ends the supervisor. None may outlive it.
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
            # A collection in a child would write to the pages of all objects that it shares with the parent.
            collect_less()
            for child in self._children:
                child.seen = time.monotonic()
            self.ready()

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return [child.pid for child in self._children if child.pid]

    def health(self, what: str) -> tuple[bool, dict[str, object]]:
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
        # A second SIGTERM would end the children at once, so a child asks in its notes, however many of them do.
        if self._stopping_since is None and any(child.notes.asks_for_stop for child in self._children):
            logger.info(
                "A worker process was asked to stop the command", extra={"rmq_event": "asked_to_stop"}
            )
            self._stop()
        while self._asked:
            number = self._asked.pop(0)
            if number == signal.SIGUSR1:
                with contextlib.suppress(OSError, ValueError, RuntimeError):
                    faulthandler.dump_traceback(all_threads=True)
                self._send_signal(signal.SIGUSR1)
            elif number == signal.SIGHUP:
                if self._stopping_since is None:
                    logger.info(
                        "Replacing %d worker processes", len(self.pids), extra={"rmq_event": "replacing"}
                    )
                    self._send_signal(signal.SIGTERM)
            # A signal during a restart for changed code ends the command.
            elif self._stopping_since is None or self.begin_anew:
                self.begin_anew = False
                self._stop()
            else:
                # This is the second request to stop: listeners are not waited for.
                logger.warning("Stopping immediately", extra={"rmq_event": "forced"})
                self._worst = self._worst or FORCED
                self._send_signal(signal.SIGKILL)
        if self._stopping_since is not None and self.pids:
            over = time.monotonic() - self._stopping_since - self.shutdown_timeout
            # A child should have ended by itself, so it hangs.
            if over > OVERTIME_SECONDS:
                self._worst = self._worst or FORCED
                self._send_signal(signal.SIGKILL)

    def _stop(self) -> None:
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
        self._send_signal(signal.SIGTERM)
        for child in self._children:
            if not child.pid:
                child.done = True

    def _send_signal(self, number: int) -> None:
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
        # No other process works, so the command ends with an exit code of its own instead of replacing this one.
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
