"""The registered state of a re-slotting: its plan, its beginning and its end.

The state is a part of the topic's definition, so senders that a slot refuses find the new slot count there. ``slot_move`` moves
the slots themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from django_rmq.core.cluster.broker import ClusterBroker
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.envelope import stored_basis
from django_rmq.core.model.keys import check_slots, slot_of
from django_rmq.core.model.replies import Death, Entry
from django_rmq.core.model.topic import Topic, former_slot_counts, slot_counts
from django_rmq.core.topic_registration import messages_held
from django_rmq.exceptions import ConfigurationError


@dataclass(frozen=True, slots=True)
class Reslotting:
    """One change of the slot count of one topic, as registered."""

    topic: Topic
    """The topic with the new slot count."""
    before: int
    """The old slot count."""
    number: int
    """The number of the re-slotting; it rises with every re-slotting of the topic."""

    @property
    def grows(self) -> bool:
        return self.topic.slots > self.before

    @property
    def families(self) -> range:
        """The families, named by their lowest slots: messages move only between the slots of one family."""
        return range(min(self.before, self.topic.slots))

    def slots(self, family: int) -> range:
        """Return the slots of a family."""
        return range(family, max(self.before, self.topic.slots), len(self.families))

    def sources(self, family: int) -> range:
        """Return the slots that messages leave."""
        return self.slots(family)[:1] if self.grows else self.slots(family)[1:]

    def targets(self, family: int) -> range:
        """Return the slots to which messages go."""
        return self.slots(family)[1:] if self.grows else self.slots(family)[:1]

    def target(self, source: int, state: str, entry: Entry) -> int | None:
        """Return the new slot of a message of slot ``source``, or None if it is unknown, so that the message stays.

        With fewer slots, the old slot modulo the new count is the new one, whatever the basis was.
        """
        if not self.grows:
            return source % self.topic.slots
        envelope = entry.envelope
        if state == "dead":
            envelope = Death.parse(entry.record).envelope if entry.record else None
        basis = stored_basis(self.topic, entry.member, envelope)
        # The basis is not stored, or another program has put the message into a slot that does not follow from it.
        if basis is None or slot_of(basis, self.before) != source:
            return None
        return slot_of(basis, self.topic.slots)


def under_way(broker: Broker, topic: Topic) -> Reslotting | None:
    """Return the re-slotting of ``topic`` that was begun and has not ended, or None if there is none."""
    registered = broker.definitions().of(topic.name)
    if registered is None or len(slot_counts(registered)) == 1:
        return None
    return _registered(topic, registered)


def _registered(topic: Topic, registered: dict[str, Any]) -> Reslotting:
    noted = registered["reslot"]
    return Reslotting(replace(topic, slots=noted["to"]), registered["slots"], noted["number"])


def obstacle(broker: Broker, topic: Topic, slots: int) -> str:
    """Return why ``topic`` may not be given ``slots`` slots now, or an empty text.

    Raises ``ConfigurationError`` for a number that is not a valid slot count.
    """
    check_slots(slots)
    registered = broker.definitions().of(topic.name)
    if registered is None:
        return ""
    counts = slot_counts(registered)
    if len(counts) > 1:
        if counts[1] == slots:
            return ""
        return f"the topic is being re-slotted from {counts[0]} to {counts[1]} slots: that must finish first"
    if topic.is_strict and slots != counts[0] and isinstance(broker, ClusterBroker):
        return (
            "its ORDER is strict, and each node of a Redis Cluster has a clock of its own, so what is sent to a new "
            "slot could come before what is still on its way there. Declare a topic with another name"
        )
    if slots > counts[0] and hides_bases(broker, topic):
        held = messages_held(broker, replace(topic, slots=counts[0]))
        if held:
            return (
                f"messages were sent with slot_basis=, which is not stored, so the new slots of its {held} "
                "messages are unknown. Use fewer slots, or wait until the topic is empty"
            )
    return ""


def hides_bases(broker: Broker, topic: Topic) -> bool:
    return not topic.keyed and topic.slot_basis is None and broker.has_slot_bases(topic)


def begin(broker: Broker, topic: Topic, slots: int) -> Reslotting | None:
    """Register that ``topic`` gets ``slots`` slots, or find this re-slotting begun; return None if the topic has them already.

    Raises ``ConfigurationError`` if there is an obstacle.
    """
    reason = obstacle(broker, topic, slots)
    if reason:
        raise ConfigurationError(f'topic "{topic.name}" cannot be re-slotted: {reason}')
    broker.define(topic)

    def change(known: dict[str, Any]) -> dict[str, Any]:
        counts = slot_counts(known)
        # Another process may have begun or finished a re-slotting since the obstacle was looked for.
        if len(counts) > 1 or counts[0] == slots:
            return known
        noted = {
            "number": known.get("reslot", {}).get("number", 0) + 1,
            "former": list(former_slot_counts(known)),
            "to": slots,
        }
        return {**known, "reslot": noted}

    registered = broker.redefine(topic.name, change)
    *_, coming = counts = slot_counts(registered)
    # Another process has begun a re-slotting to another count since the obstacle was looked for.
    if coming != slots:
        raise ConfigurationError(
            f'topic "{topic.name}" is being re-slotted to {coming} slots by another process'
        )
    if len(counts) == 1:
        return None
    return _registered(topic, registered)


def finish(broker: Broker, reslotting: Reslotting) -> None:
    """Register that all families have been moved."""

    def change(known: dict[str, Any]) -> dict[str, Any]:
        noted = known.get("reslot", {})
        # Another process has finished the re-slotting, or has even begun the next one.
        if noted.get("number") != reslotting.number or "to" not in noted:
            return known
        former = sorted({*noted["former"], known["slots"]} - {noted["to"]})
        return {**known, "slots": noted["to"], "reslot": {"number": noted["number"], "former": former}}

    broker.redefine(reslotting.topic.name, change)
