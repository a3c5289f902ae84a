"""What is known about one message: ``status``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asgiref.sync import sync_to_async

from django_rmq.core.calls import looking
from django_rmq.core.words.keys import slot_of
from django_rmq.core.words.messages import from_base64url, message_id
from django_rmq.core.words.status import MessageStatus, read
from django_rmq.core.words.topics import Topic, former_slot_counts, slot_counts
from django_rmq.exceptions import InvalidMessage
from django_rmq.project import connections
from django_rmq.project.settings import get_config

MOST_SLOTS = 256
"""The number of slots in which a message is sought whose id names a slot from before a re-slotting."""


def status(
    topic: str,
    body: Any = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
    id: str | None = None,  # noqa: A002 - as results of sends name it
) -> MessageStatus:
    """Return what Redis knows about a message. It is named by its body, by its ``key`` on a keyed topic, or by its ``id``.

    ``id`` is that of a ``SendResult`` or of a ``Message``; it is the only name of a message whose send gave no key.
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
    slot, member = _place(topic, name)
    found = _asked(topic, [slot], member)
    if found.state != "unknown":
        return found
    definition = connections.get_broker().definitions().get(topic.name, {})
    if "reslot" not in definition:
        return found
    counts = slot_counts(definition)
    # Most messages are where their member places them; others have a basis that the id does not tell.
    own = dict.fromkeys(slot_of(member, count) for count in counts)
    moved = _asked(topic, list(own), member)
    if moved.state == "unknown" and (
        others := _later_slots(slot, counts, former_slot_counts(definition)) - own.keys()
    ):
        moved = _asked(topic, sorted(others)[:MOST_SLOTS], member)
    return found if moved.state == "unknown" else moved


def _later_slots(slot: int, counts: Sequence[int], former: Sequence[int]) -> set[int]:
    """Return where re-slottings may have moved a message of ``slot``: the last bits of its CRC stay the same."""
    known = min((count for count in (*counts, *former) if count > slot), default=None)
    if known is None:
        return set()
    return {one for count in counts for one in range(slot % count, count, known)}


def _place(topic: Topic, name: str) -> tuple[int, bytes]:
    """Return the slot and the member of an id. Raises ``InvalidMessage``."""
    number, _, rest = name.partition(".")
    try:
        slot = int(number)
    except ValueError:
        slot = -1
    member = from_base64url(rest)
    if (
        slot >= 0
        and member is not None
        and message_id(slot, member) == name
        and (slot < topic.slots or slot < _most_slots(topic))
    ):
        return slot, member
    raise InvalidMessage(f"{name[:80]!r} is not the id of a message of topic {topic.name}")


def _most_slots(topic: Topic) -> int:
    """Return the largest number of slots that the topic has or had."""
    definition = connections.get_broker().definitions().get(topic.name)
    return max((*slot_counts(definition), *former_slot_counts(definition))) if definition else topic.slots


__all__ = ["MessageStatus", "astatus", "status"]
