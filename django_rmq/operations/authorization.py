"""Who may do and see what: the actor of an operation, the permissions, and the context that applies them to topics.

``Actor.of_user`` makes the actor of a request, and ``Actor.of_shell`` that of a command, with the name under which it acts.
Permissions are Django's, of the model ``Topic``. A project may have a rule that says which topics a user may know of. Every
operation gets an ``OperationContext``: the actor, its broker and the settings. ``audit_trail`` records what it has done.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

from django.contrib.auth import get_user_model
from django.http import HttpRequest
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from django_rmq import connections
from django_rmq.conf import Config, get_config
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.topic import Topic, slot_counts
from django_rmq.exceptions import ConfigurationError, NotPermitted, OperationRefused, SlotMoved, UnknownTopic
from django_rmq.message_ids import ALL_ROUNDS, ROUNDS, MessageIdentity, identify
from django_rmq.worker import listener_registry


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

Each other operation names its permission in its own function: sends, the outbox, schedules, limits, workers and stacks. The
pages and routes that offer it name the same one.

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


def topic_rule(request: HttpRequest) -> TopicRule | None:
    """Return which topics the user of a page may know of, as ``topic_permission`` decides it; None without a class."""
    permission = topic_permission()
    if permission is None:
        return None

    def ask(topic: Topic, needed: Permission) -> bool:
        view = SimpleNamespace(request=request, needed=needed)
        return bool(permission.has_object_permission(request, view, topic))

    return TopicRule(ask)


@dataclass(frozen=True, slots=True)
class Actor:
    """The actor and its interface. Without ``permits`` everything is permitted, because a shell is trusted."""

    name: str
    via: str
    """admin, command or rest."""
    user: object = None
    """The primary key of the user, which differs where the name of two users is the same, or None."""
    permits: Callable[[Permission], bool] | None = None
    rule: TopicRule | None = None
    """Which topics the actor may know of. None: all, also those that are not declared."""
    account: int | str | None = None
    """The primary key of the user if it has a row in the database, for the LogEntry, or None."""

    @classmethod
    def of_user(cls, user: Any, via: str, rule: TopicRule | None = None) -> Actor:
        """Return the actor for ``user``, with its permissions in Django, which is asked once about each."""

        @cache
        def permits(permission: Permission) -> bool:
            return bool(user.has_perm(permission.full_name))

        key, account = getattr(user, "pk", None), None
        # A user that only a token describes has no row, and its key may be that of a row of somebody else.
        if key is not None and isinstance(user, get_user_model()):
            account = key if isinstance(key, int) else str(key)
        return cls(str(user.get_username()), via, key, permits, rule, account)

    @classmethod
    def of_shell(cls, *, as_shown: bool = False) -> Actor:
        """Return the actor for a command: the user of the system. ``as_shown``: it sees bodies as formatters show them."""
        try:
            name = getpass.getuser()
        # In a container the process may run as a number without a user. Python before 3.13 raises KeyError then.
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


def sees_content(actor: Actor, topic: str) -> bool:
    """Return whether ``actor`` sees bodies, keys, headers and errors of a topic, as far as a formatter shows them."""
    may_see = actor.may(Permission.VIEW_BODIES)
    if actor.rule is None or not may_see:
        return may_see
    declared = known_settings().topics.get(topic)
    return declared is not None and actor.rule.permits(declared, Permission.VIEW_BODIES)


def sees_formatted(actor: Actor, topic: str) -> bool:
    """Return whether the formatter's output stands for the content of a topic; a shell sees what is stored."""
    return actor.permits is not None and is_redacted(topic)


def sees_stored(actor: Actor, topic: str) -> bool:
    """Return whether ``actor`` sees the content of a topic as it is stored, and so may search it.

    A search reveals what bodies contain, letter by letter.
    """
    return sees_content(actor, topic) and not sees_formatted(actor, topic)


def require_search(actor: Actor, topic: str) -> None:
    """Raise ``NotPermitted`` or ``OperationRefused`` unless ``actor`` may search the bodies of ``topic``."""
    if not sees_content(actor, topic):
        raise NotPermitted(f"{actor.name} lacks the permission {Permission.VIEW_BODIES.full_name}")
    if not sees_stored(actor, topic):
        raise OperationRefused(
            _("the bodies of topic %(topic)s are redacted, and cannot be searched") % {"topic": topic}
        )


T = TypeVar("T")

_discovered_for: Config | None = None
"""The settings for which ``known_settings`` has imported the listeners."""


def known_settings() -> Config:
    """Return the settings with the topics of ``@schedule``, for which it imports the listeners once.

    So a process that consumes nothing, such as a web server, knows the same topics and schedules as a worker. A module
    that cannot be imported is left out: a system check reports it, and no worker starts.
    """
    global _discovered_for  # noqa: PLW0603 - tests have several settings
    config = get_config()
    if _discovered_for is not config:
        with suppress(ConfigurationError):
            listener_registry.discover()
        # Before, another thread would go on without the topics of the modules that this one still imports.
        _discovered_for = config
    return config


@dataclass(slots=True)
class Trace:
    """The single LogEntry of an action that takes several requests, and its outcomes so far."""

    entry: int | None = None
    """The primary key of the LogEntry, or None before it is written."""
    outcomes: dict[str, int] = field(default_factory=dict)
    undo: str = ""
    """The id by which what it deletes can be brought back; empty before it deletes."""


class OperationContext:
    """An actor, its broker, and the settings. ``purpose`` selects the connections.

    ``trace``: the operations are one action of several requests, and are recorded as one.
    """

    def __init__(
        self,
        actor: Actor,
        purpose: connections.Purpose = "web",
        *,
        broker: Broker | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.actor = actor
        self.trace = trace
        self.purpose = purpose
        self._given = broker

    @property
    def broker(self) -> Broker:
        """The broker of the operations."""
        return self._given if self._given is not None else connections.get_broker(self.purpose)

    @property
    def config(self) -> Config:
        """The settings, with the topics that schedules bring along."""
        return known_settings()

    def may(self, topic: Topic, *permissions: Permission) -> bool:
        """Return whether the actor has all of these permissions, and may know of the topic for each."""
        rule = self.actor.rule
        return all(self.actor.may(one) and (rule is None or rule.permits(topic, one)) for one in permissions)

    @property
    def hides_topics(self) -> bool:
        """Whether there may be topics of which the actor may not know."""
        return self.actor.rule is not None

    def topics(self, permission: Permission = Permission.VIEW) -> Mapping[str, Topic]:
        """Return the declared topics of which the actor may know for ``permission``, in the order of the settings."""
        declared, rule = self.config.topics, self.actor.rule
        if rule is None:
            return declared
        return {name: topic for name, topic in declared.items() if rule.permits(topic, permission)}

    def known(
        self, names: Collection[str] | None, permission: Permission = Permission.VIEW
    ) -> Collection[str] | None:
        """Return the topics among ``names`` (or all) of which the actor may know; None: all, also undeclared ones."""
        if not self.hides_topics:
            return names
        permitted = self.topics(permission)
        return permitted if names is None else [name for name in names if name in permitted]

    def declared(self, name: str, *permissions: Permission) -> Topic:
        """Return a topic as the settings have it, for which the actor has all of these permissions.

        Without permissions only the rule for topics is asked, about the permission to view. Raises ``NotPermitted``, and
        ``UnknownTopic``, which says the same of a topic that does not exist and of one that the actor may not know of.
        """
        self.actor.require(*permissions)
        rule = self.actor.rule
        if rule is None:
            return self.config.topic(name)
        topic = self.config.topics.get(name)
        if topic is None or not all(rule.permits(topic, one) for one in permissions or (Permission.VIEW,)):
            raise UnknownTopic(f"there is no topic {name[:100]!r}")
        return topic

    def permitted(self, name: str, *permissions: Permission, at_once: bool = False) -> Topic:
        """Return a topic on which the actor has these permissions, like ``declared``, with the slots that it has in Redis."""
        return connections.with_present_slots(self.declared(name, *permissions), self._given, at_once=at_once)

    def in_present_slots(self, topic: Topic, act: Callable[[Topic], T]) -> T:
        """Perform an action in a slot, with the slot counts that ``topic`` has now if the slot refuses this one."""
        try:
            return act(topic)
        except SlotMoved:
            # The topic was re-slotted after this process had read its slot count, or it is under way: a slot then has either.
            present = self.permitted(topic.name, at_once=True)
            definition = self.broker.definitions().get(topic.name)
            counts = {present.slots, *(slot_counts(definition) if definition else ())}
            # With the same count another attempt would fail in the same way.
            for slots in counts - {topic.slots}:
                with suppress(SlotMoved):
                    return act(replace(present, slots=slots))
            raise

    def present_all(self, names: Iterable[str] | None) -> list[Topic]:
        """Return these topics, or all of which the actor may know, like ``permitted``."""
        return [self.permitted(name) for name in (self.topics() if names is None else names)]

    def agreed(self, name: str, *permissions: Permission) -> Topic:
        """Return a topic like ``permitted``. Raises ``TopicMismatch`` under the same conditions as a worker."""
        declared = self.declared(name, *permissions)
        if self._given is None:
            connections.agree(declared)
        return connections.with_present_slots(declared, self._given)

    def of_all_topics(self) -> OperationContext:
        """Return this context for an answer that actors with other rules share; each of them is shown a part of it."""
        return OperationContext(replace(self.actor, rule=None), self.purpose, broker=self._given)

    def require_all_topics(self) -> None:
        """Raise ``NotPermitted`` if there are topics of which the actor may not know, declared or not."""
        if self.hides_topics:
            raise NotPermitted(f"{self.actor.name} may not know of all topics")


def identified(context: OperationContext, topic: Topic, text: str) -> MessageIdentity:
    """Return the content of an id. For an actor who may not see what is stored, a plain id names nothing."""
    identity = identify(topic, text, context.broker)
    if identity.member is not None and not sees_stored(context.actor, topic.name):
        # Otherwise a guessed body could be made an id, and the answer would show whether the guess is right.
        return MessageIdentity(identity.slot, None)
    return identity


def search_rounds(context: OperationContext) -> int:
    """Return the number of times that a message is searched; a command searches until it is found."""
    return ALL_ROUNDS if context.actor.permits is None else ROUNDS
