"""The throttles of the project: those that ``REST_FRAMEWORK`` sets for all views also apply to these."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from rest_framework.settings import api_settings
from rest_framework.throttling import BaseThrottle

logger = logging.getLogger("django_rmq.api")


def chosen() -> list[BaseThrottle]:
    """Return instances of DEFAULT_THROTTLE_CLASSES; one without a rate in DEFAULT_THROTTLE_RATES throttles nothing."""
    found = []
    kinds: list[Any] = list(api_settings.DEFAULT_THROTTLE_CLASSES)  # already imported, whatever its type says
    for kind in kinds:
        try:
            found.append(kind())
        except ImproperlyConfigured as error:
            _say_once(f"{kind.__module__}.{kind.__qualname__}", str(error))
    return found


@cache
def _say_once(name: str, error: str) -> None:
    logger.error("The throttle %s does not limit the API of RMQ: %s", name, error)


__all__ = ["chosen"]
