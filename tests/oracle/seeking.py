"""Finding members by their SHA-1."""

from __future__ import annotations

from hashlib import sha1
from typing import Any

from django_rmq.core.model.replies import Area, LocateReply
from django_rmq.exceptions import ServerRefused
from tests.oracle.keyspace import SortedSet
from tests.oracle.slot import Slot, grouped, on


class Grown:
    """An area that ``find_by_digest`` searches, from its place on."""

    def __init__(self, asked: Area, scores: SortedSet) -> None:
        self.asked, self.looked = asked, asked.looked
        self._members = [
            member for member, score in scores.rows() if asked.score is None or score == asked.score
        ]
        self._place = max(0, min(asked.rank, len(self._members) - 1))

    @property
    def is_left(self) -> bool:
        """Return whether part of it was not searched."""
        place, looked, count = self._place, self.looked, len(self._members)
        return count > 0 and (place - looked >= 0 or place + looked < count)

    def grow(self, step: int) -> list[bytes]:
        """Search farther in both directions by ``step``, and return what is there."""
        place, near, far = self._place, self.looked, self.looked + step
        self.looked = far
        below = self._members[max(0, place - far + 1) : max(0, place - max(near, 1) + 1)]
        return self._members[place + near : place + far] + below


@on("store", "prepare", "retry", "dead", "claim")
def find_by_digest(slot: Slot, scan: int, max_bytes: int, digests_hex: str, *rest: Any) -> LocateReply:
    raw = bytes.fromhex(digests_hex)
    digests = [raw[i : i + 20] for i in range(0, len(raw), 20)]
    areas = [
        Area(state, None if score == "" else float(score), rank, looked)
        for state, score, rank, looked in grouped(rest, len(Area._fields))
    ]
    if len(areas) > 100:
        raise ServerRefused("ERR too many areas")
    scan = min(scan, 2_000)
    found: dict[bytes, bytes] = {}
    entries = size = 0
    grown = [Grown(area, slot.members(area.state)) for area in areas]
    step = 1
    while True:
        went_on = False
        for area in grown:
            if len(found) < len(digests) and entries < scan and size < max_bytes and area.is_left:
                for member in area.grow(step):
                    entries, size = entries + 1, size + len(member)
                    digest = sha1(member, usedforsecurity=False).digest()
                    if digest in digests:
                        found[digest] = member
                went_on = True
        if not went_on:
            break
        room = (max_bytes - size) * entries // max(size, 1) // 2
        step = max(1, min(step * 2, 64, room))
    left = [area.asked._replace(looked=area.looked) if area.is_left else None for area in grown]
    return LocateReply([found.get(digest) for digest in digests], left)
