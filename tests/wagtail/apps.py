"""Runs each task right after it was enqueued, as Wagtail's tests expect."""

from __future__ import annotations

from collections import Counter
from typing import Any

from django.apps import AppConfig

ran: Counter[str] = Counter()
"""Backend and status -> how many tasks have ended so."""


class DrainedTasks(AppConfig):
    """An app of the project, beside Wagtail's."""

    name = "tests.wagtail"
    label = "drained_tasks"

    def ready(self) -> None:
        """Listen to the signals of whichever package the tasks are."""
        from django_rmq.tasks import framework, is_native

        for package in {"django_tasks", "django.tasks" if is_native() else "django_tasks"}:
            signals = framework(package).signals
            signals.task_enqueued.connect(drain_tasks)
            signals.task_finished.connect(count_task)


def drain_tasks(task_result: Any, **_: Any) -> None:
    """Run the task that was enqueued."""
    from django_rmq.conf import get_config
    from django_rmq.testing import drain

    if get_config().tasks:
        drain(raise_errors=False)


def count_task(sender: type, task_result: Any, **_: Any) -> None:
    """Count how a task has ended."""
    ran[f"{sender.__name__} {task_result.status}"] += 1
