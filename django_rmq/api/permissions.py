"""Who may use the API at all, and which topics they may know of.

What is done there needs the permissions that it needs in the admin, which ``operations`` asks for.
"""

from __future__ import annotations

from typing import Any

from django.utils.module_loading import import_string
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import ConfigurationError
from django_rmq.project.settings import get_config


class TopicPermission(BasePermission):
    """Users who are logged in; and every topic, for those who have the permission that a request needs.

    ``RMQ["API"]["PERMISSION"]`` may name a subclass. It can forbid more, and grants nothing that Django's permissions
    do not:

        class OwnTopics(TopicPermission):
            def has_object_permission(self, request, view, topic):
                return topic.name.startswith(f"{request.user.username}-")

    A topic that it forbids is answered like one that does not exist, and is listed nowhere.
    """

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Return whether the user may use the API at all."""
        return bool(getattr(request.user, "is_authenticated", False))

    def has_object_permission(self, request: Request, view: APIView, obj: Topic) -> bool:
        """Return whether the user may know of a topic; ``view.needed`` says what for."""
        return True


def chosen() -> BasePermission:
    """Return the permission that the settings name. Raises ``ConfigurationError`` if there is none."""
    path = get_config().api.permission
    if path is None:
        return TopicPermission()
    try:
        found: Any = import_string(path)
    except ImportError as error:
        raise ConfigurationError(f'RMQ["API"]["PERMISSION"] is {path!r}: {error}') from error
    permission: BasePermission = found()
    return permission


__all__ = ["TopicPermission", "chosen"]
