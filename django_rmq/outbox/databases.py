"""Databases with an outbox, the errors of those without, the threads of what is done for databases again and again,
and questions to databases that may hang."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from django.apps import apps
from django.db import (
    DatabaseError,
    Error,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    connections,
    router,
)

from django_rmq.core.consumer.maintenance import DatabaseTrouble, Duty, Maintenance
from django_rmq.exceptions import ConfigurationError

if TYPE_CHECKING:
    from django_rmq.models import OutboxMessage

T = TypeVar("T")

ANSWER_SECONDS = 5.0
"""Seconds for which a worker that starts, and a system check, wait for the answers of databases."""

LOOK_SECONDS = 60.0
"""Seconds between two checks whether a database without the table has it by now."""

ENDED_IN_TRANSACTION = "25P03"
"""What PostgreSQL calls the end of a connection whose transaction stood still for longer than it may."""

_missing: dict[str, float] = {}
"""Alias of a database without the table -> when to check again (monotonic)."""


def model() -> type[OutboxMessage]:
    """Return the model, which is imported only where it is needed. Raises ``ConfigurationError`` without the app."""
    if not apps.is_installed("django_rmq"):
        raise ConfigurationError("the outbox needs 'django_rmq' in INSTALLED_APPS")
    from django_rmq.models import OutboxMessage

    return OutboxMessage


def aliases() -> list[str]:
    """Return the databases that may have an outbox: those to which the routers allow its migration."""
    return [alias for alias in connections if is_allowed(alias)]


def is_allowed(alias: str) -> bool:
    """Return whether the routers allow the migration of the outbox to this database."""
    return bool(router.allow_migrate_model(alias, model()))


def check_allowed(topic: str, alias: str) -> None:
    """Raise ``ConfigurationError`` if the routers keep the outbox out of this database."""
    if not is_allowed(alias):
        raise ConfigurationError(
            f"topic {topic} has the outbox, and DATABASE_ROUTERS do not allow it in the database {alias!r}. "
            "Allow the migration of django_rmq there, or send with on_commit=False or OUTBOX: False"
        )


def explained(alias: str, error: DatabaseError) -> Exception:
    """Return what to raise for an error of the table: how to make it, if it is missing or out of date."""
    table = model()._meta.db_table
    is_of_table = isinstance(error, ProgrammingError) or (
        isinstance(error, OperationalError) and table in str(error)
    )
    if not is_of_table:
        return error
    return ConfigurationError(
        f"the outbox cannot use the table {table} in the database {alias!r} ({str(error).strip()}). "
        f"Run manage.py migrate django_rmq --database={alias}"
    )


def is_mariadb(connection: Any) -> bool:
    """Return whether the server is MariaDB, for which Django has the backend of MySQL."""
    return bool(connection.vendor == "mysql" and connection.mysql_is_mariadb)


def has_table(alias: str) -> bool:
    """Return whether the database has the table; one without it is asked once a minute."""
    if time.monotonic() < _missing.get(alias, 0.0):
        return False
    connection = connections[alias]
    with connection.cursor() as cursor:
        found = model()._meta.db_table in connection.introspection.table_names(cursor)
    if found:
        _missing.pop(alias, None)
    else:
        _missing[alias] = time.monotonic() + LOOK_SECONDS
    return found


def needs_this_thread(alias: str) -> bool:
    """Return whether a database is asked by the calling thread.

    Another thread has other connections: it does not see a transaction that is open here, as in a test. SQLite never
    hangs like a server does.
    """
    connection = connections[alias]
    return connection.in_atomic_block or connection.vendor == "sqlite"


class Answers(NamedTuple, Generic[T]):
    """What databases have answered, by alias."""

    given: dict[str, T]
    problems: dict[str, str]
    """Why the others did not answer."""


def ask_each(aliases: Iterable[str], question: Callable[[str], T]) -> Answers[T]:
    """Ask all these databases at once; return what they answer within ``ANSWER_SECONDS``.

    Each is asked by a process of its own. A thread that waits for a database that hangs cannot be ended, and the
    parent of workers must have no other thread when it forks them. ``question`` raises ``django.db.Error``, and what
    it returns can be pickled.
    """
    end = time.monotonic() + ANSWER_SECONDS
    given, problems = dict[str, T](), dict[str, str]()
    asked = []
    for alias in aliases:
        if needs_this_thread(alias):
            try:
                given[alias] = question(alias)
            except Error as error:
                problems[alias] = str(error)
        else:
            asked.append((alias, *_begin(partial(question, alias), alias, end)))
    for alias, process, answers in asked:
        try:
            if answers.poll(max(0.0, end - time.monotonic())):
                answer, problem = answers.recv()
                if problem is None:
                    given[alias] = answer
                else:
                    problems[alias] = problem
            else:
                problems[alias] = f"it does not answer within {ANSWER_SECONDS:g} s"
        except (EOFError, OSError):
            problems[alias] = "the process that asked it has ended without an answer"
        finally:
            answers.close()
            process.kill()
            process.join()
    return Answers(given, problems)


def _begin(question: Callable[[], Any], alias: str, end: float) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("fork")
    answers, answer = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(question, alias, answer, end), daemon=True)
    process.start()
    answer.close()
    return process, answers


def _answer(question: Callable[[], Any], alias: str, answer: Connection, end: float) -> None:
    """Ask a database, as a process that ends then. Its parent may be that of workers, whose signals are none of its."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    # If its parent is killed, nobody else ends it.
    signal.setitimer(signal.ITIMER_REAL, max(0.0, end - time.monotonic()) + 1.0)
    # Two processes must share neither a connection nor a pool of them.
    connections[alias] = connections[alias].copy()
    connections[alias].settings_dict["OPTIONS"].pop("pool", None)
    try:
        answer.send((question(), None))
    except Error as error:
        answer.send((None, str(error)))
    connections[alias].close()


def threads_of_duties(duties: Iterable[tuple[str, Duty]]) -> list[Maintenance]:
    """Return a thread for each database that runs its duties, so that one that hangs delays those of no other."""
    of_databases: defaultdict[str, list[Duty]] = defaultdict(list)
    for alias, duty in duties:
        of_databases[alias].append(_naming(alias, duty))
    return [Maintenance(some, alias) for alias, some in of_databases.items()]


def _naming(alias: str, duty: Duty) -> Duty:
    """Return the duty, whose error names its database if that is unavailable."""

    def begin() -> Generator[float, None, None]:
        try:
            yield from duty()
        except (OperationalError, InterfaceError, InternalError) as error:
            # PostgreSQL ends a transaction that stands still by an error of this class, and the connection with it.
            if (
                isinstance(error, InternalError)
                and getattr(error.__cause__, "sqlstate", "") != ENDED_IN_TRANSACTION
            ):
                raise
            raise DatabaseTrouble(f"database {alias}: {' '.join(str(error).split())}") from error

    return begin


__all__ = [
    "Answers",
    "aliases",
    "ask_each",
    "check_allowed",
    "explained",
    "has_table",
    "is_allowed",
    "is_mariadb",
    "model",
    "needs_this_thread",
    "threads_of_duties",
]
