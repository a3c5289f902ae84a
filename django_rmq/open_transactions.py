"""Transactions that a listener leaves open: they are rolled back before the next call in the same thread begins.

A generator that stops inside ``transaction.atomic()`` leaves one, for example. Django closes the connection of such a
thread and keeps its state, so nothing else in this thread could use the database any more. ``isolated`` also ends what
else a call may leave behind: the language, the time zone and other context variables.

Because this module knows the connections that each thread has opened, it also closes those that are too old or unusable
between two calls (``close_old``), and says whether any thread is in a transaction (``is_any_open``).
"""

from __future__ import annotations

import decimal
import threading
from collections.abc import Mapping
from contextlib import suppress
from contextvars import copy_context
from typing import NamedTuple
from weakref import WeakValueDictionary

from django.db import Error as DatabaseError
from django.db import connections as databases
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from django_rmq.core.log import safe_logger
from django_rmq.core.model.delivered_message import ListenerArgument, ListenerFunction

logger = safe_logger("django_rmq.consumer")


class TransactionLeftOpen(Exception):
    """A listener has returned and left a transaction open. The transaction was rolled back, so the message has failed."""


class _Opened(threading.local):
    """The connections that a thread has opened, by alias; Django's own handler is slower to search."""

    def __init__(self) -> None:
        self.connections: dict[str, BaseDatabaseWrapper] = {}


_opened = _Opened()


_everywhere: WeakValueDictionary[int, BaseDatabaseWrapper] = WeakValueDictionary()
"""The connections that any thread has opened, by their ids."""


def _record_opened(connection: BaseDatabaseWrapper, **_: object) -> None:
    _opened.connections[connection.alias] = connection
    _everywhere[id(connection)] = connection


connection_created.connect(_record_opened, dispatch_uid="django_rmq.open_transactions")


def record_opened_before() -> None:
    """Note the connections that this thread opened before this module was imported, as a test does."""
    for connection in databases.all(initialized_only=True):
        _record_opened(connection)


def close_old() -> None:
    """Do what ``close_old_connections`` of Django does, in a quarter of the time."""
    # A connection that closes itself stays known, and a listener may open others meanwhile.
    for connection in tuple(_opened.connections.values()):
        connection.close_if_unusable_or_obsolete()


def is_any_open(alias: str) -> bool:
    """Return whether any thread of this process is in a transaction of the database ``alias``, or has autocommit off."""
    # The list of references is made in one step, so another thread may open a connection meanwhile.
    for reference in _everywhere.valuerefs():
        connection = reference()
        if connection is None or connection.alias != alias:
            continue
        if connection.in_atomic_block or not (connection.autocommit or connection.connection is None):
            return True
    return False


class _Depth(NamedTuple):
    """The number of atomic blocks and of savepoints that are open on a connection."""

    blocks: int
    savepoints: int


_NOTHING_OPEN = _Depth(0, 0)


def _depths(opened: Mapping[str, BaseDatabaseWrapper]) -> dict[str, _Depth] | None:
    """Return the transactions that are open before a call: those of a test around it, or of a listener with ``once``."""
    for connection in opened.values():
        if connection.in_atomic_block:
            break
    else:
        return None
    return {
        alias: _Depth(len(connection.atomic_blocks), len(connection.savepoint_ids))
        for alias, connection in opened.items()
        if connection.in_atomic_block
    }


def roll_back_open(before: Mapping[str, _Depth] | None = None) -> list[str]:
    """Roll back the transactions of this thread that are open now and were not ``before``; return their aliases."""
    open_aliases: list[str] = []
    for connection in _opened.connections.values():
        if connection.in_atomic_block or not (connection.autocommit or connection.connection is None):
            break
    else:
        return open_aliases
    for alias, connection in tuple(_opened.connections.items()):
        depth = (before or {}).get(alias, _NOTHING_OPEN)
        if len(connection.atomic_blocks) > depth.blocks:
            open_aliases.append(alias)
            _roll_back(connection, depth)  # rule: leaves_a_transaction_open
        elif not connection.in_atomic_block and connection.connection is not None:
            if _has_manual_transaction(connection):
                open_aliases.append(alias)
            # Django closes such a connection between requests. Its own method asks for a connection first, which a test may
            # forbid.
            if connection.autocommit != connection.settings_dict["AUTOCOMMIT"]:
                connection.close()
    return open_aliases


def _roll_back(connection: BaseDatabaseWrapper, depth: _Depth) -> None:
    for block in connection.atomic_blocks[depth.blocks :]:
        # The garbage collector may end this block later, with its generator. The block must not end a transaction of another
        # message then.
        # rule: lets_an_old_block_end_a_transaction
        block.using = f"{connection.alias}, in a transaction that a listener has left open"
    # The caller has no block of its own on this connection, so a new connection takes its place.
    if not depth.blocks:
        _replace(connection)
        return
    savepoint = next(iter(connection.savepoint_ids[depth.savepoints :]), None)
    del connection.atomic_blocks[depth.blocks :], connection.savepoint_ids[depth.savepoints :]
    # A block with ``savepoint=False`` has no savepoint: only a rollback of the block around it can undo its work.
    connection.needs_rollback = savepoint is None
    if savepoint is not None:
        try:
            connection.savepoint_rollback(savepoint)
            connection.savepoint_commit(savepoint)
        except DatabaseError:
            # A broken connection has lost the savepoint with its transaction.
            connection.needs_rollback = True


def _replace(connection: BaseDatabaseWrapper) -> None:
    """Roll back and close a connection, and have Django make another one."""
    # In a block Django refuses ``rollback``, and ``close`` leaves a connection that refuses every query.
    connection.in_atomic_block = connection.needs_rollback = False
    connection.savepoint_ids, connection.atomic_blocks, connection.run_on_commit = [], [], []
    for end in (connection.rollback, connection.close):
        # The connection may be broken already.
        with suppress(DatabaseError):
            end()
    _opened.connections.pop(connection.alias, None)
    # Django keeps connections as attributes, and code of the project may have deleted this one.
    with suppress(AttributeError):
        del databases[connection.alias]


def _has_manual_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a listener that has switched autocommit off has left a transaction open.

    With ``AUTOCOMMIT: False`` in the settings every query opens one, as the project wants.
    """
    if connection.autocommit or not connection.settings_dict["AUTOCOMMIT"]:
        return False
    if connection.vendor == "postgresql":
        # Only 0, libpq's PQTRANS_IDLE, means that there is no transaction.
        return bool(int(connection.connection.info.transaction_status))
    # Drivers other than those of PostgreSQL and SQLite do not report it, so a transaction is assumed.
    return bool(connection.connection.in_transaction) if connection.vendor == "sqlite" else True


def error_of(listener: str, left: list[str]) -> TransactionLeftOpen:
    """Return the error of the messages whose listener has left transactions open on these databases."""
    where = " and ".join(repr(alias) for alias in left)
    return TransactionLeftOpen(
        f"listener {listener} has left a transaction open on database {where}, so it was rolled back. An atomic block "
        "has not ended, for example in a generator that has not run to its end, or autocommit was switched off"
    )


def log_open(listener: str, left: list[str]) -> None:
    """Log that a listener which has raised an error of its own has also left transactions open."""
    if left:
        logger.warning("%s", error_of(listener, left), extra={"rmq_event": "left_open"})


def call_closed(listener: str, function: ListenerFunction, argument: ListenerArgument) -> object:
    """Call a listener, of which ``listener`` is the name.

    Raise ``TransactionLeftOpen`` if it returns and leaves a transaction open, which is rolled back.
    """
    opened = _opened.connections
    before = _depths(opened) if opened else None
    try:
        returned = function(argument)
    except BaseException:
        if opened:
            log_open(listener, roll_back_open(before))
        raise
    if opened and (open_aliases := roll_back_open(before)):
        raise error_of(listener, open_aliases)  # rule: commits_what_left_a_transaction_open
    return returned


def isolated(listener: str, function: ListenerFunction) -> ListenerFunction:
    """Return a function that calls a listener and leaves its thread as it was.

    Language, time zone, context variables and the decimal context end with the call, because it runs in a copy of the
    context of its thread. Database connections stay, without a transaction.
    """

    def call(argument: ListenerArgument) -> object:
        context = copy_context()
        for variable in context:
            if variable.name == "decimal_context":
                # The thread has a decimal context already. A copy of its context refers to the same object, which a
                # listener may change in place.
                context.run(lambda: decimal.setcontext(decimal.getcontext().copy()))
        return context.run(call_closed, listener, function, argument)  # rule: shares_a_context

    return call
