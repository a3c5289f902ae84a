"""The rows of the outbox in their table, and the databases that have one: written in the transaction of a send.

``deletion`` decides when a row is deleted.

The ORM computes several times as long as all the rest of a send (`docs/explanation/performance.md`), so the SQL is
written here, for the databases whose tests run. All others use the ORM.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

from django.apps import apps
from django.db import (
    DatabaseError,
    OperationalError,
    ProgrammingError,
    transaction,
)
from django.db import connections as databases
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Func, IntegerField, QuerySet
from django.db.models.functions import Coalesce

from django_rmq.conf import get_config
from django_rmq.core.model.envelope import is_drawn, uuid_of
from django_rmq.core.model.send_results import Durability
from django_rmq.core.producer.placement import Outgoing, slot_crc
from django_rmq.database_access import may_have_table
from django_rmq.exceptions import ConfigurationError

if TYPE_CHECKING:
    from django_rmq.models import OutboxMessage

T = TypeVar("T")
RowValues: TypeAlias = dict[str, Any]
"""The values of a row by its columns."""

LOOK_SECONDS = 60.0
"""Seconds between two checks whether a database without the table has been migrated."""

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
    return [alias for alias in databases if is_allowed(alias)]


def is_allowed(alias: str) -> bool:
    """Return whether the routers allow the migration of the outbox to this database."""
    return may_have_table(alias, "outboxmessage", model=model())


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
        # SQLite reports a missing table as an OperationalError, and a locked file as well. The text tells them apart.
        isinstance(error, OperationalError) and table in str(error)
    )
    if not is_of_table:
        return error
    return ConfigurationError(
        f"the outbox cannot use the table {table} in the database {alias!r} ({str(error).strip()}). "
        f"Run manage.py migrate django_rmq --database={alias}"
    )


def is_mariadb(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the server is MariaDB, for which Django has the backend of MySQL."""
    return bool(connection.vendor == "mysql" and getattr(connection, "mysql_is_mariadb", False))


def has_table(alias: str) -> bool:
    """Return whether the database has the table; one without it is asked once a minute."""
    if time.monotonic() < _missing.get(alias, 0.0):
        return False
    connection = databases[alias]
    with connection.cursor() as cursor:
        exists = model()._meta.db_table in connection.introspection.table_names(cursor)
    if exists:
        _missing.pop(alias, None)
    else:
        _missing[alias] = time.monotonic() + LOOK_SECONDS
    return exists


MOST_OLDER = 200
"""The number of older rows that a sender looks at, beyond one for each of its messages. A message that is sent all the time may
leave thousands while Redis is unavailable, and looking at all of them for each send would take longer and longer."""


class StoredRow(NamedTuple):
    """A row of the outbox. The fields are those of ``OutboxMessage``."""

    id: int
    topic: str
    type: str
    act: Literal["send", "ensure", "remove", "cancel"]
    identity: UUID
    crc: int
    member: bytes
    envelope: bytes | None
    score: int
    replicas: int
    fsync: bool
    sent_ms: int
    due_ms: int | None
    attempts: int


LIGHT = tuple(name for name in StoredRow._fields if name not in ("member", "envelope"))
"""The fields of a row without its contents, which may be large."""


class StoredSend(NamedTuple):
    """A row that the current transaction has written."""

    id: int
    identity: UUID
    act: str
    wanted: Durability
    is_first: bool
    """Whether its message has no older row, because this send has drawn its member."""
    written: float
    """When it was written (monotonic)."""


def now_ms() -> int:
    """Return the time of this machine."""
    return time.time_ns() // 1_000_000


def crc_of(out: Outgoing) -> int:
    """Return the CRC that decides the slot of a message."""
    return slot_crc(None, out.member) if out.crc is None else out.crc


def identity_of(out: Outgoing) -> UUID:
    """Return the hash of what makes a message the same one: topic, slot basis and member."""
    name = out.topic.name.encode()
    # With its length before it, no other name and member can give the same bytes.
    head = b"%d %d %s " % (crc_of(out), len(name), name)
    return uuid_of(head + out.member)


def has_no_older(out: Outgoing) -> bool:
    """Return whether no older row can describe the message. A removal by id may name a drawn member, too."""
    return out.act == "send" and is_drawn(out.topic, out.member)


def write(
    connection: BaseDatabaseWrapper, messages: Sequence[Outgoing], wanted: Durability
) -> list[StoredSend]:
    """Write a row for each message in the transaction of ``connection``.

    Raises ``ConfigurationError`` if the database has no table for them.
    """
    if not messages:
        return []
    alias = connection.alias
    check_allowed(messages[0].topic.name, alias)
    now = now_ms()
    # Until then the relay leaves the row alone, because this process sends the message after the commit.
    due_ms = now + get_config().outbox.grace_ms
    identities = [identity_of(out) for out in messages]
    made = [
        {
            "topic": out.topic.name,
            "type": out.topic.type.value,
            "act": out.act,
            "identity": identity,
            "crc": crc_of(out),
            "member": out.member,
            "envelope": out.envelope,
            "score": out.score,
            "replicas": wanted.replicas,
            "fsync": wanted.fsync,
            "sent_ms": now,
            "due_ms": due_ms,
            "attempts": 0,
            "error": "",
        }
        for out, identity in zip(messages, identities, strict=True)
    ]
    try:
        # A caller may catch the error of the INSERT. Its transaction must not commit without the row even then.
        with transaction.mark_for_rollback_on_error(using=alias):  # rule: goes_on_without_its_row
            ids = insert(connection, made)
    except DatabaseError as error:
        raise explained(alias, error) from error
    written = time.monotonic()
    return [
        StoredSend(number, identity, out.act, wanted, has_no_older(out), written)
        for number, identity, out in zip(ids, identities, messages, strict=True)
    ]


def read_own_and_older(alias: str, own: Sequence[StoredSend]) -> tuple[set[int], list[Older] | None]:
    """Return which of a transaction's ``own`` rows are still there, and the older rows of the same messages.

    The second is None if there are too many older rows, so they are left to the relay.
    """
    first_ids: dict[UUID, int] = {}
    """Message -> its first row of this transaction."""
    for row in own:
        first_ids.setdefault(row.identity, row.id)
    # A sender that repeats what it sent to an unavailable Redis finds one older row of each message.
    most = len(own) + len(first_ids) + MOST_OLDER
    seen_rows = visible(alias, first_ids, most + 1)
    if len(seen_rows) > most:
        return existing(alias, [row.id for row in own]), None
    there = {row.id for row in seen_rows}
    # An id above the first own one may belong to a transaction that commits later, so its row does not count as
    # older.
    return {row.id for row in own if row.id in there}, [
        row for row in seen_rows if row.id < first_ids[row.identity]
    ]


MOST_PARAMETERS = 900
"""The number of values in one query; SQLite was long built with a limit of 999."""

MOST_BYTES = 4_194_304
"""The number of bytes of members and envelopes in one INSERT; MySQL takes 16 MB to 64 MB by default."""

WRITTEN_HERE = frozenset({"postgresql", "sqlite", "mysql"})
"""The vendors whose INSERT ... RETURNING and LIMIT are as written here."""


_AT_ONCE = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "
"""The prefix with which a statement of MariaDB fails with ``_LOCKED``, where it would wait for a lock."""

_LOCKED = 1205


class Older(NamedTuple):
    """A row that was visible before a message with the same identity was sent."""

    id: int
    identity: UUID
    act: str
    due_ms: int | None


def insert(connection: BaseDatabaseWrapper, made: Sequence[RowValues]) -> list[int]:
    """Insert rows, each of the same fields, and return their ids."""
    # MySQL, and SQLite before 3.35, cannot return the ids of inserted rows; other vendors have SQL of their own.
    if connection.vendor not in WRITTEN_HERE or not connection.features.can_return_rows_from_bulk_insert:
        saved = [model()(**row) for row in made]
        for row in saved:
            row.save(using=connection.alias, force_insert=True)
        return [row.pk for row in saved]
    fields: Any = model()._meta
    names, ids = list(made[0]), list[int]()
    # Every driver takes the values of the other columns, which are numbers, booleans and text, as they are.
    adapt = {name: fields.get_field(name).get_db_prep_save for name in ("identity", "member", "envelope")}
    table, number, *columns = _quoted(connection, "id", *names)
    head = f"INSERT INTO {table} ({', '.join(columns)}) VALUES "  # noqa: S608 - names of Django
    places = f"({_places(names)})"
    size = (connection.features.max_query_params or MOST_PARAMETERS) // len(names)
    for some in _by_size(made, size):
        values = [
            adapt[name](value, connection) if name in adapt else value
            for row in some
            for name, value in row.items()
        ]
        with connection.cursor() as cursor:
            cursor.execute(f"{head}{', '.join([places] * len(some))} RETURNING {number}", values)
            ids += [number for (number,) in cursor.fetchall()]
    return ids


def visible(alias: str, identities: Collection[UUID], most: int | None = None) -> list[Older]:
    """Return the rows of these messages; of each query at most ``most``."""
    connection = databases[alias]
    if connection.vendor not in WRITTEN_HERE:
        rows = model().objects.using(alias).values_list(*Older._fields)
        return [
            Older(*row) for some in parts(list(identities)) for row in rows.filter(identity__in=some)[:most]
        ]
    ready = model()._meta.get_field("identity").get_db_prep_value
    table, *columns = _quoted(connection, *Older._fields)
    head = f"SELECT {', '.join(columns)} FROM {table} WHERE {columns[1]} IN "  # noqa: S608 - names of Django
    limit = "" if most is None else f" LIMIT {most:d}"
    older_rows: list[Older] = []
    for some in parts(list(identities)):
        with connection.cursor() as cursor:
            cursor.execute(f"{head}({_places(some)}){limit}", [ready(one, connection) for one in some])
            for number, identity, act, due_ms in cursor.fetchall():
                # A database without a type for UUIDs returns text.
                known = identity if isinstance(identity, UUID) else UUID(identity)
                older_rows.append(Older(number, known, act, due_ms))
    return older_rows


def existing(alias: str, ids: Iterable[int]) -> set[int]:
    """Return the ids of these rows that still exist."""
    rows = model().objects.using(alias)
    return {
        number
        for some in parts(sorted(ids))
        for number in rows.filter(id__in=some).values_list("id", flat=True)
    }


def with_sizes(rows: QuerySet[OutboxMessage]) -> QuerySet[OutboxMessage]:
    """Return the query with ``size``: the bytes of the member and the envelope of each row, which are not read."""
    # Oracle has no LENGTH of a BLOB, and measures it by a function of a package.
    of_oracle = databases[rows.db].vendor == "oracle"
    member, envelope = (
        Func(column, function="DBMS_LOB.GETLENGTH" if of_oracle else "LENGTH", output_field=IntegerField())
        for column in ("member", "envelope")
    )
    return rows.annotate(size=member + Coalesce(envelope, 0))


def read_contents(alias: str, ids: Iterable[int]) -> dict[int, RowValues]:
    """Return the members and envelopes of these rows, by id."""
    rows = model().objects.using(alias).values_list("id", "member", "envelope")
    return {
        number: {"member": bytes(member), "envelope": None if envelope is None else bytes(envelope)}
        for some in parts(list(ids))
        for number, member, envelope in rows.filter(id__in=some)
    }


def delete(alias: str, ids: Iterable[int]) -> int:
    """Delete rows and return how many there were; ``QuerySet.delete`` would open a transaction for it."""
    connection = databases[alias]
    return sum(_delete(connection, "{column} IN ({places})", some) for some in parts(sorted(ids)))


def delete_free(alias: str, ids: Iterable[int]) -> int:
    """Delete the rows that no other transaction has locked, without waiting, and return how many these were.

    Where the database cannot skip locked rows, this waits for their locks as ``delete`` does.
    """
    connection, chosen = databases[alias], sorted(ids)
    if connection.vendor == "postgresql":
        free = "{column} = ANY(ARRAY(SELECT {column} FROM {table} WHERE {column} IN ({places}) FOR UPDATE SKIP LOCKED))"
        return sum(_delete(connection, free, some) for some in parts(chosen))
    if not (chosen and connection.features.has_select_for_update_skip_locked):
        return delete(alias, chosen)
    # A DELETE of MariaDB waits for rows even if its subquery skips them.
    if is_mariadb(connection) and not connection.in_atomic_block:
        try:
            return sum(
                _delete(connection, "{column} IN ({places})", some, _AT_ONCE) for some in parts(chosen)
            )
        except OperationalError as error:
            # Error 1205: another transaction holds one of the rows. The statements below skip that row and delete the
            # others.
            if error.args[0] != _LOCKED:
                raise
    rows, deleted = model().objects.using(alias), 0
    with transaction.atomic(using=alias):
        for some in parts(chosen):
            unlocked = rows.filter(id__in=some).select_for_update(skip_locked=True)
            deleted += delete(alias, list(unlocked.values_list("id", flat=True)))
    return deleted


def _delete(connection: BaseDatabaseWrapper, where: str, ids: list[int], before: str = "") -> int:
    table, column = _quoted(connection, "id")
    # If a crash of the database undoes a deletion, the relay sends the message again. So the commit of the deletion need
    # not wait for the disk. In a transaction of the caller the setting would also hold for the caller's commit.
    hurried = connection.vendor == "postgresql" and not connection.in_atomic_block
    # As a part of the DELETE the setting needs no round trip of its own, and ``true`` ends it with this transaction.
    also = " AND set_config('synchronous_commit', 'off', true) IS NOT NULL" if hurried else ""
    which = where.format(table=table, column=column, places=_places(ids))
    values: Sequence[int | str] = ids
    statement = f"DELETE FROM {table} WHERE {which}{also}"  # noqa: S608 - names of Django
    if connection.vendor == "mysql" and connection.features.has_select_for_update_skip_locked:
        # MySQL and MariaDB scan a small table, or one that was small when its statistics were made, and wait for rows that
        # other transactions have locked. A join by the primary key reads no other row.
        given = "JSON_TABLE(%s, '$[*]' COLUMNS (id BIGINT PATH '$')) given"
        join = f"{given} STRAIGHT_JOIN {table} FORCE INDEX (PRIMARY) ON {table}.{column} = given.id"
        statement, values = f"DELETE {table} FROM {join}", [json.dumps(ids)]
    with connection.cursor() as cursor:
        cursor.execute(before + statement, values)
        deleted: int = cursor.rowcount
        return deleted


def _by_size(made: Sequence[RowValues], size: int) -> Iterator[list[RowValues]]:
    """Yield the rows in lists that one INSERT can hold: up to ``size``, and MOST_BYTES or one row."""
    some: list[RowValues] = []
    carried = 0
    for row in made:
        more = len(row["member"]) + len(row["envelope"] or b"")
        if some and (len(some) == size or carried + more > MOST_BYTES):
            yield some
            some, carried = [], 0
        some.append(row)
        carried += more
    if some:
        yield some


def parts(values: list[T]) -> Iterator[list[T]]:
    """Yield the values in lists that one query can hold."""
    for start in range(0, len(values), MOST_PARAMETERS):
        yield values[start : start + MOST_PARAMETERS]


def _quoted(connection: BaseDatabaseWrapper, *columns: str) -> tuple[str, ...]:
    """Return the quoted name of the table, and those of the columns."""
    return tuple(map(connection.ops.quote_name, (model()._meta.db_table, *columns)))


def _places(values: Sequence[object]) -> str:
    return ", ".join(["%s"] * len(values))
