"""The SQL of a send with the outbox: insert rows, find those of a message, delete rows.

The ORM computes several times as long as all the rest of a send (`docs/explanation/performance.md`), so these
statements are written here, for the databases whose tests run. All others use the ORM.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from django.db import OperationalError, transaction
from django.db import connections as databases
from django.db.models import Func, IntegerField
from django.db.models.functions import Coalesce

from django_rmq.outbox.databases import is_mariadb, model

MOST_PARAMETERS = 900
"""The number of values in one query; SQLite was long built with a limit of 999."""

MOST_BYTES = 4_194_304
"""The number of bytes of members and envelopes in one INSERT; MySQL takes 16 MB to 64 MB by default."""

WRITTEN_HERE = frozenset({"postgresql", "sqlite", "mysql"})
"""The vendors whose INSERT ... RETURNING and LIMIT are as written here."""


_AT_ONCE = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "
"""What makes a statement of MariaDB fail with ``_LOCKED`` where it would wait for others."""

_LOCKED = 1205


class Older(NamedTuple):
    """A row that was visible before a message with the same identity was sent."""

    id: int
    identity: UUID
    act: str
    due_ms: int | None


def insert(connection: Any, made: Sequence[dict[str, Any]]) -> list[int]:
    """Insert rows, each of the same fields, and return their ids."""
    if not _is_written_here(connection) or not connection.features.can_return_rows_from_bulk_insert:
        saved = [model()(**row) for row in made]
        for row in saved:
            row.save(using=connection.alias, force_insert=True)
        return [row.pk for row in saved]
    fields: Any = model()._meta
    names, ids = list(made[0]), list[int]()
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
    if not _is_written_here(connection):
        rows = model().objects.using(alias).values_list(*Older._fields)
        return [
            Older(*row) for some in parts(list(identities)) for row in rows.filter(identity__in=some)[:most]
        ]
    ready = model()._meta.get_field("identity").get_db_prep_value
    table, *columns = _quoted(connection, *Older._fields)
    head = f"SELECT {', '.join(columns)} FROM {table} WHERE {columns[1]} IN "  # noqa: S608 - names of Django
    limit = "" if most is None else f" LIMIT {most:d}"
    found: list[Older] = []
    for some in parts(list(identities)):
        with connection.cursor() as cursor:
            cursor.execute(f"{head}({_places(some)}){limit}", [ready(one, connection) for one in some])
            for number, identity, act, due_ms in cursor.fetchall():
                known = identity if isinstance(identity, UUID) else UUID(identity)
                found.append(Older(number, known, act, due_ms))
    return found


def existing(alias: str, ids: Iterable[int]) -> set[int]:
    """Return which of these rows there are."""
    rows = model().objects.using(alias)
    return {
        number
        for some in parts(sorted(ids))
        for number in rows.filter(id__in=some).values_list("id", flat=True)
    }


def with_sizes(rows: Any) -> Any:
    """Return the query with ``size``: the bytes of the member and the envelope of each row, which are not read."""
    of_oracle = databases[rows.db].vendor == "oracle"
    member, envelope = (
        Func(
            column,
            function="DBMS_LOB.GETLENGTH" if of_oracle else "LENGTH",
            output_field=IntegerField(),
        )
        for column in ("member", "envelope")
    )
    return rows.annotate(size=member + Coalesce(envelope, 0))


def read_contents(alias: str, ids: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return the members and envelopes of these rows, by id."""
    rows = model().objects.using(alias).values_list("id", "member", "envelope")
    return {
        number: {"member": bytes(member), "envelope": None if envelope is None else bytes(envelope)}
        for some in parts(list(ids))
        for number, member, envelope in rows.filter(id__in=some)
    }


def delete(alias: str, ids: Iterable[int]) -> int:
    """Delete rows and return how many there were, with one statement each, where ``QuerySet.delete`` opens a transaction."""
    connection = databases[alias]
    return sum(_delete(connection, "{column} IN ({places})", some) for some in parts(sorted(ids)))


def delete_free(alias: str, ids: Iterable[int]) -> int:
    """Delete the rows that nobody else has locked, without waiting for anybody, and return how many these were.

    Where the database cannot skip locked rows, this waits for them as ``delete`` does.
    """
    connection, chosen = databases[alias], sorted(ids)
    if connection.vendor == "postgresql":
        free = (
            "{column} IN (SELECT {column} FROM {table} WHERE {column} IN ({places}) FOR UPDATE SKIP LOCKED)"
        )
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
            if error.args[0] != _LOCKED:
                raise
    rows, deleted = model().objects.using(alias), 0
    with transaction.atomic(using=alias):
        for some in parts(chosen):
            unlocked = rows.filter(id__in=some).select_for_update(skip_locked=True)
            deleted += delete(alias, list(unlocked.values_list("id", flat=True)))
    return deleted


def _delete(connection: Any, where: str, ids: list[int], before: str = "") -> int:
    table, column = _quoted(connection, "id")
    # A deletion that a crash of the database undoes has its message sent again, so it need not wait for the disk.
    # Within a transaction that is not for us to say.
    hurried = connection.vendor == "postgresql" and not connection.in_atomic_block
    also = " AND set_config('synchronous_commit', 'off', true) IS NOT NULL" if hurried else ""
    which = where.format(table=table, column=column, places=_places(ids))
    values: Sequence[Any] = ids
    statement = f"DELETE FROM {table} WHERE {which}{also}"  # noqa: S608 - names of Django
    if connection.vendor == "mysql" and connection.features.has_select_for_update_skip_locked:
        # In a table that is small, or was when it was last counted, MySQL and MariaDB would look at all rows, and
        # wait for those that others have locked. A join by the primary key looks at no other row.
        given = "JSON_TABLE(%s, '$[*]' COLUMNS (id BIGINT PATH '$')) given"
        join = f"{given} STRAIGHT_JOIN {table} FORCE INDEX (PRIMARY) ON {table}.{column} = given.id"
        statement, values = f"DELETE {table} FROM {join}", [json.dumps(ids)]
    with connection.cursor() as cursor:
        cursor.execute(before + statement, values)
        deleted: int = cursor.rowcount
        return deleted


def _by_size(made: Sequence[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows in lists that one INSERT can hold: up to ``size``, and MOST_BYTES or one row."""
    some: list[dict[str, Any]] = []
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


def parts(values: list[Any], size: int = MOST_PARAMETERS) -> Iterator[list[Any]]:
    """Yield the values in lists that one query can hold."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _is_written_here(connection: Any) -> bool:
    return connection.vendor in WRITTEN_HERE


def _quoted(connection: Any, *columns: str) -> tuple[str, ...]:
    """Return the quoted name of the table, and those of the columns."""
    return tuple(map(connection.ops.quote_name, (model()._meta.db_table, *columns)))


def _places(values: Sequence[Any]) -> str:
    return ", ".join(["%s"] * len(values))


__all__ = ["Older", "delete", "delete_free", "existing", "insert", "parts", "visible"]
