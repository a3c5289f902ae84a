"""Compare the registered definition of a topic with the settings, and change it as far as that is safe.

A definition decides how a message is treated once it is in Redis, so all processes must have the same.
Nothing here knows Django; ``connections`` calls it once per process, ``rmqtopics`` when a person runs it. The broker reads and
replaces definitions (``redis.broker``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from django_rmq.core.commands import inspect, reslot
from django_rmq.core.commands.broker_interface import Broker, walk
from django_rmq.core.model.topic import Definition, Topic, former_slot_counts, slot_counts
from django_rmq.exceptions import TopicMismatch

logger = logging.getLogger("django_rmq")

NEEDS_EMPTY = ("TYPE", "BODY", "IDENTITY", "SLOT_BASIS", "ACCUMULATE")
"""Settings that waiting messages could not follow: they were encoded, ordered or placed by the old value."""

NEEDS_NO_WORKER = (*NEEDS_EMPTY, "SERIAL", "ORDER")
"""Settings that running workers could not follow: they use the old value until they are restarted."""


CONSUMER_OPTIONS = ("TIMEOUT", "MAX_RETRIES", "BACKOFF", "RETRY_PRIORITY", "SERIAL", "MAX_PREPARED")
"""Settings that only consumers need: they decide neither the bytes of a message nor its slot. Senders follow Redis."""


class Difference(NamedTuple):
    """One setting of a topic that differs between the settings and Redis."""

    setting: str
    """The key in ``RMQ["TOPICS"][name]``. BACKOFF: [first, longest] rest in ms."""
    declared: object
    """The value in the settings."""
    registered: Any
    """The value in Redis, or None if there is none."""


def differences(topic: Topic, registered: dict[str, object]) -> list[Difference]:
    """Return how ``topic`` differs from its ``registered`` definition."""
    declared = topic.definition()
    return [
        Difference(name.upper(), declared.get(name), registered.get(name))
        for name in sorted({*declared, *registered} - {"reslot"})
        if declared.get(name) != registered.get(name)
    ]


def register_topics(
    broker: Broker, topics: Iterable[Topic], *, sends_only: bool = False
) -> dict[str, dict[str, object]]:
    """Register the topics that Redis does not know yet; return the registered definition of each.

    Settings with the slot count from before a re-slotting cause a warning: the registered one applies, and
    during a re-slotting both are valid. If the process only sends (``sends_only``), differences in
    ``CONSUMER_OPTIONS`` are such warnings, too. Raises ``TopicMismatch`` with every other difference and both
    of its values, and ``WrongType`` if a definition cannot be read. Topics that were registered before the
    error stay registered.
    """
    definitions = broker.definitions()
    refused, agreed = {}, {}
    for topic in topics:
        # Another process may register the topic first: `define` then returns the definition of that process.
        registered = agreed[topic.name] = definitions.of(topic.name) or broker.define(topic)
        different = differences(topic, registered)
        if topic.slots in former_slot_counts(registered):
            logger.warning(
                "Topic %s was re-slotted to %d slots: SLOTS is still %d in the settings",
                topic.name,
                registered["slots"],
                topic.slots,
            )
        # Processes keep their settings while a topic is re-slotted, so an earlier count is not a mistake.
        if topic.slots in (*former_slot_counts(registered), *slot_counts(registered)):
            different = [difference for difference in different if difference.setting != "SLOTS"]
        # While new settings are deployed, processes that only send must not stop because of options that they do not use.
        # rule: senders_compare_everything
        if sends_only and (followed := [each for each in different if each.setting in CONSUMER_OPTIONS]):
            logger.warning(
                "This process follows Redis: %s. Deploy the same settings everywhere, then run `manage.py rmqtopics "
                "--apply`",
                _sentence(topic.name, followed),
                extra={"rmq_event": "definition_followed", "rmq_topic": topic.name},
            )
            different = [each for each in different if each not in followed]
        if different:
            refused[topic.name] = different
    if refused:
        raise TopicMismatch(
            "; ".join(_sentence(name, different) for name, different in refused.items())
            + ". Correct the settings, or apply them: `manage.py rmqtopics --apply`"
        )
    return agreed


def as_registered(topic: Topic, registered: Definition) -> Topic:
    """Return ``topic`` with the options of its consumers, and all slots that may hold its messages, as registered."""
    return (
        replace(topic, slots=max(slot_counts(registered)), **consumer_fields(topic, registered))
        if registered
        else topic
    )


def consumer_fields(topic: Topic, registered: Definition) -> Definition:
    """Return the fields of ``topic`` for ``CONSUMER_OPTIONS`` in which its ``registered`` definition differs from it."""
    fields = {}
    for name in (option.lower() for option in CONSUMER_OPTIONS):
        if name in registered and registered[name] != topic.definition()[name]:
            fields[name] = registered[name]
    if "backoff" in fields:
        base_ms, cap_ms = fields["backoff"]
        fields["backoff"] = replace(topic.backoff, base_ms=base_ms, cap_ms=cap_ms)
    return fields


def _sentence(name: str, different: list[Difference]) -> str:
    parts = [f"{setting} is {ours!r} here and {theirs!r} in Redis" for setting, ours, theirs in different]
    return f'topic "{name}": {", ".join(parts)}'


def obstacles(
    broker: Broker, topic: Topic, different: list[Difference], serving: Sequence[str] = ()
) -> list[str]:
    """Return why ``apply`` may not make Redis' definition that of ``topic``, a sentence each; empty if it may.

    ``serving`` names the running workers that serve the topic.
    """
    reasons = []
    changed = {difference.setting: difference for difference in different}
    registered = broker.definitions().of(topic.name) or {}
    if registered and len(slot_counts(registered)) > 1:
        return [
            f"the topic is being re-slotted to {slot_counts(registered)[1]} slots: let `manage.py rmqreslot` finish"
        ]
    if "SLOTS" in changed:
        # With another slot count it is unknown which slots hold messages, so all other differences have to wait.
        if topic.slots in former_slot_counts(registered):
            return [f"SLOTS: the topic was re-slotted; write SLOTS {registered['slots']} into the settings"]
        return [f"SLOTS: `manage.py rmqreslot {topic.name} {topic.slots}` changes the slots of a topic"]
    needs_empty = [name for name in NEEDS_EMPTY if name in changed]
    if needs_empty and (held := messages_held(broker, topic)):
        reasons.append(
            f"{', '.join(needs_empty)}: the topic must be empty, but it holds {held} messages: let workers with the old "
            f"settings process them, or delete them with `manage.py rmqpurge {topic.name}`"
        )
    unfollowed = [name for name in changed if name in NEEDS_NO_WORKER]
    # A worker extends its messages about three times within the time-out that it knows.
    if "TIMEOUT" in changed and topic.timeout < (changed["TIMEOUT"].registered or 0):
        unfollowed.append("TIMEOUT (lowered)")
    if unfollowed and serving:  # rule: changed_under_workers
        more = f" and {len(serving) - 3} more" if len(serving) > 3 else ""
        reasons.append(
            f"{', '.join(unfollowed)}: running workers would keep the old value "
            f"({', '.join(serving[:3])}{more}): "
            "stop them first, or use --force"
        )
    if "MAX_RETRIES" in changed:
        reasons += _configured(broker, topic, apply=False)
    return reasons


def _configured(broker: Broker, topic: Topic, *, apply: bool) -> list[str]:
    """Give each slot its time-out and retries, or only ask whether it could get them; return what keeps some from it."""
    words = walk(broker, (reslot.configure(topic, slot, apply) for slot in range(topic.slots)))
    refused = sum(word != "ok" for word in words)
    reason = f"MAX_RETRIES: in {refused} slots something waits or runs whose priority could then be read as a retry"
    return [reason] if refused else []


def messages_held(broker: Broker, topic: Topic) -> int:
    """Return how many messages all slots of ``topic`` hold, including the dead."""
    counts = walk(broker, (inspect.count(topic, slot) for slot in range(topic.slots)))
    return sum(one.held for one in counts)


def apply(broker: Broker, topic: Topic) -> list[str]:
    """Make ``topic`` the registered definition, and give each slot its time-out and retries.

    Call ``obstacles`` first. Return what has come in between, in the same form; then the definition stays as it was, and some
    slots are ahead of it until somebody tries again. Workers with other settings raise ``TopicMismatch`` when they start the
    next time. Senders do so only if more than ``CONSUMER_OPTIONS`` differs.
    """
    reasons = _configured(broker, topic, apply=True)
    if not reasons:  # rule: defines_what_a_slot_has_refused
        broker.define(topic, replace=True)
    return reasons
