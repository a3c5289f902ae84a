"""The identity of a message: which sends are one message.

Sends with the same topic, slot and member are one message. IDENTITY, an option of the topic, decides what the member is:

- "body": the bytes of the body. Equal bodies are equal bytes, because ``core.model.body_codec`` writes each value in one way
  only: ``{"a": 1, "b": 2}`` and ``{"b": 2, "a": 1}`` are one message.
- "key": the key. A send without a key draws a member of its own, so it is another message.

What becomes of a send whose message is there already is decided in Redis: ``lua/slot/_duplicates.lua`` says whether it is stored,
merged or refused, and which of the two scores counts.
"""

from __future__ import annotations

import os

from django_rmq.core.model.body_codec import encode_body
from django_rmq.core.model.bounds import MAX_KEY_BYTES, abbreviated
from django_rmq.core.model.envelope import MARK, WIDTH
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidMessage


def member_of_send(topic: Topic, raw: bytes, key: object) -> bytes:
    """Return the member of a send with the encoded body ``raw``. Sends with the same one are one message."""
    if topic.identity == "body":
        return raw
    return draw_members(1)[0] if key is None and topic.is_fifo else check_key(key)


def member_of(topic: Topic, body: object, key: object) -> bytes:
    """Return the member of an existing message: of ``body``, or of ``key`` on a keyed topic."""
    if topic.keyed:
        if key is None:
            raise InvalidMessage(f"topic {topic.name} has IDENTITY 'key': pass key= or id=")
        return check_key(key)
    if key is not None:
        raise InvalidMessage(f"topic {topic.name} has IDENTITY 'body': pass the body, not key=")
    return encode_body(topic, body)


def check_key(key: object) -> bytes:
    """Return a key as the member that Redis holds; without a key, a generated one."""
    if key is None:
        # As unlikely to come twice as a UUID, and made in a third of the time.
        return os.urandom(16).hex().encode()
    if not isinstance(key, str) or not key:
        raise InvalidMessage(f"key must be a non-empty str, got {abbreviated(key)}")
    try:
        member = key.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(f"key {key!r} is not valid Unicode") from None
    if len(member) > MAX_KEY_BYTES:
        raise InvalidMessage(f"key has {len(member)} bytes, more than {MAX_KEY_BYTES}")
    return member


def draw_members(count: int) -> list[bytes]:
    """Return random members, which are as unlikely as UUIDs to occur twice."""
    drawn = os.urandom(count * (WIDTH - 1))
    return [MARK + drawn[at : at + WIDTH - 1] for at in range(0, len(drawn), WIDTH - 1)]
