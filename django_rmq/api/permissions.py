"""Who may use the API, and which topics each user may know of, over REST and in the admin.

Actions need the same permissions as in the admin, which ``operations`` checks.

The throttles of the project: those that ``REST_FRAMEWORK`` sets for all views also apply to these.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.settings import api_settings
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from django_rmq.core.model.topic import Topic
from django_rmq.operations import topic_permission

logger = logging.getLogger("django_rmq.api")


def configured_throttles() -> list[BaseThrottle]:
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


class TopicPermission(BasePermission):
    """Permits users who are logged in, and every topic for users with the permission that a request needs.

    ``RMQ["API"]["PERMISSION"]`` may name a subclass. It can forbid more, but grants nothing that Django's
    permissions do not:

        class OwnTopics(TopicPermission):
            def has_object_permission(self, request, view, topic):
                return topic.name.startswith(f"{request.user.username}-")

    A forbidden topic gets the same answer as one that does not exist, and is listed nowhere. The pages of the admin ask
    ``has_object_permission`` as well: with Django's request, and a ``view`` that has only ``request`` and ``needed``.
    """

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Return whether the user may use the API at all."""
        return bool(getattr(request.user, "is_authenticated", False))

    def has_object_permission(self, request: Request, view: APIView, obj: Topic) -> bool:
        """Return whether the user may know of a topic; ``view.needed`` is the required permission."""
        return True


def configured_permission() -> BasePermission:
    """Return the configured permission. Raises ``ConfigurationError`` if it cannot be imported."""
    return topic_permission() or TopicPermission()
