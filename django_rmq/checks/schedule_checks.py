"""Checks of the schedules: whether each can run as it is declared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, register

from django_rmq.checks.check_messages import (
    TAGS,
    AppError,
    read_project,
    sentence,
)
from django_rmq.exceptions import ConfigurationError
from django_rmq.schedules import registry, schedule_requirements


@register(*TAGS)
def check_schedules(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Import the listeners of every app and check the schedules of the settings and of ``@schedule``."""
    config = read_project()
    if config is None:
        return []
    try:
        schedules = registry.schedules()
    except ConfigurationError as error:
        return [AppError(sentence(error), id="django_rmq.E074")]
    return [
        AppError(problem.message, hint=problem.hint or None, id=f"django_rmq.{problem.id}")
        for schedule in schedules.values()
        for problem in schedule_requirements.problems(config, schedule)
    ]


__all__ = ["check_schedules"]
