"""Databases and other servers that may hang: how they are asked within seconds, and the thread of the duties of each database."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Generic, NamedTuple, TypeVar

from django.db import Error, InterfaceError, InternalError, OperationalError, connections, router

from django_rmq.core.duties import Duty, DutyThread
from django_rmq.exceptions import ServerTrouble

T = TypeVar("T")

ANSWER_SECONDS = 5.0
"""Seconds for which a worker that starts, and a system check, wait for the answers of databases."""

ENDED_IN_TRANSACTION = "25P03"
"""The SQLSTATE with which PostgreSQL ends a connection whose transaction was idle for longer than it may."""


ROUTER_SECONDS = 1.0
"""Seconds for which what the routers answer in a new thread holds: each send may ask, and the thread costs more than the send."""


class DatabaseTrouble(ServerTrouble):
    """A duty has lost its connection to a database, or cannot get one."""


def needs_this_thread(alias: str) -> bool:
    """Return whether a database is asked by the calling thread.

    Another thread has other connections: it does not see a transaction that is open here, as in a test. SQLite never
    hangs like a server does.
    """
    connection = connections[alias]
    return connection.in_atomic_block or connection.vendor == "sqlite"


class _RouterAnswer(NamedTuple):
    """Whether the routers allow a table, asked in a new thread."""

    routers: list[object]
    until: float
    """The time (monotonic) from which they are asked again."""
    is_allowed: bool


_router_answers: dict[tuple[str, str], _RouterAnswer] = {}
"""For each alias and name of a model the last answer of the routers in a new thread."""


def may_have_table(alias: str, model_name: str, **hints: object) -> bool:
    """Return whether the routers allow the table of this model of the app in a database."""
    ask = partial(router.allow_migrate, alias, "django_rmq", model_name=model_name, **hints)
    if ask():
        return True
    # A router may answer by the connection of the calling thread, as that of django-tenants does by the schema of a request or
    # of a migration. Workers have connections of their own, and so has a new thread.
    known = _router_answers.get((alias, model_name))
    if known is None or known.routers is not router.routers or time.monotonic() >= known.until:
        with ThreadPoolExecutor(1) as thread:
            is_allowed = thread.submit(ask).result()
        known = _RouterAnswer(router.routers, time.monotonic() + ROUTER_SECONDS, is_allowed)
        _router_answers[alias, model_name] = known
    return known.is_allowed


class Answers(NamedTuple, Generic[T]):
    """The answers of databases, by alias."""

    answers: dict[str, T]
    problems: dict[str, str]
    """Why the others did not answer."""


def ask_each(aliases: Iterable[str], question: Callable[[str], T]) -> Answers[T]:
    """Ask all these databases at once; return the answers that come within ``ANSWER_SECONDS``.

    Each is asked by a process of its own. A thread that waits for a database that hangs cannot be ended, and the
    parent of workers must have no other thread when it forks them. ``question`` raises ``django.db.Error``, and what
    it returns can be pickled.
    """
    end = time.monotonic() + ANSWER_SECONDS
    answers, problems = dict[str, T](), dict[str, str]()
    started = []
    for alias in aliases:
        if needs_this_thread(alias):
            try:
                answers[alias] = question(alias)
            except Error as error:
                problems[alias] = str(error)
        else:
            started.append((alias, *_begin(partial(question, alias), alias, end)))
    for alias, process, receiver in started:
        try:
            if receiver.poll(max(0.0, end - time.monotonic())):
                answer, problem = receiver.recv()
                if problem is None:
                    answers[alias] = answer
                else:
                    problems[alias] = problem
            else:
                problems[alias] = f"it does not answer within {ANSWER_SECONDS:g} s"
        except (EOFError, OSError):
            # The child was killed, for example for lack of memory, and its end of the pipe closed with it.
            problems[alias] = "the process that asked it has ended without an answer"
        finally:
            receiver.close()
            # A child that waits for a hung database ends by a signal only.
            process.kill()
            process.join()
    return Answers(answers, problems)


def _begin(question: Callable[[], object], alias: str, end: float) -> tuple[ForkProcess, Connection]:
    context = multiprocessing.get_context("fork")
    answers, answer = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(question, alias, answer, end), daemon=True)
    process.start()
    # Without this copy of the writing end, ``recv`` raises EOFError as soon as the child has ended.
    answer.close()
    return process, answers


def _answer(question: Callable[[], object], alias: str, answer: Connection, end: float) -> None:
    """Ask a database in a child process, which then ends. Its parent may be a supervisor, whose signals are not for it."""
    # The fork has inherited the handlers of its parent, and the pipe by which the parent's loop hears of signals.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    # A parent that was killed cannot end this process, so an alarm does.
    # It comes a second after the parent gives up, so that a living parent ends this process itself.
    signal.setitimer(signal.ITIMER_REAL, max(0.0, end - time.monotonic()) + 1.0)
    # Two processes must share neither a connection nor a pool of them.
    connections[alias] = connections[alias].copy()
    connections[alias].settings_dict["OPTIONS"].pop("pool", None)
    try:
        answer.send((question(), None))
    except Exception as error:  # noqa: BLE001 - a router or a backend may raise anything
        answer.send((None, str(error) if isinstance(error, Error) else repr(error)))
    connections[alias].close()


def threads_of_duties(duties: Iterable[tuple[str, Duty]]) -> list[DutyThread]:
    """Return one maintenance thread for each database, so that a database that hangs delays only its own duties."""
    of_databases: defaultdict[str, list[Duty]] = defaultdict(list)
    for alias, duty in duties:
        of_databases[alias].append(_naming(alias, duty))
    return [DutyThread(some, alias) for alias, some in of_databases.items()]


def _naming(alias: str, duty: Duty) -> Duty:
    """Return the duty, whose error names its database if that is unavailable."""

    def begin() -> Generator[float, None, None]:
        try:
            yield from duty()
        except (OperationalError, InterfaceError, InternalError) as error:
            # PostgreSQL ends a transaction that is idle for too long by an error of this class, and the connection with it.
            if isinstance(error, InternalError) and _sqlstate_of(error) != ENDED_IN_TRANSACTION:
                raise
            raise DatabaseTrouble(f"database {alias}: {' '.join(str(error).split())}") from error

    return begin


def _sqlstate_of(error: Error) -> str | None:
    """Return the code that PostgreSQL gives an error: psycopg calls it ``sqlstate``, and psycopg2 ``pgcode``."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)


class ParallelReads(threading.Thread, Generic[T]):
    """A question to a server. ``start`` asks it in a thread of its own, ``run`` in the calling one."""

    def __init__(self, name: str, ask: Callable[[], Iterable[T]]) -> None:
        super().__init__(name=name, daemon=True)
        self.answers: list[T] = []
        """The answers so far."""
        self._ask = ask
        self._error: BaseException | None = None
        self._end = float("inf")

    def run(self) -> None:
        try:
            for one in self._ask():
                self.answers.append(one)
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            self._error = error
        finally:
            if threading.current_thread() is self:
                connections.close_all()  # No other thread uses the connections of this one.

    def wait(self, end: float) -> bool:
        """Wait until the answer is complete, or until ``end`` (monotonic); return whether it is. Raises the error of ``ask``."""
        self._end = end
        # ``run`` was called in this thread, so there is no thread to wait for.
        if self.ident is not None:
            self.join(max(0.0, end - time.monotonic()))
        if self._error is not None:
            raise self._error
        return not self.is_alive()

    def wait_for_progress(self, seconds: float) -> bool:
        """Wait like ``wait``, but for as long as there is more of the answer within each ``seconds``."""
        count = -1
        while count < len(self.answers):
            count = len(self.answers)
            if self.wait(time.monotonic() + seconds):
                return True
        return False

    @property
    def hangs(self) -> bool:
        """Whether a caller has waited for the answer in vain, and it is still missing."""
        return self.is_alive() and time.monotonic() > self._end
