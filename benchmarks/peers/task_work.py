"""The work of tasks: nothing."""

from __future__ import annotations

from django_tasks import task


@task()
def nothing(n: int) -> None:
    """Do nothing."""
