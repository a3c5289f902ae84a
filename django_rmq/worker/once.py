"""Once: calls a listener in a transaction that also records its messages, so that its effects happen exactly once.

The row of a message and what the listener writes are committed together, or not at all. A message whose row
exists has had its effects: the listener is not called for it, and the queue commits it.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_rmq import open_transactions
from django_rmq.core import forked_copies
from django_rmq.core.consumer.batch_run import HELD_BACK, check_returned, holds
from django_rmq.core.log import safe_logger
from django_rmq.core.model.delivered_message import ListenerArgument, ListenerFunction, Message
from django_rmq.exceptions import ConfigurationError
from django_rmq.observability import telemetry

logger = safe_logger("django_rmq.consumer")

_POSTGRES_IN_ERROR = 3
"""libpq's PQTRANS_INERROR: a statement has failed, and COMMIT will roll back."""

_warned: set[str] = set()
"""Topics of which a message without an origin was already logged."""


class NotCommitted(Exception):
    """A listener with ``once`` returned, but its transaction cannot be committed."""


class _PartlyDone(Exception):
    """Some messages of a list were processed before, and it is unknown which."""


class OnceListener:
    """Stands in for the listener ``name`` with ``once``; ``using`` is the database in which its effects happen."""

    def __init__(self, name: str, function: ListenerFunction, using: str) -> None:
        self._name, self._function = name, function
        self.using = using

    def __call__(self, argument: ListenerArgument) -> object:
        """Call the listener with a message, or with the messages of a list that were not processed before."""
        if isinstance(argument, list):
            return self._call_list(argument)
        connection = self._connection()
        # Durable: if somebody else had begun a transaction, the end of this one would commit nothing.
        with transaction.atomic(using=self.using, durable=True):
            new, row = _record(connection, [argument])
            returned = self._call(connection, argument, new, row) if new else None
        if not new:
            _log_done_before([argument])
        return returned

    def _call_list(self, messages: list[Message]) -> object:
        """Call the listener with the messages that are new, in one transaction.

        If it gives up some of them with ``retry`` or ``reject``, nothing is kept, and it is called again with the
        others: nobody knows for which message it wrote which row. On a strict fifo topic
        the others are those before the first message that holds the slot. The messages behind that one must not
        have an effect before it.
        """
        connection, is_partly_done = self._connection(), False
        while messages:
            try:
                with transaction.atomic(using=self.using, durable=True):
                    new, row = _record(connection, messages, one_by_one=is_partly_done)
                    # A list of its own: the listener may change it.
                    returned = self._call(connection, list(new), new, row) if new else None
            except _PartlyDone:
                # A process may die between the commit of its transaction and that of the message, which then comes again.
                # Inserting one by one shows which messages these are.
                is_partly_done = True
                continue
            if returned is False:
                return False
            called, before = set(map(id, new)), _before_the_hold(messages)
            _log_done_before([message for message in before if id(message) not in called])
            if all(message.outcome is None for message in new):
                break
            messages = [message for message in before if id(message) in called and message.outcome is None]
        return None

    def _connection(self) -> BaseDatabaseWrapper:
        connection = connections[self.using]
        if not connection.in_atomic_block and not connection.get_autocommit():
            raise ConfigurationError(
                f"autocommit is off on database {self.using!r}: a listener with once= needs it on, because nothing "
                "would commit its transaction"
            )
        return connection

    def _call(
        self,
        connection: BaseDatabaseWrapper,
        argument: ListenerArgument,
        messages: list[Message],
        row: int | None,
    ) -> object:
        """Call the listener; have the transaction rolled back unless all ``messages`` are a success."""
        try:
            # A transaction that the listener leaves open would take the end of this one for its own.
            returned = open_transactions.call_closed(self._name, self._function, argument)
        finally:
            # A copy of the process must not reach the end of the transaction: it would commit it.
            if forked_copies.forking is not None:
                forked_copies.end_copy()
        if returned is False or any(message.outcome is not None for message in messages):
            # The message has failed, or was given up, so the effects of this attempt must not stay.
            connection.set_rollback(True)  # rule: keeps_the_effects_of_a_failure
            return returned
        if returned is not None:
            check_returned(returned)
        _check_kept(connection, row)
        return returned


def _before_the_hold(messages: list[Message]) -> list[Message]:
    """Return the messages that may have an effect now: on a strict fifo topic, those before one that holds the slot.

    That message is tried again first, so the messages behind it are marked as not called: the queue must not commit them.
    """
    is_strict = bool(messages) and messages[0].topic.is_strict
    for index, message in enumerate(messages if is_strict else ()):
        if holds(message.outcome):
            for later in messages[index + 1 :]:
                later.outcome = HELD_BACK
            return messages[:index]
    return messages


def _record(
    connection: BaseDatabaseWrapper, messages: list[Message], *, one_by_one: bool = False
) -> tuple[list[Message], int | None]:
    """Record ``messages``; return the messages that were not recorded before, and the id of a row, where it is known."""
    # A model, which cannot be imported before the apps are loaded.
    from django_rmq.worker.processed_messages import insert, row_of

    for message in messages:
        if message.envelope.origin is None:
            _warn_of(message)
    if len(messages) == 1:
        made = insert(connection, [row_of(messages[0])])
        return (messages if made.new else []), made.id  # rule: calls_again_for_what_is_recorded
    rows = {id(message): row_of(message) for message in messages}
    # In one order everywhere, so that two transactions with the same messages do not wait for each other.
    ordered = sorted(rows.items(), key=lambda item: item[1])
    if one_by_one:
        each = {name: insert(connection, [row]) for name, row in ordered}
        new = [message for message in messages if each[id(message)].new]
        return new, each[id(new[0])].id if new else None
    made = insert(connection, [row for _, row in ordered])
    if made.new < len(messages):
        raise _PartlyDone
    return messages, made.id


def _check_kept(connection: BaseDatabaseWrapper, row: int | None) -> None:
    """Raise ``NotCommitted`` if the end of the transaction will not commit it."""
    if connection.closed_in_transaction:
        reason = "it has closed the connection"
    elif connection.needs_rollback or _has_lost_transaction(connection, row):
        reason = (
            "it has called set_rollback(True), or has caught an error of the database without an atomic block "
            "inside the try"
        )
    else:
        return
    raise NotCommitted(
        f"what the listener wrote to database {connection.alias!r} cannot be committed, because {reason}"
    )


def _has_lost_transaction(connection: BaseDatabaseWrapper, row: int | None) -> bool:
    """Return whether the database has given up the transaction; a COMMIT would raise no error all the same.

    ``row``: the id of a row that the transaction has inserted at its beginning.
    """
    from django_rmq.worker.processed_messages import is_there

    if connection.vendor == "postgresql":
        return bool(connection.connection.info.transaction_status == _POSTGRES_IN_ERROR)
    if connection.vendor == "sqlite":
        return not connection.connection.in_transaction
    # MySQL rolls back the whole transaction at a deadlock, and begins another one with the next statement. Most
    # errors undo only their statement, so the row tells which of the two has happened.
    return bool(connection.errors_occurred and row is not None and not is_there(connection, row))


def _log_done_before(messages: Sequence[Message]) -> None:
    """Count and log messages that were processed before."""
    if not messages:
        return
    topic = messages[0].topic.name
    telemetry.count_processed(topic, len(messages))
    for message in messages:
        logger.debug(
            "Message %s of topic %s was processed before: its listener is not called",
            message.name,
            topic,
            extra={"rmq_event": "processed_before", "rmq_topic": topic, "rmq_message": message.name},
        )


def _warn_of(message: Message) -> None:
    topic = message.topic.name
    if topic not in _warned:
        _warned.add(topic)
        logger.warning(
            "Message %s of topic %s has no origin, so its effects may happen more than once. It was sent before "
            "ORIGIN was switched on, or by a program that does not use RMQ",
            message.name,
            topic,
            extra={"rmq_event": "no_origin", "rmq_topic": topic, "rmq_message": message.name},
        )
