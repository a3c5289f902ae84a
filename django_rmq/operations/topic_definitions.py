"""Compares the topics of the settings with their registered definitions, and applies changes, for commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django_rmq.core import topic_registration
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.stored_hashes import Definitions
from django_rmq.core.model.topic import Topic
from django_rmq.core.topic_registration import Difference
from django_rmq.operations.worker_list import serving


@dataclass(frozen=True, slots=True)
class Defined:
    """One topic of the settings, and its registered definition."""

    topic: Topic
    state: str
    """unreadable, new, differs or same; registered or applied, if that has just been done."""
    registered: dict[str, Any] | None
    """The registered definition. None: there is none."""
    differences: list[Difference] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)
    """Why it was not applied."""


def compare(topic: Topic, registered: Definitions) -> Defined:
    """Return how ``topic`` differs from its registered definition."""
    if topic.name in registered.unreadable:
        return Defined(topic, "unreadable", None, obstacles=[registered.problem(topic.name)])
    known = registered.get(topic.name)
    if known is None:
        return Defined(topic, "new", None)
    different = topic_registration.differences(topic, known)
    return Defined(topic, "differs" if different else "same", known, different)


def apply(broker: Broker, found: Defined, *, force: bool) -> Defined:
    """Register new topics, and change what may be changed. ``force``: even if live workers go on with the old values."""
    topic = found.topic
    if found.state == "new":
        broker.define(topic)
        return Defined(topic, "registered", found.registered)
    if found.state == "differs":
        running = [] if force else serving(broker, topic.name)
        obstacles = topic_registration.obstacles(broker, topic, found.differences, running)
        if obstacles:
            return Defined(topic, found.state, found.registered, found.differences, obstacles)
        topic_registration.apply(broker, topic)
        return Defined(topic, "applied", found.registered, found.differences)
    return found


__all__ = ["Defined", "apply", "compare"]
