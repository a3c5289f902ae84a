"""Another slot count for a topic: what is asked before, whoever moves its messages then, and the move itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django_rmq.core.calls.broker import Broker
from django_rmq.core.topics import reslotting
from django_rmq.core.topics.definitions import differences
from django_rmq.core.topics.reslotting import AT_ONCE, Progress, Reslotting, begin
from django_rmq.core.words.topics import Topic, former_slot_counts, slot_counts
from django_rmq.exceptions import ConfigurationError, ServerTrouble, TopicMismatch

PATIENCE = 60.0
"""Seconds without an answer of Redis after which a move gives up; it can be started again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A change of a topic's slot count, before it is begun."""

    topic: Topic
    before: int
    slots: int
    """How many it will have."""
    is_begun: bool
    """Whether somebody has begun it already."""
    obstacle: str
    """Why it may not be; empty: it may."""


def plan(broker: Broker, topic: Topic, slots: int | None) -> Plan:
    """Return what giving ``topic`` that many slots comes to; None: finish what was begun, else what the settings say.

    Raises ``ConfigurationError`` for a number that is none or where none is known, and ``TopicMismatch`` where settings and
    Redis disagree about more than slots: where a message belongs is computed by that.
    """
    known = broker.definitions().of(topic.name) or {}
    _check_the_rest(topic, known)
    begun = reslotting.under_way(broker, topic)
    declared = None if topic.slots in (*former_slot_counts(known), known.get("slots")) else topic.slots
    wanted = slots or (begun.topic.slots if begun else declared)
    if wanted is None:
        raise ConfigurationError(f'topic "{topic.name}" is not being re-slotted: say how many slots it gets')
    before = slot_counts(known)[0] if known else topic.slots
    return Plan(topic, before, wanted, begun is not None, reslotting.obstacle(broker, topic, wanted))


def _check_the_rest(topic: Topic, known: dict[str, Any]) -> None:
    different = [each for each in differences(topic, known) if each.setting != "SLOTS"] if known else []
    if different:
        named = ", ".join(
            f"{each.setting} is {each.declared!r} here and {each.registered!r} in Redis" for each in different
        )
        raise TopicMismatch(
            f'topic "{topic.name}": {named}. Correct the settings, or see `manage.py rmqtopics`'
        )


def move(
    broker: Broker,
    chosen: Reslotting,
    *,
    at_once: int,
    report: Callable[[Progress], None],
    complain: Callable[[ServerTrouble], None],
) -> Progress:
    """Move until all is done, whatever Redis does meanwhile; ``complain`` gets each error after which it is tried again."""
    answered = time.monotonic()

    def note(step: str, progress: Progress) -> None:
        nonlocal answered
        answered = time.monotonic()
        report(progress)

    while True:
        try:
            progress = reslotting.move(broker, chosen, at_once=at_once, report=note)
            reslotting.finish(broker, chosen)
            return progress
        except ServerTrouble as error:
            if time.monotonic() - answered > PATIENCE:
                raise
            complain(error)
            time.sleep(1.0)


__all__ = ["AT_ONCE", "Plan", "Progress", "Reslotting", "begin", "move", "plan"]
