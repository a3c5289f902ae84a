"""Messages of fifo topics that are sent without a key: each is a message of its own, with a drawn member."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

from django_rmq.core.model.envelope import Envelope, encode_envelope
from django_rmq.core.model.message_content import LARGEST_HELD, draw_members
from django_rmq.core.model.topic import Topic


def line_basis(topic: Topic) -> bytes | None:
    """Return the slot basis of messages that name no entity. None: their body (SLOT_BASIS) or their member decides.

    On a strict topic they stand in one line; their drawn members would scatter them.
    """
    return topic.name.encode() if topic.is_strict and topic.slot_basis is None else None


def lined_up(topic: Topic, raws: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Return the members of messages with these bodies, and their envelopes. No envelopes: the members hold them."""
    line = line_basis(topic)
    head = encode_envelope(Envelope(b"", slot_basis=None if line is None else line.decode()))
    members, envelopes = draw_members(len(raws)), [head + raw for raw in raws]
    if max(map(len, envelopes)) > LARGEST_HELD:
        return members, envelopes
    return list(map(add, members, envelopes)), []
