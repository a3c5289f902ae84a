"""A new slot count of a topic: the checks before it, and the move of its messages.

``core.reslotting`` moves the messages. Here an outage of Redis does not end the move, because each of its steps can be
repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from django_rmq.core import reslotting
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.topic import Topic, former_slot_counts, slot_counts
from django_rmq.core.reslotting import AT_ONCE, DrainProgress, Reslotting, begin
from django_rmq.core.topic_registration import differences
from django_rmq.exceptions import ConfigurationError, ServerTrouble, TopicMismatch

PATIENCE = 60.0
"""Seconds without an answer of Redis after which a move gives up; it can be started again."""


@dataclass(frozen=True, slots=True)
class SlotCountPlan:
    """A change of a topic's slot count, before it is begun."""

    topic: Topic
    before: int
    slots: int
    """The new number of slots."""
    is_begun: bool
    """Whether it was begun already."""
    obstacle: str
    """Why the change is not permitted; empty if it is."""


def plan(broker: Broker, topic: Topic, slots: int | None) -> SlotCountPlan:
    """Return the plan for giving ``topic`` that many slots.

    Without a number, a change that was begun is finished, or the number of the settings is used.

    Raises ``ConfigurationError`` for an invalid number or if none is known, and ``TopicMismatch`` if settings
    and Redis disagree about more than slots, because the slot of a message depends on that.
    """
    known = broker.definitions().of(topic.name) or {}
    _check_the_rest(topic, known)
    begun = reslotting.under_way(broker, topic)
    # Settings with the present count, or with a former one, do not ask for a change.
    declared = None if topic.slots in (*former_slot_counts(known), known.get("slots")) else topic.slots
    slot_count = slots or (begun.topic.slots if begun else declared)
    if slot_count is None:
        raise ConfigurationError(
            f'topic "{topic.name}" is not being re-slotted: give the new number of slots'
        )
    before = slot_counts(known)[0] if known else topic.slots
    return SlotCountPlan(
        topic, before, slot_count, begun is not None, reslotting.obstacle(broker, topic, slot_count)
    )


def _check_the_rest(topic: Topic, known: dict[str, object]) -> None:
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
    change: Reslotting,
    *,
    at_once: int,
    report: Callable[[DrainProgress], None],
    report_trouble: Callable[[ServerTrouble], None],
) -> DrainProgress:
    """Move until everything is done, even while Redis fails; ``report_trouble`` gets each error after which it tries again."""
    answered = time.monotonic()

    def note(step: str, progress: DrainProgress) -> None:
        nonlocal answered
        answered = time.monotonic()
        report(progress)

    while True:
        try:
            progress = reslotting.move(broker, change, at_once=at_once, report=note)
            reslotting.finish(broker, change)
            return progress
        except ServerTrouble as error:
            # The time counts from the last step that was done, so a move survives any number of short outages.
            if time.monotonic() - answered > PATIENCE:
                raise
            report_trouble(error)
            time.sleep(1.0)


__all__ = ["AT_ONCE", "DrainProgress", "Reslotting", "SlotCountPlan", "begin", "move", "plan"]
