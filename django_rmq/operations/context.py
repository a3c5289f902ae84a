"""The context of every operation: the actor, the broker and the settings, and how its outcomes are recorded.

``authorization`` decides who the actor is, also of a command, and what it may do; ``audit_trail`` what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from django_rmq import connections, observability
from django_rmq.conf import Config, get_config
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError, NotPermitted, SlotMoved, UnknownTopic
from django_rmq.id_lookup import ALL_ROUNDS, ROUNDS, MessageIdentity, identify
from django_rmq.operations.audit_trail import Trace, record
from django_rmq.operations.authorization import Actor, Permission, sees_stored
from django_rmq.operations.bulk import BulkProgress, BulkRun
from django_rmq.worker import listener_registry

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
        _discovered_for = config
        with suppress(ConfigurationError):
            listener_registry.discover()
    return config


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
        """Perform an action in a slot, with the slot count that ``topic`` has now if the slot refuses this one."""
        try:
            return act(topic)
        except SlotMoved:
            # The topic was re-slotted after this process had read its slot count.
            present = self.permitted(topic.name, at_once=True)
            # The count is the same, so a second attempt would fail in the same way.
            if present.slots == topic.slots:
                raise
            return act(present)

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

    def record(self, act: str, topic: str, outcomes: Mapping[str, int], note: str = "") -> None:
        """Record the outcomes of an action, and announce replayed messages."""
        record(self.actor, act, topic, outcomes, note, trace=self.trace)
        done = {word: outcomes[word] for word in ("replayed", "merged") if outcomes.get(word)}
        if act.startswith("replay") and done:
            observability.announce_replayed(topic, done, self.actor.name)

    def recorded(self, act: str, topic: Topic, what: str, steps: Iterator[BulkProgress]) -> BulkRun:
        """Return a run that is recorded when it ends, in whatever way."""

        def recorded() -> Iterator[BulkProgress]:
            last: BulkProgress | None = None
            try:
                for last in steps:
                    yield last
            finally:
                # A run may be closed before its end. Its steps until then are recorded all the same.
                if last is not None:
                    note = what if last.is_complete else f"{what}, incomplete"
                    self.record(act, topic.name, last.outcomes, note)

        return BulkRun(recorded())


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
