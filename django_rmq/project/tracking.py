"""What is known about one message: ``status``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asgiref.sync import sync_to_async

from django_rmq.core.calls import looking
from django_rmq.core.words.status import MessageStatus, read
from django_rmq.core.words.topics import Topic
from django_rmq.project import connections
from django_rmq.project.ids import Identity, find_member, identify_for_program, places_of
from django_rmq.project.settings import get_config


def status(
    topic: str,
    body: Any = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
    id: str | None = None,  # noqa: A002 - as results of sends name it
) -> MessageStatus:
    """Return what Redis knows about a message. It is named by its body, by its ``key`` on a keyed topic, or by its ``id``.

    ``id`` is that of a ``SendResult`` or of a ``Message``, or one that the log shows (``3~...``), which is searched in
    its slot. It is the only name of a message whose send gave no key.
    A message that ended is known on topics with KEEP_DONE, for that long. It takes one round trip, and another one where
    nothing is known: the topic may have been re-slotted.

    Raises ``InvalidMessage``, ``UnknownTopic`` or ``ServerTrouble``.
    """
    declared = get_config().topic(topic)
    if id is not None:
        return _of_id(declared, id)
    connections.agree(declared)
    connections.present(declared)
    producer = connections.get_producer()
    out = producer.outgoing(declared, body, 0, key=key, slot_basis=slot_basis)
    # While the topic is being re-slotted there are two.
    slots = list(dict.fromkeys(producer.slots(out)))
    found = _asked(declared, slots, out.member)
    if found.state == "unknown":
        connections.present(declared, at_once=True)
        present = list(dict.fromkeys(producer.slots(out)))
        if present != slots:
            found = _asked(declared, present, out.member)
    return found


async def astatus(topic: str, body: Any = None, **options: Any) -> MessageStatus:
    """Return the same as ``status``, from a coroutine."""
    return await sync_to_async(status)(topic, body, **options)


def _asked(topic: Topic, slots: Sequence[int], member: bytes) -> MessageStatus:
    """Return the status of a message that is in one of ``slots``; the last one that knows it decides."""
    pipeline = connections.get_broker().pipeline()
    answers = [pipeline.add(looking.status(topic, slot, member)) for slot in slots]
    pipeline.execute()
    found = [read(topic, slot, member, answer.get()) for slot, answer in zip(slots, answers, strict=True)]
    return next((one for one in reversed(found) if one.state != "unknown"), found[-1])


def _of_id(topic: Topic, name: str) -> MessageStatus:
    """Return the status of the message with this id, also if a re-slotting has moved it. Raises ``InvalidMessage``."""
    identity = identify_for_program(topic, name)
    asked = (_of_identity(topic, slots, identity, name) for slots in places_of(topic, identity))
    return next(filter(None, asked), MessageStatus(topic.name, name, "unknown"))


def _of_identity(topic: Topic, slots: Sequence[int], identity: Identity, name: str) -> MessageStatus | None:
    """Return the status of the message that an id names, which is in one of ``slots``. None: nothing is known there."""
    if identity.member is not None:
        status = _asked(topic, slots, identity.member)
        return None if status.state == "unknown" else status
    broker = connections.get_broker()
    held = find_member(broker, topic, identity, slots)
    if held is not None:
        return _asked(topic, held[:1], held[1])
    if not topic.keep_done_ms:
        return None
    # What is left of a message that has ended is found by its digest alone.
    pipeline = broker.pipeline()
    answers = [pipeline.add(looking.status(topic, slot, None, identity.digest)) for slot in slots]
    pipeline.execute()
    ended = (read(topic, slot, b"", answer.get()) for slot, answer in zip(slots, answers, strict=True))
    found = next((one for one in ended if one.state != "unknown"), None)
    return None if found is None else replace(found, id=name)


__all__ = ["MessageStatus", "astatus", "status"]
