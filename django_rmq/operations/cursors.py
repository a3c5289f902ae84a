"""Cursors of lists: the place after which a list continues, as text.

They are sealed, because they contain the beginning of a member, which may be a body that the reader may not
see.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from django_rmq import opaque_ids
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.replies import Area
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest
from django_rmq.message_ids import ROUNDS, MessageIdentity, find_messages
from django_rmq.operations.filters import Filter

LONGEST_IN_CURSOR = 256
"""Maximum size in bytes of a member in a cursor; of a longer one it contains the beginning and the digest."""


class ListPosition(NamedTuple):
    """A place in a list: after ``member`` at ``score`` in ``slot``; scores are negated if the list descends."""

    block: int
    score: float
    slot: int
    member: bytes


class Order(NamedTuple):
    """The identity of a list; a cursor is valid only for the same list."""

    topic: Topic
    queue: str
    descending: bool
    wanted: Filter

    @property
    def context(self) -> bytes:
        return json.dumps(
            [
                self.topic.name,
                self.topic.slots,
                self.queue,
                self.descending,
                self.wanted.text,
                self.wanted.error,
                self.wanted.slot,
                self.wanted.priority,
            ]
        ).encode()


class _Mark(NamedTuple):
    """The content of a cursor."""

    place: ListPosition
    """The place, with the member, or its beginning if it is long."""
    digest: bytes = b""
    """The digest of a long member."""
    rank: int | None = None
    """Its rank among members of the same score."""


def seal(order: Order, place: ListPosition, rank: int | None = None) -> str:
    """Return ``place`` as text of less than 512 characters that only this deployment can read, for the same list only."""
    member, digest = place.member, b""
    if len(member) > LONGEST_IN_CURSOR:
        member, digest = member[:LONGEST_IN_CURSOR], opaque_ids.digest(member)
    head = f"{place.block} {place.score:.17g} {place.slot} {'-' if rank is None else rank} {len(digest)}\n"
    return opaque_ids.seal("cursor", order.context, head.encode() + digest + member)


def unseal(order: Order, cursor: str) -> _Mark:
    """Return what ``seal`` was given. Raises ``InvalidRequest`` for anything else."""
    text = opaque_ids.unseal("cursor", order.context, cursor)
    if text is None:
        raise InvalidRequest("the cursor does not belong to this list: start with the first page")
    head, _, rest = text.partition(b"\n")
    block, score, slot, rank, length = head.decode().split(" ")
    digest, member = rest[: int(length)], rest[int(length) :]
    place = ListPosition(int(block), float(score), int(slot), member)
    return _Mark(place, digest, None if rank == "-" else int(rank))


def resume(broker: Broker, order: Order, mark: _Mark) -> ListPosition:
    """Return the place of a cursor, with its whole member.

    If a long member is gone, the list continues with the first one that begins like it. Members with the same
    score and the same first 256 bytes may be listed again; none is left out.
    """
    place = mark.place
    if not mark.digest:
        return place
    score = -place.score if order.descending else place.score
    area = Area(order.queue, score) if mark.rank is None else Area(order.queue, score, mark.rank)
    identity = MessageIdentity(place.slot, None, mark.digest, area)
    found = find_messages(broker, order.topic, [identity], rounds=ROUNDS, queues=())
    at = found.messages.get(identity)
    if at is not None and at.member is not None:
        return place._replace(member=at.member)
    return place._replace(member=_behind(place.member)) if order.descending else place


def _behind(beginning: bytes) -> bytes:
    """Return the first text after all that begin like this."""
    cut = beginning.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else beginning + b"\xff" * LONGEST_IN_CURSOR


__all__ = ["LONGEST_IN_CURSOR", "ListPosition", "Order", "resume", "seal", "unseal"]
