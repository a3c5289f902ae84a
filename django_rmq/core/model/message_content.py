"""What a message is, by its member and its envelope: its key, its body, the basis of its slot.

A message of a fifo topic that was sent without a key has a drawn member, so that equal messages do not merge. Most of
these members hold the envelope as well: such a message is one entry of a set, as on topics without keys, and as there
its body says what SLOT_BASIS names.
"""

from __future__ import annotations

import os

from django_rmq.core.model.body_codec import decode_body
from django_rmq.core.model.envelope import (
    Envelope,
    basis_bytes,
    body_of,
    decode_envelope,
)
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidMessage

MARK = b"\xff"
"""How a drawn member begins. A key is UTF-8, so none begins like this."""
WIDTH = 16
"""The bytes of a drawn member, behind which there may be an envelope."""
_PLAIN = b"0 {}\n"
"""The head of most envelopes."""
_BODY = WIDTH + len(_PLAIN)
"""Where the body begins in most drawn members."""
LARGEST_HELD = 1024
"""The bytes of the largest envelope in a member: scripts copy members more often than envelopes."""


def draw_members(count: int) -> list[bytes]:
    """Return members that are as unlikely as UUIDs to come twice."""
    drawn = os.urandom(count * (WIDTH - 1))
    return [MARK + drawn[at : at + WIDTH - 1] for at in range(0, len(drawn), WIDTH - 1)]


def key_of(topic: Topic, member: bytes) -> str | None:
    """Return the key of a message. None: it has none."""
    if not topic.keyed or (topic.is_fifo and member.startswith(MARK)):
        return None
    return member.decode("utf-8", "replace")


def envelope_of(topic: Topic, member: bytes, stored: bytes | None) -> bytes | None:
    """Return the envelope of a message: the ``stored`` one, or else the one that its member holds. None: it has none."""
    if stored is None and topic.is_fifo and member.startswith(MARK) and member.startswith(b"0 {", WIDTH):
        return member[WIDTH:]
    return stored if topic.keyed else None


def content_of(topic: Topic, member: bytes, stored: bytes | None) -> Envelope:
    """Return the content of a message. Without an envelope the member is the body."""
    envelope = envelope_of(topic, member, stored)
    return Envelope(member) if envelope is None else decode_envelope(envelope)


def raw_body(topic: Topic, member: bytes, stored: bytes | None) -> bytes:
    """Return the body of ``content_of``, in less time."""
    if stored is None and member[WIDTH:_BODY] == _PLAIN and member.startswith(MARK) and topic.is_fifo:
        return member[_BODY:]
    envelope = envelope_of(topic, member, stored)
    return member if envelope is None else body_of(envelope)


def stored_basis(topic: Topic, member: bytes, stored: bytes | None) -> bytes | None:
    """Return the slot basis of a stored message. None: it has none, or none that can be computed again."""
    content = content_of(topic, member, stored)
    if content.slot_basis is not None:
        return content.slot_basis.encode()
    if topic.slot_basis is None or key_of(topic, member) is not None:
        return member
    try:
        return basis_bytes(decode_body(topic, content.body)[topic.slot_basis])
    except (ValueError, TypeError, LookupError, RecursionError, InvalidMessage):
        return None
