"""Database servers for tests, by name, and a database of one beside that of the project."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.test import TransactionTestCase

from tests.e2e.mariadb import mariadb
from tests.e2e.postgres import postgres

SERVERS: dict[str, Any] = {"postgres": postgres, "mariadb": mariadb}
"""What runs each of them."""


class SchemaRouter:
    """As the router of django-tenants: while the connection of this thread is in the schema of a tenant, the tables that tenants
    share are not allowed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connections[DEFAULT_DB_ALIAS], "schema_name", "tenant", raising=False)

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if hasattr(connections[db], "schema_name") else None


MADE_BY_MIGRATIONS = {"django_migrations", "django_content_type", "auth_permission"}
"""Tables whose rows stay: Django's ``flush`` deletes what models and permissions there are, and writes it again."""


def empty_tables(case: TransactionTestCase) -> None:
    """Delete what a test with real transactions has written: what ``flush`` does, in a tenth of the time."""
    for alias in case._databases_names(include_mirrors=False):  # type: ignore[attr-defined]
        connection = connections[alias]
        tables = connection.introspection.django_table_names(only_existing=True, include_views=False)
        with (
            connection.constraint_checks_disabled(),
            transaction.atomic(alias),
            connection.cursor() as cursor,
        ):
            for table in sorted(set(tables) - MADE_BY_MIGRATIONS):
                cursor.execute(f"DELETE FROM {connection.ops.quote_name(table)}")


@contextmanager
def database_beside(alias: str, server: Any, models: Sequence[Any]) -> Iterator[None]:
    """Add a database of the server to those of the project, with the tables of the models."""
    default = connections.settings["default"]
    connections.settings[alias] = {**default, **server.settings}
    with connections[alias].schema_editor() as editor:
        for model in models:
            editor.create_model(model)
    try:
        yield
    finally:
        with connections[alias].schema_editor() as editor:
            for model in models:
                editor.delete_model(model)
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


def count_lock_waits(alias: str) -> int:
    """Return how many transactions of the server wait for another one."""
    statements = {
        "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
        # Its table innodb_trx is a copy that is never renewed while somebody reads it more than ten times a second.
        "mysql": (
            "SELECT CAST(variable_value AS INTEGER) FROM information_schema.global_status "
            "WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS'"
        ),
    }
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(statements[connection.vendor])
        row: tuple[int] = cursor.fetchone()
        return row[0]


MEGABYTE = 1_048_576


def write_large_rows(alias: str, topic: str, count: int) -> None:
    """Write rows of the outbox: one in two has a body of a megabyte, the others have small ones."""
    # Programs that import the servers have not set up Django yet.
    from django_rmq.models import OutboxMessage

    for number in range(count):
        OutboxMessage.objects.using(alias).create(
            topic=topic,
            type="priority",
            act="send",
            identity=uuid4(),
            crc=number,
            member=b'"%s"' % (b"x" * (MEGABYTE if number % 2 else 10)),
            score=100,
            sent_ms=1,
            due_ms=1,
        )


__all__ = ["MEGABYTE", "SERVERS", "count_lock_waits", "database_beside", "write_large_rows"]
