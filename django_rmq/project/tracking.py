"""What is known about one message: ``status``."""

from __future__ import annotations

from base64 import urlsafe_b64decode
from typing import Any

from asgiref.sync import sync_to_async

from django_rmq.core.calls import looking
from django_rmq.core.words.messages import message_id
from django_rmq.core.words.status import MessageStatus, read
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import InvalidMessage
from django_rmq.project import connections
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

    ``id`` is that of a ``SendResult`` or of a ``Message``; it is the only name of a message whose send gave no key.
    A message that ended is known on topics with KEEP_DONE, for that long. It takes one round trip.

    Raises ``InvalidMessage``, ``UnknownTopic`` or ``ServerTrouble``.
    """
    declared = get_config().topic(topic)
    if id is not None:
        places = [_place(declared, id)]
    else:
        connections.agree(declared)
        producer = connections.get_producer()
        out = producer.outgoing(declared, body, 0, key=key, slot_basis=slot_basis)
        # While the topic is being re-slotted there are two.
        places = [(slot, out.member) for slot in dict.fromkeys(producer.slots(out))]
    pipeline = connections.get_broker().pipeline()
    answers = [pipeline.add(looking.status(declared, slot, member)) for slot, member in places]
    pipeline.execute()
    found = [read(declared, *place, answer.get()) for place, answer in zip(places, answers, strict=True)]
    return next((one for one in reversed(found) if one.state != "unknown"), found[-1])


async def astatus(topic: str, body: Any = None, **options: Any) -> MessageStatus:
    """Return the same as ``status``, from a coroutine."""
    return await sync_to_async(status)(topic, body, **options)


def _place(topic: Topic, name: str) -> tuple[int, bytes]:
    """Return the slot and the member of an id. Raises ``InvalidMessage``."""
    number, _, rest = name.partition(".")
    try:
        slot, member = int(number), urlsafe_b64decode(rest + "=" * (-len(rest) % 4))
        if message_id(slot, member) == name and 0 <= slot < topic.slots:
            return slot, member
    except ValueError:
        pass
    raise InvalidMessage(f"{name[:80]!r} is not the id of a message of topic {topic.name}")


__all__ = ["MessageStatus", "astatus", "status"]
