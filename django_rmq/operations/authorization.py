"""Who may do and see what: the actor of an operation, the permission of each action, and whether content is shown.

Permissions are Django's, of the model ``Topic``. A project may have a rule that says which topics a user may know of.
``OperationContext.permitted`` asks for permissions on a topic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from django_rmq.conf import get_config
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError, NotPermitted, OperationRefused


class Permission(StrEnum):
    """The permissions; the values are the codenames of Django's permissions.

    Burying and cancelling are a ``DELETE``, because they keep a message from being delivered. Rescheduling is an ``EDIT``,
    because it changes what was sent.
    """

    VIEW = "view_topic"
    VIEW_BODIES = "view_bodies"
    SEND = "send_messages"
    CONSUME = "consume_messages"
    REPLAY = "replay_messages"
    EDIT = "edit_messages"
    DELETE = "delete_messages"
    PAUSE = "pause_topic"
    PURGE = "purge_topic"
    CONTROL_WORKERS = "control_workers"
    VIEW_STACK = "view_stack"

    @property
    def full_name(self) -> str:
        """The name as ``user.has_perm`` expects it."""
        return f"django_rmq.{self.value}"


class TopicRule:
    """Which topics an actor may know of, for what. It asks once about each topic and permission."""

    def __init__(self, ask: Callable[[Topic, Permission], bool]) -> None:
        self._ask = ask
        self._known: dict[tuple[str, Permission], bool] = {}

    def permits(self, topic: Topic, permission: Permission) -> bool:
        """Return whether the actor may know of ``topic`` for what ``permission`` is required for."""
        key = topic.name, permission
        if key not in self._known:
            self._known[key] = bool(self._ask(topic, permission))
        return self._known[key]


def topic_permission() -> Any:
    """Return an instance of the class that ``RMQ["API"]["PERMISSION"]`` names, or None if it names none.

    It decides which topics a user may know of, over REST and in the admin. Raises ``ConfigurationError``.
    """
    path = get_config().api.permission
    if path is None:
        return None
    try:
        return import_string(path)()
    except ImportError as error:
        raise ConfigurationError(f'RMQ["API"]["PERMISSION"] is {path!r}: {error}') from error


@dataclass(frozen=True, slots=True)
class Actor:
    """The actor and its interface. Without ``permits`` everything is permitted, because a shell is trusted."""

    name: str
    via: str
    """admin, command or rest."""
    user: Any = None
    """A user of Django, for the LogEntry, or None."""
    permits: Callable[[Permission], bool] | None = None
    rule: TopicRule | None = None
    """Which topics the actor may know of. None: all, also those that are not declared."""

    @classmethod
    def of_user(cls, user: Any, via: str, rule: TopicRule | None = None) -> Actor:
        """Return the actor for ``user``, with its permissions in Django, which is asked once about each."""

        @cache
        def permits(permission: Permission) -> bool:
            return bool(user.has_perm(permission.full_name))

        return cls(str(user.get_username()), via, user, permits, rule)

    def may(self, permission: Permission) -> bool:
        """Return whether the actor has ``permission``."""
        return self.permits is None or bool(self.permits(permission))

    def require(self, *permissions: Permission) -> None:
        """Raise ``NotPermitted`` unless the actor has all of these permissions."""
        for permission in permissions:
            if not self.may(permission):
                raise NotPermitted(f"{self.name} lacks the permission {permission.full_name}")


def is_redacted(topic: Topic) -> bool:
    """Return whether a formatter redacts the bodies of ``topic``."""
    return get_config().admin.formatter_of(topic.name) is not None


def may_search(actor: Actor, topic: Topic) -> bool:
    """Return whether ``actor`` may search bodies: a search reveals what they contain, letter by letter.

    An actor with all permissions (a shell) sees the stored bytes anyway.
    """
    return actor.permits is None or (actor.may(Permission.VIEW_BODIES) and not is_redacted(topic))


def is_withheld(actor: Actor, topic: Topic) -> bool:
    """Return whether ``actor`` sees the formatter's output for messages of ``topic``; a shell sees what is stored."""
    return actor.permits is not None and is_redacted(topic)


def require_search(actor: Actor, topic: Topic) -> None:
    """Raise ``NotPermitted`` or ``OperationRefused`` unless ``actor`` may search the bodies of ``topic``."""
    actor.require(Permission.VIEW_BODIES)
    if not may_search(actor, topic):
        raise OperationRefused(
            _("the bodies of topic %(topic)s are redacted, and cannot be searched") % {"topic": topic.name}
        )
