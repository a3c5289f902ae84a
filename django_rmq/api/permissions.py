"""Who may use the API, and which topics each user may know of, over REST and in the admin.

How a client authenticates is decided by the project's ``REST_FRAMEWORK``. Actions need the same permissions as in the admin,
which ``operations.authorization`` checks.
"""

from __future__ import annotations

from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.views import APIView

from django_rmq.core.model.topic import Topic


class TopicPermission(IsAuthenticated):
    """Permits users who are logged in, and every topic. ``RmqView.initial`` has checked the permission that the request needs.

    ``RMQ["API"]["PERMISSION"]`` may name a subclass. It can forbid more, but grants nothing that Django's
    permissions do not:

        class OwnTopics(TopicPermission):
            def has_object_permission(self, request, view, topic):
                return topic.name.startswith(f"{request.user.username}-")

    A forbidden topic gets the same answer as one that does not exist, and is listed nowhere. The pages of the admin and of
    the metrics ask ``has_object_permission`` as well: with Django's request, and a ``view`` that has
    only ``request`` and ``needed``.
    """

    def has_object_permission(self, request: Request, view: APIView, obj: Topic) -> bool:
        """Return whether the user may know of a topic; ``view.needed`` is the required permission."""
        return True
