"""django-tasks-db: two workers on a PostgreSQL that does not wait for its disk (PEER_POSTGRES_PORT)."""

from __future__ import annotations

import sys
from typing import Any

import measuring
import tasking
from tasking import BULK, enqueue

SETTINGS = "2 workers, PostgreSQL with fsync=off, results kept"
GUARANTEE = "a task whose worker dies stays *running*; no retries"
WORKERS = [
    tasking.manage("db_worker", "--interval", "0.05", "--no-startup-delay", "--verbosity", "0")
    for _ in range(2)
]
single = bulk = enqueue


def clear() -> None:
    from django_tasks_db.models import DBTaskResult

    DBTaskResult.objects.all().delete()


def left(client: Any) -> int:
    from django_tasks_db.models import DBTaskResult

    return int(DBTaskResult.objects.filter(finished_at=None).count())


if __name__ == "__main__":
    tasking.prepare("db")
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    measuring.main(sys.modules[__name__])

__all__ = ["BULK", "GUARANTEE", "SETTINGS", "WORKERS", "bulk", "clear", "left", "single"]
