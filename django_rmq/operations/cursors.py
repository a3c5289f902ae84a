"""Cursors of lists: the place behind which a list goes on, as text.

They are sealed, for they hold the beginning of a member, which may be a body that the reader may not see.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from django_rmq.core.calls.broker import Broker
from django_rmq.core.words.answers import Area
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import InvalidRequest
from django_rmq.operations.filters import Filter
from django_rmq.operations.ids import ROUNDS, Identity, find_members
from django_rmq.project import sealing

LONGEST_IN_CURSOR = 256
"""Bytes of the longest member that a cursor holds; of a longer one it holds the beginning and the digest."""


class Place(NamedTuple):
    """A place in a list: behind ``member`` at ``score`` in ``slot``; scores negated where the list descends."""

    block: int
    score: float
    slot: int
    member: bytes


class Order(NamedTuple):
    """What a list is a list of; a cursor is good for the same only."""

    topic: Topic
    state: str
    descending: bool
    wanted: Filter

    @property
    def context(self) -> bytes:
        return json.dumps(
            [
                self.topic.name,
                self.topic.slots,
                self.state,
                self.descending,
                self.wanted.text,
                self.wanted.error,
                self.wanted.slot,
            ]
        ).encode()


class _Mark(NamedTuple):
    """What a cursor says of the place behind which a list goes on."""

    place: Place
    """With the member, or its beginning where it is long."""
    digest: bytes = b""
    """Of a long member."""
    rank: int | None = None
    """That it had among those of the same score."""


def seal(order: Order, place: Place, rank: int | None = None) -> str:
    """Return ``place`` as text of less than 512 characters that only this deployment can read, for the same list only."""
    member, digest = place.member, b""
    if len(member) > LONGEST_IN_CURSOR:
        member, digest = member[:LONGEST_IN_CURSOR], sealing.digest(member)
    head = f"{place.block} {place.score:.17g} {place.slot} {'-' if rank is None else rank} {len(digest)}\n"
    return sealing.seal("cursor", order.context, head.encode() + digest + member)


def unseal(order: Order, cursor: str) -> _Mark:
    """Return what ``seal`` wrote. Raises ``InvalidRequest`` for anything else."""
    text = sealing.unseal("cursor", order.context, cursor)
    if text is None:
        raise InvalidRequest("the cursor is not one of this list: begin with the first page")
    head, _, rest = text.partition(b"\n")
    block, score, slot, rank, length = head.decode().split(" ")
    digest, member = rest[: int(length)], rest[int(length) :]
    place = Place(int(block), float(score), int(slot), member)
    return _Mark(place, digest, None if rank == "-" else int(rank))


def resume(broker: Broker, order: Order, mark: _Mark) -> Place:
    """Return the place of a cursor, with its whole member.

    Where a long member is gone, the list goes on with the first that begins as it did: what is alike in its first 256
    bytes, and of the same score, may be listed again, and nothing is left out.
    """
    place = mark.place
    if not mark.digest:
        return place
    score = -place.score if order.descending else place.score
    area = Area(order.state, score) if mark.rank is None else Area(order.state, score, mark.rank)
    identity = Identity(place.slot, None, mark.digest, area)
    found = find_members(broker, order.topic, [identity], rounds=ROUNDS, states=())
    member = found.members.get(identity)
    if member is not None:
        return place._replace(member=member)
    return place._replace(member=_behind(place.member)) if order.descending else place


def _behind(beginning: bytes) -> bytes:
    """Return the first text behind all that begin so."""
    cut = beginning.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else beginning + b"\xff" * LONGEST_IN_CURSOR


__all__ = ["LONGEST_IN_CURSOR", "Order", "Place", "resume", "seal", "unseal"]
