"""The work of tasks: nothing."""

from __future__ import annotations

from django_tasks import task
from jobs import ran


@task()
def nothing(n: int) -> None:
    """Do nothing."""
    ran()
