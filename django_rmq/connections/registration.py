"""The registration of topic definitions: this process and Redis agree on them, and on the slot counts of messages.

A sender compares the definition of a topic once in its process. Re-slottings are noticed by a look every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from django_rmq.connections.brokers import current, get_broker
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.model.stored_hashes import Definitions
from django_rmq.core.model.topic import Topic, slot_counts
from django_rmq.core.topic_registration import as_registered, consumer_fields, register_topics
from django_rmq.exceptions import ServerTrouble, WrongType

logger = safe_logger("django_rmq")

LOOK_SECONDS = 5.0
"""Seconds between two checks for topics that were re-slotted."""


def agree(topic: Topic) -> None:
    """Check, once per process, that Redis has the same definition of ``topic`` (or none yet), as far as senders need it.

    A different slot count after a re-slotting, and different options of its consumers, are taken from Redis.
    Raises ``TopicMismatch``, or ``ServerTrouble`` if Redis is unavailable.
    """
    built = current()
    if topic.name not in built.agreed:
        registered = register_topics(get_broker(), [topic], sends_only=True)[topic.name]
        followed = consumer_fields(topic, registered)
        if followed:
            built.followed[topic.name] = followed
        # The topic has been re-slotted, or is being: the settings of this process may still have the former count.
        if followed or "reslot" in registered:
            built.slot_counts[topic.name] = slot_counts(registered)
        built.agreed.add(topic.name)


def present(topic: Topic, broker: Broker | None = None, *, at_once: bool = False) -> Topic:
    """Return ``topic`` with all slots that may currently hold its messages, whatever the settings say.

    It asks Redis every few seconds (each time if a ``broker`` is given, or ``at_once``). While Redis is unavailable, the
    last known slots are used.
    """
    if broker is not None:
        return as_registered(topic, broker.definitions().get(topic.name, {}))
    built, now = current(), time.monotonic()
    if at_once or now >= built.next_look:
        try:
            definitions = get_broker().definitions()
        except WrongType as error:
            # Another program has put a value of another type in place of the definitions, so none of them can be
            # read.
            built.unreadable = dict.fromkeys(built.config.topics, str(error))
        except ServerTrouble:
            pass
        else:
            # A server that was flushed, or restarted without its data, has lost the definitions that it had.
            if built.registered and not definitions and not definitions.unreadable:
                definitions = _register_again(built.registered)
            built.registered.update(
                {name: definitions[name] for name in built.config.topics if name in definitions}
            )
            built.unreadable = {name: definitions.problem(name) for name in definitions.unreadable}
            built.slot_counts.update(
                {name: slot_counts(found) for name, found in definitions.items() if "reslot" in found}
            )
        built.next_look = now + LOOK_SECONDS
    slots = max(built.slot_counts.get(topic.name, (topic.slots,)))
    return replace(topic, slots=slots, **built.followed.get(topic.name, {}))


def _register_again(registered: Mapping[str, dict[str, Any]]) -> Definitions:
    """Register the definitions that Redis had before it lost all of them, and return those that it has then.

    Without them, processes that start would place messages of a re-slotted topic by the SLOTS of their settings,
    and those that have been running by its present slot count.
    """
    broker = get_broker()
    for name, definition in registered.items():
        broker.redefine(name, partial(_or_else, definition))
    logger.warning(
        "Redis has lost the definitions of all topics; %d of them are registered again",
        len(registered),
        extra={"rmq_event": "definitions_lost"},
    )
    return broker.definitions()


def _or_else(definition: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    # Another process may have registered a definition meanwhile. That one stays.
    return found or definition


def slots_now(topic: Topic) -> tuple[int, ...]:
    """Return the slot counts by which messages of ``topic`` are placed; see ``present``."""
    present(topic)
    return current().slot_counts.get(topic.name, (topic.slots,))


def unreadable(topic: Topic) -> str:
    """Return why the definition of ``topic`` could not be read at the last check, or an empty text if it could."""
    return current().unreadable.get(topic.name, "")


def is_agreed(topic: Topic) -> bool:
    """Return whether ``agree`` would need no request."""
    return topic.name in current().agreed


def forget(topic: Topic) -> None:
    """Compare the definition again before the next send."""
    current().agreed.discard(topic.name)
