"""One message that a program names: its status, and its replay after its death.

``django_rmq`` has these functions as its own. Lists of messages, and people's permissions, are in ``operations``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, cast

from django_rmq import connections, observability
from django_rmq.conf import get_config
from django_rmq.core.commands import inspect, operate
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.status import MessageStatus, status_of
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidMessage, SlotMoved
from django_rmq.message_ids import (
    ALL_ROUNDS,
    ID_IS_WHOLE,
    LocatedMessage,
    MessageIdentity,
    Whereabouts,
    identify_for_program,
    slots_of,
)
from django_rmq.sending.api import coroutine_of


def message_status(
    topic: str,
    body: object = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
    id: str | None = None,  # noqa: A002 - as results of sends name it
) -> MessageStatus:
    """Return what Redis knows about a message. It is named by its body, by its ``key`` on a keyed topic, or by its ``id``.

    ``id`` is that of a ``SendResult`` or ``Message``, or one that the log shows (``3~...``). A fifo message without a
    key has no other name. A message that ended is known for OUTCOME_RETENTION. It takes one round trip, and a few
    where nothing is known.

    Raises ``InvalidMessage``, ``UnknownTopic`` or ``ServerTrouble``.
    """
    declared = get_config().topic(topic)
    if id is not None:
        if body is not None or key is not None or slot_basis is not None:
            raise InvalidMessage(ID_IS_WHOLE)
        return _of_id(declared, id)
    connections.agree(declared)
    connections.refresh_definitions()
    producer = connections.get_producer()
    out = producer.outgoing(declared, body, 0, key=key, slot_basis=slot_basis)
    # While the topic is being re-slotted, the message has two possible slots.
    slots = list(dict.fromkeys(producer.slots(out)))
    status = _status_in(declared, slots, out.member)
    # The topic may have been re-slotted since this process looked at its definition.
    if status.state == "unknown":
        connections.refresh_definitions(at_once=True)
        present = list(dict.fromkeys(producer.slots(out)))
        if present != slots:
            status = _status_in(declared, present, out.member)
    return status


amessage_status = coroutine_of(message_status)

ReplayResult = Literal["replayed", "merged", "waiting", "running", "resting", "not_found"]
"""The result of ``replay_message``: what it did, or where a message is that was not dead."""


def replay_message(
    topic: str,
    body: object = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
    id: str | None = None,  # noqa: A002 - as results of sends name it
) -> ReplayResult:
    """Send a dead message again, with its full number of retries. It is named as for ``message_status``.

    It is sent at once, also in a transaction. Returns ``replayed``, or ``merged`` if it waits already; if it was not
    dead, ``waiting``, ``running``, ``resting`` or ``not_found``.

    Raises ``InvalidMessage``, ``UnknownTopic``, ``ServerTrouble``, or ``SlotMoved`` if the topic was re-slotted
    meanwhile: call it again.
    """
    declared, broker = get_config().topic(topic), connections.get_broker()
    places: Iterable[LocatedMessage]
    if id is None:
        connections.agree(declared)
        connections.refresh_definitions(at_once=True)
        producer = connections.get_producer()
        out = producer.outgoing(declared, body, 0, key=key, slot_basis=slot_basis)
        places = [LocatedMessage(slot, out.member) for slot in dict.fromkeys(producer.slots(out))]
    elif body is not None or key is not None or slot_basis is not None:
        raise InvalidMessage(ID_IS_WHOLE)
    else:
        places = Whereabouts(broker, declared, identify_for_program(declared, id, broker), rounds=ALL_ROUNDS)
    word: ReplayResult = "not_found"
    moved: SlotMoved | None = None
    for at in places:
        try:
            outcome = _replay_in(declared, at)
        except SlotMoved as error:
            # A re-slotting began or ended after its definition was read. The message may be in the next slot.
            moved = error
            continue
        if outcome in ("replayed", "merged"):
            observability.announce_replayed(topic, {outcome: 1}, "program")
            return cast("ReplayResult", outcome)
        state = _status_in(declared, [at.slot], at.member).state.removesuffix("_and_waiting")
        if state in ("waiting", "running", "resting"):
            word = cast("ReplayResult", state)
    if moved is not None and word == "not_found":
        raise moved
    return word


def _replay_in(declared: Topic, at: LocatedMessage) -> str:
    """Replay a message in a slot. While the topic is being re-slotted, a slot has either slot count. Raises ``SlotMoved``."""
    present = connections.with_present_slots(declared, at_once=True)
    *others, last = [n for n in connections.slots_now(declared) if n > at.slot] or [present.slots]

    def replay(slots: int) -> str:
        call = operate.replay(replace(present, slots=slots), at.slot, [at.member])
        return connections.get_broker().run(call)[0]

    for slots in others:
        with suppress(SlotMoved):
            return replay(slots)
    return replay(last)


areplay_message = coroutine_of(replay_message)


def _status_in(topic: Topic, slots: Sequence[int], member: bytes) -> MessageStatus:
    """Return the status of a message that is in one of ``slots``; the last one that knows it decides."""
    pipeline = connections.get_broker().pipeline()
    answers = [pipeline.add(inspect.status(topic, slot, member)) for slot in slots]
    pipeline.execute()
    statuses = [
        status_of(topic, slot, member, answer.get()) for slot, answer in zip(slots, answers, strict=True)
    ]
    # The old slot comes first. A re-slotting may have moved the message between the two reads, so the later answer
    # counts.
    return next((one for one in reversed(statuses) if one.state != "unknown"), statuses[-1])


def _of_id(topic: Topic, name: str) -> MessageStatus:
    """Return the status of the message with this id, also if a re-slotting has moved it. Raises ``InvalidMessage``."""
    broker = connections.get_broker()
    identity = identify_for_program(topic, name, broker)
    for at in Whereabouts(broker, topic, identity, rounds=ALL_ROUNDS):
        status = _status_in(topic, [at.slot], at.member)
        if status.state != "unknown":
            return status
    return status_of_ended(broker, topic, identity, name) or MessageStatus(topic.name, name, "unknown")


def status_of_ended(
    broker: Broker, topic: Topic, identity: MessageIdentity, name: str
) -> MessageStatus | None:
    """Return how a message ended that no slot holds any more, or None if it is not known.

    The outcome is kept under a digest of the message.
    """
    if not topic.outcome_retention_ms or (identity.member is None and not identity.digest):
        return None
    slots = slots_of(broker, topic, identity)
    pipeline = broker.pipeline()
    answers = [
        pipeline.add(inspect.status(topic, slot, identity.member, identity.digest or None)) for slot in slots
    ]
    pipeline.execute()
    ended = (
        status_of(topic, slot, identity.member or b"", answer.get())
        for slot, answer in zip(slots, answers, strict=True)
    )
    status = next((one for one in ended if one.state != "unknown"), None)
    return None if status is None else replace(status, id=name)


__all__ = [
    "MessageStatus",
    "ReplayResult",
    "amessage_status",
    "areplay_message",
    "message_status",
    "replay_message",
    "status_of_ended",
]
