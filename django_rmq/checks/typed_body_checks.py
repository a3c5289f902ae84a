"""Checks of typed bodies: whether the type that BODY names can be used, and the options of the topic fit it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, register

from django_rmq.checks.check_messages import TAGS, AppError, read_project
from django_rmq.typed_bodies import typed_body_requirements


@register(*TAGS)
def check_bodies(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Import the types of bodies, and check that their topics can have them."""
    config = read_project()
    if config is None:
        return []
    return [
        AppError(problem.message, hint=problem.hint or None, id=f"django_rmq.{problem.id}")
        for topic in config.topics.values()
        for problem in typed_body_requirements.problems(topic)
    ]


__all__ = ["check_bodies"]
