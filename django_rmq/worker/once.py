"""Once: calls a listener in a transaction that also records its messages, so that its effects happen exactly once.

The row of a message and what the listener writes are committed together, or not at all. A message whose row
exists has had its effects: the listener is not called for it, and the queue commits it. The row is deleted when
``RMQ["ONCE_RETENTION"]`` is over.

The system checks at the end of this file report what topic, database and settings lack for that; a worker does not start then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from django.conf import settings
from django.db import (
    DEFAULT_DB_ALIAS,
    IntegrityError,
    close_old_connections,
    connections,
    reset_queries,
    transaction,
)
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

from django_rmq import open_transactions
from django_rmq.conf import Config, SettingsProblem
from django_rmq.core import forked_copies
from django_rmq.core.consumer.batch_run import HELD_BACK, check_returned, holds
from django_rmq.core.duties import Duty
from django_rmq.core.log import safe_logger
from django_rmq.core.model.delivered_message import ListenerArgument, ListenerFunction, Message
from django_rmq.core.model.envelope import uuid_of
from django_rmq.core.model.topic import BackOff, Topic
from django_rmq.database_access import may_have_table
from django_rmq.exceptions import ConfigurationError
from django_rmq.observability import telemetry

logger = safe_logger("django_rmq.consumer")

MODEL = "processedmessage"

_POSTGRES_IN_TRANSACTION = 2
"""libpq's PQTRANS_INTRANS. In any other state COMMIT will roll back, or there is nothing left to commit."""

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
            "it has called set_rollback(True), has ended its transaction in SQL, or has caught an error of the "
            "database without an atomic block inside the try"
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
    if connection.vendor == "postgresql":
        return bool(connection.connection.info.transaction_status != _POSTGRES_IN_TRANSACTION)
    if connection.vendor == "sqlite":
        return not connection.connection.in_transaction
    # MySQL rolls back the whole transaction at a deadlock, and begins another one with the next statement. Most
    # errors undo only their statement, so the row tells which of the two has happened.
    rows = _model().objects.using(connection.alias)
    return bool(connection.errors_occurred and row is not None and not rows.filter(pk=row).exists())


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


Row = tuple[str, str]
"""Topic and origin of a processed message; the origin as 32 hexadecimal digits."""


def _model() -> Any:
    """Return the model of the rows, which cannot be imported before the apps are loaded."""
    from django_rmq.models import ProcessedMessage

    return ProcessedMessage


IGNORING = {"postgresql", "sqlite"}
"""The vendors that can ignore a row that exists, and nothing else, and say how many rows they have inserted."""

_DUPLICATE = 1062
"""The code by which MySQL and MariaDB report a row that exists."""

ROWS_AT_ONCE = 1_000
"""The number of old rows that are looked at, and deleted, in one step."""

LONGEST_ROUND = 600.0
"""Seconds between two searches for old rows, at most."""

_UUID = re.compile(r"[0-9a-f]{12}[1-7][0-9a-f]{3}[89ab][0-9a-f]{15}")
"""A UUID as every database takes it. MariaDB refuses other numbers of 16 bytes, and some of version 8."""

_statements: dict[tuple[str, str], tuple[str, str]] = {}


def row_of(message: Message) -> Row:
    """Return the row of a message. An origin that is no UUID, as RMQ's own are, becomes a hash of it.

    A message without an origin has the row of this delivery, which no later delivery meets.
    """
    topic, origin = message.topic.name, message.origin
    if origin is None:
        digest = blake2b(message.delivery.member, digest_size=8).hexdigest()
        origin = f"{message.topic.slots}.{message.slot}.{message.receipt}.{digest}"
    elif _UUID.fullmatch(origin):
        return topic, origin
    # Databases differ in how they compare text; all of them compare UUIDs in the same way.
    text = f"{topic} {origin}".encode("utf-8", "surrogatepass")
    return topic, uuid_of(text).hex


class Inserted(NamedTuple):
    """The result of an insert."""

    new: int
    """The number of rows that are new."""
    id: int | None = None
    """The id of one of these, on MySQL and MariaDB."""


def insert(connection: BaseDatabaseWrapper, rows: Sequence[Row]) -> Inserted:
    """Insert ``rows`` in the present transaction.

    If there are several and one exists, MySQL and MariaDB insert none of them. If another transaction is inserting
    one of them, this waits for its end.
    """
    if connection.vendor not in IGNORING and connection.vendor != "mysql":
        return Inserted(sum(_insert_carefully(connection, row) for row in rows))
    head, tail = _statement(connection)
    # Neither names of topics nor hexadecimal digits need quoting, and binding them would cost as much as the rest.
    values = ", ".join([f"('{topic}', '{origin}')" for topic, origin in rows])
    with connection.cursor() as cursor:
        try:
            cursor.execute(f"{head} {values}{tail}")
        except IntegrityError as error:
            # It has undone this statement and not the transaction. INSERT IGNORE would hide any other error, too.
            if connection.vendor != "mysql" or error.args[0] != _DUPLICATE:
                raise
            return Inserted(0)
        return Inserted(cursor.rowcount, cursor.lastrowid if connection.vendor == "mysql" else None)


def _statement(connection: BaseDatabaseWrapper) -> tuple[str, str]:
    """Return the text before and after the values of an INSERT that reports or ignores rows that exist."""
    key = (connection.alias, connection.vendor)
    if key not in _statements:
        quote = connection.ops.quote_name
        model = _model()._meta
        topic, origin = (quote(model.get_field(name).column) for name in ("topic", "origin"))
        head = f"INSERT INTO {quote(model.db_table)} ({topic}, {origin}) VALUES"
        does_ignore = connection.vendor in IGNORING
        _statements[key] = head, f" ON CONFLICT ({origin}, {topic}) DO NOTHING" if does_ignore else ""
    return _statements[key]


def _insert_carefully(connection: BaseDatabaseWrapper, row: Row) -> bool:
    """Insert a row in a savepoint, which every database can do, and return whether it is new."""
    known = _model().objects.using(connection.alias)
    topic, origin = row[0], UUID(row[1])
    try:
        with transaction.atomic(connection.alias):
            known.create(topic=topic, origin=origin)
    except IntegrityError:
        # Another constraint of the database may have failed, and that error must not pass for a row that exists.
        if known.filter(topic=topic, origin=origin).exists():
            return False
        raise
    return True


def forgetting(
    topics: Iterable[Topic], databases: Mapping[str, str], seconds: float, may_delete: Callable[[Topic], bool]
) -> list[tuple[str, Duty]]:
    """Return a duty for each database, by its alias, that deletes rows older than ``seconds``, in bounded steps.

    ``databases``: topic -> the database of its listener with ``once``. ``may_delete`` says whether this worker
    looks after a topic at present; the first topic of a database decides.
    """
    first: dict[str, Topic] = {}
    for topic in topics:
        if topic.name in databases:
            first.setdefault(databases[topic.name], topic)
    return [
        (alias, partial(_forgetting, alias, seconds, partial(may_delete, topic)))
        for alias, topic in first.items()
    ]


def _forgetting(alias: str, seconds: float, may_delete: Callable[[], bool]) -> Generator[float, None, None]:
    """The duty that deletes the old rows of one database."""
    while True:
        deleted = 0
        while may_delete():
            step = _forget_some(alias, seconds)
            deleted += step
            if step < ROWS_AT_ONCE:
                break
            # Listeners write to this table all the time, so the deletions leave them room.
            yield 0.05
        if deleted:
            logger.info(
                "Deleted %d processed messages of database %s that were older than ONCE_RETENTION",
                deleted,
                alias,
                extra={"rmq_event": "processed_trimmed", "rmq_messages": deleted},
            )
        # A row stays about a twentieth longer than it must.
        yield min(LONGEST_ROUND, max(1.0, seconds / 20))


def _forget_some(alias: str, seconds: float) -> int:
    """Delete the old rows among the first ones; return how many there were.

    Rows were inserted in about the order of their ids, so no index by time is needed.
    """
    reset_queries()  # DEBUG keeps all queries of a thread until somebody does
    # The duty runs rarely, so the database may have closed the connection since.
    close_old_connections()
    try:
        rows = _model().objects.using(alias)
        first = list(rows.order_by("id").values_list("id", flat=True)[:ROWS_AT_ONCE])
        # By the clock of the database, which has written the times.
        up_to = Now() - timedelta(seconds=seconds)
        old = list(rows.filter(id__in=first, processed_at__lt=up_to).values_list("id", flat=True))
        if old:
            rows.filter(id__in=old).delete()
        return len(old)
    finally:
        close_old_connections()


def has_table(alias: str) -> bool:
    """Return whether a database has the table. Raises ``django.db.Error`` if it cannot be reached."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        return _model()._meta.db_table in connection.introspection.table_names(cursor)


class OnceUse(Protocol):
    """The part of a registered listener that the requirements concern."""

    @property
    def name(self) -> str: ...
    @property
    def location(self) -> str: ...
    @property
    def topic(self) -> str: ...
    @property
    def using(self) -> str | None: ...


def problems(config: Config, listener: OnceUse) -> Iterator[SettingsProblem]:
    """Yield the conditions that the settings do not meet for ``listener``, which has ``once``. No database is asked."""
    who = f'{listener.name} ({listener.location}) listens to "{listener.topic}" with once='
    alias = listener.using
    assert alias is not None
    topic = config.topics.get(listener.topic)
    if topic is not None:
        yield from _of_topic(topic, who, config.once_retention)
    if alias not in settings.DATABASES:
        known = ", ".join(map(repr, settings.DATABASES))
        yield SettingsProblem(
            "django_rmq.E061", f"{who}{alias!r}, which is not in DATABASES.", f"Its aliases are {known}."
        )
        return
    if not settings.DATABASES[alias].get("AUTOCOMMIT", True):
        yield SettingsProblem(
            "django_rmq.E062",
            f"{who}{alias!r}, which has AUTOCOMMIT: False, so nothing would commit the listener's transaction.",
            "Remove AUTOCOMMIT from this database, or name another one.",
        )
    if not may_have_table(alias, MODEL):
        yield SettingsProblem(
            "django_rmq.E063",
            f"{who}{alias!r}, where DATABASE_ROUTERS allow no table of django_rmq.",
            f'Let allow_migrate({alias!r}, "django_rmq", model_name="{MODEL}") return True, or name another database.',
        )


def _of_topic(topic: Topic, who: str, retention: float) -> Iterator[SettingsProblem]:
    if not topic.origin:
        key = "" if topic.keyed else ' "IDENTITY": "key" and'
        yield SettingsProblem(
            "django_rmq.E060",
            f"{who}, but the topic does not give its messages an origin.",
            f'Set{key} "ORIGIN": True in RMQ["TOPICS"]["{topic.name}"].',
        )
    life = longest_life(topic)
    if life >= retention:
        yield SettingsProblem(
            "django_rmq.E064",
            f"{who}, but its messages can be tried for {life:,.0f} s after they were processed, and are remembered for "
            f"{retention:,.0f} s.",
            f'Set RMQ["ONCE_RETENTION"] to more than {life:.0f}, or lower MAX_RETRIES, MAX_RUNTIME, TIMEOUT or BACKOFF '
            f'of "{topic.name}".',
        )


def warnings(config: Config, listener: OnceUse) -> Iterator[SettingsProblem]:
    """Yield settings that may be a mistake for ``listener``, which has ``once``."""
    if config.uses_outbox and listener.using != DEFAULT_DB_ALIAS:
        yield SettingsProblem(
            "django_rmq.W066",
            f'{listener.name} ({listener.location}) listens to "{listener.topic}" with once={listener.using!r}, and '
            f"sends wait for a transaction of {DEFAULT_DB_ALIAS!r}: what it sends goes out even if its transaction is "
            "rolled back.",
            f"Give using={listener.using!r} with each send of this listener. If it does so, or sends nothing, silence "
            "this check.",
        )


def longest_life(topic: Topic) -> float:
    """Return the most seconds from a first delivery to the end of the last one, if none has to wait for a worker."""
    deliveries = topic.max_retries + 1
    rests = sum(_longest_rest(topic.backoff, failures) for failures in range(1, deliveries))
    return rests + deliveries * (topic.max_runtime + topic.timeout)


def _longest_rest(backoff: BackOff, failures: int) -> float:
    """Return the rest in seconds: as ``lua/slot/_retries.lua`` computes it (``backoff``), or the function if it is longer."""
    longest: float = min(backoff.cap_ms, backoff.base_ms * 2 ** (failures - 1)) / 1000
    if backoff.function is not None:
        # A time-out always uses the numbers, and so does a worker if the function fails.
        with suppress(Exception):
            return max(longest, float(backoff.function(failures)))
    return longest


def missing_table(alias: str) -> list[SettingsProblem]:
    """Return a problem if a database lacks the table of processed messages.

    Raises ``django.db.Error`` if it cannot be reached.
    """
    if has_table(alias):
        return []
    which = "" if alias == "default" else f" --database={alias}"
    return [
        SettingsProblem(
            "django_rmq.W065",
            f"Database {alias!r} has no table for the messages that listeners with once= have processed.",
            f"Run: python manage.py migrate django_rmq{which}",
        )
    ]
