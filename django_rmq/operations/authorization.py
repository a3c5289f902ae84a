"""The actor of an operation, its permissions, and the audit trail. ``OperationContext.permitted`` asks for one of a topic.

Permissions are Django's, of the model ``Topic``. A project may have a rule that says which topics a user may know of.
Every action is written to the logger ``django_rmq.audit`` and, if there is a user and the admin is installed, as a
LogEntry of the topic: who, what, how many. An entry names messages by the filter, by sealed ids and by the values before
and after; never by any content. Nothing here deletes old entries: they are Django's, and the project's to delete.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

from django.apps import apps
from django.db import DatabaseError
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from django_rmq.conf import get_config
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError, NotPermitted, OperationRefused

logger = logging.getLogger("django_rmq.audit")


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


@dataclass(slots=True)
class Trace:
    """The single LogEntry of an action that takes several requests, and its outcomes so far."""

    entry: int | None = None
    """The primary key of the LogEntry, or None before it is written."""
    outcomes: dict[str, int] = field(default_factory=dict)
    undo: str = ""
    """The id by which what it deletes can be brought back; empty before it deletes."""


def record(
    actor: Actor,
    act: str,
    topic: str,
    outcomes: Mapping[str, int],
    note: str = "",
    *,
    entry: bool = True,
    trace: Trace | None = None,
) -> None:
    """Record that ``actor`` performed an action on ``topic`` (empty: on a worker), and the outcomes.

    ``entry`` False: without a LogEntry, for actions that programs do many times a second. ``trace``: add the outcomes
    to the LogEntry of this trace instead of writing a new one. If the database is unavailable, its error is
    logged and not raised, because the action itself has been done.
    """
    logger.info(
        "%s by %s (%s)%s",
        _sentence(act, note, outcomes),
        _one_line(actor.name),
        actor.via,
        f" on topic {topic}" if topic else "",
        extra={
            "rmq_event": "audit",
            "rmq_act": act,
            "rmq_topic": topic,
            "rmq_actor": actor.name,
            "rmq_via": actor.via,
            "rmq_note": note,
            "rmq_outcomes": dict(outcomes),
        },
    )
    # An anonymous user has no primary key, which a LogEntry needs.
    if not entry or actor.user is None or not actor.user.pk or not apps.is_installed("django.contrib.admin"):
        return
    trace = trace or Trace()
    trace.outcomes = dict(Counter(trace.outcomes) + Counter(outcomes))
    sentence = _sentence(act, note, trace.outcomes)
    try:
        trace.entry = _log_entry(actor, topic, sentence, trace.entry)
    except DatabaseError:
        logger.exception("The LogEntry could not be written: %s", sentence)


def _sentence(act: str, note: str, outcomes: Mapping[str, int]) -> str:
    counts = ", ".join(f"{count} {word.replace('_', ' ')}" for word, count in outcomes.items() if count)
    what = f"{act} ({note})" if note else act
    return f"{what}: {counts or 'nothing'}"


def _log_entry(actor: Actor, topic: str, sentence: str, known: int | None) -> int:
    """Write a LogEntry, or rewrite the ``known`` one of this user and topic; return its primary key."""
    from django.contrib.admin.models import CHANGE, LogEntry
    from django.contrib.contenttypes.models import ContentType

    from django_rmq.models import Topic

    # PostgreSQL stores no NUL, and the page shows one line.
    message = f"{sentence[:1].upper()}{sentence[1:]} ({actor.via})".replace("\0", "\N{REPLACEMENT CHARACTER}")
    if known is not None:
        own = LogEntry.objects.filter(pk=known, user_id=actor.user.pk, object_id=topic)
        # A person may have deleted the entry between two requests. A new one is written then.
        if own.update(change_message=message):
            return known
    created = LogEntry.objects.create(
        user_id=actor.user.pk,
        content_type_id=ContentType.objects.get_for_model(Topic, for_concrete_model=False).pk,
        object_id=topic,
        object_repr=topic or "workers",
        action_flag=CHANGE,
        change_message=message,
    )
    return int(created.pk)


def _one_line(text: str) -> str:
    return " ".join(text.split())
