"""Processed messages: the rows by which a database remembers whose effects it already has.

A row is written by the transaction that has the effects, and deleted when ``RMQ["ONCE_RETENTION"]`` is over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple
from uuid import UUID

from django.db import IntegrityError, close_old_connections, connections, reset_queries, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

from django_rmq.core.duties import Duty
from django_rmq.core.log import safe_logger
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.envelope import uuid_of
from django_rmq.core.model.topic import Topic
from django_rmq.models import ProcessedMessage

logger = safe_logger("django_rmq.consumer")

Row = tuple[str, str]
"""Topic and origin of a processed message; the origin as 32 hexadecimal digits."""

_MODEL: Any = ProcessedMessage._meta

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


def is_there(connection: BaseDatabaseWrapper, number: int) -> bool:
    return bool(ProcessedMessage.objects.using(connection.alias).filter(pk=number).exists())


def _statement(connection: BaseDatabaseWrapper) -> tuple[str, str]:
    """Return the text before and after the values of an INSERT that reports or ignores rows that exist."""
    key = (connection.alias, connection.vendor)
    if key not in _statements:
        quote = connection.ops.quote_name
        topic, origin = (quote(_MODEL.get_field(name).column) for name in ("topic", "origin"))
        head = f"INSERT INTO {quote(_MODEL.db_table)} ({topic}, {origin}) VALUES"
        does_ignore = connection.vendor in IGNORING
        _statements[key] = head, f" ON CONFLICT ({origin}, {topic}) DO NOTHING" if does_ignore else ""
    return _statements[key]


def _insert_carefully(connection: BaseDatabaseWrapper, row: Row) -> bool:
    """Insert a row in a savepoint, which every database can do, and return whether it is new."""
    known = ProcessedMessage.objects.using(connection.alias)
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
            yield 0.05
        if deleted:
            logger.info(
                "Deleted %d processed messages of database %s that were older than ONCE_RETENTION",
                deleted,
                alias,
                extra={"rmq_event": "processed_trimmed", "rmq_messages": deleted},
            )
        yield min(LONGEST_ROUND, max(1.0, seconds / 20))


def _forget_some(alias: str, seconds: float) -> int:
    """Delete the old rows among the first ones; return how many there were.

    Rows were inserted in about the order of their ids, so no index by time is needed.
    """
    reset_queries()  # DEBUG keeps all queries of a thread until somebody does
    # The duty runs rarely, so the database may have closed the connection since.
    close_old_connections()
    try:
        rows = ProcessedMessage.objects.using(alias)
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
        return _MODEL.db_table in connection.introspection.table_names(cursor)
