"""The supervisor: the parent of worker processes. It forks them, replaces those that die, and answers probes.

The work of a child, and the settling of its messages after a death, are passed in. A listener that hangs in a thread is noticed
by the ``watchdog``; here a whole child hangs.
When a child is replaced because it has processed or needs too much is decided in it, by ``worker.worker_process``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django_rmq.core.consumer.shared_notes import SharedNotes
from django_rmq.core.forked_copies import SignalHandler
from django_rmq.core.log import safe_logger
from django_rmq.core.model.bounds import SHUTDOWN_SECONDS
from django_rmq.core.worker_processes.child_process import (
    CLEAN,
    DONE_FOR_GOOD,
    FINISH_SECONDS,
    FORCED,
    USAGE,
    WATCHDOG,
    ChildProcess,
    Orphans,
    log_end,
)
from django_rmq.exceptions import ConfigurationError, RmqError, ServerTrouble

logger = safe_logger("django_rmq.consumer")

THRESHOLD = 10_000
"""How many more objects than at the last collection begin the next one. A worker has thousands of messages in flight,
and the collector, with the 700 of Python 3.11, would look at each of them several times."""

FRESH_SECONDS = 15.0
"""Seconds without a beat after which a child does not count as alive. A single call to Redis may take 5 s.
``docs/deploy/containers.md`` says it about ``/live``."""

FORK_AGAIN_SECONDS = 1.0
"""Seconds after which a process is started again that the system could not start."""

SAME_REQUEST_SECONDS = 1.0
"""Seconds after the first signal to stop in which further ones count as the same request: Ctrl-C reaches the whole process
group, and what has started the command, such as ``timeout``, may send a signal of its own."""

OVERTIME_SECONDS = 5.0 + FINISH_SECONDS
"""Seconds beyond the shutdown time-out in which a child may end by itself: to leave the others, and for exit handlers.
After that it is considered hung, and killed."""


def collect_less() -> None:
    """Keep the objects that exist now out of collections, and make these rarer, unless the project has made them rarer."""
    gc.collect()
    gc.freeze()
    first, *others = gc.get_threshold()
    if first:  # 0: the project has switched collections off
        gc.set_threshold(max(first, THRESHOLD), *others)


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


def stopping_or_leaving(stop: Callable[[], object]) -> SignalHandler:
    """Return a handler that calls ``stop`` at the first request, and ends the process at the second one."""
    requested: list[float] = []

    def ask(number: int, frame: object) -> None:
        if not requested:
            requested.append(time.monotonic())
            stop()
        elif time.monotonic() - requested[0] > SAME_REQUEST_SECONDS:
            # An ordinary exit would run exit handlers, and wait for Spark and its Java.
            os._exit(1)

    return ask


@dataclass
class Supervisor:
    """Keeps ``processes`` children running until a signal asks for the end.

    ``child`` is called in the new process with its notes and returns one of the exit codes, which is its exit
    code, too: ``DONE_FOR_GOOD`` ends it, ``RECYCLE`` asks for a successor, ``USAGE`` ends everything. A process that
    ends before ``child`` returns has died, and gets a successor. ``died`` is called in the parent after any end that
    is not clean, with the notes of the child, and returns how many messages it gave back. ``before_fork`` closes
    connections that a child must not inherit.
    """

    child: Callable[[SharedNotes], int]
    processes: int
    make_notes: Callable[[], SharedNotes]
    died: Callable[[SharedNotes], int] = lambda notes: 0
    before_fork: Callable[[], None] = lambda: None
    prepare: Callable[[], bool] = lambda: True
    """Called about once a second until it returns True; no child starts before. Signals and health checks are answered
    meanwhile. An error that it raises ends the supervisor."""
    ready: Callable[[], None] = lambda: None
    """Called once after ``prepare``, before the first child is there."""
    shutdown_timeout: float = SHUTDOWN_SECONDS
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
    _asked_since: float | None = field(default=None, init=False)
    """When the first signal to stop was heeded. Something else may have begun the stop before."""
    _gives_back: bool = field(default=True, init=False)
    """Whether it still settles the messages of processes that have not ended cleanly."""
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
        """Run until every child has ended for good; return the exit code, one of those of ``child_process``."""
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
        settled = self.processed + sum(child.notes.processed for child in self._children if child.pid)
        return is_so, {"processes": self.pids, "settled": settled}

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
            elif self._asked_since is None:
                self._asked_since = time.monotonic()
                # A signal during a restart for changed code ends the command.
                self.begin_anew = False
                self._stop()
            elif time.monotonic() - self._asked_since > SAME_REQUEST_SECONDS:
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
                try:
                    child.fork(self.child, self._close)
                except OSError as error:
                    # The system has no room for another process at present. The other workers go on.
                    child.not_before = time.monotonic() + FORK_AGAIN_SECONDS
                    logger.error("Cannot start a worker process; it is tried again: %s", error)  # noqa: TRY400

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
        if not self._gives_back:
            logger.warning("The messages of process %d will time out: the server is unavailable", pid)
            return
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
            logger.warning("Messages of process %d will time out: %s", pid, error)
            # Each attempt waits for the server for some seconds. If all processes end because of it, the service manager
            # would kill the parent before its last attempt.
            self._gives_back = self._stopping_since is None or not isinstance(error, ServerTrouble)

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


ACCEPT_AGAIN_SECONDS = 0.1
"""Seconds after which a connection is accepted again that the system could not open."""

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
        try:
            while True:
                connection, _ = self._socket.accept()
                if len(self._connections) >= _MOST:
                    # Clients that connect and send nothing must not keep a probe from connecting, so the oldest connection
                    # ends.
                    self._end(next(iter(self._connections)))
                connection.setblocking(False)
                self._connections[connection] = (time.monotonic() + _SECONDS, b"")
                self._selector.register(connection, selectors.EVENT_READ)
        except BlockingIOError:
            pass
        except OSError:
            # No descriptor is free, for example. The socket stays readable, and the loop of the supervisor would not rest.
            time.sleep(ACCEPT_AGAIN_SECONDS)
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
