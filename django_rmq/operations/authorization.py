"""Who may do and see what: the actor of an operation, the permission of each action, and whether content is shown.

``Actor.of_user`` makes the actor of a request, and ``Actor.of_shell`` that of a command, with the name under which it acts.
Permissions are Django's, of the model ``Topic``. A project may have a rule that says which topics a user may know of.
``OperationContext.permitted`` asks for permissions on a topic.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable, Mapping
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
    """The permissions; the values are the codenames of Django's permissions."""

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


PERMISSION_OF: Mapping[str, Permission] = {
    "replay": Permission.REPLAY,
    "reschedule": Permission.EDIT,
    "cancel": Permission.DELETE,
    "bury": Permission.DELETE,
    "delete": Permission.DELETE,
    "purge": Permission.PURGE,
    "pause": Permission.PAUSE,
    "return claims": Permission.REPLAY,
}
"""Action on messages or a topic → the permission that it requires, on named messages, on all, and in the background.

Burying and cancelling are a ``DELETE``, because they keep a message from being delivered. Rescheduling is an ``EDIT``,
because it changes what was sent.
"""

EDITED_REPLAY = (Permission.REPLAY, Permission.EDIT)
"""The permissions that the replay of a message with another body requires."""


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

    @classmethod
    def of_shell(cls, *, as_shown: bool = False) -> Actor:
        """Return the actor for a command: the user of the system. ``as_shown``: it sees bodies as formatters show them."""
        try:
            name = getpass.getuser()
        except (KeyError, OSError):
            name = str(os.getuid())
        return cls(
            f"{name}@{socket.gethostname()}", "command", permits=(lambda _: True) if as_shown else None
        )

    def may(self, permission: Permission) -> bool:
        """Return whether the actor has ``permission``."""
        return self.permits is None or bool(self.permits(permission))

    def require(self, *permissions: Permission) -> None:
        """Raise ``NotPermitted`` unless the actor has all of these permissions."""
        for permission in permissions:
            if not self.may(permission):
                raise NotPermitted(f"{self.name} lacks the permission {permission.full_name}")


def is_redacted(topic: str) -> bool:
    """Return whether a formatter redacts the bodies of a topic, which the settings need not have any more."""
    return get_config().admin.formatter_of(topic) is not None


def sees_content(actor: Actor) -> bool:
    """Return whether ``actor`` sees bodies, keys, headers and errors, as far as a formatter shows them."""
    return actor.may(Permission.VIEW_BODIES)


def sees_formatted(actor: Actor, topic: str) -> bool:
    """Return whether the formatter's output stands for the content of a topic; a shell sees what is stored."""
    return actor.permits is not None and is_redacted(topic)


def sees_stored(actor: Actor, topic: str) -> bool:
    """Return whether ``actor`` sees the content of a topic as it is stored, and so may search it.

    A search reveals what bodies contain, letter by letter.
    """
    return sees_content(actor) and not sees_formatted(actor, topic)


def require_search(actor: Actor, topic: str) -> None:
    """Raise ``NotPermitted`` or ``OperationRefused`` unless ``actor`` may search the bodies of ``topic``."""
    actor.require(Permission.VIEW_BODIES)
    if not sees_stored(actor, topic):
        raise OperationRefused(
            _("the bodies of topic %(topic)s are redacted, and cannot be searched") % {"topic": topic}
        )
