"""Copies of a worker: processes that a listener has forked, by itself or through ``multiprocessing``.

A copy ends when the listener returns in it, because it would process the batch again. It keeps neither the worker's signal
handlers nor its subscriptions.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn, Protocol
from weakref import WeakSet

forking: threading.Thread | None = None
"""In a process that a listener has forked: the thread that forked, which is the only thread there; else None."""


_watched: list[type[threading.Thread]] = []


def watch(kind: type[threading.Thread]) -> None:
    """Watch for listeners that fork in threads of this kind."""
    _watched.append(kind)


SignalHandler = Callable[[int, FrameType | None], object]
"""The handler of a signal, which is called with its number and the frame that it interrupts."""

_handled: set[int] = set()
"""The signals whose handlers are a worker's."""


def handle_signal(number: int, handler: SignalHandler) -> object:
    """Set the handler of a signal, and return the previous one. Processes that are forked do not keep it.

    Otherwise a SIGTERM to a child process of a listener would call the handler of a worker, and not end the process.
    """
    _handled.add(number)
    return signal.signal(number, handler)


class OpenSocket(Protocol):
    """An object with a socket. ``fileno`` returns its descriptor, or raises ``OSError`` if it is not open."""

    def fileno(self) -> int: ...


_own_sockets: WeakSet[OpenSocket] = WeakSet()


def keep_from_copies(owner: OpenSocket) -> None:
    """Close the socket of an object, as long as it exists, in each process that is forked from this one.

    After the worker was killed, a copy that lives on would keep the socket open. Redis would still count a subscriber, and sends
    would push messages to it.
    """
    _own_sockets.add(owner)


def _close_sockets() -> None:
    for owner in list(_own_sockets):
        # The object may close its descriptor later, which must not be that of another file by then. So another file takes its
        # place. The object may also have no socket now, or this process no descriptor left.
        with suppress(OSError):
            nothing = os.open(os.devnull, os.O_RDWR)
            try:
                os.dup2(nothing, owner.fileno(), inheritable=False)  # rule: copies_keep_subscriptions
            finally:
                os.close(nothing)


_held_back = threading.local()
"""``before``: the signals that the forking thread had blocked."""


def _hold_signals_back() -> None:
    # A signal that arrives in the child before it has lost the handlers would call those of the worker.
    _held_back.before = signal.pthread_sigmask(signal.SIG_BLOCK, _handled)


def _let_signals_in() -> None:
    # uWSGI forks by itself, and has Python run only the hooks for after a fork.
    if (before := getattr(_held_back, "before", None)) is not None:
        _held_back.before = None
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _note_fork() -> None:
    global forking  # noqa: PLW0603 - there is one per process
    thread = threading.current_thread()
    forking = thread if isinstance(thread, tuple(_watched)) else None
    while _handled:
        signal.signal(_handled.pop(), signal.SIG_DFL)  # rule: copies_keep_the_handlers_of_a_worker
    _close_sockets()
    _let_signals_in()


os.register_at_fork(before=_hold_signals_back, after_in_parent=_let_signals_in, after_in_child=_note_fork)


def end_copy() -> None:
    """End this process if a listener has forked it and now returns in it, because it is only a copy of a worker.

    Otherwise it would run the rest of the batch a second time, report to no dispatcher, and never end.
    """
    if threading.current_thread() is forking:  # rule: copies_go_on
        _exit_copy(sys.exception())


def _exit_copy(error: BaseException | None) -> NoReturn:
    code = 0 if error is None else 1
    try:
        if isinstance(error, SystemExit):
            code = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        else:
            how = "".join(traceback.format_exception(error)) if error is not None else ""
            # Logging is not used here: a lock that another thread held at the fork is never released in this
            # process.
            text = (
                f"A listener forked, and the child process {os.getpid()} left the listener without exiting; it is "
                f"ended now.\n{how}"
            )
            os.write(2, text.encode("utf-8", "backslashreplace"))
    finally:
        os._exit(code & 0xFF)
