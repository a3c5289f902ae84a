"""Checks of the setting TASKS: whether its backends of RMQ could run tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, register

from django_rmq.checks.check_messages import TAGS, AppError, read_project
from django_rmq.conf.task_settings import TaskBackend
from django_rmq.tasks import task_modules
from django_rmq.tasks.frameworks import is_installed


@register(*TAGS)
def check_tasks(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Check the backends of TASKS beyond what ``check_settings`` finds."""
    config = read_project()
    if config is None:
        return []
    found: list[CheckMessage] = [problem for backend in config.tasks.values() for problem in _of(backend)]
    if not found:
        found = [
            AppError(
                f'OPTIONS["MODULES"] of TASKS names "{module}", which cannot be imported: {error!r}.',
                id="django_rmq.E089",
            )
            for module, error in task_modules.import_each(task_modules.declared_modules(config))
        ]
    return found


def _of(backend: TaskBackend) -> Iterator[CheckMessage]:
    place = f'TASKS["{backend.alias}"]'
    if not is_installed(backend.package):
        has_none = "this version of Django has no tasks" if not backend.package else "it takes their tasks"
        yield AppError(
            f"{place} needs the package django-tasks, which is not installed: {has_none}.",
            hint='pip install "django-redis-rmq[tasks]".',
            id="django_rmq.E085",
        )
    alias = backend.options.database
    if alias is not None and alias not in settings.DATABASES:
        yield AppError(
            f'{place}["OPTIONS"]["DATABASE"] is {alias!r}, which is not in DATABASES.',
            hint=f"Its aliases are {', '.join(map(repr, settings.DATABASES))}.",
            id="django_rmq.E087",
        )


__all__ = ["check_tasks"]
